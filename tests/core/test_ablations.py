"""Ablations: each switches off one part of the scheduler and nothing else."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.fake_workers import limits
from tests.core.midrun import add_prompts, state_with_tail

from dora.core.admission import admit
from dora.core.event_handlers import handle
from dora.core.events import ProgressReported, Published
from dora.core.migration import migrate
from dora.core.placement import apportion_by_rounding, begin_rebalance, repartition
from dora.core.state import State


def repartitions(state: State) -> bool:
    repartition(state)
    return any(e.next_load is not None for e in state.engines.values())


def repartition_needs_free_kv(state: State) -> bool:
    for number in (0, 1):
        state.engines[number].kv_usage = 0.6
    return not repartitions(state)


def migrates(state: State) -> bool:
    state.engines[0].evicting, state.engines[0].next_load = 0, 1
    state.mark_dirty(state.engines[0])
    return bool(migrate(state))


def admits_at_old_version(state: State) -> bool:
    add_prompts(state, 10, 8)
    return any(getattr(action, "version", None) == 0 for action in admit(state))


def rebalances_after_interval(state: State) -> bool:
    state.now_s = 100.0
    return begin_rebalance(state)


def rebalances_after_publication(state: State) -> bool:
    state.is_rebalance_due, state.last_rebalance_s, state.publishing_version = False, 0.0, 2
    handle(state, Published(2, "v2"))
    return begin_rebalance(state)


def rebalances_at_kv_pressure(state: State) -> bool:
    state.is_rebalance_due, state.last_rebalance_s = False, 0.0
    handle(state, ProgressReported(0, (), 10.0, 0.99))
    return begin_rebalance(state)


EFFECTS: dict[str, Any] = {
    "moves": migrates,
    "shares": repartitions,
    "fill": admits_at_old_version,
    "update": rebalances_after_publication,
    "pressure": rebalances_at_kv_pressure,
    "period": rebalances_after_interval,
    "room": repartition_needs_free_kv,
}


@pytest.mark.parametrize("ablation", EFFECTS)
@pytest.mark.parametrize("other", EFFECTS)
def test_an_ablation_switches_off_only_its_own_part(ablation: str, other: str) -> None:
    assert EFFECTS[ablation](state_with_tail())
    assert EFFECTS[ablation](state_with_tail(ablations=(other,))) == (ablation != other)


def test_rounding_as_in_the_paper_may_miss_the_sum() -> None:
    assert apportion_by_rounding({0: 2, 1: 6}, 4, [0, 1]) == {0: 1, 1: 3}  # figure 6
    assert apportion_by_rounding({0: 5, 1: 5, 2: 5}, 5, [0, 1, 2]) == {0: 2, 1: 2, 2: 2}
    assert apportion_by_rounding({0: 1, 1: 99}, 4, [0, 1]) == {0: 0, 1: 4}
    assert apportion_by_rounding({0: 0}, 3, [0]) == {0: 0}


def test_an_unknown_ablation_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"ablations = \('luck',\) must be taken from"):
        limits(ablations=("luck",))
