"""Moves in the simulated world keep their contract, whoever dies when."""

from __future__ import annotations

from dataclasses import replace

import pytest
from tests.observe.recording import world_config

from dora.core.actions import Abort, Generate, Load, Migrate
from dora.core.events import (
    EngineLost,
    Event,
    Migrated,
    MigrationFailed,
    RequestFinished,
    RequestsAborted,
)
from dora.core.records import RequestId
from dora.sim.engines import Violation
from dora.sim.faults import Faults
from dora.sim.world import World

LONG = RequestId(0, 0, 0)
MOVE = Migrate(LONG, 0, 1, 0, "test")
CALM = {"share_refused": 0.0, "loss_interval_s": None, "max_length": 64, "family": "constant"}


def world(move_s: float, stop_s: float, faults: Faults | None = None) -> World:
    """Two engines that hold version 0; the first has begun a request of 4 tokens, 40 ms."""
    config = world_config(**CALM, engines=((1, 1), (1, 1)), speeds=(0.01, 0.01), report_s=100.0)
    made = World(replace(config, move_s=move_s, stop_s=stop_s, faults=faults or Faults()), seed=0)
    told(made, 1.0)
    for engine in (0, 1):
        made.perform(Load(engine, 0))
    told(made, 1.0)
    made.perform(Generate(0, 0, (LONG,)))
    return made


def told(made: World, seconds: float) -> list[Event]:
    """All facts of some time."""
    until = made.now + seconds
    facts = []
    while (fact := made.next_fact(until)) is not None:
        facts.append(fact)
    return facts


def kinds(facts: list[Event]) -> list[str]:
    return [type(fact).__name__ for fact in facts]


def test_a_moved_request_goes_on_at_its_destination_with_its_tokens() -> None:
    made = world(move_s=0.02, stop_s=0.001)
    made.perform(MOVE)
    moved, finished = told(made, 1.0)
    assert isinstance(moved, Migrated)
    assert isinstance(finished, RequestFinished)
    assert 0 < moved.num_tokens <= finished.num_tokens
    assert (moved.source, moved.destination, finished.engine) == (0, 1, 1)
    assert 2.04 < made.now <= 3.1


def test_a_request_that_ends_first_is_told_before_its_failed_move() -> None:
    made = world(move_s=10.0, stop_s=0.001)
    made.perform(MOVE)
    assert kinds(told(made, 1.0)) == ["RequestFinished", "MigrationFailed"]


def test_a_request_that_is_given_up_is_told_before_its_failed_move() -> None:
    made = world(move_s=10.0, stop_s=0.001)
    made.perform(MOVE)
    made.perform(Abort(0, (LONG,)))
    aborted, failed = told(made, 1.0)
    assert isinstance(aborted, RequestsAborted)
    assert aborted.requests == (LONG,)
    assert failed == MigrationFailed(LONG, 0, 1, "it was given up")


def test_an_abort_that_comes_too_late_names_nothing() -> None:
    made = world(move_s=0.0, stop_s=0.02)
    made.perform(MOVE)
    while made.truth.where[LONG].id == 0:
        assert told(made, 0.0005) == []
    made.perform(Abort(0, (LONG,)))
    facts = told(made, 1.0)
    assert [f.requests for f in facts if isinstance(f, RequestsAborted)] == [()]
    assert kinds([f for f in facts if not isinstance(f, RequestsAborted)]) == ["Migrated", "RequestFinished"]


@pytest.mark.parametrize("lost", [0, 1])
def test_an_engine_that_dies_during_the_copy_leaves_one_owner_or_none(lost: int) -> None:
    made = world(move_s=0.02, stop_s=0.001)
    made.perform(MOVE)
    made.lose(made.truth.engines[lost])
    facts = told(made, 0.005)
    assert facts == [
        MigrationFailed(LONG, 0, 1, f"engine {lost} is dead"),
        EngineLost(lost, "simulated loss"),
    ]
    assert (LONG in made.truth.where) == (lost == 1)


def test_a_request_that_was_offered_survives_its_source() -> None:
    made = world(move_s=0.0, stop_s=0.02, faults=Faults(detect_s=1.0, share_returning=0.0))
    made.perform(MOVE)
    assert told(made, 0.001) == []
    made.lose(made.truth.engines[0])
    assert kinds(told(made, 5.0)) == ["Migrated", "RequestFinished", "EngineLost"]


def test_a_request_has_one_owner() -> None:
    made = world(move_s=0.02, stop_s=0.001)
    with pytest.raises(Violation, match="has two owners, engines 0 and 1"):
        made.perform(Generate(1, 0, (LONG,)))


def test_a_destination_without_a_free_row_is_a_violation() -> None:
    made = world(move_s=0.02, stop_s=0.001)
    made.perform(Generate(1, 0, (RequestId(0, 1, 0),)))
    with pytest.raises(Violation, match="more requests than its 1 rows"):
        made.perform(MOVE)
