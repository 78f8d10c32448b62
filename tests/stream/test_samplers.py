"""A batch is divided evenly, whole group by whole group, and by every rank alike."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dora.core.records import GroupId
from dora.errors import StreamError
from dora.stream.samplers import balanced, for_rank, micro_batches, over_replicas

SIZES = st.lists(st.integers(0, 5000), max_size=40)


@st.composite
def mixed_groups(draw: st.DrawFn) -> tuple[list[GroupId], int]:
    """Whole groups, their rows in any order, as they finish."""
    size = draw(st.integers(1, 4))
    names = draw(
        st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9)), min_size=1, max_size=8, unique=True)
    )
    return draw(st.permutations([GroupId(*name) for name in names for _ in range(size)])), size


@given(SIZES, st.integers(1, 6))
def test_every_item_is_in_one_part_and_no_part_is_far_from_another(sizes: list[int], num_parts: int) -> None:
    parts = balanced(sizes, num_parts)
    assert len(parts) == num_parts
    assert sorted(item for part in parts for item in part) == [*range(len(sizes))]
    sums = [sum(sizes[item] for item in part) for part in parts]
    assert max(sums) - min(sums) <= max(sizes, default=0)


def test_differencing_finds_what_greed_does_not() -> None:
    sizes = [8, 7, 6, 5, 4]
    assert sorted(sum(sizes[i] for i in part) for part in balanced(sizes, 2)) == [14, 16]  # greedy: 13, 17


@given(mixed_groups(), st.integers(1, 4), st.integers(1, 3), st.data())
def test_the_trap_of_neighbouring_rows_cannot_happen(
    mixed: tuple[list[GroupId], int], num_replicas: int, ranks: int, data: st.DataObject
) -> None:
    """TransferQueue's sampler takes any n rows in sequence for a group; here the id says what a group is."""
    groups, size = mixed
    lengths = data.draw(st.lists(st.integers(1, 900), min_size=len(groups), max_size=len(groups)))
    parts = over_replicas(lengths, num_replicas, groups, size)
    seen: list[int] = []
    for replica in range(num_replicas):
        own = [for_rank(parts, replica * ranks + rank, ranks) for rank in range(ranks)]
        assert all(rows == own[0] for rows in own)
        assert set(Counter(groups[row] for row in own[0]).values()) <= {size}
        seen += own[0]
    assert sorted(seen) == [*range(len(groups))]


def test_a_group_that_is_not_whole_is_refused() -> None:
    """Ready are rows 1 to 5 of the groups {0, 1, 2} and {3, 4, 5}: three in sequence are no group."""
    groups = [GroupId(0, 0)] * 2 + [GroupId(0, 1)] * 3
    with pytest.raises(StreamError, match="group 0/0 has 2 rows here and group_size = 3"):
        over_replicas([1] * 5, 1, groups, 3)


@given(SIZES, st.integers(1, 6000))
def test_micro_batches_keep_the_order_and_the_budget(lengths: list[int], max_tokens: int) -> None:
    found = micro_batches(lengths, max_tokens)
    assert [row for rows in found for row in rows] == [*range(len(lengths))]
    for rows in found:
        assert len(rows) == 1 or sum(lengths[row] for row in rows) <= max_tokens


def test_a_rank_outside_of_the_replicas_is_refused() -> None:
    with pytest.raises(StreamError, match="rank 4 with 2 ranks in a replica would be in replica 2"):
        for_rank([[0], [1]], 4, 2)
    with pytest.raises(StreamError, match="num_parts = 0"):
        balanced([1], 0)
