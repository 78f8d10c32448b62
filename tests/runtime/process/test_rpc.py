"""Messages arrive between the ends of a channel, and end with it; requests are answered or fail in time."""

from __future__ import annotations

import contextlib
import pickle
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import psutil
import pytest
import zmq
from tests.runtime.running import wait_until

from dora import curve
from dora.curve import CurveConnection, CurveServer, read_event
from dora.runtime.process import rpc
from dora.runtime.process.rpc import (
    OUT_OF_BAND_BYTES,
    ChannelAddress,
    CurveChannel,
    RequestClient,
    RequestServer,
)

LOOPBACK = "127.0.0.1"


@pytest.fixture
def listening() -> Iterator[tuple[CurveChannel, ChannelAddress]]:
    """The driver's end, before its worker has connected."""
    server = CurveServer()
    channel, address = CurveChannel.listen(server, LOOPBACK)
    yield channel, address
    channel.close()
    server.close()


@pytest.fixture
def channels(listening: tuple[CurveChannel, ChannelAddress]) -> Iterator[tuple[CurveChannel, CurveChannel]]:
    """The driver's end and the worker's."""
    here, address = listening
    with closing(CurveChannel.connect(address)) as there:
        there.send("hello")
        assert here.recv() == "hello"
        yield here, there


@pytest.fixture
def echo() -> Iterator[RequestServer]:
    """Returns each request; an exception is raised."""

    def handle(request: Any) -> Any:
        if isinstance(request, Exception):
            raise request
        return request

    with closing(RequestServer(LOOPBACK, handle)) as server:
        yield server


def test_messages_arrive_in_order_in_both_directions(channels: tuple[CurveChannel, CurveChannel]) -> None:
    here, there = channels
    for number in range(3):
        here.send(["request", number])
        there.send(["reply", number])
    assert [there.recv() for _ in range(3)] == [["request", 0], ["request", 1], ["request", 2]]
    assert [here.recv() for _ in range(3)] == [["reply", 0], ["reply", 1], ["reply", 2]]


def test_a_message_may_be_longer_than_the_socket_buffers(channels: tuple[CurveChannel, CurveChannel]) -> None:
    here, there = channels
    here.send(b"x" * 20_000_000)
    assert there.recv() == b"x" * 20_000_000


