import pytest

from dora.core.types import GroupId, RequestId
from dora.engine.block_manager import BLOCK_SIZE, hash_seed
from dora.engine.request import Request, SamplingParams, Sequence
from dora.engine.scheduler import RequestStatus, Scheduler, SchedulerOutput

MAX_ROWS, NUM_BLOCKS = 4, 12


def make_scheduler(
    prefill_budget: int = 512, num_blocks: int = NUM_BLOCKS, max_rows: int = MAX_ROWS
) -> Scheduler:
    scheduler = Scheduler(max_rows, num_blocks, prefill_budget)
    for version in range(3):
        scheduler.add_version(version, hash_seed("model", f"weights {version}"))
    return scheduler


def make_request(
    row: int, sibling: int, prompt_ids: tuple[int, ...], version: int, max_tokens: int
) -> Request:
    sampling = SamplingParams(1.0, max_tokens)
    return Request(RequestId(0, row, sibling), GroupId(0, row), prompt_ids, version, 0, sampling)


def running(scheduler: Scheduler, *requests: Request) -> list[Sequence]:
    """Add requests, which all run."""
    for request in requests:
        scheduler.add(request)
        scheduler.schedule()
    return [scheduler.running[request.id] for request in requests]


def crowded(scheduler: Scheduler, *requests: Request) -> list[Sequence]:
    """Run requests, give each but the last one more block, after which none is free."""
    sequences = running(scheduler, *requests)
    for sequence in sequences[:-1]:
        assert scheduler.schedule({sequence: 1}).grown == [sequence]
    return sequences


def prefilled(output: SchedulerOutput) -> list[tuple[int, int]]:
    """Where each prefill starts and stops."""
    return [(prefill.num_cached, len(prefill.token_ids)) for _, prefill in output.prefills]


def test_siblings_share_full_prompt_blocks_and_copy_the_partial_one() -> None:
    scheduler = make_scheduler()
    for sibling in range(3):
        scheduler.add(make_request(0, sibling, (1,) * 40, 0, 5))
    output = scheduler.schedule()
    ((_, prefill),) = output.prefills
    prompt = prefill.block_table
    assert len(prompt) == 3
    assert [sequence.block_table[:2] for sequence in output.started] == [prompt[:2]] * 3
    assert output.copies == [(prompt[2], sequence.block_table[2]) for sequence in output.started]
    assert len({sequence.block_table[2] for sequence in output.started}) == 3


def test_a_prompt_with_the_same_prefix_shares_the_cached_blocks() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request(0, 0, (1,) * 40, 0, 5))
    ((_, first),) = scheduler.schedule().prefills
    scheduler.remove(RequestId(0, 0, 0))
    scheduler.check()
    for row, version in ((1, 0), (2, 1)):
        scheduler.add(make_request(row, 0, (1,) * 35, version, 5))
    (_, same), (_, other) = scheduler.schedule().prefills
    assert (first.num_cached, same.num_cached, other.num_cached) == (0, 2 * BLOCK_SIZE, 0)
    assert same.block_table[:2] == first.block_table[:2]
    assert not {*same.block_table} & {*other.block_table}


def test_a_dropped_version_leaves_no_prompt_in_the_cache() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 0, (1,) * 40, 0, 5)
    for _ in range(2):
        scheduler.add(request)
        assert prefilled(scheduler.schedule()) == [(0, 39)]
        scheduler.remove(request.id)
        scheduler.drop_version(0)
        scheduler.check()
        scheduler.add_version(0, hash_seed("model", "weights 0"))


def test_a_reservation_is_not_given_to_other_requests() -> None:
    scheduler = make_scheduler()
    incoming = make_request(0, 0, (1,) * 40, 0, 5)
    assert scheduler.reserve(incoming) == (0, "")
    assert scheduler.status_of(incoming.id) is RequestStatus.MIGRATING_IN
    assert scheduler.request(incoming.id) is None  # another engine owns it
    assert scheduler.decode_order() == []
    for row in range(1, 5):
        scheduler.add(make_request(row, 0, (1,), 0, 5))
    assert len(scheduler.schedule().started) == MAX_ROWS - 1
    assert scheduler.reserve(make_request(9, 0, (1,), 0, 5)) is None
    scheduler.check()
    scheduler.activate(incoming.id)
    assert len(scheduler.decode_order()) == MAX_ROWS
    sibling = make_request(0, 1, (1,) * 40, 0, 5)
    scheduler.remove(RequestId(0, 1, 0))
    reservation = scheduler.reserve(sibling)
    assert reservation is not None
    assert reservation == (2, scheduler.prompt_block_hashes(sibling)[1])
    scheduler.check()


