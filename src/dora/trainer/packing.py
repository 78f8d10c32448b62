"""Which sequences share a micro-batch, and how they lie in it: end to end, without padding.

Siblings that share a micro-batch also share their prompt, which goes through the model once; where
tokens are counted it counts for each of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, groupby, repeat

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.trainer.settings import Sample

Tokens = Sequence[int]
_SLACK, _SLACK_TOKENS = 7 / 8, 8  # how much shorter than the longest one of its block a sequence may be


@dataclass(frozen=True)
class Packed:
    """Sequences (prompt + response) for one forward pass; M tokens, N of them drawn by a policy.

    `inputs` [M] are all tokens but each sequence's last, those of shared prompts once; `positions` [M] their
    places in their sequences. `rows` [N] are the inputs that predict a token that was drawn, `targets` [N]
    those tokens, response after response; `drawn` [tokens of responses] says which they are. `members` are
    the inputs of each sequence. `blocks` [B, L] are sequences of like lengths side by side, filled up with
    input 0 on the right, and `found` [M] is where each input is among the blocks' flattened tokens.
    """

    inputs: Tensor
    positions: Tensor
    rows: Tensor
    targets: Tensor
    drawn: Tensor
    members: Sequence[NDArray[np.int64]]
    blocks: Sequence[Tensor]
    found: Tensor
    prompts: Sequence[Tokens]
    responses: Sequence[Tokens]


def pack(
    prompts: Sequence[Tokens],
    responses: Sequence[Tokens],
    device: torch.device,
    routes: Sequence[NDArray[np.int16] | None] | None = None,
    masks: Sequence[Tokens | None] | None = None,
) -> Packed:
    """Lay sequences out for one forward pass. Neither prompts nor responses may be empty.

    `masks` are 0 for tokens of a response that were read and not drawn; None: all were drawn. With the
    `routes` [tokens - 1, ...] of sequences, equal prompts are shared where theirs are equal, too.
    """
    inputs: list[int] = []
    starts: dict[tuple[tuple[int, ...], bytes | None], int] = {}  # of prompts
    members = []
    for prompt, response, sent in zip(prompts, responses, routes or repeat(None, len(prompts)), strict=True):
        key = tuple(prompt), None if sent is None else sent[: len(prompt)].tobytes()
        start = starts.setdefault(key, len(inputs))
        if start == len(inputs):
            inputs += prompt
        own = np.arange(len(inputs), len(inputs) + len(response) - 1)
        members.append(np.concatenate((np.arange(start, start + len(prompt)), own)))
        inputs += response[:-1]
    blocks, positions, found = _blocks(members, len(inputs))
    rows = np.concatenate([own[len(prompt) - 1 :] for own, prompt in zip(members, prompts, strict=True)])
    targets = np.array([token for response in responses for token in response])
    told = zip(responses, masks or repeat(None, len(responses)), strict=True)
    drawn = np.concatenate([np.ones(len(r), bool) if m is None else np.array([*m]) > 0 for r, m in told])

    def placed(values: Sequence[int] | NDArray[np.int64]) -> Tensor:
        return torch.as_tensor(values, dtype=torch.int64).to(device)

    return Packed(
        placed(inputs),
        placed(positions),
        placed(rows[drawn]),
        placed(targets[drawn]),
        torch.from_numpy(drawn).to(device),
        members,
        [placed(block) for block in blocks],
        placed(found),
        prompts,
        responses,
    )


def pack_samples(
    samples: Sequence[Sample], device: torch.device, routes: Sequence[NDArray[np.int16] | None] | None = None
) -> Packed:
    """`pack` for samples, whose masks count."""
    prompts, responses = [s.prompt_ids for s in samples], [s.token_ids for s in samples]
    return pack(prompts, responses, device, routes, [s.loss_mask for s in samples])


def _blocks(
    members: Sequence[NDArray[np.int64]], num_inputs: int
) -> tuple[list[NDArray[np.int64]], NDArray[np.int64], NDArray[np.int64]]:
    """Sequences of like lengths side by side; the place of every input in its sequence, and in them."""
    positions, found = np.zeros(num_inputs, np.int64), np.zeros(num_inputs, np.int64)
    blocks: list[NDArray[np.int64]] = []
    num_before = 0
    left = sorted(members, key=len, reverse=True)
    while left:
        longest = len(left[0])
        alike = [own for own in left if len(own) >= min(_SLACK * longest, longest - _SLACK_TOKENS)]
        left = left[len(alike) :]
        block = np.zeros((len(alike), longest), np.int64)
        for i, own in enumerate(alike):
            places = np.arange(len(own))
            block[i, : len(own)], positions[own] = own, places
            found[own] = num_before + i * longest + places
        blocks.append(block)
        num_before += block.size
    return blocks, positions, found


def micro_batches(lengths: Sequence[int], token_budget: int) -> list[list[int]]:
    """Indices of neighbours that fit the budget together, for a batch whose end is not known yet.

    A sequence longer than `token_budget` gets a micro-batch of its own.
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
    prompts: Sequence[Tokens], lengths: Sequence[int], token_budget: int, num_ranks: int = 1
) -> list[list[int]]:
    """Indices in few micro-batches within the budget that differ little in tokens, the largest first.

    Their number is the lowest from the budget's on at which `balanced` keeps within it; sequences one by
    one, and less evenly, may fit into fewer. `lengths` are those of whole sequences. Neighbours with the same
    prompt stay together as far as half of the budget allows. A sequence longer than `token_budget` gets a
    micro-batch of its own. `num_ranks` work on as many micro-batches at a time, so their number is a multiple
    of it, if there are enough sequences.
    """
    pieces: list[list[int]] = []
    room = min(token_budget, -(-sum(lengths) // num_ranks)) // 2
    for _, group in groupby(range(len(prompts)), key=lambda i: tuple(prompts[i])):
        run = list(group)
        pieces += [[run[i] for i in part] for part in micro_batches([lengths[i] for i in run], room)]
    sizes = [sum(lengths[i] for i in piece) for piece in pieces]
    num_parts = -(-sum(min(size, token_budget) for size in sizes) // token_budget)
    num_parts += -num_parts % num_ranks
    parts = balanced(sizes, num_parts)
    while any(len(part) > 1 and sum(sizes[k] for k in part) > token_budget for part in parts):
        num_parts += num_ranks
        parts = balanced(sizes, num_parts)
    batches = [[i for k in part for i in pieces[k]] for part in parts if part]
    return sorted(batches, key=lambda batch: -sum(lengths[i] for i in batch))


def balanced(sizes: Sequence[int], num_parts: int) -> list[list[int]]:
    """Indices in `num_parts` parts whose sums are nearly equal, each in ascending order; some may be empty.

    The largest differencing method (Karmarkar and Karp 1982): the two sets of parts that are least even
    become one, largest part upon smallest, until there is one set.
    """
    ties = count()  # in order of appearance
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []  # (-spread, tie, parts: sum, indices)
    for i, size in enumerate(sizes):
        parts = [(size, [i])] + [(0, [])] * (num_parts - 1)
        heapq.heappush(heap, (-_spread(parts), next(ties), parts))
    while len(heap) > 1:
        (*_, one), (*_, other) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(a + b, m + n) for (a, m), (b, n) in zip(one, reversed(other), strict=True)]
        joined.sort(key=lambda part: -part[0])
        heapq.heappush(heap, (-_spread(joined), next(ties), joined))
    parts = heap[0][2] if heap else [(0, [])] * num_parts
    return [sorted(indices) for _, indices in parts]


def _spread(parts: Sequence[tuple[int, list[int]]]) -> int:
    return parts[0][0] - parts[-1][0]
