"""When engines change their version: at which facts, which of them, and whether it is worth it."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.midway import engine, midway, running, waiting
from tests.core.stations import Stations, limits

from dora.core import versions
from dora.core.actions import Drop, Load, Migrate
from dora.core.events import DrainAsked, EngineJoined, EngineLost, Event, Progressed, Published, Woken
from dora.core.migration import migrate
from dora.core.placement import repartition
from dora.core.records import RequestId
from dora.core.state import State

BOUNDS = limits(num_steps=20, batch_size=8, max_staleness=2)


def cleared(state: State) -> dict[int, tuple[int | None, int | None]]:
    """Engine -> the version it clears and the one it wants, for those that do."""
    return {e.id: (e.clearing, e.wanted) for e in state.engines.values() if e.wanted is not None}


def tail(answer_tokens: float = 200.0, **changes: Any) -> State:
    """Engines 0 and 1 have one request of version 0 each, engine 2 is full of version 1, the newest."""
    state = midway(limits(num_steps=20, batch_size=8, max_staleness=2, **changes), newest=1)
    for number, held in enumerate((0, 0, 1)):
        engine(state, number, rows=4, held={held}, row_tokens_per_s=10.0)
    running(state, 0, 0, 0, num_tokens=100)
    running(state, 1, 0, 1, num_tokens=120)
    running(state, 2, 1, 2, 3, 4, 5, num_tokens=10)
    state.costs.answer_tokens = answer_tokens
    state.touched.clear()
    return state


def test_the_engine_with_least_kv_gives_way() -> None:
    state = tail()
    repartition(state)
    assert cleared(state) == {0: (0, 1)}


def test_its_request_moves_and_then_it_loads() -> None:
    run = Stations(BOUNDS, state=tail())
    run.now = 1.0
    assert run.tell(Woken())[0] == Migrate(RequestId(0, 0, 0), 0, 1, 0, "flip")
    run.settle(but=lambda fact: not hasattr(fact, "destination"))
    assert run.orders(Drop) == [Drop(0, 0)]
    assert run.orders(Load) == [Load(0, 1)]
    assert run.rows(1) == [0, 1]


@pytest.mark.parametrize(("load_s", "is_worth_it"), [(7.4, True), (7.5, False)])
def test_an_engine_flips_only_if_that_gains_more_than_it_costs(load_s: float, is_worth_it: bool) -> None:
    """Gain: 3 empty rows for 100 more tokens, 300. Cost: 10 tokens/s of one row while 100 tokens of 1 kB
    move at 1 MB/s (0.1 s) and stand still for 0.05 s, 1.5; and of all four rows while the version loads."""
    state = tail()
    state.costs.moved_bytes, state.costs.moved_tokens = 1000, 1
    state.costs.copy_bytes_per_s, state.costs.stop_s = 1e6, 0.05
    state.costs.load_s = load_s
    repartition(state)
    assert bool(cleared(state)) == is_worth_it


def test_an_engine_does_not_flip_whose_requests_find_no_rows_elsewhere() -> None:
    state = tail()
    running(state, 1, 0, 6, 7, 8)
    repartition(state)
    assert cleared(state) == {}


def test_an_empty_engine_needs_no_reason() -> None:
    state = midway(BOUNDS, newest=1)
    for number in range(2):
        engine(state, number, rows=4, held={0}, row_tokens_per_s=10.0)
    running(state, 1, 0, 1)
    state.costs.load_s = 1e9
    repartition(state)
    assert cleared(state) == {0: (0, 1)}


def test_the_last_copy_of_a_pinned_version_is_not_given_up_for_the_newest() -> None:
    """The request of version 0 runs on an engine that leaves; only engine 1 could take it."""
    state = midway(BOUNDS, newest=2)
    engine(state, 0, rows=4, held={0})
    running(state, 0, 0, 0)
    engine(state, 1, rows=4, slots=2, held={0, 1})
    state.engines[0].is_leaving = True
    state.touch(state.engines[0])
    repartition(state)
    assert cleared(state) == {1: (1, 2)}


def test_versions_that_lack_rows_get_engines_in_the_order_of_their_deadlines() -> None:
    """Requests of versions 0 and 1 wait, each for an engine; of three with version 2 one stays."""
    state = midway(BOUNDS, newest=2)
    for number in range(3):
        engine(state, number, rows=2, held={2})
    running(state, 2, 2, 9)
    waiting(state, 1, 1)
    waiting(state, 0, 0)
    repartition(state)
    assert cleared(state) == {0: (2, 0), 1: (2, 1)}


def test_nothing_is_repartitioned_where_all_stays_where_it_is() -> None:
    state = tail(is_static=True)
    repartition(state)
    assert cleared(state) == {}


@pytest.mark.parametrize(
    ("paces", "flipped"),
    [((10.0, 10.0, 10.0, 10.0), {0, 1, 2}), ((30.0, 10.0, 10.0, 10.0), {0, 1})],
    ids=["equal engines", "one of three times the speed"],
)
def test_shares_follow_throughput(paces: tuple[float, ...], flipped: set[int]) -> None:
    """R = {0: 4, 1: 12}. Of four equal engines, three take version 1; a fast one counts for three, so
    that of six units the four for version 1 are the fast engine and one more."""
    state = midway(limits(num_steps=20, batch_size=8, max_staleness=2), newest=1)
    for number, pace in enumerate(paces):
        engine(state, number, rows=4, held={0}, row_tokens_per_s=pace)
        running(state, number, 0, number, num_tokens=10 * number)
    state.costs.answer_tokens = 100.0
    repartition(state)
    assert cleared(state).keys() == flipped


def test_a_share_too_small_for_a_fast_engine_goes_to_a_slow_one() -> None:
    """R = {0: 10, 1: 3}: of six units one is for version 1, and the engine with least KV counts for three."""
    state = midway(limits(num_steps=20, batch_size=4, max_staleness=3), newest=1)
    for number, (rows, pace, busy) in enumerate(((3, 30.0, 3), (3, 10.0, 1), (4, 10.0, 3), (3, 10.0, 3))):
        engine(state, number, rows, held={0}, row_tokens_per_s=pace)
        running(state, number, 0, *range(10 * number, 10 * number + busy), num_tokens=1 + 10 * number)
    state.costs.answer_tokens = 100.0
    repartition(state)
    assert cleared(state) == {1: (0, 1)}


def test_an_engine_whose_speed_is_unknown_counts_as_a_usual_one() -> None:
    state = midway(BOUNDS, newest=1)
    for number, pace in enumerate((0.0, 10.0, 10.0, 10.0)):
        engine(state, number, rows=4, held={0}, row_tokens_per_s=pace)
        running(state, number, 0, number, num_tokens=10 * number)
    state.costs.answer_tokens = 100.0
    repartition(state)
    assert cleared(state).keys() == {0, 1, 2}


@pytest.mark.parametrize(("interval", "flips"), [(1, True), (2, False)])
def test_an_engine_leaves_out_versions_between(interval: int, flips: bool) -> None:
    state = tail(load_interval=interval)
    repartition(state)
    assert bool(cleared(state)) == flips


def test_engines_of_several_slots_clear_the_version_with_least_kv_and_may_exchange_their_requests() -> None:
    state = midway(BOUNDS, newest=2)
    engine(state, 0, rows=4, slots=2, held={0, 1})
    running(state, 0, 0, 0, num_tokens=100)
    running(state, 0, 1, 1, num_tokens=20)
    engine(state, 1, rows=4, slots=2, held={0, 1})
    running(state, 1, 0, 2, num_tokens=100)
    running(state, 1, 1, 3, num_tokens=300)
    repartition(state)
    assert cleared(state) == {0: (1, 2), 1: (0, 2)}
    moves = {(order.source, order.destination, order.version) for order in migrate(state)}
    assert moves == {(0, 1, 1), (1, 0, 0)}


@pytest.mark.parametrize(
    "trigger",
    [
        EngineJoined(3, 4, 1),
        DrainAsked(2),
        EngineLost(2, "killed"),
        Progressed(2, (), kv_share=0.95),
        Published(2, "v2"),
    ],
)
def test_these_facts_have_engines_and_requests_looked_at_again(trigger: Event) -> None:
    state = tail()
    state.publishing, state.next_step = 2, 2
    run = Stations(BOUNDS, state=state)
    run.tell(trigger)
    assert Migrate(RequestId(0, 0, 0), 0, 1, 0, "flip") in run.orders(Migrate)


@pytest.mark.parametrize(
    "fact", [Woken(), Progressed(2, (), 20.0, kv_share=0.5), Progressed(0, ((RequestId(0, 0, 0), 110),))]
)
def test_other_facts_do_so_only_once_a_period_has_passed(fact: Event) -> None:
    run = Stations(BOUNDS, state=tail())
    run.now = 0.9
    run.tell(fact)
    assert run.orders(Migrate) == []
    run.now = 1.0
    run.tell(fact)
    assert len(run.orders(Migrate)) == 1


def test_the_orchestrator_forgets_to_clear_a_slot_for_what_nobody_needs_any_more() -> None:
    """Version 0 was wanted for a request that has found a row on engine 1 meanwhile."""
    state = midway(BOUNDS, newest=1)
    engine(state, 0, rows=2, held={1}, clearing=1, wanted=0)
    running(state, 0, 1, 3)
    engine(state, 1, rows=2, held={0})
    running(state, 1, 0, 0)
    assert versions.load(state) == []
    assert cleared(state) == {}


def test_rows_that_the_trainer_lends_make_no_room_for_a_flip() -> None:
    state = tail()
    state.engines[1].is_colocated = True
    state.colocated[1] = None
    state.touch(state.engines[1])
    repartition(state)
    assert 0 not in cleared(state)


def test_a_full_engine_takes_no_room_from_those_its_requests_may_go_to() -> None:
    state = midway(BOUNDS, newest=2)
    for number, other in ((0, 1), (1, 2)):
        engine(state, number, rows=4, slots=2, held={0, other}, row_tokens_per_s=10.0)
    running(state, 0, 0, 0, num_tokens=100)
    running(state, 0, 1, 1, 2, 3, num_tokens=100)
    state.costs.answer_tokens = 2000.0
    state.engines[0].kv_share, state.engines[1].kv_share = 0.3, 0.5
    repartition(state)
    assert cleared(state) == {0: (0, 2)}
