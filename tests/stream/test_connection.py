"""Messages over a Unix socket arrive whole; nobody waits for a peer that does not listen, or is gone."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stream.peers import TASK
from tests.stream.rows import FIELDS, columns, numbers, row

from dora.errors import RunError, StreamError
from dora.stream import connection, wire
from dora.stream.batch import Batch
from dora.stream.client import StreamClient
from dora.stream.connection import Connection
from dora.stream.server import Server
from dora.stream.stream import Stream


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name, for that of a socket may have 107 letters."""
    made = Path(tempfile.mkdtemp(prefix="dora-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def server(folder: Path) -> Iterator[Server]:
    made = Server(Stream(FIELDS, folder), [wire.endpoint_of(folder)])
    thread = made.start()
    yield made
    made.stop()
    thread.join()


@pytest.fixture
def client(server: Server) -> Iterator[StreamClient]:
    with StreamClient(server.endpoints[0], timeout_s=20.0) as made:
        made.declare(TASK, ["ids"])
        yield made


def raw(server: Server) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(wire.path_of(server.endpoints[0])))
    made.settimeout(20.0)
    return made


class Sent(socket.socket):
    """Keeps what is sent."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX)
        self.data = b""

    def send(self, data: bytes | bytearray, flags: int = 0) -> int:  # type: ignore[override]
        self.data += data[:7]
        return len(data[:7])


@given(st.lists(st.lists(st.binary(max_size=9), max_size=3), max_size=4), st.integers(1, 30))
def test_messages_arrive_whole_however_they_are_cut(messages: list[list[bytes]], num_bytes: int) -> None:
    with Sent() as sent:
        for message in messages:
            Connection(sent).send(message)
        near, far = socket.socketpair()
        with near, far:
            other, found = Connection(far), []
            for at in range(0, len(sent.data), num_bytes):
                near.sendall(sent.data[at : at + num_bytes])
                other.hear()
                while (message_ := other.next()) is not None:
                    found.append(message_)
    assert found == messages


def test_what_a_peer_does_not_take_waits_until_it_does() -> None:
    near, far = socket.socketpair()
    with near, far:
        one, other = Connection(near), Connection(far)
        one.wait_at_most(0.0)
        one.send([b"x" * (1 << 22)])
        assert one.is_clogged
        frames = None
        while frames is None:
            other.hear()
            frames = other.next()
            one.flush()
        assert (frames, one.is_clogged) == ([b"x" * (1 << 22)], False)


def test_a_client_that_does_not_listen_holds_up_nobody(server: Server, client: StreamClient) -> None:
    with raw(server) as deaf:
        deaf.settimeout(0.0)
        question = json.dumps({"n": 1, "do": "x" * 5000}).encode()
        framed = struct.pack("<2Q", 1, len(question)) + question
        while select.select([], [deaf], [], 0.2)[1]:
            deaf.send(framed)
        assert client.status()["num_rows"] == 0


@pytest.mark.parametrize("sizes", [(1, 2**40), (2**40,), (2**64 - 1,), (2, 2**63, 2**63)])
def test_a_message_that_is_too_long_is_answered_and_its_client_sent_away(
    server: Server, client: StreamClient, sizes: tuple[int, ...]
) -> None:
    with raw(server) as greedy:
        greedy.sendall(struct.pack(f"<{len(sizes)}Q", *sizes))
        answer = Connection(greedy)
        answer.hear()
        frames = answer.next()
        assert frames is not None
        assert "are the most: put fewer rows at a time" in wire.header_of(frames)["error"]
        with pytest.raises(ConnectionResetError):
            answer.hear()
    assert client.status()["num_rows"] == 0


def test_a_client_does_not_send_what_is_too_long(
    client: StreamClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "MAX_MESSAGE_BYTES", 100)
    with pytest.raises(StreamError, match="a message of 400 bytes, and 100 are the most"):
        client.put([row(n) for n in range(10)], columns(range(10)))
    monkeypatch.undo()
    assert client.put([row(0)], columns([0])) == range(1)


def test_the_end_of_a_storage_is_noticed_at_once(folder: Path) -> None:
    server = Server(Stream(FIELDS, folder), [wire.endpoint_of(folder)])
    thread = server.start()
    client = StreamClient(server.endpoints[0])
    server.stop()
    thread.join()
    with pytest.raises(RunError, match=r"is gone .*: has its process ended"):
        client.status()
    client.close()


_FORKS = """
import os, sys, time
from pathlib import Path
from dora.stream.client import StreamClient
client = StreamClient(sys.argv[1])
client.get(sys.argv[2])
if os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the death of a process is seen on Linux only")
def test_a_dead_process_gives_back_its_rows_though_a_child_has_its_socket(
    server: Server, client: StreamClient
) -> None:
    client.put([row(3)], columns([3]))
    command = [sys.executable, "-c", _FORKS, server.endpoints[0], TASK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        batch = client.get(TASK)
        os.killpg(process.pid, signal.SIGKILL)
    assert isinstance(batch, Batch)
    assert numbers(batch) == [3]
