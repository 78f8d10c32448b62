"""The papers' tables: what is fitted on, what is predicted, and the form of what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dora.sim.forecast import fit, paper
from dora.sim.forecast.cluster import Setup
from dora.sim.forecast.fit import Fitted
from dora.sim.forecast.studies import SHOWN


def played(setup: Setup) -> dict[str, float]:
    """Steps are shortest with the trainer on five eighths; rollout is slower where decode steps are."""
    layout, job = setup.layout, setup.job
    _ = (setup.engines, setup.trainer)  # refuses what does not fit
    exposed_s = 50_000 * job.efficiency.step_s - 300 * job.lengths.alike
    step_s = 1000.0 + 500 * abs(layout.train[1] / layout.num_devices - 5 / 8)
    told = dict.fromkeys((*SHOWN, "train_s", "stalled"), 0.5)
    return {**told, "step_s": step_s, "exposed_s": exposed_s, "tokens_per_s": 2e7 / step_s,
            "tokens_per_step": 2e7}  # fmt: skip


def test_inputs_are_fitted_on_synchronous_and_partial_rows_alone() -> None:
    policies = []

    def heard(setup: Setup) -> dict[str, float]:
        policies.append(setup.layout.policy)
        return played(setup)

    found = fit.fitted(heard)
    assert {*policies} == {"sync", "partial"}
    assert 50_000 * found.step_s - 300 * found.alike == pytest.approx(60 * (14.9 + 14.8) / 2, rel=0.01)


def test_the_search_for_a_split_ends_at_the_shortest_step() -> None:
    best, tried = fit.split(played, Fitted().job, "dora", 2, 128)
    assert best == 80 == min(tried, key=lambda num: tried[num]["step_s"])


def test_a_prediction_is_written_with_the_printed_figure_and_its_error(tmp_path: Path) -> None:
    rows = paper.everything(played)
    path = tmp_path / "paper.json"
    path.write_text(json.dumps(paper.told(rows)))
    written = json.loads(path.read_text())
    keys = {"policy", "gpus", "metric", "paper", "predicted", "error"}
    assert all(keys <= row.keys() for kind in ("fitted", "predicted") for row in written[kind])
    assert {row["policy"] for row in written["fitted"]} == {"sync", "partial"}
    assert {row["policy"] for row in written["predicted"]} >= {"one_step", "dora", "asyncflow"}
    assert sum(map(len, written.values())) == len(rows)


def test_a_figure_within_a_printed_range_has_no_error() -> None:
    inside, above = (paper.beside("dora", 64, "step", (2.0, 4.0), value)["error"] for value in (3.0, 5.0))
    assert (inside, above) == (0.0, 0.25)
