import pytest

from dora.core.records import GroupId, RequestId
from dora.engine.blocks import BLOCK_SIZE, kv_seed
from dora.engine.plan import State
from dora.engine.scheduler import Scheduler
from dora.engine.sequence import Request, Sampling, Sequence

MAX_ROWS, NUM_BLOCKS = 4, 12


def made(prefill_budget: int = 512, num_blocks: int = NUM_BLOCKS, max_rows: int = MAX_ROWS) -> Scheduler:
    scheduler = Scheduler(max_rows, num_blocks, prefill_budget)
    for version in range(3):
        scheduler.add_version(version, kv_seed("model", f"weights {version}"))
    return scheduler


def request(row: int, sibling: int, prompt_ids: tuple[int, ...], version: int, max_tokens: int) -> Request:
    sampling = Sampling(1.0, max_tokens)
    return Request(RequestId(0, row, sibling), GroupId(0, row), prompt_ids, version, 0, sampling)


def running(scheduler: Scheduler, *requests: Request) -> list[Sequence]:
    """Submit, and see that all run."""
    for asked in requests:
        scheduler.submit(asked)
        scheduler.schedule()
    return [scheduler.running[asked.id] for asked in requests]


def crowded(scheduler: Scheduler, *requests: Request) -> list[Sequence]:
    """Let them run in a pool where each but the last takes one more block, and then none is free."""
    sequences = running(scheduler, *requests)
    for sequence in sequences[:-1]:
        assert scheduler.schedule({sequence: 1}).grown == [sequence]
    return sequences


def test_siblings_share_full_prompt_blocks_and_copy_the_partial_one() -> None:
    scheduler = made()
    for sibling in range(3):
        scheduler.submit(request(0, sibling, (1,) * 40, 0, 5))
    plan = scheduler.schedule()
    assert [len(prefill.blocks) for prefill in plan.prefills] == [3]
    prompt = plan.prefills[0].blocks
    assert [sequence.blocks[:2] for sequence in plan.started] == [prompt[:2]] * 3
    assert plan.copies == [(prompt[2], sequence.blocks[2]) for sequence in plan.started]
    assert len({sequence.blocks[2] for sequence in plan.started}) == 3


def test_a_prompt_that_begins_like_another_finds_its_blocks_by_name() -> None:
    scheduler = made()
    scheduler.submit(request(0, 0, (1,) * 40, 0, 5))
    first = scheduler.schedule().prefills[0]
    scheduler.remove(RequestId(0, 0, 0))
    scheduler.check()
    for row, version in ((1, 0), (2, 1)):
        scheduler.submit(request(row, 0, (1,) * 35, version, 5))
    same, other = scheduler.schedule().prefills
    assert (first.start, same.start, other.start) == (0, 2 * BLOCK_SIZE, 0)
    assert same.blocks[:2] == first.blocks[:2]
    assert not {*same.blocks} & {*other.blocks}


def test_a_version_that_is_dropped_leaves_no_prompt_behind() -> None:
    scheduler = made()
    asked = request(0, 0, (1,) * 40, 0, 5)
    for _ in range(2):
        scheduler.submit(asked)
        assert scheduler.schedule().prefills[0].start == 0
        scheduler.remove(asked.id)
        scheduler.drop_version(0)
        scheduler.check()
        scheduler.add_version(0, kv_seed("model", "weights 0"))


def test_a_reserved_place_belongs_to_nobody_else() -> None:
    scheduler = made()
    arriving = request(0, 0, (1,) * 40, 0, 5)
    assert scheduler.reserve(arriving) == (0, "")
    assert scheduler.state_of(arriving.id) is State.MIGRATING_IN
    assert scheduler.request(arriving.id) is None  # it belongs to another engine yet
    assert scheduler.rows_by_version() == []
    for row in range(1, 5):
        scheduler.submit(request(row, 0, (1,), 0, 5))
    assert len(scheduler.schedule().started) == MAX_ROWS - 1
    assert scheduler.reserve(request(9, 0, (1,), 0, 5)) is None
    scheduler.check()
    scheduler.settle(arriving.id)
    assert len(scheduler.rows_by_version()) == MAX_ROWS
    sibling = request(0, 1, (1,) * 40, 0, 5)
    scheduler.remove(RequestId(0, 1, 0))
    place = scheduler.reserve(sibling)
    assert place is not None
    assert place == (2, scheduler.prompt_hashes(sibling)[1])
    scheduler.check()


