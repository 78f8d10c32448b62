"""The wait-for graph, from the next step to the component that blocks it."""

from __future__ import annotations

from tests.core.fake_workers import FakeWorkers, limits, one_engine
from tests.core.midrun import add_engine, add_running, add_waiting, state_at

from dora.core.events import GroupScored, Loaded, TimerFired, Trained
from dora.core.state import State
from dora.core.types import RequestId
from dora.core.wait_graph import WaitEdge, find_root_causes, find_waits


def edges(state: State) -> set[tuple[str, str]]:
    return {(wait.waiter, wait.target) for wait in find_waits(state)}


def test_an_idle_trainer_waits_for_the_engines_of_its_groups() -> None:
    state = state_at(limits(num_steps=20, batch_size=2, max_staleness=2), newest=2)
    add_engine(state, 0, rows=4, slots=2, loaded={0, 2})
    add_running(state, 0, 0, 1, num_tokens=7)
    state.num_fetching = 2
    run = FakeWorkers(state.limits, state=state)
    run.now = 5.0
    run.deliver(TimerFired())
    waits = find_waits(run.state)
    assert {(wait.waiter, wait.target) for wait in waits} == {
        ("trainer", "step 3"),
        ("step 3", "group 0/1"),
        ("group 0/1", "request 0/1/0"),
        ("request 0/1/0", "engine 0"),
        ("step 3", "admission"),
        ("admission", "dataset"),
    }
    assert WaitEdge("step 3", "group 0/1", "the group is at its deadline", 5.0) in waits
    assert WaitEdge("request 0/1/0", "engine 0", "tokens of version 0, 7 so far") in waits
    assert find_root_causes(waits) == ["dataset", "engine 0"]


def test_the_next_step_waits_for_a_working_trainer() -> None:
    run = one_engine(limits(), rows=9, slots=3)
    run.deliver_all(unless=lambda event: isinstance(event, Trained))
    waits = find_waits(run.state)
    assert waits[0] == WaitEdge("step 2", "trainer", "training of step 1")
    assert WaitEdge("admission", "step 2", "the staleness bound leaves no place at version 0") in waits
    assert find_root_causes(waits) == ["trainer"]


def test_the_first_step_waits_for_a_version_an_engine_and_a_load() -> None:
    run = FakeWorkers(limits())
    assert find_root_causes(find_waits(run.state)) == ["trainer"]
    run.deliver_all()
    assert edges(run.state) >= {("trainer", "step 1"), ("step 1", "admission"), ("admission", "engines")}
    run.now = 3.0
    run.join(0, rows=9, slots=3)
    waits = find_waits(run.state)
    assert WaitEdge("load of version 0 on engine 0", "engine 0", "the weights", 3.0) in waits
    assert find_root_causes(waits) == ["engine 0"]


def test_a_finished_group_waits_for_its_rewards() -> None:
    run = one_engine(limits(), rows=9, slots=3)
    run.deliver_all(unless=lambda event: isinstance(event, GroupScored))
    waits = find_waits(run.state)
    assert [wait for wait in waits if wait.target == "rewards"] == [
        WaitEdge(f"group 0/{row}", "rewards", "its rewards") for row in (0, 1)
    ]
    assert find_root_causes(waits) == ["rewards"]


def test_a_request_without_a_row_waits_for_the_load_of_its_version() -> None:
    """Engine 0 evicts version 2 for version 1, which request 1 needs."""
    state = state_at(limits(num_steps=20, batch_size=2, max_staleness=2), newest=2)
    add_engine(state, 0, rows=2, loaded={2}, next_load=1, evicting=2)
    add_running(state, 0, 2, 3, 4)
    add_waiting(state, 1, 1)
    waits = find_waits(state)
    assert {
        WaitEdge("request 0/1/0", "load of version 1 on engine 0", "a row there"),
        WaitEdge("load of version 1 on engine 0", "engine 0", "the end of its requests of version 2"),
    } <= {*waits}
    assert find_root_causes(waits)[-1] == "engine 0"


def test_a_waiting_request_waits_for_an_engine_that_holds_its_version() -> None:
    state = state_at(limits(num_steps=20, batch_size=2, max_staleness=2), newest=2)
    add_waiting(state, 1, 1)
    assert ("request 0/1/0", "engines") in edges(state)
    add_engine(state, 5, rows=1, loaded={1})
    add_running(state, 5, 1, 2)
    assert ("request 0/1/0", "engine 5") in edges(state)


def test_a_finished_run_has_no_waits() -> None:
    run = one_engine(limits(num_steps=2), rows=9, slots=3)
    run.deliver_all(unless=lambda event: isinstance(event, Trained) and event.step == 1)
    assert find_waits(run.state)[0] == WaitEdge("the end of the run", "trainer", "training of step 2")
    run.deliver_all(unless=lambda event: isinstance(event, Loaded))
    assert run.orchestrator.done
    assert find_waits(run.state) == []


def test_a_cycle_has_no_root_cause() -> None:
    assert find_root_causes([WaitEdge("a", "b", ""), WaitEdge("b", "a", "")]) == []
    assert find_root_causes([WaitEdge("a", "b", ""), WaitEdge("b", "a", ""), WaitEdge("b", "c", "")]) == ["c"]
    assert find_root_causes([]) == []


def test_an_episode_without_an_agent_waits_for_agents() -> None:
    state = state_at(limits(num_steps=20, batch_size=1, max_staleness=2), newest=2)
    add_engine(state, 0, rows=4, loaded={2})
    add_running(state, 0, 2, 1)
    waits = find_waits(state, {RequestId(0, 1, 0): "an agent that opens a session"})
    assert WaitEdge("request 0/1/0", "agents", "an agent that opens a session") in waits
    assert find_root_causes(waits) == ["agents"]
