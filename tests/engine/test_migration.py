"""A request that moves goes on as if it had not."""

import pytest
from tests.engine.moving import Stage
from tests.engine.tiny import TINY, engine, request, run, tokens

from dora.core.records import RequestId
from dora.engine.sequence import Completion, EngineError, Request
from dora.handover.moves import Kept, NotReceived, Received, Sent

BLOCK_BYTES = TINY.kv_bytes_per_token * 16


def close(answer: Completion, expected: Completion) -> bool:
    """Equal but for the last bits of log-probs, which depend on how many rows share a matrix product."""
    return (
        answer.token_ids == expected.token_ids
        and answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
        and (answer.version, answer.chunks, answer.finish_reason)
        == (expected.version, expected.chunks, expected.finish_reason)
    )


def unmoved(stage: Stage, requests: list[Request], num_versions: int = 1) -> dict[RequestId, Completion]:
    """Answers of one engine that does everything alone."""
    return run(engine(stage.kernels, num_versions=num_versions), requests)


@pytest.mark.parametrize("num_steps", range(1, 18))
def test_a_request_moved_at_any_offset_of_a_block_goes_on_bit_by_bit(stage: Stage, num_steps: int) -> None:
    asked = request(1, max_tokens=40)
    expected = unmoved(stage, [asked])[asked.id]
    source, destination = stage.engine("a"), stage.engine("b")
    source.submit([asked])
    stage.step("a", num_steps)
    received = stage.move(asked, "a", "b")
    num_computed = len(asked.prompt_ids) + num_steps - 1
    assert received.num_tokens == num_steps
    assert received.num_bytes == -(-num_computed // 16) * BLOCK_BYTES
    assert source.idle
    assert destination.num_prefilled == 0
    assert stage.run()[asked.id] == expected  # alone on both engines: log-probs are equal to the last bit
    assert len(expected.chunks) == 1


@pytest.mark.parametrize("prompt_length", [1, 15, 16, 17, 18, 32, 33])
def test_prompts_on_either_side_of_a_blocks_edge_move(stage: Stage, prompt_length: int) -> None:
    asked = request(1, prompt_length=prompt_length)
    expected = unmoved(stage, [asked])[asked.id]
    stage.engine("a").submit([asked])
    stage.engine("b")
    stage.step("a")
    stage.move(asked, "a", "b")
    assert stage.run()[asked.id] == expected


def test_one_sibling_stays_and_others_move_and_share_their_prompt_again(stage: Stage) -> None:
    siblings = [request(i, prompt_length=37) for i in range(4)]
    expected = unmoved(stage, siblings)
    stage.engine("a").submit(siblings)
    destination = stage.engine("b")
    stage.step("a", 6)
    first = stage.move(siblings[1], "a", "b")
    second = stage.move(siblings[3], "a", "b")
    assert (first.num_bytes, second.num_bytes) == (3 * BLOCK_BYTES, 1 * BLOCK_BYTES)
    answers = stage.run()
    assert all(close(answers[sibling.id], expected[sibling.id]) for sibling in siblings)
    assert destination.num_prefilled == 0


def test_what_the_destination_computed_itself_is_not_copied(stage: Stage) -> None:
    siblings = [request(i, prompt_length=37) for i in range(2)]
    expected = unmoved(stage, siblings)
    for name, sibling in zip("ab", siblings, strict=True):
        stage.engine(name).submit([sibling])
        stage.step(name, 3)
    assert stage.move(siblings[0], "a", "b").num_bytes == BLOCK_BYTES
    answers = stage.run()
    assert all(close(answers[sibling.id], expected[sibling.id]) for sibling in siblings)


def test_a_request_may_move_on_and_come_back(stage: Stage) -> None:
    asked = request(1, max_tokens=40)
    expected = unmoved(stage, [asked])[asked.id]
    for name in "abc":
        stage.engine(name)
    stage.engines["a"].submit([asked])
    stage.step("a", 4)
    for source, destination, num_steps in (("a", "b", 7), ("b", "c", 1), ("c", "b", 9), ("b", "a", 0)):
        stage.move(asked, source, destination)
        stage.step(destination, num_steps)
    stage.move(asked, "a", "c")
    assert stage.run()[asked.id] == expected


def test_a_request_may_come_back_before_its_first_owner_has_seen_it_go(stage: Stage) -> None:
    asked = request(1)
    expected = unmoved(stage, [asked])[asked.id]
    stage.engine("a").submit([asked])
    stage.engine("b")
    stage.step("a", 4)
    gone = stage.begin(asked, "a", "b")
    for name in "abab":
        stage.poll(name)
    back = stage.begin(asked, "b", "a")
    assert stage.run()[asked.id] == expected
    assert (stage.word_of("a", gone), stage.word_of("b", back)) == (Sent(gone), Sent(back))


def test_a_request_moves_with_one_token_left_to_draw(stage: Stage) -> None:
    asked = request(1, max_tokens=20)
    expected = unmoved(stage, [asked])[asked.id]
    stage.engine("a").submit([asked])
    stage.engine("b")
    stage.step("a", 19)
    stage.move(asked, "a", "b")
    assert asked.id not in stage.finished
    stage.step("b")
    assert stage.run()[asked.id] == expected


def test_a_request_that_finishes_while_it_moves_stays(stage: Stage) -> None:
    asked = request(1, max_tokens=20)
    expected = unmoved(stage, [asked])[asked.id]
    stage.engine("a").submit([asked])
    stage.engine("b")
    stage.step("a", 19)
    move = stage.begin(asked, "a", "b")
    stage.poll("a")
    stage.step("a")
    stage.poll("a")
    assert stage.word_of("a", move) == Kept(move, "it has finished here first")
    stage.engines["b"].cancel_move(move)
    assert stage.run()[asked.id] == expected
    assert stage.word_of("b", move) == NotReceived(move, "it was cancelled")


def test_versions_move_past_each_other_between_busy_engines(stage: Stage) -> None:
    requests = [request(i, version=i % 2, max_tokens=30) for i in range(12)]
    expected = unmoved(stage, requests, num_versions=2)
    for name, own in (("a", requests[:6]), ("b", requests[6:])):
        stage.engine(name, versions=(0, 1) if name == "a" else (1, 0), max_rows=12).submit(own)
    for number in range(6):
        stage.step("a", 1 + number % 3)
        stage.step("b")
        stage.begin(requests[number], "a", "b")
        stage.begin(requests[11 - number], "b", "a")
        for name in "ab":
            stage.poll(name)
            stage.step(name)
    answers = stage.run()
    assert all(close(answers[asked.id], expected[asked.id]) for asked in requests)
    assert sum(isinstance(answer, Received) for _, answer in stage.answers) == 12


def test_the_source_decodes_on_while_full_blocks_are_copied(stage: Stage) -> None:
    asked = request(1, max_tokens=60)
    stage.engine("a").submit([asked])
    stage.engine("b")
    stage.step("a", 40)
    stage.begin(asked, "a", "b")
    stage.poll("a")
    stage.step("a", 3)
    stage.poll("b")
    assert stage.engines["a"].progress() == {asked.id: 43}
    stage.poll("a")
    assert stage.engines["a"].progress() == {}  # another engine may have taken it by now
    stage.step("a", 3)
    stage.poll("b")
    assert stage.engines["b"].progress() == {asked.id: 43}
    assert stage.run()[asked.id] == unmoved(stage, [asked])[asked.id]


def test_a_request_still_waiting_moves_as_soon_as_it_has_a_row(stage: Stage) -> None:
    requests = [request(i, max_tokens=5 + 10 * i) for i in range(2)]
    expected = unmoved(stage, requests)
    stage.engine("a", max_rows=1).submit(requests)
    stage.engine("b")
    move = stage.begin(requests[1], "a", "b")
    answers = stage.run()
    assert stage.word_of("a", move) == Sent(move)
    assert all(close(answers[asked.id], expected[asked.id]) for asked in requests)


def test_stop_time_is_that_between_the_last_step_there_and_the_seat_here(stage: Stage) -> None:
    asked = request(1)
    stage.engine("a").submit([asked])
    stage.engine("b")
    stage.step("a", 2)
    move = stage.begin(asked, "a", "b")
    stage.poll("a")
    stage.now_s += 0.25
    stage.poll("b")
    received = stage.word_of("b", move)
    assert isinstance(received, Received)
    assert received.stop_s == pytest.approx(0.25)


def test_a_version_on_its_way_in_is_not_dropped(stage: Stage) -> None:
    asked = request(1)
    stage.engine("a").submit([asked])
    destination = stage.engine("b")
    stage.step("a")
    place = stage.reserve(asked, "a", "b")
    with pytest.raises(EngineError, match="version 0 has 1 unfinished requests"):
        destination.drop(0)
    destination.cancel_move(place.move)
    stage.poll("b")
    destination.drop(0)
    destination.check()


def test_a_version_may_be_dropped_as_soon_as_its_last_request_is_taken(stage: Stage) -> None:
    """The driver hears of it from the destination, maybe before the source has looked."""
    asked = request(1)
    expected = unmoved(stage, [asked])[asked.id]
    source = stage.engine("a")
    source.submit([asked])
    stage.engine("b")
    stage.step("a")
    move = stage.begin(asked, "a", "b")
    stage.poll("a")
    with pytest.raises(EngineError, match="unfinished"):
        source.drop(0)
    stage.poll("b")
    source.drop(0)
    assert source.idle
    assert stage.run()[asked.id] == expected
    assert stage.word_of("a", move) == Sent(move)


def test_moves_need_a_free_row_and_a_version_and_a_request_that_is_not_here(stage: Stage) -> None:
    requests = [request(i) for i in range(3)]
    stage.engine("a").submit(requests[:2])
    stage.engine("b", max_rows=1).submit([requests[2]])
    stage.engine("c", versions=(1,))
    for name in "ab":
        stage.step(name)
    refusals = [stage.ask(requests[0], "a", name) for name in "abc"]
    assert [answer.reason for answer in refusals if isinstance(answer, NotReceived)] == [
        "it is here already",
        "no row or too few KV blocks are free",
        "version 0 is not held; held: [1]",
    ]
    stage.pool("c").unlink()
    stage.engine("d")
    unreadable = stage.ask(requests[0], "c", "d")
    assert isinstance(unreadable, NotReceived)
    assert "cannot be read" in unreadable.reason
    assert tokens(stage.run()) == tokens(run(engine(stage.kernels), requests))


def test_what_is_not_here_cannot_be_sent(stage: Stage) -> None:
    stage.engine("b")
    place = stage.reserve(request(1), "b", "b")
    assert stage.send(request(9), "b", place) == Kept(place.move, "it is not here")
