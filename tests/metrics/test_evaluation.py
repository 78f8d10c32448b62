"""pass@k, its confidence interval, and the results of an evaluation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import combinations

import pytest
from tests.service.fake_run import NoSamples

from dora.core.actions import FinishEvaluation, StartEvaluation
from dora.core.events import GroupScored, RequestFinished
from dora.core.state import EvaluationRecord, State
from dora.core.types import Chunk, CurriculumRule, EvaluationRule, GroupId, Limits, RequestId
from dora.metrics.evaluation import (
    EvaluationResult,
    EvaluationTracker,
    best_first,
    describe_pending_evaluation,
    pass_at_k,
    pass_k_values,
    wilson_interval,
)
from dora.metrics.rollout import MigrationMetrics
from dora.metrics.run import RunMetrics


@pytest.mark.parametrize("num_passing", range(6))
@pytest.mark.parametrize("k", range(1, 6))
def test_pass_at_k_is_the_fraction_of_all_draws_that_pass(num_passing: int, k: int) -> None:
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
def test_k_takes_powers_of_two_and_all_responses(num: int, ks: list[int]) -> None:
    assert pass_k_values(num) == ks


def finished(request: RequestId, num_tokens: int) -> RequestFinished:
    return RequestFinished(0, request, 4, num_tokens, (Chunk(4, "", num_tokens),), "stop")


def test_greedy_and_sampled_responses_are_separate() -> None:
    found = EvaluationResult(4, num_prompts=2, num_responses=3, is_greedy=True)
    for sibling, length in enumerate((100, 2, 4)):
        found.update(finished(RequestId(-5, 0, sibling), length))
    found.update(GroupScored(GroupId(-5, 0), (0.5, 1.0, 0.0)))
    metrics = found.metrics()
    assert (metrics["val/version"], metrics["val/num_failed"]) == (4, 1)
    assert (metrics["val/greedy_reward_mean"], metrics["val/reward_mean"]) == (0.25, 0.25)
    assert (metrics["val/pass@1"], metrics["val/pass@2"], metrics["val/greedy_pass"]) == (0.25, 0.5, 0.0)
    assert (metrics["val/pass@2_low"], metrics["val/pass@2_high"]) == wilson_interval(0.5, 2)
    assert metrics["val/response_length_mean"] == 3
    assert found.describe().startswith("sampled 0.250, greedy 0.250, pass@2 0.500 (0.0")
    assert found.describe().endswith("length p50 4, p99 4, 1 prompt failed")


def test_a_sum_of_weighted_rewards_that_rounding_keeps_below_1_passes() -> None:
    full = 0.7 * 1.0 + 0.2 * 1.0 + 0.1 * 1.0
    assert full < 1.0
    found = EvaluationResult(4, num_prompts=1, num_responses=2, is_greedy=False)
    found.update(finished(RequestId(-5, 0, 0), 7))
    found.update(GroupScored(GroupId(-5, 0), (full, 0.999)))
    assert found.metrics()["val/pass@1"] == 0.5
    assert CurriculumRule(1.0, None, 1).skips_after((full, full), 1.0)


def test_a_threshold_decides_which_responses_pass() -> None:
    rule, tracker = EvaluationRule(4, 1, 3), EvaluationTracker(is_greedy=False, pass_threshold=0.9)
    tracker.update(None, [StartEvaluation(4)], rule)
    tracker.update(finished(RequestId(-5, 0, 0), 7), [], rule)
    result = tracker.update(GroupScored(GroupId(-5, 0), (0.9, 1.0, 0.89)), [FinishEvaluation(4)], rule)
    assert result is not None
    assert result.metrics()["val/pass@1"] == pytest.approx(2 / 3)


def test_an_evaluation_may_be_greedy_only_or_sampled_only() -> None:
    greedy = EvaluationResult(4, num_prompts=1, num_responses=1, is_greedy=True)
    sampled = EvaluationResult(4, num_prompts=1, num_responses=2, is_greedy=False)
    for found, rewards in ((greedy, (1.0,)), (sampled, (1.0, 0.0))):
        found.update(finished(RequestId(-5, 0, 0), 7))
        found.update(GroupScored(GroupId(-5, 0), rewards))
    assert {"val/reward_mean", "val/pass@1"}.isdisjoint(greedy.metrics())
    assert (greedy.greedy, greedy.sampled, greedy.lengths) == (1.0, None, [7])
    assert (greedy.reward, sampled.reward) == (1.0, 0.5)
    assert {"val/greedy_reward_mean", "val/greedy_pass"}.isdisjoint(sampled.metrics())
    assert (sampled.greedy, sampled.sampled, sampled.lengths) == (None, 0.5, [7])
    assert greedy.describe() == "greedy 1.000, length p50 7, p99 7"
    assert sampled.describe() == "sampled 0.500, pass@2 1.000 (0.207 to 1.000), length p50 7, p99 7"
    assert EvaluationResult(4, 1, 1, is_greedy=True).describe() == "greedy 0.000, 1 prompt failed"


def test_of_versions_with_equal_rewards_the_older_is_better() -> None:
    assert best_first({0: 0.5, 4: 0.25, 8: 0.75, 12: 0.75}) == (8, 12, 0, 4)


def test_evaluations_during_training_are_read_from_events_and_actions() -> None:
    rule, tracker = EvaluationRule(4, 1, 1), EvaluationTracker(is_greedy=False)
    group = GroupId(-5, 0)
    assert tracker.update(None, [StartEvaluation(4)], rule) is None
    assert tracker.update(finished(RequestId(0, 3, 0), 99), [], rule) is None
    assert tracker.update(finished(RequestId(*group, 0), 7), [], rule) is None
    over = tracker.update(GroupScored(group, (1.0,)), [FinishEvaluation(4)], rule)
    assert over is not None
    assert tracker.finished == [over]
    assert (over.version, over.sampled, over.lengths) == (4, 1.0, [7])


def test_after_the_last_step_the_pending_evaluation_is_named() -> None:
    state = State(Limits(8, 2, 1, 0, evaluation=EvaluationRule(3, 12, 1)), newest_published=7)
    state.evaluation = EvaluationRecord(6, 12, num_started=12, num_prompts_done=5)
    assert describe_pending_evaluation(state) == ""
    state.newest_published = 8
    assert describe_pending_evaluation(state).endswith(
        "waiting for 7 of 12 prompts of the evaluation of version 6"
    )
    state.evaluation = None
    assert describe_pending_evaluation(state) == ""


def test_the_time_in_which_a_run_only_evaluates_does_not_count() -> None:
    limits = Limits(4, 2, 1, 0, evaluation=EvaluationRule(0, 1, 1))
    metrics = RunMetrics(limits, NoSamples(), MigrationMetrics(lambda group: 0))
    state = State(limits, newest_published=0)
    metrics.start(1.0)
    for now, evaluated in ((2.0, 0), (5.0, None), (12.0, 4), (20.0, 4), (50.0, None)):
        state.newest_published = evaluated or 0
        state.evaluation = None if evaluated is None else EvaluationRecord(evaluated, 1, num_unfinished=1)
        state.num_unfinished = Counter({} if evaluated is None else {evaluated: 1})
        metrics.update(now, None, [], state)
    spent_s = metrics.timing.total_s
    assert metrics.now_s - metrics.started_s == spent_s["wait_for_batch"] == (2.0 - 1.0) + (12.0 - 5.0)
    assert (spent_s["rollout"], metrics.live_version_s) == (0.0, 0.0)


def test_each_source_has_its_own_pass_rates() -> None:
    """A prompt of "easy" passes always; of the two of "hard" one passes sometimes, and one has failed."""
    result = EvaluationResult(
        4, num_prompts=3, num_responses=2, is_greedy=False, sources={"easy": range(1), "hard": range(1, 3)}
    )
    result.update(GroupScored(GroupId(-5, 0), (1.0, 1.0)))
    result.update(GroupScored(GroupId(-5, 1), (1.0, 0.0)))
    found = result.metrics()
    names = ("easy/pass@1", "hard/pass@1", "hard/pass@2", "pass@1", "easy/num_failed", "hard/num_failed")
    assert [found[f"val/{name}"] for name in names] == pytest.approx([1.0, 0.25, 0.5, 0.5, 0, 1])
    assert found["val/hard/reward_mean"] == 0.25
    assert result.to_json()["hard/pass@1"] == 0.25
    assert "easy: sampled 1.000" in result.describe()
    assert [name for name in found if "version" in name] == ["val/version"]


ByTask = Mapping[str, Sequence[float]]
TASKS: ByTask = {"looks": (1.0, 0.5, 0.25), "length": (8.0, 2.0, 4.0)}  # the first response is greedy
SUMS = (9.0, 2.5, 4.25)


def evaluate(*by_task: ByTask, **sources: range) -> EvaluationResult:
    """A finished evaluation of one prompt more than were scored, which have these rewards by task."""
    tracker = EvaluationTracker(is_greedy=True, sources=sources)
    rule = EvaluationRule(4, len(by_task) + 1, 3)
    assert tracker.update(None, [StartEvaluation(4)], rule) is None
    for row, own in enumerate(by_task):
        group = GroupId(-5, row)
        tracker.task_rewards[group] = own
        tracker.update(GroupScored(group, SUMS), [], rule)
    assert tracker.task_rewards == {}
    result = tracker.update(None, [FinishEvaluation(4)], rule)
    assert result is not None
    assert result.task_rewards == {}
    return result


def by_task(result: EvaluationResult) -> dict[str, float]:
    return {name: value for name, value in result.metrics().items() if name.endswith("/mean")}


def test_each_task_has_its_means_in_which_a_prompt_without_rewards_counts_as_0() -> None:
    result = evaluate(TASKS)
    assert by_task(result) == {
        "val/reward/looks/mean": 0.375 / 2,
        "val/greedy_reward/looks/mean": 1.0 / 2,
        "val/reward/length/mean": 3.0 / 2,
        "val/greedy_reward/length/mean": 8.0 / 2,
    }
    assert result.sampled == result.metrics()["val/reward/looks/mean"] + 3.0 / 2
    assert result.to_json()["reward/looks/mean"] == 0.375 / 2


def test_each_source_has_the_means_of_its_own_prompts() -> None:
    other = {task: tuple(2 * reward for reward in own) for task, own in TASKS.items()}
    found = by_task(evaluate(TASKS, other, easy=range(1), hard=range(1, 2), failed=range(2, 3)))
    names = ("reward/looks", "easy/reward/looks", "hard/reward/looks", "failed/reward/looks")
    assert [found[f"val/{name}/mean"] for name in names] == [0.375, 0.375, 0.75, 0.0]
    assert found["val/hard/greedy_reward/length/mean"] == 16.0
    assert len(found) == 4 * 2 * 2


def test_only_tasks_that_scored_all_scored_prompts_have_means() -> None:
    """A run of an earlier version did not store the others, and a single reward is not divided."""
    assert by_task(evaluate(TASKS, {"looks": (0.0, 0.0, 0.0)})).keys() == {
        "val/reward/looks/mean",
        "val/greedy_reward/looks/mean",
    }
    assert by_task(evaluate(TASKS, {})) == by_task(evaluate({})) == by_task(evaluate()) == {}
