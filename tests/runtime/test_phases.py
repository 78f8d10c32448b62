"""The time of a step is divided among those who had it."""

from __future__ import annotations

from dora.core.actions import Action, Fail, Score
from dora.core.engines import Engine
from dora.core.events import Event, GroupScored, RequestFinished
from dora.core.group import Group
from dora.core.records import GroupId, Limits, RequestId
from dora.core.state import Request, State
from dora.runtime.phases import Phases

LIMITS = Limits(num_steps=4, batch_size=2, group_size=2, max_staleness=1)
GROUP, OTHER = GroupId(0, 1), GroupId(0, 2)


def state() -> State:
    """Two groups of two, of which nothing is finished."""
    made = State(LIMITS)
    for index, group in enumerate((GROUP, OTHER)):
        siblings = [RequestId(*group, k) for k in range(2)]
        made.groups[group] = Group(group, index, 0, 1, set(siblings))
        made.requests |= {sibling: Request(sibling, 0) for sibling in siblings}
    made.pin(0, 4)
    return made


def finish(group: GroupId, sibling: int) -> RequestFinished:
    return RequestFinished(0, RequestId(*group, sibling), 0, 5, (), "stop")


def test_waiting_training_and_publishing_add_up_to_the_step() -> None:
    phases, s = Phases(), state()
    phases.begin(10.0)
    phases.look(10.0, None, (), s)
    for now, training, publishing in ((13.0, 0, None), (18.0, None, 1), (18.5, None, None), (20.0, 1, None)):
        phases.pass_to(now)
        s.training, s.publishing = training, publishing
        phases.look(now, None, (), s)
    phases.pass_to(21.0)
    metrics = phases.end_step(s)
    phases_s = [metrics[f"timing_s/{phase}"] for phase in ("wait", "train", "publish", "rollout")]
    assert phases_s == [4.5, 6.0, 0.5, 11.0]
    assert metrics["trainer/idle_ratio"] == round(4.5 / 11, 4)
    phases.pass_to(21.5)
    assert phases.end_step(s)["timing_s/train"] == 0.5


def test_groups_are_judged_from_their_last_answer_on_and_their_spread_is_told() -> None:
    phases, s = Phases(), state()
    phases.begin(0.0)
    told: list[tuple[float, Event, tuple[Action, ...]]] = [
        (1.0, finish(GROUP, 0), ()),
        (2.0, finish(OTHER, 0), ()),
        (4.0, finish(GROUP, 1), (Score(GROUP),)),
        (4.5, finish(OTHER, 1), (Score(OTHER),)),
        (4.6, finish(GroupId(-3, 1), 0), (Score(GroupId(-3, 1)),)),  # held out
        (4.7, GroupScored(GroupId(-3, 1), (1.0,)), ()),
        (5.0, GroupScored(GROUP, (0.0, 1.0)), ()),
        (6.0, GroupScored(OTHER, (0.0, 1.0)), ()),
    ]
    for now, event, orders in told:
        phases.pass_to(now)
        phases.look(now, event, orders, s)
    phases.pass_to(9.0)
    metrics = phases.end_step(s)
    assert metrics["timing_s/reward"] == 2.0
    assert metrics["timing_s/group_spread_max"] == 3.0
    assert metrics["timing_s/group_spread_mean"] == 2.75
    assert phases.end_step(s)["timing_s/group_spread_max"] == 0.0


def test_a_group_that_fails_is_judged_no_more() -> None:
    phases, s = Phases(), state()
    phases.begin(0.0)
    phases.look(0.0, finish(GROUP, 1), (Score(GROUP),), s)
    phases.pass_to(1.0)
    phases.look(1.0, None, (Fail(GROUP, "reward raised ValueError"),), s)
    phases.pass_to(5.0)
    assert phases.end_step(s)["timing_s/reward"] == 1.0


def test_what_is_under_way_at_the_end_of_a_step_is_counted() -> None:
    s = state()
    engine = Engine(0, rows=4, slots=2)
    s.add(engine)
    s.seat(RequestId(*GROUP, 0), engine, 0)
    engine.kv_share = 0.25
    s.num_admitted, s.num_filtered, s.num_failed = 9, 2, 1
    s.ready, s.committed, s.batches = [(1, 0, GROUP)], [OTHER], {3: (GroupId(0, 7), GroupId(0, 8))}
    metrics = Phases().end_step(s)
    assert (metrics["rollout/num_running"], metrics["rollout/num_waiting"]) == (1, 3)
    assert (metrics["rollout/num_engines"], metrics["rollout/num_versions"]) == (1, 1)
    assert metrics["rollout/kv_share_max"] == 0.25
    names = ("admitted", "filtered", "failed", "ready")
    assert [metrics[f"groups/num_{name}"] for name in names] == [9, 2, 1, 4]
