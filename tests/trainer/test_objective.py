import random
from itertools import pairwise
from typing import get_args

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dora.errors import ConfigError
from dora.trainer.corrections import correct
from dora.trainer.loss import LossAggMode, batch_total, token_shares, token_weights
from dora.trainer.objective import OBJECTIVES, LossSettings, Tokens
from dora.trainer.recipe import Correction, PolicyLoss

CORRECTIONS = (
    Correction(),
    Correction(token="icepop", icepop_high=1.5),
    Correction(proximal="recomputed", token="tis", tis_cap=1.2, sequence="mis", age_decay=0.7),
    Correction(proximal="interpolated", token="icepop"),
)


class Batch:
    """Random responses, flat: log-probs near the behaviour's, advantages of both signs."""

    def __init__(self, lengths: list[int], seed: int) -> None:
        source = torch.Generator().manual_seed(seed)
        num = sum(lengths)
        self.lengths = lengths
        self.behaviour = -torch.rand(num, generator=source, dtype=torch.float64)
        self.logprobs = self.behaviour + 0.4 * torch.randn(num, generator=source, dtype=torch.float64)
        self.reference = self.behaviour + 0.1
        spread = torch.tensor(lengths)
        self.advantages = torch.randn(len(lengths), generator=source).double().repeat_interleave(spread)
        self.staleness = torch.randint(0, 4, (len(lengths),), generator=source).repeat_interleave(spread)

    def gradient(
        self, loss: PolicyLoss, correction: Correction, members: range, weights: list[float]
    ) -> Tensor:
        """d loss / d log p of every token of the batch [N], from a run of consecutive responses."""
        leaf = self.logprobs.clone().requires_grad_()
        part = slice(sum(self.lengths[: members.start]), sum(self.lengths[: members.stop]))
        lengths = self.lengths[members.start : members.stop]
        logprobs, behaviour = leaf[part], self.behaviour[part]
        made = correct(correction, logprobs, behaviour, lengths, self.staleness[part])
        tokens = Tokens(logprobs, made.old_logprobs, self.advantages[part], lengths, self.reference[part])
        losses, _ = OBJECTIVES[loss](tokens, LossSettings())
        own = weights[members.start : members.stop]
        share = torch.tensor(own, dtype=torch.float64).repeat_interleave(torch.tensor(lengths))
        (grad,) = torch.autograd.grad((losses * made.weights * share).sum(), leaf)
        return grad


def cuts(num_pairs: int, source: random.Random) -> list[range]:
    """Consecutive micro-batches of whole pairs of responses."""
    edges = sorted({0, num_pairs, *(source.randrange(num_pairs + 1) for _ in range(3))})
    return [range(2 * a, 2 * b) for a, b in pairwise(edges)]


@pytest.mark.parametrize("loss", get_args(PolicyLoss))
@pytest.mark.parametrize("mode", get_args(LossAggMode))
@settings(max_examples=15, deadline=None)
@given(
    pairs=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 6)), min_size=1, max_size=5),
    seed=st.integers(0, 999),
)
def test_micro_batches_add_up_to_the_gradient_of_the_whole_batch(
    loss: PolicyLoss, mode: LossAggMode, pairs: list[tuple[int, int]], seed: int
) -> None:
    batch = Batch([length for pair in pairs for length in pair], seed)
    correction = CORRECTIONS[seed % len(CORRECTIONS)]
    weights = token_weights(batch.lengths, mode, scale=8)
    whole = batch.gradient(loss, correction, range(len(batch.lengths)), weights)
    # As a stream does it: each response knows only its share, the total comes with the last one.
    shares = token_shares(batch.lengths, mode, scale=8)
    parts = [batch.gradient(loss, correction, cut, shares) for cut in cuts(len(pairs), random.Random(seed))]
    streamed = torch.stack(parts).sum(0) / batch_total(batch.lengths, mode)
    torch.testing.assert_close(streamed, whole, rtol=1e-12, atol=1e-15)


def test_settings_reach_the_loss_they_belong_to() -> None:
    ratio = torch.tensor([8.0]).log()
    tokens = Tokens(ratio, torch.zeros(1), torch.tensor([-1.0]), [1])
    bounds = LossSettings(clip_ratio_high=2.0, clip_ratio_c=4.0)
    values = {loss: OBJECTIVES[loss](tokens, bounds)[0].item() for loss in OBJECTIVES if loss != "online_dpo"}
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


def test_online_dpo_asks_for_a_reference() -> None:
    tokens = Tokens(torch.zeros(2), torch.zeros(2), torch.ones(2), [1, 1])
    with pytest.raises(ConfigError, match="reference policy"):
        OBJECTIVES["online_dpo"](tokens, LossSettings())


def test_triplet_clip_divides_by_answers_and_the_longest_answer_allowed() -> None:
    """LongCat's: a good token's ratio up to 1.3, a bad one's from 0.8 to 3, all over B * T_max = 2 * 10."""
    logprobs = torch.tensor([2.0, 5.0, 0.5, 1.1]).log()
    advantages = torch.tensor([1.0, -1.0, -1.0, -1.0])
    tokens = Tokens(logprobs, torch.zeros(4), advantages, [1, 3])
    losses, _ = OBJECTIVES["triplet_clip"](tokens, LossSettings(0.2, 0.3, 3.0))
    weights = torch.tensor(token_weights([1, 3], "seq-mean-token-sum-norm", scale=10))
    loss = (losses * weights.repeat_interleave(torch.tensor([1, 3]))).sum()
    assert loss.item() == pytest.approx((-1.3 + 3.0 + 0.8 + 1.1) / 20)
