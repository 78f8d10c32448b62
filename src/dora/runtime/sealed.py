"""Lines between machines, on which only what the other end has sealed is read.

Both ends have a key that came to them by another way. With it, and a random number of each, they make one
that no other line has: neither takes for new what was said on another. A message carries a keyed digest of
its direction, its number and its content (BLAKE2b): what somebody else sends, repeats, leaves out or changes
ends the line before it is unpickled. Large arrays follow the message that names them, as they lie in memory,
under seals of their own (`bulk`). Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dora.runtime.bulk import Sealer

KEY_BYTES, NAME_BYTES, SEAL_BYTES, NONCE_BYTES = 32, 16, 16, 16
MAX_BYTES = 2**30  # of a message, and of all arrays that follow it
LARGE_BYTES = 2**16  # of an array, to go apart
HELLO_BYTES = 2**16  # of the first one, before which nothing is known of the caller
HELLO_S = 10.0  # that both ends may take, all in all, until each knows the other
AGAIN_S = 0.1  # until callers are let in again, where there was no room for one
_HEADER = struct.Struct(f"<Q{SEAL_BYTES}s")
_NUMBER = struct.Struct("<QQ")


@dataclass(frozen=True)
class Address:
    """Where a line leads to, and what opens it: the name by which the listener knows it, and the key."""

    host: str
    port: int
    name: bytes
    key: bytes


class SealedLine:
    """One end of a line, over a socket that is connected."""

    def __init__(self, own: socket.socket, key: bytes, *, is_listener: bool) -> None:
        self._socket, self._key = own, key
        self._says, self._hears = (b"listener", b"caller") if is_listener else (b"caller", b"listener")
        self._num_sent = self._num_heard = 0
        self._sealer: Sealer | None = None
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, messages: Any, /) -> None:
        """Raises OSError if the other end is gone."""
        large: list[memoryview] = []
        said = pickle.dumps(messages, protocol=5, buffer_callback=partial(_is_small, large))
        seals = [self._seal_large(self._says, self._num_sent, *item) for item in enumerate(large)]
        sizes = [buffer.nbytes for buffer in large]
        content = pickle.dumps((said, sizes, seals), protocol=5)
        self._socket.sendall(_HEADER.pack(len(content), self._seal(self._says, self._num_sent, content)))
        self._socket.sendall(content)
        for buffer in large:
            self._socket.sendall(buffer)
        self._num_sent += 1

    def recv(self, max_bytes: int = MAX_BYTES, until: float | None = None) -> Any:
        """Raises EOFError if the other end is gone, and OSError for what it has not sealed.

        All of it must be there `until` then, on the monotonic clock.
        """
        num_bytes, seal = _HEADER.unpack(receive(self._socket, _HEADER.size, until))
        _check_size(num_bytes, max_bytes)
        content = receive(self._socket, num_bytes, until)
        if not secrets.compare_digest(seal, self._seal(self._hears, self._num_heard, content)):
            raise ConnectionAbortedError("a message that the other end has not sealed")
        said, sizes, seals = pickle.loads(content)
        _check_size(sum(sizes), max_bytes)
        large = [receive(self._socket, size, until) for size in sizes]
        for index, (buffer, seal) in enumerate(zip(large, seals, strict=True)):
            own = self._seal_large(self._hears, self._num_heard, index, buffer)
            if not secrets.compare_digest(seal, own):
                raise ConnectionAbortedError("an array that the other end has not sealed")
        self._num_heard += 1
        return pickle.loads(said, buffers=large)

    def wait_at_most(self, timeout_s: float | None) -> None:
        """From now on, for the next bytes; None: for ever."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Both ends see it, also who waits here."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _seal(self, direction: bytes, number: int, content: bytes | bytearray) -> bytes:
        salt = _NUMBER.pack(number, len(content))
        return hashlib.blake2b(
            content, key=self._key, salt=salt, person=direction, digest_size=SEAL_BYTES
        ).digest()

    def _seal_large(self, direction: bytes, number: int, index: int, content: Any) -> bytes:
        """The first one on a line makes what they are sealed with."""
        from dora.runtime.bulk import Sealer  # compiled code, which few processes need

        if self._sealer is None:
            self._sealer = Sealer(self._key)
        return self._sealer.seal(content, direction + b" bulk", _NUMBER.pack(number, index))


