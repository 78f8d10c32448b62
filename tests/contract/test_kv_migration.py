"""Requests migrate between servers with their KV, and without it where it cannot be used.

The servers are fakes, with KV of no meaning. `real_servers.py` checks what real ones generate with it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from tests.contract.fake_server import engine_at
from tests.contract.fake_vllm_server import TICKET_SOURCE, FakeVllmServer
from tests.contract.fleet import NUM_PROMPT, REQUEST, Fleet

from dora.engine.backends import http_engine
from dora.engine.backends.server_plugins import dora_kv_files as kv_files
from dora.engine.backends.vllm import Vllm
from dora.engine.kv_transfer.handoff import ExportedKV, TransferError
from dora.engine.messages import ExportFailed, ImportFailed, ImportFinished, MigrationReply
from dora.runtime.process.remote_kv import RemoteKVTransport, make_broker
from dora.testing import version_weights


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Fleet]:
    with closing(Fleet(tmp_path, kv=True)) as fleet:
        yield fleet


def imported(replies: list[MigrationReply]) -> ImportFinished:
    (reply,) = (reply for reply in replies if isinstance(reply, ImportFinished))
    return reply


def test_a_request_migrates_with_its_kv(fleet: Fleet) -> None:
    """The destination's server gets the KV in the destination's own folder: the source's may go at once."""
    source, destination = fleet.source(), fleet.engine()
    assert (source.kv_pool, destination.kv_pool) == (fleet.pool(0), fleet.pool(1))
    reply = imported(fleet.migrate(source, destination))
    assert (reply.num_tokens, reply.num_prefilled) == (2, 0)  # one more than before the order
    assert reply.num_bytes > 0
    assert [*fleet.pool(0).iterdir()] == []
    assert len(fleet.driver.finish(destination, REQUEST).token_ids) == 30
    (call,) = fleet.servers[1].generate_calls
    folder = Path(call["kv_transfer_params"]["dora_import"])
    assert folder.parent == fleet.pool(1)
    (header,) = kv_files.read_headers(folder, 1)
    assert header.origin.weight_digest == destination.versions[0]


def test_an_engine_without_a_pool_migrates_without_kv(fleet: Fleet) -> None:
    source, destination = fleet.source(), fleet.engine()
    reply = imported(fleet.driver.migrate(REQUEST, source, destination))
    assert (reply.num_bytes, reply.num_prefilled) == (0, NUM_PROMPT)


def test_a_server_without_the_connector_has_no_pool(fleet: Fleet) -> None:
    server = FakeVllmServer()
    fleet.servers.append(server)
    assert engine_at(Vllm, server.url, fleet.folder / "model", pool=fleet.pool(0)).kv_pool is None


def test_a_request_whose_kv_could_not_be_written_migrates_without_it(fleet: Fleet) -> None:
    source, destination = fleet.source(kv="lost"), fleet.engine()
    reply = imported(fleet.migrate(source, destination))
    assert (reply.num_bytes, reply.num_prefilled) == (0, NUM_PROMPT + 1)
    assert len(fleet.driver.finish(destination, REQUEST).token_ids) == 30


def test_a_server_that_does_not_halt_a_request_costs_the_source_a_prefill(fleet: Fleet) -> None:
    """The driver or the lease ends the migration. The server gets the request again; the old one ends."""
    source, destination = fleet.source(kv="never"), fleet.engine()
    assert fleet.driver.start(REQUEST, source, destination, fleet.pool(0)) == []
    assert fleet.driver.poll(source) == []
    source.cancel_migration(1)
    assert fleet.driver.poll(source) == [ExportFailed(1, "the migration was cancelled")]
    assert [*fleet.pool(0).iterdir()] == []
    old, new = fleet.servers[0].generate_calls_when(2)
    assert f"generate-tokens-{old['request_id']}" in fleet.servers[0].aborted
    fleet.servers[0].clear_faults()
    assert len(fleet.driver.finish(source, REQUEST).token_ids) == 30
    assert "dora_import" not in new["kv_transfer_params"]
    assert source.num_recomputed == NUM_PROMPT + 1


def test_a_request_that_is_aborted_leaves_no_kv(fleet: Fleet) -> None:
    source, destination = fleet.source(), fleet.engine()
    fleet.export(source, destination, fleet.pool(0))
    assert source.abort([REQUEST.id]) == {REQUEST.id: 2}
    assert [*fleet.pool(0).iterdir()] == []


def connect_by_broker(engines: Iterable[Vllm]) -> ExitStack:
    """As engines of other machines than the driver's."""
    stack = ExitStack()
    broker = stack.enter_context(closing(make_broker("127.0.0.1")))
    for engine in engines:
        transport = stack.enter_context(closing(RemoteKVTransport(broker.address)))
        engine.connect(transport.open_handoff, time.time)
    return stack


@pytest.mark.parametrize("between_machines", [False, True])
def test_a_ticket_migrates_where_servers_read_each_others_kv(fleet: Fleet, between_machines: bool) -> None:
    """It is in the snapshot: the destination needs no file of the source."""
    source, destination = fleet.source(by_ticket=True), fleet.engine(by_ticket=True)
    with connect_by_broker([source, destination] if between_machines else []):
        reply = imported(fleet.migrate(source, destination))
        assert (reply.num_tokens, reply.num_bytes, reply.num_prefilled) == (2, 1000, 0)
        assert 0.0 <= reply.stop_s < 60.0
        assert len(fleet.driver.finish(destination, REQUEST).token_ids) == 30
    (call,) = fleet.servers[1].generate_calls
    folder = Path(call["kv_transfer_params"]["dora_import"])
    assert folder.parent == fleet.pool(1)
    assert kv_files.read_ticket(folder) == (NUM_PROMPT + 1, 1000, TICKET_SOURCE)
    assert [*fleet.pool(0).iterdir()] == []


