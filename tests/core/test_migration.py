"""Which running requests move where, because they must or because it gains more than it costs."""

from __future__ import annotations

from typing import Any

import pytest
from tests.core.midway import engine, midway, running, waiting
from tests.core.stations import Stations, limits

from dora.core.actions import Generate, Migrate
from dora.core.events import Migrated, Progressed, Woken
from dora.core.migration import migrate
from dora.core.placement import repartition
from dora.core.records import GroupId, RequestId
from dora.core.state import State


def request(row: int, sibling: int = 0) -> RequestId:
    return RequestId(0, row, sibling)


def scene(newest: int = 0, **changes: Any) -> State:
    """A run whose answers have 100 tokens in the mean."""
    state = midway(limits(**({"num_steps": 20, "batch_size": 16, "max_staleness": 2} | changes)), newest)
    state.costs.answer_tokens = 100.0
    return state


def leaving(**changes: Any) -> State:
    """Engine 0 is to be emptied; 1 has one row free, 2 has three, both with its version."""
    state = scene(**changes)
    engine(state, 0, rows=4, held={0}, is_leaving=True)
    engine(state, 1, rows=2, held={0})
    engine(state, 2, rows=4, held={0})
    running(state, 1, 0, 1)
    running(state, 2, 0, 2)
    return state


def moves(state: State) -> list[tuple[int, int, int, str]]:
    """(row, source, destination, reason) of the moves that are due."""
    return [(m.request.row, m.source, m.destination, m.reason) for m in migrate(state)]


def foretell(state: State, row: int, num_tokens: int) -> None:
    """The first sibling of the group has finished, with so many tokens."""
    group = state.groups[GroupId(0, row)]
    group.finished_tokens = group.longest_tokens = num_tokens


def test_a_short_request_moves_to_where_it_fits_best() -> None:
    state = leaving()
    running(state, 0, 0, 7, num_tokens=60)
    assert moves(state) == [(7, 0, 1, "leave")]


def test_a_long_request_moves_to_where_most_rows_are_free() -> None:
    state = leaving(group_size=2)
    running(state, 0, 0, 7, num_tokens=60, siblings=[1])
    foretell(state, 7, 1_000)
    assert moves(state) == [(7, 0, 2, "leave")]


def test_long_requests_are_spread() -> None:
    state = scene(group_size=2)
    engine(state, 0, rows=8, held={0}, is_leaving=True)
    engine(state, 1, rows=4, held={0})
    engine(state, 2, rows=4, held={0})
    for row in (5, 6, 7, 8):
        running(state, 0, 0, row, num_tokens=60, siblings=[1])
        foretell(state, row, 1_000)
    assert sorted(destination for _, _, destination, _ in moves(state)) == [1, 1, 2, 2]


def test_a_short_request_goes_to_where_those_before_it_have_left_the_best_fit() -> None:
    """The long one takes a row of one of two equal engines, which then has fewer left."""
    state = scene(group_size=2)
    engine(state, 0, rows=8, held={0}, is_leaving=True)
    engine(state, 1, rows=3, held={0})
    engine(state, 2, rows=3, held={0})
    for row, length in ((5, 1_000), (6, 100)):
        running(state, 0, 0, row, num_tokens=60, siblings=[1])
        foretell(state, row, length)
    assert len({destination for _, _, destination, _ in moves(state)}) == 1


def test_no_more_requests_move_than_there_are_rows() -> None:
    state = leaving()
    running(state, 0, 0, 5, 6, 7, 8, num_tokens=9)
    waiting(state, 0, 9)
    assert moves(state) == [(5, 0, 1, "leave"), (6, 0, 2, "leave"), (7, 0, 2, "leave"), (8, 0, 2, "leave")]
    assert state.engines[1].free_rows == state.engines[2].free_rows == 0


def test_an_engine_short_of_kv_takes_no_request() -> None:
    state = leaving(kv_watermark=0.8)
    running(state, 0, 0, 7, num_tokens=60)
    state.engines[1].kv_share = 0.8
    assert moves(state) == [(7, 0, 2, "leave")]


def test_an_engine_on_the_device_of_the_trainer_takes_no_running_request() -> None:
    state = leaving()
    running(state, 0, 0, 7, num_tokens=60)
    state.engines[1].is_colocated = True
    assert moves(state) == [(7, 0, 2, "leave")]


def test_an_engine_that_clears_the_version_takes_no_running_request() -> None:
    state = leaving()
    running(state, 0, 0, 7, num_tokens=60)
    state.engines[1].clearing, state.engines[1].wanted = 0, 1
    assert (7, 0, 2, "leave") in moves(state)


def test_a_request_is_never_in_two_moves() -> None:
    state = leaving()
    running(state, 0, 0, 7, num_tokens=60)
    assert len(moves(state)) == 1
    assert moves(state) == []


def test_requests_stay_where_they_are_if_that_is_wished() -> None:
    state = leaving(is_static=True)
    running(state, 0, 0, 7)
    assert moves(state) == []


def test_the_request_with_most_kv_leaves_an_engine_short_of_it_one_at_a_time() -> None:
    state = scene()
    engine(state, 0, rows=4, held={0})
    engine(state, 1, rows=4, held={0})
    for row, num_tokens in ((5, 60), (6, 90), (7, 30)):
        running(state, 0, 0, row, num_tokens=num_tokens)
    run = Stations(state.limits, state=state)
    assert Migrate(request(6), 0, 1, 0, "kv") in run.tell(Progressed(0, (), 10.0, kv_share=0.91))
    assert run.tell(Progressed(0, (), 10.0, kv_share=0.93)) == [], "the next only after a while"
    run.now = 1.0
    assert run.tell(Woken()) == [Migrate(request(5), 0, 1, 0, "kv")]
    run.now = 2.0
    assert run.tell(Progressed(0, (), 10.0, kv_share=0.89)) == []


