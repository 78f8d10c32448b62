"""The contract on real servers, by `make test-vllm VLLM_PYTHON=...` or `make test-sglang SGLANG_PYTHON=...`.

The other tests use fake servers with made-up or recorded answers.
"""

from __future__ import annotations

import itertools
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil
import pytest
from tests.contract.lora import CONFIG as LORA_CONFIG
from tests.contract.lora import RANK, lora_weights
from tests.docs.blocks import ROOT, commands
from tests.model.transformers_families import save_tiny
from tests.runtime.running import dora, journal, metrics, settings, summary, wait_until, wait_until_gone
from torch import Tensor

from dora.engine.backends import http_engine
from dora.engine.backends.server_plugins.dora_kv_files import HEADER_BYTES
from dora.engine.backends.sglang import Sglang, SglangLora
from dora.engine.backends.vllm import NIXL_LEASE_S, Vllm, VllmLora
from dora.engine.engine import Engine as OwnEngine
from dora.engine.interface import Capabilities
from dora.engine.messages import ExportFailed, ExportFinished, ImportFinished
from dora.engine.request import Completion, EngineError, Request
from dora.errors import RunError
from dora.journal.reader import read_samples
from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained, save_pretrained
from dora.model.weights import initial_weights, weight_digest
from dora.testing import CONFIG, make_request, version_weights
from dora.testing.engine_contract import MAX_CONTEXT, MAX_ROWS, InferenceContract, MigrationDriver
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample, TrainerSettings

Engine: type[Vllm] | type[Sglang] = Sglang if "SGLANG_PYTHON" in os.environ else Vllm
PYTHON = os.environ["SGLANG_PYTHON" if Engine is Sglang else "VLLM_PYTHON"]
NAME = Engine.server_kind.name.lower()  # of its page, and of the environment on that page
PAGE = [line for block, line in commands() if block.page == f"docs/{NAME}.md"]
ONE_VERSION = {  # of a server
    "engine.version_slots": 1,
    "orchestrator.placement": "static",
    "orchestrator.prioritize_stragglers": "false",
}
EXAMPLE = ROOT / "examples" / "gcd.toml"
LONG_CONTEXT = 2048  # of responses that last for the time of a migration
LONG_CONFIG = replace(CONFIG, max_position_embeddings=LONG_CONTEXT)
OTHER_MODELS = ("qwen3_moe", "gemma3_text", "olmo2", "phi3")
ENGINES: dict[object, Vllm | Sglang] = {}  # each server takes half a minute to start


class Attached:
    """Has the signature of a backend.

    Engines of one dtype and number of version slots use the same server, one after another, and those with a
    second pool a second one.
    """

    capabilities: ClassVar[Capabilities] = Engine.capabilities

    def __new__(  # type: ignore[misc]
        cls, *, model: str, dtype: str, version_slots: int, pool: Path | None = None, **options: Any
    ) -> Vllm | Sglang:
        key = dtype, version_slots, "pool-0" if pool is None else pool.name
        options["version_slots"] = version_slots
        if cls.capabilities.kv_transfer:
            options["pool"] = pool or Path(model) / "server-pool"
        if key not in ENGINES:
            ENGINES[key] = Engine(model=model, dtype=dtype, python=PYTHON, **options)
        server = ENGINES[key].server
        os.environ[server.kind.token_variable] = server.auth_token
        return Engine(model=model, dtype=dtype, url=server.url, **options)


def make_engine(
    kind: Callable[..., Any], folder: Path, max_context: int = MAX_CONTEXT, **options: Any
) -> Any:
    """An engine of the model of the contract, which this writes to the folder."""
    max_positions = max(max_context, CONFIG.max_position_embeddings)
    save_pretrained(
        folder / "model", replace(CONFIG, max_position_embeddings=max_positions), version_weights(0)
    )
    given = {"max_rows": MAX_ROWS, "version_slots": 1, "device": "cpu", "dtype": "float32"} | options
    return kind(model=str(folder / "model"), max_context=max_context, **given)


@pytest.fixture(autouse=True, scope="module")
def close_servers() -> Iterator[None]:
    yield
    for engine in ENGINES.values():
        engine.close()


