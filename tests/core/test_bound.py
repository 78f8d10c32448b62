"""The bound of docs/staleness.md: every open group keeps a place in a batch before its deadline."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st
from tests.core.fake_workers import limits

from dora.core.bound import bound_holds, num_admissible
from dora.core.state import State
from dora.core.types import GroupId

MAX_DEADLINE = 12


@given(
    opened=st.dictionaries(st.integers(0, MAX_DEADLINE), st.integers(1, 6), max_size=5),
    next_step=st.integers(0, MAX_DEADLINE),
    batch_size=st.integers(1, 5),
    data=st.data(),
)
def test_checking_only_occurring_deadlines_equals_checking_every_d(
    opened: dict[int, int], next_step: int, batch_size: int, data: st.DataObject
) -> None:
    num_committed = data.draw(st.integers(0, batch_size - 1))
    holds_for_every_d = all(
        sum(count for deadline, count in opened.items() if deadline <= d)
        <= max(0, batch_size * (d - next_step + 1) - num_committed)
        for d in range(MAX_DEADLINE + 1)
    )
    bounds = limits(batch_size=batch_size)
    assert bound_holds(Counter(opened), next_step, num_committed, bounds) == holds_for_every_d


@given(
    opened=st.dictionaries(st.integers(2, 9), st.integers(1, 4), max_size=5),
    version=st.integers(2, 4),
    reduction=st.integers(0, 3),
    num_committed=st.integers(0, 1),
)
def test_num_admissible_is_the_largest_number_with_which_the_bound_holds(
    opened: dict[int, int], version: int, reduction: int, num_committed: int
) -> None:
    """With a reduced bound, new groups may be due before groups of older versions."""
    bounds = limits(num_steps=10, max_staleness=3, batch_size=2)
    committed = [GroupId(0, k) for k in range(num_committed)]
    state = State(bounds, next_step=version, committed=committed, num_open=Counter(opened))
    state.adaptive_staleness.reduction = reduction
    deadline = min(version + 3 - reduction, 9)

    def holds(num: int) -> bool:
        return bound_holds(Counter(opened) + Counter({deadline: num}), version, num_committed, bounds)

    expected = next(num for num in range(100) if not holds(num + 1))
    if holds(0):
        assert num_admissible(state, version) == expected


def test_an_open_group_past_its_deadline_breaks_the_bound() -> None:
    assert not bound_holds(Counter({3: 1}), next_step=4, num_committed=0, limits=limits())


def test_a_deadline_is_the_version_plus_the_staleness_and_never_after_the_last_step() -> None:
    assert [limits(num_steps=5, max_staleness=2).deadline(version) for version in range(5)] == [2, 3, 4, 4, 4]
