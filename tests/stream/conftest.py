"""A stream behind a server in a thread, and its clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.stream.processes import TASK
from tests.stream.sample_rows import FIELDS

from dora.stream import transport
from dora.stream.client import StreamClient
from dora.stream.server import StreamServer
from dora.stream.storage import SampleStream


@pytest.fixture
def server(folder: Path) -> Iterator[StreamServer]:
    made = StreamServer(
        SampleStream(FIELDS, folder), [transport.stream_endpoint(folder), "tcp://127.0.0.1:*"]
    )
    thread = made.start()
    yield made
    made.stop()
    thread.join()


@pytest.fixture
def new_client(server: StreamServer) -> Iterator[Callable[..., StreamClient]]:
    """Makes clients, by default local ones; a remote one does not share memory."""
    with ExitStack() as stack:

        def made(is_local: bool = True) -> StreamClient:
            return stack.enter_context(StreamClient(server.endpoints[not is_local], timeout_s=20.0))

        yield made


@pytest.fixture(params=["local", "remote"])
def client(new_client: Callable[..., StreamClient], request: pytest.FixtureRequest) -> StreamClient:
    """Both are on this machine."""
    made = new_client(request.param == "local")
    assert made.shares_memory == (request.param == "local")
    made.register_consumer(TASK, ["ids", "logprobs"])
    made.register_consumer("actor", ["ids", "reward"], group_size=2)
    return made
