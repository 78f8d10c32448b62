"""How a batch that was chosen is divided: over replicas, over micro-batches, by tokens.

Everything here follows from ids and lengths alone, so all ranks of a replica that divide the same batch
get the same rows without a word. A group is the rows with the same group id, wherever they are.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from itertools import count

from dora.core.records import GroupId
from dora.errors import StreamError


def by_group(groups: Sequence[GroupId], group_size: int) -> list[list[int]]:
    """Rows of each group, groups in order of appearance. Raises StreamError if one is not whole."""
    found: dict[GroupId, list[int]] = {}
    for row, group in enumerate(groups):
        found.setdefault(group, []).append(row)
    for group, rows in found.items():
        if len(rows) != group_size:
            raise StreamError(f"group {group} has {len(rows)} rows here and group_size = {group_size}")
    return [*found.values()]


def balanced(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Items in `num_parts` parts of nearly equal sums, in ascending order; some may be empty.

    Karmarkar and Karp's differencing (1982): the two least even ways to part become one, the largest parts
    of one with the smallest of the other.
    """
    if num_parts < 1:
        raise StreamError(f"num_parts = {num_parts} must be at least 1")
    ties = count()  # equal ones in order of appearance, so that everybody finds the same
    ways = [
        (-size, next(ties), [(size, [item]), *[(0, [])] * (num_parts - 1)]) for item, size in enumerate(sizes)
    ]
    heapq.heapify(ways)
    while len(ways) > 1:
        _, _, first = heapq.heappop(ways)
        _, _, second = heapq.heappop(ways)
        merged = [
            (a + b, [*own, *other]) for (a, own), (b, other) in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda part: (-part[0], part[1]))
        heapq.heappush(ways, (merged[-1][0] - merged[0][0], next(ties), merged))
    return [sorted(items) for _, items in ways[0][2]] if ways else [[] for _ in range(num_parts)]


def over_replicas(
    num_tokens: Sequence[int], num_replicas: int, groups: Sequence[GroupId] | None = None, group_size: int = 1
) -> list[list[int]]:
    """Rows for each data-parallel replica, even in tokens; with `groups`, every group on one replica.

    Raises StreamError if a group is not whole.
    """
    units = [[row] for row in range(len(num_tokens))] if groups is None else by_group(groups, group_size)
    parts = balanced([sum(num_tokens[row] for row in unit) for unit in units], num_replicas)
    return [sorted(row for item in part for row in units[item]) for part in parts]


def for_rank(parts: Sequence[list[int]], rank: int, ranks_per_replica: int) -> list[int]:
    """The part of a rank: the same for all ranks of a replica. Raises StreamError."""
    replica = rank // ranks_per_replica
    if not 0 <= replica < len(parts):
        raise StreamError(
            f"rank {rank} with {ranks_per_replica} ranks in a replica would be in replica {replica}, "
            f"and there are {len(parts)}"
        )
    return parts[replica]


def micro_batches(num_tokens: Sequence[int], max_tokens: int) -> list[list[int]]:
    """Rows in micro-batches of at most `max_tokens`, in order; a longer row has one for itself."""
    found: list[list[int]] = []
    total = 0
    for row, num in enumerate(num_tokens):
        if not found or total + num > max_tokens:
            found.append([])
            total = 0
        found[-1].append(row)
        total += num
    return found
