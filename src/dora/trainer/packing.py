"""Mini-batches and micro-batches of sequences, and their layout for one forward pass without padding.

Siblings in one micro-batch share their prompt, which the model processes once. Token counts include the
prompt once per sibling.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count, groupby, repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.model.attention import SharedKeys, VarlenLayout, shared_keys, varlen_layout
from dora.model.device import to_device
from dora.trainer.settings import Sample

TokenIds = Sequence[int]
_MIN_FILL, _MAX_PADDING = 7 / 8, 8  # a sequence fits a block if it is this full, or if it lacks so few tokens


@dataclass(frozen=True)
class PackedBatch:
    """Sequences (prompt + response) in one forward pass: M input tokens, N response tokens in the loss.

    `input_ids` [M] are all tokens except each sequence's last, with shared prompts once; `position_ids` [M]
    are their positions in their sequences. `logits_indices` [N] are the inputs that predict a token of the
    loss, `targets` [N] those tokens, response after response. `loss_mask` [response tokens] is bool.
    `sequence_indices` are the inputs of each sequence.

    For attention, `blocks` [B, L] hold the input indices of sequences of similar lengths, padded on the right
    with input 0. `block_indices` [M] locate each input among the flattened tokens of all blocks.

    A kernel for variable lengths takes all inputs as queries, each once, and as keys all inputs of each
    sequence that has inputs of its own: `shared_keys`, or None if no sequences share inputs. `varlen` is
    their layout.
    """

    input_ids: Tensor
    position_ids: Tensor
    logits_indices: Tensor
    targets: Tensor
    loss_mask: Tensor
    sequence_indices: Sequence[NDArray[np.int64]]
    blocks: Sequence[Tensor]
    block_indices: Tensor
    shared_keys: SharedKeys | None
    varlen: VarlenLayout
    prompts: Sequence[TokenIds]
    responses: Sequence[TokenIds]


def pack(
    prompts: Sequence[TokenIds],
    responses: Sequence[TokenIds],
    device: torch.device,
    routes: Sequence[NDArray[np.int16] | None] | None = None,
    masks: Sequence[TokenIds | None] | None = None,
) -> PackedBatch:
    """Lay sequences out for one forward pass. Neither prompts nor responses may be empty.

    `masks` are 0 for response tokens outside the loss; None: all are in the loss. With the `routes`
    [tokens - 1, ...] of sequences, equal prompts are shared only if their routes are equal, too.
    """
    input_ids: list[int] = []
    starts: dict[tuple[tuple[int, ...], bytes | None], int] = {}  # of prompts
    sequence_indices, num_queries = [], []
    for prompt, response, route in zip(prompts, responses, routes or repeat(None, len(prompts)), strict=True):
        key = tuple(prompt), None if route is None else route[: len(prompt)].tobytes()
        num_before = len(input_ids)
        start = starts.setdefault(key, num_before)
        if start == num_before:
            input_ids += prompt
        own = np.arange(len(input_ids), len(input_ids) + len(response) - 1)
        sequence_indices.append(np.concatenate((np.arange(start, start + len(prompt)), own)))
        input_ids += response[:-1]
        num_queries.append(len(input_ids) - num_before)
    blocks, position_ids, block_indices = _length_blocks(sequence_indices, len(input_ids))
    pairs = zip(sequence_indices, prompts, strict=True)
    predicting = np.concatenate([indices[len(prompt) - 1 :] for indices, prompt in pairs])
    targets = np.array([token for response in responses for token in response])
    loss_mask = _joined_masks(responses, masks or [None] * len(responses))

    with_queries = [indices for indices, num in zip(sequence_indices, num_queries, strict=True) if num]
    keys = np.concatenate(with_queries)
    varlen = varlen_layout([num for num in num_queries if num], [*map(len, with_queries)], device)

    def on_device(values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return to_device(torch.as_tensor(values, dtype=torch.int64), device)

    return PackedBatch(
        on_device(input_ids),
        on_device(position_ids),
        on_device(predicting[loss_mask]),
        on_device(targets[loss_mask]),
        to_device(torch.from_numpy(loss_mask), device),
        sequence_indices,
        [on_device(block) for block in blocks],
        on_device(block_indices),
        None if len(keys) == len(input_ids) else shared_keys(keys, len(input_ids), device),
        varlen,
        prompts,
        responses,
    )


def pack_samples(
    samples: Sequence[Sample], device: torch.device, routes: Sequence[NDArray[np.int16] | None] | None = None
) -> PackedBatch:
    """`pack` for samples with their loss masks."""
    prompts, responses = [s.prompt_ids for s in samples], [s.token_ids for s in samples]
    return pack(prompts, responses, device, routes, [s.loss_mask for s in samples])


def _joined_masks(responses: Sequence[TokenIds], masks: Sequence[TokenIds | None]) -> NDArray[np.bool_]:
    """The loss mask of all responses [response tokens]."""
    pairs = zip(responses, masks, strict=True)
    return np.concatenate([np.ones(len(r), bool) if m is None else np.array([*m]) > 0 for r, m in pairs])


def _length_blocks(
    sequence_indices: Sequence[NDArray[np.int64]], num_inputs: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64], NDArray[np.int64]]:
    """Blocks of sequences of similar lengths, the position of every input, and its index in the blocks."""
    position_ids, block_indices = np.zeros(num_inputs, np.int64), np.zeros(num_inputs, np.int64)
    blocks: list[NDArray[np.int64]] = []
    num_before = 0
    remaining = sorted(sequence_indices, key=len, reverse=True)
    while remaining:
        longest = len(remaining[0])
        shortest = min(_MIN_FILL * longest, longest - _MAX_PADDING)
        similar = [indices for indices in remaining if len(indices) >= shortest]
        remaining = remaining[len(similar) :]
        block = np.zeros((len(similar), longest), np.int64)
        for i, indices in enumerate(similar):
            positions = np.arange(len(indices))
            block[i, : len(indices)], position_ids[indices] = indices, positions
            block_indices[indices] = num_before + i * longest + positions
        blocks.append(block)
        num_before += block.size
    return blocks, position_ids, block_indices


def split_mini_batches(lengths: Sequence[int], token_budget: int | None) -> list[list[int]]:
    """Response indices of each update of a step, with about `token_budget` tokens each; None: one update.

    This is Ring-lite's token budget per update (C3PO, arXiv 2506.14731), except that every response is used:
    the number of updates is the nearest to the batch's tokens over the budget, at least one, and their tokens
    are as equal as whole responses allow.
    """
    if token_budget is None:
        return [[*range(len(lengths))]]
    num_updates = (2 * sum(lengths) + token_budget) // (2 * token_budget)
    return balanced_partition(lengths, max(1, min(num_updates, len(lengths))))


def sequential_micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of neighbours that fit the budget together, for a batch that is still filling.

    A sequence longer than `token_budget` gets its own micro-batch.
    """
    batches: list[list[int]] = []
    room = 0
    for i, length in enumerate(lengths):
        if not batches or length > room:
            batches.append([])
            room = token_budget
        batches[-1].append(i)
        room -= length
    return batches


