"""Requests move between servers and DORA's own engines without KV, and are one engine's whatever happens.

Servers are stand-ins. What is computed again is for `real_servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.contract.test_vllm import engine_at
from tests.contract.vllm_stand_in import TOKEN, StandIn

from dora.backends.inside.dora_vllm import TOKEN_KEY
from dora.backends.vllm import Vllm
from dora.contract.asking import CONFIG, request, weights
from dora.contract.inference import MAX_CONTEXT, MAX_ROWS
from dora.contract.moving import Table
from dora.core.records import Chunk
from dora.engine.sequence import EngineError
from dora.handover.engine import MovingEngine
from dora.handover.moves import Answer, Kept, NotReceived, Received, Sent
from dora.model.folder import save_folder
from dora.model.weights import weight_digest

ASKED = request(0, max_tokens=30)
NUM_PROMPT = len(ASKED.prompt_ids)


class Stage:
    """Servers and engines that hold version 0, and a table where they meet."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.table = folder, Table(folder)
        self.servers: list[StandIn] = []
        save_folder(folder / "model", CONFIG, weights(0))

    def served(self, version: int = 0, holds: bool = True) -> Vllm:
        """A server that holds an answer once it has said one token of it, and its engine."""
        self.servers.append(StandIn(**({"holds": True} if holds else {})))
        engine = engine_at(self.servers[-1].url, self.folder / "model")
        engine.load(0, weights(version))
        return engine

    def own(self) -> MovingEngine:
        engine = MovingEngine(
            CONFIG,
            kernels="eager",
            pool=self.folder / "pool",
            max_rows=MAX_ROWS,
            max_context=MAX_CONTEXT,
            version_slots=1,
        )
        engine.load(0, weights(0))
        return engine


@pytest.fixture
def stage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv(TOKEN_KEY, TOKEN)
    made = Stage(tmp_path)
    yield made
    for server in made.servers:
        server.close()


def test_a_request_moves_from_a_server_to_another(stage: Stage) -> None:
    """The other one is asked to continue, and for no more tokens than are left."""
    source, destination = stage.served(), stage.served(holds=False)
    source.submit([ASKED])
    stage.table.draw(source, ASKED)
    words = stage.table.move(ASKED, source, destination)
    (received,) = (word for word in words if isinstance(word, Received))
    assert (received.num_tokens, received.num_bytes, received.num_prefilled) == (1, 0, NUM_PROMPT)
    assert Sent(received.move) in words
    assert source.progress() == {}
    answer = stage.table.finish(destination, ASKED)
    (asked,) = stage.servers[1].asked
    assert asked["token_ids"] == [*ASKED.prompt_ids, *answer.token_ids[:1]]
    assert asked["sampling_params"]["max_tokens"] == 29
    assert len(answer.token_ids) == len(answer.logprobs) == len(answer.raw_logprobs) == 30
    assert answer.chunks == (Chunk(0, weight_digest(weights(0)), 30),)
    source.drop(0)


def test_a_request_moves_from_a_server_to_doras_own_engine_and_on(stage: Stage) -> None:
    source, own, last = stage.served(), stage.own(), stage.served(holds=False)
    source.submit([ASKED])
    stage.table.draw(source, ASKED)
    stage.table.move(ASKED, source, own)
    begun = own.progress()
    for _ in range(5):
        stage.table.step(own)
    own.check()
    words = stage.table.move(ASKED, own, last)
    assert begun == {ASKED.id: 1}
    (received,) = (word for word in words if isinstance(word, Received))
    assert received.num_tokens > 5
    assert own.idle
    own.check()
    answer = stage.table.finish(last, ASKED)
    assert len(answer.token_ids) == len(answer.logprobs) == 30
    assert answer.chunks == (Chunk(0, weight_digest(weights(0)), 30),)


def test_kv_of_siblings_is_not_computed_again(stage: Stage) -> None:
    """What the destination has of the prompt already is shared, as in moves with KV."""
    long = tuple(i % CONFIG.vocab_size for i in range(33))
    sibling, asked = (request(n, prompt_ids=long, max_tokens=20) for n in (1, 0))
    source, own = stage.served(), stage.own()
    own.submit([sibling])
    stage.table.step(own)
    source.submit([asked])
    stage.table.draw(source, asked)
    words = stage.table.move(asked, source, own)
    assert [word.num_prefilled for word in words if isinstance(word, Received)] == [33 - 32]
    own.check()
    assert len(stage.table.finish(own, asked).token_ids) == 20


