"""Connections between machines: ZeroMQ sockets with CURVE, which encrypts and authenticates both ends.

A server draws its own key pair, and one for the clients of each socket. Its clients get an address, which
contains the server's public key and their secret key, through Ray or a pipe. A peer without that key receives
nothing, and none of its bytes reach the program: libzmq drops it during the handshake.

A connection is watched: a process that exits is detected at once, a machine that is lost by TCP's keepalive
after two minutes. A process that is suspended keeps its connections.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

MAX_FRAME_BYTES = 256 << 20  # that a socket receives, also from a peer that is not authenticated yet
HANDSHAKE_TIMEOUT_S = 10.0  # of a whole handshake, on each side
LINGER_S = 2.0  # for what was sent before a socket was closed
MAX_POLL_S = 86400.0  # of one wait for a socket, whose timeout is an int of ms; longer waits poll again
ZAP_ENDPOINT = "inproc://zeromq.zap.01"  # where libzmq asks whether a client is admitted (RFC 27)

Socket = zmq.Socket[bytes]
Frames = Sequence[Any]  # buffers


@dataclass(frozen=True)
class CurveAddress:
    """A server's socket, and the keys of its clients. Keep it private: it admits every client that has it."""

    endpoint: str
    server_key: str
    client_key: str = field(repr=False)
    client_secret: str = field(repr=False)


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """Raise an error of libzmq, such as that no file descriptor is free, as OSError."""
    try:
        yield
    except zmq.ZMQError as error:
        raise OSError(error.errno, error.strerror) from error


class CurveServer:
    """Binds sockets. Each admits the clients that have its address."""

    def __init__(self) -> None:
        self._context: zmq.Context[Socket] = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # else for 255 workers only
        self._public, self._secret = zmq.curve_keypair()
        zap = self._context.socket(zmq.REP)
        zap.bind(ZAP_ENDPOINT)
        threading.Thread(target=_admit_clients, args=(zap,), name="curve", daemon=True).start()

    @os_errors()
    def bind(self, kind: int, endpoint: str) -> tuple[Socket, CurveAddress]:
        """A socket, and its address for clients. Raises OSError."""
        client_key, client_secret = zmq.curve_keypair()
        bound = _make_socket(self._context, kind)
        try:
            bound.curve_server = True
            bound.curve_publickey, bound.curve_secretkey = self._public, self._secret
            bound.zap_domain = client_key
            bound.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
            bound.bind(endpoint)
        except zmq.ZMQError:
            bound.close(linger=0)
            raise
        found = bound.getsockopt_string(zmq.LAST_ENDPOINT)
        return bound, CurveAddress(found, self._public.decode(), client_key.decode(), client_secret.decode())

    def close(self) -> None:
        """Wait until all sockets are closed; a thread that waits for one gets zmq.ContextTerminated."""
        self._context.term()


def _admit_clients(zap: Socket) -> None:
    """Admit a client whose key is the domain of the socket. CURVE has proved that it has the secret key."""
    with zap, contextlib.suppress(zmq.ContextTerminated):
        while True:
            version, request_id, domain, _, _, mechanism, *credentials = zap.recv_multipart()
            is_admitted = mechanism == b"CURVE" and z85.encode(credentials[0]) == domain
            status = (b"200", b"OK", domain) if is_admitted else (b"400", b"unknown key", b"")
            zap.send_multipart([version, request_id, *status, b""])


