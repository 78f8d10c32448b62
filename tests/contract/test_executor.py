"""Simulated and real executors pass the same tests, so what simulated runs show holds for real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.contract.executor_harness import (
    LIMITS,
    MAKERS,
    MAX_LENGTH,
    NUM_PROMPTS,
    ROWS,
    ExecutorHarness,
    siblings,
)

from dora.core.actions import (
    Abort,
    Action,
    DecodeOnly,
    Drop,
    FetchPrompts,
    Generate,
    Load,
    Migrate,
    PauseEngine,
    RemoveEngine,
    ResumeEngine,
    Score,
    Train,
)
from dora.core.events import (
    EnginePaused,
    EngineRemoved,
    Event,
    GroupScored,
    Loaded,
    Migrated,
    MigrationFailed,
    PromptsFetched,
    RequestFinished,
    RequestsAborted,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.types import GroupId, RequestId
from dora.runtime.executor import ProcessExecutor
from dora.runtime.main_loop import Executor, run_main_loop
from dora.sim.checker import Checker


@pytest.fixture(scope="module", params=MAKERS)
def executor(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Executor]:
    executor = MAKERS[request.param](tmp_path_factory.mktemp("run"))
    yield executor
    close(executor)


@pytest.fixture(scope="module")
def harness(executor: Executor) -> ExecutorHarness:
    """The tests of one kind share an executor. Each uses new groups and a new version."""
    return ExecutorHarness(executor)


def close(executor: Executor) -> None:
    """End the processes of a real executor."""
    if isinstance(executor, ProcessExecutor):
        executor.close()


def generate(harness: ExecutorHarness, version: int, *groups: GroupId) -> list[RequestFinished]:
    """Generate groups on engine 0 and wait until they are finished."""
    harness.execute(Generate(0, version, siblings(*groups)))
    return harness.wait_for(RequestFinished, len(siblings(*groups)))


def test_fetched_groups_follow_one_another_without_a_gap(harness: ExecutorHarness) -> None:
    harness.execute(FetchPrompts(3))
    harness.execute(FetchPrompts(2))
    first, second = harness.wait_for(PromptsFetched, 2)
    assert (len(first.groups), len(second.groups)) == (3, 2)
    assert second.first_index == first.first_index + 3
    assert len({*first.groups, *second.groups}) == 5


def test_every_row_comes_once_per_epoch(harness: ExecutorHarness) -> None:
    groups = harness.fetch(2 * 7)
    next_epoch = groups[0].epoch + 1
    assert sorted(group.row for group in groups if group.epoch == next_epoch) == list(range(7))


def test_loaded_bytes_are_the_published_ones(harness: ExecutorHarness) -> None:
    published = harness.publish()
    for engine in (0, 1):
        harness.execute(Load(engine, published.version))
    loaded = harness.wait_for(Loaded, 2)
    for engine in (0, 1):
        harness.execute(Drop(engine, published.version))
    assert set(loaded) == {Loaded(engine, published.version, published.digest) for engine in (0, 1)}


def test_a_request_finishes_once_in_one_piece_on_its_version(harness: ExecutorHarness) -> None:
    with harness.loaded(0) as published:
        groups = harness.fetch(2)
        finished = generate(harness, published.version, *groups)
        late = harness.events_until(harness.now + 0.3)
    assert sorted(event.request for event in finished) == sorted(siblings(*groups))
    assert not [event for event in late if isinstance(event, RequestFinished)]
    for event in finished:
        assert (event.engine, event.version) == (0, published.version)
        assert [(c.version, c.digest) for c in event.chunks] == [(published.version, published.digest)]
        assert event.chunks[0].num_tokens == event.num_tokens <= MAX_LENGTH


def test_an_engine_generates_two_versions_side_by_side(harness: ExecutorHarness) -> None:
    with harness.loaded(0) as old, harness.loaded(0) as new:
        groups = harness.fetch(2)
        for published, group in zip((old, new), groups, strict=True):
            harness.execute(Generate(0, published.version, siblings(group)))
        finished = harness.wait_for(RequestFinished, ROWS)
    wanted = dict(zip(groups, (old, new), strict=True))
    for event in finished:
        published = wanted[event.request.group]
        assert (event.version, event.chunks[0].digest) == (published.version, published.digest)


def test_aborted_requests_are_confirmed_and_free_their_rows(harness: ExecutorHarness) -> None:
    with harness.loaded(0) as published:
        first, second, third = harness.fetch(3)
        harness.execute(Generate(0, published.version, siblings(first, second)))
        harness.execute(Abort(0, siblings(first)))
        (aborted,) = harness.wait_for(RequestsAborted)
        others = generate(harness, published.version, third) + harness.wait_for(RequestFinished, 2)
        late = harness.events_until(harness.now + 0.3)
    assert (aborted.engine, sorted(aborted.requests)) == (0, sorted(siblings(first)))
    assert sorted(event.request for event in others) == sorted(siblings(second, third))
    assert not [event for event in late if isinstance(event, RequestFinished)]


def test_a_scored_group_has_one_reward_per_sibling(harness: ExecutorHarness) -> None:
    with harness.loaded(0) as published:
        (group,) = harness.fetch(1)
        generate(harness, published.version, group)
        harness.execute(Score(group))
        (scored,) = harness.wait_for(GroupScored)
    assert scored.group == group
    assert len(scored.rewards) == LIMITS.group_size


def test_a_trained_step_changes_what_is_published(harness: ExecutorHarness) -> None:
    with harness.loaded(0) as published:
        groups = harness.fetch(LIMITS.batch_size)
        generate(harness, published.version, *groups)
        for group in groups:
            harness.execute(Score(group))
        harness.wait_for(GroupScored, len(groups))
        harness.execute(Train(published.version, groups))
        assert [event.step for event in harness.wait_for(Trained)] == [published.version]
        assert harness.publish().digest != published.digest


def migrate(harness: ExecutorHarness, version: int, requests: Sequence[RequestId], source: int = 0) -> None:
    """Begin to migrate requests to the other engine."""
    for request in requests:
        harness.execute(Migrate(request, source, 1 - source, version, "a test"))


def outcomes(events: Sequence[Event]) -> dict[RequestId, list[Migrated | MigrationFailed]]:
    """The outcomes of each request's migrations."""
    found: dict[RequestId, list[Migrated | MigrationFailed]] = {}
    for event in events:
        if isinstance(event, Migrated | MigrationFailed):
            found.setdefault(event.request, []).append(event)
    return found


