"""Messages between the processes of a run on different machines: pickles over the sockets of `curve`.

Only processes of the run have the keys, so only their pickles are loaded. A `CurveChannel` connects a worker
with the driver; a `RequestServer` answers the requests of many clients.
"""

from __future__ import annotations

import contextlib
import math
import pickle
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

import zmq

from dora.curve import (
    HANDSHAKE_TIMEOUT_S,
    LINGER_S,
    CurveAddress,
    CurveConnection,
    CurveServer,
    Socket,
    os_errors,
    read_event,
    receive,
)

OUT_OF_BAND_BYTES = 2**16  # buffers of at least this size are frames of their own, which are not copied
FRAME_BYTES = 64 << 20  # of a message of a channel, which may be longer than MAX_FRAME_BYTES
CHANNEL_DESCRIPTORS = 16  # file descriptors that are free before one more channel is opened; it takes 8 to 10
SEND_POLL_S = 0.2  # between two tries to send, while the queue is full or the peer is not connected yet


class ChannelAddress(NamedTuple):
    """The two sockets of the driver for one worker, which sends to `to_send`."""

    to_send: CurveAddress
    to_receive: CurveAddress


class CurveChannel:
    """One end of a connection: a socket for each direction. Any thread may send, one at a time receives."""

    def __init__(self, sender: Socket, receiver: Socket, monitor: Socket, *, has_one_peer: bool) -> None:
        """`has_one_peer`: all events of `monitor` are of the other end, none of peers without the key."""
        self._sender, self._receiver, self._monitor = sender, receiver, monitor
        self._has_one_peer, self._peer_descriptor, self._is_peer_gone = has_one_peer, -1, False
        self._descriptors: set[int] = set()  # of open connections, also of peers without the key
        sender.setsockopt(zmq.SNDTIMEO, int(1e3 * SEND_POLL_S))
        self._send_lock, self._receive_lock = threading.Lock(), threading.Lock()
        self._wake_receiver, self._wake_sender = socket.socketpair()
        self._is_lost = self.is_closed = False

    @classmethod
    @os_errors()
    def listen(cls, server: CurveServer, host: str) -> tuple[Self, ChannelAddress]:
        """The driver's end, and the address for the worker. Raises OSError."""
        _check_free_descriptors()
        with contextlib.ExitStack() as on_error:  # the server waits for open sockets when it is closed
            receiver, to_send = server.bind(zmq.PULL, f"tcp://{host}:*")
            on_error.callback(receiver.close, linger=0)
            sender, to_receive = server.bind(zmq.PUSH, f"tcp://{host}:*")
            on_error.callback(sender.close, linger=0)
            monitor = receiver.get_monitor_socket(zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED)
            on_error.callback(monitor.close, linger=0)
            channel = cls(sender, receiver, monitor, has_one_peer=False)
            on_error.pop_all()
        return channel, ChannelAddress(to_send, to_receive)

    @classmethod
    def connect(cls, address: ChannelAddress) -> Self:
        """The worker's end. Raises OSError."""
        sender = CurveConnection(address.to_send, zmq.PUSH)
        try:
            receiver = CurveConnection(address.to_receive, zmq.PULL)
        except OSError:
            sender.close()
            raise
        sender.close_monitor()
        return cls(sender.socket, receiver.socket, receiver.monitor, has_one_peer=True)

    def send(self, message: Any, /) -> None:
        """Waits for room, and for the first connection. Raises ConnectionResetError if it is lost."""
        content = memoryview(pickle.dumps(message, protocol=5))
        frames = [content[start : start + FRAME_BYTES] for start in range(0, len(content), FRAME_BYTES)]
        with self._send_lock:
            while not (self._is_lost or self.is_closed):
                try:
                    self._sender.send_multipart(frames)
                    return
                except zmq.Again:
                    continue
        raise ConnectionResetError("the other end has closed the connection")

    def recv(self) -> Any:
        """Wait for the next message. Raises EOFError if either end has closed the channel."""
        with self._receive_lock:
            frames = None
            if not (self._is_lost or self.is_closed):
                timeout_s = 0.0 if self._is_peer_gone else math.inf
                with contextlib.suppress(TimeoutError):
                    frames = receive(
                        self._receiver, self._monitor, timeout_s, self._is_peer_lost, self._wake_receiver
                    )
            if frames is None:
                self._is_lost = True
                raise EOFError("the connection is closed")
            if not self._has_one_peer and self._peer_descriptor < 0:
                self._find_peer(int(frames[0].get(zmq.SRCFD)))
        parts = [frame.buffer for frame in frames]
        return pickle.loads(parts[0] if len(parts) == 1 else b"".join(parts))

    def close(self) -> None:
        """Close both directions; a `recv` that waits in another thread or at the other end returns."""
        self.is_closed = True
        with self._send_lock:
            self._sender.close(linger=int(1e3 * LINGER_S))
        self._wake_sender.close()
        with self._receive_lock:
            if not self._receiver.closed:
                self._receiver.disable_monitor()
                self._monitor.close(linger=0)
                self._receiver.close(linger=0)
                self._wake_receiver.close()

    def _find_peer(self, descriptor: int) -> None:
        """The first message is here: read all events before it, which may be of strangers that had the same
        descriptor.
        """
        while self._monitor.poll(0):
            self._is_peer_lost(*read_event(self._monitor))
        self._peer_descriptor, self._is_peer_gone = descriptor, descriptor not in self._descriptors

    def _is_peer_lost(self, event: int, descriptor: int) -> bool:
        """Whether the other end has disconnected. Peers without the key open and close connections, too."""
        if self._has_one_peer:
            return True
        if event == zmq.EVENT_ACCEPTED:
            self._descriptors.add(descriptor)
        else:
            self._descriptors.discard(descriptor)
            self._is_peer_gone |= descriptor == self._peer_descriptor  # which the next peer may get
        return self._is_peer_gone


