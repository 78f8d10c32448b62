"""Policy losses, the critic's loss, KL estimators and loss aggregation."""

from __future__ import annotations

import math
import random
from itertools import pairwise
from pathlib import Path
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer.corrections import apply_correction
from dora.trainer.loss import (
    POLICY_LOSSES,
    LossInputs,
    LossSettings,
    batch_divisor,
    check_own_loss,
    cispo_loss,
    clipped_loss,
    dual_clipped_loss,
    gspo_loss,
    kl_divergence,
    online_dpo_loss,
    policy_loss_function,
    reinforce_loss,
    sequence_means,
    unnormalized_token_weights,
    value_loss,
)
from dora.trainer.policy import token_logprobs
from dora.trainer.recipe import Correction, KLEstimator, LossAggMode, PolicyLoss

CORRECTIONS = (
    Correction(),
    Correction(token="icepop", icepop_high=1.5),
    Correction(proximal="recomputed", token="tis", tis_cap=1.2, sequence="mis", staleness_decay=0.7),
    Correction(proximal="interpolated", token="icepop"),
)


def gradient(losses: Tensor, leaf: Tensor) -> list[float]:
    """d sum(losses) / d leaf."""
    (grad,) = torch.autograd.grad(losses.sum(), leaf)
    return list(grad.tolist())


def log_ratios(*ratios: float) -> Tensor:
    """Log-probs with these ratios to zeros, as a leaf in double precision."""
    return torch.tensor([math.log(ratio) for ratio in ratios], dtype=torch.float64, requires_grad=True)


def off_policy(logprobs: Tensor, advantages: Tensor, num_tokens: list[int] | None = None) -> LossInputs:
    """Tokens whose old log-probs are zero, by default of one response."""
    return LossInputs(logprobs, torch.zeros(len(logprobs)), advantages, num_tokens or [len(logprobs)])


def test_the_ratio_is_clipped_only_if_clipping_increases_the_loss() -> None:
    ratios = torch.tensor([1.5, 1.5, 0.5, 0.5, 1.1])
    advantages = torch.tensor([2.0, -2.0, 2.0, -2.0, 2.0])
    losses, clipped = clipped_loss(off_policy(ratios.log(), advantages), LossSettings(0.2, 0.3))
    # 1.5 is clipped to 1.3 for A > 0 and kept for A < 0; 0.5 is clipped to 0.8 for A < 0.
    torch.testing.assert_close(losses, torch.tensor([-2.6, 3.0, -1.0, 1.6, -2.2]))
    assert clipped.tolist() == [True, False, False, True, False]


def test_a_clipped_token_has_no_gradient() -> None:
    logprobs = torch.tensor([math.log(1.5), math.log(1.1)], requires_grad=True)
    losses, _ = clipped_loss(off_policy(logprobs, torch.ones(2)), LossSettings(0.2, 0.2))
    torch.autograd.backward(losses.sum())
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx([0.0, -1.1])


def test_a_ratio_that_would_overflow_stays_finite() -> None:
    logprobs = torch.tensor([100.0, -200.0], requires_grad=True)
    losses, _ = clipped_loss(off_policy(logprobs, -torch.ones(2)), LossSettings(0.2, 0.2))
    assert losses.tolist() == pytest.approx([math.exp(20.0), 0.8])
    assert gradient(losses, logprobs) == [0.0, 0.0]


def test_dual_clip_caps_the_loss_of_a_token_with_a_negative_advantage() -> None:
    logprobs, advantages = log_ratios(5.0, 5.0, 2.0, 0.5, 5.0), torch.tensor([-1.0, 1.0, -1.0, -1.0, 0.5])
    losses, clipped = dual_clipped_loss(off_policy(logprobs, advantages), LossSettings(0.2, 0.3, 3.0))
    assert losses.tolist() == pytest.approx([3.0, -1.3, 2.0, 0.8, -0.65])
    assert clipped.tolist() == [True, True, False, True, True]
    assert gradient(losses, logprobs) == pytest.approx([0.0, 0.0, 2.0, 0.0, 0.0])


