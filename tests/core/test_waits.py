"""Who waits for whom: from the next step to the station that holds it up."""

from __future__ import annotations

from tests.core.midway import engine, midway, running, waiting
from tests.core.stations import Stations, limits

from dora.core.events import GroupScored, Loaded, Trained, Woken
from dora.core.state import State
from dora.core.waits import Wait, owners, waits


def edges(state: State) -> set[tuple[str, str]]:
    return {(wait.who, wait.on) for wait in waits(state)}


def test_a_trainer_without_groups_waits_for_their_engine_and_says_since_when() -> None:
    state = midway(limits(num_steps=20, batch_size=2, max_staleness=2), newest=2)
    engine(state, 0, rows=4, slots=2, held={0, 2})
    running(state, 0, 0, 1, num_tokens=7)
    state.num_fetching = 2
    run = Stations(state.limits, state=state)
    run.now = 5.0
    run.tell(Woken())
    found = waits(run.state)
    assert {(wait.who, wait.on) for wait in found} == {
        ("trainer", "step 3"),
        ("step 3", "group 0/1"),
        ("group 0/1", "request 0/1/0"),
        ("request 0/1/0", "engine 0"),
        ("step 3", "admission"),
        ("admission", "dataset"),
    }
    assert Wait("step 3", "group 0/1", "it must be among its groups", 5.0) in found
    assert Wait("request 0/1/0", "engine 0", "tokens of version 0, 7 so far") in found
    assert owners(found) == ["dataset", "engine 0"]


def test_the_next_step_waits_for_a_trainer_that_works() -> None:
    run = Stations(limits())
    run.join(0, rows=9, slots=3)
    run.settle(but=lambda fact: isinstance(fact, Trained))
    found = waits(run.state)
    assert found[0] == Wait("step 2", "trainer", "step 1 is trained")
    assert Wait("admission", "step 2", "the staleness bound leaves no place at version 0") in found
    assert owners(found) == ["trainer"]


def test_the_first_step_waits_for_a_version_for_an_engine_and_for_its_load() -> None:
    run = Stations(limits())
    assert owners(waits(run.state)) == ["trainer"]
    run.settle()
    assert edges(run.state) >= {("trainer", "step 1"), ("step 1", "admission"), ("admission", "engines")}
    run.now = 3.0
    run.join(0, rows=9, slots=3)
    found = waits(run.state)
    assert Wait("version 0 on engine 0", "engine 0", "it takes the weights", 3.0) in found
    assert owners(found) == ["engine 0"]


def test_a_group_whose_answers_are_finished_waits_for_its_rewards() -> None:
    run = Stations(limits())
    run.join(0, rows=9, slots=3)
    run.settle(but=lambda fact: isinstance(fact, GroupScored))
    found = waits(run.state)
    assert [wait for wait in found if wait.on == "rewards"] == [
        Wait(f"group 0/{row}", "rewards", "its answers are judged") for row in (0, 1)
    ]
    assert owners(found) == ["rewards"]


def test_a_request_without_a_row_waits_for_the_load_of_its_version() -> None:
    """Engine 0 clears version 2 for version 1, which request 1 needs."""
    state = midway(limits(num_steps=20, batch_size=2, max_staleness=2), newest=2)
    engine(state, 0, rows=2, held={2}, wanted=1, clearing=2)
    running(state, 0, 2, 3, 4)
    waiting(state, 1, 1)
    found = waits(state)
    assert {
        Wait("request 0/1/0", "version 1 on engine 0", "a row there"),
        Wait("version 1 on engine 0", "engine 0", "its requests of version 2 go"),
    } <= {*found}
    assert owners(found)[-1] == "engine 0"


def test_a_lost_engine_leaves_its_requests_to_those_that_remain() -> None:
    state = midway(limits(num_steps=20, batch_size=2, max_staleness=2), newest=2)
    waiting(state, 1, 1)
    assert ("request 0/1/0", "engines") in edges(state)
    engine(state, 5, rows=1, held={1})
    running(state, 5, 1, 2)
    assert ("request 0/1/0", "engine 5") in edges(state)


def test_nobody_waits_any_more_when_the_run_is_over() -> None:
    run = Stations(limits(num_steps=2))
    run.join(0, rows=9, slots=3)
    run.settle(but=lambda fact: isinstance(fact, Trained) and fact.step == 1)
    assert waits(run.state)[0] == Wait("the end of the run", "trainer", "step 2 is trained")
    run.settle(but=lambda fact: isinstance(fact, Loaded))
    assert run.core.done
    assert waits(run.state) == []


def test_those_who_wait_for_each_other_have_no_owner() -> None:
    assert owners([Wait("a", "b", ""), Wait("b", "a", "")]) == []
    assert owners([Wait("a", "b", ""), Wait("b", "a", ""), Wait("b", "c", "")]) == ["c"]
    assert owners([]) == []
