"""Rows whose columns follow from their number, so that a reader can check them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from tests.stream.processes import TASK

from dora.core.types import GroupId, RequestId
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest, SampleMeta
from dora.stream.schema import Field, StreamBatch

IDS, LOGPROBS, REWARD = (
    Field("ids", "<i4", (None,)),
    Field("logprobs", "<f4", (None,)),
    Field("reward", "<f8"),
)
ROUTES = Field("routes", "<i2", (None, 3))
FIELDS = (IDS, LOGPROBS, REWARD, ROUTES)
GROUP_SIZE = 2
ALL = BatchRequest(max_rows=99)


def row(number: int, version: int = 0, group_size: int = GROUP_SIZE) -> SampleMeta:
    """Row `number`; consecutive rows share a group."""
    return SampleMeta(RequestId(0, number // group_size, number % group_size), version, length(number))


def group(number: int) -> GroupId:
    return GroupId(0, number)


def length(number: int) -> int:
    return number % 5  # some answers are empty


def ids(number: int) -> Any:
    return np.arange(number, number + length(number), dtype=np.int32)


def columns(numbers: Sequence[int]) -> dict[str, Any]:
    """Two jagged columns of these rows."""
    return {"ids": [ids(n) for n in numbers], "logprobs": [ids(n).astype(np.float32) for n in numbers]}


def rewards(numbers: Sequence[int]) -> dict[str, Any]:
    return {"reward": np.array(numbers, np.float64)}


def numbers(batch: StreamBatch) -> list[int]:
    """The numbers of these rows; asserts that their ids match."""
    found = [request.row * GROUP_SIZE + request.sibling for request in batch.requests]
    for number, values in zip(found, batch.rows("ids"), strict=True):
        np.testing.assert_array_equal(values, ids(number))
    return found


def put(client: StreamClient, *which: int) -> range:
    return client.put([row(n) for n in which], columns(which))


def get(
    client: StreamClient, name: str = TASK, request: BatchRequest = ALL, wait_s: float = 10.0
) -> StreamBatch:
    batch = client.get(name, request, wait_s)
    assert isinstance(batch, StreamBatch)
    return batch