def test_a_message_may_be_longer_than_what_a_socket_receives_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the unfinished outputs of a lost engine, or the routes of many responses."""
    monkeypatch.setattr(curve, "MAX_FRAME_BYTES", 2**20)
    monkeypatch.setattr(rpc, "FRAME_BYTES", 2**18)
    content = np.random.default_rng(0).bytes(3_000_000)
    with closing(CurveServer()) as server, contextlib.ExitStack() as ends:
        here, address = CurveChannel.listen(server, LOOPBACK)
        ends.enter_context(closing(here))
        there = ends.enter_context(closing(CurveChannel.connect(address)))
        for sender, receiver in ((there, here), (here, there)):
            for message in ("hello", content, content[:-1]):
                sender.send(message)
                assert receiver.recv() == message


def test_any_thread_may_send_while_another_receives(channels: tuple[CurveChannel, CurveChannel]) -> None:
    here, there = channels

    def send(sender: int) -> None:
        for number in range(200):
            there.send((sender, number))

    threads = [threading.Thread(target=send, args=(sender,)) for sender in range(4)]
    for thread in threads:
        thread.start()
    found = [here.recv() for _ in range(800)]
    for thread in threads:
        thread.join()
    for sender in range(4):
        assert [number for thread, number in found if thread == sender] == [*range(200)]


def test_a_sender_waits_for_a_receiver_that_does_not_read(
    channels: tuple[CurveChannel, CurveChannel],
) -> None:
    here, there = channels
    content, num_sent = bytes(100_000), 0

    def send() -> None:
        nonlocal num_sent
        for _ in range(4000):
            there.send(content)
            num_sent += 1

    sender = threading.Thread(target=send)
    sender.start()
    sender.join(timeout=1.0)
    assert num_sent < 4000, "400 MB do not fit into the buffers"
    for _ in range(4000):
        assert len(here.recv()) == len(content)
    sender.join()


@pytest.mark.parametrize("closes", ["driver", "worker"])
def test_recv_returns_what_was_sent_and_raises_once_the_other_end_is_closed(
    channels: tuple[CurveChannel, CurveChannel], closes: str
) -> None:
    closing_end, other = channels if closes == "driver" else channels[::-1]
    for number in range(100):
        closing_end.send(number)
    closing_end.close()
    assert [other.recv() for _ in range(100)] == [*range(100)]
    for _ in range(2):
        with pytest.raises(EOFError):
            other.recv()
    with pytest.raises(OSError, match="the other end has closed the connection"):
        other.send("late")


def test_close_ends_a_recv_and_a_send_in_other_threads(
    listening: tuple[CurveChannel, ChannelAddress],
) -> None:
    """The worker has never connected."""
    channel, _ = listening
    errors: list[type[BaseException]] = []

    def attempt(call: Any, *args: object) -> None:
        try:
            call(*args)
        except (EOFError, OSError) as error:
            errors.append(type(error))

    threads = [
        threading.Thread(target=attempt, args=call) for call in ((channel.recv,), (channel.send, "message"))
    ]
    for thread in threads:
        thread.start()
    channel.close()
    for thread in threads:
        thread.join(timeout=10.0)
    assert set(errors) == {EOFError, ConnectionResetError}


_WORKER = """
import os, pickle, signal, sys
from dora.runtime.process.rpc import CurveChannel
channel = CurveChannel.connect(pickle.load(sys.stdin.buffer))
channel.send("hello")
channel.recv()
channel.send("last")
channel.recv()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_crash_of_a_worker_is_detected_although_strangers_come_and_go(
    listening: tuple[CurveChannel, ChannelAddress],
) -> None:
    here, address = listening
    port = int(address.to_send.endpoint.rpartition(":")[2])
    with subprocess.Popen([sys.executable, "-c", _WORKER], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(address))
        process.stdin.close()
        assert here.recv() == "hello"
        for _ in range(5):
            with socket.create_connection((LOOPBACK, port)) as stranger:
                stranger.sendall(b"garbage" * 100)
        here.send("go on")
        assert here.recv() == "last"
        here.send("crash")
        with pytest.raises(EOFError):
            here.recv()
    assert process.returncode == -9


_STRANGER = """
import socket, sys, threading
port = int(sys.stdin.readline())
strangers = [socket.create_connection(("127.0.0.1", port)) for _ in range(10)]
print([len(stranger.recv(1)) for stranger in strangers], flush=True)
threading.Event().wait()
"""


def test_the_crash_of_a_worker_is_detected_although_a_stranger_has_its_file_descriptor(
    listening: tuple[CurveChannel, ChannelAddress],
) -> None:
    here, address = listening
    port = int(address.to_send.endpoint.rpartition(":")[2])
    with start(_STRANGER) as strangers, start(_WORKER) as worker:
        write(worker, pickle.dumps(address))
        assert here.recv() == "hello"
        worker.kill()
        worker.wait()
        wait_until(lambda: not connections_at(port))
        write(strangers, f"{port}\n".encode())
        assert strangers.stdout is not None
        assert strangers.stdout.readline() == f"{[1] * 10}\n".encode(), "they are accepted"
        while here._monitor.poll(500):  # all events, in the order in which `recv` reads them
            is_lost = here._is_peer_lost(*read_event(here._monitor))
        strangers.kill()
        assert here._peer_descriptor in here._descriptors, "a stranger has it"
        assert is_lost
        with pytest.raises(EOFError):
            here.recv()


