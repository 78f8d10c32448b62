"""Messages between clients and the server of a stream: Unix sockets on one host, `curve` between hosts.

A message is a JSON header followed by raw buffers; nothing is unpickled. A request is {"id": int, "method":
str, ...}; its reply has the same id, and `error` if the request was refused. A client detects the exit of the
server at once, and the server that of a client on the same host (on Linux even while a forked child keeps the
socket open). The server does not detect the crash of a client on another host.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import struct
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import zmq
from numpy.typing import NDArray

from dora.core.types import GroupId, RequestId
from dora.curve import HANDSHAKE_TIMEOUT_S, LINGER_S, MAX_POLL_S, CurveAddress, CurveConnection, CurveServer
from dora.errors import RunError, StreamError
from dora.stream.metadata import BatchRequest, BlockLocation
from dora.stream.schema import Buffer

MAX_MESSAGE_BYTES = 256 << 20  # that the server accepts
UNMATCHED = -1  # the id of a reply to a message whose header is not readable
_MAX_MESSAGES_PER_POLL = 64  # of one ZeroMQ socket, so that replies are not delayed by many requests
_CONNECT_RETRY_S = 0.01
_RECEIVE_BYTES = 1 << 16
_SIZE = struct.Struct("<Q")

Frames = Sequence[bytes]
Reply = tuple[dict[str, Any], Sequence[Any]]  # header and buffers


def encode_message(header: Mapping[str, Any], buffers: Sequence[Any]) -> list[Any]:
    """The frames of a message."""
    return [json.dumps(header).encode(), *buffers]


def encode_error(error: StreamError) -> list[Any]:
    """The reply to a message that cannot be read."""
    return encode_message({"id": UNMATCHED, "error": str(error)}, ())


def decode_header(frames: Sequence[Buffer]) -> dict[str, Any]:
    """Raises ValueError if the first frame is not a JSON object."""
    try:
        header = json.loads(str(frames[0], "utf8")) if frames else None
    except (RecursionError, MemoryError) as error:
        raise ValueError("the header is nested too deeply, or too long") from error
    if not isinstance(header, dict):
        raise ValueError("the first frame must be a JSON object")
    return header


def check_size(num_bytes: int) -> None:
    """Raises StreamError for a message that is too long."""
    if num_bytes > MAX_MESSAGE_BYTES:
        raise StreamError(f"a message of {num_bytes} bytes exceeds the limit of {MAX_MESSAGE_BYTES}")


def decode_integers(buffer: Buffer, dtype: Any, width: int) -> NDArray[Any]:
    """[n, width] of a buffer. Raises ValueError if its size does not fit."""
    return np.frombuffer(buffer, dtype).reshape(-1, width)


def request_from_json(value: Sequence[Any]) -> BatchRequest:
    """Raises ValueError or TypeError for an invalid request."""
    max_rows, max_tokens, group = value
    return BatchRequest(
        int(max_rows),
        None if max_tokens is None else int(max_tokens),
        None if group is None else GroupId(*map(int, group)),
    )


def groups_from_json(groups: Sequence[Sequence[int]]) -> list[GroupId]:
    return [GroupId(int(epoch), int(row)) for epoch, row in groups]


def requests_from_json(requests: Sequence[Sequence[int]]) -> list[RequestId]:
    return [RequestId(int(epoch), int(row), int(sibling)) for epoch, row, sibling in requests]


def location_from_json(value: Sequence[Any]) -> BlockLocation:
    segment, offset, num_bytes = value
    return BlockLocation(str(segment), int(offset), int(num_bytes))


def socket_path(folder: Path) -> Path:
    """The Unix socket of the stream of a folder."""
    return folder / "stream.sock"


class UnixConnection:
    """One end of a Unix socket: a message is its number of frames, their sizes, and the frames.

    A client sets a timeout. The server never waits: what a client does not read now is kept and sent later.
    """

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        self._received, self._unsent = bytearray(), bytearray()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def peer_pid(self) -> int | None:
        """The process at the other end; None if unknown (known on Linux)."""
        if not hasattr(socket, "SO_PEERCRED"):
            return None
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid: int = struct.unpack("3i", credentials)[0]
        return pid

    @property
    def has_unsent(self) -> bool:
        """Whether the other end has not read all that was sent."""
        return bool(self._unsent)

    def set_timeout(self, timeout_s: float) -> None:
        """The time that `send` and `receive` may wait; 0: they return at once."""
        self._socket.settimeout(timeout_s)

    def send(self, frames: Sequence[Any]) -> None:
        """Send a message. Raises OSError if the other end is closed, TimeoutError if it reads too slowly."""
        sizes = [memoryview(frame).nbytes for frame in frames]
        self._unsent += b"".join((struct.pack(f"<{1 + len(sizes)}Q", len(sizes), *sizes), *frames))
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as the other end reads it. Raises OSError as `send`."""
        while self._unsent:
            try:
                num_sent = self._socket.send(self._unsent)
            except BlockingIOError:
                return
            del self._unsent[:num_sent]

    def receive(self) -> None:
        """Receive what has arrived. Raises OSError if the other end is closed, or nothing arrives in time."""
        try:
            received = self._socket.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not received:
            raise ConnectionResetError("the other end closed the connection")
        self._received += received

    def next_message(self) -> list[bytes] | None:
        """The frames of the next complete message. Raises StreamError if it is too long."""
        num_received = len(self._received)
        if num_received < _SIZE.size:
            return None
        (num_frames,) = _SIZE.unpack_from(self._received)
        offset = _SIZE.size * (1 + num_frames)
        check_size(offset)
        if num_received < offset:
            return None
        sizes = struct.unpack_from(f"<{num_frames}Q", self._received, _SIZE.size)
        check_size(offset + sum(sizes))
        if num_received < offset + sum(sizes):
            return None
        frames = []
        with memoryview(self._received) as view:
            for size in sizes:
                frames.append(bytes(view[offset : offset + size]))
                offset += size
        del self._received[:offset]
        return frames

    def close(self) -> None:
        self._socket.close()