@pytest.mark.timeout(300)
class TestReal(InferenceContract):
    """On a CPU."""

    factory = Attached
    tolerance = 1e-3


@pytest.mark.timeout(900)
@pytest.mark.parametrize("line", [line for line in PAGE if line.startswith("dora train")])
def test_the_commands_of_the_page_train(line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With few steps and evaluation prompts, and no engine lost in an evaluation or a step."""
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / NAME).symlink_to(Path(PYTHON).absolute().parent.parent)
    monkeypatch.chdir(tmp_path)
    few = ("--steps", "3", "--set", "eval.num_prompts=16", "--set", "runtime.start_timeout_s=600")
    ended = dora(*shlex.split(line)[1:], *few, "--out", "run", timeout_s=800)
    assert ended.code == 0, ended.err
    assert " lost (" not in ended.out + ended.err
    found = summary(tmp_path / "run")
    assert (found["steps"], found["c1"], found["c2"], found["c3"]) == (3, True, True, True)
    assert [evaluation["version"] for evaluation in found["evaluations"]] == [0, 3]


def server_settings(options: str = "") -> dict[str, object]:
    """Of a run that starts servers with these options."""
    return {
        "engine.backend": NAME,
        "engine.options": f"{{python = {json.dumps(PYTHON)}{options}}}",
        "runtime.start_timeout_s": 600,
    }


def train(folder: Path, changes: dict[str, object]) -> Path:
    """The folder of a run of the example that has lost no engine."""
    arguments = settings(server_settings() | changes)
    ended = dora("train", EXAMPLE, *arguments, "--out", folder / "run", timeout_s=800)
    assert ended.code == 0, ended.err
    assert " lost (" not in ended.out + ended.err
    return folder / "run"


@pytest.mark.timeout(900)
def test_a_server_with_two_versions_trains(tmp_path: Path) -> None:
    """It decodes requests of both, and first those that the trainer waits for."""
    changes = {"engine.version_slots": 2, "orchestrator.prioritize_stragglers": "true"}
    out = train(tmp_path, {**changes, "run.steps": 8, "eval.num_prompts": 0})
    audited = dora("audit", out, "--deep", "16", timeout_s=300)
    assert audited.code == 0, audited.out
    assert "decode_only" in {line.get("kind") for line in journal(out)}


@pytest.mark.timeout(900)
def test_an_evaluation_is_sampled_with_filters(tmp_path: Path) -> None:
    """And training, where the server reports log-probs before filters; the mean reward shows the filters."""
    filters = {"top_k": 8, "top_p": 0.8, "min_p": 0.05}
    changes = {f"eval.{key}": value for key, value in filters.items()} | {"eval.num_samples": 4}
    small = {"engine.num_engines": 1, "eval.num_prompts": 32, **changes}
    evaluated = dora(
        "eval", EXAMPLE, *settings(server_settings() | small), "--out", tmp_path / "a", timeout_s=400
    )
    assert evaluated.code == 0, evaluated.err
    (found,) = summary(tmp_path / "a")["evaluations"]
    assert found["reward_mean"] > 0.7  # 0.3 without filters
    if Engine is Vllm:
        return
    trained = {f"sampling.{key}": value for key, value in filters.items()}
    out = train(tmp_path, {"run.steps": 3, "engine.num_engines": 1, "eval.num_prompts": 0, **trained})
    audited = dora("audit", out, "--deep", "16", timeout_s=300)
    assert audited.code == 0, audited.out
    assert summary(out)["logprob_mismatch_max"] < 1e-4


@pytest.mark.timeout(900)
def test_servers_of_a_ray_cluster_train(tmp_path: Path) -> None:
    """A cluster of this machine."""
    sizes = {"engine.num_engines": 2, "engine.version_slots": 2, "run.steps": 8, "eval.num_prompts": 16}
    out = train(tmp_path, {"runtime.kind": "ray", **sizes})
    audited = dora("audit", out, "--deep", "16", timeout_s=300)
    assert audited.code == 0, audited.out


@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", ["partial", "inflight"])
def test_requests_continue_with_newer_versions(policy: str, tmp_path: Path) -> None:
    """Their samples have segments of several versions, and only `partial` prefills them again."""
    out = train(tmp_path, {"orchestrator.update_policy": policy, "run.steps": 6, "eval.num_prompts": 16})
    audited = dora("audit", out)
    assert audited.code == 0, audited.out
    found = summary(out)
    assert found["segmented_samples"] > 0
    assert (found["reprefill_tokens"] > 0) == (policy == "partial")


@pytest.mark.timeout(900)
def test_outside_agents_run_episodes_of_several_turns(tmp_path: Path) -> None:
    """By the command of the page, with few steps. Every log-prob is that of the weights of its version."""
    (line,) = [line for line in PAGE if line.startswith("dora serve")]
    (tmp_path / NAME).symlink_to(Path(PYTHON).absolute().parent.parent)
    few = ("--set", "run.steps=4", "--set", "runtime.start_timeout_s=600")
    command = shlex.split(line.replace("examples/", f"{ROOT}/examples/"))[1:]
    with subprocess.Popen([sys.executable, "-m", "dora", *command, *few], cwd=tmp_path) as serving:
        run = tmp_path / "runs" / "agents"
        wait_until(lambda: (run / "service.json").exists() or serving.poll() is not None)
        subprocess.run([sys.executable, ROOT / "examples" / "external_agent.py", run], check=True)
        assert serving.wait() == 0
    masks = [sample.loss_mask_length for sample in read_samples(run).values()]
    assert any(mask is not None for mask in masks), "some episodes have observations"
    audited = dora("audit", "--deep", "64", run)
    assert audited.code == 0, audited.out


def is_busy(out: Path) -> bool:
    """Whether a run has steps, and both engines have reported tokens of unfinished requests."""
    reports = [event for event in journal(out) if event["kind"] == "progress_reported"]
    num_tokens = {event["engine"]: sum(num for _, num in event["lengths"]) for event in reports}
    return len(metrics(out)) >= 3 and min(num_tokens.values()) >= 64


@pytest.mark.timeout(900)
def test_requests_continue_after_their_server_is_killed(tmp_path: Path) -> None:
    """On the other server, with the tokens that they had reported. All log-probs are those of the weights."""
    pace = ", min_step_s = 0.01" if Engine is Vllm else ""  # so that requests last longer than the kill takes
    changes = {
        **server_settings(pace),
        "engine.num_engines": 2,
        "run.steps": 8,
        "eval.num_prompts": 16,
        "runtime.output_interval_s": 0.1,
        **({} if Engine is Vllm else ONE_VERSION),
    }
    out = tmp_path / "run"
    command = [sys.executable, "-m", "dora", "train", str(EXAMPLE), *settings(changes), "--out", str(out)]
    with subprocess.Popen(command) as training:
        wait_until(lambda: is_busy(out) or training.poll() is not None, timeout_s=800)
        children = psutil.Process(training.pid).children(recursive=True)
        runner, _ = (p for p in children if any(part.endswith("run_until_eof.py") for part in p.cmdline()))
        runner.children()[0].kill()
        assert training.wait() == 0
    audited = dora("audit", "--deep", "64", out)
    assert audited.code == 0, audited.out
    found = summary(out)
    assert (found["steps"], found["engine_failures"]) == (8, 1)
    assert found["kept_tokens"] > 0


@pytest.mark.timeout(300)
def test_a_server_ends_with_the_process_of_its_engine(tmp_path: Path) -> None:
    """Even if that process is killed."""
    save_pretrained(tmp_path / "model", CONFIG, version_weights(0))
    body = (
        "import time\n"
        f"from {Engine.__module__} import {Engine.__name__} as Engine\n"
        f"engine = Engine(model={str(tmp_path / 'model')!r}, max_rows={MAX_ROWS}, max_context={MAX_CONTEXT},"
        f" version_slots=1, device='cpu', dtype='float32', python={PYTHON!r})\n"
        "print(engine.kernels, flush=True)\n"
        "time.sleep(600)\n"
    )
    with subprocess.Popen([sys.executable, "-c", body], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        assert owner.stdout.readline().startswith(("vLLM ", "SGLang "))
        children = psutil.Process(owner.pid).children(recursive=True)
        assert len(children) >= 3, "run_until_eof, the server and its engine process"
        assert not any(child.name().startswith("VLLM::Worker") for child in children), "it is in the engine's"
        owner.send_signal(signal.SIGKILL)
    assert wait_until_gone(children) == []


@pytest.mark.timeout(300)
def test_weights_never_change_during_an_aborted_request(tmp_path: Path) -> None:
    """Each round aborts requests at once and loads the next version."""
    engine = make_engine(Attached, tmp_path)
    for version in 10 * [0, 1]:
        engine.load(version, version_weights(version))
        engine.submit([make_request(number, version=version) for number in range(2 * MAX_ROWS)])
        engine.step()
        engine.abort([make_request(number).id for number in range(1, 2 * MAX_ROWS)])
        answers: list[Completion] = []
        while not answers:
            answers = engine.step()
        assert [answer.version for answer in answers] == [version]
        engine.drop(version)


@pytest.mark.timeout(300)
@pytest.mark.skipif(Engine is Sglang, reason="SGLang has no such protocol")
def test_versions_arrive_by_vllms_own_weight_transfer(tmp_path: Path) -> None:
    """A process with vLLM sends them. After a file that cannot be read, the next version arrives."""
    engine = make_engine(Vllm, tmp_path, python=PYTHON, weight_transfer="file")
    with pytest.raises(EngineError, match="has not received the weights: "):
        engine._sender.send(tmp_path / "no.safetensors")
    for version in range(3):
        assert engine.load(version, version_weights(version)) == weight_digest(version_weights(version))
        engine.submit([make_request(version, version=version, max_tokens=40)])
        answers: list[Completion] = []
        while not answers:
            answers = engine.step()
        (answer,) = answers
        check_logprobs(answer)
        engine.drop(version)
    engine.close()


@pytest.mark.timeout(300)
def test_kv_that_is_damaged_after_the_import_is_committed_is_prefilled_again(tmp_path: Path) -> None:
    """The server, which reads it last, finds the damage; the answer has the log-probs of the weights."""
    source, destination = (
        make_engine(Attached, tmp_path, pool=tmp_path / f"pool-{number}") for number in range(2)
    )
    for engine in (source, destination):
        engine.load(0, version_weights(0))
    driver, request = MigrationDriver(tmp_path), make_request(0, max_tokens=MAX_CONTEXT - 9)
    source.submit([request])
    driver.step_until_first_token(source, request)
    destination.pause()  # so that it does not read the KV yet
    replies = driver.migrate(request, source, destination, source.kv_pool)
    assert [reply.num_prefilled for reply in replies if isinstance(reply, ImportFinished)] == [0]
    (path,) = (tmp_path / "pool-1").glob("*/*.kv")
    with path.open("r+b") as file:
        file.seek(HEADER_BYTES)
        file.write(4096 * b"\xff")  # NaN, which would be in every log-prob
    destination.resume()
    check_logprobs(driver.finish(destination, request))


@pytest.mark.timeout(600)
def test_a_server_generates_between_the_parts_of_a_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each part is sent once a request of an old version has got more tokens since the last part.

    Requests of two old versions share steps, while the slot before theirs is loaded.
    """
    monkeypatch.setattr(http_engine, "LOAD_PART_BYTES", 2**12)
    old = [make_request(number, version=number, max_tokens=LONG_CONTEXT - 9) for number in (1, 2)]
    new = make_request(3, version=3, max_tokens=99)
    with closing(make_long_server(tmp_path, 0, 3)) as engine:
        for version in range(3):
            engine.load(version, version_weights(version))
        engine.drop(0)
        driver, call, lengths = MigrationDriver(tmp_path), engine.server.call, list[int]()

        def call_after_progress(path: str, body: Any = None, *timeout_s: float) -> Any:
            if path in ("/collective_rpc", "/update_weights_from_disk"):
                wait_until(lambda: engine.progress()[old[0].id] > max(lengths, default=0))
                lengths.append(engine.progress()[old[0].id])
            return call(path, body, *timeout_s)

        for request in old:
            submit(driver, engine, request)
        with monkeypatch.context() as patch:
            patch.setattr(engine.server, "call", call_after_progress)
            loading = engine._start_load(3, lambda label: engine._send_weights(label, version_weights(3)))
            while not loading.done():
                assert engine.step() == []
        assert len(lengths) > 2
        assert engine.activate(3, loading.result()) == weight_digest(version_weights(3))
        engine.submit([new])
        for request in (*old, new):
            check_logprobs(finish(driver, engine, request))


@pytest.mark.timeout(600)
def test_servers_of_two_workers_move_kv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each worker has half of the model and of the KV. If one cannot read its KV, both prefill.

    Versions are loaded in several parts.
    """
    monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
    monkeypatch.setattr(http_engine, "LOAD_PART_BYTES", 2**13)
    driver, arguments = MigrationDriver(tmp_path), ("--tensor-parallel-size", "2")
    with ExitStack() as servers:
        source, destination = (
            servers.enter_context(closing(make_long_server(tmp_path, number, 2, arguments=arguments)))
            for number in range(2)
        )
        for version, engine in itertools.product(range(2), (source, destination)):
            digest = engine.load(version, version_weights(version))
            assert digest == weight_digest(version_weights(version))
        for version, is_damaged in [(0, False), (1, False), (1, True)]:
            destination.pause()  # so that it does not read the KV yet
            request = move_a_request(driver, source, destination, version)
            first, second = sorted((tmp_path / "pool-1").glob("*/*.kv"))
            assert (first.name, second.name) == ("0.kv", "1.kv")
            if is_damaged:
                with second.open("r+b") as file:
                    file.seek(HEADER_BYTES)
                    file.write(4096 * b"\xff")
            destination.resume()
            num_before = destination.num_recomputed
            check_logprobs(finish(driver, destination, request))
            is_reported = is_damaged and Engine is Sglang  # vLLM does not count what it could not read
            assert (destination.num_recomputed > num_before) == is_reported


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("version_slots", "num_workers"),
    # Under vLLM, NIXL's threads use a core of each worker: four workers need more than two cores.
    [(1, 1), (2, 1), *([(1, 2)] if Engine is Sglang else [])],
)
def test_servers_read_each_others_kv_over_nixl(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version_slots: int, num_workers: int
) -> None:
    """The destination computes one token. It prefills if the lease is over, or the source's server is killed.

    A request whose migration is cancelled stays, with the blocks that its server has cached.
    """
    if subprocess.run([PYTHON, "-c", "import nixl"], capture_output=True).returncode:
        pytest.skip("the environment of the server has no nixl")
    options: dict[str, Any] = {"kv_connector": "nixl"}
    if num_workers > 1:
        monkeypatch.setenv("SGLANG_CPU_OMP_THREADS_BIND", "0|1")
        options["arguments"] = ("--tensor-parallel-size", f"{num_workers}")
    source, destination = [
        make_long_server(tmp_path, number, version_slots, **options) for number in range(2)
    ]
    driver, answers = MigrationDriver(tmp_path), list[Completion]()
    try:
        for engine in (source, destination):
            engine.load(0, version_weights(0))

        moved = move_a_request(driver, source, destination, 0)
        answers.append(finish(driver, destination, moved))
        assert destination.num_recomputed == 0

        kept = make_request(driver.num_migrations, max_tokens=LONG_CONTEXT - 9)
        submit(driver, source, kept)
        assert driver.start(kept, source, destination, source.kv_pool) == []
        while not source._migrator.is_exported(kept.id):
            driver.poll(source)
        for engine in (source, destination):
            engine.cancel_migration(driver.num_migrations)
            driver.poll(engine)
        answers.append(finish(driver, source, kept))
        assert source.num_recomputed < 32  # of the last block

        destination.pause()  # so that it does not read the KV yet
        late = move_a_request(driver, source, destination, 0)
        threading.Event().wait(NIXL_LEASE_S + 1)
        submit(driver, source, make_request(99, max_tokens=300))  # which gets the blocks of the ticket
        destination.resume()
        answers.append(finish(driver, destination, late))

        destination.pause()
        orphan = move_a_request(driver, source, destination, 0)
        source.close()
        destination.resume()
        answers.append(finish(driver, destination, orphan))
    finally:
        source.close()
        destination.close()
    for answer in answers:
        check_logprobs(answer)


def move_a_request(driver: MigrationDriver, source: Any, destination: Any, version: int) -> Request:
    """A long request that has migrated with its KV.

    With more busy processes than cores, a server may send the first token when it has generated all of them.
    Then the next request migrates.
    """
    for _ in range(5):
        number = driver.num_migrations
        request = make_request(number, version=version, max_tokens=LONG_CONTEXT - 9)
        submit(driver, source, request)
        replies = driver.migrate(request, source, destination, source.kv_pool)
        if any(isinstance(reply, ExportFinished) for reply in replies):
            (imported,) = (reply for reply in replies if isinstance(reply, ImportFinished))
            assert (imported.num_prefilled, imported.num_bytes > 0) == (0, True)
            return request
        assert isinstance(replies[0], ExportFailed), replies
        assert "finished before it was exported" in replies[0].reason
        destination.cancel_migration(driver.num_migrations)
        driver.poll(destination)
    raise AssertionError("no request has migrated")


def check_logprobs(
    answer: Completion,
    weights: Callable[[int], Tensor] = version_weights,
    config: ModelConfig = LONG_CONFIG,
) -> None:
    """Those of a response are those of its version."""
    num_tokens = len(answer.token_ids)
    compute = GroupLogprobs(config, TrainerSettings(lr=0.0, num_steps=1), "cpu")
    compute.load_weights(weights(answer.version))
    sample = Sample(answer.prompt_ids.tolist(), answer.token_ids.tolist(), [0.0] * num_tokens, 0.0)
    assert answer.logprobs == pytest.approx(compute([sample])[0].tolist(), abs=1e-3)


def make_long_server(folder: Path, number: int, version_slots: int, **options: Any) -> Any:
    options |= {"max_context": LONG_CONTEXT, "version_slots": version_slots, "python": PYTHON}
    return make_engine(Engine, folder, pool=folder / f"pool-{number}", **options)


def submit(driver: MigrationDriver, engine: Any, request: Request) -> None:
    """Submit a request, and wait for its first token."""
    engine.submit([request])
    driver.step_until_first_token(engine, request)


def finish(driver: MigrationDriver, engine: Vllm, request: Request) -> Completion:
    """The response, once the server has also said how many tokens it has prefilled."""
    answer = driver.finish(engine, request)
    while engine._open_streams:
        engine._handle_events(1, 0.1)
    return answer


def write_model(kind: str, folder: Path, is_tied: bool = False) -> tuple[ModelConfig, Tensor]:
    """A model that fits into the contract's lengths: heads of 32 are the smallest of vLLM on a CPU."""
    if kind == "qwen3_moe":
        config = replace(
            CONFIG,
            model_type=kind,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
            tie_word_embeddings=is_tied,
        )
        save_pretrained(folder, config, initial_weights(config, seed=0, std=0.4))
    else:
        sizes = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 64}
        save_tiny(kind, folder, **sizes, max_position_embeddings=MAX_CONTEXT)
    return load_pretrained(folder)