def test_a_migrated_request_finishes_at_its_destination_in_one_piece(harness: ExecutorHarness) -> None:
    num_migrated = 0
    with harness.loaded(0, 1) as published:
        for _ in range(5):  # on a busy machine a short request may finish before it migrates
            requests = siblings(*harness.fetch(2))
            harness.execute(Generate(0, published.version, requests))
            migrate(harness, published.version, requests[:2])
            finished = {event.request: event for event in harness.wait_for(RequestFinished, len(requests))}
            events = [*finished.values(), *harness.events_until(harness.now + 0.3)]
            found = outcomes(events)
            assert {request: len(own) for request, own in found.items()} == dict.fromkeys(requests[:2], 1)
            for request, event in finished.items():
                has_migrated = request in found and isinstance(found[request][0], Migrated)
                num_migrated += has_migrated
                assert event.engine == (1 if has_migrated else 0)
                (chunk,) = event.chunks
                assert (chunk.version, chunk.digest) == (published.version, published.digest)
                assert chunk.num_tokens == event.num_tokens
            assert sum(isinstance(event, RequestFinished) for event in events) == len(requests)
            if num_migrated:
                break
    assert num_migrated


def test_a_request_is_owned_by_one_engine_at_a_time(harness: ExecutorHarness) -> None:
    """It migrates back and forth, and each event is consistent with the previous one."""
    with harness.loaded(0, 1) as published:
        (group,) = harness.fetch(1)
        requests = siblings(group)
        harness.execute(Generate(0, published.version, requests))
        migrate(harness, published.version, requests[:1])
        owner = 0
        events: list[Event] = []
        is_finished = False
        while not is_finished:
            event = harness.next_event(harness.now + 30)
            assert event is not None
            events.append(event)
            if isinstance(event, Migrated):
                assert (event.source, event.destination) == (owner, 1 - owner)
                owner = event.destination
                migrate(harness, published.version, requests[:1], source=owner)
            elif isinstance(event, RequestFinished) and event.request == requests[0]:
                assert event.engine == owner
                is_finished = True
        events += harness.events_until(harness.now + 0.3)
        (found,) = outcomes(events).values()
    assert [type(event) for event in found[:-1]] == [Migrated] * (len(found) - 1)
    assert isinstance(found[-1], MigrationFailed)  # the last migration came too late


