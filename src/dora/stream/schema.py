"""Fields, columns and batches, and how columns are packed into blocks of bytes.

A block has some columns of some rows, one column after the other, each aligned to 64 bytes. A jagged column
is int64 offsets [rows + 1] followed by the concatenated values of all rows: nothing is padded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.core.types import GroupId, RequestId
from dora.errors import StreamError

ALIGNMENT = 64  # bytes
Array = NDArray[Any]
Buffer = memoryview | bytearray | bytes
ColumnData = Mapping[str, Array | Sequence[Array]]  # by field: numbers [rows], or an array for each row


class Field(NamedTuple):
    """A column's name and numpy dtype. A row has one number, or in a jagged column an array of any length."""

    name: str
    dtype: str
    is_jagged: bool = False


@dataclass(frozen=True)
class Column:
    """The values of a block's rows, end to end; those of a jagged column have offsets [rows + 1]."""

    values: Array
    offsets: NDArray[np.int64] | None

    def __getitem__(self, row: int) -> Any:
        if self.offsets is None:
            return self.values[row]
        return self.values[self.offsets[row] : self.offsets[row + 1]]


class StreamBatch:
    """Leased rows. Arrays are views of shared memory: read or copy them before the lease ends."""

    def __init__(
        self,
        lease: int,
        rows: NDArray[np.int64],
        fields: Mapping[str, Field],
        parts: Sequence[BatchPart],
    ) -> None:
        """`rows` [n, 4]: epoch, dataset row, sibling, version."""
        self.lease, self._rows = lease, rows
        self._columns: dict[str, list[tuple[Column, NDArray[np.int32]]]] = {}
        for part in parts:
            for name, column in unpack(fields, part.names, part.num_rows, part.block).items():
                self._columns.setdefault(name, []).append((column, part.pairs))

    def __len__(self) -> int:
        return len(self._rows)

    def __contains__(self, name: str) -> bool:
        """Whether the batch has this column."""
        return name in self._columns

    @property
    def requests(self) -> list[RequestId]:
        """Request of each row."""
        return [RequestId(*numbers) for numbers in self._rows[:, :3].tolist()]

    @property
    def groups(self) -> list[GroupId]:
        """Group of each row; the rows of a group follow each other, in sibling order."""
        return [GroupId(*numbers) for numbers in self._rows[:, :2].tolist()]

    @property
    def versions(self) -> list[int]:
        """Policy version of each row."""
        return [int(version) for version in self._rows[:, 3]]

    def rows(self, name: str) -> list[Any]:
        """A column, by row. Raises KeyError for a field that the consumer does not need."""
        found: list[Any] = [None] * len(self)
        for column, pairs in self._columns[name]:
            for row, position in pairs.tolist():
                found[row] = column[position]
        return found


class BatchPart(NamedTuple):
    """A block with columns of some rows of a batch; pairs [k, 2]: row of the batch, row of the block."""

    names: tuple[str, ...]
    num_rows: int
    block: Buffer
    pairs: NDArray[np.int32]


class TimedOut(NamedTuple):
    """The result of a get that reached its timeout, and what it waited for."""

    wait_s: float
    reason: str


class BlockPacker:
    """Validates some columns of some rows and copies them into a block."""

    def __init__(self, fields: Mapping[str, Field], columns: ColumnData) -> None:
        """Raises StreamError for an unknown field, a wrong dtype, shape or number of rows, and for none."""
        self.names, self.num_rows = tuple(columns), max(map(len, columns.values()), default=0)
        if not self.num_rows:
            raise StreamError("no rows or no columns: pass at least one of each")
        self._pieces: list[tuple[Sequence[Array], int]] = []  # arrays to concatenate, and their offset
        self.num_bytes = 0
        for name, column in columns.items():
            if name not in fields:
                raise StreamError(f"field {name!r} is not declared; declared are {', '.join(fields)}")
            if len(column) != self.num_rows:
                raise StreamError(f"field {name!r} has {len(column)} values for {self.num_rows} rows")
            field = fields[name]
            arrays = [*column] if field.is_jagged else [np.asarray(column)]
            _check(field, arrays)
            if field.is_jagged:
                self._append([np.cumsum([0, *map(len, arrays)], dtype=np.int64)])
            self._append(arrays)

    def write(self, buffer: Buffer) -> None:
        """Copy all columns to the start of `buffer`."""
        for arrays, offset in self._pieces:
            target = np.frombuffer(buffer, arrays[0].dtype, sum(map(len, arrays)), offset)
            np.concatenate(arrays, out=target)

    def _append(self, arrays: Sequence[Array]) -> None:
        self._pieces.append((arrays, self.num_bytes))
        self.num_bytes = _aligned(self.num_bytes + sum(array.nbytes for array in arrays))


def _check(field: Field, arrays: Sequence[Any]) -> None:
    """Raises StreamError unless all arrays have the field's dtype and one dimension."""
    dtype = np.dtype(field.dtype)
    for array in arrays:
        if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != 1:
            found = f"{getattr(array, 'dtype', type(array).__name__)} of shape {np.shape(array)}"
            raise StreamError(
                f"field {field.name!r} is {found} and was declared {field.dtype}, one-dimensional: convert it"
            )


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def unpack(
    fields: Mapping[str, Field], names: Sequence[str], num_rows: int, block: Buffer
) -> dict[str, Column]:
    """The columns of a block, as views. Raises ValueError for a block that is too short."""
    columns, offset = {}, 0

    def read(dtype: Any, num: int) -> Array:
        nonlocal offset
        values = np.frombuffer(block, dtype, num, offset)
        offset = _aligned(offset + values.nbytes)
        return values

    for name in names:
        offsets, num_values = None, num_rows
        if fields[name].is_jagged:
            offsets = read(np.int64, num_rows + 1)
            num_values = int(offsets[-1])
        columns[name] = Column(read(fields[name].dtype, num_values), offsets)
    return columns
