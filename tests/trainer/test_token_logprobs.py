"""Log-probs of tokens in chunks, and their gradients, equal those from all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from dora.trainer.policy import token_logprobs

NUM, SIZE, VOCAB = 11, 5, 37
TARGETS = torch.arange(NUM) * 7 % VOCAB


def random_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor]:
    """Hidden states [NUM, SIZE] and a head [VOCAB, SIZE]."""
    generator = torch.Generator().manual_seed(0)
    hidden, head = (torch.randn(n, SIZE, generator=generator, dtype=torch.float64) for n in (NUM, VOCAB))
    return hidden.to(dtype).requires_grad_(), head.to(dtype).requires_grad_()


def unchunked(hidden: Tensor, head: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """The same from all logits at once."""
    distribution = (F.linear(hidden, head) / temperature).log_softmax(-1)
    logprobs = distribution.gather(-1, TARGETS[:, None]).squeeze(-1)
    return logprobs, -(distribution.exp() * distribution).sum(-1)


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_gradients_equal_finite_differences(chunk_tokens: int) -> None:
    def compute(hidden: Tensor, head: Tensor) -> tuple[Tensor, Tensor]:
        return token_logprobs(hidden, head, TARGETS, 0.7, chunk_tokens)

    assert torch.autograd.gradcheck(compute, random_inputs())


@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
@pytest.mark.parametrize("entropy_coeff", [0.0, 0.3])
def test_chunks_agree_with_all_logits_at_once(chunk_tokens: int, entropy_coeff: float) -> None:
    hidden, head = random_inputs()
    got, expected = token_logprobs(hidden, head, TARGETS, 0.7, chunk_tokens), unchunked(hidden, head, 0.7)
    torch.testing.assert_close(got, expected)
    gradients = [
        torch.autograd.grad((a.sin() + entropy_coeff * b if entropy_coeff else a.sin()).sum(), (hidden, head))
        for a, b in (got, expected)
    ]
    torch.testing.assert_close(gradients[0], gradients[1])


def test_the_gradient_of_an_fp32_head_is_summed_in_fp32_with_bf16_states() -> None:
    exact, (hidden, _), (_, head) = (
        random_inputs(),
        random_inputs(torch.bfloat16),
        random_inputs(torch.float32),
    )
    gradients = [
        torch.autograd.grad(token_logprobs(*pair, TARGETS, 1.0, 4)[0].sum(), pair)
        for pair in (exact, (hidden, head))
    ]
    assert [grad.dtype for grad in gradients[1]] == [torch.bfloat16, torch.float32]
    for got, expected in zip(gradients[1], gradients[0], strict=True):
        assert float((got.double() - expected).norm() / expected.norm()) < 0.02


class LargestTensor(TorchDispatchMode):
    """Records the largest tensor that an operation returns."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.numel = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor):
            self.numel = max(self.numel, result.numel())
        return result


def test_the_full_logits_never_exist() -> None:
    hidden, head = random_inputs()
    with LargestTensor() as largest:
        logprobs, entropies = token_logprobs(hidden, head, TARGETS, 1.0, 6)
        torch.autograd.backward((logprobs + entropies).sum())
    assert largest.numel == 6 * VOCAB < NUM * VOCAB


def test_hidden_states_before_a_frozen_head_have_a_gradient() -> None:
    hidden, head = random_inputs()
    logprobs, entropies = token_logprobs(hidden, head.detach(), TARGETS, 1.0, 4)
    torch.autograd.backward((logprobs + entropies).sum())
    expected = torch.autograd.grad(torch.stack(unchunked(hidden, head, 1.0)).sum(), hidden)
    torch.testing.assert_close(hidden.grad, expected[0])
