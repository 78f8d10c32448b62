import math

import pytest
import torch
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer.head import token_logprobs
from dora.trainer.loss import (
    KLEstimator,
    batch_total,
    cispo_loss,
    clipped_loss,
    dual_clipped_loss,
    gspo_loss,
    k3_divergence,
    kl_divergence,
    reinforce_loss,
    sequence_means,
    token_shares,
    token_weights,
    value_loss,
)


def gradient(losses: Tensor, leaf: Tensor) -> list[float]:
    """d sum(losses) / d leaf."""
    (grad,) = torch.autograd.grad(losses.sum(), leaf)
    return list(grad.tolist())


def logs(*ratios: float) -> Tensor:
    """Log-probs whose ratio to zeros is as given, as a leaf in double precision."""
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)


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


def test_a_ratio_that_would_overflow_stays_finite() -> None:
    logprobs = torch.tensor([100.0, -200.0], requires_grad=True)
    losses, _ = clipped_loss(logprobs, torch.zeros(2), -torch.ones(2), clip_low=0.2, clip_high=0.2)
    assert losses.tolist() == pytest.approx([math.exp(20.0), 0.8])
    assert gradient(losses, logprobs) == [0.0, 0.0]


def test_dual_clip_holds_the_loss_of_a_bad_token_below_its_cap() -> None:
    logprobs, advantages = logs(5.0, 5.0, 2.0, 0.5), torch.tensor([-1.0, 1.0, -1.0, -1.0])
    losses, clipped = dual_clipped_loss(logprobs, torch.zeros(4), advantages, 0.2, 0.3, clip_cap=3.0)
    assert losses.tolist() == pytest.approx([3.0, -1.3, 2.0, 0.8])
    assert clipped.tolist() == [True, True, False, True]
    assert gradient(losses, logprobs) == pytest.approx([0.0, 0.0, 2.0, 0.0])


def test_sequence_means_stay_inside_their_response() -> None:
    means = sequence_means(torch.tensor([1.0, 3.0, 10.0]), [2, 1])
    assert means.tolist() == [2.0, 2.0, 10.0]


def test_gspo_clips_whole_responses_by_the_geometric_mean_of_their_ratios() -> None:
    # Ratios 4 and 1 have the geometric mean 2, clipped to 1.5; 1.44 and 1 have 1.2, which is kept.
    logprobs = logs(4.0, 1.0, 1.44, 1.0)
    losses, clipped = gspo_loss(logprobs, torch.zeros(4), torch.ones(4), [2, 2], 0.5, 0.5)
    assert losses.tolist() == pytest.approx([-1.5, -1.5, -1.2, -1.2])
    assert clipped.tolist() == [True, True, False, False]


def test_the_gradient_of_gspo_is_that_of_the_sequence_ratio() -> None:
    logprobs = logs(4.0, 1.0, 1.2)
    losses, _ = gspo_loss(logprobs, torch.zeros(3), torch.ones(3), [3], 9.0, 9.0)
    plain = -logprobs.mean().exp()
    assert gradient(losses / 3, logprobs) == pytest.approx(gradient(plain, logprobs))


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logprobs, advantages = logs(3.0, 0.5, 1.1), torch.tensor([2.0, 2.0, -1.0])
    losses, clipped = cispo_loss(logprobs, torch.zeros(3), advantages, clip_low=0.2, clip_high=0.5)
    assert gradient(losses, logprobs) == pytest.approx([-3.0, -1.6, 1.1])
    assert losses.tolist() == pytest.approx([-3.0 * math.log(3), -1.6 * math.log(0.5), 1.1 * math.log(1.1)])
    assert clipped.tolist() == [True, True, False]


def test_reinforce_weights_the_policy_gradient_by_the_whole_ratio() -> None:
    logprobs = logs(30.0, 0.5)
    losses, clipped = reinforce_loss(logprobs, torch.zeros(2), torch.tensor([2.0, -1.0]))
    assert gradient(losses, logprobs) == pytest.approx([-60.0, 0.5])
    assert not clipped.any()