@pytest.mark.skipif(Engine is Vllm, reason="the backend does not ask vLLM for experts")
def test_responses_have_the_experts_of_their_tokens(tmp_path: Path) -> None:
    """Of two versions, and of an episode, whose first tokens are in the prefix cache when its second turn
    begins.
    """
    config, weights = write_model("qwen3_moe", tmp_path)
    sizes: dict[str, Any] = {"max_rows": MAX_ROWS, "max_context": MAX_CONTEXT, "version_slots": 2}
    server: dict[str, Any] = {"model": str(tmp_path), "dtype": "float32", "python": PYTHON}
    server |= {"device": "cpu", "pool": tmp_path / "pool"}
    own = OwnEngine(config, **sizes, kernels="eager", returns_routes=True)
    answers: list[Completion] = []
    with closing(Sglang(**sizes, **server, returns_routes=True)) as engine:
        assert engine.kv_pool is None, "it migrates requests without their KV"
        for version in range(2):
            engine.load(version, weights * 0.9**version)
            own.load(version, weights * 0.9**version)
        episode = make_request(4, version=1, max_turn_tokens=4)
        engine.submit([*(make_request(k, version=k % 2) for k in range(4)), episode])
        while engine.can_step:
            answers += engine.step()
            for turn in engine.pop_finished_turns():
                if turn.num_left > 3:
                    engine.continue_episode(episode.id, [7, 8, 9])
                else:
                    engine.end_episode(episode.id)
    assert sorted(answer.id.sibling for answer in answers) == [0, 1, 2, 3, 4]
    for answer in answers:
        token_ids = (*answer.prompt_ids.tolist(), *answer.token_ids.tolist())
        own.submit([make_request(0, version=answer.version, max_tokens=1, prompt_ids=token_ids)])
        (expected,) = own.step()
        assert answer.routes is not None
        assert expected.routes is not None
        assert answer.routes.shape == (len(token_ids) - 1, 2, 2)
        assert np.array_equal(np.sort(answer.routes), np.sort(expected.routes[: len(token_ids) - 1]))


