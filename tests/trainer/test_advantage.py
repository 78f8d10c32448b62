"""Advantage estimators, and rewards that become advantages as a run is set up."""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.errors import ConfigError, RunError
from dora.runtime.run_setup import check_own_functions
from dora.trainer.advantage import (
    MAX_REWARD,
    AdvantageSettings,
    Turn,
    compute_advantages,
    dr_grpo_advantages,
    gae,
    gigpo_advantages,
    grpo_advantages,
    invalid_rewards_reason,
    overlong_penalty,
    preference_pair,
    rloo_advantages,
    whiten,
)
from dora.trainer.recipe import ADVANTAGE_SCOPE, AdvEstimator

REWARDS, LENGTHS = [[1.0, 0.0], [0.5, 0.5]], [[3, 9], [10, 5]]


def test_grpo_advantages_are_the_standardised_rewards_of_a_group() -> None:
    # mean 0.25, sample variance (0.75**2 + 3 * 0.25**2) / 3 = 0.25, std 0.5
    assert grpo_advantages([1.0, 0.0, 0.0, 0.0]) == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_a_group_of_equal_rewards_has_advantages_of_exactly_zero() -> None:
    for estimator in (grpo_advantages, dr_grpo_advantages, rloo_advantages, preference_pair):
        assert estimator([0.1] * 7) == [0.0] * 7
        assert estimator([0.3]) == [0.0]


def test_dr_grpo_subtracts_the_mean_and_divides_by_nothing() -> None:
    assert dr_grpo_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_rloo_compares_each_response_with_the_others() -> None:
    # 1 - (0 + 0) / 2, 0 - (1 + 0) / 2, and 4 - (1 + 1) / 2, 1 - (4 + 1) / 2
    assert rloo_advantages([1.0, 0.0, 0.0]) == pytest.approx([1.0, -0.5, -0.5])
    assert rloo_advantages([4.0, 1.0, 1.0]) == pytest.approx([3.0, -1.5, -1.5])


def test_a_preference_pair_is_the_best_and_the_worst_of_a_group() -> None:
    assert preference_pair([0.5, 2.0, 0.0, 2.0, 0.0]) == [0.0, 1.0, -1.0, 0.0, 0.0]


def test_whitening_counts_tokens_and_not_responses() -> None:
    # Tokens 4, 0, 0, 0: mean 1, variance (9 + 3) / 3 = 4.
    assert whiten([4.0, 0.0], [1, 3]) == pytest.approx([1.5, -0.5])
    assert whiten([4.0, 0.0], [1, 0]) == [0.0, 0.0]
    assert whiten([2.0, 2.0], [5, 7]) == [0.0, 0.0]


def test_reinforce_plus_plus_whitens_rewards_over_the_batch() -> None:
    # Six tokens: 3 once, 0 five times; mean 0.5, variance (6.25 + 5 * 0.25) / 5 = 1.5.
    advantages = compute_advantages("reinforce_plus_plus", [[3.0, 0.0], [0.0, 0.0]], [[1, 2], [1, 2]])
    high, low = 2.5 / math.sqrt(1.5), -0.5 / math.sqrt(1.5)
    assert [x for group in advantages for x in group] == pytest.approx([high, low, low, low])


def test_reinforce_plus_plus_baseline_subtracts_the_group_mean_first() -> None:
    # Centred: 1, -1 and 0, 0 with one token each; mean 0, variance 2 / 3.
    advantages = compute_advantages(
        "reinforce_plus_plus_baseline", [[3.0, 1.0], [5.0, 5.0]], [[1, 1], [1, 1]]
    )
    one = 1.0 / math.sqrt(2.0 / 3.0)
    assert [x for group in advantages for x in group] == pytest.approx([one, -one, 0.0, 0.0])


@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo"])
def test_estimators_that_need_a_group_give_half_a_batch_the_same_values(estimator: AdvEstimator) -> None:
    rewards, num_tokens = [[3.0, 1.0], [5.0, 2.0]], [[1, 4], [2, 3]]
    whole = compute_advantages(estimator, rewards, num_tokens)
    halves = [compute_advantages(estimator, rewards[i : i + 1], num_tokens[i : i + 1])[0] for i in range(2)]
    assert ADVANTAGE_SCOPE[estimator] == "group"
    assert whole == halves


def test_gae_sums_discounted_errors_to_the_end_of_a_response() -> None:
    # delta_1 = 1 - 0.5 = 0.5; delta_0 = 0.5 * 0.5 - 1 = -0.75, A_0 = -0.75 + 0.5 * 0.5 * 0.5.
    advantages, returns = gae([0.0, 1.0], [1.0, 0.5], gamma=0.5, lam=0.5)
    assert advantages == pytest.approx([-0.625, 0.5])
    assert returns == pytest.approx([0.375, 1.0])


