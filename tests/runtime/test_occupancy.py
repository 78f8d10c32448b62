"""How busy rows were is a share of one span of time, whoever tells late, joins or goes."""

from __future__ import annotations

import pytest

from dora.runtime.occupancy import Occupancy, Use


def begun(*rows: int) -> Occupancy:
    """Engines 0, 1, ... of so many rows; the first group is admitted a second after they were ready."""
    occupancy, told = Occupancy(), dict.fromkeys(range(len(rows)), Use(0.0, 1.0))
    for engine, num_rows in enumerate(rows):
        occupancy.join(engine, num_rows, {})
    occupancy.begin(told)
    return occupancy


def test_rows_that_decode_half_of_the_time_are_half_busy() -> None:
    occupancy = begun(4)
    occupancy.finish({0: Use(8.0, 5.0)})
    assert occupancy.of_all() == 0.5
    assert occupancy.of_each() == {0: 0.5}


def test_an_engine_counts_by_its_rows() -> None:
    occupancy = begun(1, 3)
    occupancy.finish({0: Use(0.0, 2.0), 1: Use(3.0, 2.0)})
    assert occupancy.of_all() == 0.75
    assert occupancy.of_each() == {0: 0.0, 1: 1.0}


def test_what_is_told_late_is_counted_over_the_time_in_which_it_was_done() -> None:
    """Engine 1 told nothing in the first step, and of both of them in the second."""
    occupancy = begun(2, 2)
    assert occupancy.end_step({0: Use(1.0, 1.5), 1: Use(0.0, 1.0)}) == 1.0
    assert occupancy.end_step({0: Use(2.0, 2.0), 1: Use(2.0, 2.0)}) == 1.0


def test_a_step_in_which_nobody_told_anything_has_the_share_before() -> None:
    occupancy, told = begun(2), {0: Use(1.0, 2.0)}
    assert [occupancy.end_step(told) for _ in range(2)] == [0.5, 0.5]


def test_an_engine_that_joins_later_counts_from_then_on() -> None:
    occupancy = begun(2)
    told = {0: Use(2.0, 2.0), 1: Use(0.0, 7.0)}  # it was ready long before it joined
    occupancy.join(1, 2, told)
    occupancy.finish({0: Use(4.0, 3.0), 1: Use(1.0, 8.0)})
    assert occupancy.of_each() == {0: 1.0, 1: 0.5}
    assert occupancy.of_all() == pytest.approx(5 / 6)


def test_an_engine_that_left_counts_for_as_long_as_it_told() -> None:
    occupancy = begun(2, 2)
    left = Use(2.0, 2.0)
    occupancy.finish({0: Use(0.0, 4.0), 1: left})
    assert occupancy.of_all() == 0.25
    assert occupancy.end_step({0: Use(0.0, 4.0), 1: left}) == 0.25
    assert occupancy.end_step({0: Use(2.0, 5.0), 1: left}) == 1.0


def test_a_paced_step_that_began_before_its_engine_told_is_not_more_than_all() -> None:
    assert begun(2).end_step({0: Use(2.1, 2.0)}) == 1.0


def test_before_anything_was_told_nothing_was_busy() -> None:
    occupancy = Occupancy()
    assert (occupancy.of_all(), occupancy.of_each(), occupancy.end_step({})) == (0.0, {}, 0.0)
    occupancy.finish({5: Use(1.0, 1.0)})  # of an engine that has not joined
    assert occupancy.of_all() == 0.0
