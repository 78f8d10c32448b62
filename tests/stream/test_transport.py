"""Messages over a Unix socket arrive complete; a client that does not read or has exited blocks no other."""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.stream.processes import TASK
from tests.stream.sample_rows import get, numbers, put, serving

from dora.errors import RunError
from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.transport import UnixConnection


def connect(folder: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.connect(str(transport.socket_path(folder)))
    made.settimeout(20.0)
    return made


class RecordingSocket(socket.socket):
    """Records what is sent, in pieces of at most 7 bytes."""

    def __init__(self) -> None:
        super().__init__(socket.AF_UNIX)
        self.data = b""

    def send(self, data: bytes | bytearray, flags: int = 0) -> int:  # type: ignore[override]
        self.data += data[:7]
        return len(data[:7])


@given(st.lists(st.lists(st.binary(max_size=9), max_size=3), max_size=4), st.integers(1, 30))
def test_messages_arrive_complete_however_they_are_split(messages: list[list[bytes]], num_bytes: int) -> None:
    with RecordingSocket() as sent:
        for message in messages:
            UnixConnection(sent).send(message)
        left, right = socket.socketpair()
        with left, right:
            other, found = UnixConnection(right), []
            for start in range(0, len(sent.data), num_bytes):
                left.sendall(sent.data[start : start + num_bytes])
                other.receive()
                while (message_ := other.next_message()) is not None:
                    found.append(message_)
    assert found == messages


def test_unread_messages_are_sent_later() -> None:
    left, right = socket.socketpair()
    with left, right:
        one, other = UnixConnection(left), UnixConnection(right)
        one.set_timeout(0.0)
        one.send([b"x" * (1 << 22)])
        assert one.has_unsent
        frames = None
        while frames is None:
            other.receive()
            frames = other.next_message()
            one.flush()
        assert (frames, one.has_unsent) == ([b"x" * (1 << 22)], False)


def test_a_client_that_does_not_read_blocks_no_other(folder: Path, producer: StreamClient) -> None:
    with connect(folder) as unread:
        unread.settimeout(0.0)
        request = json.dumps({"id": 1, "method": "x" * 5000}).encode()
        framed = struct.pack("<2Q", 1, len(request)) + request
        while select.select([], [unread], [], 0.2)[1]:
            unread.send(framed)
        assert producer.status()["num_rows"] == 0


@pytest.mark.parametrize("sizes", [(1, 2**40), (2**40,), (2**64 - 1,), (2, 2**63, 2**63)])
def test_a_message_that_is_too_long_gets_an_error_and_its_client_is_disconnected(
    folder: Path, producer: StreamClient, sizes: tuple[int, ...]
) -> None:
    with connect(folder) as sender:
        sender.sendall(struct.pack(f"<{len(sizes)}Q", *sizes))
        connection = UnixConnection(sender)
        connection.receive()
        frames = connection.next_message()
        assert frames is not None
        assert "exceeds the limit of" in transport.decode_header(frames)["error"]
        with pytest.raises(ConnectionResetError):
            connection.receive()
    assert producer.status()["num_rows"] == 0


def test_the_exit_of_a_server_is_detected_at_once(folder: Path) -> None:
    with serving(folder):
        client = StreamClient(folder)
    with pytest.raises(RunError, match=r"is lost .*: has its process exited"):
        client.status()
    client.close()


_FORKS = """
import os, sys, time
from pathlib import Path
from dora.stream.client import StreamClient
client = StreamClient(Path(sys.argv[1]))
client.get(sys.argv[2])
if os.fork() == 0:
    time.sleep(60)
print(os.getpid(), flush=True)
time.sleep(60)
"""


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="needs pidfd_open (Linux)")
def test_a_killed_process_releases_its_rows_although_a_child_has_its_socket(
    folder: Path, producer: StreamClient
) -> None:
    put(producer, 3)
    command = [sys.executable, "-c", _FORKS, str(folder), TASK]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
        batch = get(producer)
        os.killpg(process.pid, signal.SIGKILL)
    assert numbers(batch) == [3]