def test_engines_of_other_machines_migrate_requests_without_kv(fleet: Fleet) -> None:
    source, destination = fleet.source(), fleet.engine()
    assert source.kv_address is None
    with connect_by_broker([source, destination]):
        reply = imported(fleet.driver.migrate(REQUEST, source, destination))
        assert (reply.num_bytes, reply.num_prefilled) == (0, NUM_PROMPT)
        assert len(fleet.driver.finish(destination, REQUEST).token_ids) == 30


def test_a_request_whose_kv_does_not_arrive_is_prefilled(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its server waits for the KV of a source that is lost, for example."""
    source, destination = fleet.source(by_ticket=True), fleet.engine(by_ticket=True, holds_after=0)
    fleet.migrate(source, destination)
    fleet.driver.step(destination)
    assert len(fleet.servers[1].generate_calls) == 1
    monkeypatch.setattr(http_engine, "IMPORT_TIMEOUT_S", 0.0)
    fleet.driver.step(destination)
    old, new = fleet.servers[1].generate_calls_when(2)
    assert f"generate-tokens-{old['request_id']}" in fleet.servers[1].aborted
    assert ["dora_import" in call["kv_transfer_params"] for call in (old, new)] == [True, False]
    assert destination.num_recomputed == NUM_PROMPT + 2
    fleet.servers[1].clear_faults()
    assert len(fleet.driver.finish(destination, REQUEST).token_ids) == 30


@pytest.mark.parametrize("content", [b"", b"{}", b"[1, 2]", b"[2, [3, 4, {}]]", b"[1, [3, 4, 5]]", b"\xff"])
def test_what_is_no_ticket_is_refused(content: bytes) -> None:
    with pytest.raises(kv_files.KVFileError, match="no ticket of format 1"):
        kv_files.parse_ticket(content)


def test_a_ticket_of_too_few_tokens_is_refused(fleet: Fleet) -> None:
    engine = fleet.engine(by_ticket=True)
    assert engine._kv is not None
    ticket = json.dumps([kv_files.FORMAT, [3, 1000, {}]]).encode()
    kv = ExportedKV(fleet.pool(0), 0, ticket)
    assert engine._kv.check(kv, "", 3).num_bytes == 1000
    with pytest.raises(TransferError, match="of 3 tokens; 4 are needed"):
        engine._kv.check(kv, "", 4)


def damage(folder: Path) -> None:
    kv_files.worker_file(folder, 0).write_bytes(b"")


def change_weights(folder: Path) -> None:
    path = kv_files.worker_file(folder, 0)
    (header,) = kv_files.read_headers(folder, 1)
    digest = header.origin.weight_digest.encode()
    path.write_bytes(path.read_bytes().replace(digest, digest[::-1]))


@pytest.mark.parametrize(
    ("change", "reason"), [(damage, "no whole KV file"), (change_weights, "the KV is of")]
)
def test_kv_that_is_damaged_or_of_other_weights_is_refused_by_the_destination(
    fleet: Fleet, change: Callable[[Path], None], reason: str
) -> None:
    source, destination = fleet.source(), fleet.engine()
    fleet.export(source, destination, fleet.pool(0))
    (folder,) = fleet.pool(0).iterdir()
    change(folder)
    (reply,) = fleet.driver.poll(destination)
    assert isinstance(reply, ImportFailed)
    assert reason in reply.reason
    assert destination.progress() == {}


@pytest.mark.parametrize("by_ticket", [False, True])
def test_a_cancelled_migration_continues_at_its_source_with_the_kv(fleet: Fleet, by_ticket: bool) -> None:
    """The server releases its own ticket."""
    source, destination = fleet.source(by_ticket=by_ticket), fleet.engine(by_ticket=by_ticket)
    fleet.export(source, destination, fleet.pool(0))
    source.cancel_migration(1)
    destination.cancel_migration(1)
    assert fleet.driver.poll(source) == [ExportFailed(1, "the migration was cancelled")]
    fleet.servers[0].clear_faults()
    assert len(fleet.driver.finish(source, REQUEST).token_ids) == 30
    exported, continued = (call["kv_transfer_params"] for call in fleet.servers[0].generate_calls)
    assert continued["dora_import"] == exported["dora_export"]
    assert source.num_recomputed == 0


def test_a_prefill_instead_of_an_import_is_counted(fleet: Fleet) -> None:
    """As the server reports it: the KV may be lost between the import's commit and its use."""
    source, destination = fleet.source(), fleet.engine(reported_prefill=NUM_PROMPT + 2)
    fleet.migrate(source, destination)
    fleet.driver.finish(destination, REQUEST)
    destination.drop(0)
    destination.load(1, version_weights(1))  # which waits for the end of all responses
    assert destination.num_recomputed == NUM_PROMPT + 1
    assert [*fleet.pool(1).iterdir()] == []
