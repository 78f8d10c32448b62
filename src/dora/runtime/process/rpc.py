"""Authenticated channels between the processes of a run that are on different machines.

Both ends have a shared key, which they received through Ray or over another channel. They exchange nonces and
derive a key for this connection, so nothing recorded on another connection is accepted. Each message carries
a keyed BLAKE2b over its direction, number and content. A forged, repeated, reordered or altered message
closes the channel before it is unpickled. Large arrays follow their message as raw bytes, each with a MAC of
its own (`bulk_mac`). Nothing is encrypted.
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
    from dora.runtime.process.bulk_mac import BulkMac

KEY_BYTES, NAME_BYTES, MAC_BYTES, NONCE_BYTES = 32, 16, 16, 16
MAX_MESSAGE_BYTES = 2**30  # of a message, and of the sum of its arrays
OUT_OF_BAND_BYTES = 2**16  # arrays of at least this size follow the message
MAX_HELLO_BYTES = 2**16  # of the first message, whose sender is not authenticated yet
HANDSHAKE_TIMEOUT_S = 10.0  # of a whole handshake, on each side
ACCEPT_RETRY_S = 0.1  # retry interval after no file descriptor or thread was free for a caller
_HEADER = struct.Struct(f"<Q{MAC_BYTES}s")
_MESSAGE_POSITION = struct.Struct("<QQ")


@dataclass(frozen=True)
class ChannelAddress:
    """Where a listener expects a caller: the public name and the secret key of the expected connection."""

    host: str
    port: int
    name: bytes
    key: bytes


class AuthenticatedChannel:
    """One end of a connection. It sends and receives pickled objects."""

    def __init__(self, connection: socket.socket, key: bytes, *, is_listener: bool) -> None:
        """`key` is the one that `derive_channel_key` made for this connection."""
        self._socket, self._key = connection, key
        directions = b"listener", b"caller"
        self._send_direction, self._recv_direction = directions if is_listener else directions[::-1]
        self._num_sent = self._num_received = 0
        self._bulk_mac: BulkMac | None = None
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def send(self, message: Any, /) -> None:
        """Raises OSError if the other end has closed the channel."""
        arrays: list[memoryview] = []
        pickled = pickle.dumps(message, protocol=5, buffer_callback=partial(_is_in_band, arrays))
        sizes = [array.nbytes for array in arrays]
        macs = [
            self._mac_of_array(self._send_direction, self._num_sent, index, array)
            for index, array in enumerate(arrays)
        ]
        content = pickle.dumps((pickled, sizes, macs), protocol=5)
        mac = self._mac(self._send_direction, self._num_sent, content)
        self._socket.sendall(_HEADER.pack(len(content), mac))
        self._socket.sendall(content)
        for array in arrays:
            self._socket.sendall(array)
        self._num_sent += 1

    def recv(self, max_bytes: int = MAX_MESSAGE_BYTES, deadline_s: float | None = None) -> Any:
        """Wait for the next message; `deadline_s` is on the monotonic clock.

        Raises EOFError if the other end has closed the channel, and OSError for a wrong MAC, a message that
        is too large, or a missed deadline.
        """
        num_bytes, mac = _HEADER.unpack(recv_exactly(self._socket, _HEADER.size, deadline_s))
        _check_size(num_bytes, max_bytes)
        content = recv_exactly(self._socket, num_bytes, deadline_s)
        if not secrets.compare_digest(mac, self._mac(self._recv_direction, self._num_received, content)):
            raise ConnectionAbortedError("a message has a wrong MAC: its sender does not have the key")
        pickled, sizes, macs = pickle.loads(content)
        _check_size(sum(sizes), max_bytes)
        arrays = [recv_exactly(self._socket, size, deadline_s) for size in sizes]
        for index, (array, mac) in enumerate(zip(arrays, macs, strict=True)):
            expected = self._mac_of_array(self._recv_direction, self._num_received, index, array)
            if not secrets.compare_digest(mac, expected):
                raise ConnectionAbortedError("an array has a wrong MAC: its sender does not have the key")
        self._num_received += 1
        return pickle.loads(pickled, buffers=arrays)

    def set_timeout(self, timeout_s: float | None) -> None:
        """Wait at most this long for the next bytes; None: without limit."""
        self._socket.settimeout(timeout_s)

    def close(self) -> None:
        """Close both directions; a `recv` that waits in another thread or at the other end returns."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _mac(self, direction: bytes, number: int, content: bytes | bytearray) -> bytes:
        salt = _MESSAGE_POSITION.pack(number, len(content))
        return hashlib.blake2b(
            content, key=self._key, salt=salt, person=direction, digest_size=MAC_BYTES
        ).digest()

    def _mac_of_array(self, direction: bytes, number: int, index: int, content: Any) -> bytes:
        """Imports compiled code with the first array: most processes send none."""
        from dora.runtime.process.bulk_mac import BulkMac

        if self._bulk_mac is None:
            self._bulk_mac = BulkMac(self._key)
        return self._bulk_mac.compute(content, direction + b" bulk", _MESSAGE_POSITION.pack(number, index))