def test_a_request_that_is_aborted_during_its_migration_ends_once(harness: ExecutorHarness) -> None:
    with harness.loaded(0, 1) as published:
        groups = harness.fetch(2)
        requests = siblings(*groups)
        harness.execute(Generate(0, published.version, requests))
        migrate(harness, published.version, requests)
        harness.execute(Abort(0, requests))
        ends: list[RequestId] = []
        events = harness.events_until(harness.now + 0.5)
        for event in events:
            if isinstance(event, Migrated):  # the abort came too late
                harness.execute(Abort(event.destination, (event.request,)))
        for event in [*events, *harness.events_until(harness.now + 0.5)]:
            ends += event.requests if isinstance(event, RequestsAborted) else ()
            ends += [event.request] if isinstance(event, RequestFinished) else []
        found = outcomes(events)
        others = generate(harness, published.version, *harness.fetch(2))  # all rows are free again
    assert sorted(ends) == sorted(requests)
    assert {request: len(own) for request, own in found.items()} == dict.fromkeys(requests, 1)
    assert len(others) == ROWS


def test_a_paused_engine_finishes_nothing_until_it_is_resumed(harness: ExecutorHarness) -> None:
    with harness.loaded(0) as published:
        requests = siblings(*harness.fetch(1))
        harness.execute(Generate(0, published.version, requests))
        harness.execute(PauseEngine(0))
        assert harness.wait_for(EnginePaused) == [EnginePaused(0)]
        before = harness.events_until(harness.now + 0.5)
        harness.execute(ResumeEngine(0))
        finished = harness.wait_for(RequestFinished, len(requests))
    assert not [event for event in before if isinstance(event, RequestFinished)]
    assert sorted(event.request for event in finished) == sorted(requests)


def test_requests_in_decode_only_finish_before_all_others(harness: ExecutorHarness) -> None:
    with harness.loaded(0) as published:
        first, second = harness.fetch(2)
        harness.execute(Generate(0, published.version, siblings(first, second)))
        harness.execute(DecodeOnly(0, siblings(second)))
        during = harness.wait_for(RequestFinished, 2)
        harness.execute(DecodeOnly(0, ()))
        after = harness.wait_for(RequestFinished, 2)
    assert sorted(event.request for event in during) == sorted(siblings(second))
    assert sorted(event.request for event in after) == sorted(siblings(first))


def test_a_removed_engine_receives_no_more_actions(harness: ExecutorHarness) -> None:
    """The last test of the harness, because it removes the second engine."""
    with harness.loaded(0) as published:
        harness.execute(RemoveEngine(1))
        assert harness.wait_for(EngineRemoved) == [EngineRemoved(1)]
        requests = siblings(*harness.fetch(1))
        harness.execute(Generate(0, published.version, requests))
        migrate(harness, published.version, requests[:1])
        (failed,) = harness.wait_for(MigrationFailed)
        finished = harness.wait_for(RequestFinished, len(requests))
    assert (failed.request, failed.source, failed.destination) == (requests[0], 0, 1)
    assert {event.engine for event in finished} == {0}


@pytest.mark.parametrize("kind", ["simulated", "processes"])  # whole runs on Ray are in tests/runtime
def test_an_orchestrator_runs_to_the_end(kind: str, tmp_path: Path) -> None:
    executor, orchestrator = MAKERS[kind](tmp_path), Orchestrator(LIMITS)
    checker = Checker(LIMITS, NUM_PROMPTS)
    times: list[float] = []

    def record(now: float, event: Event | None, actions: Sequence[Action]) -> None:
        times.append(now)
        if event is not None:
            checker.observe(event)
        for action in actions:
            checker.check(action)

    try:
        run_main_loop(orchestrator, executor, record)
    finally:
        close(executor)
    checker.finish()
    state = orchestrator.snapshot()
    assert orchestrator.done
    assert times == sorted(times)
    assert state.num_admitted == state.num_trained == LIMITS.num_steps * LIMITS.batch_size
    assert checker.groups.outcomes == {"trained": state.num_trained}
    assert len(checker.groups.finished) == state.num_trained * LIMITS.group_size
