"""Limit the service's connections: their number, and how long a client may neither send a request's head nor
read a response.

Each connection is an open file of the driver, and is made before its client has shown an auth token.
"""

from __future__ import annotations

import asyncio
import resource

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_TIMEOUT_S = 10.0  # for the head of a request
READ_TIMEOUT_S = 30.0  # for the client to read any more of a response
MAX_CONNECTIONS = 1024
BACKLOG = 64  # connections that the kernel accepts before the server does


def max_connections() -> int:
    """At most half of the files that this process may open, because the run needs some too."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return MAX_CONNECTIONS if limit == resource.RLIM_INFINITY else min(MAX_CONNECTIONS, limit // 2)


class LimitedConnection(H11Protocol):
    """A connection that counts against `max_connections` and may be closed while it is idle."""

    idle_since_s: float | None = None  # on the loop's clock; None: a request is in progress
    _head_timer: asyncio.TimerHandle | None = None  # closes the connection unless the head arrives
    _read_timer: asyncio.TimerHandle | None = None  # closes it unless the client reads

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Over the limit, close the connection that has been idle longest, possibly this one."""
        super().connection_made(transport)
        self._start_head_timer()
        self.idle_since_s = self.loop.time()
        if len(self.connections) > max_connections():
            limited = (each for each in self.connections if isinstance(each, LimitedConnection))
            idle = (each for each in limited if each.idle_since_s is not None)
            oldest = min(idle, key=lambda each: each.idle_since_s or 0.0)
            oldest.transport.abort()
            self.connections.discard(oldest)

    def data_received(self, data: bytes) -> None:
        """Start the timer of a request's head with its first bytes, and stop it after the last."""
        super().data_received(data)
        if self.conn.their_state is not h11.IDLE:
            self._stop_head_timer()
        elif self._head_timer is None:
            self._start_head_timer()
        self._update_idle()

    def on_response_complete(self) -> None:
        """uvicorn may start a pipelined request here; else the connection is idle."""
        super().on_response_complete()
        self._update_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Stop the timers."""
        super().connection_lost(exc)
        self._stop_head_timer()
        self._stop_read_timer()

    def pause_writing(self) -> None:
        """Too much of the response is unsent: start the timer of its client."""
        super().pause_writing()
        self._start_read_timer()

    def resume_writing(self) -> None:
        """The client has read enough."""
        super().resume_writing()
        self._stop_read_timer()

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_TIMEOUT_S, self.transport.abort)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_read_timer(self) -> None:
        num_bytes = self.transport.get_write_buffer_size()
        self._read_timer = self.loop.call_later(READ_TIMEOUT_S, self._check_client_reads, num_bytes)

    def _stop_read_timer(self) -> None:
        if self._read_timer is not None:
            self._read_timer.cancel()
            self._read_timer = None

    def _check_client_reads(self, num_bytes: int) -> None:
        """Close the connection if as many bytes are unsent as before."""
        if self.transport.get_write_buffer_size() < num_bytes:
            self._start_read_timer()
        else:
            self.transport.abort()

    def _update_idle(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            self.idle_since_s = None
        elif self.idle_since_s is None:
            self.idle_since_s = self.loop.time()
