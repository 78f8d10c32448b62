"""Migration between machines: one engine owns the request, also when a connection is lost."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.engine.engine_cluster import EngineCluster
from tests.engine.tiny import TINY, make_request

from dora.config import load
from dora.curve import CurveAddress
from dora.engine.engine import Engine
from dora.engine.kv_transfer import transfer
from dora.engine.kv_transfer.handoff import HandoffMemory, HandoffSlot, HandoffSlots, Reservation
from dora.engine.kv_transfer.transfer import KVTransport
from dora.engine.messages import ImportFailed, ImportFinished
from dora.errors import RunError
from dora.runtime.process import remote_kv
from dora.runtime.process.remote_kv import (
    BROKER_OPERATIONS,
    RemoteKVPool,
    RemoteKVTransport,
    make_broker,
    serve_kv,
)
from dora.runtime.process.rpc import RequestServer
from dora.runtime.rollout.engine_worker import build_engine
from dora.runtime.run_setup import RunSetup

LOOPBACK = "127.0.0.1"
BLOCK_BYTES = TINY.kv_bytes_per_token * 16


class RemoteEngineCluster(EngineCluster):
    """Engines each on a machine of its own, none on the driver's."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._pool_servers: dict[str, RequestServer] = {}
        self._exit_stack = contextlib.ExitStack()
        self.broker = self._exit_stack.enter_context(contextlib.closing(make_broker(LOOPBACK)))

    def transport(self) -> KVTransport:
        return self._exit_stack.enter_context(contextlib.closing(RemoteKVTransport(self.broker.address)))

    def source_pool(self, name: str) -> CurveAddress:
        if name not in self._pool_servers:
            shared = self.engines[name].shared_kv
            assert shared is not None
            assert shared.blocks is not None
            server = serve_kv(LOOPBACK, shared.blocks)
            self._pool_servers[name] = self._exit_stack.enter_context(contextlib.closing(server))
        return self._pool_servers[name].address

    def close(self) -> None:
        self._exit_stack.close()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteEngineCluster]:
    """Replies do not depend on the time: each poll requests a new status. Blocks are always published."""
    monkeypatch.setattr(remote_kv, "STATUS_MAX_AGE_S", -1.0)
    monkeypatch.setattr(transfer, "_MAX_STOPPED_BYTES", 0)
    made = RemoteEngineCluster(tmp_path)
    yield made
    made.close()


