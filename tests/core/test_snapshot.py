"""Snapshots: a restored orchestrator continues as the original would; damaged snapshots are rejected."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.fake_workers import FakeWorkers, limits
from tests.core.midrun import add_engine, add_running, state_at
from tests.core.test_random_events import any_limits

from dora.core import codec, invariants
from dora.core.actions import DecodeOnly, Migrate
from dora.core.events import DrainRequested, EngineLost, ProgressReported, TimerFired
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.types import Limits, ProtocolError


def round_trip(state: State) -> Any:
    """The snapshot as JSON, read back."""
    return json.loads(json.dumps(codec.state_to_json(state)))


@given(
    limits=any_limits,
    engines=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
    choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=60),
    data=st.data(),
)
def test_a_restored_orchestrator_returns_the_same_actions(
    limits: Limits, engines: list[tuple[int, int, bool]], choices: list[int], data: st.DataObject
) -> None:
    """A run takes random events up to its middle; then both orchestrators get the same ones."""
    run = FakeWorkers(limits, num_prompts=7)
    for number, (rows, slots, is_colocated) in enumerate(engines):
        run.join(number, rows, slots, is_colocated)
    for choice in choices:
        run.now += 0.3 * (choice % 2)
        if run.orchestrator.done or not (events := run.deliverable()):
            break
        run.deliver(events[choice % len(events)])
        if choice % 17 == 0 and len(run.state.engines) > 1:
            run.deliver(DrainRequested(min(run.state.engines)))
        if choice % 31 == 0 and len(run.state.engines) > 2:
            run.deliver(EngineLost(max(run.state.engines), "killed"))
    state = codec.state_from_json(round_trip(run.state))
    assert invariants.check(state) == []
    restored = Orchestrator(limits, state)
    for _ in range(20):
        if run.orchestrator.done or not (events := run.deliverable()):
            break
        event = data.draw(st.sampled_from(events))
        run.now += data.draw(st.sampled_from([0.0, 0.5]))
        actions = run.deliver(event)
        assert restored.handle(event, run.now) == actions
        assert restored.next_wakeup() == run.orchestrator.next_wakeup()
    assert round_trip(restored.snapshot()) == round_trip(run.state)


def busy_state() -> State:
    """Migrations in flight, draining and evicting engines, measurements, a stall and a DecodeOnly."""
    bounds = limits(num_steps=9, batch_size=2, group_size=2, max_staleness=2)
    state = state_at(bounds, newest=2)
    add_engine(state, 0, rows=4, loaded={0}, is_draining=True)
    add_engine(state, 1, rows=5, slots=2, loaded={0, 2})
    add_engine(state, 2, rows=4, loaded={2}, is_colocated=True, is_paused=True)
    add_running(state, 0, 0, 1, num_tokens=40)
    add_running(state, 1, 2, 2, num_tokens=20)
    add_running(state, 1, 0, 3, siblings=[1], num_tokens=70)
    run = FakeWorkers(bounds, state=state)
    run.now = 1.5
    run.deliver(TimerFired())
    run.deliver(ProgressReported(1, (), 12.5, 0.4))
    assert run.actions(Migrate)
    assert run.actions(DecodeOnly)
    return run.state


def test_a_snapshot_keeps_everything() -> None:
    state = busy_state()
    again = codec.state_from_json(round_trip(state))
    assert codec.state_to_json(again) == codec.state_to_json(state)
    for name in (
        "groups",
        "requests",
        "migrations",
        "costs",
        "num_open",
        "engines",
        "limits",
        "stored_versions",
        "num_unfinished",
    ):
        assert getattr(again, name) == getattr(state, name), name
        assert type(getattr(again, name)) is type(getattr(state, name)), name
    assert {*again.draining} == {*state.draining}
    assert not again.dirty_engines, "no event has arrived yet"
    assert {*again.colocated} == {*state.colocated}
    assert invariants.check(again) == []


def test_a_snapshot_of_another_schema_is_rejected() -> None:
    raw = round_trip(busy_state())
    for foreign in ({}, {"schema": 99}, raw | {"schema": codec.SNAPSHOT_SCHEMA + 1}, raw | {"schema": None}):
        with pytest.raises(ProtocolError, match="snapshot schema"):
            codec.state_from_json(foreign)


@pytest.mark.parametrize(
    "name", sorted(codec.state_to_json(state_at(limits(), newest=0)).keys() - {"schema"})
)
def test_a_snapshot_with_a_missing_field_is_rejected(name: str) -> None:
    raw = round_trip(busy_state())
    del raw[name]
    with pytest.raises(ProtocolError, match="the snapshot is damaged"):
        codec.state_from_json(raw)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("limits", {}),
        ("limits", None),
        ("groups", [[[0, 1], {}]]),
        ("groups", 7),
        ("groups", [[[0], None]]),
        ("requests", [[[0, 1], {}]]),
        ("engines", [[0, {"id": 0}]]),
        ("migrations", [[[0, 1, 0], [1]]]),
        ("num_open", [[1]]),
        ("prompts", [[1, [0]]]),
        ("costs", []),
        ("ready_groups", 3),
        ("newest_published", "two"),
        ("next_step", None),
        ("now_s", "late"),
        ("is_stopped", 3),
        ("stored_versions", [[0, 7]]),
    ],
)
def test_a_damaged_snapshot_is_rejected(name: str, value: object) -> None:
    raw = round_trip(busy_state()) | {name: value}
    with pytest.raises(ProtocolError, match="the snapshot is damaged"):
        codec.state_from_json(raw)


def test_a_snapshot_with_contradicting_engines_and_requests_is_rejected() -> None:
    raw = round_trip(busy_state())
    raw["requests"] = raw["requests"][1:]
    with pytest.raises(ProtocolError, match="the snapshot is damaged"):
        codec.state_from_json(raw)
