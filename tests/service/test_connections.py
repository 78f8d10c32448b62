"""Whoever connects and says nothing costs nobody their call, and the run no files."""

from __future__ import annotations

import resource
import socket
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from tests.service.fake_run import FakeRun

from dora.config.schema import ServiceSection
from dora.service import connections
from dora.service.client import Address, Client
from dora.service.server import WebGateway

MOST = 4
HEAD = b"GET /health HTTP/1.1\r\nhost: run\r\n\r\n"


@pytest.fixture
def address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Address]:
    """Of a service with few connections."""
    monkeypatch.setattr(connections, "most_connections", lambda: MOST)
    run = FakeRun(tmp_path)
    run.setup.out.mkdir()
    door = WebGateway(ServiceSection(), run.setup.out)
    door.open(run.requests, lambda sentence: None)
    yield Address.of_run(run.setup.out)
    run.requests.close()
    door.close()


def connect(address: Address) -> socket.socket:
    url = urlsplit(address.url)
    return socket.create_connection((url.hostname, url.port), timeout=20)


def is_ended(connection: socket.socket) -> bool:
    """Waits until the other side has closed it."""
    try:
        return connection.recv(1) == b""
    except ConnectionResetError:
        return True


def test_connections_that_are_silent_make_room_for_others(address: Address) -> None:
    with Client(address) as run:
        assert run.status()["phase"] == "training"
        silent = [connect(address) for _ in range(5 * MOST)]
        assert run.status()["phase"] == "training"
        for connection in silent[:-MOST]:
            assert is_ended(connection)
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("said", [b"", HEAD[:20], HEAD + HEAD[:20]])
def test_a_head_that_does_not_come_to_its_end_is_not_waited_for(
    address: Address, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(connections, "HEAD_S", 0.05)
    with connect(address) as connection:
        connection.sendall(said)
        if said.startswith(HEAD):
            answer = b""
            while b"ok" not in answer:
                answer += connection.recv(10_000)
            connection.sendall(b"more")
        assert is_ended(connection)


def test_half_of_the_files_that_may_be_open_are_left_to_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for most, found in ((256, 128), (10**6, 1024), (resource.RLIM_INFINITY, 1024)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, most=most: (most, most))
        assert connections.most_connections() == found