def tails(stop_s: float, **changes: Any) -> State:
    """Engine 0 decodes one request of version 0 beside five of version 1; engine 1 decodes three of 0."""
    state = scene(newest=1, **changes)
    engine(state, 0, rows=8, slots=2, held={0, 1}, row_tokens_per_s=10.0)
    engine(state, 1, rows=4, slots=2, held={0, 1}, row_tokens_per_s=10.0)
    running(state, 0, 0, 0, num_tokens=50)
    running(state, 0, 1, 5, 6, 7, 8, 9)
    running(state, 1, 0, 1, 2, 3, num_tokens=50)
    state.costs.moved_bytes, state.costs.moved_tokens = 1000, 1
    state.costs.copy_bytes_per_s, state.costs.stop_s = 1e6, stop_s
    return state


@pytest.mark.parametrize(("stop_s", "is_worth_it"), [(2.9, True), (3.0, False)])
def test_the_tail_of_a_version_is_gathered_where_that_gains_more_than_it_costs(
    stop_s: float, is_worth_it: bool
) -> None:
    """Gain: five rows are each 12 % faster for 50 more tokens, 30. Cost: 10 tokens/s of one row, while
    50 tokens of 1 kB move at 1 MB/s (0.05 s) and while it stands still."""
    state = tails(stop_s)
    repartition(state)
    assert moves(state) == ([(0, 0, 1, "gather")] if is_worth_it else [])


def test_a_tail_stays_where_no_engine_has_rows_for_all_of_it() -> None:
    state = tails(0.0)
    running(state, 0, 0, 10, num_tokens=50)
    assert moves(state) == []


def test_a_tail_stays_on_an_engine_that_decodes_nothing_else() -> None:
    state = scene(newest=1)
    for number in (0, 1):
        engine(state, number, rows=4, slots=2, held={0, 1})
    running(state, 0, 0, 0)
    running(state, 1, 0, 1, 2)
    assert moves(state) == []


def test_the_newest_version_is_not_gathered() -> None:
    """It is what engines are filled with."""
    state = scene(newest=1)
    engine(state, 0, rows=8, slots=2, held={0, 1})
    engine(state, 1, rows=8, slots=2, held={0, 1})
    running(state, 0, 1, 5)
    running(state, 0, 0, 1, 2, 3)
    running(state, 1, 1, 6, 7, 8)
    assert moves(state) == []


@pytest.mark.parametrize("level_running", [True, False])
def test_running_requests_are_evened_out_only_if_wished_the_cheapest_first(level_running: bool) -> None:
    state = scene(level_running=level_running)
    engine(state, 0, rows=6, held={0})
    engine(state, 1, rows=6, held={0})
    for row, num_tokens in ((1, 90), (2, 20), (3, 50), (4, 30), (5, 70)):
        running(state, 0, 0, row, num_tokens=num_tokens)
    running(state, 1, 0, 9)
    expected = [(2, 0, 1, "level"), (4, 0, 1, "level")]
    assert moves(state) == (expected if level_running else [])


def test_a_difference_of_one_is_level() -> None:
    state = scene(level_running=True)
    engine(state, 0, rows=6, held={0})
    engine(state, 1, rows=6, held={0})
    running(state, 0, 0, 1, 2)
    running(state, 1, 0, 3)
    assert moves(state) == []


def test_a_moved_request_keeps_its_tokens_and_its_version() -> None:
    state = leaving()
    running(state, 0, 0, 7, num_tokens=60)
    run = Stations(state.limits, state=state)
    run.now = 1.0
    run.tell(Woken())
    run.tell(Progressed(0, ((request(7), 70),)))
    run.tell(Migrated(request(7), 0, 1, 75, 75_000, 0.1, 0.02))
    moved = run.state.requests[request(7)]
    assert (moved.engine, moved.version, moved.num_tokens) == (1, 0, 75)
    assert run.state.engines[1].kv_tokens[0] == 75
    assert run.state.engines[0].kv_tokens[0] == 0
    assert run.state.num_regenerated_tokens == 0
    assert run.orders(Generate) == []
    assert run.state.costs.kv_bytes_per_token == 1_000


def test_a_row_is_kept_at_both_ends_until_the_move_is_told() -> None:
    state = leaving()
    running(state, 0, 0, 7)
    run = Stations(state.limits, state=state)
    run.now = 1.0
    run.tell(Woken())
    assert (state.engines[0].free_rows, state.engines[1].free_rows) == (3, 0)
    run.tell(Migrated(request(7), 0, 1, 0, 0, 0.0, 0.0))
    assert (state.engines[0].free_rows, state.engines[1].free_rows) == (4, 0)


def test_what_is_on_its_way_already_is_not_evened_out_again() -> None:
    state = scene(level_running=True)
    engine(state, 0, rows=6, held={0})
    engine(state, 1, rows=6, held={0})
    running(state, 0, 0, 1, 2, 3, 4, 5, 6)
    assert len(moves(state)) == 3
    assert moves(state) == []


@pytest.mark.parametrize("is_other_colocated", [True, False])
def test_a_lent_engine_receives_nothing_but_where_all_share_the_device(is_other_colocated: bool) -> None:
    state = scene()
    engine(state, 0, rows=4, held={0}, is_colocated=is_other_colocated, is_leaving=True)
    engine(state, 1, rows=4, held={0}, is_colocated=True)
    running(state, 0, 0, 7)
    assert moves(state) == ([(7, 0, 1, "leave")] if is_other_colocated else [])
