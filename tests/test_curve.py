"""A peer without the key of a CURVE server sends and receives nothing, and the server continues."""

from __future__ import annotations

import resource
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import zmq
from tests.strangers import STRANGERS, connect, recording, replay

from dora import curve
from dora.curve import CurveAddress, CurveConnection, CurveServer
from dora.runtime.process.rpc import CurveChannel, RequestClient, RequestServer

LOOPBACK = "127.0.0.1"


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[object, tuple[object, ...]]:
        return Path.touch, (self._path,)


class Served:
    """A server that keeps each request and replies with a secret."""

    def __init__(self) -> None:
        self.requests: list[Any] = []
        self.server = RequestServer(LOOPBACK, self._handle)
        self.address = self.server.address

    def _handle(self, request: Any) -> str:
        self.requests.append(request)
        return "secret"


@pytest.fixture
def served() -> Iterator[Served]:
    made = Served()
    with closing(made.server):
        yield made


@pytest.mark.parametrize("attempt", STRANGERS)
def test_a_stranger_receives_nothing_and_the_server_goes_on(
    served: Served, attempt: Callable[[CurveAddress], None]
) -> None:
    with closing(RequestClient(served.address, 20.0)) as client:
        assert client.call("before") == "secret"
        attempt(served.address)
        assert client.call("after") == "secret"
    with closing(RequestClient(served.address, 20.0)) as another:
        assert another.call("new") == "secret"
    assert served.requests == ["before", "after", "new"]


@pytest.mark.parametrize("attempt", STRANGERS)
def test_a_stranger_neither_takes_nor_closes_the_channel_of_a_worker(
    attempt: Callable[[CurveAddress], None],
) -> None:
    server = CurveServer()
    here, address = CurveChannel.listen(server, LOOPBACK)
    for each in address:
        attempt(each)
    with closing(CurveChannel.connect(address)) as there, closing(here):
        there.send("hello")
        assert here.recv() == "hello"
        for each in address:
            attempt(each)
        here.send("for the worker only")
        assert there.recv() == "for the worker only"
        there.send("bye")
        assert here.recv() == "bye"
    server.close()


def test_replayed_bytes_are_not_served(served: Served, tmp_path: Path) -> None:
    trap = tmp_path / "sprung"
    with recording(served.address) as (address, sent), closing(RequestClient(address, 20.0)) as client:
        assert client.call(Trap(trap)) == "secret"
    assert trap.exists(), "the genuine request is unpickled"
    trap.unlink()
    num_requests = len(served.requests)
    received = replay(served.address, sent())
    assert len(received) < 1000, "no more than the server's half of a handshake"
    assert len(served.requests) == num_requests
    assert not trap.exists()
    with closing(RequestClient(served.address, 20.0)) as client:
        assert client.call("after") == "secret"


def test_recorded_bytes_do_not_contain_what_was_said(served: Served) -> None:
    with recording(served.address) as (address, sent), closing(RequestClient(address, 20.0)) as client:
        client.call(b"plain words" * 100)
    assert b"plain words" not in sent()


def test_a_key_is_valid_for_its_own_socket_only() -> None:
    server = CurveServer()
    (one, address), (other, _) = (server.bind(zmq.ROUTER, f"tcp://{LOOPBACK}:*") for _ in range(2))
    elsewhere = other.getsockopt_string(zmq.LAST_ENDPOINT)
    with pytest.raises(ConnectionRefusedError, match="has other keys"):
        CurveConnection(
            CurveAddress(elsewhere, address.server_key, address.client_key, address.client_secret)
        )
    one.close()
    other.close()
    server.close()


def test_the_secret_of_an_address_is_not_printed(served: Served) -> None:
    assert served.address.client_secret not in repr(served.address)


def test_a_server_ends_although_clients_have_left_without_their_replies() -> None:
    for _ in range(50):
        server = CurveServer()
        bound, address = server.bind(zmq.ROUTER, f"tcp://{LOOPBACK}:*")
        client = CurveConnection(address)
        client.send([b"request"])
        request = bound.recv_multipart()
        client.close()
        bound.send_multipart(request)
        bound.close()
        server.close()


def test_a_server_that_never_completes_a_handshake_is_given_up() -> None:
    with socket.create_server((LOOPBACK, 0)) as silent:
        endpoint = f"tcp://{LOOPBACK}:{silent.getsockname()[1]}"
        key, secret = (each.decode() for each in zmq.curve_keypair())
        with pytest.raises(TimeoutError, match=r"has not replied for 0\.2 s"):
            CurveConnection(CurveAddress(endpoint, key, key, secret), timeout_s=0.2)


def test_a_server_has_sockets_for_more_workers_than_by_default() -> None:
    """1023 is libzmq's default, and a channel takes four."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    server = CurveServer()
    bound = [server.bind(zmq.PULL, f"inproc://{number}")[0] for number in range(1100)]
    for each in bound:
        each.close()
    server.close()
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_silent_stranger_is_disconnected(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(curve, "HANDSHAKE_TIMEOUT_S", 0.3)
    server = CurveServer()
    bound, address = server.bind(zmq.ROUTER, f"tcp://{LOOPBACK}:*")
    strangers = [connect(address) for _ in range(50)]
    for stranger in strangers:
        with stranger:
            while stranger.recv(1000):  # the greeting, then the end
                pass
    assert threading.active_count() < 50, "a stranger costs no thread"
    bound.close()
    server.close()
