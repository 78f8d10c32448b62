"""Rewards become advantages where what they are compared with is known."""

import pytest

from dora.trainer.advantage import batch_advantages, centred, group_advantages
from dora.trainer.recipe import AdvEstimator
from dora.trainer.scoring import MAX_REWARD, Scoring, why_unscorable

REWARDS, LENGTHS = [[1.0, 0.0], [0.5, 0.5]], [[3, 9], [10, 5]]


def test_a_group_is_scored_by_itself_where_that_is_enough() -> None:
    assert Scoring("grpo").of_group(REWARDS[0], LENGTHS[0]) == group_advantages(REWARDS[0])
    assert Scoring("dr_grpo").of_group(REWARDS[0], LENGTHS[0]) == centred(REWARDS[0])


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_what_needs_the_batch_waits_for_it(estimator: AdvEstimator) -> None:
    scoring = Scoring(estimator)
    assert scoring.of_group(REWARDS[0], LENGTHS[0]) == [None, None]
    assert scoring.of_batch(REWARDS, LENGTHS) == batch_advantages(scoring.adv_estimator, REWARDS, LENGTHS)


def test_pairs_are_the_best_and_the_worst_of_a_group() -> None:
    scoring = Scoring(is_paired=True)
    assert not scoring.needs_batch
    assert scoring.of_group([0.5, 1.0, 0.0, 1.0], [1, 1, 1, 1]) == [0.0, 1.0, -1.0, 0.0]


def test_overlong_answers_lose_reward_before_they_are_compared() -> None:
    scoring = Scoring("dr_grpo", max_tokens=10, overlong_buffer_tokens=4, overlong_penalty=2.0)
    assert scoring.of_batch(REWARDS, LENGTHS) == [centred([1.0, -1.5]), centred([-1.5, 0.5])]
    assert scoring.of_group(REWARDS[1], LENGTHS[1]) == [-1.0, 1.0]


def test_rewards_that_leave_what_can_be_computed_with_are_named() -> None:
    assert why_unscorable([0.0, -MAX_REWARD, MAX_REWARD]) == ""
    for reward in (1e200, -1e7, float("inf"), float("nan")):
        assert why_unscorable([1.0, reward]) == f"rewards too large: {reward:g}, and the most is 1e+06"
