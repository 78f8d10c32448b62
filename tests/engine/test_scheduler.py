import random

from hypothesis import given
from hypothesis import strategies as st

from dora.core.records import GroupId, RequestId
from dora.engine.scheduler import Scheduler
from dora.engine.sequence import Request, Sampling

MAX_ROWS, NUM_BLOCKS = 4, 12


@st.composite
def groups(draw: st.DrawFn) -> list[Request]:
    """Requests of some groups, in submit order; each fits the pool alone."""
    requests = []
    for row in range(draw(st.integers(1, 5))):
        prompt_ids = (row,) * draw(st.integers(1, 50))
        version, max_tokens = draw(st.integers(0, 2)), draw(st.integers(1, 60))
        for sibling in range(draw(st.integers(1, 4))):
            request_id = RequestId(0, row, sibling)
            sampling = Sampling(1.0, max_tokens)
            requests.append(Request(request_id, GroupId(0, row), prompt_ids, version, 0, sampling))
    return requests


@given(groups(), st.randoms(use_true_random=False), st.integers(0, 3))
def test_every_request_gets_its_turn_in_order_and_nothing_leaks(
    requests: list[Request], source: random.Random, num_aborts: int
) -> None:
    scheduler = Scheduler(MAX_ROWS, NUM_BLOCKS)
    for request in requests:
        assert scheduler.can_hold(request)
        scheduler.submit(request)
    aborted = source.sample(requests, min(num_aborts, len(requests)))
    for request in aborted:
        scheduler.remove(request.id)
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
    assert seated == [request.id for request in requests if request not in aborted]


def test_siblings_share_full_prompt_blocks_and_copy_the_partial_one() -> None:
    scheduler = Scheduler(MAX_ROWS, NUM_BLOCKS)
    for sibling in range(3):
        request_id = RequestId(0, 0, sibling)
        scheduler.submit(Request(request_id, GroupId(0, 0), (1,) * 40, 0, 0, Sampling(1.0, 5)))
    admission = scheduler.admit()
    assert [len(prefill.blocks) for prefill in admission.prefills] == [3]
    prompt = admission.prefills[0].blocks
    assert [sequence.blocks[:2] for sequence in admission.sequences] == [tuple(prompt[:2])] * 3
    assert admission.copies == [(prompt[2], sequence.blocks[2]) for sequence in admission.sequences]
    assert len({sequence.blocks[2] for sequence in admission.sequences}) == 3
