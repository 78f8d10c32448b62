"""Runs with inflight updates: requests continue on newer weights, and their segments are recorded."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, metrics, query, summary

SLOW: dict[str, Any] = {
    "run__steps": 8,
    "engine__min_step_time": "30ms",
    "sampling__max_response_length": 48,
}


def segments(out: Path) -> list[tuple[list[list[int]], int, int, str]]:
    """(segments, version, number of tokens, digest) of samples that several versions generated."""
    columns = "segments, version, length(token_ids) / 4, weight_digest"
    rows = query(out, f"select {columns} from samples where segments is not null")
    return [(json.loads(text), version, num, digest) for text, version, num, digest in rows]


def check_run(run: Run, *, recomputes: bool) -> dict[str, Any]:
    """Check the samples and the journal of a finished run. Returns its summary."""
    s = summary(run.out)
    assert "C1 waived" in run.audit()
    assert (s["breaks_c1"], s["c1"], s["c2"], s["c3"]) == (True, False, True, True)
    assert (s["pending_groups"], s["migrations"]) == (0, 0)
    assert (s["reprefill_tokens"] > 0) == recomputes
    found = segments(run.out)
    assert found
    for parts, version, num_tokens, digest in found:
        versions = [segment[0] for segment in parts]
        assert versions == sorted(set(versions))
        assert version == versions[0]
        assert sum(segment[1] for segment in parts) == num_tokens
        assert len(set(digest.split("+"))) == len(parts)
    assert dora("replay", run.out).code == 0
    return s


def check_that_the_audit_finds_a_wrong_segment(out: Path) -> None:
    """Change the length of one segment."""
    columns = "segments, group_id, sibling"
    ((text, *name),) = query(out, f"select {columns} from samples where segments is not null limit 1")
    (version, num), *rest = json.loads(text)
    changed = json.dumps([[version, num + 1], *rest])
    query(out, "update samples set segments = ? where group_id = ? and sibling = ?", changed, *name)
    audit = dora("audit", out)
    assert audit.code == 1
    assert "request {}/{} is stored with segments".format(*name) in audit.out


@pytest.mark.parametrize("policy", ["partial", "inflight"])
def test_requests_continue_on_newer_weights_after_an_engine_is_lost(start_run: StartRun, policy: str) -> None:
    run = start_run(orchestrator__update_policy=policy, **SLOW)
    run.wait_for_steps(3)
    run.workers()[0].kill()
    ended = run.succeed()
    assert "waived by the update policy" in ended.out
    s = check_run(run, recomputes=policy == "partial")
    assert s["engine_failures"] == 1
    assert s["segmented_samples"] >= len(segments(run.out))
    header = json.loads((run.out / "journal.jsonl").read_text().split("\n")[0])
    assert header["limits"]["breaks_c1"] is True
    check_that_the_audit_finds_a_wrong_segment(run.out)


def test_requests_continue_on_newer_weights_after_a_resume(start_run: StartRun) -> None:
    run = start_run(orchestrator__update_policy="inflight", trainer__save_freq=3, **SLOW)
    run.wait_for_steps(4)
    run.kill_all()
    resumed = start_run(config=None)
    resumed.succeed()
    s = check_run(resumed, recomputes=False)
    assert s["attempts"] == 2
    assert {line["step"] for line in metrics(run.out) if "step" in line} == set(range(8))
