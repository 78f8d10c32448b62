"""The server survives every request; rows that a client could not read go to another one."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.strangers import STRANGERS
from tests.stream.processes import TASK
from tests.stream.sample_rows import ALL, get, numbers, put, serving

from dora.curve import CurveAddress, CurveConnection
from dora.errors import RunError, StreamError
from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.metadata import ConsumerDeclaration
from dora.stream.server import StreamServer
from dora.stream.storage import SampleStream, SegmentReader


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
    assert server.remote is not None
    return server.remote


CONNECT = json.dumps({"method": "connect", "id": 1}).encode()


@pytest.mark.parametrize("wait_s", [1e9, 1e300, math.inf])
def test_a_wait_may_have_any_length(producer: StreamClient, client: StreamClient, wait_s: float) -> None:
    client._send("get", {"consumer": TASK, "request": ALL, "commit": None, "wait_s": wait_s})
    for _ in range(2):
        assert client.status()["num_rows"] == 0
    put(producer, 3)
    assert numbers(get(client, wait_s=wait_s)) == [3]  # the reply to the first request releases its lease


@pytest.mark.parametrize("lease_s", [1e9, 1e300, math.inf])
def test_a_lease_may_have_any_length(folder: Path, lease_s: float) -> None:
    with serving(folder, [ConsumerDeclaration(TASK, ["ids"], lease_s)]), StreamClient(folder) as client:
        put(client, 3)
        batch = get(client)
        assert client.status()["num_rows"] == 2
        client.commit(batch)
        assert client.status()["num_rows"] == 0


def test_a_deeply_nested_header_is_refused(
    producer: StreamClient, send_remote: Callable[..., dict[str, Any]]
) -> None:
    deep = b"[" * 200_000
    assert "nested too deeply" in send_remote(deep)["error"]
    producer._transport.send([deep])
    with pytest.raises(StreamError, match="nested too deeply"):
        producer.status()
    put(producer, 3)


def test_the_size_of_a_remote_message_is_that_of_all_frames(
    server: StreamServer,
    send_remote: Callable[..., dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "MAX_MESSAGE_BYTES", 1000)
    assert "exceeds the limit of 1000" in send_remote(CONNECT, *[bytes(800)] * 2)["error"]
    assert "error" not in send_remote(CONNECT, bytes(800))


@pytest.mark.parametrize("attempt", STRANGERS)
def test_a_remote_client_without_the_key_gets_nothing(
    server: StreamServer, producer: StreamClient, attempt: Callable[[CurveAddress], None]
) -> None:
    put(producer, 3)
    before = producer.status()
    attempt(remote_address(server))
    with StreamClient(remote_address(server)) as another:
        assert another.status() == before


def test_a_request_before_connect_is_refused(send_remote: Callable[..., dict[str, Any]]) -> None:
    reply = send_remote(json.dumps({"method": "status", "id": 2}).encode())
    assert "not connected, or was evicted" in reply["error"]


def test_the_socket_can_be_used_by_its_owner_only(server: StreamServer, folder: Path) -> None:
    assert stat.S_IMODE(transport.socket_path(folder).stat().st_mode) == 0o600


def test_a_remote_client_detects_the_exit_of_the_server_at_once(folder: Path) -> None:
    with serving(folder) as server:
        client = StreamClient(remote_address(server), timeout_s=60.0)
    for _ in range(2):
        with pytest.raises(RunError, match="is lost: has the process of the stream exited"):
            client.status()
    client.close()


@pytest.mark.parametrize("error", [ValueError, MemoryError])
def test_rows_that_the_server_cannot_read_stay_queued(
    producer: StreamClient,
    new_client: Callable[..., StreamClient],
    monkeypatch: pytest.MonkeyPatch,
    error: type[Exception],
) -> None:
    def broken(*_: Any) -> memoryview:
        raise error("the block is damaged")

    client = new_client(is_local=False)
    put(producer, 3)
    with monkeypatch.context() as patch:
        patch.setattr(SampleStream, "view", broken)
        with pytest.raises(StreamError, match="the block is damaged"):
            get(client)
    assert numbers(get(client)) == [3]


def test_rows_that_a_client_cannot_read_go_to_another_one(
    producer: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> memoryview:
        raise KeyboardInterrupt

    put(producer, 3)
    with monkeypatch.context() as patch:
        patch.setattr(SegmentReader, "view", broken)
        with pytest.raises(KeyboardInterrupt):
            get(producer)
    assert numbers(get(producer)) == [3]


def test_a_stopped_server_leaves_no_files(folder: Path) -> None:
    with serving(folder):
        client = StreamClient(folder)
        put(client, 3)
    assert [*folder.iterdir()] == []
    client.close()
