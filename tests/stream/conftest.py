"""A stream behind a server in a thread, and its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.stream.sample_rows import serving

from dora.stream.client import StreamClient
from dora.stream.server import StreamServer


@pytest.fixture
def server(folder: Path) -> Iterator[StreamServer]:
    with serving(folder) as server:
        yield server


@pytest.fixture
def new_client(server: StreamServer, folder: Path) -> Iterator[Callable[..., StreamClient]]:
    """Makes clients, by default local ones; a remote one gets the columns with the replies."""
    with ExitStack() as stack:

        def made(is_local: bool = True) -> StreamClient:
            address = folder if is_local else server.remote
            assert address is not None
            return stack.enter_context(StreamClient(address, timeout_s=20.0))

        yield made


@pytest.fixture
def producer(new_client: Callable[..., StreamClient]) -> StreamClient:
    return new_client()


@pytest.fixture(params=["local", "remote"])
def client(new_client: Callable[..., StreamClient], request: pytest.FixtureRequest) -> StreamClient:
    """A client that reads; both are on this machine."""
    return new_client(request.param == "local")
