"""Utilisation covers one span of time, whenever engines report, join or leave."""

from __future__ import annotations

import pytest

from dora.metrics.rollout import EngineUsage, RolloutUtilization


def started(*rows: int) -> RolloutUtilization:
    """Engines 0, 1, ... with these rows; the first group is admitted a second after they were ready."""
    utilization = RolloutUtilization()
    for engine, num_rows in enumerate(rows):
        utilization.join(engine, num_rows, {})
    utilization.start(dict.fromkeys(range(len(rows)), EngineUsage(0.0, 1.0)))
    return utilization


def test_rows_that_decode_half_of_the_time_are_half_utilised() -> None:
    utilization = started(4)
    utilization.finish_request({0: EngineUsage(8.0, 5.0)})
    assert utilization.overall() == 0.5
    assert utilization.by_engine() == {0: 0.5}


def test_an_engine_counts_by_its_rows() -> None:
    utilization = started(1, 3)
    utilization.finish_request({0: EngineUsage(0.0, 2.0), 1: EngineUsage(3.0, 2.0)})
    assert utilization.overall() == 0.75
    assert utilization.by_engine() == {0: 0.0, 1: 1.0}


def test_a_late_report_counts_over_the_time_that_it_covers() -> None:
    """Engine 1 reports nothing in the first step, and both steps in the second."""
    utilization = started(2, 2)
    assert utilization.end_step({0: EngineUsage(1.0, 1.5), 1: EngineUsage(0.0, 1.0)}) == 1.0
    assert utilization.end_step({0: EngineUsage(2.0, 2.0), 1: EngineUsage(2.0, 2.0)}) == 1.0


def test_a_step_without_reports_repeats_the_ratio_before() -> None:
    utilization, usage = started(2), {0: EngineUsage(1.0, 2.0)}
    assert [utilization.end_step(usage) for _ in range(2)] == [0.5, 0.5]


def test_an_engine_that_joins_later_counts_from_then_on() -> None:
    utilization = started(2)
    usage = {0: EngineUsage(2.0, 2.0), 1: EngineUsage(0.0, 7.0)}  # it was ready long before it joined
    utilization.join(1, 2, usage)
    utilization.finish_request({0: EngineUsage(4.0, 3.0), 1: EngineUsage(1.0, 8.0)})
    assert utilization.by_engine() == {0: 1.0, 1: 0.5}
    assert utilization.overall() == pytest.approx(5 / 6)


def test_an_engine_that_left_counts_until_its_last_report() -> None:
    utilization = started(2, 2)
    left = EngineUsage(2.0, 2.0)
    utilization.finish_request({0: EngineUsage(0.0, 4.0), 1: left})
    assert utilization.overall() == 0.25
    assert utilization.end_step({0: EngineUsage(0.0, 4.0), 1: left}) == 0.25
    assert utilization.end_step({0: EngineUsage(2.0, 5.0), 1: left}) == 1.0


def test_a_paced_step_that_began_before_the_report_counts_at_most_1() -> None:
    assert started(2).end_step({0: EngineUsage(2.1, 2.0)}) == 1.0


def test_without_reports_the_utilisation_is_0() -> None:
    utilization = RolloutUtilization()
    assert (utilization.overall(), utilization.by_engine(), utilization.end_step({})) == (0.0, {}, 0.0)
    utilization.finish_request({5: EngineUsage(1.0, 1.0)})  # of an engine that has not joined
    assert utilization.overall() == 0.0
