"""pass@k, its interval, and what an evaluation says of its answers."""

from __future__ import annotations

from itertools import combinations

import pytest

from dora.core.actions import BeginEvaluation, EndEvaluation
from dora.core.events import GroupScored, RequestFinished
from dora.core.held_out import Evaluation as UnderWay
from dora.core.records import Chunk, EvaluationRule, GroupId, Limits, RequestId
from dora.core.state import State
from dora.runtime.held_out import Evaluation, Evaluations, describe_awaited
from dora.runtime.passing import ks_of, pass_at_k, wilson_interval


@pytest.mark.parametrize("num_passing", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_share_of_all_draws_that_pass(num_passing: int, k: int) -> None:
    answers = [True] * num_passing + [False] * (5 - num_passing)
    draws = [any(draw) for draw in combinations(answers, k)]
    assert pass_at_k(5, num_passing, k) == pytest.approx(sum(draws) / len(draws))


def test_the_interval_is_wilsons() -> None:
    """Figures of Newcombe, Statistics in Medicine 17 (1998), table I: 81 of 263, 15 of 148, 0 of 20."""
    assert wilson_interval(81 / 263, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(15 / 148, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson_interval(0.0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def test_an_interval_is_within_0_and_1_and_never_empty() -> None:
    for count in (1, 3, 500):
        for mean in (0.0, 0.3, 1.0):
            low, high = wilson_interval(mean, count)
            assert 0.0 <= low <= mean <= high <= 1.0
            assert low < high


@pytest.mark.parametrize(("num", "ks"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (8, [1, 2, 4, 8])])
def test_k_goes_in_powers_of_two_to_all_answers(num: int, ks: list[int]) -> None:
    assert ks_of(num) == ks


def finished(request: RequestId, num_tokens: int) -> RequestFinished:
    return RequestFinished(0, request, 4, num_tokens, (Chunk(4, "", num_tokens),), "stop")


def test_an_evaluation_tells_greedy_and_sampled_answers_apart() -> None:
    found = Evaluation(4, num_prompts=2, num_answers=3, is_greedy=True)
    for sibling, length in enumerate((100, 2, 4)):
        found.hear(finished(RequestId(-5, 0, sibling), length))
    found.hear(GroupScored(GroupId(-5, 0), (0.5, 1.0, 0.0)))
    metrics = found.metrics()
    assert (metrics["val/version"], metrics["val/num_failed"]) == (4, 1)
    assert (metrics["val/greedy_reward_mean"], metrics["val/reward_mean"]) == (0.25, 0.25)
    assert (metrics["val/pass@1"], metrics["val/pass@2"], metrics["val/greedy_pass"]) == (0.25, 0.5, 0.0)
    assert (metrics["val/pass@2_low"], metrics["val/pass@2_high"]) == wilson_interval(0.5, 2)
    assert metrics["val/response_length_mean"] == 3
    assert found.describe().startswith("sampled 0.250, greedy 0.250, pass@2 0.500 (0.0")
    assert found.describe().endswith("length p50 4, p99 4, 1 prompt failed")


def test_an_evaluation_may_be_greedy_only_or_sampled_only() -> None:
    greedy = Evaluation(4, num_prompts=1, num_answers=1, is_greedy=True)
    sampled = Evaluation(4, num_prompts=1, num_answers=2, is_greedy=False)
    for found, rewards in ((greedy, (1.0,)), (sampled, (1.0, 0.0))):
        found.hear(finished(RequestId(-5, 0, 0), 7))
        found.hear(GroupScored(GroupId(-5, 0), rewards))
    assert {"val/reward_mean", "val/pass@1"}.isdisjoint(greedy.metrics())
    assert (greedy.greedy, greedy.sampled, greedy.lengths) == (1.0, None, [7])
    assert {"val/greedy_reward_mean", "val/greedy_pass"}.isdisjoint(sampled.metrics())
    assert (sampled.greedy, sampled.sampled, sampled.lengths) == (None, 0.5, [7])


def test_evaluations_beside_the_training_are_read_off_facts_and_orders() -> None:
    rule, told = EvaluationRule(4, 1, 1), Evaluations(is_greedy=False)
    group = GroupId(-5, 0)
    assert told.hear(None, [BeginEvaluation(4)], rule) is None
    assert told.hear(finished(RequestId(0, 3, 0), 99), [], rule) is None
    assert told.hear(finished(RequestId(*group, 0), 7), [], rule) is None
    over = told.hear(GroupScored(group, (1.0,)), [EndEvaluation(4)], rule)
    assert over is not None
    assert told.ended == [over]
    assert (over.version, over.sampled, over.lengths) == (4, 1.0, [7])


def test_a_run_says_which_evaluation_it_waits_for_once_all_steps_are_trained() -> None:
    state = State(Limits(8, 2, 1, 0, evaluation=EvaluationRule(3, 12, 1)), newest=7)
    state.evaluation = UnderWay(6, 12, num_begun=12, num_judged=5)
    assert describe_awaited(state) == ""
    state.newest = 8
    assert describe_awaited(state).endswith("7 of 12 prompts of the evaluation of version 6 are left")
    state.evaluation = None
    assert describe_awaited(state) == ""