def test_a_sequence_mean_covers_its_own_response() -> None:
    means = sequence_means(torch.tensor([1.0, 3.0, 10.0]), [2, 1])
    assert means.tolist() == [2.0, 2.0, 10.0]


def test_gspo_clips_whole_responses_by_the_geometric_mean_of_their_ratios() -> None:
    # Ratios 4 and 1 have the geometric mean 2, clipped to 1.5; 1.44 and 1 have 1.2, which is kept.
    logprobs = log_ratios(4.0, 1.0, 1.44, 1.0)
    losses, clipped = gspo_loss(off_policy(logprobs, torch.ones(4), [2, 2]), LossSettings(0.5, 0.5))
    assert losses.tolist() == pytest.approx([-1.5, -1.5, -1.2, -1.2])
    assert clipped.tolist() == [True, True, False, False]


def test_the_gradient_of_gspo_is_the_gradient_of_the_sequence_ratio() -> None:
    logprobs = log_ratios(4.0, 1.0, 1.2)
    losses, _ = gspo_loss(off_policy(logprobs, torch.ones(3)), LossSettings(9.0, 9.0))
    plain = -logprobs.mean().exp()
    assert gradient(losses / 3, logprobs) == pytest.approx(gradient(plain, logprobs))


def test_cispo_clips_the_weight_and_keeps_the_gradient() -> None:
    logprobs, advantages = log_ratios(3.0, 0.5, 1.1), torch.tensor([2.0, 2.0, -1.0])
    losses, clipped = cispo_loss(off_policy(logprobs, advantages), LossSettings(0.2, 0.5))
    assert gradient(losses, logprobs) == pytest.approx([-3.0, -1.6, 1.1])
    assert losses.tolist() == pytest.approx([-3.0 * math.log(3), -1.6 * math.log(0.5), 1.1 * math.log(1.1)])
    assert clipped.tolist() == [True, True, False]


def test_reinforce_weights_the_policy_gradient_by_the_unclipped_ratio() -> None:
    logprobs = log_ratios(30.0, 0.5)
    losses, clipped = reinforce_loss(off_policy(logprobs, torch.tensor([2.0, -1.0])), LossSettings())
    assert gradient(losses, logprobs) == pytest.approx([-60.0, 0.5])
    assert not clipped.any()


def test_on_policy_all_losses_have_the_gradient_of_reinforce() -> None:
    old, advantages = torch.tensor([-1.0, -2.0, -0.5]), torch.tensor([1.0, 1.0, -2.0])
    leaf = old.clone().requires_grad_()
    tokens = LossInputs(leaf, old, advantages, [2, 1])
    for loss in (clipped_loss, dual_clipped_loss, gspo_loss, cispo_loss, reinforce_loss):
        losses, _ = loss(tokens, LossSettings())
        assert gradient(losses, leaf) == [-1.0, -1.0, 2.0]


def test_a_value_outside_its_clip_range_has_no_gradient_towards_the_return() -> None:
    # Towards its return 2, V = 1 counts as the clipped 0.5; away from it, V = -1 is not clipped.
    # Towards the return -2, V = -1 counts as the clipped -0.5.
    values = torch.tensor([1.0, -1.0, 0.25, -1.0], requires_grad=True)
    losses, clipped = value_loss(values, torch.zeros(4), torch.tensor([2.0, 2.0, 2.0, -2.0]), clip=0.5)
    assert losses.tolist() == pytest.approx([0.5 * 1.5**2, 0.5 * 3.0**2, 0.5 * 1.75**2, 0.5 * 1.5**2])
    assert gradient(losses, values) == pytest.approx([0.0, -3.0, -1.75, 0.0])
    assert clipped.tolist() == [True, False, False, True]


def test_k3_is_zero_for_equal_policies_and_positive_otherwise() -> None:
    divergence = kl_divergence(torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -1.5]), "k3")
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
def test_every_kl_estimator_has_its_value_and_gradient(
    estimator: KLEstimator, value: float, slope: float
) -> None:
    logprobs = torch.tensor([-1.0], requires_grad=True)
    divergence = kl_divergence(logprobs, torch.tensor([-1.5]), estimator)
    assert divergence.item() == pytest.approx(value)
    assert gradient(divergence, logprobs) == pytest.approx([slope])


