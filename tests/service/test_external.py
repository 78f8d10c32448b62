"""External prompts, rewards and trainers: valid requests reach the run, invalid ones change nothing."""

from __future__ import annotations

import asyncio
import hashlib
import json
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load, save
from tests.service.fake_run import FakeRun, disconnect_after, error_message
from torch import Tensor

from dora.core.events import PromptsFetched
from dora.core.types import GroupId, RequestId
from dora.model.pretrained import load_pretrained
from dora.model.weights import WeightLayout, weight_digest
from dora.runtime.process import messages as m
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.process.worker_process import preload_workers, receive
from dora.runtime.scoring.external import ExternalRewards
from dora.runtime.training.external import ExternalTrainer
from dora.stream.run_stream import RunStream
from dora.stream.sample_db import FinishedSample, Trajectory
from dora.weights.store import WeightStore

PACKED = (
    "model.layers.0.mlp.experts.gate_up_proj"  # a checkpoint name that the loader splits into many tensors
)
GROUPS = (GroupId(0, 3), GroupId(0, 1))  # of the first batch, in the order of commitment


class ExternalRun(FakeRun):
    """A fake run with external prompts, rewards and trainer; each trained version is published at once."""

    def __init__(self, folder: Path) -> None:
        preload_workers()
        super().__init__(folder, service__trainer="external", data__path='"service"')
        store = WeightStore(folder / "store")
        store.folder.mkdir()
        self.stream = RunStream(store.folder / "stream", self.setup.limits.group_size)
        responses = [FinishedSample(k, np.full(k + 1, 2, np.int32), None, False, {}, 0) for k in range(2)]
        self.rewards = ExternalRewards(
            "reward",
            120.0,
            "reward.timeout_s",
            DriverClock(),
            lambda group: responses,
        )
        spec = self.setup.trainer_spec(store.folder, self.stream.folder)
        self.trainer = ExternalTrainer(spec, self.setup.limits.batch_size, self.messages)
        self.context.external_trainer = self.trainer
        self.context.external_rewards = {"reward": self.rewards}
        self.context.stream_dir, self.context.weights_dir = self.stream.folder, store.folder
        self.trainer_messages: list[object] = []
        self._is_over, self._has_begun = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._drive)
        self._thread.start()
        assert self._has_begun.wait(60.0)

    def _drive(self) -> None:
        while not self._is_over.is_set():
            for _, message in receive(self.messages, 0.05):
                self.trainer_messages.append(message)
                match self.trainer.on_message(message):
                    case m.WorkerReady():
                        self.trainer.send(m.PublishWeights(0))
                    case m.StepCompleted(step):
                        self.trainer.send(m.PublishWeights(step + 1))
                    case m.WeightsPublished():
                        self._has_begun.set()
            self.process()

    def commit(self, *groups: GroupId, **changes: Any) -> None:
        """Finish, score and commit groups of the first step; the second response has two tokens."""
        for group in groups:
            for k in range(2):
                sample = Trajectory(RequestId(*group, k), 0, "ab", [1], [2] * (k + 1), [-0.1] * (k + 1))
                self.stream.put(sample._replace(**changes))
            self.stream.score(group, [0.0, 1.0], [-1.0, 1.0])
            self.stream.flush()
            self.trainer.send(m.AccumulateGroup(0, group))

    def make_due(self) -> None:
        """Complete the batch of the first step, which then waits for weights."""
        self.commit(*GROUPS)
        self.trainer.send(m.TrainStep(0, GROUPS))

    def weights(self) -> dict[str, Tensor]:
        """The tensors of version 0."""
        config, flat = load_pretrained(Path(self.setup.config.model.path))
        return WeightLayout(config).views(flat)

    def put_weights(self, body: bytes, version: int = 1, **query: Any) -> httpx.Response:
        query = {"sha256": hashlib.sha256(body).hexdigest()} | query
        return self.call("PUT", f"/v1/weights/{version}", params=query, content=body)

    def close(self) -> None:
        self._is_over.set()
        self._thread.join()
        self.trainer.kill()
        self.stream.close()


