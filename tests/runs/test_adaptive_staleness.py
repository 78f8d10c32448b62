"""Adaptive staleness and the staleness-weighted loss in a whole run."""

from __future__ import annotations

import json
import statistics

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, journal, metrics, summary


def test_the_staleness_bound_adapts_to_the_kl_of_old_samples(start_run: StartRun) -> None:
    """With so small a limit every old sample exceeds it, so the bound falls to 0 and is tried at 1 again."""
    run = start_run(
        orchestrator__max_staleness=3,
        orchestrator__staleness_mode="adaptive",
        orchestrator__max_kl=1e-8,
        orchestrator__staleness_window=1,
        correction__staleness_decay=0.5,
        run__steps=10,
    )
    run.succeed()
    for command in ("audit", "replay"):
        assert dora(command, run.out).code == 0
    effective = [int(step["staleness/bound"]) for step in metrics(run.out)]
    assert max(effective) == 3
    assert min(effective) == 0
    lines = journal(run.out)
    ahead = [line["deadline"] - line["version"] for line in lines if line["kind"] == "admit"]
    assert {*ahead} <= {0, 1, 2, 3}
    assert 0 in ahead
    recorded = [(line["ess"], line["kl"]) for line in lines if line["kind"] == "trained"]
    assert recorded == [(step["off_policy/ess"], step["off_policy/kl_k3"]) for step in metrics(run.out)]
    assert json.loads((run.out / "journal.jsonl").read_text().partition("\n")[0])["limits"][
        "adaptive_staleness"
    ] == {
        "min_ess": 0.9,
        "max_kl": 1e-8,
        "window": 1,
    }
    s = summary(run.out)
    assert (s["trained_groups"], s["c3"]) == (20, True)
    assert s["staleness_bound_mean"] == statistics.fmean(effective)
    assert s["staleness_bound_last"] == effective[-1]
    uniform = [step for step in metrics(run.out) if step["staleness/mean"] == step["staleness/max"]]
    assert uniform
    for step in uniform:
        assert step["off_policy/weight_mean"] == pytest.approx(0.5 ** step["staleness/max"])