def test_the_divergence_of_one_token_is_bounded() -> None:
    logprobs = torch.tensor([-200.0], requires_grad=True)
    divergence = kl_divergence(logprobs, torch.tensor([-1.0]), "k3")
    assert divergence.item() == 10.0
    assert gradient(divergence, logprobs) == [0.0]


def test_entropy_ignores_tokens_of_probability_zero() -> None:
    logits = torch.tensor([[0.0, 0.0, -1e30], [0.0, -1e30, -1e30]])
    _, entropies = token_logprobs(logits, torch.eye(3), torch.zeros(2, dtype=torch.int64), 1.0, 9)
    assert entropies.tolist() == pytest.approx([math.log(2), 0.0])


def test_the_gradient_of_the_entropy_flattens_a_peaked_distribution() -> None:
    # dH / dlogit_i = -p_i (log p_i + H); here p = 0.8, 0.2 and H = 0.500402.
    logits = torch.tensor([[math.log(0.8), math.log(0.2)]], dtype=torch.float64, requires_grad=True)
    _, entropies = token_logprobs(logits, torch.eye(2).double(), torch.tensor([0]), 1.0, 9)
    (slope,) = torch.autograd.grad(entropies.sum(), logits)
    assert slope[0].tolist() == pytest.approx([-0.221807, 0.221807], abs=1e-6)


def test_weights_and_divisor_of_every_aggregation_mode() -> None:
    lengths = [1, 4]
    assert unnormalized_token_weights(lengths, "token-mean") == [1.0, 1.0]
    assert unnormalized_token_weights(lengths, "seq-mean-token-sum") == [1.0, 1.0]
    assert unnormalized_token_weights([*lengths, 0], "seq-mean-token-mean") == [1.0, 0.25, 1.0]
    assert unnormalized_token_weights(lengths, "seq-mean-token-sum-norm", scale=10) == [0.1, 0.1]
    assert (batch_divisor(lengths, "token-mean"), batch_divisor(lengths, "seq-mean-token-sum")) == (5, 2)


def test_seq_mean_token_sum_norm_needs_its_divisor() -> None:
    with pytest.raises(ConfigError, match="needs loss_scale_factor"):
        unnormalized_token_weights([1], "seq-mean-token-sum-norm")
    with pytest.raises(ConfigError, match="choose one of token-mean"):
        unnormalized_token_weights([1], "another", scale=10)  # type: ignore[arg-type]


def test_online_dpo_is_the_logistic_loss_of_the_margin_over_the_reference() -> None:
    logprobs = torch.tensor([-1.0, -1.0, -2.0], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-1.5, -2.0, -1.0], dtype=torch.float64)
    tokens = LossInputs(logprobs, torch.zeros(3), torch.zeros(3), [2, 1], reference)
    losses, is_wrong = online_dpo_loss(tokens, LossSettings(dpo_beta=0.5))
    # Log-ratios to the reference: best 0.5 + 1, worst -1; margin 2.5, times beta 1.25.
    loss = math.log(1.0 + math.exp(-1.25))
    assert losses.tolist() == pytest.approx([loss / 2, loss / 2, loss])
    assert not is_wrong.any()
    # Averaged over responses, d loss / d log p is -beta * sigmoid(-1.25) for the best, + for the worst.
    (slope,) = torch.autograd.grad(losses.sum() / 2, logprobs)
    slope_of_best = 0.5 / (1.0 + math.exp(1.25))
    assert slope.tolist() == pytest.approx([-slope_of_best, -slope_of_best, slope_of_best])


def test_a_pair_in_the_wrong_order_is_marked() -> None:
    zeros = torch.zeros(4)
    tokens = LossInputs(torch.tensor([-3.0, -1.0, -0.5, -1.0]), zeros, zeros, [1, 1, 1, 1], zeros)
    _, is_wrong = online_dpo_loss(tokens, LossSettings())
    assert is_wrong.tolist() == [True, True, False, False]