@pytest.mark.skipif(Engine is Vllm, reason="vLLM ties the embeddings of every model")
def test_a_model_whose_head_sglang_does_not_tie_is_refused(tmp_path: Path) -> None:
    write_model("qwen3_moe", tmp_path, is_tied=True)
    options: dict[str, Any] = {"max_rows": 2, "max_context": MAX_CONTEXT, "version_slots": 1}
    options |= {"model": str(tmp_path), "dtype": "float32", "python": PYTHON, "device": "cpu"}
    with pytest.raises(RunError, match="does not tie the embeddings of Qwen3MoeForCausalLM"):
        Engine(**options)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", OTHER_MODELS)
def test_versions_of_other_models_have_the_log_probs_of_the_trainer(kind: str, tmp_path: Path) -> None:
    """Of two versions in the same steps, and of those that a slot gets after its first one."""
    config, weights = write_model(kind, tmp_path)
    answers: list[Completion] = []
    with closing(
        Engine(
            model=str(tmp_path),
            max_rows=MAX_ROWS,
            max_context=MAX_CONTEXT,
            version_slots=2,
            device="cpu",
            dtype="float32",
            python=PYTHON,
            pool=tmp_path / "pool",
        )
    ) as engine:
        for version in range(4):
            if version >= 2:
                engine.drop(version - 2)
            engine.load(version, weights * 0.9**version)
            versions = [max(version - 1, 0), version] * 3
            engine.submit([make_request(k, version=each, max_tokens=30) for k, each in enumerate(versions)])
            while engine.can_step:
                answers += engine.step()
        if Engine is Vllm:
            assert ("versions take turns" in engine.kernels) == (kind in ("qwen3_moe", "olmo2"))
    assert Counter(answer.version for answer in answers) == {0: 9, 1: 6, 2: 6, 3: 3}
    for answer in answers:
        check_logprobs(answer, lambda version: weights * 0.9**version, config)


