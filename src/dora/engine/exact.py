"""Exact mode: a token's log-prob is the same bits whoever computes it, and beside whatever others.

The kernels treat every row by itself. Matrix products do not: their library picks an algorithm by the
number of rows. Here they have few different numbers of rows, between which a test at the start finds
no difference, and all that is computed is a decode step: a prompt, or an answer that a trainer wants
log-probs of, is a step with one row per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from dora.engine.blocks import num_blocks_for
from dora.engine.kernels import Product, choose_kernels
from dora.engine.runner import Prompt, Runner
from dora.engine.sampler import logprobs_of
from dora.engine.sequence import EngineError
from dora.engine.workspace import Batch, Workspace
from dora.model.config import ModelConfig
from dora.model.routing import Recorder, mix, shares
from dora.model.weights import initial_weights

_HEIGHT = 16  # rows of a product that all others are compared with
_HEIGHTS = (1, 2, 4, 8, _HEIGHT, 32)
_STEP_TOKENS = 64  # of prompts
SPARE_ROWS = _STEP_TOKENS + max(_HEIGHTS)  # of a workspace: for prompts, and what the last product adds
_LONG_CONTEXT = 1200  # tokens, in the test of attention
_MOST_TOKENS = 2**14  # of a vocabulary in the test

Int64s = NDArray[np.int64]


class ExactRunner(Runner):
    """A Runner whose results for a token depend on the weights and the tokens up to it alone.

    The last SPARE_ROWS rows of its workspace are its own. `heights` (see `self_test`) are the numbers of
    rows that products have, ascending.
    """

    def __init__(self, workspace: Workspace, kernels: str, heights: Sequence[int]) -> None:
        self._heights = heights
        super().__init__(workspace, kernels)

    def arrange(self, rows: Int64s, slots: Int64s) -> None:
        """See Runner. A product may reach into rows of the next slot, whose own products come later."""
        self.batch = Batch(rows, slots)
        self._segments = []
        for slot, start, stop in self.batch.segments():
            at = start
            while at < stop:
                height = self._height(stop - at)
                part, end = self._segment(slot, at, at + height), min(at + height, stop)
                self._segments.append(replace(part, stop=end, x=part.x[: end - at]))
                at = end

    def prefill(self, slot: int, prompts: list[Prompt]) -> int:
        """See Runner."""
        arranged = self.batch
        for tokens, positions in self.steps(slot, prompts):
            self._advance(tokens, positions)
        self.arrange(arranged.rows, arranged.slots)
        return sum(prompt.num_new for prompt in prompts)

    def steps(self, slot: int, prompts: Sequence[Prompt]) -> Iterator[tuple[Int64s, Int64s]]:
        """Tokens and positions [N] of all that is new in prompts, a step at a time; its rows are arranged."""
        new = [prompt for prompt in prompts if prompt.num_new]
        owners = np.repeat(np.arange(len(new)), [prompt.num_new for prompt in new])
        tokens = np.array([token for prompt in new for token in prompt.token_ids[prompt.num_known :]])
        positions = np.array([at for prompt in new for at in range(prompt.num_known, len(prompt.token_ids))])
        tables = self._work.tables[-SPARE_ROWS:]
        for at in range(0, len(owners), _STEP_TOKENS):
            part = slice(at, at + _STEP_TOKENS)
            rows = owners[part] - owners[at]
            for table, prompt in zip(tables, new[owners[at] : owners[part][-1] + 1], strict=False):
                table[: len(prompt.blocks)] = torch.tensor(prompt.blocks)
            self.arrange(len(self._work.tables) - SPARE_ROWS + rows, np.full(len(rows), slot))
            yield tokens[part], positions[part]

    def _height(self, num_rows: int) -> int:
        """The rows of the next product where so many are left."""
        return next((height for height in self._heights if height >= num_rows), self._heights[-1])

    def _mixture(self, layer: int, recorder: Recorder) -> None:
        name, work = f"model.layers.{layer}.mlp.", self._work
        scores = [
            self._times(s.own.views[name + "gate.weight"], s.hidden)[: s.stop - s.start]
            for s in self._segments
        ]
        probs = torch.cat(scores).float().softmax(-1)
        ids = recorder(layer, probs)
        weights = shares(work.config, probs, ids).to(work.dtype)
        for slot, start, stop in self.batch.segments():
            own = slice(start, stop)
            expert = partial(self._expert, slot, name)
            work.delta[own] = mix(work.hidden[own], ids[own], weights[own], expert)

    def _expert(self, slot: int, mlp: str, number: int, x: Tensor) -> Tensor:
        layout, flat, name = self._work.layout, self._work.slot(slot), f"{mlp}experts.{number}."
        gate_up = layout.span(flat, name + "gate_proj.weight", name + "up_proj.weight")
        down, parts = layout.span(flat, name + "down_proj.weight"), []
        for part in x.split(self._heights[-1]):
            padded = F.pad(part, (0, 0, 0, self._height(len(part)) - len(part)))
            # As halves of one product, rows are no neighbours, and torch takes the same steps for each.
            gate, up = self._times(gate_up, padded).chunk(2, dim=-1)
            parts.append(self._times(down, F.silu(gate) * up)[: len(part)])
        return torch.cat(parts)

    def _times(self, weights: Tensor, x: Tensor) -> Tensor:
        """x [N, K] times a matrix [M, K] transposed."""
        out = x.new_empty(len(x), len(weights))
        self._kernels.product(weights, None)(x, out=out)
        return out

    def products(self) -> list[tuple[Product, Tensor, Tensor]]:
        """One of each kind of product that slot 0 has, a buffer for its input and one for its output."""
        own, work = self._slots[0], self._work
        found = [
            (own.qkv[0], work.hidden, work.qkv),
            (own.output[0], work.attended, work.delta),
            (own.head, work.hidden, work.logits),
        ]
        found += [(product, work.hidden, work.gate_up) for product in own.gate_up.values()]
        found += [(product, work.gated, work.delta) for product in own.down.values()]
        for layer in self._mixtures[:1]:
            expert = f"model.layers.{layer}.mlp.experts.0."
            gate_up = work.layout.span(work.slot(0), expert + "gate_proj.weight", expert + "up_proj.weight")
            router = own.views[f"model.layers.{layer}.mlp.gate.weight"]
            for weights in (router, gate_up, own.views[expert + "down_proj.weight"]):
                x, out = (torch.zeros(len(work.x), width, dtype=work.dtype) for width in weights.shape[::-1])
                found.append((self._kernels.product(weights, None), x, out))
        return found


class Scorer:
    """Log-probs of given answers, as exact engines report them for their own."""

    def __init__(
        self, config: ModelConfig, max_context: int, temperature: float, kernels: str, dtype: str = "float32"
    ) -> None:
        """Sequences have at most `max_context` tokens; `temperature` is not 0. Raises EngineError."""
        self._blocks = list(range(num_blocks_for(max_context)))
        self._work = Workspace(config, SPARE_ROWS, max_context, 1, len(self._blocks), dtype=dtype)
        self._runner = ExactRunner(self._work, kernels, self_test(config, kernels, dtype))
        self._divisors = np.full(1, temperature, np.float32)

    def __call__(
        self, flat: Tensor, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]]
    ) -> Tensor:
        """Log-probs [N] of the tokens of all answers, with the weights `flat` ([numel])."""
        self._work.slot(0).copy_(flat)
        found = [np.zeros(0, np.float32)]
        for prompt, answer in zip(prompts, answers, strict=True):
            sequence = (*prompt, *answer)
            targets = np.array(sequence[1:])
            for tokens, positions in self._runner.steps(0, [Prompt(sequence[:-1], 0, self._blocks)]):
                own = positions >= len(prompt) - 1
                logits = self._runner.decode(tokens, positions).numpy()[own]
                found.append(logprobs_of(logits, targets[positions[own]], self._divisors))
        return torch.from_numpy(np.concatenate(found))


def self_test(config: ModelConfig, kernels: str, dtype: str = "float32", device: str = "cpu") -> list[int]:
    """Numbers of rows of a product that give each row the same bits, wherever it is among whatever others.

    Ascending. It tries the matrices of two layers, and a head of at most _MOST_TOKENS. Raises EngineError
    if this machine's matrix products or kernels cannot do what exact mode needs.
    """
    if device != "cpu" or kernels == "triton":
        raise EngineError(
            f"exact = true runs on a CPU, not with device = {device!r}, kernels = {kernels!r}; "
            "set exact = false"
        )
    first_mixture = next(iter(config.mixture_layers), 0)
    layers = min(max(2, first_mixture + 1), config.num_hidden_layers)
    vocab = min(_MOST_TOKENS, config.vocab_size)
    small = replace(config, num_hidden_layers=layers, vocab_size=vocab)
    context = min(96, config.max_position_embeddings)
    work = Workspace(small, 3 + SPARE_ROWS, context, 2, 3 * num_blocks_for(context), dtype=dtype)
    setting = f"with kernels = {kernels!r}, {dtype} and {torch.get_num_threads()} threads"
    heights = _agreeing_heights(work, ExactRunner(work, kernels, _HEIGHTS))
    if _HEIGHT not in heights:
        raise EngineError(
            f"exact = true: a row's product with a matrix depends on the rows beside it {setting}; "
            "use one thread (torch.set_num_threads) or set exact = false"
        )
    if not (
        _is_attention_exact(config, kernels, dtype)
        and _is_decode_exact(work, ExactRunner(work, kernels, heights))
    ):
        raise EngineError(
            f"exact = true: a token's logits depend on the tokens computed beside it {setting}; "
            "set other kernels or exact = false"
        )
    return heights


def _agreeing_heights(work: Workspace, runner: ExactRunner) -> list[int]:
    """Those of _HEIGHTS in which shuffled rows give what they gave in order, _HEIGHT at a time.

    Every sum has each of its terms twice, with both signs: what is left are rounding errors, which tell
    of any other order of summation even after they are rounded to bf16.
    """
    source, agreeing = torch.Generator().manual_seed(0), set(_HEIGHTS)
    for view in work.layout.views(work.slot(0)).values():
        view.copy_(_paired(view.shape, 1, source) if view.dim() == 2 else torch.zeros(view.shape))
    for product, x, out in runner.products():
        rows = _paired((max(_HEIGHTS), x.shape[1]), -1, source).to(x.dtype)
        shuffled = torch.randperm(len(rows), generator=source)

        def times(
            rows: Tensor, height: int, product: Product = product, x: Tensor = x, out: Tensor = out
        ) -> Tensor:
            for at in range(0, len(rows), height):
                part = slice(at, at + height)
                product(x[part].copy_(rows[part]), out=out[part])
            return out[: len(rows)].clone()

        want = times(rows, _HEIGHT)[shuffled]
        agreeing = {height for height in agreeing if torch.equal(times(rows[shuffled], height), want)}
    return sorted(agreeing)


def _paired(shape: Sequence[int], sign: int, source: torch.Generator) -> Tensor:
    """A matrix whose columns come twice, the second time elsewhere and times `sign`; an odd one is 0."""
    num_rows, width = shape
    half = torch.randn(num_rows, width // 2, generator=source)
    order = torch.randperm(width // 2, generator=torch.Generator().manual_seed(width))
    return F.pad(torch.cat([half, sign * half[:, order]], dim=1), (0, width % 2))


def _is_attention_exact(config: ModelConfig, kernels: str, dtype: str) -> bool:
    """Whether rows of short contexts attend alike alone and beside one of a long context."""
    context = min(_LONG_CONTEXT, config.max_position_embeddings)
    shape, num_blocks = replace(config, num_hidden_layers=1, vocab_size=1), num_blocks_for(context)
    work = Workspace(shape, 2, context, 1, 2 * num_blocks, dtype=dtype)
    own, source = choose_kernels(kernels, work), torch.Generator().manual_seed(0)
    for noise in (work.weights, work.kv, work.qkv):
        noise.normal_(generator=source)
    work.tables.copy_(torch.arange(2 * num_blocks).view(2, -1))

    def attended(*positions: int) -> Tensor:
        rows = np.arange(len(positions))
        own.attend(Batch(rows, np.zeros_like(rows)), np.array(positions), 0)
        return work.attended[0].clone()

    places = (context // 20, context // 3, context - 2)
    return all(torch.equal(attended(at), attended(at, context - 1)) for at in places)


def _is_decode_exact(work: Workspace, runner: ExactRunner) -> bool:
    """Whether the last tokens of three sequences get the same logits side by side, one per step, as alone.

    Two are of one version, and one is of another.
    """
    context, slots, rows, num_last = len(work.cos), [0, 0, 1], np.array([2, 0, 1]), 3
    for slot in (0, 1):
        work.slot(slot).copy_(initial_weights(work.config, seed=slot, std=0.2))
    source, tables = np.random.default_rng(0), torch.arange(len(work.kv)).view(3, -1).flip(1)
    work.tables[rows] = tables
    lengths = (context, context // 3, num_last + 1)
    sequences = [tuple(source.integers(work.config.vocab_size, size=n).tolist()) for n in lengths]
    prompts = [Prompt(s, 0, table.tolist()) for s, table in zip(sequences, tables, strict=True)]
    alone = [
        torch.cat([runner.decode(*step).clone() for step in runner.steps(slot, [prompt])])
        for slot, prompt in zip(slots, prompts, strict=True)
    ]
    work.kv.zero_()
    parts = [replace(prompt, token_ids=prompt.token_ids[:-num_last]) for prompt in prompts]
    runner.prefill(0, parts[:2])
    runner.prefill(1, parts[2:])
    runner.arrange(rows, np.array(slots))
    for back in range(num_last, 0, -1):
        tokens, positions = np.array([[s[-back], len(s) - back] for s in sequences]).T.copy()
        if not torch.equal(runner.decode(tokens, positions), torch.stack([x[-back] for x in alone])):
            return False
    return True
