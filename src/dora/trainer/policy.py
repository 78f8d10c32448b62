"""Log-probs that a policy gives to packed responses, without padding and without the full logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import copy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dora.model import decoder
from dora.model.attention import SharedKeys, VarlenAttention, VarlenLayout, take_keys, varlen_attention
from dora.model.config import ModelConfig
from dora.model.decoder import AttentionFn, Compiler, LayerRunner, run_layer_once
from dora.model.device import compiled, uncompiled
from dora.model.moe import Router
from dora.trainer.packing import PackedBatch

BatchLogprobs = Callable[[PackedBatch], Tensor]

NORM = "model.norm.weight"
_HEAD_ROWS = 8192  # of a product that is converted before it is added


class Policy:
    """A decoder as a distribution over responses, at one sampling temperature.

    In exact mode, `exact_logprobs` computes the log-probs [N] of a batch with the same `weights` bit for bit
    as engines do; their gradients are this decoder's.
    """

    takes_router = True  # of a mixture of experts, which another router may replace

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        temperature: float = 1.0,
        exact_logprobs: BatchLogprobs | None = None,
        *,
        logits_chunk_tokens: int = 256,
        activation_checkpointing: bool = False,
        torch_compile: bool = False,
        images: Path | None = None,
    ) -> None:
        """At most `logits_chunk_tokens` rows of logits exist at a time.

        With `activation_checkpointing` a layer saves its input alone and runs again in the backward pass.
        `torch_compile` compiles log-probs and, where a kernel for variable lengths exists, layers. `images`
        is the run's `ImageFolder`, for a model that reads images.
        """
        self._exact_logprobs = exact_logprobs
        self._chunk_tokens = logits_chunk_tokens
        self._torch_compile = torch_compile
        self._images = images
        self._fuse: Compiler = compiled if torch_compile else uncompiled
        self.config = config
        self.weights = weights
        self.temperature = temperature
        self.device = next(iter(weights.values())).device
        self._prepare(activation_checkpointing)

    def _prepare(self, activation_checkpointing: bool) -> None:
        """Make what the forward pass needs beside the weights."""
        self._kernel = varlen_attention(self.weights[NORM].new_empty(0, self.config.head_dim))
        self._run_layer: LayerRunner = run_checkpointed if activation_checkpointing else run_layer_once
        self._fuse_layer: Compiler = self._fuse
        if self._kernel is None:
            self._fuse_layer = uncompiled
        elif self._torch_compile and activation_checkpointing and not self.config.moe_layers:
            self._fuse_layer, self._run_layer = partial(compiled, recomputes=True), run_layer_once
        cos, sin = decoder.rope_tables(self.config, self.config.max_position_embeddings)
        self._cos, self._sin = cos.to(self.device), sin.to(self.device)

    def with_weights(self, weights: Mapping[str, Tensor], exact_logprobs: BatchLogprobs | None) -> Policy:
        """The same policy with other weights."""
        other = copy(self)
        other.weights, other._exact_logprobs = weights, exact_logprobs
        return other

    def logprobs(self, batch: PackedBatch, router: Router | None = None) -> tuple[Tensor, Tensor]:
        """Log-probs of the response tokens [N] and the entropies of their distributions [N], in nats.

        `router` chooses the experts of MoE layers. Only positions that predict a token of the loss go through
        the head.
        """
        hidden = self.hidden_states(batch, router).index_select(0, batch.logits_indices)
        logprobs, entropies = self._token_logprobs(hidden, batch.targets)
        if self._exact_logprobs is not None:  # the difference is 0 and carries the gradient
            logprobs = self._exact_logprobs(batch) + (logprobs - logprobs.detach())
        return logprobs, entropies

    def _token_logprobs(self, hidden: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probs of `targets` [N] and entropies [N] from hidden states [N, hidden]."""
        head = decoder.lm_head(self.weights)
        return token_logprobs(hidden, head, targets, self.temperature, self._chunk_tokens, self._fuse)

    def hidden_states(self, batch: PackedBatch, router: Router | None = None) -> Tensor:
        """Final hidden states [M, hidden]."""
        cos, sin = (table.index_select(0, batch.position_ids) for table in (self._cos, self._sin))
        if self._kernel is None:
            attend = packed_attention(batch.blocks, batch.block_indices)
        else:
            attend = _varlen_attention(self._kernel, batch.varlen, batch.shared_keys)
        return decoder.forward(
            self.weights, self.config, batch.input_ids, cos, sin, lambda layer: attend, router,
            self._run_layer, self._fuse_layer,
        )  # fmt: skip