@pytest.mark.timeout(300)
def test_lora_versions_generate_side_by_side_in_one_server(tmp_path: Path) -> None:
    """Each answer has the log-probs of its version's merged weights, whichever versions are loaded."""
    backend = SglangLora if Engine is Sglang else VllmLora
    save_pretrained(tmp_path / "model", LORA_CONFIG, lora_weights(0))
    sizes: dict[str, Any] = {"max_rows": MAX_ROWS, "max_context": MAX_CONTEXT, "version_slots": 3}
    where: dict[str, Any] = {"device": "cpu", "dtype": "float32", "python": PYTHON}
    engine = backend(model=str(tmp_path / "model"), rank=RANK, **sizes, **where)
    answers: list[Completion] = []
    for version in range(8):
        if version >= 3:
            while (version - 3) in {id.sibling for id in engine.progress()}:
                answers += engine.step()
            engine.drop(version - 3)
        assert engine.load(version, lora_weights(version)) == weight_digest(lora_weights(version))
        engine.submit([make_request(version, version=version, max_tokens=40)])
        answers += engine.step()
    while engine.can_step:
        answers += engine.step()
    engine.close()
    assert {answer.id.sibling: answer.version for answer in answers} == {
        version: version for version in range(8)
    }
    for answer in answers:
        check_logprobs(answer, lora_weights, LORA_CONFIG)
