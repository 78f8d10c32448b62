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

_HEAD_ROWS = 8192  # of a product that is converted before it is added


def token_logprobs(
    hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
) -> tuple[Tensor, Tensor]:
    """Log-probs of `targets` [N] and the distributions' entropies [N], in nats; both carry a gradient.

    The distributions are softmax(hidden head^T / temperature) of hidden [N, H] and head [V, H]; the
    product is computed in hidden's type, all else in fp32 at least. At most `chunk_tokens` rows of V
    logits exist at a time, in two buffers of that type; beside them, the head in hidden's type and, on the
    way back, its gradient if it has one. A token of probability 0 adds nothing to an entropy.
    """
    apply: Callable[..., tuple[Tensor, Tensor]] = _Chunked.apply
    return apply(hidden, head, targets, temperature, chunk_tokens)


class _Chunked(Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, temperature: float, chunk_tokens: int
    ) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.temperature, ctx.chunk_tokens = temperature, chunk_tokens
        matrix = head.to(hidden.dtype)
        chunks = zip(hidden.split(chunk_tokens), targets.split(chunk_tokens), strict=True)
        told = [_told(_distribution(rows, matrix, temperature), wanted) for rows, wanted in chunks]
        logprobs, entropies = (torch.cat(column) for column in zip(*told, strict=True))
        ctx.save_for_backward(hidden, head, targets, entropies)
        return logprobs, entropies

    @staticmethod
    def backward(ctx: Any, *outer: Tensor | None) -> tuple[Tensor | None, ...]:
        """Of the loss for hidden and head, from that for log-probs and entropies, each [N] or None."""
        hidden, head, targets, entropies = ctx.saved_tensors
        matrix, temperature, size = head.to(hidden.dtype), ctx.temperature, ctx.chunk_tokens
        of_hidden = torch.empty_like(hidden)
        of_head = torch.zeros_like(head) if ctx.needs_input_grad[1] else None
        of_logits = None
        for i in range(0, len(hidden), size):
            part, of_logits = slice(i, i + size), None  # none of the last chunk's while this one's is made
            distribution = _distribution(hidden[part], matrix, temperature)
            shares = [None if grad is None else grad[part, None] / temperature for grad in outer]
            _to_slope(distribution, targets[part, None], entropies[part, None], *shares)
            of_logits = distribution.to(hidden.dtype)
            del distribution
            torch.mm(of_logits, matrix, out=of_hidden[part])
            if of_head is not None:
                _add_product(of_head, of_logits, hidden[part])
        return of_hidden, of_head, None, None, None


def _distribution(rows: Tensor, matrix: Tensor, temperature: float) -> Tensor:
    """Log-probs of all tokens [C, V]."""
    logits = F.linear(rows, matrix)
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return logits.div_(temperature).log_softmax(-1)


def _told(distribution: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """Log-probs of targets [C] and entropies [C]; the distribution [C, V] is used up."""
    logprobs = distribution.gather(-1, targets[:, None]).squeeze(-1)
    p = distribution.exp()
    return logprobs, -p.mul_(_finite(distribution)).sum(-1)


def _finite(distribution: Tensor) -> Tensor:
    """In place, so that a probability of 0 times its logarithm is 0."""
    return distribution.clamp_(min=torch.finfo(distribution.dtype).min)


def _to_slope(
    distribution: Tensor,
    targets: Tensor,
    entropies: Tensor,
    of_logprobs: Tensor | None,
    of_entropies: Tensor | None,
) -> None:
    """Make of a distribution [C, V] the gradient for logits / temperature; all others are [C, 1].

    With p = exp(distribution), y the target and H the entropy: d log p[y] / dz = onehot(y) - p, and
    dH / dz = -p (log p + H).
    """
    p = distribution.exp()
    if of_entropies is None:
        distribution.zero_()
    else:
        _finite(distribution).add_(entropies).mul_(of_entropies)
    if of_logprobs is not None:
        distribution.add_(of_logprobs)
    distribution.mul_(p).neg_()
    if of_logprobs is not None:
        distribution.scatter_add_(1, targets, of_logprobs)


def _add_product(total: Tensor, of_logits: Tensor, rows: Tensor) -> None:
    """Add of_logits^T rows to `total` [V, H]; where that is of another type, a few of its rows at a time."""
    if total.dtype == rows.dtype:
        total.addmm_(of_logits.T, rows)
        return
    for part, own in zip(total.split(_HEAD_ROWS), of_logits.split(_HEAD_ROWS, dim=1), strict=True):
        part += own.T @ rows
