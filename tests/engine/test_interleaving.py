"""Small old versions sit steps out, and nothing about their answers changes."""

from __future__ import annotations

from tests.engine.tiny import TINY, request, run, tokens, weights

from dora.core.records import RequestId
from dora.engine.engine import Engine
from dora.engine.interleaving import NEVER, Interleaving
from dora.engine.sequence import Request

EVERY_FOURTH = Interleaving(interval=4, urgent_age=3)
ROWS = {0: 1, 1: 2, 2: 9}  # by version; at urgent_age 3 none of them is at its deadline


def engine(interleaving: Interleaving, versions: tuple[int, ...] = (0, 1, 2)) -> Engine:
    made = Engine(
        TINY, max_rows=12, max_context=96, version_slots=4, kernels="eager", interleaving=interleaving
    )
    for version in versions:
        made.load(version, weights(version))
    return made


def requests() -> list[Request]:
    versions = [version for version, num_rows in ROWS.items() for _ in range(num_rows)]
    return [
        request(number, group_size=1, version=version, max_tokens=30)
        for number, version in enumerate(versions)
    ]


def progress_after(made: Engine, num_steps: int) -> list[int]:
    """Tokens of each request, in order, after some steps that all of them decode through."""
    made.submit(requests())
    while made.num_waiting:
        made.step()
    before = made.progress()
    for _ in range(num_steps):
        assert not made.step()
    after = made.progress()
    return [after[request_id] - before[request_id] for request_id in sorted(after)]


def test_answers_do_not_depend_on_interleaving() -> None:
    assert tokens(run(engine(EVERY_FOURTH), requests())) == tokens(run(engine(NEVER), requests()))


def test_small_old_versions_decode_in_every_fourth_step() -> None:
    assert progress_after(engine(EVERY_FOURTH), 16) == [4] * 3 + [16] * 9


def test_a_version_at_its_deadline_decodes_in_every_step() -> None:
    at_deadline = Interleaving(interval=4, urgent_age=2)
    assert progress_after(engine(at_deadline), 16) == [16] + [4] * 2 + [16] * 9


def test_a_version_comes_to_its_deadline_when_a_newer_one_is_loaded() -> None:
    assert progress_after(engine(EVERY_FOURTH, versions=(0, 1, 2, 3)), 16) == [16] + [4] * 2 + [16] * 9


def test_rushed_requests_do_not_wait() -> None:
    made = engine(EVERY_FOURTH)
    made.submit(requests())
    while made.num_waiting:
        made.step()
    rushed = RequestId(0, 0, 0)
    before = made.progress()
    made.rush([rushed])
    for _ in range(8):
        made.step()
    gained = {request_id: num - before[request_id] for request_id, num in made.progress().items()}
    assert gained.pop(rushed) == 8
    assert set(gained.values()) == {0}


def test_versions_of_like_size_do_not_wait_for_each_other() -> None:
    assert not EVERY_FOURTH.resting(1, {0: 10, 1: 11, 2: 12}, newest=2)
    assert EVERY_FOURTH.resting(1, {0: 1, 1: 11, 2: 12}, newest=2) == {0}


def test_rows_that_wake_up_have_room_for_their_next_token() -> None:
    """Versions shrink below a quarter at any time, by answers that end and by aborts."""
    asked = [
        request(number, group_size=1, version=number % 3, max_tokens=5 + number * 7 % 50, prompt_length=14)
        for number in range(36)
    ]
    answers = []
    for interleaving in (NEVER, EVERY_FOURTH):
        made = engine(interleaving)
        made.submit(asked)
        found: dict[RequestId, list[int]] = {}
        while not made.idle:
            found |= {answer.id: answer.token_ids for answer in made.step()}
            if interleaving is EVERY_FOURTH and made.num_steps % 5 == 0:
                made.rush([])  # puts the rows in order once more
            made.check()
        answers.append(found)
    assert answers[0] == answers[1]