class UnixTransport:
    """A connection to a server on the same host; the exit of the server is detected at once."""

    def __init__(self, path: Path, timeout_s: float) -> None:
        """Retries for `timeout_s`. Raises RunError if no server listens."""
        self.name, self._timeout_s = str(path), timeout_s
        self._connection = UnixConnection(self._connect(time.monotonic() + timeout_s))

    def send(self, frames: Sequence[Any]) -> None:
        """Raises RunError if the connection is lost."""
        self._connection.set_timeout(min(self._timeout_s, MAX_POLL_S))
        try:
            self._connection.send(frames)
        except OSError as error:
            raise self._lost(error) from error

    def receive(self, deadline_s: float) -> list[bytes] | None:
        """The next message; None after the deadline (time.monotonic). Raises RunError if it is lost."""
        while (frames := self._connection.next_message()) is None:
            remaining_s = deadline_s - time.monotonic()
            self._connection.set_timeout(min(max(1e-3, remaining_s), MAX_POLL_S))
            try:
                self._connection.receive()
            except TimeoutError:
                if remaining_s <= MAX_POLL_S:
                    return None
            except OSError as error:
                raise self._lost(error) from error
        return frames

    def close(self) -> None:
        self._connection.close()

    def _connect(self, deadline_s: float) -> socket.socket:
        connecting = socket.socket(socket.AF_UNIX)
        while True:
            try:
                connecting.connect(self.name)
            except (FileNotFoundError, ConnectionRefusedError) as error:
                if time.monotonic() > deadline_s:
                    connecting.close()
                    raise RunError(
                        f"no stream server listened at {self.name} for {self._timeout_s:g} s: "
                        "is its process running?"
                    ) from error
                time.sleep(_CONNECT_RETRY_S)
            else:
                return connecting

    def _lost(self, error: OSError) -> RunError:
        return RunError(
            f"the connection to the stream at {self.name} is lost ({error}): has its process exited?"
        )


class RemoteTransport:
    """A connection to a server on another host; methods as of `UnixTransport`."""

    def __init__(self, address: CurveAddress, timeout_s: float) -> None:
        """Retries for `timeout_s`. Raises RunError if no server with these keys listens."""
        self.name = address.endpoint
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                self._connection = CurveConnection(address, timeout_s=min(timeout_s, HANDSHAKE_TIMEOUT_S))
                return
            except OSError as error:
                if time.monotonic() > deadline_s:
                    raise RunError(f"the stream cannot be used: {error}: is its process running?") from error
            time.sleep(_CONNECT_RETRY_S)

    def send(self, frames: Sequence[Any]) -> None:
        with self._run_errors():
            self._connection.send(frames)

    def receive(self, deadline_s: float) -> list[bytes] | None:
        with self._run_errors():
            try:
                frames = self._connection.recv(deadline_s - time.monotonic())
            except TimeoutError:
                return None
            return [frame.bytes for frame in frames]

    def close(self) -> None:
        self._connection.close(LINGER_S)

    @contextlib.contextmanager
    def _run_errors(self) -> Iterator[None]:
        try:
            yield
        except ConnectionResetError as error:
            raise RunError(f"{error}: has the process of the stream exited?") from error


@dataclass(eq=False)
class ClientConnection:
    """The server's end of a client: a Unix connection, or an address at the ZeroMQ socket (`remote`)."""

    unix: UnixConnection | None = None
    remote: bytes | None = None
    client_id: str = ""  # drawn by the server; holder of its leases and owner of its segments
    pidfd: int = -1