def test_gae_with_lambda_one_compares_the_reward_with_every_value() -> None:
    advantages, returns = gae([0.0, 0.0, 4.0], [1.0, 2.0, 3.0], gamma=1.0, lam=1.0)
    assert (advantages, returns) == ([3.0, 2.0, 1.0], [4.0, 4.0, 4.0])


def test_gae_with_lambda_zero_compares_each_value_with_the_next() -> None:
    advantages, returns = gae([0.0, 0.0, 4.0], [1.0, 2.0, 3.0], gamma=1.0, lam=0.0)
    assert (advantages, returns) == ([1.0, 1.0, 1.0], [2.0, 3.0, 4.0])


def test_gae_credits_a_reward_to_the_tokens_before_it() -> None:
    advantages, _ = gae([2.0, 0.0, 4.0], [0.0, 0.0, 0.0], gamma=1.0, lam=1.0)
    assert advantages == [6.0, 4.0, 4.0]


def test_gigpo_compares_turns_after_the_same_observation() -> None:
    """The episodes return 2, 0 and 1; the first turns follow the prompt, and two later ones the same "b"."""
    turns = [
        [Turn("a", 0.0, 1), Turn("b", 2.0, 1)],
        [Turn("a", 0.0, 1), Turn("c", 0.0, 1), Turn("b", 0.0, 1)],
        [Turn("a", 1.0, 1)],
    ]
    advantages = gigpo_advantages([2.0, 0.0, 1.0], turns, gamma=0.5, step_advantage_w=2.0)
    deviation = 3**-0.5  # of the returns 1, 0 and 1 after the observation "a"
    assert advantages == [
        pytest.approx([1 + 2 * (1 / 3) / deviation, 1 + 2 * 2**-0.5], abs=1e-5),
        pytest.approx([-1 - 2 * (2 / 3) / deviation, -1, -1 - 2 * 2**-0.5], abs=1e-5),
        pytest.approx([2 * (1 / 3) / deviation], abs=1e-5),
    ]


def test_gigpo_without_the_step_advantage_is_grpo() -> None:
    turns = [[Turn("a", 0.0, 1), Turn("b", reward, 1)] for reward in REWARDS[0]]
    advantages = gigpo_advantages(REWARDS[0], turns, gamma=1.0, step_advantage_w=0.0)
    assert advantages == [[a, a] for a in grpo_advantages(REWARDS[0])]


def test_each_token_has_the_advantage_of_its_turn_and_the_last_turn_the_penalty() -> None:
    """The second response is as long as it may be: its reward is 1 - 1."""
    settings = AdvantageSettings("gigpo", 10, overlong_buffer_tokens=2, gamma=0.5)
    turns = [[Turn("a", 0.0, 2), Turn("b", 1.0, 1)], [Turn("a", 0.0, 1), Turn("c", 1.0, 3)]]
    assert settings.group_advantages([1.0, 1.0], [5, 10]) == [None, None]
    half = 2**-0.5
    assert settings.turn_advantages([1.0, 1.0], [5, 10], turns) == [
        pytest.approx([2 * half, 2 * half, half], abs=1e-5),
        pytest.approx([-2 * half, -half, -half, -half], abs=1e-5),
    ]


def test_a_response_is_penalised_for_the_part_of_the_buffer_it_uses() -> None:
    penalties = [overlong_penalty(num, max_tokens=100, buffer_tokens=20) for num in (10, 80, 85, 100, 130)]
    assert penalties == pytest.approx([0.0, 0.0, -0.25, -1.0, -1.0])
    assert overlong_penalty(90, max_tokens=100, buffer_tokens=20, factor=0.5) == -0.25


def test_a_group_gets_advantages_alone_if_the_estimator_needs_no_more() -> None:
    settings = AdvantageSettings("grpo")
    assert settings.group_advantages(REWARDS[0], LENGTHS[0]) == grpo_advantages(REWARDS[0])
    settings = AdvantageSettings("dr_grpo")
    assert settings.group_advantages(REWARDS[0], LENGTHS[0]) == dr_grpo_advantages(REWARDS[0])


@pytest.mark.parametrize("estimator", ["reinforce_plus_plus", "reinforce_plus_plus_baseline"])
def test_an_estimator_that_needs_the_batch_gives_a_group_no_advantages(estimator: AdvEstimator) -> None:
    settings = AdvantageSettings(estimator)
    assert settings.group_advantages(REWARDS[0], LENGTHS[0]) == [None, None]
    expected = compute_advantages(estimator, REWARDS, LENGTHS)
    assert settings.batch_advantages(REWARDS, LENGTHS, LENGTHS) == expected


def test_paired_settings_select_the_best_and_the_worst_of_a_group() -> None:
    settings = AdvantageSettings(is_paired=True)
    assert not settings.needs_batch
    assert settings.group_advantages([0.5, 1.0, 0.0, 1.0], [1, 1, 1, 1]) == [0.0, 1.0, -1.0, 0.0]


