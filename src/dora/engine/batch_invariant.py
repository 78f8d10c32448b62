"""Exact mode: the log-prob of a token has the same bits in any batch, in the engine and in the trainer.

Kernels compute each row independently, but linear layers do not: their library picks an algorithm by the
number of rows. Here linear layers are computed for a few fixed numbers of rows, and a self-test at the start
proves that these agree on this machine. Everything is a decode step: a prompt, or an output that the trainer
scores, is a step with one row per token.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from dora.engine.block_manager import num_blocks_for
from dora.engine.kernels import Linear, choose_kernels
from dora.engine.kernels.sampler import Int64s, logprobs_of
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.engine.request import EngineError, PrefillInput
from dora.engine.runner import ModelRunner
from dora.model.config import ModelConfig
from dora.model.moe import RecordingRouter, expert_weights, mix_experts
from dora.model.weights import initial_weights

_REFERENCE_ROWS = 16  # the number of rows that the others are compared with
_ROW_COUNTS = (1, 2, 4, 8, _REFERENCE_ROWS, 32)  # to try
_STEP_TOKENS = 64  # of prompts
SPARE_ROWS = _STEP_TOKENS + max(_ROW_COUNTS)  # of a workspace: for prompts and the padding of linear layers
_LONG_CONTEXT = 1200  # tokens, in the test of attention
_MAX_VOCAB = 2**14  # in the test of linear layers


class BatchInvariantRunner(ModelRunner):
    """A ModelRunner whose results for a token depend only on the weights and the tokens up to it.

    It uses the last SPARE_ROWS rows of its workspace for prompts. `row_counts` (see `self_test`) are the
    numbers of rows that linear layers are computed for, ascending.
    """

    def __init__(self, workspace: Workspace, kernels: str, row_counts: Sequence[int]) -> None:
        self._row_counts = row_counts
        super().__init__(workspace, kernels)

    def set_batch(self, rows: Int64s, slots: Int64s) -> None:
        """See ModelRunner. A padded segment may overwrite rows of the next slot, which are computed later."""
        self.batch = ForwardBatch(rows, slots)
        self._segments = []
        for slot, start, stop in self.batch.segments():
            at = start
            while at < stop:
                num_rows = self._padded(stop - at)
                part, end = self._segment(slot, at, at + num_rows), min(at + num_rows, stop)
                self._segments.append(replace(part, stop=end, x=part.x[: end - at]))
                at = end

    def prefill(self, slot: int, prompts: list[PrefillInput]) -> int:
        """See ModelRunner."""
        batch = self.batch
        for tokens, positions in self.prefill_steps(slot, prompts):
            self._forward_and_store_routes(tokens, positions)
        self.set_batch(batch.rows, batch.slots)
        return sum(prompt.num_new for prompt in prompts)

    def prefill_steps(self, slot: int, prompts: Sequence[PrefillInput]) -> Iterator[tuple[Int64s, Int64s]]:
        """Sets the batch of each step, and yields tokens and positions [N], for all new tokens of prompts."""
        new = [prompt for prompt in prompts if prompt.num_new]
        owners = np.repeat(np.arange(len(new)), [prompt.num_new for prompt in new])
        tokens = np.array([token for prompt in new for token in prompt.token_ids[prompt.num_cached :]])
        positions = np.array([at for prompt in new for at in range(prompt.num_cached, len(prompt.token_ids))])
        tables = self._workspace.block_tables[-SPARE_ROWS:]
        for at in range(0, len(owners), _STEP_TOKENS):
            part = slice(at, at + _STEP_TOKENS)
            rows = owners[part] - owners[at]
            for table, prompt in zip(tables, new[owners[at] : owners[part][-1] + 1], strict=False):
                table[: len(prompt.block_table)] = torch.tensor(prompt.block_table)
            first_row = len(self._workspace.block_tables) - SPARE_ROWS
            self.set_batch(first_row + rows, np.full(len(rows), slot))
            yield tokens[part], positions[part]

    def example_layers(self) -> list[tuple[Linear, Tensor, Tensor]]:
        """A linear layer of each kind of slot 0, with a buffer for its input and one for its output."""
        weights, work = self._slots[0], self._workspace
        found = [
            (weights.qkv[0], work.hidden, work.qkv),
            (weights.output[0], work.attended, work.delta),
            (weights.lm_head, work.hidden, work.logits),
        ]
        found += [(linear, work.hidden, work.gate_up) for linear in weights.gate_up.values()]
        found += [(linear, work.gated, work.delta) for linear in weights.down.values()]
        for layer in self._moe_layers[:1]:
            expert = f"model.layers.{layer}.mlp.experts.0."
            span = work.layout.span
            gate_up = span(work.slot_weights(0), expert + "gate_proj.weight", expert + "up_proj.weight")
            router = weights.views[f"model.layers.{layer}.mlp.gate.weight"]
            for matrix in (router, gate_up, weights.views[expert + "down_proj.weight"]):
                x, out = (torch.zeros(len(work.x), width, dtype=work.dtype) for width in matrix.shape[::-1])
                found.append((self._kernels.linear(matrix, None), x, out))
        return found

    def _padded(self, num_rows: int) -> int:
        """The number of rows that the next linear layer is computed for, if `num_rows` are left."""
        return next((count for count in self._row_counts if count >= num_rows), self._row_counts[-1])

    def _moe(self, layer: int, router: RecordingRouter) -> None:
        name, work = f"model.layers.{layer}.mlp.", self._workspace
        scores = [
            self._times(s.weights.views[name + "gate.weight"], s.hidden)[: s.stop - s.start]
            for s in self._segments
        ]
        probs = torch.cat(scores).float().softmax(-1)
        ids = router(layer, probs)
        weights = expert_weights(work.config, probs, ids).to(work.dtype)
        for slot, start, stop in self.batch.segments():
            part = slice(start, stop)
            expert = partial(self._expert, slot, name)
            work.delta[part] = mix_experts(work.hidden[part], ids[part], weights[part], expert)

    def _expert(self, slot: int, mlp: str, number: int, x: Tensor) -> Tensor:
        layout, flat = self._workspace.layout, self._workspace.slot_weights(slot)
        name = f"{mlp}experts.{number}."
        gate_up = layout.span(flat, name + "gate_proj.weight", name + "up_proj.weight")
        down, parts = layout.span(flat, name + "down_proj.weight"), []
        for part in x.split(self._row_counts[-1]):
            padded = F.pad(part, (0, 0, 0, self._padded(len(part)) - len(part)))
            # Halves of one product are strided, so that torch computes each row with the same instructions.
            gate, up = self._times(gate_up, padded).chunk(2, dim=-1)
            parts.append(self._times(down, F.silu(gate) * up)[: len(part)])
        return torch.cat(parts)

    def _times(self, weights: Tensor, x: Tensor) -> Tensor:
        """x [N, K] times weights [M, K] transposed."""
        out = x.new_empty(len(x), len(weights))
        self._kernels.linear(weights, None)(x, out=out)
        return out


class LogprobScorer:
    """Computes log-probs of given outputs with the bits that exact engines report."""

    def __init__(
        self, config: ModelConfig, max_context: int, temperature: float, kernels: str, dtype: str = "float32"
    ) -> None:
        """Sequences have at most `max_context` tokens; `temperature` is not 0. Raises EngineError."""
        self._blocks = list(range(num_blocks_for(max_context)))
        self._work = Workspace(config, SPARE_ROWS, max_context, 1, len(self._blocks), dtype=dtype)
        self._runner = BatchInvariantRunner(self._work, kernels, self_test(config, kernels, dtype))
        self._temperatures = np.full(1, temperature, np.float32)

    def __call__(
        self, flat: Tensor, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]
    ) -> Tensor:
        """Log-probs [N] of the tokens of all outputs, with the weights `flat` [numel]."""
        self._work.slot_weights(0).copy_(flat)
        found = [np.zeros(0, np.float32)]
        for prompt, output in zip(prompts, outputs, strict=True):
            sequence = (*prompt, *output)
            targets = np.array(sequence[1:])
            inputs = PrefillInput(sequence[:-1], 0, self._blocks)
            for tokens, positions in self._runner.prefill_steps(0, [inputs]):
                is_output = positions >= len(prompt) - 1
                logits = self._runner.decode(tokens, positions).numpy()[is_output]
                found.append(logprobs_of(logits, targets[positions[is_output]], self._temperatures))
        return torch.from_numpy(np.concatenate(found))


def self_test(config: ModelConfig, kernels: str, dtype: str = "float32", device: str = "cpu") -> list[int]:
    """Numbers of rows, ascending, for which linear layers give each row the same bits beside any other rows.

    Tests the matrices of two layers and a vocabulary of at most _MAX_VOCAB tokens. Raises EngineError if the
    linear layers or kernels of this machine cannot support exact mode.
    """
    if device != "cpu" or kernels == "triton":
        raise EngineError(
            f"exact = true runs on a CPU only, not with device = {device!r}, kernels = {kernels!r}; "
            "set exact = false"
        )
    first_moe_layer = next(iter(config.moe_layers), 0)
    layers = min(max(2, first_moe_layer + 1), config.num_hidden_layers)
    vocab = min(_MAX_VOCAB, config.vocab_size)
    small = replace(config, num_hidden_layers=layers, vocab_size=vocab)
    context = min(96, config.max_position_embeddings)
    work = Workspace(small, 3 + SPARE_ROWS, context, 2, 3 * num_blocks_for(context), dtype=dtype)
    setting = f"with kernels = {kernels!r}, {dtype} and {torch.get_num_threads()} threads"
    row_counts = _agreeing_row_counts(work, BatchInvariantRunner(work, kernels, _ROW_COUNTS))
    if _REFERENCE_ROWS not in row_counts:
        raise EngineError(
            f"exact = true: the product of a row with a matrix depends on the rows beside it {setting}; "
            "use one thread (torch.set_num_threads) or set exact = false"
        )
    if not (
        _is_attention_exact(config, kernels, dtype)
        and _is_decode_exact(work, BatchInvariantRunner(work, kernels, row_counts))
    ):
        raise EngineError(
            f"exact = true: the logits of a token depend on the tokens computed beside it {setting}; "
            "set other kernels or exact = false"
        )
    return row_counts


def _agreeing_row_counts(work: Workspace, runner: BatchInvariantRunner) -> list[int]:
    """The _ROW_COUNTS with which shuffled rows have the same results as _REFERENCE_ROWS rows at a time in
    order.

    Each sum contains each term twice, with both signs. Only rounding errors are left, which reveal another
    order of summation even after rounding to bf16.
    """
    generator, agreeing = torch.Generator().manual_seed(0), set(_ROW_COUNTS)
    for view in work.layout.views(work.slot_weights(0)).values():
        view.copy_(_paired(view.shape, 1, generator) if view.dim() == 2 else torch.zeros(view.shape))
    for linear, x, out in runner.example_layers():
        rows = _paired((max(_ROW_COUNTS), x.shape[1]), -1, generator).to(x.dtype)
        shuffled = torch.randperm(len(rows), generator=generator)

        def compute(
            rows: Tensor, num_rows: int, linear: Linear = linear, x: Tensor = x, out: Tensor = out
        ) -> Tensor:
            for at in range(0, len(rows), num_rows):
                part = slice(at, at + num_rows)
                linear(x[part].copy_(rows[part]), out=out[part])
            return out[: len(rows)].clone()

        expected = compute(rows, _REFERENCE_ROWS)[shuffled]
        agreeing = {count for count in agreeing if torch.equal(compute(rows[shuffled], count), expected)}
    return sorted(agreeing)


def _paired(shape: Sequence[int], sign: int, generator: torch.Generator) -> Tensor:
    """A matrix that has each column twice, the second permuted and times `sign`; an odd last column is 0."""
    num_rows, width = shape
    half = torch.randn(num_rows, width // 2, generator=generator)
    order = torch.randperm(width // 2, generator=torch.Generator().manual_seed(width))
    return F.pad(torch.cat([half, sign * half[:, order]], dim=1), (0, width % 2))


def _is_attention_exact(config: ModelConfig, kernels: str, dtype: str) -> bool:
    """Whether rows of short contexts have the same attention alone and beside a row of a long context."""
    context = min(_LONG_CONTEXT, config.max_position_embeddings)
    shape, num_blocks = replace(config, num_hidden_layers=1, vocab_size=1), num_blocks_for(context)
    work = Workspace(shape, 2, context, 1, 2 * num_blocks, dtype=dtype)
    chosen, generator = choose_kernels(kernels, work), torch.Generator().manual_seed(0)
    for noise in (work.weights, work.kv, work.qkv):
        noise.normal_(generator=generator)
    work.block_tables.copy_(torch.arange(2 * num_blocks).view(2, -1))

    def attended(*positions: int) -> Tensor:
        rows = np.arange(len(positions))
        chosen.attend(ForwardBatch(rows, np.zeros_like(rows)), np.array(positions), 0)
        return work.attended[0].clone()

    short = (context // 20, context // 3, context - 2)
    return all(torch.equal(attended(at), attended(at, context - 1)) for at in short)


def _is_decode_exact(work: Workspace, runner: BatchInvariantRunner) -> bool:
    """Whether the last tokens of three sequences, of two versions, have the same logits together as alone."""
    context, slots, rows, num_last = len(work.cos), [0, 0, 1], np.array([2, 0, 1]), 3
    for slot in (0, 1):
        work.slot_weights(slot).copy_(initial_weights(work.config, seed=slot, std=0.2))
    generator, tables = np.random.default_rng(0), torch.arange(len(work.kv)).view(3, -1).flip(1)
    work.block_tables[rows] = tables
    lengths = (context, context // 3, num_last + 1)
    sequences = [tuple(generator.integers(work.config.vocab_size, size=n).tolist()) for n in lengths]
    prompts = [PrefillInput(s, 0, table.tolist()) for s, table in zip(sequences, tables, strict=True)]
    alone = [
        torch.cat([runner.decode(*step).clone() for step in runner.prefill_steps(slot, [prompt])])
        for slot, prompt in zip(slots, prompts, strict=True)
    ]
    work.kv.zero_()
    parts = [replace(prompt, token_ids=prompt.token_ids[:-num_last]) for prompt in prompts]
    runner.prefill(0, parts[:2])
    runner.prefill(1, parts[2:])
    runner.set_batch(rows, np.array(slots))
    for back in range(num_last, 0, -1):
        tokens, positions = np.array([[s[-back], len(s) - back] for s in sequences]).T.copy()
        if not torch.equal(runner.decode(tokens, positions), torch.stack([x[-back] for x in alone])):
            return False
    return True