class RandomBatch:
    """Random responses: log-probs near the behaviour's, advantages of both signs."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        num = sum(lengths)
        self.lengths = lengths
        self.behaviour = -torch.rand(num, generator=source, dtype=torch.float64)
        self.logprobs = self.behaviour + 0.4 * torch.randn(num, generator=source, dtype=torch.float64)
        self.reference = self.behaviour + 0.1
        repeats = torch.tensor(lengths)
        self.advantages = torch.randn(len(lengths), generator=source).double().repeat_interleave(repeats)
        self.staleness = torch.randint(0, 4, (len(lengths),), generator=source).repeat_interleave(repeats)

    def gradient(
        self, loss: PolicyLoss, correction: Correction, members: range, weights: list[float]
    ) -> Tensor:
        """d loss / d log p of every token of the batch [N], for consecutive responses."""
        leaf = self.logprobs.clone().requires_grad_()
        part = slice(sum(self.lengths[: members.start]), sum(self.lengths[: members.stop]))
        lengths = self.lengths[members.start : members.stop]
        logprobs, behaviour = leaf[part], self.behaviour[part]
        corrected = apply_correction(correction, logprobs, behaviour, lengths, self.staleness[part])
        tokens = LossInputs(
            logprobs, corrected.old_logprobs, self.advantages[part], lengths, self.reference[part]
        )
        losses, _ = POLICY_LOSSES[loss](tokens, LossSettings())
        response_weights = weights[members.start : members.stop]
        token_weight = torch.tensor(response_weights, dtype=torch.float64).repeat_interleave(
            torch.tensor(lengths)
        )
        (grad,) = torch.autograd.grad((losses * corrected.weights * token_weight).sum(), leaf)
        return grad


def random_cuts(num_pairs: int, source: random.Random) -> list[range]:
    """Consecutive micro-batches of whole pairs of responses."""
    edges = sorted({0, num_pairs, *(source.randrange(num_pairs + 1) for _ in range(3))})
    return [range(2 * a, 2 * b) for a, b in pairwise(edges)]


@pytest.mark.parametrize("loss", get_args(PolicyLoss))
@pytest.mark.parametrize("mode", get_args(LossAggMode))
@settings(max_examples=15)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5),
    seed=st.integers(0, 999),
)
def test_gradients_of_micro_batches_add_up_to_that_of_the_whole_batch(
    loss: PolicyLoss, mode: LossAggMode, pairs: list[tuple[int, int]], seed: int
) -> None:
    batch = RandomBatch([length for pair in pairs for length in pair], seed)
    correction = CORRECTIONS[seed % len(CORRECTIONS)]
    # As in a streamed step: the divisor is known only after the last response.
    unnormalized = unnormalized_token_weights(batch.lengths, mode, scale=8)
    divisor = batch_divisor(batch.lengths, mode)
    weights = [weight / divisor for weight in unnormalized]
    whole = batch.gradient(loss, correction, range(len(batch.lengths)), weights)
    parts = [
        batch.gradient(loss, correction, cut, unnormalized)
        for cut in random_cuts(len(pairs), random.Random(seed))
    ]
    streamed = torch.stack(parts).sum(0) / divisor
    torch.testing.assert_close(streamed, whole, rtol=1e-12, atol=1e-15)


def test_every_loss_reads_its_own_settings() -> None:
    ratio = torch.tensor([8.0]).log()
    tokens = LossInputs(ratio, torch.zeros(1), torch.tensor([-1.0]), [1])
    bounds = LossSettings(clip_ratio_high=2.0, clip_ratio_c=4.0)
    values = {
        loss: POLICY_LOSSES[loss](tokens, bounds)[0].item() for loss in POLICY_LOSSES if loss != "online_dpo"
    }
    assert values == pytest.approx(
        {
            "ppo_clip": 8.0,
            "dual_clip": 4.0,
            "triplet_clip": 4.0,
            "gspo": 8.0,
            "cispo": 3.0 * ratio.item(),
            "reinforce": 8.0 * ratio.item(),
        }
    )


def test_online_dpo_needs_a_reference() -> None:
    tokens = LossInputs(torch.zeros(2), torch.zeros(2), torch.ones(2), [1, 1])
    with pytest.raises(ConfigError, match="reference policy"):
        POLICY_LOSSES["online_dpo"](tokens, LossSettings())


def test_triplet_clip_divides_by_responses_and_the_longest_response_allowed() -> None:
    """LongCat's: ratios up to 1.3 for A > 0, from 0.8 to 3 for A < 0, all over B * T_max = 2 * 10."""
    logprobs = torch.tensor([2.0, 5.0, 0.5, 1.1]).log()
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    tokens = LossInputs(logprobs, torch.zeros(4), advantages, [1, 3])
    losses, _ = POLICY_LOSSES["triplet_clip"](tokens, LossSettings(0.2, 0.3, 3.0))
    weights = torch.tensor(unnormalized_token_weights([1, 3], "seq-mean-token-sum-norm", scale=10))
    loss = (losses * weights.repeat_interleave(torch.tensor([1, 3]))).sum() / 2
    assert loss.item() == pytest.approx((-1.3 + 3.0 + 0.8 + 1.1) / 20)