def test_overlong_responses_lose_reward_before_advantages_are_computed() -> None:
    settings = AdvantageSettings("dr_grpo", max_tokens=10, overlong_buffer_tokens=4, overlong_penalty=2.0)
    expected = [dr_grpo_advantages([1.0, -1.5]), dr_grpo_advantages([-1.5, 0.5])]
    assert settings.batch_advantages(REWARDS, LENGTHS, LENGTHS) == expected
    assert settings.group_advantages(REWARDS[1], LENGTHS[1]) == [-1.0, 1.0]


def test_rewards_out_of_range_are_invalid() -> None:
    assert invalid_rewards_reason([0.0, -MAX_REWARD, MAX_REWARD]) == ""
    for reward in (1e200, -1e7, float("inf"), float("nan")):
        reason = f"reward {reward:g} must be between -1e+06 and 1e+06"
        assert invalid_rewards_reason([1.0, reward]) == reason


def test_the_advantage_of_a_token_under_teachers_is_their_logprob_less_the_policys() -> None:
    settings = AdvantageSettings(teacher_coef=0.5, reward_coef=2.0)
    assert settings.with_teachers([3.0, 4.0], [-1.0, -2.0], [-3.0, -1.0]) == [-1.0 + 6.0, 0.5 + 8.0]


TURN_ESTIMATORS = """
def to_go(rewards, turns):
    return [[sum(turn.reward for turn in own[k:]) for k in range(len(own))] for own in turns]

def by_episode(rewards, turns, num_tokens):
    return [[reward / length] for reward, length in zip(rewards, num_tokens)]
"""


def test_an_estimator_of_ones_own_may_give_each_turn_an_advantage(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TURN_ESTIMATORS)
    settings = AdvantageSettings(f"{tmp_path}/own.py:to_go", 10, overlong_buffer_tokens=2)
    turns = [[Turn("a", 0.5, 2), Turn("b", 1.0, 1)], [Turn("a", 1.0, 1)]]
    assert settings.group_advantages([1.5, 1.0], [5, 10]) == [None, None]
    assert settings.turn_advantages([1.5, 1.0], [5, 10], turns) == [[1.5, 1.5, 1.0], [0.0]]
    wrong = AdvantageSettings(f"{tmp_path}/own.py:by_episode", 10)
    words = "correct it to return a list per response, with a finite number per turn"
    with pytest.raises(RunError, match=words):
        wrong.turn_advantages([1.5, 1.0], [5, 10], turns)


def test_a_run_calls_an_estimator_with_turns_before_it_starts(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(TURN_ESTIMATORS)
    task = write_task(tmp_path)
    for function, is_valid in (("to_go", True), ("by_episode", False)):
        config = load.read_config(task, [f"algorithm.adv_estimator={tmp_path}/own.py:{function}"])
        refused = pytest.raises(ConfigError, match="correct it to return a list per response")
        with contextlib.nullcontext() if is_valid else refused:
            check_own_functions(config)


def test_an_estimator_of_ones_own_gets_the_shaped_rewards_of_one_group() -> None:
    file = Path(__file__).parents[2] / "examples" / "own_loss.py"
    settings = AdvantageSettings(f"{file}:by_range", 10, overlong_buffer_tokens=2)
    assert settings.group_advantages([1.0, 0.0, 1.0], [5, 5, 10]) == pytest.approx([2 / 3, -1 / 3, -1 / 3])
    assert settings.group_advantages([1.0, 1.0], [5, 5]) == [0.0, 0.0]


def test_an_estimator_of_ones_own_may_take_the_lengths(tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    ratios = "[reward / num for reward, num in zip(rewards, num_tokens)]"
    file.write_text(f"from builtins import list\ndef per_token(rewards, num_tokens):\n    return {ratios}\n")
    assert AdvantageSettings(f"{file}:per_token").group_advantages([1.0, 3.0], [5, 6]) == [0.2, 0.5]
    assert AdvantageSettings(f"{file}:list").group_advantages([1.0, 3.0], [5, 6]) == [1.0, 3.0]


@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("rewards[7]", "raised IndexError: list index out of range .*own.py:2.; correct it"),
        ("rewards[:1]", r"returned \[0.0\]; correct it to return a finite number per response"),
        ("[float('nan')] * 2", r"returned \[nan, nan\]"),
        ("None", "raised TypeError: 'NoneType' object is not iterable"),
    ],
)
def test_an_estimator_of_ones_own_that_fails_is_named(tmp_path: Path, body: str, error: str) -> None:
    file = tmp_path / "own.py"
    file.write_text(f"def advantages(rewards):\n    return {body}\n")
    settings = AdvantageSettings(f"{file}:advantages")
    problem = rf"^algorithm.adv_estimator = '{file}:advantages': for the rewards \[0.0, 1.0\] it {error}"
    with pytest.raises(RunError, match=problem):
        settings.group_advantages([0.0, 1.0], [1, 1])
