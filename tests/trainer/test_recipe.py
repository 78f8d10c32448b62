import math
from typing import get_args

import pytest

from dora.errors import ConfigError
from dora.trainer.objective import OBJECTIVES
from dora.trainer.recipe import (
    NEEDS,
    TRAITS,
    AdvEstimator,
    Correction,
    PolicyLoss,
    check_recipe,
    why_unsafe,
)

PLAIN = Correction()
DECOUPLED = Correction(proximal="recomputed", token="tis")


def test_every_name_is_in_every_table() -> None:
    assert set(TRAITS) == set(OBJECTIVES) == set(get_args(PolicyLoss))
    assert set(NEEDS) == set(get_args(AdvEstimator))


def test_an_uncorrected_unclipped_loss_is_refused_as_soon_as_samples_may_be_stale() -> None:
    assert why_unsafe("reinforce", PLAIN, max_staleness=0) is None
    assert "unbounded ratio current / behaviour" in (why_unsafe("reinforce", PLAIN, max_staleness=1) or "")
    with pytest.raises(ConfigError, match=r"= reinforce at max_staleness = 2: .*choose a clipped"):
        check_recipe("reinforce", "token-mean", PLAIN, max_staleness=2)


@pytest.mark.parametrize("loss", [loss for loss in get_args(PolicyLoss) if loss != "reinforce"])
def test_every_other_loss_may_see_stale_samples_as_it_is(loss: PolicyLoss) -> None:
    assert why_unsafe(loss, PLAIN, max_staleness=8) is None


@pytest.mark.parametrize(
    ("correction", "is_safe"),
    [
        (Correction(token="icepop"), True),
        (Correction(sequence="mis"), False),  # it bounds a response's mean, not its worst token
        (DECOUPLED, True),
        (Correction(proximal="recomputed", token="tis", tis_cap=math.inf), False),
        (Correction(proximal="interpolated", token="tis"), False),  # current / interpolated is unbounded
    ],
)
def test_an_unclipped_loss_is_safe_with_bounded_weights(correction: Correction, is_safe: bool) -> None:
    assert (why_unsafe("reinforce", correction, max_staleness=4) is None) == is_safe


def test_clipping_around_a_moving_policy_does_not_replace_a_bounded_weight() -> None:
    unbounded = Correction(proximal="recomputed", token="tis", tis_cap=math.inf)
    assert "tis_cap = inf" in (why_unsafe("ppo_clip", unbounded, max_staleness=1) or "")
    assert why_unsafe("ppo_clip", Correction(proximal="interpolated", token="tis"), max_staleness=1) is None


def test_a_loss_with_a_divisor_of_its_own_refuses_the_others() -> None:
    with pytest.raises(ConfigError, match="set loss_agg_mode = seq-mean-token-sum-norm"):
        check_recipe("triplet_clip", "token-mean", DECOUPLED, max_staleness=1)
    check_recipe("triplet_clip", "seq-mean-token-sum-norm", DECOUPLED, max_staleness=1)


def test_a_loss_without_a_ratio_refuses_a_correction() -> None:
    with pytest.raises(ConfigError, match="would do nothing"):
        check_recipe("online_dpo", "seq-mean-token-sum", DECOUPLED, max_staleness=1)


def test_a_correction_that_does_nothing_or_loses_the_weight_is_refused() -> None:
    with pytest.raises(ConfigError, match="is 1 for every token"):
        Correction(token="tis")
    with pytest.raises(ConfigError, match="would be lost"):
        Correction(proximal="recomputed")


def test_ranges_hold_the_on_policy_ratio() -> None:
    for broken in (
        {"icepop_low": 1.5},
        {"icepop_high": 0.9},
        {"mis_low": 1.01},
        {"tis_cap": 0.5},
        {"age_decay": 0.0},
        {"age_decay": 1.1},
    ):
        with pytest.raises(ConfigError, match=next(iter(broken))):
            Correction(**broken)  # type: ignore[arg-type]  # one number each
