"""Whatever goes wrong at whichever step of a move: one owner, no leaked block, no other token."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from tests.engine.moving import LEASE_S, Stage
from tests.engine.tiny import TINY, engine, request, run, tokens, weights

from dora.core.records import RequestId
from dora.engine.sequence import Request
from dora.handover import transfer
from dora.handover.files import Handover, Snapshot
from dora.handover.moves import Kept, NotReceived, Received, Sent
from dora.model.weights import initial_weights

ASKED, NEIGHBOUR, HOST = (request(i, prompt_length=20 + i, max_tokens=30, group_size=1) for i in range(3))
EXPECTED = tokens(run(engine(), [ASKED, NEIGHBOUR, HOST]))
STEPS = ("reserve", "send", "publish", "copy", "offer", "take", "let go")


def advance(stage: Stage, num_steps: int) -> int:
    """Begin the move of ASKED from a to b and take it `num_steps` of STEPS far; its number."""
    stage.engine("a").submit([ASKED, NEIGHBOUR])
    stage.engine("b").submit([HOST])
    stage.step("a", 16)
    stage.step("b", 3)
    place = stage.reserve(ASKED, "a", "b")
    if num_steps > 1:
        assert stage.send(ASKED, "a", place) is None
    for name in "ababa"[: max(0, num_steps - 2)]:
        stage.poll(name)
    reached = {5: "offered", 6: "taken", 7: "taken"}.get(num_steps)
    assert [e for e in ("offered", "taken", "kept") if stage.file(place.move, e).exists()] == [
        *filter(None, [reached])
    ]
    return place.move


def check_end(stage: Stage, move: int, is_here: bool = True) -> None:
    """All engines run to their end: they agree about the move, and answer what they should."""
    answers = tokens(stage.run())
    is_taken = stage.file(move, "taken").exists()
    died = {name for name in "ab" if name not in stage.engines}
    expected = {asked.id for asked in ([ASKED] if is_here else [])}
    expected |= {asked.id for asked, name in ((NEIGHBOUR, "a"), (HOST, "b")) if name not in died}
    assert answers == {request_id: EXPECTED[request_id] for request_id in expected}
    words = [stage.word_of(name, move) for name in "ab" if name not in died]
    kinds = {type(word) for word in words if word is not None}
    assert kinds <= ({Sent, Received} if is_taken else {Kept, NotReceived})


def was_sent(num_steps: int) -> bool:
    return num_steps > STEPS.index("send")


def is_taken(num_steps: int) -> bool:
    return num_steps > STEPS.index("take")


@pytest.mark.parametrize("first", "ab")
@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_a_cancelled_move_leaves_one_owner(stage: Stage, num_steps: int, first: str) -> None:
    move = advance(stage, num_steps)
    for name in (first, "ab".replace(first, "")):
        stage.engines[name].cancel_move(move)
        stage.poll(name)
    check_end(stage, move)
    expected = (Sent, Received) if is_taken(num_steps) else (Kept, NotReceived)
    found = [type(stage.word_of(name, move)) for name in "ab"]
    assert found == [expected[0] if was_sent(num_steps) else type(None), expected[1]]


@pytest.mark.parametrize("first", "ab")
@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_a_lease_that_ends_leaves_one_owner(stage: Stage, num_steps: int, first: str) -> None:
    move = advance(stage, num_steps)
    for _ in range(2):  # the first look may find what was copied last, and renew the lease
        stage.now_s += LEASE_S + 1
        for name in (first, "ab".replace(first, "")):
            stage.poll(name)
    assert all(made.num_moves == 0 for made in stage.engines.values())
    check_end(stage, move)


@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_an_abort_ends_the_request_once_wherever_it_is(stage: Stage, num_steps: int) -> None:
    move = advance(stage, num_steps)
    thrown_away = stage.engines["a"].abort([ASKED.id])
    assert thrown_away == ({} if is_taken(num_steps) else {ASKED.id: 16})
    if was_sent(num_steps) and not is_taken(num_steps):
        stage.poll("a")
        assert stage.word_of("a", move) == Kept(move, "it was aborted")
    check_end(stage, move, is_here=is_taken(num_steps))


@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_a_source_that_dies_takes_only_what_is_its_own(stage: Stage, num_steps: int) -> None:
    move = advance(stage, num_steps)
    del stage.engines["a"]
    stage.pool("a").unlink()
    is_offered = num_steps > STEPS.index("offer")
    check_end(stage, move, is_here=is_offered)
    assert stage.file(move, "taken").exists() == is_offered


@pytest.mark.parametrize("num_steps", range(1, len(STEPS) + 1))
def test_a_destination_that_dies_takes_only_what_is_its_own(stage: Stage, num_steps: int) -> None:
    move = advance(stage, num_steps)
    del stage.engines["b"]
    check_end(stage, move, is_here=not is_taken(num_steps))


def test_a_source_does_not_wait_for_a_destination_that_stands_still(stage: Stage) -> None:
    move = advance(stage, STEPS.index("offer") + 1)
    stage.now_s += LEASE_S + 1
    stage.poll("a")
    assert stage.word_of("a", move) == Kept(move, "its lease is over")
    stage.now_s -= LEASE_S + 1  # a destination whose clock were behind could not take it either
    stage.poll("b")
    assert stage.word_of("b", move) is None
    check_end(stage, move)


@pytest.mark.parametrize("first", ["take", "keep"])
def test_the_first_rename_decides(stage: Stage, first: str) -> None:
    files = Handover(stage.folder, advance(stage, STEPS.index("offer") + 1))
    both = {"take": files.take, "keep": files.keep}
    assert both[first]()
    assert not any(late() for late in both.values())
    assert files.is_taken == (first == "take")


def refused(stage: Stage, move: int) -> str:
    """The destination must refuse; the request goes on at its source as if nothing had been. The reason."""
    stage.poll("b")
    word = stage.word_of("b", move)
    assert isinstance(word, NotReceived), word
    assert not stage.file(move, "taken").exists()
    stage.engines["a"].cancel_move(move)
    check_end(stage, move)
    return word.reason


def flip(path_bytes: bytearray | memoryview, at: int) -> None:
    path_bytes[at] ^= 0x10


@pytest.mark.parametrize("at", [0, 16, 200, -1])
def test_a_damaged_snapshot_is_refused(stage: Stage, at: int) -> None:
    move = advance(stage, STEPS.index("offer") + 1)
    offered = stage.file(move, "offered")
    content = bytearray(offered.read_bytes())
    flip(content, at)
    offered.write_bytes(content)
    assert "checksum" in refused(stage, move)


@pytest.mark.parametrize("num_bytes", [0, 10, 16, 300])
def test_a_truncated_snapshot_is_refused(stage: Stage, num_bytes: int) -> None:
    move = advance(stage, STEPS.index("offer") + 1)
    offered = stage.file(move, "offered")
    offered.write_bytes(offered.read_bytes()[:num_bytes])
    assert "checksum" in refused(stage, move)


@pytest.mark.parametrize("num_steps", [STEPS.index("publish") + 1, STEPS.index("offer") + 1])
def test_a_block_that_arrives_damaged_is_refused(stage: Stage, num_steps: int) -> None:
    """In the first case the first block is read damaged, in the second the one the request ends in."""
    move = advance(stage, num_steps)
    pool = np.memmap(stage.pool("a"), np.uint8, "r+")
    healthy = pool.copy()
    pool ^= 1
    stage.poll("b")
    pool[:] = healthy
    if num_steps == STEPS.index("publish") + 1:
        stage.poll("a")
        stage.poll("b")
    word = stage.word_of("b", move)
    assert isinstance(word, NotReceived)
    assert "KV blocks arrived damaged" in word.reason
    stage.engines["a"].cancel_move(move)
    check_end(stage, move)


def as_number(snapshot: Snapshot, **changes: object) -> Snapshot:
    return snapshot._replace(format=snapshot.format._replace(**changes))  # type: ignore[arg-type]


FORGERIES: dict[str, Callable[[Snapshot], Snapshot]] = {
    "its number is 0": lambda s: as_number(s, number=0),
    "its model_digest is x": lambda s: as_number(s, model_digest="x"),
    "its weight_digest is x": lambda s: as_number(s, weight_digest="x"),
    "its dtype is bfloat16": lambda s: as_number(s, dtype="bfloat16"),
    "its block_shape is": lambda s: as_number(s, block_shape=(2, 2, 32, 2, 4)),
    "another request": lambda s: s._replace(request=replace(s.request, seed=1)),
    "another request ": lambda s: s._replace(request=replace(s.request, version=1)),
    "contradicts itself": lambda s: s._replace(num_computed=s.num_computed - 1),
    "contradicts itself ": lambda s: s._replace(blocks=s.blocks[:-1], sums=s.sums[:-1]),
    "contradicts itself  ": lambda s: s._replace(draft=s.draft._replace(logprobs=s.draft.logprobs[:-1])),
    "contradicts itself   ": lambda s: s._replace(draft=s.draft._replace(chunks=())),
    "contradicts itself    ": lambda s: s._replace(draft=s.draft._replace(logprobs=s.draft.logprobs[:, :2])),
    "not in the source's pool": lambda s: s._replace(blocks=s.blocks + 10_000),
    "KV blocks arrived damaged": lambda s: s._replace(sums=s.sums + np.uint64(1)),
}


@pytest.mark.parametrize("reason", FORGERIES)
def test_a_snapshot_that_does_not_fit_is_refused(stage: Stage, reason: str) -> None:
    move = advance(stage, STEPS.index("offer") + 1)
    files = Handover(stage.folder, move)
    snapshot = files.offered()
    assert snapshot is not None
    files.offer(FORGERIES[reason](snapshot))
    assert reason.strip() in refused(stage, move)


def begin_with(stage: Stage, asked: Request) -> int:
    stage.engine("a").submit([asked])
    stage.step("a", 16)
    move = stage.begin(asked, "a", "b")
    for name in "aba":
        stage.poll(name)
    return move


def finishes_at_its_source(stage: Stage, move: int, asked: Request) -> str:
    stage.poll("b")
    word = stage.word_of("b", move)
    assert isinstance(word, NotReceived)
    stage.engines["a"].cancel_move(move)
    assert tokens(stage.run()) == {asked.id: EXPECTED[asked.id]}
    return word.reason


def test_the_same_version_of_other_weights_is_refused(stage: Stage) -> None:
    stage.engine("b", versions=()).load(0, weights(5))
    assert "its weight_digest is" in finishes_at_its_source(stage, begin_with(stage, ASKED), ASKED)


@pytest.mark.parametrize("change", [{"rope_theta": 20_000.0}, {"head_dim": 16}])
def test_another_model_is_refused(stage: Stage, change: dict[str, float]) -> None:
    config = replace(TINY, **change)  # type: ignore[arg-type]
    made = stage.engine("b", versions=(), config=config)
    made.load(0, initial_weights(config, seed=0))
    assert "its model_digest is" in finishes_at_its_source(stage, begin_with(stage, ASKED), ASKED)


def test_blocks_known_by_another_name_are_refused_by_the_source(stage: Stage) -> None:
    """Both engines hold the prompt and call the version the same, but their weights differ."""
    sibling = replace(ASKED, id=RequestId(0, 0, 1))
    stage.engine("a").submit([ASKED])
    stage.engine("b", versions=()).load(0, weights(5))
    stage.engines["b"].submit([sibling])
    for name in "ab":
        stage.step(name, 2)
    place = stage.reserve(ASKED, "a", "b")
    assert place.num_known_blocks == 1
    word = stage.send(ASKED, "a", place)
    assert word == Kept(place.move, "the destination knows another prompt, or other weights")
    stage.engines["b"].cancel_move(place.move)
    stage.engines["b"].abort([sibling.id])
    assert tokens(stage.run()) == {ASKED.id: EXPECTED[ASKED.id]}


def test_a_long_copy_takes_many_leases_as_long_as_it_goes_on(
    stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One block a poll, and less than a lease from poll to poll."""
    monkeypatch.setattr(transfer, "_BYTES_PER_POLL", 1)
    move = advance(stage, STEPS.index("send") + 1)
    began_s = stage.now_s
    while (word := stage.word_of("b", move)) is None:
        stage.now_s += 0.9 * LEASE_S
        stage.poll("a")
        stage.poll("b")
    assert isinstance(word, Received)
    assert stage.now_s - began_s > 2 * LEASE_S