def _is_small(large: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Whether it goes in the message; else it is one of the `large`."""
    content = buffer.raw()
    if content.nbytes < LARGE_BYTES:
        return True
    large.append(content)
    return False


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ConnectionAbortedError(f"a message of {num_bytes} bytes, and {max_bytes} are the most")


def receive(own: socket.socket, num_bytes: int, until: float | None = None) -> bytearray:
    """Exactly so many. Raises EOFError if the other end is gone, OSError if they are not there `until`."""
    received, num_received = bytearray(num_bytes), 0
    with memoryview(received) as rest:
        while num_received < num_bytes:
            if until is not None:
                if (left_s := until - time.monotonic()) <= 0.0:
                    raise TimeoutError("what was to be said is not there in time")
                own.settimeout(left_s)
            num_more = own.recv_into(rest[num_received:])
            if not num_more:
                raise EOFError("the other end has hung up")
            num_received += num_more
    return received


def call(address: Address, hello: Any) -> SealedLine:
    """Connect, and say `hello`, which the listener gets with the line. Raises OSError."""
    until = time.monotonic() + HELLO_S
    own = socket.create_connection((address.host, address.port), timeout=HELLO_S)
    try:
        own.sendall(address.name + (nonce := secrets.token_bytes(NONCE_BYTES)))
        key = key_of_line(address.key, nonce, receive(own, NONCE_BYTES, until))
        own.settimeout(None)
        line = SealedLine(own, key, is_listener=False)
        line.send(hello)
    except (OSError, EOFError) as error:
        own.close()
        raise ConnectionAbortedError(f"no line to {address.host}:{address.port}: {error}") from error
    return line


def key_of_line(key: bytes, of_caller: bytes | bytearray, of_listener: bytes | bytearray) -> bytes:
    """What was said on another line by the same key is nothing on this one: to each end, its nonce is new."""
    nonces = of_caller + of_listener
    return hashlib.blake2b(nonces, key=key, person=b"line", digest_size=KEY_BYTES).digest()


Met = Callable[[SealedLine, Any], None]


class Listener:
    """Waits for callers, each of whom is expected by its name."""

    def __init__(self, host: str) -> None:
        """Listens from now on, at a free port. Raises OSError."""
        self._socket = socket.create_server((host, 0))
        self.host, self.port = self._socket.getsockname()[:2]
        self._expected: dict[bytes, tuple[bytes, Met, bool]] = {}
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def expect(self, met: Met, *, once: bool = True) -> Address:
        """`met` gets the line of who calls and what it said first, in a thread of its own.

        For one caller, or for everybody who has the address.
        """
        address = Address(
            self.host, self.port, secrets.token_bytes(NAME_BYTES), secrets.token_bytes(KEY_BYTES)
        )
        self._expected[address.name] = address.key, met, once
        return address

    def forget(self, address: Address) -> None:
        """Who is expected will not come any more."""
        self._expected.pop(address.name, None)

    def close(self) -> None:
        self._is_closed.set()
        self._expected.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                own, _ = self._socket.accept()
                threading.Thread(target=self._greet, args=(own,), daemon=True).start()
            except (OSError, RuntimeError):  # no file or thread is left for one more; or it is closed
                self._is_closed.wait(AGAIN_S)

    def _greet(self, own: socket.socket) -> None:
        """Hang up on who does not show in time that it has the key of a name that is expected."""
        until = time.monotonic() + HELLO_S
        try:
            name = bytes(receive(own, NAME_BYTES, until))
            key, met, once = self._expected[name]
            of_caller = receive(own, NONCE_BYTES, until)
            own.sendall(nonce := secrets.token_bytes(NONCE_BYTES))
            line = SealedLine(own, key_of_line(key, of_caller, nonce), is_listener=True)
            hello = line.recv(HELLO_BYTES, until)
            if once:
                self._expected.pop(name)  # KeyError: somebody was faster
        except (OSError, EOFError, KeyError):
            own.close()
            return
        line.wait_at_most(None)
        met(line, hello)
