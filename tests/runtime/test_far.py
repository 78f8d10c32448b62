"""Engines of several machines: what settles a move, and what becomes of it where a line is cut."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.moving import Stage
from tests.engine.tiny import TINY, engine, request, run

from dora.handover.files import Handover
from dora.handover.moves import NotReceived
from dora.handover.ways import Ways
from dora.runtime import far
from dora.runtime.far import FarPool, FarWays, PoolDoor, attend
from dora.runtime.sealed import Address, Listener, SealedLine

LOOPBACK = "127.0.0.1"
BLOCK_BYTES = TINY.kv_bytes_per_token * 16


class Nodes(Stage):
    """Engines that are not where the driver is, nor where another one is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._driver = Listener(LOOPBACK)
        self._doors: dict[str, PoolDoor] = {}
        self._left = contextlib.ExitStack()
        self._num_desks = 0
        self.desks: dict[int, SealedLine] = {}  # of each engine, in the order in which they were made

    def desk(self) -> Address:
        number, self._num_desks = self._num_desks, self._num_desks + 1
        return self._driver.expect(lambda line, _: self._attend(line, number))

    def ways(self) -> Ways:
        return self._left.enter_context(contextlib.closing(FarWays(self.desk())))

    def kv(self, name: str) -> Address:
        if name not in self._doors:
            door = PoolDoor(LOOPBACK, self.engines[name].blocks)
            self._doors[name] = self._left.enter_context(contextlib.closing(door))
        return self._doors[name].address

    def close(self) -> None:
        self._left.close()
        self._driver.close()

    def _attend(self, line: SealedLine, number: int) -> None:
        self.desks[number] = line
        attend(line, self.folder)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """What was seen is looked at again at each poll, so that words follow one another."""
    monkeypatch.setattr(far, "LOOK_S", -1.0)
    made = Nodes(tmp_path)
    yield made
    made.close()


def test_a_request_moves_to_another_machine_and_goes_on_bit_by_bit(nodes: Nodes) -> None:
    asked = request(1, max_tokens=60)
    expected = run(engine(), [asked])[asked.id]
    nodes.engine("a").submit([asked])
    destination = nodes.engine("b")
    nodes.step("a", 40)
    received = nodes.move(asked, "a", "b")
    assert received.num_bytes == -(-(len(asked.prompt_ids) + 39) // 16) * BLOCK_BYTES
    assert (received.num_prefilled, destination.num_prefilled) == (0, 0)
    assert nodes.run()[asked.id] == expected


def test_of_both_sides_one_gets_the_request_however_often_they_ask(nodes: Nodes) -> None:
    sides = [nodes.ways().meet(Path("elsewhere"), 1) for _ in range(2)]
    sides[0].put_offer(b"it")
    assert sides[1].get_offer() == b"it"
    got: list[str] = []

    def ask(name: str, want: Callable[[], bool]) -> None:
        if want():
            got.append(name)

    wants = {"kept": sides[0].keep, "taken": sides[1].take}
    asking = [threading.Thread(target=ask, args=item) for item in wants.items()]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(got) == 1
    assert Handover(nodes.folder, 1).is_taken == (got == ["taken"]), "the driver knows whose it is"
    assert not sides[0].keep()
    assert not sides[1].take()


def test_a_request_stays_where_it_is_when_its_kv_cannot_be_fetched(nodes: Nodes) -> None:
    asked = request(1, max_tokens=60)
    expected = run(engine(), [asked])[asked.id]
    nodes.engine("a").submit([asked])
    nodes.engine("b")
    nodes.step("a", 20)
    move = nodes.begin(asked, "a", "b")
    peer = nodes.engines["b"]._mover._ways.peer(nodes.kv("a"), BLOCK_BYTES)
    assert isinstance(peer, FarPool)
    peer._line.close()
    nodes.poll("a")
    nodes.poll("b")
    answer = nodes.word_of("b", move)
    assert isinstance(answer, NotReceived)
    assert "KV cannot be read" in answer.reason
    nodes.engines["a"].cancel_move(move)
    assert nodes.run()[asked.id] == expected


def test_an_engine_that_cannot_ask_whose_a_request_is_ends(nodes: Nodes) -> None:
    """It must not go on with what may be another's: the driver takes it for lost, and looks at the file."""
    asked = request(1, max_tokens=60)
    nodes.engine("a").submit([asked])
    nodes.engine("b")
    nodes.step("a", 20)
    nodes.begin(asked, "a", "b")
    nodes.desks[1].close()
    nodes.poll("a")
    with pytest.raises((EOFError, OSError)):
        nodes.poll("b")


def test_pools_of_other_blocks_are_no_peers(nodes: Nodes) -> None:
    nodes.engine("a")
    with pytest.raises(ValueError, match=rf"its blocks have {BLOCK_BYTES} bytes, here they have 32"):
        FarPool(nodes.kv("a"), 32)
