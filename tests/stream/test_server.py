"""A stream in another process: waiting, refused requests, crashes, with killed processes."""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.running import wait_until
from tests.stream.processes import TASK, StreamProcess
from tests.stream.sample_rows import ALL, columns, get, group, numbers, put, rewards, samples, serving

from dora import curve
from dora.core.types import RequestId
from dora.curve import CurveConnection
from dora.errors import RunError, StorageFullError, StreamError
from dora.stream import storage, transport
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest, ConsumerDeclaration
from dora.stream.schema import TimedOut
from dora.stream.server import StreamServer
from dora.stream.storage import SampleStream
from dora.stream.transport import UnixConnection


def test_every_consumer_gets_the_groups_of_a_producer(producer: StreamClient, client: StreamClient) -> None:
    put(producer, 0, 1)
    producer.fill([group(0)], rewards(0))
    batch, chosen = get(client), get(client, "actor", BatchRequest(group=group(0)))
    assert (numbers(batch), numbers(chosen)) == ([0, 1], [0])
    assert chosen.rows("reward") == [0.0, 0.0]
    assert [values.tolist() for values in batch.rows("logprobs")] == [[], [0.0], [1.0], [1.0, 2.0]]
    assert (chosen.requests, batch.versions) == ([RequestId(0, 0, 0), RequestId(0, 0, 1)], [0] * 4)
    for done in (batch, chosen):
        client.commit(done)
    assert client.status()["num_rows"] == 2
    client.clear([group(1)])
    assert client.status() == {"num_rows": 0, "num_bytes": 0}


def test_a_remote_client_only_reads_and_gets_only_the_columns_it_needs(
    producer: StreamClient, new_client: Callable[..., StreamClient]
) -> None:
    remote = new_client(is_local=False)
    with pytest.raises(
        StreamError, match="put from another host: only clients on the server's host can write"
    ):
        put(remote, 0)
    put(producer, 0, 1)
    producer.fill([group(1), group(0)], rewards(1, 0))
    batch = get(remote, "actor")
    assert numbers(batch) == [1, 0]
    assert "logprobs" not in batch
    assert batch.rows("reward") == [1.0, 1.0, 0.0, 0.0]


def test_a_remote_client_gets_more_than_a_frame_may_have(
    server: StreamServer, producer: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curve, "MAX_FRAME_BYTES", 1 << 20)
    monkeypatch.setattr("dora.stream.server.FRAME_BYTES", 1 << 19)
    assert server.remote is not None
    with StreamClient(server.remote, timeout_s=20.0) as remote:
        values = [np.arange(n, dtype=np.int32) for n in (170_000, 180_000, 0, 190_000)]
        producer.put(samples(0, 1), {"ids": values, "logprobs": [np.zeros(1, np.float32)] * 4})
        for sent, received in zip(values, get(remote).rows("ids"), strict=True):
            np.testing.assert_array_equal(sent, received)


def test_ranks_of_a_trainer_read_rows_that_rank_0_has_on_lease(
    new_client: Callable[..., StreamClient], producer: StreamClient
) -> None:
    """Ranks of the same replica read the same rows."""
    put(producer, 0, 1)
    batch = get(producer)
    values = dict(zip(batch.requests, batch.rows("ids"), strict=True))
    shares = [batch.requests[::2], batch.requests[1::2]]
    for share in shares:
        for _ in range(2):
            found = new_client().read_leased(TASK, share)
            assert found.requests == share
            for request, read in zip(share, found.rows("ids"), strict=True):
                np.testing.assert_array_equal(read, values[request])
    with pytest.raises(StreamError, match="this client has no lease 0"):
        producer.commit(producer.read_leased(TASK, shares[0]))
    producer.commit(batch)
    with pytest.raises(StreamError, match="row 0/0/1 is not on lease to 'reward': another client must"):
        producer.read_leased(TASK, shares[1])


def test_a_get_waits_for_groups_and_names_what_is_missing(
    producer: StreamClient, client: StreamClient
) -> None:
    late = client.get("actor", BatchRequest(group=group(0)), wait_s=0.05)
    assert isinstance(late, TimedOut)
    assert late.reason == "group 0/0 is not there"
    found: list[list[int]] = []
    waiting = threading.Thread(target=lambda: found.append(numbers(get(client))))
    waiting.start()
    put(producer, 3)
    waiting.join()
    assert found == [[3]]


def test_an_evicted_client_loses_its_leases_and_pending_requests(
    new_client: Callable[..., StreamClient], client: StreamClient
) -> None:
    """The crash of a remote client is not detected, and one of its requests may be pending."""
    driver, crashed = new_client(), new_client(is_local=False)
    put(driver, 0)
    get(crashed)
    crashed._send("get", {"consumer": TASK, "request": ALL, "commit": None, "wait_s": 60.0})
    driver.evict(crashed.client_id)
    put(driver, 1)
    assert numbers(get(client)) == [0, 1]
    with pytest.raises(StreamError, match="this client is not connected, or was evicted"):
        crashed.status()
    with pytest.raises(StreamError, match="only a client on the server's own host"):
        new_client(is_local=False).evict(client.client_id)


