"""Which sequences share a micro-batch.

Neighbours in length do, so that little of a padded batch is padding.
"""

from __future__ import annotations

from collections.abc import Sequence


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of sequences, grouped so that each group fits the budget once padded.

    Sequences are sorted by length, longest first (ties keep their order), so padding is small
    and the largest allocation comes first. The cost of a group is its count times its longest
    length, in tokens. A sequence longer than `token_budget` gets a micro-batch of its own.
    """
    batches: list[list[int]] = []
    room = 0  # sequences that the last micro-batch can still take
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if room == 0:
            batches.append([])
            room = max(1, token_budget // lengths[index])
        batches[-1].append(index)
        room -= 1
    return batches
