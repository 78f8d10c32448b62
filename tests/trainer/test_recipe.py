"""Every algorithm is in every table, and unsafe or ineffective recipes are rejected."""

from __future__ import annotations

from typing import get_args

import pytest

from dora.errors import ConfigError
from dora.trainer.loss import POLICY_LOSSES
from dora.trainer.recipe import (
    ADVANTAGE_SCOPE,
    LOSS_TRAITS,
    AdvEstimator,
    Correction,
    PolicyLoss,
    check_recipe,
    unsafe_reason,
)

PLAIN = Correction()
DECOUPLED = Correction(proximal="recomputed", token="tis")


def test_every_name_is_in_every_table() -> None:
    assert set(LOSS_TRAITS) == set(POLICY_LOSSES) == set(get_args(PolicyLoss))
    assert set(ADVANTAGE_SCOPE) == set(get_args(AdvEstimator))


def test_an_uncorrected_unclipped_loss_is_rejected_if_samples_may_be_stale() -> None:
    assert unsafe_reason("reinforce", PLAIN, max_staleness=0) is None
    assert "unbounded ratio current / behaviour" in (unsafe_reason("reinforce", PLAIN, max_staleness=1) or "")
    with pytest.raises(ConfigError, match=r"= reinforce at max_staleness = 2: .*choose a clipped"):
        check_recipe("reinforce", "token-mean", PLAIN, max_staleness=2)


@pytest.mark.parametrize("loss", [loss for loss in get_args(PolicyLoss) if loss != "reinforce"])
def test_every_other_loss_allows_stale_samples_without_a_correction(loss: PolicyLoss) -> None:
    assert unsafe_reason(loss, PLAIN, max_staleness=8) is None


@pytest.mark.parametrize(
    ("correction", "is_safe"),
    [
        (Correction(token="icepop"), True),
        (Correction(sequence="mis"), False),  # it bounds the mean of a response, not its largest ratio
        (DECOUPLED, True),
        (Correction(proximal="interpolated", token="tis"), False),  # current / interpolated is unbounded
    ],
)
def test_an_unclipped_loss_is_safe_with_bounded_weights(correction: Correction, is_safe: bool) -> None:
    assert (unsafe_reason("reinforce", correction, max_staleness=4) is None) == is_safe


def test_a_loss_that_is_defined_with_one_aggregation_rejects_the_others() -> None:
    with pytest.raises(ConfigError, match="set loss_agg_mode = seq-mean-token-sum-norm"):
        check_recipe("triplet_clip", "token-mean", DECOUPLED, max_staleness=1)
    check_recipe("triplet_clip", "seq-mean-token-sum-norm", DECOUPLED, max_staleness=1)


def test_a_loss_without_a_ratio_rejects_a_correction() -> None:
    with pytest.raises(ConfigError, match="would do nothing"):
        check_recipe("online_dpo", "seq-mean-token-sum", DECOUPLED, max_staleness=1)


def test_a_correction_without_effect_or_without_its_weight_is_rejected() -> None:
    with pytest.raises(ConfigError, match="is 1 for every token"):
        Correction(token="tis")
    with pytest.raises(ConfigError, match="would be lost"):
        Correction(proximal="recomputed")
