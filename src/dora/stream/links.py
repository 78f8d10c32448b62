"""How a client reaches its storage: on its own host over a Unix socket, on others over ZeroMQ.

Near, the end of the storage is an error at once; far away, only silence can be told.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence
from typing import Any, Protocol

import zmq

from dora.errors import RunError
from dora.stream import wire
from dora.stream.connection import Connection

_TRY_AGAIN_S = 0.01  # while a storage is not there yet


class Link(Protocol):
    """Messages to a storage and back."""

    def send(self, frames: Sequence[Any]) -> None:
        """Raises RunError if nobody is there."""

    def receive(self, until_s: float) -> list[bytes] | None:
        """The next message, or None if none has come in time. Raises RunError if nobody is there."""

    def close(self) -> None:
        """What was sent may still arrive."""


class Near:
    """A storage of this host; its end is seen at once."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        """Raises RunError if nobody listens for so long."""
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._connection = Connection(self._connected(time.monotonic() + timeout_s))

    def send(self, frames: Sequence[Any]) -> None:
        self._connection.wait_at_most(min(self._timeout_s, wire.LONGEST_WAIT_S))
        try:
            self._connection.send(frames)
        except OSError as error:
            raise self._is_gone(error) from error

    def receive(self, until_s: float) -> list[bytes] | None:
        while (frames := self._connection.next()) is None:
            left_s = until_s - time.monotonic()
            self._connection.wait_at_most(min(max(1e-3, left_s), wire.LONGEST_WAIT_S))
            try:
                self._connection.hear()
            except TimeoutError:
                if left_s <= wire.LONGEST_WAIT_S:
                    return None
            except OSError as error:
                raise self._is_gone(error) from error
        return frames

    def close(self) -> None:
        self._connection.close()

    def _connected(self, until_s: float) -> socket.socket:
        made = socket.socket(socket.AF_UNIX)
        while True:
            try:
                made.connect(str(wire.path_of(self._endpoint)))
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if time.monotonic() > until_s:
                    made.close()
                    raise RunError(
                        f"no stream has listened at {self._endpoint} for {self._timeout_s:g} s: "
                        "is its process alive?"
                    ) from error
                time.sleep(_TRY_AGAIN_S)
            else:
                return made

    def _is_gone(self, error: OSError) -> RunError:
        return RunError(f"the stream at {self._endpoint} is gone ({error}): has its process ended?")


class Far:
    """A storage of another host, whose silence may mean anything."""

    def __init__(self, endpoint: str, timeout_s: float) -> None:
        self._socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.connect(endpoint)

    def send(self, frames: Sequence[Any]) -> None:
        self._socket.send_multipart(frames)

    def receive(self, until_s: float) -> list[bytes] | None:
        while True:
            left_s = until_s - time.monotonic()
            self._socket.setsockopt(zmq.RCVTIMEO, int(1e3 * min(max(0.0, left_s), wire.LONGEST_WAIT_S)))
            try:
                return self._socket.recv_multipart()
            except zmq.Again:
                if left_s <= wire.LONGEST_WAIT_S:
                    return None

    def close(self) -> None:
        self._socket.close()
