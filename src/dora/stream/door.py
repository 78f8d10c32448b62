"""Who speaks to a storage: processes of its host over Unix sockets, and other hosts over ZeroMQ.

The end of a process of this host is seen at once (Linux: even while a child that it forked keeps its socket
open). Who is far away may be gone without a word.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import zmq

from dora.errors import StreamError
from dora.stream import wire
from dora.stream.connection import MAX_MESSAGE_BYTES, Connection, check_size

_MAX_PER_ROUND = 64  # messages, so that nobody's answer waits for everybody's requests
Frames = Sequence[bytes]


@dataclass(eq=False)
class Client:
    """Somebody who asks: over a connection of this host, or with an address at a ZeroMQ socket."""

    connection: Connection | None = None
    far: tuple[zmq.Socket[bytes], bytes] | None = None
    name: str = field(default_factory=lambda: secrets.token_hex(8))
    owner: str = ""  # of segments
    pidfd: int = -1


class Door:
    """All sockets of a storage, and whom they lead to. Nothing here waits but `hear`."""

    def __init__(self, endpoints: Sequence[str]) -> None:
        """Listens from now on. Raises OSError or zmq.ZMQError if an endpoint cannot be had."""
        self._poll = select.poll()
        self._listening: dict[int, socket.socket] = {}
        self._bound: list[zmq.Socket[bytes]] = []  # for other hosts
        self._near: dict[int, Client] = {}  # by file descriptor: of its connection, and of its process
        self._far: dict[tuple[zmq.Socket[bytes], bytes], Client] = {}
        self._alarm, self._bell = socket.socketpair()
        self._poll.register(self._alarm, select.POLLIN)
        self.endpoints = [
            self._listen(wire.path_of(endpoint)) if wire.is_local(endpoint) else self._bind(endpoint)
            for endpoint in endpoints
        ]

    def ring(self) -> None:
        """End a `hear`, from any thread."""
        with contextlib.suppress(OSError):  # it is closed
            self._bell.send(b"!")

    def hear(self, timeout_ms: int | None) -> Iterator[tuple[Client, Frames | None]]:
        """What is asked and by whom; None: it is gone. Waits for the first."""
        is_there = any(bound.poll(0) for bound in self._bound)
        for ready, _ in self._poll.poll(0 if is_there else timeout_ms):
            if ready in self._near:
                yield from self._hear_near(ready, self._near[ready])
            elif ready in self._listening:
                self._accept(self._listening[ready])
        for bound in self._bound:  # what their descriptors say is when to look, and not what is there
            yield from self._hear_far(bound)

    def welcome(self, client: Client) -> None:
        """It has said who it is; from far away it will be known again."""
        if client.far is not None:
            self._far[client.far] = client

    def find(self, owner: str) -> list[Client]:
        """Who has said that this is its name; nobody where there is none."""
        clients = dict.fromkeys((*self._near.values(), *self._far.values()))
        return [client for client in clients if owner and client.owner == owner]

    def send(self, client: Client, frames: Sequence[Any]) -> None:
        """As much as it takes now, the rest later; nothing if it is gone, which will be heard."""
        with contextlib.suppress(OSError, zmq.ZMQError):
            if client.far is not None:
                far, address = client.far
                far.send_multipart([address, *frames])
            elif client.connection is not None:
                client.connection.send(frames)
                if client.connection.is_clogged:  # it is not listened to until it listens
                    self._poll.modify(client.connection.fileno(), select.POLLOUT)

    def forget(self, client: Client) -> None:
        """It is gone, or must go."""
        if client.far is not None:
            self._far.pop(client.far, None)
        if client.connection is not None:
            self._drop(client.connection.fileno())
            client.connection.close()
            client.connection = None
        if client.pidfd >= 0:
            self._drop(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = -1

    def close(self) -> None:
        for client in [*self._near.values()]:
            self.forget(client)
        for bound in self._bound:
            bound.close(linger=0)
        for listening in self._listening.values():
            Path(listening.getsockname()).unlink(missing_ok=True)
        for own in (*self._listening.values(), self._alarm, self._bell):
            own.close()

    def _drop(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._near[fd]

    def _listen(self, path: Path) -> str:
        path.unlink(missing_ok=True)  # of a storage that has died
        listening = socket.socket(socket.AF_UNIX)
        listening.bind(str(path))
        path.chmod(0o600)  # whoever may connect to it may put and get
        listening.listen(socket.SOMAXCONN)
        listening.settimeout(0)
        self._listening[listening.fileno()] = listening
        self._poll.register(listening, select.POLLIN)
        return wire.local_endpoint(path)

    def _bind(self, endpoint: str) -> str:
        bound: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        self._bound.append(bound)
        bound.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        bound.bind(endpoint)
        self._poll.register(bound, select.POLLIN)
        return str(bound.getsockopt_string(zmq.LAST_ENDPOINT))

    def _accept(self, listening: socket.socket) -> None:
        try:
            accepted, _ = listening.accept()
        except OSError:  # it has given up
            return
        connection = Connection(accepted)
        connection.wait_at_most(0.0)
        client = Client(connection)
        self._watch(connection.fileno(), client)
        if hasattr(os, "pidfd_open") and (pid := connection.peer_pid) not in (None, os.getpid()):
            with contextlib.suppress(OSError):  # it is gone, and its connection will say so
                client.pidfd = os.pidfd_open(pid)
                self._watch(client.pidfd, client)

    def _watch(self, fd: int, client: Client) -> None:
        self._near[fd] = client
        self._poll.register(fd, select.POLLIN)

    def _hear_near(self, ready: int, client: Client) -> Iterator[tuple[Client, Frames | None]]:
        """All that one client has said. None, if its process has ended, or its end of the connection."""
        connection = client.connection
        assert connection is not None, "who is forgotten is not polled"
        try:
            if ready == client.pidfd:
                raise ConnectionResetError("its process has ended")
            if connection.is_clogged:
                connection.flush()
                if not connection.is_clogged:
                    self._poll.modify(ready, select.POLLIN)
            else:
                connection.hear()
            while client.connection is connection and (frames := connection.next()) is not None:
                yield client, frames
        except StreamError as error:
            self.send(client, wire.refusal(error))
            yield client, None
        except OSError:
            yield client, None

    def _hear_far(self, bound: zmq.Socket[bytes]) -> Iterator[tuple[Client, Frames]]:
        for _ in range(_MAX_PER_ROUND):
            try:
                address, *frames = bound.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = self._far.get((bound, address)) or Client(far=(bound, address))
            try:
                check_size(sum(map(len, frames)))  # of each frame ZeroMQ has done so while it came in
            except StreamError as error:
                self.send(client, wire.refusal(error))
            else:
                yield client, frames
