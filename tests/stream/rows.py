"""Rows to put: what they hold follows from their index, so that a reader can tell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dora.core.records import GroupId, RequestId
from dora.stream.batch import Batch
from dora.stream.fields import Field
from dora.stream.lines import NewRow

IDS, LOGPROBS, REWARD = (
    Field("ids", "<i4", (None,)),
    Field("logprobs", "<f4", (None,)),
    Field("reward", "<f8"),
)
ROUTES = Field("routes", "<i2", (None, 3))
FIELDS = (IDS, LOGPROBS, REWARD, ROUTES)
GROUP_SIZE = 2


def row(number: int, version: int = 0, group_size: int = GROUP_SIZE) -> NewRow:
    """Row `number`; rows that follow one another share a group."""
    return NewRow(RequestId(0, number // group_size, number % group_size), version, length(number))


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


def numbers(batch: Batch) -> list[int]:
    """Which rows these are, by their id; checked against what they hold."""
    found = [i.row * GROUP_SIZE + i.sibling for i in batch.ids]
    for number, values in zip(found, batch.rows("ids"), strict=True):
        np.testing.assert_array_equal(values, ids(number))
    return found
