import random

from hypothesis import given
from hypothesis import strategies as st

from dora.core.records import GroupId, RequestId
from dora.engine.blocks import BLOCK_SIZE, kv_seed
from dora.engine.scheduler import Scheduler
from dora.engine.sequence import Request, Sampling

MAX_ROWS, NUM_BLOCKS = 4, 12


def made() -> Scheduler:
    scheduler = Scheduler(MAX_ROWS, NUM_BLOCKS)
    for version in range(3):
        scheduler.add_version(version, kv_seed("model", f"weights {version}"))
    return scheduler


def request(row: int, sibling: int, prompt_ids: tuple[int, ...], version: int, max_tokens: int) -> Request:
    sampling = Sampling(1.0, max_tokens)
    return Request(RequestId(0, row, sibling), GroupId(0, row), prompt_ids, version, 0, sampling)


@st.composite
def groups(draw: st.DrawFn) -> list[Request]:
    """Requests of some groups, in submit order; each fits the pool alone."""
    requests = []
    for row in range(draw(st.integers(1, 5))):
        prompt_ids = (row % 2,) * draw(st.integers(1, 50))  # one the beginning of another
        version, max_tokens = draw(st.integers(0, 2)), draw(st.integers(1, 60))
        for sibling in range(draw(st.integers(1, 4))):
            requests.append(request(row, sibling, prompt_ids, version, max_tokens))
    return requests


@given(groups(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_every_request_gets_its_turn_in_order_and_nothing_leaks(
    requests: list[Request], source: random.Random, num_aborts: int
) -> None:
    scheduler = made()
    for asked in requests:
        assert scheduler.can_hold(asked)
        scheduler.submit(asked)
    aborted = source.sample(requests, min(num_aborts, len(requests)))
    for asked in aborted:
        scheduler.remove(asked.id)
    seated: list[RequestId] = []
    while scheduler.waiting or scheduler.running:
        admission = scheduler.admit()
        seated += [sequence.request.id for sequence in admission.sequences]
        scheduler.check()
        rows = scheduler.rows_by_version()
        assert [s.request.version for s in rows] == sorted(s.request.version for s in rows)
        assert {p.key for p in admission.prefills} <= {s.request.prompt_key for s in admission.sequences}
        for sequence in source.sample(rows, source.randint(1, len(rows))):
            scheduler.remove(sequence.request.id)
            scheduler.check()
    assert seated == [asked.id for asked in requests if asked not in aborted]


def test_siblings_share_full_prompt_blocks_and_copy_the_partial_one() -> None:
    scheduler = made()
    for sibling in range(3):
        scheduler.submit(request(0, sibling, (1,) * 40, 0, 5))
    admission = scheduler.admit()
    assert [len(prefill.blocks) for prefill in admission.prefills] == [3]
    prompt = admission.prefills[0].blocks
    assert [sequence.blocks[:2] for sequence in admission.sequences] == [tuple(prompt[:2])] * 3
    assert admission.copies == [(prompt[2], sequence.blocks[2]) for sequence in admission.sequences]
    assert len({sequence.blocks[2] for sequence in admission.sequences}) == 3


def test_a_prompt_that_begins_like_another_finds_its_blocks_by_name() -> None:
    scheduler = made()
    scheduler.submit(request(0, 0, (1,) * 40, 0, 5))
    first = scheduler.admit().prefills[0]
    scheduler.remove(RequestId(0, 0, 0))
    scheduler.check()
    assert scheduler.kv_share == 0
    for row, version in ((1, 0), (2, 1)):
        scheduler.submit(request(row, 0, (1,) * 35, version, 5))
    same, other = scheduler.admit().prefills
    assert (first.num_known, same.num_known, other.num_known) == (0, 2 * BLOCK_SIZE, 0)
    assert same.blocks[:2] == first.blocks[:2]
    assert not {*same.blocks} & {*other.blocks}


def test_a_version_that_is_dropped_leaves_no_prompt_behind() -> None:
    scheduler = made()
    asked = request(0, 0, (1,) * 40, 0, 5)
    for _ in range(2):
        scheduler.submit(asked)
        assert scheduler.admit().prefills[0].num_known == 0
        scheduler.remove(asked.id)
        scheduler.drop_version(0)
        scheduler.check()
        scheduler.add_version(0, kv_seed("model", "weights 0"))


def test_a_reserved_place_belongs_to_nobody_else() -> None:
    scheduler = made()
    arriving = request(0, 0, (1,) * 40, 0, 5)
    assert scheduler.reserve(arriving) == (0, "")
    assert arriving.id in scheduler
    assert scheduler.request(arriving.id) is None  # it belongs to another engine yet
    assert scheduler.rows_by_version() == []
    for row in range(1, 5):
        scheduler.submit(request(row, 0, (1,), 0, 5))
    assert len(scheduler.admit().sequences) == MAX_ROWS - 1
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