def test_a_put_or_fill_into_a_full_file_system_is_refused_and_may_be_repeated(
    producer: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, num_bytes: int) -> mmap.mmap:
        raise OSError(errno.ENOSPC, "No space left on device")

    large = {"routes": [np.zeros(3 << 22, np.int16)] * 2}
    with monkeypatch.context() as disk:
        disk.setattr(storage, "_create_segment", full)
        with pytest.raises(
            StorageFullError, match="No space left on device; the stream has 0 rows, 0 bytes in all"
        ):
            put(producer, 3)
    put(producer, 3)
    with monkeypatch.context() as disk:
        disk.setattr(storage, "_create_segment", full)
        with pytest.raises(StorageFullError, match="the stream has 2 rows, "):
            producer.fill([group(3)], large)
    producer.fill([group(3)], large)


def test_a_refused_request_changes_nothing_and_names_a_remedy(producer: StreamClient) -> None:
    put(producer, 0)
    batch = get(producer)
    producer.commit(batch)
    before = producer.status()
    bad: list[tuple[Any, str]] = [
        (lambda: put(producer, 0), "group 0/0 exists already: put a group once"),
        (lambda: producer.put(samples(4), {"ids": [np.zeros(1)] * 2}), "'ids' is float64 of shape"),
        (lambda: producer.put(samples(4), {"value": np.zeros(2)}), "field 'value' is not declared"),
        (lambda: producer.put(samples(4), columns(4, 5)), "4 values for 2 rows: pass one value for each row"),
        (lambda: producer.fill([group(0)], columns(0)), "group 0/0 has ids, logprobs already"),
        (lambda: producer.fill([group(7)], rewards(7)), "group 0/7 does not exist"),
        (lambda: producer.commit(batch), "lease 1 has ended"),
        (lambda: producer.get("critic"), "consumer 'critic' is not declared"),
    ]
    for request, fragment in bad:
        with pytest.raises(StreamError, match=fragment):
            request()
    assert producer.status() == before


def test_malformed_messages_get_an_error_and_change_nothing(
    server: StreamServer, producer: StreamClient
) -> None:
    assert server.remote is not None
    connection = CurveConnection(server.remote)

    def send(frames: list[bytes]) -> dict[str, Any]:
        connection.send(frames)
        return transport.decode_header([frame.bytes for frame in connection.recv(20.0)])

    connect = json.dumps({"method": "connect", "id": 1}).encode()
    get_request = {"method": "get", "id": 1, "consumer": TASK, "request": ALL, "commit": None, "wait_s": 1}
    put_request = {"method": "put", "id": 1, "names": ["ids"], "num_rows": 1}
    sample = np.zeros(5, np.int64).tobytes()
    bad: list[list[bytes]] = [
        [json.dumps(get_request).encode()],  # of a client that is not connected
        [b""],
        [b"\x80\x04pickle"],
        [b"[]"],
        [b'{"method": "put"}'],
        [json.dumps({"method": ["put"], "id": 1}).encode()],
        [json.dumps({"method": "explode", "id": 1}).encode()],
        [json.dumps(put_request | {"location": None}).encode(), b"123"],
        [json.dumps(put_request | {"location": None}).encode(), sample],
        [json.dumps(put_request | {"location": ["../../etc/passwd", 0, 9]}).encode(), sample],
        [json.dumps(put_request | {"location": [f"{0:016x}-1", 0, 9]}).encode(), sample],
        [json.dumps({"method": "commit", "id": 1, "lease": "x"}).encode()],
        [json.dumps({"method": "get", "id": 1, "consumer": [], "request": 3}).encode()],
        [json.dumps(get_request | {"request": [1, None, [3]]}).encode()],
    ]
    for frames in bad:
        assert "error" in send(frames), frames
    client_id = send([connect])["client_id"]
    assert send([connect])["client_id"] == client_id
    own = json.dumps(put_request | {"location": [f"{client_id}-1", 0, 9]}).encode()  # there is no such file
    for frames in (*bad[1:], [own, sample]):
        assert "error" in send(frames), frames
    connection.close()
    put(producer, 3)
    assert numbers(get(producer)) == [3]