@pytest.fixture
def run(folder: Path) -> Iterator[ExternalRun]:
    with closing(ExternalRun(folder)) as run:
        yield run


def json_lines(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    return [json.loads(line) for line in response.text.splitlines()]


def put_prompts(run: ExternalRun, first: int, *prompts: object) -> httpx.Response:
    return run.call("POST", "/v1/prompts", json={"first": first, "rows": [{"prompt": p} for p in prompts]})


def test_prompts_are_added_once_and_fetched_in_order(run: ExternalRun) -> None:
    assert run.context.prompts.fetch(3) == []
    counts = {"num_prompts": 2, "num_fetched": 2, "num_wanted": 1}
    for _ in range(2):  # a repeated request, as after a lost response, adds nothing
        assert put_prompts(run, 0, "1:", "2:").json() == counts
    assert put_prompts(run, 2, "3:", "4:").json()["num_fetched"] == 3
    assert [*run.context.events] == [
        PromptsFetched(0, (GroupId(0, 0), GroupId(0, 1))),
        PromptsFetched(2, (GroupId(0, 2),)),
    ]
    assert run.setup.dataset.prompt(2) == "3:"


def test_invalid_prompts_change_nothing(run: ExternalRun) -> None:
    put_prompts(run, 0, "1:")
    assert "upload the prompts that follow" in error_message(put_prompts(run, 0, "2:"), 409)
    assert "the run has 1 prompts" in error_message(put_prompts(run, 5, "2:"), 409)
    assert "30 tokens" in error_message(put_prompts(run, 1, "2:", "1:" * 15), 400)
    assert "must be a string" in error_message(put_prompts(run, 1, 7), 400)
    for invalid in ({}, {"first": 1, "rows": []}, {"first": "1", "rows": [{"prompt": "a"}]}):
        error_message(run.call("POST", "/v1/prompts", json=invalid), 422)
    assert run.call("GET", "/v1/prompts").json()["num_prompts"] == 1
    assert (run.setup.out / "prompts.jsonl").read_text() == '{"prompt": "1:"}\n'


def test_a_batch_is_sent_group_by_group_as_it_is_committed(run: ExternalRun) -> None:
    run.commit(GROUPS[0])
    fields = {"fields": "reward,token_ids,routes", "wait_s": 0}
    first, end = json_lines(run.call("GET", "/v1/batches/0", params=fields))
    assert first == {
        "group": "0/3",
        "fields": {"reward": [0.0, 1.0], "token_ids": [[2], [2, 2]], "routes": [None, None]},
    }
    assert end == {"is_complete": False, "num_groups": 1}
    run.commit(GROUPS[1])
    second, end = json_lines(run.call("GET", "/v1/batches/0", params={"after": 1}))
    assert (second["group"], second["fields"]["version"]) == ("0/1", [0, 0])
    assert second["fields"]["finish_reason"] == [None, None]
    assert second["fields"]["turn_rewards"] == [[], []]
    assert end == {"is_complete": True, "num_groups": 2}
    assert (
        len(json_lines(run.call("GET", "/v1/batches/0"))) == 3
    )  # a client that lost the response may repeat the request


def test_a_batch_request_ends_when_its_client_disconnects(run: ExternalRun) -> None:
    assert disconnect_after(run.app, "GET", "/v1/batches/0", wait_s="60") == 200


def test_an_episode_has_one_log_prob_for_each_token(run: ExternalRun) -> None:
    turns: Any = {"token_ids": [2, 3, 4, 5], "logprobs": [-0.5, 0.0, 0.0, -0.25], "loss_mask": [1, 0, 0, 1]}
    run.commit(GROUPS[0], **turns)
    fields = {"fields": "token_ids,logprobs,loss_mask", "wait_s": 0}
    group, _ = json_lines(run.call("GET", "/v1/batches/0", params=fields))
    assert group["fields"] == {
        "token_ids": [[2, 3, 4, 5]] * 2,
        "logprobs": [[-0.5, 0.0, 0.0, -0.25]] * 2,
        "loss_mask": [[1, 0, 0, 1]] * 2,
    }


def test_invalid_batch_requests_are_refused(run: ExternalRun) -> None:
    assert "name 2 must be one of" in error_message(
        run.call("GET", "/v1/batches/0?fields=reward,logits"), 422
    )
    assert "step 0 has 0 groups so far" in error_message(run.call("GET", "/v1/batches/0?after=1"), 422)
    assert "the run has 4 steps" in error_message(run.call("GET", "/v1/batches/4"), 404)
    assert "step 1 comes later; the next is 0" in error_message(run.call("GET", "/v1/batches/1"), 409)
    run.make_due()
    run.put_weights(save(run.weights()))
    assert "step 0 is trained already; the next is 1" in error_message(run.call("GET", "/v1/batches/0"), 410)


def test_weights_end_the_step_and_have_the_digest_of_the_published_version(run: ExternalRun) -> None:
    run.make_due()
    changed = {name: tensor + 0.5 for name, tensor in run.weights().items()}
    answers = [run.put_weights(save(changed), metrics='{"loss": 0.25}').json() for _ in range(2)]
    assert (
        answers[0]
        == answers[1]
        == {
            "version": 1,
            "digest": weight_digest(torch.cat([tensor.flatten() for tensor in changed.values()])),
        }
    )
    assert [message for message in run.trainer_messages if isinstance(message, m.StepCompleted)] == [
        m.StepCompleted(0, {"external/loss": 0.25})
    ]
    fetched = load(run.call("GET", "/v1/weights/1").content)
    assert all(torch.equal(fetched[name], tensor) for name, tensor in changed.items())
    assert [*(run.setup.out / "incoming" / "parts").iterdir()] == []
    assert run.call("GET", "/v1/training").json()["step"] == 1


def test_invalid_weights_change_nothing(run: ExternalRun) -> None:
    weights = run.weights()
    name, tensor = next(iter(weights.items()))
    bad = {
        "contains nan or inf": weights | {name: tensor * float("nan")},
        "is F64": weights | {name: tensor.double()},
        f"tensor {name} has shape": weights | {name: tensor[1:].clone()},
        "missing none (0), extra ['more']": weights | {"more": torch.ones(1)},
        f"missing ['{name}'] (1)": {key: value for key, value in weights.items() if key != name},
        "cannot be read as weights": weights | {PACKED: torch.tensor(1.0)},
        "the file cannot be read as weights": weights | {PACKED: torch.ones(4)},
    }
    good = save(weights)
    assert "the next is 1" in error_message(run.put_weights(good), 409)
    run.make_due()
    for reason, tensors in bad.items():
        assert reason in error_message(run.put_weights(save(tensors)), 422)
    assert "cannot be read" in error_message(run.put_weights(b"no tensors"), 422)
    assert "truncated or changed" in error_message(
        run.put_weights(good[:-1], sha256=hashlib.sha256(good).hexdigest()), 422
    )
    error_message(run.put_weights(good, sha256="../../etc/passwd"), 422)
    error_message(run.put_weights(good, metrics='{"loss": NaN}'), 422)
    assert "at most" in error_message(run.put_weights(bytes(run.setup.upload_bytes + 1)), 413)
    assert "version 2 cannot be published" in error_message(run.put_weights(good, version=2), 409)
    assert run.trainer.due_step == 0
    assert run.put_weights(good).json()["version"] == 1
    assert "is published already" in error_message(
        run.put_weights(save({n: t + 1 for n, t in weights.items()})), 409
    )


def test_weights_that_are_not_due_are_refused_before_their_body_is_read(run: ExternalRun) -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    query = {"sha256": "0" * 64}
    assert "the next is 1" in error_message(
        run.call("PUT", "/v1/weights/1", params=query, content=never()), 409
    )
    assert not (run.setup.out / "incoming").exists()


def test_one_upload_is_received_at_a_time(run: ExternalRun) -> None:
    run.make_due()
    body, parts = save(run.weights()), run.setup.out / "incoming" / "parts"
    num_parts: list[int] = []

    async def slowly() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 1000):
            num_parts.append(len([*parts.iterdir()]))
            yield body[start : start + 1000]

    async def requests(http: httpx.AsyncClient) -> httpx.Response:
        query = {"sha256": hashlib.sha256(body).hexdigest()}
        puts = [http.put("/v1/weights/1", params=query, content=slowly()) for _ in range(3)]
        answers = await asyncio.gather(*puts)
        assert [answer.status_code for answer in answers] == [200] * 3, answers[1].text
        return answers[0]

    assert run.call_many(requests).json()["version"] == 1
    assert max(num_parts) == 1


