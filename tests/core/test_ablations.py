"""A part of the rules that a run does without is not there, and nothing else changes."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.midway import engine, midway, prompts, running
from tests.core.stations import limits

from dora.core.admission import admit
from dora.core.events import Progressed, Published
from dora.core.hearing import hear
from dora.core.migration import migrate
from dora.core.placement import is_due, repartition, rounded
from dora.core.state import State


def tail(*without: str) -> State:
    """Engine 0 clears version 0, of which engine 1 decodes more; engine 2 is full of the newest."""
    state = midway(limits(num_steps=20, batch_size=8, max_staleness=2, without=without), newest=1)
    for number, held in enumerate((0, 0, 1)):
        engine(state, number, rows=4, held={held}, row_tokens_per_s=10.0)
    running(state, 0, 0, 0, num_tokens=100)
    running(state, 1, 0, 1, num_tokens=120)
    running(state, 2, 1, 2, 3, 4, 5, num_tokens=10)
    state.costs.answer_tokens = 200.0
    return state


def flips(state: State) -> bool:
    repartition(state)
    return any(e.wanted is not None for e in state.engines.values())


def stays_without_room(state: State) -> bool:
    for number in (0, 1):
        state.engines[number].kv_share = 0.6
    return not flips(state)


def moves(state: State) -> bool:
    state.engines[0].clearing, state.engines[0].wanted = 0, 1
    state.touch(state.engines[0])
    return bool(migrate(state))


def fills(state: State) -> bool:
    prompts(state, 10, 8)
    return any(getattr(order, "version", None) == 0 for order in admit(state))


def looks_after_a_period(state: State) -> bool:
    state.now_s = 100.0
    return is_due(state)


def looks_after_an_update(state: State) -> bool:
    state.is_rebalance_due, state.rebalanced_s, state.publishing = False, 0.0, 2
    hear(state, Published(2, "v2"))
    return is_due(state)


def looks_when_kv_is_short(state: State) -> bool:
    state.is_rebalance_due, state.rebalanced_s = False, 0.0
    hear(state, Progressed(0, (), 10.0, 0.99))
    return is_due(state)


PARTS: dict[str, Any] = {
    "moves": moves,
    "shares": flips,
    "fill": fills,
    "update": looks_after_an_update,
    "pressure": looks_when_kv_is_short,
    "period": looks_after_a_period,
    "room": stays_without_room,
}


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("other", PARTS)
def test_only_the_part_that_is_left_out_is_not_there(part: str, other: str) -> None:
    assert PARTS[part](tail())
    assert PARTS[part](tail(other)) == (part != other)


def test_plain_rounding_is_that_of_the_paper_and_may_miss_the_sum() -> None:
    assert rounded({0: 2, 1: 6}, 4, [0, 1]) == {0: 1, 1: 3}  # figure 6
    assert rounded({0: 5, 1: 5, 2: 5}, 5, [0, 1, 2]) == {0: 2, 1: 2, 2: 2}
    assert rounded({0: 1, 1: 99}, 4, [0, 1]) == {0: 0, 1: 4}
    assert rounded({0: 0}, 3, [0]) == {0: 0}


def test_an_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match=r"without = \('luck',\) names parts other than"):
        limits(without=("luck",))