def run_checkpointed(number: int, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A `LayerRunner` that recomputes layers in the backward pass; they must not be random."""
    return checkpoint(layer, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _varlen_attention(kernel: VarlenAttention, layout: VarlenLayout, keys: SharedKeys | None) -> AttentionFn:
    """Attention in one call for all sequences."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if keys is not None:
            k, v = take_keys(k, keys), take_keys(v, keys)
        return kernel(q, k, v, layout)

    return attend


def packed_attention(blocks: Sequence[Tensor], block_indices: Tensor | None = None) -> AttentionFn:
    """Causal attention inside each sequence, as with a block-diagonal mask.

    `blocks` [B, L] hold the input indices of B sequences of similar lengths, padded on the right, where
    causality hides the padding. `block_indices` [M] locate each input among the blocks' flattened tokens;
    None: the inputs are in that order. Several sequences may share an input if all inputs before it are the
    same.
    """

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [_block_attention(*(_take_rows(x, block) for x in (q, k, v))) for block in blocks]
        return torch.cat(parts) if block_indices is None else _take_rows(torch.cat(parts), block_indices)

    return attend


def _block_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q [B, L, heads, D], k and v [B, L, kv heads, D] -> [B * L, heads, D]."""
    is_grouped = q.shape[2] != k.shape[2]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=is_grouped)
    return out.transpose(1, 2).flatten(0, 1)


def _take_rows(x: Tensor, ids: Tensor) -> Tensor:
    """x[ids] by an embedding, whose backward pass on a CPU is far faster than that of indexing."""
    rows: Tensor = F.embedding(ids, x.flatten(1)).unflatten(-1, x.shape[1:])
    return rows


def token_logprobs(
    hidden: Tensor,
    head: Tensor,
    targets: Tensor,
    temperature: float,
    chunk_tokens: int,
    fuse: Compiler = uncompiled,
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` [N] and the distributions' entropies [N], in nats; both carry a gradient.

    The distributions are softmax(hidden head^T / temperature) of hidden [N, H] and head [V, H]. The product
    is computed in the dtype of `hidden`, the rest in at least fp32. Both passes handle `chunk_tokens`
    positions at a time, and the backward pass computes their logits again. Peak memory is two buffers of
    chunk_tokens * V logits, the head in the dtype of `hidden`, and in the backward pass the head's gradient.
    A token of probability 0 contributes 0 to the entropy. `fuse` compiles what is done to the logits.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _ChunkedLogprobs.apply
    return apply(hidden, head, targets, temperature, chunk_tokens, fuse)


class _ChunkedLogprobs(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int,
        fuse: Compiler,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk_tokens, ctx.fuse = temperature, chunk_tokens, fuse
        matrix = head.to(hidden.dtype)
        chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        results = [
            fuse(_logprobs_and_entropies)(rows, matrix, temperature, chunk_targets)
            for rows, chunk_targets in chunks
        ]
        logprobs, entropies = (torch.cat(column) for column in zip(*results, strict=True))
        ctx.save_for_backward(hidden, head, targets, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Gradients for hidden and head; `grads` are those of log-probs and entropies, each [N] or None."""
        hidden, head, targets, entropies = ctx.saved_tensors
        matrix, temperature, size = head.to(hidden.dtype), ctx.temperature, ctx.chunk_tokens
        grad_hidden = torch.empty_like(hidden)
        grad_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        grad_logits = None
        for i in range(0, len(hidden), size):
            chunk, grad_logits = slice(i, i + size), None  # free the previous chunk's first
            chunk_grads = [None if grad is None else grad[chunk, None] / temperature for grad in grads]
            columns = targets[chunk, None], entropies[chunk, None]
            grad_logits = ctx.fuse(_logits_gradient)(
                hidden[chunk], matrix, temperature, *columns, *chunk_grads
            )
            torch.mm(grad_logits, matrix, out=grad_hidden[chunk])
            if grad_head is not None:
                _add_product(grad_head, grad_logits, hidden[chunk])
        return grad_hidden, grad_head, None, None, None, None


def _distribution(rows: Tensor, matrix: Tensor, temperature: float) -> Tensor:
    """Log-probs of all tokens [C, V]."""
    logits = F.linear(rows, matrix)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.div_(temperature).log_softmax(-1)


def _logprobs_and_entropies(
    rows: Tensor, matrix: Tensor, temperature: float, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Log-probs of targets [C] and entropies [C]."""
    distribution = _distribution(rows, matrix, temperature)
    logprobs = distribution.gather(-1, targets[:, None]).squeeze(-1)
    p = distribution.exp()
    return logprobs, -p.mul_(_finite(distribution)).sum(-1)


def _finite(distribution: Tensor) -> Tensor:
    """Clamp in place, so that a probability of 0 times its logarithm is 0."""
    return distribution.clamp_(min=torch.finfo(distribution.dtype).min)


def _logits_gradient(
    rows: Tensor,
    matrix: Tensor,
    temperature: float,
    targets: Tensor,
    entropies: Tensor,
    grad_logprobs: Tensor | None,
    grad_entropies: Tensor | None,
) -> Tensor:
    """The gradient for logits / temperature [C, V], in the dtype of `rows` [C, H]; the others are [C, 1].

    With p the distribution, y the target and H the entropy: d log p[y] / dz = onehot(y) - p, and
    dH / dz = -p (log p + H).
    """
    distribution = _distribution(rows, matrix, temperature)
    p = distribution.exp()
    if grad_entropies is None:
        distribution.zero_()
    else:
        _finite(distribution).add_(entropies).mul_(grad_entropies)
    if grad_logprobs is not None:
        distribution.add_(grad_logprobs)
    distribution.mul_(p).neg_()
    del p
    if grad_logprobs is not None and torch.compiler.is_compiling():  # a scatter would be a kernel of its own
        at_target = torch.arange(distribution.shape[1], device=targets.device) == targets
        distribution += torch.where(at_target, grad_logprobs, 0.0)
    elif grad_logprobs is not None:
        distribution.scatter_add_(1, targets, grad_logprobs)
    return distribution.to(rows.dtype)


def _add_product(total: Tensor, grad_logits: Tensor, rows: Tensor) -> None:
    """Add grad_logits^T rows to `total` [V, H], a few rows at a time if the dtypes differ."""
    if total.dtype == rows.dtype:
        total.addmm_(grad_logits.T, rows)
        return
    for part, grads in zip(total.split(_HEAD_ROWS), grad_logits.split(_HEAD_ROWS, dim=1), strict=True):
        part += grads.T @ rows