def test_a_request_gets_blocks_as_its_output_grows_and_not_before() -> None:
    scheduler = make_scheduler()
    request = make_request(0, 0, (1,) * 16, 0, 150)
    (sequence,) = running(scheduler, request)
    for num_blocks in range(1, 11):
        assert len(sequence.block_table) == num_blocks
        output = scheduler.schedule({sequence: 1})
        assert output.grown == [sequence]
        scheduler.check()
    roomy = make_scheduler(num_blocks=100)
    (sequence,) = running(roomy, request)
    assert len(sequence.block_table) == 4  # neighbouring blocks, while many are free
    assert sequence.block_table == list(range(sequence.block_table[0], sequence.block_table[0] + 4))


def test_a_long_prompt_is_prefilled_in_several_steps_while_its_siblings_wait() -> None:
    scheduler = make_scheduler(prefill_budget=20)
    (other,) = running(scheduler, make_request(0, 0, (1,), 0, 5))
    siblings = [make_request(1, sibling, (2,) * 51, 0, 5) for sibling in range(2)]
    for request in siblings:
        scheduler.add(request)
    for start in (0, 20):
        output = scheduler.schedule()
        assert prefilled(output) == [(start, start + 20)]
        assert (output.started, scheduler.decode_order()) == ([], [other])
        assert [scheduler.status_of(s.id) for s in siblings] == [RequestStatus.PREFILL, RequestStatus.WAITING]
        scheduler.check()
    output = scheduler.schedule()
    assert prefilled(output) == [(40, 50)]
    assert [sequence.request for sequence in output.started] == siblings


def test_a_partly_prefilled_prompt_is_continued_by_the_next_sibling() -> None:
    scheduler = make_scheduler(prefill_budget=20)
    running(scheduler, make_request(0, 0, (1,), 0, 5))
    for sibling in range(2):
        scheduler.add(make_request(1, sibling, (2,) * 51, 0, 5))
    scheduler.schedule()
    scheduler.remove(RequestId(0, 1, 0))
    scheduler.check()
    assert prefilled(scheduler.schedule()) == [(20, 40)]
    scheduler.remove(RequestId(0, 1, 1))
    scheduler.check()
    scheduler.add(make_request(2, 0, (2,) * 51, 0, 5))
    assert prefilled(scheduler.schedule())[0][0] == 0, "an unfinished prompt is not in the prefix cache"


def test_several_prefill_budgets_are_spent_while_nothing_decodes() -> None:
    scheduler = make_scheduler(prefill_budget=20)
    scheduler.add(make_request(0, 0, (1,) * 101, 0, 5))
    assert prefilled(scheduler.schedule()) == [(0, 100)]


def test_the_youngest_of_the_version_with_most_rows_is_preempted_and_never_the_oldest() -> None:
    scheduler = make_scheduler(num_blocks=7)
    oldest, old, new, newest = crowded(
        scheduler, *[make_request(row, 0, (1,), version, 40) for row, version in enumerate((1, 0, 1, 1))]
    )
    for full, victim in ((old, newest), (oldest, new)):
        output = scheduler.schedule({full: 1})
        assert (output.swapped_out, output.grown) == ([victim], [full])
        assert scheduler.status_of(victim.request.id) is RequestStatus.SWAPPED
        scheduler.check()


def test_the_row_that_needs_a_block_may_itself_be_preempted() -> None:
    scheduler = make_scheduler(num_blocks=3)
    _, younger = crowded(scheduler, *[make_request(row, 0, (1,), 1 - row, 40) for row in range(2)])
    output = scheduler.schedule({younger: 1})
    assert (output.swapped_out, output.grown) == ([younger], [])
    scheduler.check()


def test_rows_that_decode_only_pauses_are_preempted_first() -> None:
    scheduler = make_scheduler(num_blocks=5)
    first, second, third = crowded(scheduler, *[make_request(row, 0, (1,), row, 40) for row in range(3)])
    scheduler.decode_only([second.request.id, third.request.id])
    assert scheduler.schedule({second: 1}).swapped_out == [first]


