"""Messages between two processes of one host, over a Unix socket whose end says that the other is gone.

A message is the number of its frames, their sizes, and the frames. Both ends have one of these: a client's
socket has a timeout, the storage's never waits, and what the client does not take now is kept for later.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any

from dora.errors import StreamError

MAX_MESSAGE_BYTES = 256 << 20  # that the storage takes
_NUMBER = struct.Struct("<Q")
_RECEIVED_BYTES = 1 << 16  # at a time


class Connection:
    """One end of it."""

    def __init__(self, own: socket.socket) -> None:
        self._socket = own
        self._heard, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer_pid(self) -> int | None:
        """The process at the other end, where the system tells (Linux)."""
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("3i", credentials)[0]
        return pid

    @property
    def is_clogged(self) -> bool:
        """Whether the other end has not taken all that was sent."""
        return bool(self._unsent)

    def wait_at_most(self, timeout_s: float) -> None:
        """From now on; with 0 there is no waiting."""
        self._socket.settimeout(timeout_s)

    def send(self, frames: Sequence[Any]) -> None:
        """A message of buffers. Raises OSError if the other is gone, or takes too long."""
        sizes = [memoryview(frame).nbytes for frame in frames]
        self._unsent += b"".join((struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes), *frames))
        self.flush()

    def flush(self) -> None:
        """Send what has waited, as far as it is taken. Raises OSError as `send`."""
        while self._unsent:
            try:
                num_sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:num_sent]

    def hear(self) -> None:
        """Receive what is there. Raises OSError if the other is gone, or says nothing for too long."""
        try:
            heard = self._socket.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return
        if not heard:
            raise ConnectionResetError("it has hung up")
        self._heard += heard

    def next(self) -> list[bytes] | None:
        """The frames of a message that has been heard. Raises StreamError if it is too long."""
        num_heard = len(self._heard)
        if num_heard < _NUMBER.size:
            return None
        (num_frames,) = _NUMBER.unpack_from(self._heard)
        at = _NUMBER.size * (1 + num_frames)
        check_size(at)
        if num_heard < at:
            return None
        sizes = struct.unpack_from(f"<{num_frames}Q", self._heard, _NUMBER.size)
        check_size(at + sum(sizes))
        if num_heard < at + sum(sizes):
            return None
        frames = []
        with memoryview(self._heard) as view:
            for size in sizes:
                frames.append(bytes(view[at : at + size]))
                at += size
        del self._heard[:at]
        return frames

    def close(self) -> None:
        self._socket.close()


def check_size(num_bytes: int) -> None:
    """Raises StreamError for a message that is too long."""
    if num_bytes > MAX_MESSAGE_BYTES:
        raise StreamError(
            f"a message of {num_bytes} bytes, and {MAX_MESSAGE_BYTES} are the most: put fewer rows at a time"
        )
