"""Engines of several machines: what settles a move, and what becomes of it where a line is cut."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.engine.engine_cluster import EngineCluster
from tests.engine.tiny import TINY, make_engine, make_request, run

from dora.engine.kv_transfer.handoff import MigrationFiles
from dora.engine.kv_transfer.transfer import KVTransport
from dora.engine.messages import ImportFailed
from dora.runtime.process import remote_kv
from dora.runtime.process.remote_kv import KVPoolServer, RemoteKVPool, RemoteKVTransport, serve_broker
from dora.runtime.process.rpc import AuthenticatedChannel, ChannelAddress, Listener

LOOPBACK = "127.0.0.1"
BLOCK_BYTES = TINY.kv_bytes_per_token * 16


class Nodes(EngineCluster):
    """Engines that are not where the driver is, nor where another one is."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._driver = Listener(LOOPBACK)
        self._doors: dict[str, KVPoolServer] = {}
        self._left = contextlib.ExitStack()
        self._num_desks = 0
        self.desks: dict[
            int, AuthenticatedChannel
        ] = {}  # of each engine, in the order in which they were made

    def desk(self) -> ChannelAddress:
        number, self._num_desks = self._num_desks, self._num_desks + 1
        return self._driver.expect(lambda line, _: self._attend(line, number))

    def transport(self) -> KVTransport:
        return self._left.enter_context(contextlib.closing(RemoteKVTransport(self.desk())))

    def source_pool(self, name: str) -> ChannelAddress:
        if name not in self._doors:
            door = KVPoolServer(LOOPBACK, self.engines[name].blocks)
            self._doors[name] = self._left.enter_context(contextlib.closing(door))
        return self._doors[name].address

    def close(self) -> None:
        self._left.close()
        self._driver.close()

    def _attend(self, line: AuthenticatedChannel, number: int) -> None:
        self.desks[number] = line
        serve_broker(line, self.folder)


@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Nodes]:
    """What was seen is looked at again at each poll, so that words follow one another."""
    monkeypatch.setattr(remote_kv, "LOOK_S", -1.0)
    made = Nodes(tmp_path)
    yield made
    made.close()


def test_a_request_moves_to_another_machine_and_goes_on_bit_by_bit(nodes: Nodes) -> None:
    asked = make_request(1, max_tokens=60)
    expected = run(make_engine(), [asked])[asked.id]
    nodes.add_engine("a").submit([asked])
    destination = nodes.add_engine("b")
    nodes.step("a", 40)
    received = nodes.migrate(asked, "a", "b")
    assert received.num_bytes == -(-(len(asked.prompt_ids) + 39) // 16) * BLOCK_BYTES
    assert (received.num_prefilled, destination.num_prefilled) == (0, 0)
    assert nodes.run_to_end()[asked.id] == expected


def test_of_both_sides_one_gets_the_request_however_often_they_ask(nodes: Nodes) -> None:
    sides = [nodes.transport().migration_files(Path("elsewhere"), 1) for _ in range(2)]
    sides[0].write_export(b"it")
    assert sides[1].read_export() == b"it"
    got: list[str] = []

    def ask(name: str, want: Callable[[], bool]) -> None:
        if want():
            got.append(name)

    wants = {"withdrawn": sides[0].withdraw_export, "imported": sides[1].commit_import}
    asking = [threading.Thread(target=ask, args=item) for item in wants.items()]
    for thread in asking:
        thread.start()
    for thread in asking:
        thread.join()
    assert len(got) == 1
    assert MigrationFiles(nodes.folder, 1).is_imported == (got == ["imported"]), (
        "the driver knows whose it is"
    )
    assert not sides[0].withdraw_export()
    assert not sides[1].commit_import()


def test_a_request_stays_where_it_is_when_its_kv_cannot_be_fetched(nodes: Nodes) -> None:
    asked = make_request(1, max_tokens=60)
    expected = run(make_engine(), [asked])[asked.id]
    nodes.add_engine("a").submit([asked])
    nodes.add_engine("b")
    nodes.step("a", 20)
    move = nodes.start_migration(asked, "a", "b")
    peer = nodes.engines["b"]._migrator._transport.peer_pool(nodes.source_pool("a"), BLOCK_BYTES)
    assert isinstance(peer, RemoteKVPool)
    peer._line.close()
    nodes.poll("a")
    nodes.poll("b")
    answer = nodes.reply_of("b", move)
    assert isinstance(answer, ImportFailed)
    assert "KV cannot be read" in answer.reason
    nodes.engines["a"].cancel_migration(move)
    assert nodes.run_to_end()[asked.id] == expected


def test_an_engine_that_cannot_ask_whose_a_request_is_ends(nodes: Nodes) -> None:
    """It must not go on with what may be another's: the driver takes it for lost, and looks at the file."""
    asked = make_request(1, max_tokens=60)
    nodes.add_engine("a").submit([asked])
    nodes.add_engine("b")
    nodes.step("a", 20)
    nodes.start_migration(asked, "a", "b")
    nodes.desks[1].close()
    nodes.poll("a")
    with pytest.raises((EOFError, OSError)):
        nodes.poll("b")


def test_pools_of_other_blocks_are_no_peers(nodes: Nodes) -> None:
    nodes.add_engine("a")
    with pytest.raises(ValueError, match=rf"its blocks have {BLOCK_BYTES} bytes, here they have 32"):
        RemoteKVPool(nodes.source_pool("a"), 32)