def test_a_row_that_migrates_out_keeps_its_blocks() -> None:
    scheduler = make_scheduler(num_blocks=3)
    oldest, leaving = crowded(scheduler, *[make_request(row, 0, (1,), 0, 40) for row in range(2)])
    scheduler.migrating_out.add(leaving.request.id)
    assert scheduler.schedule({oldest: 1}).swapped_out == [oldest]
    assert not scheduler.can_schedule()
    scheduler.remove(leaving.request.id)
    assert scheduler.can_schedule()
    ((back, num_cached),) = scheduler.schedule().swapped_in
    assert (back.request, num_cached, len(back.block_table)) == (oldest.request, 0, 3)


def test_swapped_requests_return_oldest_first_and_before_new_ones() -> None:
    scheduler = make_scheduler(num_blocks=7)
    sequences = crowded(scheduler, *[make_request(row, 0, (1,), 0, 40) for row in range(4)])
    scheduler.add(make_request(9, 0, (1,), 0, 5))
    assert scheduler.schedule(dict.fromkeys(sequences[:2], 1)).swapped_out == [sequences[3], sequences[2]]
    assert scheduler.reserve(make_request(8, 0, (1,), 0, 5)) is None
    scheduler.remove(sequences[0].request.id)
    output = scheduler.schedule()
    assert [s.request for s, _ in output.swapped_in] == [sequences[2].request]
    assert [s.seq_id for s, _ in output.swapped_in] == [sequences[2].seq_id]
    assert output.started == []
    scheduler.remove(sequences[1].request.id)
    output = scheduler.schedule()
    assert [s.request for s, _ in output.swapped_in] == [sequences[3].request]
    assert [s.request.id.row for s in output.started] == [9]
    scheduler.check()


def test_admission_leaves_a_block_for_each_row_that_may_grow() -> None:
    scheduler = make_scheduler(num_blocks=6)
    first, second = running(scheduler, make_request(0, 0, (1,), 0, 40), make_request(1, 0, (1,), 0, 10))
    scheduler.add(make_request(2, 0, (1,) * 40, 0, 8))
    assert not scheduler.can_schedule()  # it needs four of the four left
    scheduler.schedule({first: 1})
    scheduler.schedule({first: 1})
    scheduler.remove(second.request.id)
    assert not scheduler.can_schedule()
    scheduler.remove(first.request.id)
    assert scheduler.can_schedule()


def test_a_swapped_request_shares_the_prompt_of_a_running_sibling_again() -> None:
    scheduler = make_scheduler(num_blocks=9)
    siblings = crowded(scheduler, *[make_request(0, sibling, (1,) * 33, 0, 40) for sibling in range(4)])
    assert scheduler.schedule({siblings[1]: 1}).swapped_out == [siblings[3]]
    for sequence in siblings[1:3]:
        scheduler.remove(sequence.request.id)
    ((back, num_cached),) = scheduler.schedule().swapped_in
    assert num_cached == 2
    assert back.block_table[:2] == siblings[0].block_table[:2]
    scheduler.check()


def test_siblings_share_the_prompt_of_a_request_that_was_swapped_in() -> None:
    scheduler = make_scheduler(num_blocks=7)
    older, request = running(
        scheduler, make_request(0, 0, (1,), 0, 100), make_request(1, 0, (2,) * 33, 0, 20)
    )
    while len(older.block_table) < 7:
        scheduler.schedule({older: 1})
    assert scheduler.status_of(request.request.id) is RequestStatus.SWAPPED
    scheduler.remove(older.request.id)
    scheduler.add(make_request(1, 1, (2,) * 33, 0, 20))
    output = scheduler.schedule()
    assert [(s.request, num_cached) for s, num_cached in output.swapped_in] == [(request.request, 0)]
    assert [s.request.id.sibling for s in output.started] == [1]
    assert output.prefills == []
    scheduler.check()


def test_the_status_follows_a_request() -> None:
    scheduler = make_scheduler()
    (sequence,) = running(scheduler, make_request(0, 0, (1,), 0, 5))
    request = sequence.request
    assert scheduler.status_of(request.id) is RequestStatus.RUNNING
    scheduler.migrating_out.add(request.id)
    assert scheduler.status_of(request.id) is RequestStatus.MIGRATING_OUT
    scheduler.remove(request.id)
    assert scheduler.status_of(request.id) is RequestStatus.ABSENT
    with pytest.raises(AssertionError, match="is unknown"):
        scheduler.remove(request.id)
