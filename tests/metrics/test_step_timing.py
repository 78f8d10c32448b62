"""The time of a step is divided into phases."""

from __future__ import annotations

from dora.core.actions import Action, Fail, Score
from dora.core.events import Event, GroupScored, RequestFinished
from dora.core.state import EngineRecord, GroupRecord, RequestRecord, State
from dora.core.types import GroupId, Limits, RequestId
from dora.metrics.timing import StepTiming

LIMITS = Limits(num_steps=4, batch_size=2, group_size=2, max_staleness=1)
GROUP, OTHER = GroupId(0, 1), GroupId(0, 2)


def state() -> State:
    """Two groups of two unfinished requests."""
    made = State(LIMITS)
    for index, group in enumerate((GROUP, OTHER)):
        siblings = [RequestId(*group, k) for k in range(2)]
        made.groups[group] = GroupRecord(group, index, 0, 1, set(siblings))
        made.requests |= {sibling: RequestRecord(sibling, 0) for sibling in siblings}
    made.pin(0, 4)
    return made


def finish(group: GroupId, sibling: int) -> RequestFinished:
    return RequestFinished(0, RequestId(*group, sibling), 0, 5, (), "stop")


def test_waiting_training_and_publishing_add_up_to_the_step() -> None:
    timing, s = StepTiming(), state()
    timing.start(10.0)
    timing.update(10.0, None, (), s)
    for now, training, publishing in ((13.0, 0, None), (18.0, None, 1), (18.5, None, None), (20.0, 1, None)):
        timing.advance(now)
        s.training_step, s.publishing_version = training, publishing
        timing.update(now, None, (), s)
    timing.advance(21.0)
    metrics = timing.end_step(s)
    phases_s = [metrics[f"timing_s/{phase}"] for phase in ("wait_for_batch", "train", "publish", "rollout")]
    assert phases_s == [4.5, 6.0, 0.5, 11.0]
    assert timing.total_s["exposed_rollout"] == 4.5, "while the trainer waits"
    assert metrics["trainer/idle_ratio"] == round(4.5 / 11, 4)
    timing.advance(21.5)
    assert timing.end_step(s)["timing_s/train"] == 0.5


def test_scoring_starts_with_the_last_response_of_a_group() -> None:
    timing, s = StepTiming(), state()
    timing.start(0.0)
    script: list[tuple[float, Event, tuple[Action, ...]]] = [
        (1.0, finish(GROUP, 0), ()),
        (2.0, finish(OTHER, 0), ()),
        (4.0, finish(GROUP, 1), (Score(GROUP),)),
        (4.5, finish(OTHER, 1), (Score(OTHER),)),
        (4.6, finish(GroupId(-3, 1), 0), (Score(GroupId(-3, 1)),)),  # held out
        (4.7, GroupScored(GroupId(-3, 1), (1.0,)), ()),
        (5.0, GroupScored(GROUP, (0.0, 1.0)), ()),
        (6.0, GroupScored(OTHER, (0.0, 1.0)), ()),
    ]
    for now, event, actions in script:
        timing.advance(now)
        timing.update(now, event, actions, s)
    timing.advance(9.0)
    metrics = timing.end_step(s)
    assert metrics["timing_s/reward"] == 2.0
    assert metrics["timing_s/group_spread_max"] == 3.0
    assert metrics["timing_s/group_spread_mean"] == 2.75
    assert timing.end_step(s)["timing_s/group_spread_max"] == 0.0


def test_scoring_ends_when_a_group_fails() -> None:
    timing, s = StepTiming(), state()
    timing.start(0.0)
    timing.update(0.0, finish(GROUP, 1), (Score(GROUP),), s)
    timing.advance(1.0)
    timing.update(1.0, None, (Fail(GROUP, "reward raised ValueError"),), s)
    timing.advance(5.0)
    assert timing.end_step(s)["timing_s/reward"] == 1.0


def test_requests_and_groups_at_the_end_of_a_step_are_counted() -> None:
    s = state()
    engine = EngineRecord(0, num_rows=4, num_slots=2)
    s.add_engine(engine)
    s.assign(RequestId(*GROUP, 0), engine, 0)
    engine.kv_usage = 0.25
    s.num_admitted, s.num_filtered, s.num_failed = 9, 2, 1
    s.ready_groups, s.committed, s.batches = [(1, 0, GROUP)], [OTHER], {3: (GroupId(0, 7), GroupId(0, 8))}
    metrics = StepTiming().end_step(s)
    assert (metrics["rollout/num_requests_running"], metrics["rollout/num_requests_waiting"]) == (1, 3)
    assert (metrics["rollout/num_engines"], metrics["rollout/num_versions"]) == (1, 1)
    assert metrics["rollout/kv_cache_usage_max"] == 0.25
    names = ("admitted", "filtered", "failed", "ready")
    assert [metrics[f"groups/num_{name}"] for name in names] == [9, 2, 1, 4]
