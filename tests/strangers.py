"""Peers without the key of a CURVE server. Each connects, tries to send a request, and receives nothing."""

from __future__ import annotations

import contextlib
import os
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import zmq

from dora.curve import CurveAddress, CurveConnection, CurveServer

REQUEST = b"request"


def send_in_clear(address: CurveAddress) -> None:
    """ZeroMQ without CURVE."""
    stranger: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
    with stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(address.endpoint)
        stranger.send(REQUEST)
        assert not stranger.poll(300)


def send_with_own_key(address: CurveAddress) -> None:
    """It knows the server's public key, but has drawn its own secret."""
    key, secret = (each.decode() for each in zmq.curve_keypair())
    with pytest.raises(ConnectionRefusedError, match="has other keys"):
        CurveConnection(replace(address, client_key=key, client_secret=secret))


def send_with_wrong_secret(address: CurveAddress) -> None:
    """It knows both public keys, not the secret one."""
    _, secret = zmq.curve_keypair()
    with pytest.raises(ConnectionRefusedError, match="has other keys"):
        CurveConnection(replace(address, client_secret=secret.decode()), timeout_s=2.0)


def send_with_wrong_server_key(address: CurveAddress) -> None:
    key, _ = zmq.curve_keypair()
    with pytest.raises(ConnectionRefusedError, match="has other keys"):
        CurveConnection(replace(address, server_key=key.decode()))


def send_with_key_of_another_run(address: CurveAddress) -> None:
    other = CurveServer()
    bound, valid = other.bind(zmq.ROUTER, "tcp://127.0.0.1:*")
    CurveConnection(valid).close()
    bound.close()
    other.close()
    with pytest.raises(ConnectionRefusedError, match="has other keys"):
        CurveConnection(replace(valid, endpoint=address.endpoint))
    with pytest.raises(ConnectionRefusedError, match="has other keys"):
        CurveConnection(replace(valid, endpoint=address.endpoint, server_key=address.server_key))


def send_garbage(address: CurveAddress) -> None:
    """Random bytes, and a greeting of ZeroMQ with random bytes after it."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE" + bytes(48)
    for content in (
        os.urandom(100_000),
        greeting + os.urandom(100_000),
        greeting + b"\x06" + b"\xff" * 8,
        b"",
    ):
        with connect(address) as stranger, contextlib.suppress(OSError):
            stranger.sendall(content)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(1000):
                pass


STRANGERS = (
    send_in_clear,
    send_with_own_key,
    send_with_wrong_secret,
    send_with_wrong_server_key,
    send_with_key_of_another_run,
    send_garbage,
)


def connect(address: CurveAddress) -> socket.socket:
    host, _, port = address.endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(port)), timeout=20.0)


def replay(address: CurveAddress, recorded: bytes) -> bytes:
    """Send what a client has sent before; all that the server answers until it closes the connection."""
    received = b""
    with connect(address) as stranger, contextlib.suppress(ConnectionResetError):
        stranger.sendall(recorded)
        while content := stranger.recv(65536):
            received += content
    return received


@contextlib.contextmanager
def recording(address: CurveAddress) -> Iterator[tuple[CurveAddress, Callable[[], bytes]]]:
    """The address of a proxy in front of a server, and what its one client has sent."""
    sent = bytearray()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        to_server = connect(address)

        def relay(source: socket.socket, target: socket.socket, record: bytearray | None) -> None:
            with contextlib.suppress(OSError):
                while content := source.recv(65536):
                    if record is not None:
                        record += content
                    target.sendall(content)
                target.shutdown(socket.SHUT_WR)

        def serve() -> None:
            client, _ = listening.accept()
            with client:
                back = threading.Thread(target=relay, args=(to_server, client, None))
                back.start()
                relay(client, to_server, sent)
                back.join()

        thread = threading.Thread(target=serve)
        thread.start()
        yield replace(address, endpoint=f"tcp://127.0.0.1:{listening.getsockname()[1]}"), lambda: bytes(sent)
        thread.join()
        to_server.close()
