"""Micro-batches, mini-batches and the layout of packed sequences."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from dora.trainer.packing import balanced_micro_batches, balanced_partition, pack, sequential_micro_batches

LENGTHS = st.lists(st.integers(1, 400), max_size=60)
IDS = st.lists(st.integers(0, 9), min_size=1, max_size=30)
PROMPTS = st.sampled_from([[1], [1, 2], [1, 2, 3, 4], [5, 6]])  # some with a common prefix
CPU = torch.device("cpu")


def test_neighbours_share_a_micro_batch_until_it_is_full() -> None:
    assert sequential_micro_batches([3, 10, 4, 9, 1], token_budget=14) == [[0, 1], [2, 3, 4]]


def test_a_sequence_over_the_budget_gets_its_own_micro_batch() -> None:
    assert sequential_micro_batches([2, 50, 2, 2], token_budget=8) == [[0], [1], [2, 3]]
    assert balanced_micro_batches([[1], [2], [3], [4]], [2, 50, 2, 2], token_budget=8) == [[1], [0, 2, 3]]


@given(LENGTHS, st.integers(1, 1000))
def test_every_sequence_is_in_one_micro_batch_within_the_budget(lengths: list[int], budget: int) -> None:
    prompts = [[i // 4] for i in range(len(lengths))]
    for batches in (
        sequential_micro_batches(lengths, budget),
        balanced_micro_batches(prompts, lengths, budget),
    ):
        assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
        for batch in batches:
            assert len(batch) == 1 or sum(lengths[i] for i in batch) <= budget


def test_siblings_stay_together_and_the_largest_micro_batch_is_first() -> None:
    prompts = [[1], [1], [2], [2], [3], [3], [4], [4]]
    batches = balanced_micro_batches(prompts, [10, 10, 11, 11, 30, 5, 20, 20], token_budget=80)
    assert batches == [[0, 1, 6, 7], [2, 3, 4, 5]]  # of 60 and 57


def test_a_batch_that_does_not_fit_gets_one_more_micro_batch_per_rank() -> None:
    """Two of 44 sequences of 45 tokens fit into 100: that makes 22 micro-batches, not 1980 / 100."""
    prompts, lengths = [[i] for i in range(44)], [45] * 44
    counts = [len(balanced_micro_batches(prompts, lengths, 100, num_ranks)) for num_ranks in (1, 2, 4)]
    assert counts == [22, 22, 24]


def test_the_partition_is_that_of_the_differencing_method() -> None:
    """For 8, 7, 6, 5, 4 in two parts, Karmarkar and Karp's method ends with a difference of 2."""
    parts = balanced_partition([8, 7, 6, 5, 4], 2)
    assert sorted(sum([8, 7, 6, 5, 4][i] for i in part) for part in parts) == [14, 16]


def test_with_fewer_sizes_than_parts_some_parts_are_empty() -> None:
    assert balanced_partition([], 2) == [[], []]
    assert sorted(balanced_partition([3, 5], 3)) == [[], [0], [1]]


@given(LENGTHS, st.integers(1, 9))
def test_parts_contain_every_size_once_and_differ_by_one_size_at_most(
    sizes: list[int], num_parts: int
) -> None:
    parts = balanced_partition(sizes, num_parts)
    sums = [sum(sizes[i] for i in part) for part in parts]
    assert len(parts) == num_parts
    assert sorted(i for part in parts for i in part) == list(range(len(sizes)))
    assert max(sums) - min(sums) <= max(sizes, default=0)


@given(st.lists(st.tuples(PROMPTS, IDS), min_size=1, max_size=12))
def test_packed_sequences_keep_their_tokens_in_order_and_share_prompts(
    sequences: list[tuple[list[int], list[int]]],
) -> None:
    prompts, responses = [p for p, _ in sequences], [r for _, r in sequences]
    packed = pack(prompts, responses, CPU)
    for rows, (prompt, response) in zip(packed.sequence_indices, sequences, strict=True):
        assert packed.input_ids[rows].tolist() == [*prompt, *response][:-1]
        assert packed.position_ids[rows].tolist() == list(range(len(rows)))
    num_own = sum(len(response) - 1 for response in responses)
    assert len(packed.input_ids) == num_own + sum(map(len, {tuple(prompt) for prompt in prompts}))
    assert packed.targets.tolist() == [token for response in responses for token in response]


@given(st.lists(st.tuples(PROMPTS, IDS), min_size=1, max_size=12))
def test_blocks_contain_every_sequence_once_with_little_padding(
    sequences: list[tuple[list[int], list[int]]],
) -> None:
    packed = pack([p for p, _ in sequences], [r for _, r in sequences], CPU)
    lengths = sorted(len(rows) for rows in packed.sequence_indices)
    assert torch.cat([block.flatten() for block in packed.blocks])[packed.block_indices].tolist() == list(
        range(len(packed.input_ids))
    )
    assert sum(len(block) for block in packed.blocks) == len(lengths)
    assert sum(block.numel() for block in packed.blocks) <= sum(max(8 / 7 * n, n + 8) for n in lengths)
