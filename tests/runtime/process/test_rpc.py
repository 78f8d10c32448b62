"""Lines between machines: what is said arrives, and what nobody sealed is never read."""

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
    """Leaves a file where it is unpickled."""

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
def lines(listener: Listener) -> Iterator[tuple[AuthenticatedChannel, AuthenticatedChannel]]:
    """The listener's end and the caller's."""
    met: queue.SimpleQueue[tuple[AuthenticatedChannel, object]] = queue.SimpleQueue()
    caller = connect(listener.expect(lambda line, hello: met.put((line, hello))), "here I am")
    here, hello = met.get(timeout=10)
    assert hello == "here I am"
    yield here, caller
    here.close()
    caller.close()


def expect(listener: Listener, met: queue.SimpleQueue[object], *, once: bool = True) -> ChannelAddress:
    """Callers, of whom only the first word is wanted."""

    def note(line: AuthenticatedChannel, hello: object) -> None:
        line.close()
        met.put(hello)

    return listener.expect(note, once=once)


def connected(address: ChannelAddress) -> socket.socket:
    return socket.create_connection((address.host, address.port), timeout=10)


def introduced(address: ChannelAddress) -> tuple[socket.socket, bytes]:
    """Whoever knows the name, and the key of this line for who knows the key."""
    own, nonce = connected(address), bytes(NONCE_BYTES)
    own.sendall(address.name + nonce)
    return own, derive_channel_key(address.key, nonce, rpc.recv_exactly(own, NONCE_BYTES))


def is_hung_up(own: socket.socket) -> bool:
    """Whether the other end closes, without a word."""
    with own:
        try:
            return own.recv(1) == b""
        except ConnectionResetError:
            return True


def test_messages_arrive_in_order_and_both_ways(
    lines: tuple[AuthenticatedChannel, AuthenticatedChannel],
) -> None:
    here, there = lines
    for number in range(3):
        here.send(["go", number])
        there.send(["gone", number])
    assert [there.recv() for _ in range(3)] == [["go", 0], ["go", 1], ["go", 2]]
    assert [here.recv() for _ in range(3)] == [["gone", 0], ["gone", 1], ["gone", 2]]


def test_a_message_may_be_longer_than_a_socket_holds(
    lines: tuple[AuthenticatedChannel, AuthenticatedChannel],
) -> None:
    here, there = lines
    sends = threading.Thread(target=there.send, args=(b"x" * 20_000_000,))
    sends.start()
    assert here.recv() == b"x" * 20_000_000
    sends.join()


def test_who_waits_hears_that_the_other_end_is_gone(
    lines: tuple[AuthenticatedChannel, AuthenticatedChannel],
) -> None:
    here, there = lines
    there.close()
    with pytest.raises(EOFError):
        here.recv()


class Paper:
    """In the place of a socket: what is sent is written down."""

    def __init__(self) -> None:
        self.written = bytearray()

    def setsockopt(self, *_: int) -> None:
        """There is nothing to set."""

    def sendall(self, content: bytes) -> None:
        self.written += content


def as_sent(key: bytes, messages: list[object], *, is_listener: bool = False) -> bytearray:
    """The bytes of the last of these messages."""
    paper = Paper()
    line = AuthenticatedChannel(paper, key, is_listener=is_listener)  # type: ignore[arg-type]
    for message in messages:
        paper.written.clear()
        line.send(message)
    return paper.written


@pytest.mark.parametrize(
    "wrong", ["another key", "another line", "the way back", "a message again", "another place", "a bit"]
)
def test_what_the_other_end_has_not_sealed_is_never_unpickled(
    listener: Listener, tmp_path: Path, wrong: str
) -> None:
    met: queue.SimpleQueue[AuthenticatedChannel] = queue.SimpleQueue()
    address, trap = listener.expect(lambda line, _: met.put(line)), tmp_path / "sprung"
    own, key = introduced(address)
    with own:
        own.sendall(as_sent(key, ["hello"]))
        forged = {
            "another key": lambda: as_sent(bytes(32), ["hello", Trap(trap)]),
            "another line": lambda: as_sent(
                derive_channel_key(address.key, bytes(16), bytes(16)), ["hello", Trap(trap)]
            ),
            "the way back": lambda: as_sent(key, ["hello", Trap(trap)], is_listener=True),
            "a message again": lambda: as_sent(key, [Trap(trap)]),
            "another place": lambda: as_sent(key, ["hello", "one", Trap(trap)]),
            "a bit": lambda: as_sent(key, ["hello", Trap(trap)]),
        }[wrong]()
        forged[-1] ^= wrong == "a bit"
        own.sendall(forged)
        here = met.get(timeout=10)
        with pytest.raises(OSError, match="has not sealed"):
            here.recv()
        here.close()
    assert not trap.exists()


