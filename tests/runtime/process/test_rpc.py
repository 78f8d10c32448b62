"""Authenticated channels: messages arrive, and nothing without a valid MAC is unpickled."""

from __future__ import annotations

import contextlib
import queue
import resource
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dora.runtime.process import rpc
from dora.runtime.process.rpc import (
    MAX_HELLO_BYTES,
    NONCE_BYTES,
    AuthenticatedChannel,
    ChannelAddress,
    Listener,
    connect,
    derive_channel_key,
)

LOOPBACK = "127.0.0.1"


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


@pytest.fixture
def listener() -> Iterator[Listener]:
    made = Listener(LOOPBACK)
    yield made
    made.close()


@pytest.fixture
def channels(listener: Listener) -> Iterator[tuple[AuthenticatedChannel, AuthenticatedChannel]]:
    """The listener's end and the caller's end."""
    connected: queue.SimpleQueue[tuple[AuthenticatedChannel, object]] = queue.SimpleQueue()
    address = listener.expect(lambda channel, hello: connected.put((channel, hello)))
    caller = connect(address, "hello")
    here, hello = connected.get(timeout=10)
    assert hello == "hello"
    yield here, caller
    here.close()
    caller.close()


def expect(listener: Listener, hellos: queue.SimpleQueue[object], *, once: bool = True) -> ChannelAddress:
    """Collect the hello of each caller, and close its channel."""

    def on_connect(channel: AuthenticatedChannel, hello: object) -> None:
        channel.close()
        hellos.put(hello)

    return listener.expect(on_connect, once=once)


def open_socket(address: ChannelAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=10)


def exchange_nonces(address: ChannelAddress) -> tuple[socket.socket, bytes]:
    """A connection that has sent the public name, and the key of its channel."""
    connection, nonce = open_socket(address), bytes(NONCE_BYTES)
    connection.sendall(address.name + nonce)
    return connection, derive_channel_key(address.key, nonce, rpc.recv_exactly(connection, NONCE_BYTES))


def is_closed_by_peer(connection: socket.socket) -> bool:
    """Whether the other end closes the connection without sending anything."""
    with connection:
        try:
            return connection.recv(1) == b""
        except ConnectionResetError:
            return True


def test_messages_arrive_in_order_in_both_directions(
    channels: tuple[AuthenticatedChannel, AuthenticatedChannel],
) -> None:
    here, there = channels
    for number in range(3):
        here.send(["request", number])
        there.send(["reply", number])
    assert [there.recv() for _ in range(3)] == [["request", 0], ["request", 1], ["request", 2]]
    assert [here.recv() for _ in range(3)] == [["reply", 0], ["reply", 1], ["reply", 2]]


def test_a_message_may_be_longer_than_the_socket_buffers(
    channels: tuple[AuthenticatedChannel, AuthenticatedChannel],
) -> None:
    here, there = channels
    sender = threading.Thread(target=there.send, args=(b"x" * 20_000_000,))
    sender.start()
    assert here.recv() == b"x" * 20_000_000
    sender.join()


def test_recv_raises_when_the_other_end_closes(
    channels: tuple[AuthenticatedChannel, AuthenticatedChannel],
) -> None:
    here, there = channels
    there.close()
    with pytest.raises(EOFError):
        here.recv()


class RecordingSocket:
    """Stands in for a socket and keeps what is sent."""

    def __init__(self) -> None:
        self.sent = bytearray()

    def setsockopt(self, *_: int) -> None:
        pass

    def sendall(self, content: bytes) -> None:
        self.sent += content


def encode(key: bytes, messages: list[object], *, is_listener: bool = False) -> bytearray:
    """The bytes of the last of these messages, sent in this order."""
    recording = RecordingSocket()
    channel = AuthenticatedChannel(recording, key, is_listener=is_listener)  # type: ignore[arg-type]
    for message in messages:
        recording.sent.clear()
        channel.send(message)
    return recording.sent


@pytest.mark.parametrize(
    "wrong",
    ["another key", "another connection", "other direction", "replayed", "wrong number", "flipped bit"],
)
def test_a_message_with_a_wrong_mac_is_never_unpickled(
    listener: Listener, tmp_path: Path, wrong: str
) -> None:
    connected: queue.SimpleQueue[AuthenticatedChannel] = queue.SimpleQueue()
    address, trap = listener.expect(lambda channel, _: connected.put(channel)), tmp_path / "sprung"
    connection, key = exchange_nonces(address)
    with connection:
        connection.sendall(encode(key, ["hello"]))
        forged = {
            "another key": lambda: encode(bytes(32), ["hello", Trap(trap)]),
            "another connection": lambda: encode(
                derive_channel_key(address.key, bytes(16), bytes(16)), ["hello", Trap(trap)]
            ),
            "other direction": lambda: encode(key, ["hello", Trap(trap)], is_listener=True),
            "replayed": lambda: encode(key, [Trap(trap)]),
            "wrong number": lambda: encode(key, ["hello", "one", Trap(trap)]),
            "flipped bit": lambda: encode(key, ["hello", Trap(trap)]),
        }[wrong]()
        forged[-1] ^= wrong == "flipped bit"
        connection.sendall(forged)
        here = connected.get(timeout=10)
        with pytest.raises(OSError, match="wrong MAC"):
            here.recv()
        here.close()
    assert not trap.exists()


