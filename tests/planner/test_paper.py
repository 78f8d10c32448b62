"""The benchmark of the papers' tables: what is fitted, what is predicted, and the form of its rows."""

from __future__ import annotations

import json
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dora.planner.cluster import Deployment
from dora.planner.simulator import Metrics


@pytest.fixture
def fit(benchmark_scripts: None) -> Any:
    return import_module("paper.fit")


@pytest.fixture
def tables(fit: Any) -> Any:
    return import_module("paper.tables")


def simulate(deployment: Deployment) -> Metrics:
    """Steps are shortest with the trainer on five eighths; rollout is slower where decode steps are."""
    layout, workload = deployment.layout, deployment.workload
    _ = (deployment.engines, deployment.trainer)  # raises if something does not fit
    step_s = 1000.0 + 500 * abs(layout.trainer[1] / layout.num_devices - 5 / 8)
    others = ("row_utilization", "staleness_mean", "migrations", "answer_s", "stall_fraction")
    fractions = ("exposed_fraction", "load_fraction", "migration_copy_fraction")
    return {
        **dict.fromkeys((*others, *fractions, "train_s"), 0.5),
        "step_s": step_s,
        "exposed_s": 50_000 * workload.efficiency.decode_step_s - 300 * workload.lengths.correlation,
        "tokens_per_s": 1.9e7 / step_s,
        "total_tokens_per_s": 2e7 / step_s,
        "total_tokens_per_step": 2e7,
    }


def test_inputs_are_fitted_to_synchronous_and_partial_rows_alone(fit: Any) -> None:
    policies = []

    def record(deployment: Deployment) -> Metrics:
        policies.append(deployment.layout.policy)
        return simulate(deployment)

    inputs = fit.fit_inputs(record)
    assert {*policies} == {"sync", "partial"}
    exposed_s = 50_000 * inputs.decode_step_s - 300 * inputs.correlation
    assert exposed_s == pytest.approx(60 * (14.9 + 14.8) / 2, rel=0.01)


def test_the_search_for_a_split_ends_at_the_shortest_step(fit: Any) -> None:
    best, tried = fit.find_split(simulate, fit.FittedInputs().workload, "dora", 2, 128)
    assert best == 80 == min(tried, key=lambda num: tried[num]["step_s"])


def test_a_prediction_has_the_printed_figure_and_its_error(tables: Any) -> None:
    rows = tables.all_rows(simulate)
    fitted = [row for row in rows if row["kind"] == "fitted"]
    predicted = [row for row in rows if "paper" in row and row["kind"] != "fitted"]
    keys = {"policy", "gpus", "metric", "paper", "predicted", "error"}
    assert all(keys <= row.keys() for row in (*fitted, *predicted))
    assert {row["policy"] for row in fitted} == {"sync", "partial"}
    assert {row["policy"] for row in predicted} >= {"one_step", "dora", "asyncflow"}


def test_rows_have_the_keys_of_the_published_results(tables: Any) -> None:
    results = Path(__file__).parents[2] / "benchmarks" / "results"
    published = json.loads((results / "paper.json").read_text(encoding="utf-8"))["rows"]
    simulated = tables.all_rows(simulate)

    def forms(rows: list[dict[str, Any]]) -> set[tuple[Any, ...]]:
        return {(row["kind"], row.get("table"), *row) for row in rows}

    assert forms(simulated) == forms(published)


def test_a_value_within_a_printed_range_has_no_error(tables: Any) -> None:
    inside, above = (tables.comparison("dora", 64, "step", (2.0, 4.0), x)["error"] for x in (3.0, 5.0))
    assert (inside, above) == (0.0, 0.25)
