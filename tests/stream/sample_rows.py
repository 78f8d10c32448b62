"""Groups of two rows whose columns follow from the number of the group, so that a reader can check them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tests.stream.processes import TASK

from dora.core.types import GroupId, RequestId
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest, ConsumerDeclaration, SampleMeta
from dora.stream.schema import Field, StreamBatch
from dora.stream.server import StreamServer
from dora.stream.storage import SampleStream

IDS, LOGPROBS, REWARD, ROUTES = (
    Field("ids", "<i4", is_jagged=True),
    Field("logprobs", "<f4", is_jagged=True),
    Field("reward", "<f8"),
    Field("routes", "<i2", is_jagged=True),
)
FIELDS = (IDS, LOGPROBS, REWARD, ROUTES)
CONSUMERS = (ConsumerDeclaration(TASK, ["ids", "logprobs"]), ConsumerDeclaration("actor", ["ids", "reward"]))
GROUP_SIZE = 2
ALL = BatchRequest(max_rows=99)


@contextmanager
def serving(
    folder: Path,
    consumers: Sequence[ConsumerDeclaration] = CONSUMERS,
    kind: type[SampleStream] = SampleStream,
) -> Iterator[StreamServer]:
    """A server in a thread."""
    server = StreamServer(kind(FIELDS, consumers, folder), "127.0.0.1")
    thread = server.start()
    yield server
    server.stop()
    thread.join()


def group(number: int) -> GroupId:
    return GroupId(0, number)


def samples(*groups: int, version: int = 0, group_size: int = GROUP_SIZE) -> list[SampleMeta]:
    return [
        SampleMeta(RequestId(0, number, k), version, len(ids(number, k)))
        for number in groups
        for k in range(group_size)
    ]


def ids(number: int, sibling: int) -> Any:
    """Some are empty."""
    return np.arange(number, number + (number + sibling) % 5, dtype=np.int32)


def columns(*groups: int) -> dict[str, Any]:
    """Two jagged columns of these groups."""
    found = [ids(number, k) for number in groups for k in range(GROUP_SIZE)]
    return {"ids": found, "logprobs": [values.astype(np.float32) for values in found]}


def rewards(*groups: int) -> dict[str, Any]:
    return {"reward": np.repeat(np.array(groups, np.float64), GROUP_SIZE)}


def numbers(batch: StreamBatch) -> list[int]:
    """The numbers of its groups; asserts that they are whole, and that their ids match."""
    found = [number for _, number in dict.fromkeys(batch.groups)]
    assert batch.groups == [group(number) for number in found for _ in range(GROUP_SIZE)]
    for row, values in enumerate(batch.rows("ids")):
        np.testing.assert_array_equal(values, ids(found[row // GROUP_SIZE], row % GROUP_SIZE))
    return found


def put(client: StreamClient, *groups: int) -> None:
    client.put(samples(*groups), columns(*groups))


def get(
    client: StreamClient, name: str = TASK, request: BatchRequest = ALL, wait_s: float = 10.0
) -> StreamBatch:
    batch = client.get(name, request, wait_s)
    assert isinstance(batch, StreamBatch)
    return batch
