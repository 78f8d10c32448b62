"""Inflight updates: with breaks_c1, running and waiting requests continue on newer versions."""

from __future__ import annotations

import pytest
from tests.core import midrun
from tests.core.fake_workers import limits

from dora.core.actions import Admit, Drop, Generate, Load
from dora.core.events import EngineLost, Loaded, RequestFinished, TimerFired
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.types import Chunk, ProtocolError, RequestId


def new_state(newest: int = 1, **changes: int) -> State:
    rules = {"max_staleness": 4, "num_steps": 12, "batch_size": 4, **changes}
    return midrun.state_at(limits(breaks_c1=True, is_static=True, **rules), newest)


def handle_loaded(state: State, engine: int, version: int) -> list[object]:
    """The engine has loaded a version; returns the actions that follow."""
    state.engines[engine].loading = version
    state.mark_dirty(state.engines[engine])
    return [*Orchestrator(state.limits, state).handle(Loaded(engine, version, f"v{version}"), now=1.0)]


def test_running_requests_continue_on_the_version_that_their_engine_loads() -> None:
    state = new_state()
    midrun.add_engine(state, 0, rows=2, loaded={0}, slots=2)
    midrun.add_running(state, 0, 0, 0, 1, num_tokens=5)
    handle_loaded(state, 0, 1)
    on = state.engines[0]
    assert set(on.requests.values()) == {1}
    assert on.kv_tokens[1] == 10
    assert dict(state.num_unfinished) == {1: 2}
    assert {group.version for group in state.groups.values()} == {0}  # and the deadline is that of version 0


def test_waiting_requests_start_on_the_newest_loaded_version_oldest_first() -> None:
    state = new_state(newest=2)
    midrun.add_engine(state, 0, rows=3, loaded={1}, slots=2)
    midrun.add_engine(state, 1, rows=3, loaded={1}, slots=2)
    midrun.add_running(state, 1, 1, 0, 1, 2)
    midrun.add_waiting(state, 0, 3)
    midrun.add_waiting(state, 1, 4)
    actions = handle_loaded(state, 0, 2)
    assert [action for action in actions if isinstance(action, Generate)] == [
        Generate(0, 2, (RequestId(0, 3, 0), RequestId(0, 4, 0)))
    ]


def test_a_lost_request_restarts_on_the_newest_version() -> None:
    state = new_state()
    midrun.add_engine(state, 0, rows=2, loaded={0}, slots=2)
    midrun.add_engine(state, 1, rows=2, loaded={1}, slots=2)
    midrun.add_running(state, 0, 0, 0)
    actions = Orchestrator(state.limits, state).handle(EngineLost(0, "test"), now=1.0)
    assert Generate(1, 1, (RequestId(0, 0, 0),)) in actions


def test_a_draining_engine_does_not_block_updates_of_others() -> None:
    """Its requests stay on it, since nothing migrates: their version is needed nowhere else."""
    state = new_state(newest=2)
    midrun.add_engine(state, 0, rows=2, loaded={0}, slots=2, is_draining=True)
    midrun.add_running(state, 0, 0, 0)
    midrun.add_engine(state, 1, rows=2, loaded={0, 1}, slots=2)
    midrun.add_running(state, 1, 1, 1, 2)
    actions = Orchestrator(state.limits, state).handle(TimerFired(), now=9.0)
    assert [action for action in actions if isinstance(action, Drop | Load)] == [Drop(1, 0), Load(1, 2)]


def test_nothing_is_loaded_for_requests_that_cannot_be_moved() -> None:
    state = new_state(newest=1)
    midrun.add_engine(state, 0, rows=2, loaded={0}, slots=2, is_draining=True)
    midrun.add_running(state, 0, 0, 0)
    midrun.add_engine(state, 1, rows=2, loaded={1}, slots=2)
    actions = Orchestrator(state.limits, state).handle(TimerFired(), now=9.0)
    assert not any(isinstance(action, Load) for action in actions)


def test_an_engine_with_free_rows_loads_the_version_that_requests_start_on() -> None:
    """weight_sync_interval would allow it to wait, but no request starts on its version any more."""
    state = new_state(newest=3, weight_sync_interval=4)
    midrun.add_engine(state, 0, rows=2, loaded={2}, slots=2)
    midrun.add_engine(state, 1, rows=2, loaded={3}, slots=2)
    midrun.add_prompts(state, 0, 8)
    actions = Orchestrator(state.limits, state).handle(TimerFired(), now=9.0)
    assert Load(0, 3) in actions
    assert {action.version for action in actions if isinstance(action, Admit)} == {3}


@pytest.mark.parametrize(
    ("versions", "final_version", "rule"),
    [
        ((1, 0), 1, "chunk versions must increase"),
        ((0, 0), 1, "chunk versions must increase"),
        ((0, 2), 1, "chunk versions must increase"),
        ((0, 1), 0, "must finish on its own version"),
    ],
    ids=str,
)
def test_decreasing_chunk_versions_are_rejected(
    versions: tuple[int, ...], final_version: int, rule: str
) -> None:
    state = new_state(newest=2)
    midrun.add_engine(state, 0, rows=2, loaded={0, 1}, slots=2)
    midrun.add_running(state, 0, 1, 0)
    chunks = tuple(Chunk(version, f"v{version}", 2) for version in versions)
    event = RequestFinished(0, RequestId(0, 0, 0), final_version, 4, chunks, "stop")
    with pytest.raises(ProtocolError, match=rule):
        Orchestrator(state.limits, state).handle(event, now=1.0)