def test_a_request_migrates_to_another_machine_bit_by_bit(cluster: RemoteEngineCluster) -> None:
    request = make_request(1, max_tokens=60)
    _, destination = cluster.begin(request, 40)
    imported = cluster.migrate(request, "a", "b")
    assert imported.num_bytes == -(-(len(request.prompt_ids) + 39) // 16) * BLOCK_BYTES
    assert (imported.num_prefilled, destination.num_prefilled) == (0, 0)
    cluster.check_bits(request)


def test_one_engine_owns_the_request_if_both_claim_it_at_once(cluster: RemoteEngineCluster) -> None:
    slots = HandoffSlots(cluster.folder)
    slot = slots.allocate(1, make_request(1))
    source, destination = (cluster.transport().open_handoff(1, slot) for _ in range(2))
    destination.reserve(Reservation(0, ""))
    source.write_export(b"it")
    assert destination.read_export() == b"it"
    succeeded: list[str] = []

    def claim(name: str, call: Callable[[], bool]) -> None:
        if call():
            succeeded.append(name)

    claims = {"withdrawn": source.withdraw_export, "imported": destination.commit_import}
    threads = [threading.Thread(target=claim, args=item) for item in claims.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(succeeded) == 1
    assert slots.open(1, slot).is_imported == (succeeded == ["imported"]), (
        "the driver's memory names the owner"
    )
    assert not source.withdraw_export()
    assert not destination.commit_import()


def test_a_request_stays_at_the_source_if_its_kv_cannot_be_read(cluster: RemoteEngineCluster) -> None:
    request = make_request(1, max_tokens=60)
    cluster.begin(request, 20)
    migration_id = cluster.start_migration(request, "a", "b")
    migrator = cluster.engines["b"]._migrator
    assert migrator._kv is not None
    peer = migrator._transport.peer_pool(cluster.source_pool("a"), migrator._kv)
    assert isinstance(peer, RemoteKVPool)
    peer.close()
    cluster.poll("a")
    cluster.poll("b")
    reply = cluster.reply_of("b", migration_id)
    assert isinstance(reply, ImportFailed)
    assert "KV cannot be read" in reply.reason
    cluster.engines["a"].cancel_migration(migration_id)
    cluster.check_bits(request)


def test_an_engine_that_loses_the_broker_exits(cluster: RemoteEngineCluster) -> None:
    """It cannot know who owns the request. The driver handles the lost engine, and reads the state."""
    request = make_request(1, max_tokens=60)
    cluster.begin(request, 20)
    cluster.start_migration(request, "a", "b")
    cluster.broker.close()
    with pytest.raises(RunError, match="is lost"):
        cluster.poll("b")


def test_a_source_without_a_reply_to_its_export_exits(
    cluster: RemoteEngineCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if the driver sleeps. The destination may own the request, so the source cannot keep it."""
    monkeypatch.setattr(remote_kv, "BROKER_TIMEOUT_S", 0.5)
    memory, may_reply = HandoffMemory(), threading.Event()

    def handle(request: tuple[int, HandoffSlot, str, tuple[Any, ...]]) -> object:
        migration_id, slot, operation, args = request
        reply = BROKER_OPERATIONS[operation](memory.open(migration_id, slot), *args)
        if operation == "write_export":
            may_reply.wait(20.0)
        return reply

    request = make_request(1, max_tokens=60)
    with contextlib.closing(RequestServer(LOOPBACK, handle)) as sleeping:
        monkeypatch.setattr(transfer, "_MAX_STOPPED_BYTES", 2**20)  # the request stops at once
        cluster.add_engine("b")
        with monkeypatch.context() as of_source:
            of_source.setattr(cluster, "broker", sleeping)
            cluster.add_engine("a").submit([request])
        cluster.step("a", 20)
        migration_id = cluster.start_migration(request, "a", "b")
        with pytest.raises(RunError, match="not answered 'write_export'"):
            cluster.poll("a")
        cluster.poll("b")
        assert isinstance(cluster.reply_of("b", migration_id), ImportFinished)
        assert cluster.reply_of("a", migration_id) is None
        may_reply.set()


def test_a_pool_with_blocks_of_another_size_is_rejected(cluster: RemoteEngineCluster) -> None:
    cluster.add_engine("a")
    with pytest.raises(ValueError, match=rf"blocks have {BLOCK_BYTES} bytes, this engine's have 32"):
        RemoteKVPool(cluster.source_pool("a"), 32)


def test_blocks_are_copied_in_frames_for_many_peers_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many blocks as fill several frames; each peer copies others."""
    monkeypatch.setattr(remote_kv, "KV_TIMEOUT_S", 60.0)  # of a busy machine
    pool = np.random.default_rng(0).integers(0, 2**63, (256, 2**13), np.uint64)  # of 64 KiB
    with contextlib.closing(serve_kv(LOOPBACK, pool)) as server, ThreadPoolExecutor(4) as threads:

        def copy(seed: int) -> None:
            sources = np.random.default_rng(seed).permutation(256)[:100].tolist()
            with contextlib.closing(RemoteKVPool(server.address, 2**16)) as peer:
                assert len(peer) == 256
                own = np.zeros_like(pool)
                peer.copy(sources, own, [*range(5, 105)])
                peer.copy([], own, [])
            np.testing.assert_array_equal(own[5:105], pool[sources])
            assert not own[105:].any()

        assert [*threads.map(copy, range(4))] == [None] * 4


def test_leases_of_a_run_with_several_machines_do_not_depend_on_the_wall_clock(
    task: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Set back by an hour, it would let a destination keep its row for an hour if the source hangs."""
    setup = RunSetup.make(load.read_config(task), tmp_path)
    engine = build_engine(replace(setup.engine_spec(tmp_path, 0), host=LOOPBACK))
    assert isinstance(engine, Engine)
    clock, wall_s = engine._migrator.clock, time.time()
    assert abs(clock() - wall_s) < 60.0, "other machines have about the same"
    before_s = clock()
    monkeypatch.setattr(time, "time", lambda: wall_s - 3600.0)
    assert 0.0 <= clock() - before_s < 60.0
