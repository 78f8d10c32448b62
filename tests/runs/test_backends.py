"""Runs with inference and training engines that are not DORA's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from tests.contract.test_engine_contract import LIMITED
from tests.contract.test_trainer_contract import EXAMPLES
from tests.runs.conftest import StartRun
from tests.runtime.running import journal, metrics, summary
from tests.runtime.tiny import write_task

TRAINER = f"{EXAMPLES / 'transformers_trainer.py'}:Transformers"
FITTING: dict[str, Any] = {
    "engine__version_slots": 1,
    "orchestrator__placement": "static",
    "orchestrator__prioritize_stragglers": "false",
    "eval__num_prompts": 4,  # before step 1: the first actions of an engine
}


PRIVATE_KV = """
from dataclasses import replace
from pathlib import Path
from dora.engine.engine import Engine
from dora.engine.interface import NATIVE
from dora.model.pretrained import load_config

class PrivateKV(Engine):
    capabilities = replace(NATIVE, kv_transfer=False)

    def __init__(self, *, model, max_rows, max_context, version_slots, device, dtype):
        sizes = dict(max_rows=max_rows, max_context=max_context, version_slots=version_slots)
        super().__init__(load_config(Path(model)), **sizes, device=device, dtype=dtype, kernels="eager",
                         pace_s=0.01)
"""

WRONG = """
from dataclasses import replace
from dora.engine.backends.transformers_engine import Transformers

class Wrong(Transformers):
    def step(self):
        return [replace(each, unfiltered_logprobs=each.unfiltered_logprobs - 0.5) for each in super().step()]
"""


def test_a_run_warns_of_engines_that_compute_another_model(plain_task: Path, start_run: StartRun) -> None:
    (plain_task.parent / "wrong.py").write_text(WRONG)
    backend = f"{plain_task.parent / 'wrong.py'}:Wrong"
    sizes = {"eval__num_prompts": 0, "trainer__batch_size": 8}
    run = start_run(plain_task, engine__backend=backend, **FITTING | sizes)
    ended = run.succeed()
    warning = "log-probs of engines and trainer that differ by 0.5 in the mean"
    assert (ended.out + ended.err).count(warning) == 1, metrics(run.out)


def test_the_guarantees_hold_with_other_backends_when_an_engine_crashes(
    plain_task: Path, start_run: StartRun
) -> None:
    backends = {"engine__backend": LIMITED, "trainer__backend": TRAINER}
    held_out = plain_task.parent / "prompts.jsonl"
    run = start_run(plain_task, run__steps=6, eval__path=held_out, **backends, **FITTING)
    run.wait_for_steps(2)
    run.workers()[0].kill()
    run.succeed()
    run.audit("--deep", "4")
    assert len(metrics(run.out)) == 6


@pytest.mark.parametrize("kv_transfer", ["staged", "ipc", "none"])
def test_requests_migrate_between_engines_as_on_gpus(
    plain_task: Path, start_run: StartRun, kv_transfer: str
) -> None:
    (plain_task.parent / "private.py").write_text(PRIVATE_KV)
    backend = f"{plain_task.parent / 'private.py'}:PrivateKV"
    has_kv = kv_transfer != "none"
    changes: Any = {"engine__kv_transfer": kv_transfer} if has_kv else {"engine__backend": backend}
    run = start_run(
        plain_task,
        run__steps=10,
        **changes,
        engine__num_engines=3,
        engine__version_slots=1,
        sampling__max_response_length=48,
        orchestrator__balance_running="true",
        orchestrator__rebalance_interval_s=0.1,
    )
    run.wait_for_steps(3)
    run.workers()[0].kill()
    run.succeed()
    found = summary(run.out)
    assert found["migrations"] >= 5
    assert (found["migrated_kv_bytes"] > 0, found["reprefill_tokens"] > 0) == (has_kv, not has_kv)
    run.audit("--deep", "8")


def finishers(events: Sequence[Mapping[str, Any]]) -> set[int]:
    """The engines that have finished requests."""
    return {event["engine"] for event in events if event["kind"] == "request_finished"}


def test_engines_of_two_kinds_serve_one_run_and_replace_each_other(
    tmp_path: Path, start_run: StartRun
) -> None:
    """The engine that is not DORA's own crashes in the middle, and its requests restart."""
    task = write_task(tmp_path)
    fleet = f'[[fleet]]\nname = "others"\nbackend = "{LIMITED}"\nmax_num_seqs = 2\n'
    task.write_text(task.read_text() + fleet)
    held_out = tmp_path / "prompts.jsonl"
    run = start_run(task, run__steps=40, engine__num_engines=1, eval__path=held_out, **FITTING)
    run.wait_until(lambda: 1 in finishers(journal(run.out)), "engine 1 finished a request")
    run.workers()[1].kill()
    run.succeed()
    run.audit("--deep", "8")
    events = journal(run.out)
    joined = {event["engine"]: event["max_num_seqs"] for event in events if event["kind"] == "engine_joined"}
    assert {0: 4, 1: 2}.items() <= joined.items() <= {0: 4, 1: 2, 2: 2}.items(), "2 may join before the end"
    assert finishers(events) >= {0, 1}
    assert [event["engine"] for event in events if event["kind"] == "engine_lost"] == [1]
