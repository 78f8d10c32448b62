"""The server survives every request; rows that a client could not read go to another one."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.strangers import STRANGERS
from tests.stream.processes import TASK
from tests.stream.sample_rows import FIELDS, get, numbers, put

from dora.curve import CurveAddress, CurveConnection
from dora.errors import RunError, StreamError
from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.schema import StreamBatch
from dora.stream.server import StreamServer
from dora.stream.storage import SampleStream, SegmentReader

NAN = math.nan


@pytest.fixture
def send_remote(server: StreamServer) -> Iterator[Callable[..., dict[str, Any]]]:
    """Sends raw frames over TCP and returns the header of the reply."""
    made = CurveConnection(remote_address(server))

    def send(*frames: bytes) -> dict[str, Any]:
        made.send(frames)
        return transport.decode_header([frame.bytes for frame in made.recv(20.0)])

    yield send
    made.close()


def remote_address(server: StreamServer) -> CurveAddress:
    _, address = server.endpoints
    assert isinstance(address, CurveAddress)
    return address


def connect_frame(client_id: str = "f" * 16) -> bytes:
    return json.dumps({"method": "connect", "id": 1, "client_id": client_id}).encode()


@pytest.mark.parametrize("wait_s", [1e9, 1e300, math.inf])
def test_a_wait_may_have_any_length(client: StreamClient, wait_s: float) -> None:
    arguments = {
        "consumer": TASK,
        "request": [1, None, 1, []],
        "inline": not client.shares_memory,
        "wait_s": wait_s,
    }
    client._send("get", arguments, ())
    for _ in range(2):
        assert client.status()["num_rows"] == 0
    put(client, 3)
    assert numbers(get(client, wait_s=wait_s)) == [3]  # the reply to the first request releases its lease


@pytest.mark.parametrize("lease_s", [1e9, 1e300, math.inf])
def test_a_lease_may_have_any_length(client: StreamClient, lease_s: float) -> None:
    client.register_consumer("slow", ["ids"], lease_s=lease_s)
    put(client, 3)
    batch = client.get("slow")
    assert client.status()["num_rows"] == 1
    assert isinstance(batch, StreamBatch)
    client.renew(batch)
    client.commit(batch)


def test_invalid_times_and_sizes_are_refused(
    server: StreamServer, client: StreamClient, send_remote: Callable[..., dict[str, Any]]
) -> None:
    put(client, 3)
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: client.get(TASK, wait_s=NAN), "wait_s = nan: pass a number of seconds"),
        *(
            (lambda s=s: client.register_consumer("x", ["ids"], lease_s=s), "more than 0 s")
            for s in (NAN, 0.0, -1.0)
        ),
        (lambda: client.register_consumer("x", ["ids"], group_size=-1), "sizes at least 0"),
        (lambda: client.fill([], {"reward": np.zeros(0)}), "no rows"),
        (lambda: client.put([], {"reward": np.zeros(0)}), "no rows"),
    ]
    before = client.status()
    for request, fragment in bad:
        with pytest.raises(StreamError, match=fragment):
            request()
    assert "error" not in send_remote(connect_frame())
    fill_frame = json.dumps({"method": "fill", "id": 2, "names": ["ids"], "location": None}).encode()
    assert "no rows" in send_remote(fill_frame, b"", bytes(64))["error"]
    assert client.status() == before


def test_a_deeply_nested_header_is_refused(
    server: StreamServer, client: StreamClient, send_remote: Callable[..., dict[str, Any]]
) -> None:
    deep = b"[" * 200_000
    assert "nested too deeply" in send_remote(deep)["error"]
    client._transport.send([deep])
    with pytest.raises(StreamError, match="nested too deeply"):
        client.status()
    put(client, 3)


def test_the_size_of_a_remote_message_is_that_of_all_frames(
    server: StreamServer,
    send_remote: Callable[..., dict[str, Any]],
    client: StreamClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 1000)
    assert "exceeds the limit of 1000" in send_remote(connect_frame(), *[bytes(800)] * 2)["error"]
    assert "error" not in send_remote(connect_frame(), bytes(800))


@pytest.mark.parametrize("attempt", STRANGERS)
def test_a_remote_client_without_the_key_gets_nothing(
    server: StreamServer, client: StreamClient, attempt: Callable[[CurveAddress], None]
) -> None:
    put(client, 3)
    before = client.status()
    attempt(remote_address(server))
    with StreamClient(server.endpoints[1]) as another:
        assert another.status() == before


def test_a_request_before_connect_is_refused(send_remote: Callable[..., dict[str, Any]]) -> None:
    reply = send_remote(json.dumps({"method": "status", "id": 2}).encode())
    assert "not connected, or was evicted" in reply["error"]


def test_socket_and_address_are_readable_by_their_owner_only(server: StreamServer, folder: Path) -> None:
    files = [folder / name for name in ("stream.sock", "remote.json")]
    assert [stat.S_IMODE(file.stat().st_mode) for file in files] == [0o600] * 2
    assert CurveAddress.read(files[1]) == server.endpoints[1]


def test_a_remote_client_detects_the_exit_of_the_server_at_once(folder: Path) -> None:
    server = StreamServer(SampleStream(FIELDS, folder), ["tcp://127.0.0.1:*"])
    thread = server.start()
    with StreamClient(server.endpoints[0], timeout_s=60.0) as client:
        server.stop()
        thread.join()
        for _ in range(2):
            with pytest.raises(RunError, match="is lost: has the process of the stream exited"):
                client.status()


def test_a_client_id_cannot_be_used_twice(
    server: StreamServer, send_remote: Callable[..., dict[str, Any]]
) -> None:
    with StreamClient(server.endpoints[0]) as local:
        local.register_consumer(TASK, ["ids"])
        assert local._writer is not None
        for client_id in (local._writer.owner, server._stream._writer.owner):
            assert "is in use" in send_remote(connect_frame(client_id))["error"]
        put(local, 3)
        assert numbers(get(local)) == [3]


def test_a_remote_consumer_gets_only_the_columns_it_needs(client: StreamClient) -> None:
    client.register_consumer("ids only", ["ids"])
    put(client, 3)
    batch = get(client, "ids only")
    assert numbers(batch) == [3]
    assert ("logprobs" in batch) == client.shares_memory  # shared memory has whole blocks


def test_rows_that_the_server_cannot_read_stay_queued(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> memoryview:
        raise ValueError("the block exceeds its segment")

    with StreamClient(server.endpoints[1]) as client:
        client.register_consumer(TASK, ["ids"])
        put(client, 3)
        with monkeypatch.context() as patch:
            patch.setattr(SampleStream, "view", broken)
            with pytest.raises(StreamError, match="the block exceeds its segment"):
                get(client)
        assert numbers(get(client)) == [3]


def test_rows_that_a_client_cannot_read_go_to_another_one(
    server: StreamServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> memoryview:
        raise KeyboardInterrupt

    with StreamClient(server.endpoints[0]) as client:
        client.register_consumer(TASK, ["ids"])
        put(client, 3)
        with monkeypatch.context() as patch:
            patch.setattr(SegmentReader, "view", broken)
            with pytest.raises(KeyboardInterrupt):
                get(client)
        assert numbers(get(client)) == [3]


def test_a_stopped_server_leaves_no_files(folder: Path) -> None:
    server = StreamServer(SampleStream(FIELDS, folder), [transport.stream_endpoint(folder)])
    thread = server.start()
    client = StreamClient(server.endpoints[0])
    put(client, 3)
    server.stop()
    thread.join()
    assert [*folder.iterdir()] == []
    client.close()