def test_weights_in_a_file_of_the_run_are_announced_instead_of_uploaded(run: ExternalRun) -> None:
    run.make_due()
    body, folder = save(run.weights()), run.setup.out / "incoming"
    folder.mkdir()
    (folder / "v1").write_bytes(body)
    (folder / "link").symlink_to(run.setup.config.model.path + "/model.safetensors")
    request = {"version": 1, "file": "v1", "sha256": hashlib.sha256(body).hexdigest()}

    def announce(**changes: object) -> httpx.Response:
        return run.call("POST", "/v1/weight_sync", json=request | changes)

    for name in ("../config.json", "/etc/passwd", "..", "parts/x", ""):
        error_message(announce(file=name), 422)
    for name in ("link", "v2"):
        assert "has no such file" in error_message(announce(file=name), 404)
    assert "write the whole file" in error_message(announce(sha256="0" * 64), 422)
    with (folder / "long").open("wb") as file:
        file.truncate(run.setup.upload_bytes + 1)
    assert "at most" in error_message(announce(file="long"), 413)
    assert [*(folder / "parts").iterdir()] == []
    assert announce().json()["version"] == 1


def test_a_version_that_is_not_stored_cannot_be_fetched(run: ExternalRun) -> None:
    assert "version 9 is not stored" in error_message(run.call("GET", "/v1/weights/9"), 404)


