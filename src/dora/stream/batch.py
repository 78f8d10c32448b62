"""What a consumer is handed: rows, and views of their columns where the blocks lie.

The views last as long as the lease; who wants to keep what they show makes a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.records import GroupId, RequestId
from dora.stream.fields import Array, Buffer, Column, Field, joined, unpack


class Waited(NamedTuple):
    """A deadline has passed: nothing was put or handed out, and this is whom it waits for."""

    wait_s: float
    why: str


class Part(NamedTuple):
    """A block that has columns of some rows of a batch; pairs [k, 2]: row of the batch, row of the block."""

    names: tuple[str, ...]
    num_rows: int
    block: Buffer
    pairs: NDArray[np.int32]


class Batch:
    """Rows on lease; the columns are read in place, so they must not be used after the lease has ended."""

    def __init__(
        self,
        lease: int,
        rows: NDArray[np.int64],
        fields: Mapping[str, Field],
        parts: Sequence[Part],
    ) -> None:
        """`rows` [n, 6]: index, epoch, row and sibling of the request, version, number of tokens."""
        self.lease, self._rows = lease, rows
        self._columns: dict[str, list[tuple[Column, NDArray[np.int32]]]] = {}
        for part in parts:
            for name, column in unpack(fields, part.names, part.num_rows, part.block).items():
                self._columns.setdefault(name, []).append((column, part.pairs))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        """Whether the column was asked for."""
        return name in self._columns

    @property
    def indices(self) -> list[int]:
        """Global index of each row."""
        return [int(index) for index in self._rows[:, 0]]

    @property
    def ids(self) -> list[RequestId]:
        return [RequestId(*numbers) for numbers in self._rows[:, 1:4].tolist()]

    @property
    def groups(self) -> list[GroupId]:
        """Group of each row."""
        return [GroupId(*numbers) for numbers in self._rows[:, 1:3].tolist()]

    @property
    def versions(self) -> list[int]:
        return [int(version) for version in self._rows[:, 4]]

    @property
    def num_tokens(self) -> list[int]:
        return [int(num) for num in self._rows[:, 5]]

    def rows(self, name: str) -> list[Array]:
        """A column, row by row; nothing is copied."""
        found: list[Array | None] = [None] * len(self)
        for column, pairs in self._columns[name]:
            for row, position in pairs.tolist():
                found[row] = column[position]
        return [row for row in found if row is not None]

    def column(self, name: str) -> Column:
        """A column end to end; a view, where the rows lie one after the other in one block."""
        parts = self._columns[name]
        if len(parts) == 1:
            column, pairs = parts[0]
            return column.part(pairs[:, 1])
        rows = self.rows(name)
        return Column(np.stack(rows)) if parts[0][0].offsets is None else joined(rows)