SAPO = f"{Path(__file__).parents[2] / 'examples' / 'own_loss.py'}:sapo"


def test_the_example_of_a_loss_of_ones_own_has_the_gradient_of_sapo() -> None:
    """d/dr of 4/tau sigmoid(tau (r - 1)) is 4 p (1 - p), which is 1 at r = 1, whatever tau."""
    tokens = [(1.0, 1.0), (1.0, -1.0), (2.0, 2.0), (0.5, -2.0)]  # ratio and advantage
    logprobs = log_ratios(*(ratio for ratio, _ in tokens))
    inputs = off_policy(logprobs, torch.tensor([advantage for _, advantage in tokens]))
    losses, is_clipped = policy_loss_function(SAPO)(inputs, LossSettings())
    expected = []
    for ratio, advantage in tokens:
        gate = 1 / (1 + math.exp(-(1.0 if advantage > 0 else 1.05) * (ratio - 1)))
        expected.append(-advantage * ratio * 4 * gate * (1 - gate))
    assert gradient(losses, logprobs) == pytest.approx(expected)
    assert not is_clipped.any()


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("tokens.logprobs.mean()", r"must return two tensors of shape \[5\].* a tensor of shape \[\] and"),
        ("tokens.logprobs, None", r"returned \(a tensor of shape \[5\] and torch.float32, NoneType\)"),
        ("tokens.logprobs, tokens.logprobs", r"decided it \(torch.bool\); it returned"),
        ("tokens.logprobs.detach(), tokens.logprobs > 0", "and torch.float32 without a gradient, a tensor"),
        (
            "tokens.logprobs[tokens.mask], None",
            "raised AttributeError: .* no attribute 'mask' .*own.py:2.; correct",
        ),
        ("(tokens.logprobs + 1).log(), tokens.logprobs > 0", "the gradient with respect to .* is .*inf"),
        ("tokens.reference_logprobs - 1, None", "raised TypeError: .*reference_logprobs are None without"),
    ],
)
def test_a_loss_of_ones_own_that_fails_is_refused_by_name(tmp_path: Path, body: str, error: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def loss(tokens, settings):\n    return {body}\n")
    with pytest.raises(ConfigError, match=f"^algorithm.policy_loss = '{file}:loss'.*{error}"):
        check_own_loss(f"{file}:loss", LossSettings(), has_reference=False)


def test_a_loss_of_ones_own_may_read_all_inputs_and_its_options(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    terms = "tokens.logprobs - tokens.reference_logprobs - tokens.behavior_logprobs"
    loss = f"settings.dpo_beta * ({terms}) * decay**tokens.staleness, tokens.logprobs > 0"
    file.write_text(f"def loss(tokens, settings, decay):\n    return {loss}\n")
    name, settings = f"{file}:loss", LossSettings(dpo_beta=0.5)
    check_own_loss(name, settings, has_reference=True, options={"decay": 0.9})
    for options in ({}, {"decay": 0.9, "other": 1}):
        problem = f"TypeError: .*arguments in algorithm.policy_loss_options: {', '.join(options) or 'none'}$"
        with pytest.raises(ConfigError, match=problem):
            check_own_loss(name, settings, has_reference=True, options=options)