class ServerEndpoint:
    """The sockets of a server and the connections of its clients. Only `wait` waits."""

    def __init__(self, folder: Path, host: str | None) -> None:
        """Listens at the Unix socket of the folder, and at a free port of `host`: `remote` is its address.

        Raises OSError or zmq.ZMQError.
        """
        self._poll = select.poll()
        self._local: dict[int, ClientConnection] = {}  # by file descriptor of its socket and of its process
        self._remote: dict[bytes, ClientConnection] = {}  # by their addresses at the ZeroMQ socket
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._poll.register(self._wake_receiver, select.POLLIN)
        self._listening, self._path = _listen(socket_path(folder)), socket_path(folder).absolute()
        self._poll.register(self._listening, select.POLLIN)
        self.remote: CurveAddress | None = None
        if host is not None:
            self._curve = CurveServer()
            self._bound, self.remote = self._curve.bind(zmq.ROUTER, f"tcp://{host}:*")
            self._poll.register(self._bound, select.POLLIN)

    def wake(self) -> None:
        """Interrupt `wait`, from any thread."""
        with contextlib.suppress(OSError):  # closed
            self._wake_sender.send(b"!")

    def wait(self, timeout_ms: int | None) -> list[int]:
        """Wait until there is anything to receive; the file descriptors for `receive`."""
        has_message = self.remote is not None and self._bound.poll(0)
        return [fd for fd, _ in self._poll.poll(0 if has_message else timeout_ms)]

    def receive(self, ready: Sequence[int]) -> Iterator[tuple[ClientConnection, Frames | None]]:
        """Messages with their clients; None: the client has exited or hung up."""
        for fd in ready:
            if fd == self._wake_receiver.fileno():
                self._wake_receiver.recv(_RECEIVE_BYTES)
            elif fd in self._local:
                yield from self._receive_local(fd, self._local[fd])
            elif fd == self._listening.fileno():
                self._accept()
        if self.remote is not None:  # a ZeroMQ descriptor only signals that something may have changed
            yield from self._receive_remote()

    def register(self, client: ClientConnection) -> None:
        """Keep a client that has authenticated, also a remote one."""
        if client.remote is not None:
            self._remote[client.remote] = client

    def find(self, client_id: str) -> list[ClientConnection]:
        """The connected clients with this id."""
        clients = dict.fromkeys((*self._local.values(), *self._remote.values()))
        return [client for client in clients if client_id and client.client_id == client_id]

    def send(self, client: ClientConnection, frames: Sequence[Any]) -> None:
        """Send now what the client reads, the rest later. Errors surface in `receive`."""
        with contextlib.suppress(OSError, zmq.ZMQError):
            if client.remote is not None:
                self._bound.send_multipart([client.remote, *frames])
            elif client.unix is not None:
                client.unix.send(frames)
                if client.unix.has_unsent:  # accept no further requests until it has read its replies
                    self._poll.modify(client.unix.fileno(), select.POLLOUT)

    def disconnect(self, client: ClientConnection) -> None:
        """Close the connection of a client."""
        if client.remote is not None:
            self._remote.pop(client.remote, None)
        if client.unix is not None:
            self._unwatch(client.unix.fileno())
            client.unix.close()
            client.unix = None
        if client.pidfd >= 0:
            self._unwatch(client.pidfd)
            os.close(client.pidfd)
            client.pidfd = -1

    def close(self) -> None:
        for client in [*self._local.values()]:
            self.disconnect(client)
        if self.remote is not None:
            self._bound.close(linger=0)
            self._curve.close()
        self._path.unlink(missing_ok=True)
        for own in (self._listening, self._wake_receiver, self._wake_sender):
            own.close()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listening.accept()
        except OSError:  # the client has closed it already
            return
        connection = UnixConnection(accepted)
        connection.set_timeout(0.0)
        client = ClientConnection(connection)
        self._watch(connection.fileno(), client)
        if hasattr(os, "pidfd_open") and (pid := connection.peer_pid) not in (None, os.getpid()):
            with contextlib.suppress(OSError):  # the process has exited; so the connection is closed
                client.pidfd = os.pidfd_open(pid)
                self._watch(client.pidfd, client)

    def _watch(self, fd: int, client: ClientConnection) -> None:
        self._local[fd] = client
        self._poll.register(fd, select.POLLIN)

    def _unwatch(self, fd: int) -> None:
        self._poll.unregister(fd)
        del self._local[fd]

    def _receive_local(
        self, fd: int, client: ClientConnection
    ) -> Iterator[tuple[ClientConnection, Frames | None]]:
        connection = client.unix
        assert connection is not None, "disconnected clients are not polled"
        try:
            if fd == client.pidfd:
                raise ConnectionResetError("its process has exited")
            if connection.has_unsent:
                connection.flush()
                if not connection.has_unsent:
                    self._poll.modify(fd, select.POLLIN)
            else:
                connection.receive()
            while client.unix is connection and (frames := connection.next_message()) is not None:
                yield client, frames
        except StreamError as error:
            self.send(client, encode_error(error))
            yield client, None
        except OSError:
            yield client, None

    def _receive_remote(self) -> Iterator[tuple[ClientConnection, Frames]]:
        for _ in range(_MAX_MESSAGES_PER_POLL):
            try:
                address, *frames = self._bound.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            client = self._remote.get(address) or ClientConnection(remote=address)
            try:
                check_size(sum(map(len, frames)))  # ZeroMQ has checked each frame
            except StreamError as error:
                self.send(client, encode_error(error))
            else:
                yield client, frames


def _listen(path: Path) -> socket.socket:
    path.unlink(missing_ok=True)  # of a server that crashed
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(path))
    path.chmod(0o600)  # a process that can connect may put and get
    listening.listen(socket.SOMAXCONN)
    listening.settimeout(0)
    return listening
