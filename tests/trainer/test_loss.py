import math

import pytest
import torch

from dora.errors import ConfigError
from dora.trainer.loss import clipped_loss, k3_divergence, token_weights


def test_the_ratio_is_clipped_only_where_clipping_makes_the_loss_larger() -> None:
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    losses, clipped = clipped_loss(ratios.log(), torch.zeros(5), advantages, clip_low=0.2, clip_high=0.3)
    # 1.5 is cut to 1.3 for a good token and kept for a bad one; 0.5 is cut to 0.8 for a bad one.
    torch.testing.assert_close(losses, torch.tensor([-2.6, 3.0, -1.0, 1.6, -2.2]))
    assert clipped.tolist() == [True, False, False, True, False]


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    losses, _ = clipped_loss(logprobs, torch.zeros(2), torch.ones(2), clip_low=0.2, clip_high=0.2)
    torch.autograd.backward(losses.sum())
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    divergence = k3_divergence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.5]))
    assert divergence.tolist() == pytest.approx([0.0, math.exp(-0.5) - 1.0 + 0.5])


def test_token_weights_average_as_their_names_say() -> None:
    lengths = [1, 3]
    assert token_weights(lengths, "token-mean") == [0.25, 0.25]
    assert token_weights(lengths, "seq-mean-token-sum") == [0.5, 0.5]
    assert token_weights(lengths, "seq-mean-token-mean") == pytest.approx([1 / 2, 1 / 6])
    assert token_weights(lengths, "seq-mean-token-sum-norm", scale=10) == [0.05, 0.05]


def test_the_normalised_sum_asks_for_its_divisor() -> None:
    with pytest.raises(ConfigError, match="needs loss_scale_factor"):
        token_weights([1], "seq-mean-token-sum-norm")