def _is_in_band(arrays: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Pickle's `buffer_callback`: whether a buffer stays in the message; else it is appended to `arrays`."""
    content = buffer.raw()
    if content.nbytes < OUT_OF_BAND_BYTES:
        return True
    arrays.append(content)
    return False


def _check_size(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ConnectionAbortedError(f"a message of {num_bytes} bytes: at most {max_bytes} are accepted")


def recv_exactly(connection: socket.socket, num_bytes: int, deadline_s: float | None = None) -> bytearray:
    """Receive `num_bytes` bytes. Raises EOFError if the connection closes, OSError at the deadline."""
    received, num_received = bytearray(num_bytes), 0
    with memoryview(received) as rest:
        while num_received < num_bytes:
            if deadline_s is not None:
                if (left_s := deadline_s - time.monotonic()) <= 0.0:
                    raise TimeoutError("the message was not complete in time")
                connection.settimeout(left_s)
            num_more = connection.recv_into(rest[num_received:])
            if not num_more:
                raise EOFError("the other end has closed the connection")
            num_received += num_more
    return received


def connect(address: ChannelAddress, hello: Any) -> AuthenticatedChannel:
    """Connect and send `hello`, which the listener's callback gets. Raises OSError."""
    deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
    connection = socket.create_connection((address.host, address.port), timeout=HANDSHAKE_TIMEOUT_S)
    try:
        connection.sendall(address.name + (nonce := secrets.token_bytes(NONCE_BYTES)))
        key = derive_channel_key(address.key, nonce, recv_exactly(connection, NONCE_BYTES, deadline_s))
        connection.settimeout(None)
        channel = AuthenticatedChannel(connection, key, is_listener=False)
        channel.send(hello)
    except (OSError, EOFError) as error:
        connection.close()
        raise ConnectionAbortedError(f"cannot connect to {address.host}:{address.port}: {error}") from error
    return channel


def derive_channel_key(
    key: bytes, caller_nonce: bytes | bytearray, listener_nonce: bytes | bytearray
) -> bytes:
    """The key of one connection. Each end draws a fresh nonce, so neither accepts a replayed connection."""
    nonces = caller_nonce + listener_nonce
    return hashlib.blake2b(nonces, key=key, person=b"channel", digest_size=KEY_BYTES).digest()


OnConnect = Callable[[AuthenticatedChannel, Any], None]


class Listener:
    """Accepts callers that it expects. A thread for each caller checks its name and key."""

    def __init__(self, host: str) -> None:
        """Listen at a free port. Raises OSError."""
        self._socket = socket.create_server((host, 0))
        self.host, self.port = self._socket.getsockname()[:2]
        self._expected: dict[bytes, tuple[bytes, OnConnect, bool]] = {}  # name -> key, callback, once
        self._is_closed = threading.Event()
        threading.Thread(target=self._accept, name="listener", daemon=True).start()

    def expect(self, on_connect: OnConnect, *, once: bool = True) -> ChannelAddress:
        """Make an address for one caller, or, without `once`, for any number of callers.

        `on_connect` gets the channel and the hello of a caller, in a thread of its own.
        """
        address = ChannelAddress(
            self.host, self.port, secrets.token_bytes(NAME_BYTES), secrets.token_bytes(KEY_BYTES)
        )
        self._expected[address.name] = address.key, on_connect, once
        return address

    def cancel(self, address: ChannelAddress) -> None:
        """Do not expect callers at this address any more."""
        self._expected.pop(address.name, None)

    def close(self) -> None:
        """Accept no more callers; established channels stay open."""
        self._is_closed.set()
        self._expected.clear()
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _accept(self) -> None:
        while not self._is_closed.is_set():
            try:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._authenticate, args=(connection,), daemon=True).start()
            except (OSError, RuntimeError):  # no file descriptor or thread is left, or the listener is closed
                self._is_closed.wait(ACCEPT_RETRY_S)

    def _authenticate(self, connection: socket.socket) -> None:
        """Close the connection of a caller that does not prove in time that it has the key of its name."""
        deadline_s = time.monotonic() + HANDSHAKE_TIMEOUT_S
        try:
            name = bytes(recv_exactly(connection, NAME_BYTES, deadline_s))
            key, on_connect, once = self._expected[name]
            caller_nonce = recv_exactly(connection, NONCE_BYTES, deadline_s)
            connection.sendall(nonce := secrets.token_bytes(NONCE_BYTES))
            channel_key = derive_channel_key(key, caller_nonce, nonce)
            channel = AuthenticatedChannel(connection, channel_key, is_listener=True)
            hello = channel.recv(MAX_HELLO_BYTES, deadline_s)
            if once:
                self._expected.pop(name)  # KeyError: another caller has used the address meanwhile
        except (OSError, EOFError, KeyError):
            connection.close()
            return
        channel.set_timeout(None)
        on_connect(channel, hello)
