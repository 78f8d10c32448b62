"""Lines between machines, on which only what the other end has sealed is read.

Both ends have a key that came to them by another way, and with it make one that no other line has. A message
carries a keyed digest of its direction, its number and its content (BLAKE2b): what somebody else sends,
repeats, leaves out or changes ends the line before it is unpickled. Nothing is encrypted.
"""

from __future__ import annotations

import contextlib
import hashlib
import pickle
import secrets
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

KEY_BYTES, NAME_BYTES, SEAL_BYTES, NONCE_BYTES = 32, 16, 16, 16
MAX_BYTES = 2**30  # of a message
HELLO_BYTES = 2**16  # of the first one, before which nothing is known of the caller
HELLO_S = 10.0  # that who connects may take to say who it is
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
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, messages: Any, /) -> None:
        """Raises OSError if the other end is gone."""
        content = pickle.dumps(messages, protocol=pickle.HIGHEST_PROTOCOL)
        self._socket.sendall(_HEADER.pack(len(content), self._seal(self._says, self._num_sent, content)))
        self._socket.sendall(content)
        self._num_sent += 1

    def recv(self, max_bytes: int = MAX_BYTES) -> Any:
        """Raises EOFError if the other end is gone, and OSError for what it has not sealed."""
        num_bytes, seal = _HEADER.unpack(self._receive(_HEADER.size))
        if num_bytes > max_bytes:
            raise ConnectionAbortedError(f"a message of {num_bytes} bytes, and {max_bytes} are the most")
        content = self._receive(num_bytes)
        if not secrets.compare_digest(seal, self._seal(self._hears, self._num_heard, content)):
            raise ConnectionAbortedError("a message that the other end has not sealed")
        self._num_heard += 1
        return pickle.loads(content)

    def wait_at_most(self, timeout_s: float | None) -> None:
        """From now on, for each message; None: for ever."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Both ends see it, also who waits here."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _receive(self, num_bytes: int) -> bytearray:
        received, num_received = bytearray(num_bytes), 0
        with memoryview(received) as rest:
            while num_received < num_bytes:
                num_more = self._socket.recv_into(rest[num_received:])
                if not num_more:
                    raise EOFError("the other end has hung up")
                num_received += num_more
        return received

    def _seal(self, direction: bytes, number: int, content: bytes | bytearray) -> bytes:
        salt = _NUMBER.pack(number, len(content))
        return hashlib.blake2b(
            content, key=self._key, salt=salt, person=direction, digest_size=SEAL_BYTES
        ).digest()


def call(address: Address, hello: Any) -> SealedLine:
    """Connect, and say `hello`, which the listener gets with the line. Raises OSError."""
    own = socket.create_connection((address.host, address.port), timeout=HELLO_S)
    try:
        own.sendall(address.name)
        nonce = own.recv(NONCE_BYTES, socket.MSG_WAITALL)
        own.settimeout(None)
        line = SealedLine(own, key_of_line(address.key, nonce), is_listener=False)
        line.send(hello)
    except OSError:
        own.close()
        raise
    return line


def key_of_line(key: bytes, nonce: bytes) -> bytes:
    """What was said on another line, by the same key, is nothing on this one."""
    return hashlib.blake2b(nonce, key=key, person=b"line", digest_size=KEY_BYTES).digest()


Met = Callable[[SealedLine, Any], None]


class Listener:
    """Waits for callers, each of whom is expected by its name."""

    def __init__(self, host: str) -> None:
        """Listens from now on, at a free port. Raises OSError."""
        self._socket = socket.create_server((host, 0))
        self.host, self.port = self._socket.getsockname()[:2]
        self._expected: dict[bytes, tuple[bytes, Met, bool]] = {}
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
        self._expected.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # it is closed
            while True:
                own, _ = self._socket.accept()
                threading.Thread(target=self._greet, args=(own,), daemon=True).start()

    def _greet(self, own: socket.socket) -> None:
        """Hang up on who does not show in time that it has the key of a name that is expected."""
        try:
            own.settimeout(HELLO_S)
            name = own.recv(NAME_BYTES, socket.MSG_WAITALL)
            key, met, once = self._expected[name]
            own.sendall(nonce := secrets.token_bytes(NONCE_BYTES))
            line = SealedLine(own, key_of_line(key, nonce), is_listener=True)
            hello = line.recv(HELLO_BYTES)
            if once:
                self._expected.pop(name)  # KeyError: somebody was faster
        except (OSError, EOFError, KeyError):
            own.close()
            return
        line.wait_at_most(None)
        met(line, hello)
