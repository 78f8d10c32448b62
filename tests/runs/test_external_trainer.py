"""A run with an external trainer and uploaded prompts keeps its guarantees when it is killed and resumed."""

from __future__ import annotations

import contextlib
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.request import Request, urlopen

import pytest
import torch
from examples import external_trainer
from tests.runtime.running import Run, environment, journal, summary

from dora.config import load
from dora.data.dataset import GrowingDataset
from dora.journal import replay
from dora.runtime import run_dir
from dora.runtime.run_setup import UPLOADED_PROMPTS

TRAINER = Path(__file__).parent.parent.parent / "examples" / "external_trainer.py"
EXTERNAL: dict[str, object] = {"service__trainer": "external", "data__path": "service"}


class ServedRun:
    """A run of `dora serve` and its resumptions."""

    def __init__(self, task: Path, out: Path) -> None:
        self.task, self.out = task, out
        self.file = out / "service.json"
        self.runs: list[Run] = []
        self.trainer: subprocess.Popen[str] | None = None

    def start(self, **changes: object) -> Run:
        run = Run(self.task, self.out, command="serve", **{**EXTERNAL, **changes})  # type: ignore[arg-type]
        return self._wait_for_service("", run)

    def resume(self) -> Run:
        return self._wait_for_service(self.file.read_text(), Run(None, self.out, command="serve"))

    def _wait_for_service(self, before: str, run: Run) -> Run:
        """Wait until the address is another one than `before`, that of the run which was killed."""
        self.runs.append(run)
        run.wait_until(lambda: self._read_address() not in ("", before), "its service")
        return run

    def _read_address(self) -> str:
        """The address; empty if there is none."""
        with contextlib.suppress(FileNotFoundError):
            return self.file.read_text()
        return ""

    def put_prompts(self, first: int, count: int) -> int:
        """Upload prompts twice, as a client does that got no reply. Returns how many the run has."""
        found = json.loads(self.file.read_text())
        rows = [{"prompt": f"{number}:"} for number in range(first, first + count)]
        request = Request(
            f"{found['url']}/v1/prompts",
            json.dumps({"first": first, "rows": rows}).encode(),
            {"Authorization": f"Bearer {found['token']}", "Content-Type": "application/json"},
        )
        replies = [json.load(urlopen(request)) for _ in range(2)]
        return int(replies[1]["num_prompts"])

    def start_trainer(self) -> subprocess.Popen[str]:
        """Start examples/external_trainer.py."""
        command = [sys.executable, str(TRAINER), str(self.out), "--model", str(self.task.parent / "start")]
        self.trainer = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment())
        return self.trainer


@pytest.fixture
def served(task: Path, tmp_path: Path) -> Iterator[ServedRun]:
    made = ServedRun(task, tmp_path / "run")
    yield made
    for run in made.runs:
        run.kill_all()
    if made.trainer is not None:
        made.trainer.kill()
        made.trainer.wait()


def test_the_example_computes_no_gradient_for_observation_tokens() -> None:
    logits = torch.zeros(1, 6, 8, requires_grad=True)
    group = {"prompt_ids": [[1, 2]], "token_ids": [[3, 4, 5, 6]], "advantage": [2.0]}
    group |= {"logprobs": [[-math.log(8), 0.0, 0.0, -math.log(8)]], "loss_mask": [[1, 0, 0, 1]]}
    rules = {"temperature": 1.0, "algorithm": {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}}
    loss, num_tokens = external_trainer.loss_of(
        lambda input_ids: SimpleNamespace(logits=logits), group, rules
    )
    assert loss.item() == pytest.approx(-4.0)  # ratios of 1
    assert num_tokens == 2
    loss.backward()
    assert logits.grad is not None
    # only the positions that predict sampled tokens
    assert logits.grad[0].abs().sum(-1).nonzero()[:, 0].tolist() == [1, 4]


def test_uploaded_prompts_survive_a_crash_before_training(task: Path, tmp_path: Path) -> None:
    config, out = load.read_config(task, []), tmp_path / "run"
    run_dir.claim(out, config)
    GrowingDataset(out / UPLOADED_PROMPTS).append([{"prompt": "1:"}])
    (out / "journal.jsonl").write_text("an incomplete li")
    again = GrowingDataset(out / UPLOADED_PROMPTS)  # as the resumed run opens it
    run_dir.reclaim(out, config)
    again.append([{"prompt": "2:"}])
    dataset = GrowingDataset(out / UPLOADED_PROMPTS)
    assert [dataset.row(index)["prompt"] for index in range(2)] == ["1:", "2:"]
    assert sorted(file.name for file in out.iterdir()) == ["config.toml", UPLOADED_PROMPTS]


def test_a_run_with_an_external_trainer_survives_a_crash(served: ServedRun) -> None:
    run, trainer = served.start(trainer__save_freq=0), served.start_trainer()
    assert served.put_prompts(0, 5) == 5
    run.workers()[0].kill()  # an engine
    run.wait_for_steps(2)  # the prompts are used up
    run.kill()

    again = served.resume()
    assert served.put_prompts(5, 6) == 11
    ended, (printed, _) = again.end(), trainer.communicate(timeout=60)
    assert (ended.code, trainer.returncode) == (0, 0), ended.err
    versions = [line.split()[1] for line in printed.splitlines()]
    assert versions[-4:] == ["1", "2", "3", "4"]  # nothing was saved, so the first two are redone
    found = summary(served.out)
    assert (found["steps"], found["trained_groups"], found["attempts"], found["redone_steps"]) == (4, 8, 2, 2)
    assert (found["c1"], found["c2"], found["c3"]) == (True, True, True)
    assert replay.main(served.out) == 0
    lines = [line for line in journal(served.out) if line["kind"] == "prompts_fetched"]
    fetched = [tuple(group) for line in lines for group in line["groups"]]
    assert fetched == [(0, row) for row in range(len(fetched))]
