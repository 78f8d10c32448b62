"""Idle connections and unfinished request heads neither block other clients nor use up the run's files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.service.fake_run import FakeRun, serve

from dora.service import connections
from dora.service.client import Address, Client

MAX_CONNECTIONS = 4
HEAD = b"GET /health HTTP/1.1\r\nhost: run\r\n\r\n"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """The address of a service with few connections."""
    monkeypatch.setattr(connections, "max_connections", lambda: MAX_CONNECTIONS)
    run = FakeRun(tmp_path)
    with serve(run):
        yield Address.of_run(run.setup.out)


def connect(address: Address) -> socket.socket:
    url = urlsplit(address.url)
    return socket.create_connection((url.hostname, url.port), timeout=20)


def is_closed_by_server(connection: socket.socket) -> bool:
    """Waits until the server has closed the connection."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_idle_connections_are_closed_for_new_ones(address: Address) -> None:
    with Client(address) as run:
        assert run.status()["phase"] == "training"
        idle = [connect(address) for _ in range(5 * MAX_CONNECTIONS)]
        assert run.status()["phase"] == "training"
        for connection in idle[:-MAX_CONNECTIONS]:
            assert is_closed_by_server(connection)
        for connection in idle:
            connection.close()


@pytest.mark.parametrize("sent", [b"", HEAD[:20], HEAD + HEAD[:20]])
def test_a_connection_with_an_unfinished_head_is_closed(
    address: Address, monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_TIMEOUT_S", 0.05)
    with connect(address) as connection:
        connection.sendall(sent)
        if sent.startswith(HEAD):
            response = b""
            while b"ok" not in response:
                response += connection.recv(10_000)
            connection.sendall(b"more")
        assert is_closed_by_server(connection)


def test_half_of_the_open_files_are_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, expected in ((256, 128), (10**6, 1024), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limit=limit: (limit, limit))
        assert connections.max_connections() == expected


def test_clients_without_a_token_write_nothing_to_the_log(
    capfd: pytest.CaptureFixture[str], address: Address
) -> None:
    for sent in (b"no HTTP\r\n\r\n", HEAD[:-2] + b"connection: upgrade\r\nupgrade: websocket\r\n\r\n"):
        with connect(address) as connection:
            connection.sendall(sent)
            assert connection.recv(1) == b"H"
    assert capfd.readouterr().err == ""