def test_a_trap_springs_where_it_is_sealed(
    lines: tuple[AuthenticatedChannel, AuthenticatedChannel], tmp_path: Path
) -> None:
    here, there = lines
    there.send(Trap(tmp_path / "sprung"))
    here.recv()
    assert (tmp_path / "sprung").exists()


def test_who_is_not_expected_is_hung_up_on(listener: Listener) -> None:
    address = listener.expect(lambda line, _: line.close())
    own = connected(address)
    own.sendall(bytes(16) + as_sent(address.key, ["hello"]))
    assert is_hung_up(own)


def test_who_has_not_the_key_is_hung_up_on_and_the_right_one_still_comes(listener: Listener) -> None:
    met: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = expect(listener, met)
    own, _ = introduced(address)
    own.sendall(as_sent(bytes(32), ["I am nobody"]))
    assert is_hung_up(own)
    connect(address, "it is me").close()
    assert met.get(timeout=10) == "it is me"


def test_each_caller_comes_once(listener: Listener) -> None:
    met: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = expect(listener, met)
    connect(address, "first").close()
    assert met.get(timeout=10) == "first"
    with pytest.raises(ConnectionAbortedError, match="no line to 127"):
        connect(address, "second")
    assert met.empty()


def test_an_address_may_be_for_many(listener: Listener) -> None:
    met: queue.SimpleQueue[object] = queue.SimpleQueue()
    address = expect(listener, met, once=False)
    for name in ("first", "second"):
        connect(address, name).close()
        assert met.get(timeout=10) == name


def test_a_caller_who_is_forgotten_does_not_come(listener: Listener) -> None:
    address = listener.expect(lambda line, _: line.close())
    listener.cancel(address)
    own = connected(address)
    own.sendall(address.name + as_sent(address.key, ["hello"]))
    assert is_hung_up(own)


def test_nobody_can_have_much_memory_taken_before_it_is_known(listener: Listener) -> None:
    address = listener.expect(lambda line, _: line.close())
    own, _ = introduced(address)
    own.sendall(struct.pack("<Q16s", MAX_HELLO_BYTES + 1, bytes(16)))
    assert is_hung_up(own)


def test_a_caller_does_not_take_for_new_what_another_was_told(tmp_path: Path) -> None:
    """Whoever is in between has written down all that a listener said, its nonce first, and says it again."""
    trap, key, nonce = tmp_path / "sprung", bytes(32), bytes(NONCE_BYTES)
    said = as_sent(derive_channel_key(key, nonce, nonce), [Trap(trap)], is_listener=True)
    with socket.create_server((LOOPBACK, 0)) as between, ThreadPoolExecutor(1) as beside:
        address = ChannelAddress(LOOPBACK, between.getsockname()[1], bytes(16), key)
        calling = beside.submit(connect, address, "hello")
        with between.accept()[0] as own:
            own.sendall(nonce + said)
            with (
                contextlib.closing(calling.result()) as caller,
                pytest.raises(OSError, match="has not sealed"),
            ):
                caller.recv()
    assert not trap.exists()


def test_the_whole_greeting_has_to_be_there_in_time(
    listener: Listener, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rpc, "HELLO_S", 0.3)
    address = listener.expect(lambda line, _: line.close())
    own, key = introduced(address)
    with own:
        for byte in as_sent(key, ["I am in no hurry"])[:-1]:
            own.sendall(bytes([byte]))
            if select.select([own], [], [], 0.05)[0]:
                break
        else:
            pytest.fail("it still listens")
        assert is_hung_up(own)


@contextlib.contextmanager
def no_more_files() -> Iterator[None]:
    """For this process, for a while."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_who_calls_while_there_is_no_room_for_one_more_comes_later(listener: Listener) -> None:
    address = listener.expect(lambda line, _: line.close(), once=False)
    with socket.socket() as first, socket.socket() as second:
        with no_more_files():
            for own in (first, second):
                own.connect((address.host, address.port))
                own.sendall(address.name + bytes(NONCE_BYTES))
            time.sleep(0.05)  # the listener tries in vain to let in the second, or both
        for own in (first, second):
            assert rpc.recv_exactly(own, NONCE_BYTES, time.monotonic() + 10)