def test_the_trap_springs_if_the_mac_is_right(
    channels: tuple[AuthenticatedChannel, AuthenticatedChannel], tmp_path: Path
) -> None:
    here, there = channels
    there.send(Trap(tmp_path / "sprung"))
    here.recv()
    assert (tmp_path / "sprung").exists()


def test_a_caller_with_an_unknown_name_is_disconnected(listener: Listener) -> None:
    address = listener.expect(lambda channel, _: channel.close())
    connection = open_socket(address)
    connection.sendall(bytes(16) + encode(address.key, ["hello"]))
    assert is_closed_by_peer(connection)


def test_a_caller_without_the_key_is_disconnected_and_the_address_stays_valid(listener: Listener) -> None:
    hellos: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = expect(listener, hellos)
    connection, _ = exchange_nonces(address)
    connection.sendall(encode(bytes(32), ["forged"]))
    assert is_closed_by_peer(connection)
    connect(address, "genuine").close()
    assert hellos.get(timeout=10) == "genuine"


def test_an_address_is_valid_once(listener: Listener) -> None:
    hellos: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = expect(listener, hellos)
    connect(address, "first").close()
    assert hellos.get(timeout=10) == "first"
    with pytest.raises(ConnectionAbortedError, match="cannot connect to 127"):
        connect(address, "second")
    assert hellos.empty()


def test_an_address_may_be_valid_for_many_callers(listener: Listener) -> None:
    hellos: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = expect(listener, hellos, once=False)
    for name in ("first", "second"):
        connect(address, name).close()
        assert hellos.get(timeout=10) == name


def test_a_cancelled_address_is_not_valid(listener: Listener) -> None:
    address = listener.expect(lambda channel, _: channel.close())
    listener.cancel(address)
    connection = open_socket(address)
    connection.sendall(address.name + encode(address.key, ["hello"]))
    assert is_closed_by_peer(connection)


def test_a_caller_cannot_claim_much_memory_before_it_is_authenticated(listener: Listener) -> None:
    address = listener.expect(lambda channel, _: channel.close())
    connection, _ = exchange_nonces(address)
    connection.sendall(struct.pack("<Q16s", MAX_HELLO_BYTES + 1, bytes(16)))
    assert is_closed_by_peer(connection)


def test_a_caller_rejects_messages_replayed_from_another_connection(tmp_path: Path) -> None:
    """An attacker replays all that a listener has sent to another caller, its nonce first."""
    trap, key, nonce = tmp_path / "sprung", bytes(32), bytes(NONCE_BYTES)
    recorded = encode(derive_channel_key(key, nonce, nonce), [Trap(trap)], is_listener=True)
    with socket.create_server((LOOPBACK, 0)) as attacker, ThreadPoolExecutor(1) as thread:
        address = ChannelAddress(LOOPBACK, attacker.getsockname()[1], bytes(16), key)
        connecting = thread.submit(connect, address, "hello")
        with attacker.accept()[0] as connection:
            connection.sendall(nonce + recorded)
            with (
                contextlib.closing(connecting.result()) as caller,
                pytest.raises(OSError, match="wrong MAC"),
            ):
                caller.recv()
    assert not trap.exists()


def test_the_handshake_as_a_whole_has_a_timeout(listener: Listener, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rpc, "HANDSHAKE_TIMEOUT_S", 0.3)
    address = listener.expect(lambda channel, _: channel.close())
    connection, key = exchange_nonces(address)
    with connection:
        for byte in encode(key, ["one byte at a time"])[:-1]:
            connection.sendall(bytes([byte]))
            if select.select([connection], [], [], 0.05)[0]:
                break
        else:
            pytest.fail("the listener still waits")
        assert is_closed_by_peer(connection)


@contextlib.contextmanager
def no_free_file_descriptors() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_callers_are_accepted_once_there_are_file_descriptors_again(listener: Listener) -> None:
    address = listener.expect(lambda channel, _: channel.close(), once=False)
    with socket.socket() as first, socket.socket() as second:
        with no_free_file_descriptors():
            for connection in (first, second):
                connection.connect((address.host, address.port))
                connection.sendall(address.name + bytes(NONCE_BYTES))
            time.sleep(0.05)  # the listener fails to accept the second caller, or both
        for connection in (first, second):
            assert rpc.recv_exactly(connection, NONCE_BYTES, time.monotonic() + 10)