def test_rewards_are_submitted_for_a_leased_group(run: ExternalRun) -> None:
    async def requests(http: httpx.AsyncClient) -> httpx.Response:
        waiting = asyncio.ensure_future(http.get("/v1/experience/reward", params={"wait_s": 60}))
        await http.get("/v1/prompts")  # until the first request waits
        run.rewards.add(GROUPS[0], b'["1:", {"answer": 1}]')
        return await waiting

    assert run.call("GET", "/v1/experience/reward").json()["leased_group"] is None
    assert disconnect_after(run.app, "GET", "/v1/experience/reward", wait_s="60") == 200
    leased = run.call_many(requests).json()["leased_group"]
    assert (leased["group"], leased["prompt"], leased["columns"]) == ("0/3", "1:", {"answer": 1})
    assert leased["token_ids"] == [[2], [2, 2]]
    assert leased["finish_reasons"] == [None, None]
    assert leased["texts"] == [run.setup.tokenizer.decode(ids) for ids in leased["token_ids"]]

    def put(lease: int = leased["lease"], **fields: object) -> httpx.Response:
        return run.call("POST", "/v1/experience/reward", json={"lease": lease, "fields": fields})

    for invalid in ({"value": [0.0, 1.0]}, {"reward": ["0", "1"]}, {"reward": 1.0}, {}):
        error_message(put(**invalid), 422)
    error_message(put(reward=[0.0, 1.1e6]), 422)
    assert "1 rewards for 2 responses" in error_message(put(reward=[1.0]), 422)
    assert "lease 99 has expired or never existed" in error_message(put(99, reward=[0.0, 1.0]), 410)
    assert [put(reward=[0.0, 1.0]).json() for _ in range(2)] == [{"lease": leased["lease"]}] * 2
    assert run.rewards.pop_accepted() == [(GROUPS[0], (0.0, 1.0))]
    assert "the external ones are: reward" in error_message(run.call("GET", "/v1/experience/taste"), 404)


def test_a_run_without_external_parts_refuses_their_requests(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    for path in ("/v1/training", "/v1/batches/0"):
        assert "an internal trainer" in error_message(run.call("GET", path), 409)
    rows = {"first": 0, "rows": [{"prompt": "1:"}]}
    assert "come from data.path" in error_message(run.call("POST", "/v1/prompts", json=rows), 409)
    assert "no external reward task" in error_message(run.call("GET", "/v1/experience/reward"), 404)
