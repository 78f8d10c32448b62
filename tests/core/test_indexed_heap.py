"""The heap against a list that is sorted each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from dora.core.index import IndexedHeap

changes = st.lists(st.tuples(st.integers(0, 9), st.none() | st.tuples(st.integers(0, 3), st.integers(-3, 3))))


@given(changes)
def test_first_is_the_first_of_a_sorted_list(changes: list[tuple[int, tuple[int, int] | None]]) -> None:
    """A change is a new key, or None to discard the member."""
    heap, keys = IndexedHeap(), dict[int, tuple[int, int]]()
    for item, key in changes:
        if key is None:
            heap.discard(item)
            keys.pop(item, None)
        else:
            heap.put(item, key)
            keys[item] = key
        assert len(heap) == len(keys)
        assert list(heap) == list(keys)
        if keys:
            assert heap.first() == min(keys, key=lambda i: (keys[i], i))


@given(st.permutations(range(8)), st.integers(0, 100))
def test_removing_the_first_repeatedly_sorts(keys: list[int], num_changes: int) -> None:
    """Many outdated entries, removed on the way, change nothing."""
    heap = IndexedHeap()
    for change in range(num_changes):
        heap.put(change % 8, (100 + change % 7,))
    for item, key in enumerate(keys):
        heap.put(item, (key,))
    removed = []
    while len(heap):
        first = heap.first()
        assert first is not None
        removed.append(first)
        heap.discard(first)
    assert removed == sorted(range(8), key=keys.__getitem__)


def test_equal_keys_come_in_the_order_of_their_members() -> None:
    heap = IndexedHeap()
    for item in (5, 2, 9):
        heap.put(item, (1,))
    assert heap.first() == 2


def test_a_key_that_is_set_again_counts_once() -> None:
    heap = IndexedHeap()
    for key in (1, 2, 1):
        heap.put(7, (key,))
    assert (len(heap), heap.first()) == (1, 7)
    heap.discard(7)
    assert len(heap) == 0