def test_a_request_takes_blocks_as_its_answer_grows_and_not_before() -> None:
    scheduler = made()
    asked = request(0, 0, (1,) * 16, 0, 150)
    (sequence,) = running(scheduler, asked)
    for num_blocks in range(1, 11):
        assert len(sequence.blocks) == num_blocks
        plan = scheduler.schedule({sequence: 1})
        assert plan.grown == [sequence]
        scheduler.check()
    roomy = made(num_blocks=100)
    (sequence,) = running(roomy, asked)
    assert len(sequence.blocks) == 4  # neighbours, while many are free
    assert sequence.blocks == list(range(sequence.blocks[0], sequence.blocks[0] + 4))


def test_a_long_prompt_is_computed_over_several_steps_and_its_siblings_wait_for_it() -> None:
    scheduler = made(prefill_budget=20)
    (other,) = running(scheduler, request(0, 0, (1,), 0, 5))
    siblings = [request(1, sibling, (2,) * 51, 0, 5) for sibling in range(2)]
    for asked in siblings:
        scheduler.submit(asked)
    for start in (0, 20):
        plan = scheduler.schedule()
        assert [(p.start, p.stop) for p in plan.prefills] == [(start, start + 20)]
        assert (plan.started, scheduler.rows_by_version()) == ([], [other])
        assert [scheduler.state_of(s.id) for s in siblings] == [State.PREFILL, State.WAITING]
        scheduler.check()
    plan = scheduler.schedule()
    assert [(p.start, p.stop) for p in plan.prefills] == [(40, 50)]
    assert [sequence.request for sequence in plan.started] == siblings


def test_what_was_computed_of_a_prompt_stays_for_the_next_sibling() -> None:
    scheduler = made(prefill_budget=20)
    running(scheduler, request(0, 0, (1,), 0, 5))
    for sibling in range(2):
        scheduler.submit(request(1, sibling, (2,) * 51, 0, 5))
    scheduler.schedule()
    scheduler.remove(RequestId(0, 1, 0))
    scheduler.check()
    assert [(p.start, p.stop) for p in scheduler.schedule().prefills] == [(20, 40)]
    scheduler.remove(RequestId(0, 1, 1))
    scheduler.check()
    scheduler.submit(request(2, 0, (2,) * 51, 0, 5))
    assert scheduler.schedule().prefills[0].start == 0, "an unfinished prompt is not found by name"


def test_nothing_decodes_so_several_budgets_are_spent() -> None:
    scheduler = made(prefill_budget=20)
    scheduler.submit(request(0, 0, (1,) * 101, 0, 5))
    assert [(p.start, p.stop) for p in scheduler.schedule().prefills] == [(0, 100)]


def test_the_youngest_of_the_version_with_most_rows_gives_way_and_the_oldest_row_never() -> None:
    scheduler = made(num_blocks=7)
    oldest, old, new, newest = crowded(
        scheduler, *[request(row, 0, (1,), version, 40) for row, version in enumerate((1, 0, 1, 1))]
    )
    for full, victim in ((old, newest), (oldest, new)):
        plan = scheduler.schedule({full: 1})
        assert (plan.swapped_out, plan.grown) == ([victim], [full])
        assert scheduler.state_of(victim.request.id) is State.SWAPPED
        scheduler.check()


def test_the_row_that_lacks_a_block_may_be_the_one_to_give_way() -> None:
    scheduler = made(num_blocks=3)
    _, younger = crowded(scheduler, *[request(row, 0, (1,), 1 - row, 40) for row in range(2)])
    plan = scheduler.schedule({younger: 1})
    assert (plan.swapped_out, plan.grown) == ([younger], [])
    scheduler.check()


def test_rows_that_stand_still_for_a_rush_give_way_first() -> None:
    scheduler = made(num_blocks=5)
    first, second, third = crowded(scheduler, *[request(row, 0, (1,), row, 40) for row in range(3)])
    scheduler.rush([second.request.id, third.request.id])
    assert scheduler.schedule({second: 1}).swapped_out == [first]


