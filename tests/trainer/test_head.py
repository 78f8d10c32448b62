"""Log-probs of tokens in chunks are those of the whole, and so are their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dora.trainer.head import token_logprobs

NUM, SIZE, VOCAB = 11, 5, 37
TARGETS = torch.arange(NUM) * 7 % VOCAB


def drawn(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Hidden states [NUM, SIZE] and a head [VOCAB, SIZE]."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, SIZE, generator=generator, dtype=torch.float64) for n in (NUM, VOCAB))
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()


def plain(hidden: Tensor, head: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same with all logits at once."""
    distribution = (F.linear(hidden, head) / temperature).log_softmax(-1)
    chosen = distribution.gather(-1, TARGETS[:, None]).squeeze(-1)
    return chosen, -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_gradients_are_those_that_differences_say(chunk_tokens: int) -> None:
    def both(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, head, TARGETS, 0.7, chunk_tokens)

    assert torch.autograd.gradcheck(both, drawn())


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("share", [0.0, 0.3])
def test_chunks_agree_with_all_logits_at_once(chunk_tokens: int, share: float) -> None:
    hidden, head = drawn()
    found, expected = token_logprobs(hidden, head, TARGETS, 0.7, chunk_tokens), plain(hidden, head, 0.7)
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad((a.sin() + share * b if share else a.sin()).sum(), (hidden, head))
        for a, b in (found, expected)
    ]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_a_head_in_fp32_takes_states_in_bf16_and_sums_its_gradient_in_fp32() -> None:
    exact, (hidden, _), (_, head) = drawn(), drawn(torch.bfloat16), drawn(torch.float32)
    gradients = [
        torch.autograd.grad(token_logprobs(*pair, TARGETS, 1.0, 4)[0].sum(), pair)
        for pair in (exact, (hidden, head))
    ]
    assert [grad.dtype for grad in gradients[1]] == [torch.bfloat16, torch.float32]
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        assert float((found.double() - expected).norm() / expected.norm()) < 0.02


class Largest(TorchDispatchMode):
    """Sees every tensor that is made."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor):
            self.numel = max(self.numel, made.numel())
        return made


def test_the_vocabularys_logits_never_exist_whole() -> None:
    hidden, head = drawn()
    with Largest() as largest:
        logprobs, entropies = token_logprobs(hidden, head, TARGETS, 1.0, 6)
        torch.autograd.backward((logprobs + entropies).sum())
    assert largest.numel == 6 * VOCAB < NUM * VOCAB


def test_states_before_a_frozen_head_have_their_gradient() -> None:
    """What the head's own would take is in the tests of memory."""
    hidden, head = drawn()
    logprobs, entropies = token_logprobs(hidden, head.detach(), TARGETS, 1.0, 4)
    torch.autograd.backward((logprobs + entropies).sum())
    expected = torch.autograd.grad(torch.stack(plain(hidden, head, 1.0)).sum(), hidden)
    torch.testing.assert_close(hidden.grad, expected[0])
