"""Costs found in a record are those it was made with, and what is forecast of them is what was recorded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from dora.core.actions import Action
from dora.core.events import Event
from dora.core.orchestrator import Orchestrator
from dora.core.records import Limits
from dora.errors import InputError
from dora.sim.forecast.calibration import Line, Measured, Recorded, forecast_speed, read
from dora.sim.forecast.fluid import FluidEngine
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.player import Manner, Player

COSTS = Measured(
    Line(0.009, 0.0002), Line(0.8, 0.05), loading_s=0.3, publishing_s=0.2, reward_s=0.05, moving_s=0.01
)


def recorded(limits: Limits, costs: Measured = COSTS, seed: int = 0) -> Recorded:
    """A run that was never real."""
    lines: list[tuple[float, Event | Action]] = []
    engines = [FluidEngine(number, costs, 8) for number in range(3)]
    manner = Manner(reward_s=costs.reward_s, report_s=1.0, slots=2)
    lengths = Lengths(800, 120.0, prompt=0, seed=seed)
    sizes = (limits.batch_size, limits.group_size)
    Player(
        Orchestrator(limits), engines, costs, lengths, sizes, manner, lambda *line: lines.append(line)
    ).play()
    return read(limits, lines)


LIMITS = Limits(num_steps=14, batch_size=8, group_size=4, max_staleness=2)


def test_costs_are_found_again() -> None:
    found = recorded(LIMITS).measured
    assert found.decode.at(6) == pytest.approx(COSTS.decode.at(6), rel=0.1)
    assert found.train.at(4) == pytest.approx(COSTS.train.at(4), rel=0.02)
    assert found.loading_s == pytest.approx(0.3)
    assert found.publishing_s == pytest.approx(0.2)
    assert found.reward_s == pytest.approx(0.05)


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_what_was_measured_at_one_bound_predicts_others(staleness: int) -> None:
    other = recorded(replace(LIMITS, max_staleness=staleness), seed=1)
    assert forecast_speed(other, recorded(LIMITS).measured) == pytest.approx(other.tokens_per_s, rel=0.1)


def test_a_run_that_says_too_little_is_refused() -> None:
    with pytest.raises(InputError, match=r"0 training steps and 0 reports .* at least 3 and 1"):
        _ = read(LIMITS, []).measured


@pytest.mark.parametrize(
    ("points", "fixed_s", "each_s"),
    [
        ([(1.0, 3.0), (2.0, 5.0)], 1.0, 2.0),
        ([(2.0, 3.0), (2.0, 5.0)], 4.0, 0.0),
        ([(1.0, 5.0), (2.0, 3.0)], 4.0, 0.0),  # never falling
        ([(2.0, 1.0), (4.0, 8.0)], 0.0, 1.5),  # nor below zero at none
        ([], 0.0, 0.0),
    ],
)
def test_a_line_is_what_something_can_take(
    points: list[tuple[float, float]], fixed_s: float, each_s: float
) -> None:
    line = Line.through(points)
    assert [line.fixed_s, line.each_s] == pytest.approx([fixed_s, each_s])