def test_a_row_on_its_way_out_keeps_its_blocks() -> None:
    scheduler = made(num_blocks=3)
    oldest, leaving = crowded(scheduler, *[request(row, 0, (1,), 0, 40) for row in range(2)])
    scheduler.frozen.add(leaving.request.id)
    assert scheduler.schedule({oldest: 1}).swapped_out == [oldest]
    assert not scheduler.can_schedule()
    scheduler.remove(leaving.request.id)
    assert scheduler.can_schedule()
    ((back, num_known),) = scheduler.schedule().swapped_in
    assert (back.request, num_known, len(back.blocks)) == (oldest.request, 0, 3)


def test_what_was_swapped_out_comes_back_oldest_first_and_before_anything_new() -> None:
    scheduler = made(num_blocks=7)
    sequences = crowded(scheduler, *[request(row, 0, (1,), 0, 40) for row in range(4)])
    scheduler.submit(request(9, 0, (1,), 0, 5))
    assert scheduler.schedule(dict.fromkeys(sequences[:2], 1)).swapped_out == [sequences[3], sequences[2]]
    assert scheduler.reserve(request(8, 0, (1,), 0, 5)) is None
    scheduler.remove(sequences[0].request.id)
    plan = scheduler.schedule()
    assert [s.request for s, _ in plan.swapped_in] == [sequences[2].request]
    assert [s.number for s, _ in plan.swapped_in] == [sequences[2].number]
    assert plan.started == []
    scheduler.remove(sequences[1].request.id)
    plan = scheduler.schedule()
    assert [s.request for s, _ in plan.swapped_in] == [sequences[3].request]
    assert [s.request.id.row for s in plan.started] == [9]
    scheduler.check()


def test_a_newcomer_leaves_a_block_to_each_row_that_may_need_one() -> None:
    scheduler = made(num_blocks=6)
    first, second = running(scheduler, request(0, 0, (1,), 0, 40), request(1, 0, (1,), 0, 10))
    scheduler.submit(request(2, 0, (1,) * 40, 0, 8))
    assert not scheduler.can_schedule()  # it needs four of the four left
    scheduler.schedule({first: 1})
    scheduler.schedule({first: 1})
    scheduler.remove(second.request.id)
    assert not scheduler.can_schedule()
    scheduler.remove(first.request.id)
    assert scheduler.can_schedule()


def test_a_request_that_comes_back_finds_its_prompt_where_a_sibling_has_it() -> None:
    scheduler = made(num_blocks=9)
    siblings = crowded(scheduler, *[request(0, sibling, (1,) * 33, 0, 40) for sibling in range(4)])
    assert scheduler.schedule({siblings[1]: 1}).swapped_out == [siblings[3]]
    for sequence in siblings[1:3]:
        scheduler.remove(sequence.request.id)
    ((back, num_known),) = scheduler.schedule().swapped_in
    assert num_known == 2
    assert back.blocks[:2] == siblings[0].blocks[:2]
    scheduler.check()


def test_siblings_find_the_prompt_of_one_that_came_back() -> None:
    scheduler = made(num_blocks=7)
    older, asked = running(scheduler, request(0, 0, (1,), 0, 100), request(1, 0, (2,) * 33, 0, 20))
    while len(older.blocks) < 7:
        scheduler.schedule({older: 1})
    assert scheduler.state_of(asked.request.id) is State.SWAPPED
    scheduler.remove(older.request.id)
    scheduler.submit(request(1, 1, (2,) * 33, 0, 20))
    plan = scheduler.schedule()
    assert [(s.request, num_known) for s, num_known in plan.swapped_in] == [(asked.request, 0)]
    assert [s.request.id.sibling for s in plan.started] == [1]
    assert plan.prefills == []
    scheduler.check()


def test_states_name_where_a_request_is() -> None:
    scheduler = made()
    (sequence,) = running(scheduler, request(0, 0, (1,), 0, 5))
    asked = sequence.request
    assert scheduler.state_of(asked.id) is State.RUNNING
    scheduler.frozen.add(asked.id)
    assert scheduler.state_of(asked.id) is State.MIGRATING_OUT
    scheduler.remove(asked.id)
    assert scheduler.state_of(asked.id) is State.DONE
    with pytest.raises(AssertionError, match="is not here"):
        scheduler.remove(asked.id)
