"""A fact that cannot be true is refused by the name of the rule it breaks, and changes nothing."""

from __future__ import annotations

import pytest
from tests.core.stations import Stations, finished, is_work, limits

from dora.core import invariants, snapshot
from dora.core.events import (
    DrainAsked,
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Paused,
    Progressed,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    StepFailed,
    Trained,
    Woken,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import Chunk, GroupId, Limits, ProtocolError, RequestId

# Engine 0 generates both siblings of 0/0 and the first of 0/1; the second of 0/1 is finished.
# Group 0/2 is with the rewarder, 0/3 is scored. Groups 0/4 and 0/5 have failed, their second siblings
# are being aborted. 0/6 and 0/7 run in their place, 0/8 is at hand, two more prompts are being fetched.
RUNNING, ABORTING, DONE = RequestId(0, 0, 0), RequestId(0, 4, 1), RequestId(0, 1, 1)
SCORED, JUDGED, OPEN = GroupId(0, 3), GroupId(0, 2), GroupId(0, 0)


@pytest.fixture
def run() -> Stations:
    stations = Stations(limits(batch_size=3, group_size=2, max_staleness=1))
    stations.join(0, rows=12, slots=2)
    stations.settle(but=is_work)
    stations.finish(SCORED)
    for request in (DONE, RequestId(*JUDGED, 0), RequestId(*JUDGED, 1)):
        stations.tell(finished(0, request, 0))
    stations.refuse(RequestId(0, 4, 0))
    stations.refuse(RequestId(0, 5, 0))
    return stations


def source(*chunks: tuple[int, str, int], version: int = 0) -> RequestFinished:
    return RequestFinished(0, RUNNING, version, 3, tuple(Chunk(*chunk) for chunk in chunks), "stop")


UNKNOWN_ENGINE, ONE_VERSION = "the engine must have joined", "every token comes from the published bytes"
ILLEGAL: list[tuple[Event, str]] = [
    (EngineJoined(0, 4, 1), "an engine joins once"),
    (EngineJoined(1, 0, 1), "an engine has rows and version slots"),
    (EngineJoined(1, 4, 0), "an engine has rows and version slots"),
    (EngineJoined(1, 4, 1, replaces=0), "only a lost engine is replaced"),
    (EngineLost(1, "killed"), UNKNOWN_ENGINE),
    (PromptsFetched(10, (GroupId(0, 10),)), "the dataset has no gap"),
    (PromptsFetched(8, ()), "the dataset has no gap"),
    (PromptsFetched(9, (GroupId(0, 9), GroupId(0, 10), GroupId(0, 11))), "prompts were asked for"),
    (PromptsFetched(9, (GroupId(0, 9), OPEN)), "a group id is used once"),
    (PromptsFetched(9, (GroupId(0, 9), GroupId(0, 8))), "a group id is used once"),
    (PromptsFetched(9, (GroupId(0, 9), GroupId(0, 9))), "a group id is used once"),
    (Progressed(1, ()), UNKNOWN_ENGINE),
    (finished(1, RUNNING, 0), UNKNOWN_ENGINE),
    (finished(0, DONE, 0), "an engine finishes only what it was given"),
    (finished(0, RequestId(0, 17, 0), 0), "an engine finishes only what it was given"),
    (finished(0, RUNNING, 1), "a request is finished by its own version"),
    (source((0, "other", 3)), ONE_VERSION),
    (source((0, "v0", 2), (1, "v1", 1)), ONE_VERSION),
    (source(), ONE_VERSION),
    (RequestFailed(0, DONE, "refused"), "an engine fails only what it was given"),
    (RequestFailed(1, RUNNING, "refused"), UNKNOWN_ENGINE),
    (RequestsAborted(0, (RUNNING,), 3), "the abort was ordered"),
    (RequestsAborted(0, (ABORTING, RUNNING), 3), "the abort was ordered"),
    (RequestsAborted(1, (ABORTING,), 3), UNKNOWN_ENGINE),
    (GroupScored(OPEN, (0.0, 1.0)), "the group was given to the rewarder"),
    (GroupScored(SCORED, (0.0, 1.0)), "the group was given to the rewarder"),
    (GroupScored(GroupId(0, 4), (0.0, 1.0)), "the group was given to the rewarder"),
    (GroupScored(JUDGED, (1.0,)), "one reward per sibling"),
    (GroupUnscorable(OPEN, "no answer"), "the group was given to the rewarder"),
    (Trained(0), "the step was ordered"),
    (Published(1, "v1"), "the publication was ordered"),
    (Published(0, "v0"), "the publication was ordered"),
    (Loaded(0, 0, "v0"), "the load was ordered"),
    (LoadFailed(0, 0, "no memory"), "the load was ordered"),
    (LoadFailed(1, 0, "no memory"), UNKNOWN_ENGINE),
    (StepFailed(0, "no memory"), "the step was ordered"),
    (DrainAsked(1), UNKNOWN_ENGINE),
    (EngineLeft(0), "an engine leaves when it is dismissed"),
    (EngineLeft(1), UNKNOWN_ENGINE),
    (Paused(0), "the pause was ordered"),
    (Paused(1), UNKNOWN_ENGINE),
    (Migrated(RUNNING, 0, 1, 3, 300, 0.1, 0.1), "the move was ordered"),
    (Migrated(DONE, 0, 0, 3, 300, 0.1, 0.1), "the move was ordered"),
    (MigrationFailed(RUNNING, 0, 1, "lease over"), "the move was ordered"),
    (Loaded(1, 0, "v0"), UNKNOWN_ENGINE),
]


@pytest.mark.parametrize(("event", "rule"), ILLEGAL, ids=[f"{e}" for e, _ in ILLEGAL])
def test_an_illegal_fact_is_refused_and_changes_nothing(run: Stations, event: Event, rule: str) -> None:
    before = snapshot.to_json(run.state)
    with pytest.raises(ProtocolError) as refusal:
        run.core.handle(event, run.now)
    assert rule in str(refusal.value)
    assert str(event) in str(refusal.value)
    assert snapshot.to_json(run.state) == before
    assert invariants.check(run.state) == []


def test_an_engine_must_hold_the_bytes_that_were_published(run: Stations) -> None:
    run.join(1, rows=1, slots=1)
    with pytest.raises(ProtocolError, match="an engine holds the bytes that were published"):
        run.core.handle(Loaded(1, 0, "other"), run.now)


def test_a_step_is_told_once(run: Stations) -> None:
    run.finish(GroupId(0, 0))
    run.finish(JUDGED)
    run.tell(Trained(0))
    with pytest.raises(ProtocolError, match="the step was ordered"):
        run.core.handle(Trained(0), run.now)


def test_nothing_may_be_told_after_the_run_has_stopped() -> None:
    run = Stations(limits(num_steps=1))
    run.join(0, rows=2, slots=1)
    run.settle()
    with pytest.raises(ProtocolError, match="after the run had stopped"):
        run.core.handle(Woken(), run.now)


def test_what_is_no_fact_is_refused(run: Stations) -> None:
    with pytest.raises(ProtocolError, match="is not a fact"):
        run.core.handle("hello", run.now)  # type: ignore[arg-type]


def test_a_report_of_requests_that_were_given_up_meanwhile_is_no_error(run: Stations) -> None:
    run.tell(Progressed(0, ((RUNNING, 4), (ABORTING, 9), (DONE, 3))))
    assert run.state.requests[RUNNING].num_tokens == 4


def test_a_request_that_is_being_aborted_may_end_in_any_way(run: Stations) -> None:
    run.tell(RequestFailed(0, ABORTING, "refused, too"))
    assert ABORTING not in run.state.engines[0].aborting
    assert run.state.num_failed == 2


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_steps": 0}, "num_steps = 0"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"group_size": 0}, "group_size = 0"),
        ({"max_staleness": -1}, "max_staleness = -1"),
        ({"filter_groups": True, "group_size": 1}, "would filter every group"),
        ({"batches_per_version": 0}, "batches_per_version = 0"),
        ({"slack": -1}, "slack at least 0"),
        ({"load_interval": 0}, "load_interval is at least 1"),
        ({"skip_below_kl": 0.0}, "skip_below_kl = 0.0 must be above 0"),
        ({"rebalance_interval_s": 0.0}, "rebalance_interval_s above 0"),
    ],
)
def test_limits_that_cannot_work_are_refused(changes: dict[str, float], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        limits(**changes)


def test_the_same_facts_at_the_same_times_give_the_same_orders() -> None:
    bounds = Limits(num_steps=3, batch_size=2, group_size=2, max_staleness=1)
    first, second = Stations(bounds), Orchestrator(bounds)
    second.start(0.0)
    first.join(0, rows=3, slots=2)
    assert second.handle(EngineJoined(0, 3, 2), 0.0) == []
    while not first.core.done:
        fact = first.pending[-1 if isinstance(first.pending[-1], RequestFinished) else 0]
        assert second.handle(fact, 0.0) == first.tell(fact)