def test_on_policy_all_losses_have_the_gradient_of_reinforce() -> None:
    old, advantages = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.0, 1.0, -2.0])
    leaf = old.clone().requires_grad_()
    found = [
        clipped_loss(leaf, old, advantages, 0.2, 0.2)[0],
        dual_clipped_loss(leaf, old, advantages, 0.2, 0.2, 3.0)[0],
        gspo_loss(leaf, old, advantages, [2, 1], 0.2, 0.2)[0],
        cispo_loss(leaf, old, advantages, 0.2, 0.2)[0],
        reinforce_loss(leaf, old, advantages)[0],
    ]
    assert [gradient(losses, leaf) for losses in found] == [[-1.0, -1.0, 2.0]] * 5


def test_a_critic_cannot_gain_by_leaving_its_clip_range() -> None:
    # Toward its return 2, V = 1 counts as the clipped 0.5; away from it, V = -1 counts as itself.
    values = torch.tensor([1.0, -1.0, 0.25], requires_grad=True)
    losses, clipped = value_loss(values, torch.zeros(3), torch.full((3,), 2.0), clip=0.5)
    assert losses.tolist() == pytest.approx([0.5 * 1.5**2, 0.5 * 3.0**2, 0.5 * 1.75**2])
    assert gradient(losses, values) == pytest.approx([0.0, -3.0, -1.75])
    assert clipped.tolist() == [True, False, False]


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    divergence = k3_divergence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.5]))
    assert divergence.tolist() == pytest.approx([0.0, math.exp(-0.5) - 1.0 + 0.5])


@pytest.mark.parametrize(
    ("estimator", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("k3", math.exp(-0.5) - 0.5, 1.0 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("k3+", math.exp(-0.5) - 0.5, 0.5),
    ],
)
def test_divergences_have_the_value_and_slope_of_their_names(
    estimator: KLEstimator, value: float, slope: float
) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    divergence = kl_divergence(logprobs, torch.tensor([-1.5]), estimator)
    assert divergence.item() == pytest.approx(value)
    assert gradient(divergence, logprobs) == pytest.approx([slope])


def test_one_token_far_from_the_reference_does_not_rule_the_divergence() -> None:
    logprobs = torch.tensor([-200.0], requires_grad=True)
    divergence = kl_divergence(logprobs, torch.tensor([-1.0]), "k3")
    assert divergence.item() == 10.0
    assert gradient(divergence, logprobs) == [0.0]


def test_entropy_is_largest_where_all_tokens_are_alike_and_counts_no_impossible_token() -> None:
    logits = torch.tensor([[0.0, 0.0, -1e30], [0.0, -1e30, -1e30]])
    _, found = token_logprobs(logits, torch.eye(3), torch.zeros(2, dtype=torch.int64), 1.0, 9)
    assert found.tolist() == pytest.approx([math.log(2), 0.0])


def test_the_entropy_bonus_pushes_a_peaked_distribution_flat() -> None:
    # dH / dlogit_i = -p_i (log p_i + H); here p = 0.8, 0.2 and H = 0.500402.
    logits = torch.tensor([[math.log(0.8), math.log(0.2)]], dtype=torch.float64, requires_grad=True)
    _, found = token_logprobs(logits, torch.eye(2).double(), torch.tensor([0]), 1.0, 9)
    (slope,) = torch.autograd.grad(found.sum(), logits)
    assert slope[0].tolist() == pytest.approx([-0.221807, 0.221807], abs=1e-6)


def test_token_weights_average_as_their_names_say() -> None:
    lengths = [1, 3]
    assert token_weights(lengths, "token-mean") == [0.25, 0.25]
    assert token_weights(lengths, "seq-mean-token-sum") == [0.5, 0.5]
    assert token_weights(lengths, "seq-mean-token-mean") == pytest.approx([1 / 2, 1 / 6])
    assert token_weights(lengths, "seq-mean-token-sum-norm", scale=10) == [0.05, 0.05]


def test_a_share_needs_only_its_own_response_and_the_total_makes_it_a_weight() -> None:
    assert token_shares([4], "token-mean") == [1.0]
    assert token_shares([4], "seq-mean-token-mean") == [0.25]
    assert token_shares([4], "seq-mean-token-sum-norm", scale=10) == [0.1]
    assert (batch_total([1, 3], "token-mean"), batch_total([1, 3], "seq-mean-token-sum")) == (4, 2)


def test_the_normalised_sum_asks_for_its_divisor() -> None:
    with pytest.raises(ConfigError, match="needs loss_scale_factor"):
        token_weights([1], "seq-mean-token-sum-norm")
