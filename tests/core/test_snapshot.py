"""A restored orchestrator goes on as if it had never stopped; what is no snapshot is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.core.midway import engine, midway, running
from tests.core.stations import Stations, limits
from tests.core.test_random_facts import any_limits

from dora.core import invariants, snapshot
from dora.core.actions import Migrate, Rush
from dora.core.events import DrainAsked, EngineLost, Progressed, Woken
from dora.core.orchestrator import Orchestrator
from dora.core.records import Limits, ProtocolError
from dora.core.state import State


def written(state: State) -> Any:
    """As it comes out of a file."""
    return json.loads(json.dumps(snapshot.to_json(state)))


@given(
    limits=any_limits,
    engines=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
    choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=60),
    data=st.data(),
)
def test_a_restored_orchestrator_gives_the_orders_of_the_one_that_was_kept(
    limits: Limits, engines: list[tuple[int, int, bool]], choices: list[int], data: st.DataObject
) -> None:
    """A run takes a random way to its middle, and both go on from there by the same facts."""
    run = Stations(limits, num_prompts=7)
    for number, (rows, slots, is_colocated) in enumerate(engines):
        run.join(number, rows, slots, is_colocated)
    for choice in choices:
        run.now += 0.3 * (choice % 2)
        if run.core.done or not (possible := run.possible()):
            break
        run.tell(possible[choice % len(possible)])
        if choice % 17 == 0 and len(run.state.engines) > 1:
            run.tell(DrainAsked(min(run.state.engines)))
        if choice % 31 == 0 and len(run.state.engines) > 2:
            run.tell(EngineLost(max(run.state.engines), "killed"))
    state = snapshot.from_json(written(run.state))
    assert invariants.check(state) == []
    restored = Orchestrator(limits, state)
    for _ in range(20):
        if run.core.done or not (possible := run.possible()):
            break
        fact = data.draw(st.sampled_from(possible))
        run.now += data.draw(st.sampled_from([0.0, 0.5]))
        orders = run.tell(fact)
        assert restored.handle(fact, run.now) == orders
        assert restored.next_wakeup() == run.core.next_wakeup()
    assert written(restored.snapshot()) == written(run.state)


def crowded() -> State:
    """Moves under way, engines that leave and clear, measurements, a wait and a rush."""
    bounds = limits(num_steps=9, batch_size=2, group_size=2, max_staleness=2)
    state = midway(bounds, newest=2)
    engine(state, 0, rows=4, held={0}, is_leaving=True)
    engine(state, 1, rows=5, slots=2, held={0, 2})
    engine(state, 2, rows=4, held={2}, is_colocated=True, is_paused=True)
    running(state, 0, 0, 1, num_tokens=40)
    running(state, 1, 2, 2, num_tokens=20)
    running(state, 1, 0, 3, siblings=[1], num_tokens=70)
    run = Stations(bounds, state=state)
    run.now = 1.5
    run.tell(Woken())
    run.tell(Progressed(1, (), 12.5, 0.4))
    assert run.orders(Migrate)
    assert run.orders(Rush)
    return run.state


def test_a_snapshot_keeps_everything() -> None:
    state = crowded()
    again = snapshot.from_json(written(state))
    assert snapshot.to_json(again) == snapshot.to_json(state)
    for name in ("groups", "requests", "moves", "costs", "open", "engines", "limits", "store", "unfinished"):
        assert getattr(again, name) == getattr(state, name), name
        assert type(getattr(again, name)) is type(getattr(state, name)), name
    assert {*again.leaving} == {*state.leaving}
    assert not again.changed, "nothing has happened yet"
    assert {*again.colocated} == {*state.colocated}
    assert invariants.check(again) == []


def test_a_snapshot_of_another_schema_is_refused() -> None:
    raw = written(crowded())
    for foreign in ({}, {"schema": 99}, raw | {"schema": snapshot.SCHEMA + 1}, raw | {"schema": None}):
        with pytest.raises(ProtocolError, match="snapshot schema"):
            snapshot.from_json(foreign)


@pytest.mark.parametrize("name", sorted(snapshot.to_json(midway(limits(), newest=0)).keys() - {"schema"}))
def test_a_snapshot_that_lacks_anything_is_refused(name: str) -> None:
    raw = written(crowded())
    del raw[name]
    with pytest.raises(ProtocolError, match="the snapshot is damaged"):
        snapshot.from_json(raw)


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
        ("moves", [[[0, 1, 0], [1]]]),
        ("open", [[1]]),
        ("prompts", [[1, [0]]]),
        ("costs", []),
        ("ready", 3),
    ],
)
def test_a_damaged_snapshot_is_refused(name: str, value: object) -> None:
    raw = written(crowded()) | {name: value}
    with pytest.raises(ProtocolError, match="the snapshot is damaged"):
        snapshot.from_json(raw)


@pytest.mark.parametrize(
    ("name", "value"),
    [("newest", "two"), ("next_step", None), ("now_s", "late"), ("stopped", 3), ("store", [[0, 7]])],
)
def test_a_snapshot_with_a_value_of_another_kind_is_refused(name: str, value: object) -> None:
    raw = written(crowded()) | {name: value}
    with pytest.raises(ProtocolError, match="the snapshot is damaged"):
        snapshot.from_json(raw)


def test_a_snapshot_in_which_engines_and_requests_contradict_each_other_is_refused() -> None:
    raw = written(crowded())
    raw["requests"] = raw["requests"][1:]
    with pytest.raises(ProtocolError, match="the snapshot is damaged"):
        snapshot.from_json(raw)