def test_a_move_that_is_cancelled_leaves_the_request_where_it_was(stage: Stage) -> None:
    """Halted already, it goes on at the source, which computes it again and counts that."""
    source, destination = stage.served(), stage.served()
    source.submit([ASKED])
    stage.table.draw(source, ASKED)
    assert stage.table.begin(ASKED, source, destination) == []
    while not source.poll_moves() and not source._mover.is_offered(ASKED.id):
        pass
    assert source.progress() == {}, "another engine may have it"
    source.cancel_move(1)
    destination.cancel_move(1)
    assert stage.table.poll(source) == [Kept(1, "it was cancelled")]
    assert stage.table.poll(destination) == [NotReceived(1, "it was cancelled")]
    assert source.progress() == {ASKED.id: 1}
    assert source.num_recomputed == NUM_PROMPT + 1
    stage.servers[0].mend()
    assert len(stage.table.finish(source, ASKED).token_ids) == 30
    destination.drop(0)


def test_a_request_that_ends_while_it_is_halted_is_answered_there(stage: Stage) -> None:
    """The server does not hear in time that it is given up."""
    source, destination = stage.served(), stage.served()
    source.submit([ASKED])
    stage.table.draw(source, ASKED)
    assert stage.table.begin(ASKED, source, destination) == []
    stage.servers[0].faults["deaf"] = 1
    assert stage.table.poll(source) == []
    stage.servers[0].mend()
    with stage.servers[0].changed:
        stage.servers[0].changed.notify_all()
    words: list[object] = []
    while not words:
        words += stage.table.poll(source)
    assert words == [Kept(1, "it has finished here first")]
    assert len(stage.table.finish(source, ASKED).token_ids) == 30
    assert not source.can_step


def test_other_weights_do_not_go_on_with_it(stage: Stage) -> None:
    """C1: versions of one name and other bytes are not the same."""
    source, destination = stage.served(version=0), stage.served(version=1)
    source.submit([ASKED])
    stage.table.draw(source, ASKED)
    assert stage.table.begin(ASKED, source, destination) == []
    words: list[Answer] = []
    while not words:
        words = stage.table.poll(source) + stage.table.poll(destination)
    (word,) = words
    assert isinstance(word, NotReceived)
    assert "weight_digest" in word.reason


def test_what_is_aborted_while_it_moves_is_gone(stage: Stage) -> None:
    source, destination = stage.served(), stage.served()
    source.submit([ASKED])
    stage.table.draw(source, ASKED)
    assert stage.table.begin(ASKED, source, destination) == []
    while not source.poll_moves() and not source._mover.is_offered(ASKED.id):
        pass
    assert source.abort([ASKED.id]) == {ASKED.id: 1}
    assert stage.table.poll(source) == [Kept(1, "it was aborted")]
    assert not source.can_step
    destination.cancel_move(1)
    assert stage.table.poll(destination) == [NotReceived(1, "it was cancelled")]


def test_what_another_has_taken_is_not_aborted(stage: Stage) -> None:
    source, destination = stage.served(), stage.served()
    source.submit([ASKED])
    stage.table.draw(source, ASKED)
    assert stage.table.begin(ASKED, source, destination) == []
    while not destination.progress():
        stage.table.poll(source)
        stage.table.poll(destination)
    assert source.abort([ASKED.id]) == {}
    assert stage.table.poll(source) == [Sent(1)]
    assert destination.abort([ASKED.id]) == {ASKED.id: 1}


def test_an_engine_without_a_row_takes_nothing(stage: Stage) -> None:
    source, destination = stage.served(), stage.served()
    destination.submit([request(number) for number in range(1, 1 + MAX_ROWS)])
    source.submit([ASKED])
    assert stage.table.begin(ASKED, source, destination) == [NotReceived(1, "no row is free")]


def test_a_version_that_a_request_is_coming_for_is_not_dropped(stage: Stage) -> None:
    source, destination = stage.served(), stage.served()
    source.submit([ASKED])
    assert stage.table.begin(ASKED, source, destination) == []
    with pytest.raises(EngineError, match="unfinished"):
        destination.drop(0)