class CurveConnection:
    """A client's connected socket; not thread-safe."""

    @os_errors()
    def __init__(
        self, address: CurveAddress, kind: int = zmq.DEALER, timeout_s: float = HANDSHAKE_TIMEOUT_S
    ) -> None:
        """Connect, and wait until both ends have authenticated. Raises OSError."""
        self.endpoint = address.endpoint
        self.socket, self._is_lost = _make_socket(zmq.Context.instance(), kind), False
        self.socket.curve_serverkey = address.server_key.encode()
        self.socket.curve_publickey = address.client_key.encode()
        self.socket.curve_secretkey = address.client_secret.encode()
        # A lost connection is not restored. The value for "never", -1, would also drop received messages.
        self.socket.setsockopt(zmq.RECONNECT_IVL, int(1e3 * MAX_POLL_S))
        self.monitor: Socket = self.socket.get_monitor_socket(_HANDSHAKE_ENDED | _DISCONNECTED)
        self.socket.connect(address.endpoint)
        if not self.monitor.poll(int(1e3 * timeout_s)):
            self.close()
            raise TimeoutError(f"{self.endpoint} has not replied for {timeout_s:g} s")
        event, _ = read_event(self.monitor)
        if event != zmq.EVENT_HANDSHAKE_SUCCEEDED:
            self.close()
            raise ConnectionRefusedError(f"{self.endpoint} cannot be reached, or has other keys")

    def send(self, frames: Frames) -> None:
        """Raises ConnectionResetError if `recv` has found that the connection is lost."""
        if self._is_lost:
            raise self._lost()
        self.socket.send_multipart(frames)

    def recv(self, timeout_s: float) -> list[zmq.Frame]:
        """The frames of the next message, without copying them.

        Raises TimeoutError, and ConnectionResetError if the connection is lost.
        """
        frames = None
        if not self._is_lost:
            frames = receive(self.socket, self.monitor, timeout_s, lambda *_: True)
        if frames is None:
            self._is_lost = True
            raise self._lost()
        return frames

    def close(self, linger_s: float = 0.0) -> None:
        """Close the connection; messages in the send queue may still be delivered for `linger_s`."""
        if not self.socket.closed:
            self.close_monitor()
            self.socket.close(linger=int(1e3 * linger_s))

    def close_monitor(self) -> None:
        """Do not watch the connection any more."""
        self.socket.disable_monitor()
        self.monitor.close(linger=0)

    def _lost(self) -> ConnectionResetError:
        return ConnectionResetError(f"the connection to {self.endpoint} is lost")


def receive(
    socket: Socket,
    monitor: Socket,
    timeout_s: float,
    is_lost: Callable[[int, int], bool],
    wake: Any = None,
) -> list[zmq.Frame] | None:
    """The next message; None after all messages of a peer that is lost, or if `wake` is readable.

    `is_lost` gets each event of `monitor` with its value; its last result counts. Raises TimeoutError.
    """
    poller, deadline_s, has_lost = zmq.Poller(), time.monotonic() + timeout_s, False
    for each in (socket, monitor, wake):
        if each is not None:
            poller.register(each, zmq.POLLIN)
    while True:
        try:
            return socket.recv_multipart(zmq.NOBLOCK, copy=False)
        except zmq.Again:
            if has_lost:
                return None
        remaining_s = deadline_s - time.monotonic()
        found = dict(poller.poll(int(1e3 * max(0.0, min(remaining_s, MAX_POLL_S)))))
        if wake is not None and wake.fileno() in found:
            return None
        if monitor in found:
            try:  # what the peer has sent before it was lost is here already
                return socket.recv_multipart(zmq.NOBLOCK, copy=False)
            except zmq.Again:
                while monitor.poll(0):
                    has_lost = is_lost(*read_event(monitor))
        elif not found and remaining_s <= MAX_POLL_S:
            raise TimeoutError(f"no message for {timeout_s:g} s")


def read_event(monitor: Socket) -> tuple[int, int]:
    """The next event of a monitor, and its value."""
    event = parse_monitor_message(monitor.recv_multipart())
    return int(event["event"]), int(event["value"])


_DISCONNECTED = zmq.EVENT_DISCONNECTED
_HANDSHAKE_ENDED = (
    zmq.EVENT_HANDSHAKE_SUCCEEDED
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_CLOSED  # no server listens at the address
)


def _make_socket(context: zmq.Context[Any], kind: int) -> Socket:
    """A socket with the options that both ends have in common."""
    socket: Socket = context.socket(kind)
    socket.setsockopt(zmq.LINGER, 0)  # else what a lost peer has not received keeps a context from ending
    socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
    socket.setsockopt(zmq.HANDSHAKE_IVL, int(1e3 * HANDSHAKE_TIMEOUT_S))
    socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
    socket.setsockopt(zmq.TCP_KEEPALIVE_IDLE, 60)
    socket.setsockopt(zmq.TCP_KEEPALIVE_INTVL, 15)
    socket.setsockopt(zmq.TCP_KEEPALIVE_CNT, 4)
    return socket
