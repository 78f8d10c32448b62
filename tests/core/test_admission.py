"""Which groups are admitted, when, and at which version."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import FakeWorkers, is_work, limits, one_engine

from dora.core.actions import Admit, FetchPrompts, SkipPrompts
from dora.core.events import EngineLost, GroupScored, Loaded, PromptsFetched, Trained
from dora.core.types import CurriculumRule, GroupId, RequestId


def test_an_on_policy_run_admits_nothing_while_a_step_trains() -> None:
    run = one_engine(limits(max_staleness=0), rows=8, slots=2)
    run.deliver_all(unless=lambda event: isinstance(event, Trained))
    assert run.state.training_step == 0
    assert [action.version for action in run.actions(Admit)] == [0, 0]


@pytest.mark.parametrize("max_staleness", [0, 1, 2, 3])
def test_at_most_s_plus_one_batches_are_admitted_at_one_version(max_staleness: int) -> None:
    run = one_engine(limits(num_steps=9, max_staleness=max_staleness), rows=100, slots=9)
    run.deliver_all(unless=lambda event: isinstance(event, Trained))
    assert len(run.actions(Admit)) == 2 * (max_staleness + 1)


def test_no_more_groups_are_admitted_than_all_steps_train() -> None:
    run = one_engine(limits(num_steps=2, max_staleness=8), rows=100, slots=9)
    run.deliver_all()
    assert len(run.actions(Admit)) == 4


def test_nothing_is_admitted_before_an_engine_holds_a_version() -> None:
    run = one_engine(limits(), rows=8, slots=1)
    run.deliver_all(unless=lambda event: isinstance(event, Loaded))
    assert run.actions(Admit) == []
    run.deliver_all(unless=is_work)
    assert len(run.actions(Admit)) == 2


def test_nothing_is_admitted_without_an_engine() -> None:
    run = FakeWorkers(limits())
    run.deliver_all()
    assert run.actions(Admit) == []


def test_a_group_waits_for_the_newest_version_while_it_is_loaded() -> None:
    run = one_engine(limits(max_staleness=1, num_steps=9), rows=2, slots=2)
    run.deliver_all(unless=lambda event: event in (Loaded(0, 1, "v1"), Trained(1)))
    num_admitted_before = len(run.actions(Admit))
    assert run.state.engines[0].free_rows == 2
    run.deliver(Loaded(0, 1, "v1"))
    assert [action.version for action in run.actions(Admit)[num_admitted_before:]] == [1, 1]


def test_groups_are_admitted_at_an_older_version_while_no_engine_has_a_slot_for_the_newest() -> None:
    """Two full engines with one slot: freed rows continue with version 0 instead of staying empty."""
    run = one_engine(limits(batch_size=1, max_staleness=8, num_steps=12), rows=2, slots=1)
    run.join(1, rows=3, slots=1)
    run.deliver_all(unless=is_work)
    run.finish_group(GroupId(0, 0))
    run.deliver_all(unless=lambda event: is_work(event) and not isinstance(event, Trained))
    assert run.state.newest_published == 1
    assert [engine.next_load for engine in run.state.engines.values()] == [None, None]
    num_admitted_before = len(run.actions(Admit))
    on_the_other = next(r for r, request in run.state.requests.items() if request.engine == 1)
    run.finish_group(on_the_other.group)
    assert [action.version for action in run.actions(Admit)[num_admitted_before:]][:1] == [0]


def test_groups_are_admitted_in_the_order_of_the_dataset() -> None:
    run = one_engine(limits(num_steps=6, max_staleness=1), num_prompts=5, rows=3, slots=2)
    run.deliver_all()
    admitted = [(action.index, action.group) for action in run.actions(Admit)]
    assert admitted == [(k, GroupId(k // 5, k % 5)) for k in range(12)]


def test_groups_are_admitted_only_while_rows_are_free() -> None:
    run = one_engine(limits(batch_size=8, group_size=2, max_staleness=2), rows=5, slots=1)
    run.deliver_all(unless=is_work)
    assert len(run.actions(Admit)) == 3
    assert run.state.engines[0].free_rows == 0


def test_a_filtered_group_is_replaced() -> None:
    run = one_engine(limits(group_size=2, filter_groups=True), rows=8, slots=1)
    run.deliver_all(unless=lambda event: isinstance(event, GroupScored))
    assert len(run.actions(Admit)) == 2
    run.pending.remove(GroupScored(GroupId(0, 0), (0.0, 1.0)))
    run.deliver(GroupScored(GroupId(0, 0), (1.0, 1.0)))
    assert [action.group for action in run.actions(Admit)[2:]] == [GroupId(0, 2)]
    assert run.state.num_filtered == 1


def test_a_failed_group_is_replaced() -> None:
    run = one_engine(limits(), rows=8, slots=1)
    run.deliver_all(unless=is_work)
    run.fail_request(RequestId(0, 0, 0))
    assert [action.group for action in run.actions(Admit)[2:]] == [GroupId(0, 2)]
    assert run.state.num_failed == 1


def test_one_batch_of_prompts_is_kept_available() -> None:
    run = FakeWorkers(limits(batch_size=3))
    assert run.actions(FetchPrompts) == [FetchPrompts(3)]
    run.deliver(run.pending[-1])
    assert len(run.actions(FetchPrompts)) == 1
    run.join(0, rows=2, slots=1)
    run.deliver_all(unless=lambda event: is_work(event) or isinstance(event, PromptsFetched))
    assert run.actions(FetchPrompts)[1:] == [FetchPrompts(2)]


def test_the_loss_of_every_engine_stops_admission_until_one_joins() -> None:
    run = one_engine(limits(max_staleness=2), rows=1, slots=1)
    run.deliver_all(unless=is_work)
    run.deliver(EngineLost(0, "killed"))
    run.deliver_all()
    assert len(run.actions(Admit)) == 1
    run.join(1, rows=1, slots=1)
    run.deliver_all()
    assert run.orchestrator.done


@pytest.mark.parametrize(
    ("rewards", "is_skipped"),
    [((1.0, 1.0, 2.0), True), ((1.0, 1.0, 0.9), False), ((1.0, 0.0, 0.0), False), ((0.9, 0.0, -1.0), True)],
)
def test_a_prompt_is_skipped_after_a_group_that_is_easy_or_hard(
    rewards: tuple[float, ...], is_skipped: bool
) -> None:
    assert CurriculumRule(1.0, 0.0, 1).skips_after(rewards, 1.0) == is_skipped
    assert not CurriculumRule(None, 0.0, 1).skips_after((1.0, 1.0), 1.0)
    assert not CurriculumRule(1.0, None, 1).skips_after((0.0, 0.0), 1.0)
    assert CurriculumRule(1.0, None, 1).skips_after((0.9, 1.0), 0.9)


@pytest.mark.parametrize("thresholds", [(None, None), (0.5, 0.5), (0.25, 0.5)])
def test_a_curriculum_without_groups_between_its_thresholds_is_refused(
    thresholds: tuple[float | None, float | None],
) -> None:
    with pytest.raises(ValueError, match="hard_threshold below easy_threshold"):
        CurriculumRule(*thresholds, 1)


def test_a_solved_prompt_returns_after_the_epochs_in_which_it_is_skipped() -> None:
    """Prompt 0 of six is solved whenever it is tried."""
    run = FakeWorkers(limits(num_steps=12, curriculum=CurriculumRule(1.0, None, 2)), num_prompts=6)
    run.solved_rows = [0]
    run.join(0, rows=2, slots=1)
    run.deliver_all()
    admitted = [(action.index, action.group) for action in run.actions(Admit)]
    assert [group.epoch for _, group in admitted if group.row == 0] == [0, 3]
    assert {group.row for _, group in admitted if group.epoch in (1, 2)} == {1, 2, 3, 4, 5}
    assert all(index == 6 * group.epoch + group.row for index, group in admitted)
    skipped = [group for action in run.actions(SkipPrompts) for group in action.groups]
    assert skipped[:2] == [GroupId(1, 0), GroupId(2, 0)]
    assert run.state.num_skipped == len(skipped)


def test_a_run_whose_prompts_are_all_skipped_goes_on_with_a_later_epoch() -> None:
    run = one_engine(
        limits(num_steps=3, curriculum=CurriculumRule(None, 0.0, 3)), num_prompts=2, rows=2, slots=1
    )
    run.deliver_all()
    assert run.orchestrator.done
    assert [action.group.epoch for action in run.actions(Admit)] == [0, 0, 1, 1, 5, 5]