def balanced_micro_batches(
    prompts: Sequence[TokenIds], lengths: Sequence[int], token_budget: int, num_ranks: int = 1
) -> list[list[int]]:
    """Indices in few micro-batches of nearly equal tokens within the budget, the largest first.

    `lengths` are those of whole sequences. The number of micro-batches starts at the batch's tokens over the
    budget and grows until `balanced_partition` keeps within the budget; a less even packing might need fewer.
    Neighbours with the same prompt stay together up to half the budget. A sequence longer than `token_budget`
    gets its own micro-batch. With `num_ranks` the number is a multiple of it, if there are enough sequences.
    """
    units: list[list[int]] = []
    max_unit_tokens = min(token_budget, -(-sum(lengths) // num_ranks)) // 2
    for _, siblings in groupby(range(len(prompts)), key=lambda i: tuple(prompts[i])):
        run = list(siblings)
        parts = sequential_micro_batches([lengths[i] for i in run], max_unit_tokens)
        units += [[run[i] for i in part] for part in parts]
    sizes = [sum(lengths[i] for i in unit) for unit in units]
    num_parts = -(-sum(min(size, token_budget) for size in sizes) // token_budget)
    num_parts += -num_parts % num_ranks
    partition = balanced_partition(sizes, num_parts)
    while any(len(part) > 1 and sum(sizes[k] for k in part) > token_budget for part in partition):
        num_parts += num_ranks
        partition = balanced_partition(sizes, num_parts)
    batches = [[i for k in part for i in units[k]] for part in partition if part]
    return sorted(batches, key=lambda batch: -sum(lengths[i] for i in batch))


def by_micro_batch(
    samples: Sequence[Sample], token_budget: int, compute: Callable[[list[Sample]], Tensor]
) -> list[Tensor]:
    """What `compute` gives for each sample's tokens of the loss; empty for an empty response.

    `compute` gets the samples of one micro-batch, and returns [N], one response after another.
    """
    results, nonempty = [torch.empty(0)] * len(samples), [i for i, s in enumerate(samples) if s.token_ids]
    prompts, lengths = [samples[i].prompt_ids for i in nonempty], [samples[i].num_tokens for i in nonempty]
    for members in balanced_micro_batches(prompts, lengths, token_budget):
        chosen = [nonempty[k] for k in members]
        parts = compute([samples[i] for i in chosen]).split([samples[i].num_loss_tokens for i in chosen])
        for i, part in zip(chosen, parts, strict=True):
            results[i] = part
    return results


def balanced_partition(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices in `num_parts` parts of nearly equal sums, each in ascending order; some may be empty.

    The largest differencing method (Karmarkar and Karp 1982): the two least even partitions are merged,
    largest part with smallest, until one partition is left.
    """
    ties = count()  # in order of appearance
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []  # (-spread, tie, parts: sum, indices)
    for i, size in enumerate(sizes):
        parts = [(size, [i])] + [(0, [])] * (num_parts - 1)
        heapq.heappush(heap, (-_spread(parts), next(ties), parts))
    while len(heap) > 1:
        (*_, one), (*_, other) = heapq.heappop(heap), heapq.heappop(heap)
        merged = [(a + b, m + n) for (a, m), (b, n) in zip(one, reversed(other), strict=True)]
        merged.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (-_spread(merged), next(ties), merged))
    parts = heap[0][2] if heap else [(0, [])] * num_parts
    return [sorted(indices) for _, indices in parts]


def _spread(parts: Sequence[tuple[int, list[int]]]) -> int:
    return parts[0][0] - parts[-1][0]
