"""Snapshots: plain JSON, and the same for every orchestrator that has handled the same events."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st
from tests.core.fake_workers import FakeWorkers, limits
from tests.core.midrun import add_engine, add_running, state_at
from tests.core.test_random_events import any_limits

from dora.core import codec
from dora.core.actions import Action, DecodeOnly, Migrate
from dora.core.events import DrainRequested, EngineLost, Event, ProgressReported, TimerFired
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.types import Limits


class RecordedRun(FakeWorkers):
    """Keeps all events, as a journal does."""

    def __init__(self, limits: Limits) -> None:
        self.record: list[tuple[float, Event, list[Action]]] = []
        super().__init__(limits, num_prompts=7)

    def deliver(self, event: Event) -> list[Action]:
        actions = super().deliver(event)
        self.record.append((self.now, event, actions))
        return actions


@given(
    limits=any_limits,
    engines=st.lists(st.tuples(st.integers(1, 5), st.integers(1, 3), st.booleans()), min_size=1, max_size=4),
    choices=st.lists(st.integers(0, 10**6), min_size=1, max_size=80),
)
def test_a_replay_of_a_run_gives_its_actions_and_its_snapshot(
    limits: Limits, engines: list[tuple[int, int, bool]], choices: list[int]
) -> None:
    run = RecordedRun(limits)
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
    replayed = Orchestrator(limits)
    replayed.start(0.0)
    assert all(replayed.handle(event, now) == actions for now, event, actions in run.record)
    assert replayed.next_wakeup() == run.orchestrator.next_wakeup()
    assert codec.state_to_json(replayed.snapshot()) == codec.state_to_json(run.state)


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


def test_a_snapshot_is_plain_json() -> None:
    raw = codec.state_to_json(busy_state())
    assert json.loads(json.dumps(raw)) == raw


def test_a_snapshot_shows_each_difference_of_the_state() -> None:
    raw, state = codec.state_to_json(busy_state()), busy_state()
    state.costs.observe_load(0.5)
    state.num_open[7] += 1
    state.engines[1].is_draining = True
    again = codec.state_to_json(state)
    assert {name for name in raw if raw[name] != again[name]} == {"costs", "num_open", "engines"}
