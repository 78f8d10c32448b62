import math

import pytest

from dora.trainer.advantage import (
    batch_advantages,
    best_and_worst,
    centred,
    gae,
    group_advantages,
    leave_one_out,
    overlong_penalty,
    whitened,
)
from dora.trainer.recipe import NEEDS, AdvEstimator


def test_advantages_of_a_group_are_its_standardised_rewards() -> None:
    # mean 0.25, sample variance (0.75**2 + 3 * 0.25**2) / 3 = 0.25, std 0.5
    assert group_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero() -> None:
    for estimator in (group_advantages, centred, leave_one_out, best_and_worst):
        assert estimator([0.1] * 7) == [0.0] * 7
        assert estimator([0.3]) == [0.0]


def test_dr_grpo_subtracts_the_mean_and_divides_by_nothing() -> None:
    assert centred([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_each_sibling_with_the_others() -> None:
    # 1 - (0 + 0) / 2, 0 - (1 + 0) / 2, and 4 - (1 + 1) / 2, 1 - (4 + 1) / 2
    assert leave_one_out([1.0, 0.0, 0.0]) == pytest.approx([1.0, -0.5, -0.5])
    assert leave_one_out([4.0, 1.0, 1.0]) == pytest.approx([3.0, -1.5, -1.5])


def test_a_preference_pair_is_the_best_and_the_worst_of_a_group() -> None:
    assert best_and_worst([0.5, 2.0, 0.0, 2.0, 0.0]) == [0.0, 1.0, -1.0, 0.0, 0.0]


def test_whitening_counts_tokens_and_not_responses() -> None:
    # Tokens 4, 0, 0, 0: mean 1, variance (9 + 3) / 3 = 4.
    assert whitened([4.0, 0.0], [1, 3]) == pytest.approx([1.5, -0.5])
    assert whitened([4.0, 0.0], [1, 0]) == [0.0, 0.0]
    assert whitened([2.0, 2.0], [5, 7]) == [0.0, 0.0]


def test_reinforce_plus_plus_whitens_rewards_over_the_batch() -> None:
    # Six tokens: 3 once, 0 five times; mean 0.5, variance (6.25 + 5 * 0.25) / 5 = 1.5.
    got = batch_advantages("reinforce_plus_plus", [[3.0, 0.0], [0.0, 0.0]], [[1, 2], [1, 2]])
    high, low = 2.5 / math.sqrt(1.5), -0.5 / math.sqrt(1.5)
    assert [x for group in got for x in group] == pytest.approx([high, low, low, low])


def test_its_baseline_variant_subtracts_the_group_mean_first() -> None:
    # Centred: 1, -1 and 0, 0 with one token each; mean 0, variance 2 / 3.
    got = batch_advantages("reinforce_plus_plus_baseline", [[3.0, 1.0], [5.0, 5.0]], [[1, 1], [1, 1]])
    one = 1.0 / math.sqrt(2.0 / 3.0)
    assert [x for group in got for x in group] == pytest.approx([one, -one, 0.0, 0.0])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_estimators_that_need_a_group_give_half_a_batch_the_same_values(estimator: AdvEstimator) -> None:
    rewards, num_tokens = [[3.0, 1.0], [5.0, 2.0]], [[1, 4], [2, 3]]
    whole = batch_advantages(estimator, rewards, num_tokens)
    halves = [batch_advantages(estimator, rewards[i : i + 1], num_tokens[i : i + 1])[0] for i in range(2)]
    assert NEEDS[estimator] == "group"
    assert whole == halves


def test_gae_adds_up_discounted_errors_to_the_end_of_a_response() -> None:
    # delta_1 = 1 - 0.5 = 0.5; delta_0 = 0.5 * 0.5 - 1 = -0.75, A_0 = -0.75 + 0.5 * 0.5 * 0.5.
    advantages, returns = gae(1.0, [1.0, 0.5], gamma=0.5, lam=0.5)
    assert advantages == pytest.approx([-0.625, 0.5])
    assert returns == pytest.approx([0.375, 1.0])


def test_gae_with_lambda_one_compares_the_reward_with_every_value() -> None:
    advantages, returns = gae(4.0, [1.0, 2.0, 3.0], gamma=1.0, lam=1.0)
    assert (advantages, returns) == ([3.0, 2.0, 1.0], [4.0, 4.0, 4.0])


def test_gae_with_lambda_zero_compares_each_value_with_the_next() -> None:
    advantages, returns = gae(4.0, [1.0, 2.0, 3.0], gamma=1.0, lam=0.0)
    assert (advantages, returns) == ([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])


def test_a_response_is_charged_for_the_part_of_the_buffer_it_uses() -> None:
    penalties = [overlong_penalty(num, max_tokens=100, buffer_tokens=20) for num in (10, 80, 85, 100, 130)]
    assert penalties == pytest.approx([0.0, 0.0, -0.25, -1.0, -1.0])
    assert overlong_penalty(90, max_tokens=100, buffer_tokens=20, factor=0.5) == -0.25