def start(program: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def write(process: subprocess.Popen[bytes], content: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(content)
    process.stdin.close()


def connections_at(port: int) -> list[Any]:
    """The connections that this process has accepted at a port."""
    found = psutil.Process().net_connections("tcp")
    return [each for each in found if each.laddr.port == port and each.status != psutil.CONN_LISTEN]


def test_the_last_message_of_a_process_that_exits_arrives(
    listening: tuple[CurveChannel, ChannelAddress],
) -> None:
    here, address = listening
    program = _WORKER.partition("channel.recv()")[0] + "channel.close()"
    subprocess.run([sys.executable, "-c", program], input=pickle.dumps(address), check=True, timeout=60)
    assert here.recv() == "hello"


_FAILING_WORKER = """
import pickle, sys, threading
from dora.runtime.process.rpc import CurveChannel
from dora.runtime.process.worker_process import run_target

def fail(outbox, inbox, spec):
    outbox.send(bytes(20_000_000))
    raise ValueError("a reason")

channel = CurveChannel.connect(pickle.load(sys.stdin.buffer))
channel.send("hello")
run_target(channel, fail, None)
channel.close()
threading.Event().wait()  # as an actor, which the driver kills
"""


def test_the_traceback_of_a_worker_arrives_after_what_it_has_sent_before(
    listening: tuple[CurveChannel, ChannelAddress],
) -> None:
    here, address = listening
    with subprocess.Popen([sys.executable, "-c", _FAILING_WORKER], stdin=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(address))
        process.stdin.close()
        try:
            assert here.recv() == "hello"
            assert len(here.recv()[0]) == 20_000_000
            (crashed,) = here.recv()
            assert "ValueError: a reason" in crashed.traceback
            with pytest.raises(EOFError):
                here.recv()
        finally:
            process.kill()


_CLEANING_WORKER = """
import pickle, sys, threading
from dora.runtime.process.rpc import CurveChannel
from dora.runtime.process.worker_process import run_target

def compute(outbox, inbox, spec):
    outbox.send("ready")
    threading.Event().wait()

channel = CurveChannel.connect(pickle.load(sys.stdin.buffer))
run_target(channel, compute, None, clean_up=lambda: print("cleaned up", flush=True))
"""


class NeverUnpickled:
    """As a message of another version of DORA-RL."""

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("not a number",)


@pytest.mark.parametrize("is_readable", [True, False])
def test_a_worker_whose_driver_has_exited_or_has_another_version_cleans_up(
    listening: tuple[CurveChannel, ChannelAddress], is_readable: bool
) -> None:
    here, address = listening
    command = [sys.executable, "-c", _CLEANING_WORKER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        process.stdin.write(pickle.dumps(address))
        process.stdin.close()
        assert here.recv() == ("ready",)
        if is_readable:
            here.close()
        else:
            here.send(NeverUnpickled())
        assert process.stdout is not None
        assert process.stdout.read() == b"cleaned up\n"
    assert process.returncode == (0 if is_readable else 1)


def test_large_arrays_of_a_reply_arrive_unchanged_and_are_frames_of_their_own(echo: RequestServer) -> None:
    blocks = np.random.default_rng(0).integers(0, 2**63, 3 * OUT_OF_BAND_BYTES // 8).reshape(8, -1)
    message = {"small": np.arange(3), "large": [blocks, blocks + 1], "transposed": blocks.T}
    with closing(RequestClient(echo.address, 20.0)) as client:
        found = client.call(message)
        np.testing.assert_array_equal(found["small"], message["small"])
        np.testing.assert_array_equal(found["transposed"], blocks.T)
        for array, expected in zip(found["large"], message["large"], strict=True):  # type: ignore[call-overload]
            np.testing.assert_array_equal(array, expected)


def test_a_server_answers_many_clients_at_one_address(echo: RequestServer) -> None:
    clients = [RequestClient(echo.address, 20.0) for _ in range(20)]
    for number, client in enumerate(clients):
        assert client.call(number) == number
    clients[0].close()
    assert [client.call(number) for number, client in enumerate(clients[1:])] == [*range(19)]
    for client in clients:
        client.close()


def test_a_request_that_fails_has_its_error_and_the_client_stays_usable(echo: RequestServer) -> None:
    with closing(RequestClient(echo.address, 20.0)) as client:
        with pytest.raises(OSError, match="IndexError: no such block"):
            client.call(IndexError("no such block"))
        assert client.is_usable
        assert client.call("next") == "next"


def test_a_client_without_a_reply_in_time_is_not_usable() -> None:
    """A late reply would be taken for that of the next request."""
    may_reply = threading.Event()

    def wait(request: object) -> object:
        may_reply.wait(20.0)
        return request

    with (
        closing(RequestServer(LOOPBACK, wait)) as server,
        closing(RequestClient(server.address, 1.0)) as client,
    ):
        with pytest.raises(TimeoutError):
            client.call("first")
        assert not client.is_usable
        with pytest.raises(OSError, match="has failed before"):
            client.call("second")
        may_reply.set()


def test_a_suspended_server_is_waited_for_as_long_as_for_a_reply() -> None:
    """An engine waits for the KV of another one between two decode steps, also for the connection."""
    with socket.create_server((LOOPBACK, 0)) as silent, closing(CurveServer()) as server:
        bound, address = server.bind(zmq.ROUTER, f"tcp://{LOOPBACK}:*")
        bound.close()
        endpoint = f"tcp://{LOOPBACK}:{silent.getsockname()[1]}"
        with pytest.raises(TimeoutError, match=r"has not replied for 0\.2 s"):
            RequestClient(replace(address, endpoint=endpoint), 0.2)


def test_a_client_detects_that_its_server_is_closed(echo: RequestServer) -> None:
    client = RequestClient(echo.address, 60.0)
    echo.close()
    with pytest.raises(ConnectionResetError, match="is lost"):
        client.call("anything")
    assert not client.is_usable
    with pytest.raises(ConnectionRefusedError, match="cannot be reached"):
        RequestClient(echo.address, 60.0)


def test_a_request_that_cannot_be_unpickled_has_an_error(echo: RequestServer) -> None:
    connection = CurveConnection(echo.address)
    connection.send([b"not a pickle"])
    connection.recv(20.0)
    connection.close()
    with closing(RequestClient(echo.address, 20.0)) as client:
        assert client.call(1) == 1


@contextlib.contextmanager
def no_free_file_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_no_file_descriptor_for_a_channel_or_a_client_is_an_os_error(echo: RequestServer) -> None:
    with closing(CurveServer()) as server, no_free_file_descriptors():
        with pytest.raises(OSError, match="Too many open files"):
            CurveChannel.listen(server, LOOPBACK)
        with pytest.raises(OSError, match="Too many open files"):
            RequestClient(echo.address, 20.0)


_FEW_DESCRIPTORS = """
import os, resource, sys
from dora.curve import CurveServer
from dora.runtime.process.rpc import CurveChannel

server = CurveServer()
last = 200
while (opened := os.open(os.devnull, os.O_RDONLY)) < last:
    pass
os.close(opened)
_, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (last + int(sys.argv[1]), hard_limit))
try:
    CurveChannel.listen(server, "127.0.0.1")
except OSError as error:
    server.close()
    print(error)
"""


@pytest.mark.parametrize("num_free", [1, 4])
def test_a_channel_without_enough_file_descriptors_neither_ends_nor_stops_the_driver(num_free: int) -> None:
    """libzmq aborts the process at some places, and a server waits for a socket that was left open."""
    ended = subprocess.run(
        [sys.executable, "-c", _FEW_DESCRIPTORS, str(num_free)], capture_output=True, text=True, timeout=60
    )
    assert ended.stdout.endswith("Too many open files\n"), ended


def test_clients_are_accepted_once_there_are_file_descriptors_again(echo: RequestServer) -> None:
    port = int(echo.address.endpoint.rpartition(":")[2])
    with socket.socket() as first, socket.socket() as second:
        with no_free_file_descriptors():
            for connection in (first, second):
                connection.settimeout(20.0)
                connection.connect((LOOPBACK, port))
            time.sleep(0.05)  # the server fails to accept both
        for connection in (first, second):
            assert connection.recv(1) == b"\xff", "the first byte of ZeroMQ's greeting"
