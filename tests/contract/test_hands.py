"""Simulated and real hands keep one contract, so what a thousand simulated runs show holds for real ones."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from tests.contract.stage import LIMITS, MAKERS, MAX_LENGTH, ROWS, Stage, siblings

from dora.core.actions import Abort, Action, Drop, Fetch, Generate, Load, Score, Train
from dora.core.events import (
    Event,
    GroupScored,
    Loaded,
    PromptsFetched,
    RequestFinished,
    RequestsAborted,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import GroupId
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
        assert stage.hear(Trained) == [Trained(published.version)]
        assert stage.publish().digest != published.digest


@pytest.mark.parametrize("kind", MAKERS)
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