def _check_free_descriptors() -> None:
    """Raises OSError if too few are free: libzmq ends the process if it gets none at some places."""
    with contextlib.ExitStack() as opened:
        for _ in range(CHANNEL_DESCRIPTORS):
            opened.enter_context(socket.socket())


class RequestServer:
    """Answers requests of any number of clients, one after the other, in a thread."""

    def __init__(self, host: str, handle: Callable[[Any], Any]) -> None:
        """Listen at a free port. `handle` must not change a reply later. Raises OSError."""
        self._server = CurveServer()
        bound, self.address = self._server.bind(zmq.ROUTER, f"tcp://{host}:*")
        threading.Thread(target=_serve, args=(bound, handle), name="rpc", daemon=True).start()

    def close(self) -> None:
        """Disconnect all clients."""
        self._server.close()


def _serve(bound: Socket, handle: Callable[[Any], Any]) -> None:
    try:
        while True:
            client, *frames = bound.recv_multipart(copy=False)
            try:
                reply = handle(_decode(frames))
            except Exception as error:
                reply = OSError(f"{type(error).__name__}: {error}")
            bound.send_multipart([client, *_encode(reply)], copy=False)
    except zmq.ContextTerminated:
        bound.close(linger=0)


class RequestClient:
    """A connection to a `RequestServer`; not thread-safe."""

    def __init__(self, address: CurveAddress, timeout_s: float) -> None:
        """`timeout_s` is for each reply, and for the handshake. Raises OSError."""
        handshake_s = min(timeout_s, HANDSHAKE_TIMEOUT_S)
        self._connection, self._timeout_s = CurveConnection(address, timeout_s=handshake_s), timeout_s

    @property
    def is_usable(self) -> bool:
        """False after a call without a reply: a late reply would be taken for that of the next call."""
        return not self._connection.socket.closed

    def call(self, request: Any) -> Any:
        """The reply. Raises OSError if there is none in time, or if the request has failed."""
        if not self.is_usable:
            raise ConnectionResetError(f"the connection to {self._connection.endpoint} has failed before")
        try:
            self._connection.send(_encode(request))
            reply = _decode(self._connection.recv(self._timeout_s))
        except OSError:
            self.close()
            raise
        if isinstance(reply, OSError):
            raise reply
        return reply

    def close(self) -> None:
        self._connection.close()


def _encode(message: Any) -> list[Any]:
    """The frames of a message: a pickle, and its large buffers."""
    buffers: list[memoryview] = []
    pickled = pickle.dumps(message, protocol=5, buffer_callback=partial(_is_in_band, buffers))
    return [pickled, *buffers]


def _is_in_band(buffers: list[memoryview], buffer: pickle.PickleBuffer) -> bool:
    """Pickle's `buffer_callback`: whether a buffer stays in the pickle; else it is appended to `buffers`."""
    content = buffer.raw()
    if content.nbytes < OUT_OF_BAND_BYTES:
        return True
    buffers.append(content)
    return False


def _decode(frames: Sequence[zmq.Frame]) -> Any:
    pickled, *buffers = (frame.buffer for frame in frames)
    return pickle.loads(pickled, buffers=buffers)
