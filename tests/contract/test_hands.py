"""Simulated and real hands keep one contract, so what a thousand simulated runs show holds for real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.contract.stage import LIMITS, MAKERS, MAX_LENGTH, ROWS, Stage, siblings

from dora.core.actions import (
    Abort,
    Action,
    Dismiss,
    Drop,
    Fetch,
    Generate,
    Load,
    Migrate,
    Pause,
    Resume,
    Rush,
    Score,
    Train,
)
from dora.core.events import (
    EngineLeft,
    Event,
    GroupScored,
    Loaded,
    Migrated,
    MigrationFailed,
    Paused,
    PromptsFetched,
    RequestFinished,
    RequestsAborted,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import GroupId, RequestId
from dora.runtime.drive import Hands, drive
from dora.runtime.local import LocalHands
from dora.sim.checker import Ledger


@pytest.fixture(scope="module", params=MAKERS)
def hands(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Hands]:
    made = MAKERS[request.param](tmp_path_factory.mktemp("hands"))
    yield made
    close(made)


@pytest.fixture(scope="module")
def stage(hands: Hands) -> Stage:
    """All tests of one kind of hands share them; each takes new groups and a new version."""
    return Stage(hands)


def close(hands: Hands) -> None:
    """End the processes of real hands."""
    if isinstance(hands, LocalHands):
        hands.close()


def generate(stage: Stage, version: int, *groups: GroupId) -> list[RequestFinished]:
    """Generate groups on engine 0 to their end."""
    stage.hands.perform(Generate(0, version, siblings(*groups)))
    return stage.hear(RequestFinished, len(siblings(*groups)))


def test_fetched_groups_follow_one_another_without_a_gap(stage: Stage) -> None:
    stage.hands.perform(Fetch(3))
    stage.hands.perform(Fetch(2))
    first, second = stage.hear(PromptsFetched, 2)
    assert (len(first.groups), len(second.groups)) == (3, 2)
    assert second.first_index == first.first_index + 3
    assert len({*first.groups, *second.groups}) == 5


def test_every_row_comes_once_per_epoch(stage: Stage) -> None:
    groups = stage.fetch(2 * 7)
    next_epoch = groups[0].epoch + 1
    assert sorted(group.row for group in groups if group.epoch == next_epoch) == list(range(7))


def test_loaded_bytes_are_the_published_ones(stage: Stage) -> None:
    published = stage.publish()
    for engine in (0, 1):
        stage.hands.perform(Load(engine, published.version))
    told = stage.hear(Loaded, 2)
    for engine in (0, 1):
        stage.hands.perform(Drop(engine, published.version))
    assert set(told) == {Loaded(engine, published.version, published.digest) for engine in (0, 1)}


def test_a_request_finishes_once_in_one_piece_on_its_version(stage: Stage) -> None:
    with stage.holding(0) as published:
        groups = stage.fetch(2)
        finished = generate(stage, published.version, *groups)
        later = stage.heard_until(stage.hands.now + 0.3)
    assert sorted(fact.request for fact in finished) == sorted(siblings(*groups))
    assert not [fact for fact in later if isinstance(fact, RequestFinished)]
    for fact in finished:
        assert (fact.engine, fact.version) == (0, published.version)
        assert [(c.version, c.digest) for c in fact.chunks] == [(published.version, published.digest)]
        assert fact.chunks[0].num_tokens == fact.num_tokens <= MAX_LENGTH


def test_an_engine_generates_two_versions_side_by_side(stage: Stage) -> None:
    with stage.holding(0) as old, stage.holding(0) as new:
        groups = stage.fetch(2)
        for published, group in zip((old, new), groups, strict=True):
            stage.hands.perform(Generate(0, published.version, siblings(group)))
        finished = stage.hear(RequestFinished, ROWS)
    wanted = dict(zip(groups, (old, new), strict=True))
    for fact in finished:
        published = wanted[fact.request.group]
        assert (fact.version, fact.chunks[0].digest) == (published.version, published.digest)


def test_aborted_requests_are_confirmed_and_free_their_rows(stage: Stage) -> None:
    with stage.holding(0) as published:
        first, second, third = stage.fetch(3)
        stage.hands.perform(Generate(0, published.version, siblings(first, second)))
        stage.hands.perform(Abort(0, siblings(first)))
        (aborted,) = stage.hear(RequestsAborted)
        others = generate(stage, published.version, third) + stage.hear(RequestFinished, 2)
        later = stage.heard_until(stage.hands.now + 0.3)
    assert (aborted.engine, sorted(aborted.requests)) == (0, sorted(siblings(first)))
    assert sorted(fact.request for fact in others) == sorted(siblings(second, third))
    assert not [fact for fact in later if isinstance(fact, RequestFinished)]


def test_a_scored_group_has_one_reward_per_sibling(stage: Stage) -> None:
    with stage.holding(0) as published:
        (group,) = stage.fetch(1)
        generate(stage, published.version, group)
        stage.hands.perform(Score(group))
        (scored,) = stage.hear(GroupScored)
    assert scored.group == group
    assert len(scored.rewards) == LIMITS.group_size


def test_a_trained_step_changes_what_is_published(stage: Stage) -> None:
    with stage.holding(0) as published:
        groups = stage.fetch(LIMITS.batch_size)
        generate(stage, published.version, *groups)
        for group in groups:
            stage.hands.perform(Score(group))
        stage.hear(GroupScored, len(groups))
        stage.hands.perform(Train(published.version, groups))
        assert [fact.step for fact in stage.hear(Trained)] == [published.version]
        assert stage.publish().digest != published.digest


def move(stage: Stage, version: int, requests: Sequence[RequestId], source: int = 0) -> None:
    """Order requests to move to the other engine."""
    for request in requests:
        stage.hands.perform(Migrate(request, source, 1 - source, version, "a test"))


def outcomes(facts: Sequence[Event]) -> dict[RequestId, list[Migrated | MigrationFailed]]:
    """What was told of each move."""
    told: dict[RequestId, list[Migrated | MigrationFailed]] = {}
    for fact in facts:
        if isinstance(fact, Migrated | MigrationFailed):
            told.setdefault(fact.request, []).append(fact)
    return told


def test_a_moved_request_finishes_at_its_destination_in_one_piece(stage: Stage) -> None:
    with stage.holding(0, 1) as published:
        requests = siblings(*stage.fetch(2))
        stage.hands.perform(Generate(0, published.version, requests))
        move(stage, published.version, requests[:2])
        finished = {fact.request: fact for fact in stage.hear(RequestFinished, len(requests))}
        facts = [*finished.values(), *stage.heard_until(stage.hands.now + 0.3)]
    told = outcomes(facts)
    assert {request: len(facts) for request, facts in told.items()} == dict.fromkeys(requests[:2], 1)
    assert any(isinstance(facts[0], Migrated) for facts in told.values())
    for request, fact in finished.items():
        has_moved = request in told and isinstance(told[request][0], Migrated)
        assert fact.engine == (1 if has_moved else 0)
        assert [(c.version, c.digest) for c in fact.chunks] == [(published.version, published.digest)]
        assert fact.chunks[0].num_tokens == fact.num_tokens
    assert len([fact for fact in facts if isinstance(fact, RequestFinished)]) == len(requests)


def test_a_request_is_owned_by_one_engine_after_the_other(stage: Stage) -> None:
    """There and back again; each fact fits the one before."""
    with stage.holding(0, 1) as published:
        (group,) = stage.fetch(1)
        requests = siblings(group)
        stage.hands.perform(Generate(0, published.version, requests))
        move(stage, published.version, requests[:1])
        owner = 0
        facts: list[Event] = []
        while not any(isinstance(fact, RequestFinished) and fact.request == requests[0] for fact in facts):
            fact = stage.hands.next_fact(stage.hands.now + 30)
            assert fact is not None
            facts.append(fact)
            if isinstance(fact, Migrated):
                assert (fact.source, fact.destination) == (owner, 1 - owner)
                owner = fact.destination
                move(stage, published.version, requests[:1], source=owner)
            elif isinstance(fact, RequestFinished) and fact.request == requests[0]:
                assert fact.engine == owner
        facts += stage.heard_until(stage.hands.now + 0.3)
        (told,) = outcomes(facts).values()
    assert [type(fact) for fact in told[:-1]] == [Migrated] * (len(told) - 1)
    assert isinstance(told[-1], MigrationFailed)  # the last move came too late


def test_a_request_that_is_given_up_while_it_moves_is_given_up_once(stage: Stage) -> None:
    with stage.holding(0, 1) as published:
        groups = stage.fetch(2)
        requests = siblings(*groups)
        stage.hands.perform(Generate(0, published.version, requests))
        move(stage, published.version, requests)
        stage.hands.perform(Abort(0, requests))
        ends: list[RequestId] = []
        facts = stage.heard_until(stage.hands.now + 0.5)
        for fact in facts:
            if isinstance(fact, Migrated):  # the abort came too late
                stage.hands.perform(Abort(fact.destination, (fact.request,)))
        for fact in [*facts, *stage.heard_until(stage.hands.now + 0.5)]:
            ends += fact.requests if isinstance(fact, RequestsAborted) else ()
            ends += [fact.request] if isinstance(fact, RequestFinished) else []
        told = outcomes(facts)
        others = generate(stage, published.version, *stage.fetch(2))  # all rows are free again
    assert sorted(ends) == sorted(requests)
    assert {request: len(facts) for request, facts in told.items()} == dict.fromkeys(requests, 1)
    assert len(others) == ROWS


def test_a_paused_engine_finishes_nothing_until_it_is_resumed(stage: Stage) -> None:
    with stage.holding(0) as published:
        requests = siblings(*stage.fetch(1))
        stage.hands.perform(Generate(0, published.version, requests))
        stage.hands.perform(Pause(0))
        assert stage.hear(Paused) == [Paused(0)]
        before = stage.heard_until(stage.hands.now + 0.5)
        stage.hands.perform(Resume(0))
        finished = stage.hear(RequestFinished, len(requests))
    assert not [fact for fact in before if isinstance(fact, RequestFinished)]
    assert sorted(fact.request for fact in finished) == sorted(requests)


def test_in_a_rush_the_named_requests_finish_before_all_others(stage: Stage) -> None:
    with stage.holding(0) as published:
        first, second = stage.fetch(2)
        stage.hands.perform(Generate(0, published.version, siblings(first, second)))
        stage.hands.perform(Rush(0, siblings(second)))
        during = stage.hear(RequestFinished, 2)
        stage.hands.perform(Rush(0, ()))
        after = stage.hear(RequestFinished, 2)
    assert sorted(fact.request for fact in during) == sorted(siblings(second))
    assert sorted(fact.request for fact in after) == sorted(siblings(first))


def test_an_engine_that_is_dismissed_leaves_and_hears_no_more(stage: Stage) -> None:
    """The last one to use the stage, for its second engine is gone afterwards."""
    with stage.holding(0) as published:
        stage.hands.perform(Dismiss(1))
        assert stage.hear(EngineLeft) == [EngineLeft(1)]
        requests = siblings(*stage.fetch(1))
        stage.hands.perform(Generate(0, published.version, requests))
        move(stage, published.version, requests[:1])
        (failed,) = stage.hear(MigrationFailed)
        finished = stage.hear(RequestFinished, len(requests))
    assert (failed.request, failed.source, failed.destination) == (requests[0], 0, 1)
    assert {fact.engine for fact in finished} == {0}


@pytest.mark.parametrize("kind", ["simulated", "real"])  # whole runs on Ray are in tests/runtime
def test_a_new_orchestrator_drives_a_run_to_its_end(kind: str, tmp_path: Path) -> None:
    hands, core, ledger = MAKERS[kind](tmp_path), Orchestrator(LIMITS), Ledger(LIMITS)
    times: list[float] = []

    def record(now: float, event: Event | None, orders: Sequence[Action]) -> None:
        times.append(now)
        if event is not None:
            ledger.hear(event)
        for order in orders:
            ledger.obey(order)

    try:
        drive(core, hands, record)
    finally:
        close(hands)
    ledger.close()
    state = core.snapshot()
    assert core.done
    assert times == sorted(times)
    assert state.num_admitted == state.num_trained == LIMITS.num_steps * LIMITS.batch_size
    assert sorted(ledger.end_of.values()) == ["step 0", "step 0", "step 1", "step 1", "step 2", "step 2"]
    assert len(ledger.finished) == state.num_trained * LIMITS.group_size
