"""The ranking against a list that is sorted anew each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora.core.ranking import Ranking

changes = st.lists(st.tuples(st.integers(0, 9), st.none() | st.tuples(st.integers(0, 3), st.integers(-3, 3))))


@given(changes)
def test_the_first_is_the_first_of_a_sorted_list(changes: list[tuple[int, tuple[int, int] | None]]) -> None:
    """A change is a new key, or None for a member that goes."""
    ranking, keys = Ranking(), dict[int, tuple[int, int]]()
    for item, key in changes:
        if key is None:
            ranking.discard(item)
            keys.pop(item, None)
        else:
            ranking.put(item, key)
            keys[item] = key
        assert len(ranking) == len(keys)
        assert list(ranking) == list(keys)
        if keys:
            assert ranking.first() == min(keys, key=lambda i: (keys[i], i))


@given(st.permutations(range(8)), st.integers(0, 100))
def test_what_is_taken_first_again_and_again_is_sorted(keys: list[int], num_changes: int) -> None:
    """Many outdated entries, swept out on the way, change nothing."""
    ranking = Ranking()
    for change in range(num_changes):
        ranking.put(change % 8, (100 + change % 7,))
    for item, key in enumerate(keys):
        ranking.put(item, (key,))
    taken = []
    while len(ranking):
        first = ranking.first()
        assert first is not None
        taken.append(first)
        ranking.discard(first)
    assert taken == sorted(range(8), key=keys.__getitem__)


def test_equals_come_in_the_order_of_their_numbers() -> None:
    ranking = Ranking()
    for item in (5, 2, 9):
        ranking.put(item, (1,))
    assert ranking.first() == 2


def test_a_key_that_returns_counts_once() -> None:
    ranking = Ranking()
    for key in (1, 2, 1):
        ranking.put(7, (key,))
    assert (len(ranking), ranking.first()) == (1, 7)
    ranking.discard(7)
    assert len(ranking) == 0
