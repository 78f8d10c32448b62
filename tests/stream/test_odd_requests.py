"""Whatever is asked, the storage goes on; and rows that could not be handed out are handed to the next."""

from __future__ import annotations

import json
import math
import shutil
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zmq
from tests.stream.peers import TASK
from tests.stream.rows import FIELDS, columns, numbers, row

from dora.errors import NoRoomError, StreamError
from dora.stream import connection, wire
from dora.stream.batch import Batch
from dora.stream.client import StreamClient
from dora.stream.segments import Arena, Reader
from dora.stream.server import Server
from dora.stream.stream import Stream

NAN = math.nan


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name, for that of a socket may have 107 letters."""
    made = Path(tempfile.mkdtemp(prefix="dora-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    made = Server(Stream(FIELDS, folder, max_rows=5), [wire.endpoint_of(folder), "tcp://127.0.0.1:*"])
    thread = made.start()
    yield made
    made.stop()
    thread.join()


@pytest.fixture(params=["near", "far"])
def client(
    server: Server, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[StreamClient]:
    """Both on this machine, though the far one does not know it."""
    if request.param == "far":
        monkeypatch.setattr(wire, "shares_memory", lambda *_: False)
    endpoint = server.endpoints[request.param == "far"]
    with StreamClient(endpoint, timeout_s=20.0, token=server.token) as made:
        made.declare(TASK, ["ids"])
        yield made


@pytest.fixture
def far(server: Server) -> Iterator[Callable[..., dict[str, Any]]]:
    """Asks in its own words, and says what it heard."""
    made: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    made.connect(server.endpoints[1])
    made.setsockopt(zmq.RCVTIMEO, 20_000)

    def ask(*frames: bytes) -> dict[str, Any]:
        made.send_multipart(frames)
        return wire.header_of(made.recv_multipart())

    yield ask
    made.close(linger=0)


def hello(server: Server, owner: str = "f" * 16) -> bytes:
    return json.dumps({"do": "hello", "n": 1, "owner": owner, "token": server.token}).encode()


def put(client: StreamClient, *which: int, wait_s: float = 10.0) -> None:
    assert isinstance(client.put([row(n) for n in which], columns(which), wait_s), range)


def get(client: StreamClient, wait_s: float = 10.0) -> Batch:
    batch = client.get(TASK, wait_s=wait_s)
    assert isinstance(batch, Batch)
    return batch


@pytest.mark.parametrize("wait_s", [1e9, 1e300, math.inf])
def test_a_wait_may_be_as_long_as_it_likes(client: StreamClient, wait_s: float) -> None:
    waits = {"consumer": TASK, "want": [1, None, 1, []], "inline": not client.shares_memory, "wait_s": wait_s}
    client._send("get", waits, ())
    for _ in range(2):
        assert client.status()["num_rows"] == 0
    put(client, 3, wait_s=wait_s)
    assert numbers(get(client, wait_s)) == [3]  # the first answer came too late, and its lease was given back


@pytest.mark.parametrize("lease_s", [1e9, 1e300, math.inf])
def test_a_lease_may_be_as_long_as_it_likes(client: StreamClient, lease_s: float) -> None:
    client.declare("slow", ["ids"], lease_s=lease_s)
    put(client, 3)
    batch = client.get("slow")
    assert client.status()["num_rows"] == 1
    assert isinstance(batch, Batch)
    client.renew(batch)
    client.commit(batch)


def test_what_is_no_time_and_no_size_is_refused(
    server: Server, client: StreamClient, far: Callable[..., dict[str, Any]]
) -> None:
    put(client, 3)
    bad: list[tuple[Callable[[], Any], str]] = [
        (lambda: client.get(TASK, wait_s=NAN), "wait_s = nan: give a number of seconds"),
        (lambda: put(client, 4, wait_s=NAN), "wait_s = nan"),
        *((lambda s=s: client.declare("x", ["ids"], lease_s=s), "more than 0 s") for s in (NAN, 0.0, -1.0)),
        (lambda: client.declare("x", ["ids"], group_size=-1), "sizes are at least 0"),
        (lambda: client.fill([], {"reward": np.zeros(0)}), "no row was given"),
        (lambda: client.put([], {"reward": np.zeros(0)}), "no row was given"),
    ]
    before = client.status()
    for request, fragment in bad:
        with pytest.raises(StreamError, match=fragment):
            request()
    assert "error" not in far(hello(server))
    names = {"names": ["ids"], "place": None, "wait_s": NAN}
    assert "nan" in far(json.dumps({"do": "put", "n": 2} | names).encode(), bytes(40), bytes(64))["error"]
    assert "no row" in far(json.dumps({"do": "fill", "n": 3} | names).encode(), b"", bytes(64))["error"]
    assert client.status() == before


def test_a_header_that_is_nested_for_ever_is_refused(
    server: Server, client: StreamClient, far: Callable[..., dict[str, Any]]
) -> None:
    deep = b"[" * 200_000
    assert "nested too deeply" in far(deep)["error"]
    client._link.send([deep])
    with pytest.raises(StreamError, match="nested too deeply"):
        client.status()
    put(client, 3)


def test_a_far_message_of_many_frames_is_as_long_as_all_of_them(
    server: Server,
    far: Callable[..., dict[str, Any]],
    client: StreamClient,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 1000)
    assert "1000 are the most" in far(hello(server), *[bytes(800)] * 2)["error"]
    assert "error" not in far(hello(server), bytes(800))


@pytest.mark.parametrize("token", [None, "", "0" * 32, "\u00e9", 7])
def test_who_comes_from_far_without_the_token_is_told_nothing(
    server: Server, far: Callable[..., dict[str, Any]], token: Any
) -> None:
    given = {} if token is None else {"token": token}
    asked = {"do": "hello", "n": 1, "owner": "f" * 16, **given}
    assert far(json.dumps(asked).encode()).keys() <= {"n", "error", "is_full"}
    assert "does not know this client" in far(json.dumps({"do": "status", "n": 2}).encode())["error"]
    with pytest.raises(StreamError, match="token"):
        StreamClient(server.endpoints[1], token="0" * 32)
    with StreamClient(server.endpoints[1], token=server.token) as client:
        assert client.status()["num_rows"] == 0


def test_what_leads_to_a_storage_is_its_owners_alone(server: Server, folder: Path) -> None:
    assert [stat.S_IMODE((folder / name).stat().st_mode) for name in ("stream.sock", "token")] == [0o600] * 2
    assert (folder / "token").read_text() == server.token


def test_nobody_is_taken_for_somebody_else(server: Server, far: Callable[..., dict[str, Any]]) -> None:
    with StreamClient(server.endpoints[0]) as near:
        near.declare(TASK, ["ids"])
        assert near._arena is not None
        storage = server._stream._storage
        assert isinstance(storage, Arena)
        for owner in (near._arena.owner, storage.owner):
            assert "is in use" in far(hello(server, owner))["error"]
        put(near, 3)
        assert numbers(get(near)) == [3]


def test_a_far_consumer_is_sent_the_columns_it_needs_and_no_others(client: StreamClient) -> None:
    put(client, 3)
    batch = get(client)
    assert numbers(batch) == [3]
    assert ("logprobs" in batch) == client.shares_memory  # there it costs nothing


def test_rows_that_the_storage_cannot_hand_out_stay_in_line(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> memoryview:
        raise ValueError("it ends behind its segment")

    monkeypatch.setattr(wire, "shares_memory", lambda *_: False)
    with StreamClient(server.endpoints[1], token=server.token) as client:
        client.declare(TASK, ["ids"])
        put(client, 3)
        with monkeypatch.context() as patch:
            patch.setattr(Stream, "view", broken)
            with pytest.raises(StreamError, match="it ends behind its segment"):
                get(client)
        assert client.status()["num_ready"] == {TASK: 1}
        assert numbers(get(client)) == [3]


def test_rows_that_a_client_cannot_read_go_to_the_next(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> memoryview:
        raise KeyboardInterrupt

    with StreamClient(server.endpoints[0]) as client:
        client.declare(TASK, ["ids"])
        put(client, 3)
        with monkeypatch.context() as patch:
            patch.setattr(Reader, "view", broken)
            with pytest.raises(KeyboardInterrupt):
                get(client)
        assert numbers(get(client)) == [3]


def test_a_far_fill_into_a_full_file_system_says_so(
    client: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> Any:
        raise OSError(28, "No space left on device")

    put(client, 3)
    monkeypatch.setattr(Arena, "reserve", full)
    with pytest.raises(NoRoomError, match="No space left on device"):
        client.fill([0], {"reward": np.zeros(1)})
    monkeypatch.undo()
    client.fill([0], {"reward": np.zeros(1)})


def test_a_small_put_does_not_overtake_a_large_one(server: Server, folder: Path) -> None:
    """Not even when one that came between them has waited long enough."""

    def message(header: dict[str, Any], *buffers: bytes) -> bytes:
        frames = [json.dumps(header).encode(), *buffers]
        return struct.pack(f"<{1 + len(frames)}Q", len(frames), *map(len, frames)) + b"".join(frames)

    def put_of(number: int, num_rows: int, wait_s: float) -> bytes:
        rows = np.array([(0, number, k, 0, 1) for k in range(num_rows)], np.int64)
        rewards = np.zeros(num_rows).tobytes()
        header = {"n": number, "do": "put", "names": ["reward"], "place": None, "wait_s": wait_s}
        return message(header, rows.tobytes(), rewards)

    with socket.socket(socket.AF_UNIX) as raw:
        raw.connect(str(wire.path_of(server.endpoints[0])))
        first = message({"n": 0, "do": "hello", "owner": "f" * 16})
        puts = [put_of(1, 3, 9.0), put_of(2, 4, 900.0), put_of(3, 4, 0.0), put_of(4, 1, 900.0)]
        raw.sendall(b"".join((first, *puts, message({"n": 5, "do": "status"}))))
        heard, found = connection.Connection(raw), list[dict[str, Any]]()
        while {header["n"] for header in found} < {0, 1, 3, 5}:
            heard.hear()
            while (frames := heard.next()) is not None:
                found.append(wire.header_of(frames))
    assert {header["n"] for header in found} == {0, 1, 3, 5}


def test_a_storage_that_ends_leaves_nothing_behind(folder: Path) -> None:
    server = Server(Stream(FIELDS, folder), [wire.endpoint_of(folder)])
    thread = server.start()
    client = StreamClient(server.endpoints[0])
    put(client, 3)
    server.stop()
    thread.join()
    assert [*folder.iterdir()] == []
    client.close()
