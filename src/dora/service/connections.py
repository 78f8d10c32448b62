"""Connections of the service: how many there may be, and how long one may say nothing.

Each is an open file of the driver's, and whoever opens one has not shown a token yet. So they are few
enough for the run to have files left, and those that are silent make room for those that are not.
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 10.0  # that the head of a call may take
MAX_CONNECTIONS = 1024
BACKLOG = 64  # connections that are taken up at once, beyond the most there may be


def most_connections() -> int:
    """Half of the files that this process may have open, for the run needs some too."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if most == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, most // 2)


class Connection(H11Protocol):
    """One connection. While no call is under way in it, it may be closed for the sake of another one."""

    silent_since_s: float | None = None  # on the loop's clock; None: a call is being answered
    _deadline: asyncio.TimerHandle | None = None  # of the head that is awaited

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Close the one that has been silent for longest if there are too many, or this one."""
        super().connection_made(transport)
        self._await_head()
        self.silent_since_s = self.loop.time()
        if len(self.connections) > most_connections():
            silent = [each for each in self.connections if _since_s(each) is not None]
            oldest = min(silent, key=lambda each: _since_s(each) or 0.0)
            oldest.transport.abort()
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        """A head that has begun must come to its end."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._end_deadline()
        elif self._deadline is None:
            self._await_head()
        self._note()

    def on_response_complete(self) -> None:
        """It rests, or goes on with what has come already."""
        super().on_response_complete()
        self._note()

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is awaited any more."""
        super().connection_lost(exc)
        self._end_deadline()

    def _await_head(self) -> None:
        self._deadline = self.loop.call_later(HEAD_S, self.transport.abort)

    def _end_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _note(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.silent_since_s = None
        elif self.silent_since_s is None:
            self.silent_since_s = self.loop.time()


def _since_s(connection: object) -> float | None:
    return connection.silent_since_s if isinstance(connection, Connection) else None