def test_rows_of_a_reply_that_came_too_late_go_to_another_client(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class SlowStream(SampleStream):
        def free_unused(self) -> None:
            assert may_reply.wait(60.0)
            super().free_unused()

    may_reply = threading.Event()
    may_reply.set()
    with serving(folder, kind=SlowStream), StreamClient(folder) as impatient, StreamClient(folder) as other:
        put(impatient, 3)
        may_reply.clear()
        with monkeypatch.context() as limit:
            limit.setattr(impatient, "_timeout_s", 0.05)
            with pytest.raises(RunError, match=r"has not replied to 'get' for 0.05 s: is its process"):
                impatient.get(TASK, wait_s=0.0)
        may_reply.set()
        impatient.status()  # before this reply it receives the lease, and releases it
        assert numbers(get(other)) == [3]


def test_a_folder_may_be_relative_and_the_process_may_change_to_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "stream").mkdir()
    monkeypatch.chdir(folder)
    with serving(Path("stream")), StreamClient(Path("stream")) as client:
        monkeypatch.chdir("/")
        put(client, 3)
        assert numbers(get(client)) == [3]
    assert [*(folder / "stream").iterdir()] == []


def test_an_expired_lease_goes_to_another_client(folder: Path) -> None:
    critic = ConsumerDeclaration("critic", ["ids"], lease_s=0.05)
    with serving(folder, [critic]), StreamClient(folder) as slow, StreamClient(folder) as quick:
        put(slow, 3)
        batch = get(slow, "critic")
        assert numbers(get(quick, "critic")) == [3]
        with pytest.raises(StreamError, match="lease 1 has ended"):
            slow.commit(batch)


def test_a_closed_client_has_no_lease_and_no_pending_get(
    server: StreamServer, producer: StreamClient, client: StreamClient
) -> None:
    """The server gets no event of the connection: a child may have the socket, a remote end has none."""
    put(producer, 3)
    assert numbers(get(client)) == [3]
    client._send("get", {"consumer": TASK, "request": ALL, "commit": None, "wait_s": math.inf})
    connection = client._transport._connection
    kept = os.dup(connection.fileno()) if isinstance(connection, UnixConnection) else None
    client.close()
    wait_until(lambda: server._endpoint.find(client.client_id) == [])
    put(producer, 4)
    assert numbers(get(producer)) == [3, 4]
    assert server._gets == []
    if kept is not None:
        os.close(kept)


def test_a_client_of_a_missing_server_times_out(folder: Path) -> None:
    with pytest.raises(RunError, match=r"no stream server listened at .* for 0.05 s: is its process running"):
        StreamClient(folder, timeout_s=0.05)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux)")
def test_killed_consumers_neither_lose_nor_repeat_groups(folder: Path) -> None:
    """Every group is committed once, although each consumer is killed at a different point."""
    server = StreamProcess("serve", folder)
    assert server.read_line() == "ready"
    producer = StreamClient(folder)
    put(producer, *range(12))
    committed: list[int] = []
    for num_commits in (0, 1, 2):
        consumer = StreamProcess("consume", folder)
        for _ in range(num_commits):
            got = consumer.read_line().split()[1:]
            consumer.proceed()
            assert consumer.read_line() == "committed"
            committed += map(int, got)
        assert consumer.read_line().startswith("got") or len(committed) == 12
        consumer.kill()  # with a batch on lease
    while len(committed) < 12:
        last = get(producer)
        committed += numbers(last)
        producer.commit(last)
    assert sorted(committed) == [*range(12)]
    assert producer.status()["num_rows"] == 0
    producer.close()
    server.kill()


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux)")
def test_producers_and_consumers_killed_at_random_points_leave_a_consistent_stream(folder: Path) -> None:
    """At most the last put of the producer is unconfirmed; no group is consumed twice or never."""
    server = StreamProcess("serve", folder)
    assert server.read_line() == "ready"
    client = StreamClient(folder)
    producer = StreamProcess("produce", folder)
    put_groups = [int(n) for _ in range(300) for n in producer.read_line().split()]
    put_groups += [int(n) for line in producer.kill() for n in line.split()]
    consumed: list[int] = []
    for num_lines in (1, 20):
        pair = [StreamProcess("drain", folder) for _ in range(2)]
        for consumer in pair:
            assert consumer.read_line() == "ready"
        for consumer in pair:
            consumer.proceed()
        for consumer in pair:
            consumed += [int(n) for _ in range(num_lines) for n in consumer.read_line().split()]
        for consumer in pair:
            consumed += [int(n) for line in consumer.kill() for n in line.split()]
    while client.status()["num_rows"]:
        batch = get(client)
        consumed += numbers(batch)
        client.commit(batch)
    assert len({*consumed}) == len(consumed)
    assert 0 <= len({*consumed} - {*put_groups}) <= 3  # one put without a confirmation
    assert len({*put_groups} - {*consumed}) <= 4 * 3  # commits without a confirmation
    assert not [*folder.glob("*-[0-9]")]  # the producer's segments are removed as well
    client.close()
    server.kill()
