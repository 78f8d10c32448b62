"""Whole runs of each update policy and placement keep their guarantees."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, journal, summary

POLICIES: dict[str, dict[str, Any]] = {
    "one_step": {"update_policy": "one_step"},
    "drain": {"update_policy": "drain", "max_staleness": 2, "batches_per_version": 3},
    "slack": {"slack": 1, "weight_sync_interval": 2, "prioritize_stragglers": "false"},
    "static": {"placement": "static"},
    "ablations": {"ablations": '["moves", "shares", "period"]'},
}


def finished_summary(run: Run) -> dict[str, Any]:
    """Wait for the end, check the guarantees, and return the summary."""
    run.succeed()
    s = summary(run.out)
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    assert (s["pending_groups"], s["regenerated_tokens"], s["reprefill_tokens"]) == (0, 0, 0)
    assert dora("replay", run.out).code == 0
    return s


@pytest.mark.parametrize("policy", POLICIES)
def test_a_run_of_each_policy_finishes(start_run: StartRun, policy: str) -> None:
    changes = {f"orchestrator__{key}": value for key, value in POLICIES[policy].items()}
    if policy == "slack":
        changes |= {"weights__load": "deferred", "weights__skip_below_kl": 0.1}
    s = finished_summary(start_run(**changes))
    assert s["trained_groups"] == 8
    assert s["staleness_max"] <= {"one_step": 1}.get(policy, 2)
    if policy in ("one_step", "drain"):
        assert s["live_versions_max"] == 1
    if policy in ("static", "ablations"):
        assert s["migrations"] == s["failed_migrations"] == 0


def check_turns(run: Run, colocated: set[int]) -> int:
    """No colocated engine decodes while the trainer trains. Returns the number of pauses."""
    paused: set[int] = set()
    num_pauses = 0
    for line in journal(run.out):
        kind = line["kind"]
        if kind == "engine_joined":
            assert line["is_colocated"] == (line["engine"] in colocated)
            paused |= {line["engine"]} & colocated
        elif kind == "engine_paused":
            paused.add(line["engine"])
            num_pauses += 1
        elif kind == "resume_engine":
            paused.discard(line["engine"])
        elif kind == "train":
            assert paused == colocated
        elif kind == "request_finished" and line["engine"] in colocated:
            assert line["engine"] not in paused
    return num_pauses


def test_colocated_engines_and_the_trainer_take_turns(start_run: StartRun, task: Path) -> None:
    held_out = {"eval__path": task.parent / "prompts.jsonl", "eval__num_prompts": 2}
    run = start_run(orchestrator__placement="colocated", **held_out)
    assert finished_summary(run)["trained_groups"] == 8
    assert check_turns(run, {0, 1}) >= 2


def test_an_elastic_trainer_is_used_as_one_more_engine(start_run: StartRun) -> None:
    run = start_run(engine__num_engines=1, trainer__elastic="true")
    assert finished_summary(run)["trained_groups"] == 8
    assert check_turns(run, {1}) >= 1
    assert any(line["kind"] == "generate" and line["engine"] == 1 for line in journal(run.out))
