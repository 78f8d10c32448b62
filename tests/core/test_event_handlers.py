"""An event that contradicts the state is rejected with the rule that it breaks, and changes nothing."""

from __future__ import annotations

import pytest
from tests.core.fake_workers import FakeWorkers, finished, is_work, limits, one_engine

from dora.core import codec, invariants
from dora.core.actions import Fail, Generate
from dora.core.events import (
    DrainRequested,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineRemoved,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    OutputsLost,
    ProgressReported,
    PromptsFetched,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    ScoringFailed,
    StepFailed,
    TimerFired,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.types import Chunk, GroupId, Limits, ProtocolError, RequestId

# Engine 0 generates both siblings of 0/0 and the first of 0/1; the second of 0/1 is finished.
# Group 0/2 is being scored, 0/3 is scored. Groups 0/4 and 0/5 have failed, and their second siblings are
# being aborted. 0/6 and 0/7 run in their place, 0/8 is fetched, and two more prompts are requested.
RUNNING, ABORTING, DONE = RequestId(0, 0, 0), RequestId(0, 4, 1), RequestId(0, 1, 1)
SCORED, SCORING, UNFINISHED = GroupId(0, 3), GroupId(0, 2), GroupId(0, 0)


@pytest.fixture
def run() -> FakeWorkers:
    run = one_engine(limits(batch_size=3, group_size=2, max_staleness=1), rows=12, slots=2)
    run.deliver_all(unless=is_work)
    run.finish_group(SCORED)
    for request in (DONE, RequestId(*SCORING, 0), RequestId(*SCORING, 1)):
        run.deliver(finished(0, request, 0))
    run.fail_request(RequestId(0, 4, 0))
    run.fail_request(RequestId(0, 5, 0))
    return run


def finished_with(*chunks: tuple[int, str, int], version: int = 0) -> RequestFinished:
    return RequestFinished(0, RUNNING, version, 3, tuple(Chunk(*chunk) for chunk in chunks), "stop")


UNKNOWN_ENGINE, PUBLISHED_WEIGHTS = (
    "the engine must have joined",
    "every chunk must come from the published weights",
)
ILLEGAL: list[tuple[Event, str]] = [
    (EngineJoined(0, 4, 1), "an engine can join only once"),
    (EngineJoined(1, 0, 1), "max_num_seqs and version_slots must be at least 1"),
    (EngineJoined(1, 4, 0), "max_num_seqs and version_slots must be at least 1"),
    (EngineJoined(1, 4, 1, replaces=0), "the replaced engine must be lost"),
    (EngineLost(1, "killed"), UNKNOWN_ENGINE),
    (PromptsFetched(10, (GroupId(0, 10),)), "prompts must arrive in the dataset's order"),
    (PromptsFetched(8, ()), "prompts must arrive in the dataset's order"),
    (PromptsFetched(9, (GroupId(0, 9), GroupId(0, 10), GroupId(0, 11))), "only requested prompts may arrive"),
    (PromptsFetched(9, (GroupId(0, 9), UNFINISHED)), "a group id can be used only once"),
    (PromptsFetched(9, (GroupId(0, 9), GroupId(0, 8))), "a group id can be used only once"),
    (PromptsFetched(9, (GroupId(0, 9), GroupId(0, 9))), "a group id can be used only once"),
    (ProgressReported(1, ()), UNKNOWN_ENGINE),
    (finished(1, RUNNING, 0), UNKNOWN_ENGINE),
    (finished(0, DONE, 0), "the engine must be running the request"),
    (finished(0, RequestId(0, 17, 0), 0), "the engine must be running the request"),
    (finished(0, RUNNING, 1), "a request must finish on its own version"),
    (finished_with((0, "other", 3)), PUBLISHED_WEIGHTS),
    (finished_with((0, "v0", 2), (1, "v1", 1)), PUBLISHED_WEIGHTS),
    (finished_with(), PUBLISHED_WEIGHTS),
    (RequestFailed(0, DONE, "refused"), "the engine must be running the request"),
    (RequestFailed(1, RUNNING, "refused"), UNKNOWN_ENGINE),
    (RequestsAborted(0, (RUNNING,), 3), "Abort must have been sent for every request"),
    (RequestsAborted(0, (ABORTING, RUNNING), 3), "Abort must have been sent for every request"),
    (RequestsAborted(1, (ABORTING,), 3), UNKNOWN_ENGINE),
    (GroupScored(UNFINISHED, (0.0, 1.0)), "the group must be awaiting its score"),
    (GroupScored(SCORED, (0.0, 1.0)), "the group must be awaiting its score"),
    (GroupScored(GroupId(0, 4), (0.0, 1.0)), "the group must be awaiting its score"),
    (GroupScored(SCORING, (1.0,)), "every sibling must have a reward"),
    (ScoringFailed(UNFINISHED, "no answer"), "the group must be awaiting its score"),
    (Trained(0), "the step must be in training"),
    (Published(1, "v1"), "the publication of this version must be due"),
    (Published(0, "v0"), "the publication of this version must be due"),
    (Loaded(0, 0, "v0"), "the engine must be loading this version"),
    (LoadFailed(0, 0, "no memory"), "the engine must be loading this version"),
    (LoadFailed(1, 0, "no memory"), UNKNOWN_ENGINE),
    (StepFailed(0, "no memory"), "the step must be in training"),
    (DrainRequested(1), UNKNOWN_ENGINE),
    (EngineRemoved(0), "RemoveEngine must have been sent"),
    (EngineRemoved(1), UNKNOWN_ENGINE),
    (EnginePaused(0), "PauseEngine must have been sent"),
    (EnginePaused(1), UNKNOWN_ENGINE),
    (Migrated(RUNNING, 0, 1, 3, 300, 0.1, 0.1), "the migration must be in flight"),
    (Migrated(DONE, 0, 0, 3, 300, 0.1, 0.1), "the migration must be in flight"),
    (MigrationFailed(RUNNING, 0, 1, "lease over"), "the migration must be in flight"),
    (Loaded(1, 0, "v0"), UNKNOWN_ENGINE),
]


@pytest.mark.parametrize(("event", "rule"), ILLEGAL, ids=[f"{e}" for e, _ in ILLEGAL])
def test_an_impossible_event_is_rejected_and_changes_nothing(
    run: FakeWorkers, event: Event, rule: str
) -> None:
    before = codec.state_to_json(run.state)
    with pytest.raises(ProtocolError) as error:
        run.orchestrator.handle(event, run.now)
    assert rule in str(error.value)
    assert str(event) in str(error.value)
    assert codec.state_to_json(run.state) == before
    assert invariants.check(run.state) == []


def test_an_engine_must_load_the_published_weights(run: FakeWorkers) -> None:
    run.join(1, rows=1, slots=1)
    with pytest.raises(ProtocolError, match="the digest must be the published one"):
        run.orchestrator.handle(Loaded(1, 0, "other"), run.now)


def test_a_step_can_be_trained_only_once(run: FakeWorkers) -> None:
    run.finish_group(GroupId(0, 0))
    run.finish_group(SCORING)
    run.deliver(Trained(0))
    with pytest.raises(ProtocolError, match="the step must be in training"):
        run.orchestrator.handle(Trained(0), run.now)


def test_no_event_may_arrive_after_the_run_has_stopped() -> None:
    run = one_engine(limits(num_steps=1), rows=2, slots=1)
    run.deliver_all()
    with pytest.raises(ProtocolError, match="after the run had stopped"):
        run.orchestrator.handle(TimerFired(), run.now)


def test_an_object_that_is_no_event_is_rejected(run: FakeWorkers) -> None:
    with pytest.raises(ProtocolError, match="is not an event"):
        run.orchestrator.handle("hello", run.now)  # type: ignore[arg-type]


def test_a_progress_report_may_contain_aborted_and_finished_requests(run: FakeWorkers) -> None:
    run.deliver(ProgressReported(0, ((RUNNING, 4), (ABORTING, 9), (DONE, 3))))
    assert run.state.requests[RUNNING].num_tokens == 4


def test_a_request_that_is_being_aborted_may_end_in_any_way(run: FakeWorkers) -> None:
    run.deliver(RequestFailed(0, ABORTING, "refused, too"))
    assert ABORTING not in run.state.engines[0].aborting
    assert run.state.num_failed == 2


def test_a_request_starts_again_after_a_failure_of_its_environment() -> None:
    """On the same version, at most `max_retries` times; then its group fails."""
    run = one_engine(limits(group_size=2, max_retries=2), rows=4, slots=2)
    run.deliver_all(unless=is_work)
    run.deliver(ProgressReported(0, ((RUNNING, 7),)))
    for _ in range(2):
        actions = run.deliver(RequestFailed(0, RUNNING, "it raised", "environment"))
        assert actions == [Generate(0, 0, (RUNNING,))]
    assert (run.state.num_retries, run.state.num_regenerated_tokens, run.state.num_failed) == (2, 7, 0)
    actions = run.deliver(RequestFailed(0, RUNNING, "it raised again", "environment"))
    assert Fail(RUNNING.group, "it raised again") in actions
    assert run.state.num_failed == 1


def test_tokens_that_were_kept_and_are_lost_after_all_are_generated_again(run: FakeWorkers) -> None:
    run.deliver(ProgressReported(0, ((RUNNING, 7),)))
    run.deliver(EngineLost(0, "killed", ((RUNNING, 5),)))
    assert (run.state.num_kept_tokens, run.state.num_regenerated_tokens) == (5, 2)
    assert run.deliver(OutputsLost((RUNNING,))) == []
    assert (run.state.num_kept_tokens, run.state.num_regenerated_tokens) == (0, 7)
    assert run.deliver(OutputsLost((RUNNING,))) == []
    assert (run.state.num_kept_tokens, run.state.num_regenerated_tokens) == (0, 7), "only once"


def test_what_an_engine_rejects_is_not_generated_again() -> None:
    run = one_engine(limits(group_size=2, max_retries=2), rows=4, slots=2)
    run.deliver_all(unless=is_work)
    assert Fail(RUNNING.group, "too long") in run.deliver(RequestFailed(0, RUNNING, "too long", "engine"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_retries": -1}, "max_retries = -1 must be at least 0"),
        ({"num_steps": -1}, "num_steps = -1"),
        ({"batch_size": 0}, "batch_size = 0"),
        ({"group_size": 0}, "group_size = 0"),
        ({"max_staleness": -1}, "max_staleness = -1"),
        ({"filter_groups": True, "group_size": 1}, "would filter every group"),
        ({"batches_per_version": 0}, "batches_per_version = 0"),
        ({"slack": -1}, "slack = -1 must be at least 0"),
        ({"weight_sync_interval": 0}, "weight_sync_interval = 0 must be at least 1"),
        ({"skip_below_kl": 0.0}, "skip_below_kl = 0.0 must be above 0"),
        ({"rebalance_interval_s": 0.0}, "rebalance_interval_s = 0.0 must be above 0"),
    ],
)
def test_impossible_limits_are_rejected(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        limits(**changes)


def test_the_same_events_at_the_same_times_give_the_same_actions() -> None:
    bounds = Limits(num_steps=3, batch_size=2, group_size=2, max_staleness=1)
    first, second = FakeWorkers(bounds), Orchestrator(bounds)
    second.start(0.0)
    first.join(0, rows=3, slots=2)
    assert second.handle(EngineJoined(0, 3, 2), 0.0) == []
    while not first.orchestrator.done:
        event = first.pending[-1 if isinstance(first.pending[-1], RequestFinished) else 0]
        assert second.handle(event, 0.0) == first.deliver(event)
