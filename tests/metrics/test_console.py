"""What the lines and the table of a run say."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
from rich.console import Console
from tests.service.fake_run import NoSamples

from dora.core.state import State
from dora.core.types import Limits
from dora.metrics.console import progress_line, summary_table
from dora.metrics.rollout import MigrationMetrics
from dora.metrics.run import RewardStats, RunMetrics, StepRecord
from dora.metrics.summary import summarize

LIMITS = Limits(num_steps=4, batch_size=2, group_size=2, max_staleness=1)


def metrics_of(*steps: list[list[float]]) -> RunMetrics:
    """The metrics of a run with these rewards of groups in its steps."""
    metrics = RunMetrics(LIMITS, NoSamples(), MigrationMetrics(lambda group: 0))
    metrics.now_s = 10.0
    metrics.steps += [
        StepRecord(step, step + 1.0, Counter({0: 4}), RewardStats.of(groups, 1.0), 40, 1.0, 0.0, 1, {})
        for step, groups in enumerate(steps)
    ]
    return metrics


@pytest.mark.parametrize(
    ("steps", "shown"),
    [
        ([[[0, 1], [1, 1]], [[1, 0], [0, 0]]], "reward 0.700, accuracy 0.250, 0 tokens/s"),
        ([[[0, 0.5], [1, 0.5]]], "reward 0.500, 0 tokens/s"),
        ([[[0, 2], [2, 0]]], "reward 1.000, 0 tokens/s"),
        ([[[-1, -1], [1, 1]], [[1, 1], [1, 1]]], "reward 0.100, 0 tokens/s"),
    ],
)
def test_an_accuracy_is_shown_where_all_rewards_are_0_or_1(
    steps: list[list[list[float]]], shown: str
) -> None:
    assert f"s left, {shown}, versions none" in progress_line(metrics_of(*steps), State(LIMITS), 4)


def table_of(tmp_path: Path, **changes: object) -> str:
    """The table at the end of a run whose summary has these values."""
    summary = summarize(metrics_of([[0, 1], [1, 1]]), State(LIMITS), [])
    others = {"orchestrator_time_ratio": 0.0, "cpu_s": 0.0, "stopped": "", "c1": True, "c2": True, "c3": True}
    (tmp_path / "summary.json").write_text(json.dumps(summary | others | changes))
    console = Console(width=200)
    with console.capture() as captured:
        console.print(summary_table(tmp_path))
    return " ".join(captured.get().split())


def test_the_idle_time_of_the_trainer_says_what_it_waited_for(tmp_path: Path) -> None:
    assert (
        "trainer idle │ 96.1% of the time: it waited 9.6 s for its batches, 0.4 s of them for a group at its "
        "deadline" in table_of(tmp_path, trainer_idle_ratio=0.961, stall_s=0.4)
    )


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({}, "requests migrated │ none │"),
        (
            {"failed_migrations": 33},
            "requests migrated │ none; 33 attempts failed: these requests stayed on their engine │",
        ),
        (
            {"migrations": 2, "migration_reasons": {"rebalance": 2}, "failed_migrations": 1},
            "2 (2 rebalance), 0.0 MB of KV; 1 attempt failed: these requests stayed on their engine │",
        ),
    ],
)
def test_failed_migrations_say_where_the_requests_stayed(
    changes: dict[str, object], shown: str, tmp_path: Path
) -> None:
    assert shown in table_of(tmp_path, **changes)


def test_the_cpu_time_of_a_resumed_run_says_since_when(tmp_path: Path) -> None:
    assert "1 in 10.0 s wall, 1.7 s CPU │" in table_of(tmp_path, cpu_s=1.7)
    assert "1 in 10.0 s wall, 1.7 s CPU since the last resume │" in table_of(tmp_path, cpu_s=1.7, attempts=2)


@pytest.mark.parametrize(
    ("norms", "num_equal", "expected"),
    [
        ([0.0, 0.5], 0, 1),
        ([0.5, 0.5], 2, 0),  # a critic, a KL term or an entropy term gives a gradient without a spread
        ([None, None], 1, 1),  # an external trainer reports no norm
    ],
)
def test_steps_without_a_gradient_are_counted(
    norms: list[float | None], num_equal: int, expected: int
) -> None:
    groups = [[[1.0, 1.0]] if step < num_equal else [[0.0, 1.0]] for step in range(2)]
    metrics = metrics_of(*groups)
    for step, norm in zip(metrics.steps, norms, strict=True):
        step.others |= {} if norm is None else {"actor/grad_norm": norm}
    assert summarize(metrics, State(LIMITS), [])["steps_without_gradient"] == expected


def test_the_table_counts_steps_without_a_gradient_if_they_are_many(tmp_path: Path) -> None:
    shown = "no gradient │ 25 of 25 steps: see reward/frac_zero_std │"
    assert shown in table_of(tmp_path, steps=25, steps_without_gradient=25)
    assert "no gradient" not in table_of(tmp_path, steps=25, steps_without_gradient=2)
