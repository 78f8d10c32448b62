"""Log-probs of given tokens, and entropies, without the vocabulary's logits of all positions at once.

Both passes go over the positions in chunks. The backward pass computes a chunk's logits again and turns
them into its share of the gradients, so that of a position no row of logits is kept in between.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.nn import functional as F


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` [N] and the distributions' entropies [N], in nats; both carry a gradient.

    The distributions are softmax(hidden head^T / temperature) of hidden [N, H] and head [V, H]; the
    product is computed in hidden's type, all else in fp32 at least. At most `chunk_tokens` rows of V
    logits exist at a time, in four buffers. A token of probability 0 adds nothing to an entropy.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _Chunked.apply
    return apply(hidden, head, targets, temperature, chunk_tokens)


class _Chunked(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(hidden, head, targets)
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        matrix = head.to(hidden.dtype)
        logprobs, entropies = [], []
        for rows, wanted in zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True):
            distribution = _distribution(rows, matrix, temperature)
            logprobs.append(distribution.gather(-1, wanted[:, None]).squeeze(-1))
            entropies.append(_entropies(distribution))
        return torch.cat(logprobs), torch.cat(entropies)

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of the loss for hidden and head, from that for log-probs and entropies, each [N] or None."""
        hidden, head, targets = ctx.saved_tensors
        matrix, temperature, size = head.to(hidden.dtype), ctx.temperature, ctx.chunk_tokens
        of_hidden, of_head = torch.empty_like(hidden), torch.zeros_like(head)
        for i in range(0, len(hidden), size):
            part = slice(i, i + size)
            rows, distribution = hidden[part], _distribution(hidden[part], matrix, temperature)
            shares = [None if grad is None else grad[part, None] / temperature for grad in outer]
            of_logits = _of_logits(distribution, targets[part, None], *shares).to(hidden.dtype)
            torch.mm(of_logits, matrix, out=of_hidden[part])
            if head.dtype == hidden.dtype:
                of_head.addmm_(of_logits.T, rows)
            else:
                of_head += of_logits.T @ rows
        return of_hidden, of_head, None, None, None


def _distribution(rows: Tensor, matrix: Tensor, temperature: float) -> Tensor:
    """Log-probs of all tokens [C, V]."""
    logits = F.linear(rows, matrix)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.div_(temperature).log_softmax(-1)


def _entropies(distribution: Tensor) -> Tensor:
    return -(distribution.exp() * distribution.clamp(min=torch.finfo(distribution.dtype).min)).sum(-1)


def _of_logits(
    distribution: Tensor, targets: Tensor, of_logprobs: Tensor | None, of_entropies: Tensor | None
) -> Tensor:
    """The gradient for logits / temperature [C, V]; targets and outer gradients are [C, 1].

    With p = exp(distribution), y the target and H the entropy: d log p[y] / dz = onehot(y) - p, and
    dH / dz = -p (log p + H).
    """
    p = distribution.exp()
    slope = torch.zeros_like(p)
    if of_entropies is not None:
        finite = distribution.clamp(min=torch.finfo(p.dtype).min)
        slope -= of_entropies * p * (finite + _entropies(distribution)[:, None])
    if of_logprobs is not None:
        slope -= of_logprobs * p
        slope.scatter_add_(1, targets, of_logprobs)
    return slope
