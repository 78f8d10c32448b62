"""Fields, columns and batches, and how columns are packed into blocks of bytes.

A block has some columns of some rows, one column after the other, each aligned to 64 bytes. A jagged column
is int64 offsets [rows + 1] followed by the concatenated values of all rows: nothing is padded.
"""

from __future__ import annotations

import math
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


@dataclass(frozen=True)
class Field:
    """A column's name, its numpy dtype, and the shape of one row's value; a leading None: any length."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if None in self.shape[1:]:
            raise StreamError(
                f"field {self.name!r}: shape {self.shape}: only the first dimension may be None (jagged)"
            )
        if np.dtype(self.dtype).hasobject:
            raise StreamError(
                f"field {self.name!r}: dtype {self.dtype!r} has no fixed size; use numbers or 'u1'"
            )

    @property
    def is_jagged(self) -> bool:
        return self.shape[:1] == (None,)

    @property
    def inner_shape(self) -> tuple[int, ...]:
        """The part of the shape that is the same for all rows."""
        return tuple(size for size in self.shape if size is not None)


@dataclass(frozen=True)
class Column:
    """The values of some rows: [rows, *shape]; jagged: [sum of lengths, *inner_shape], offsets [rows + 1]."""

    values: Array
    offsets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if self.offsets is None:
            return self.values[row : row + 1].reshape(self.values.shape[1:])  # a view, also of a scalar
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def select(self, rows: NDArray[np.int32]) -> Column:
        """The given rows in the given order; a view if the rows are consecutive."""
        first, num = int(rows[0]), len(rows)
        if bool((np.diff(rows) == 1).all()):
            if self.offsets is None:
                return Column(self.values[first : first + num])
            offsets = self.offsets[first : first + num + 1]
            return Column(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        if self.offsets is None:
            return Column(self.values[rows])
        return jagged_column([self[row] for row in rows.tolist()])


ColumnData = Mapping[str, Column | Array | Sequence[Array]]  # by field: columns, or one array per row


def jagged_column(rows: Sequence[Array]) -> Column:
    """Concatenate rows of any length."""
    return Column(np.concatenate(rows), _offsets(rows))


def _offsets(rows: Sequence[Array]) -> NDArray[np.int64]:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets


class StreamBatch:
    """Leased rows. Columns are views of shared memory: read or copy them before the lease ends."""

    def __init__(
        self,
        lease: int,
        rows: NDArray[np.int64],
        fields: Mapping[str, Field],
        parts: Sequence[BatchPart],
    ) -> None:
        """`rows` [n, 6]: index, epoch, dataset row, sibling, version, number of tokens."""
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
    def indices(self) -> list[int]:
        """Global index of each row."""
        return [int(index) for index in self._rows[:, 0]]

    @property
    def requests(self) -> list[RequestId]:
        """Request of each row."""
        return [RequestId(*numbers) for numbers in self._rows[:, 1:4].tolist()]

    @property
    def groups(self) -> list[GroupId]:
        """Group of each row."""
        return [GroupId(*numbers) for numbers in self._rows[:, 1:3].tolist()]

    @property
    def versions(self) -> list[int]:
        """Policy version of each row."""
        return [int(version) for version in self._rows[:, 4]]

    @property
    def num_tokens(self) -> list[int]:
        """Number of tokens of each row."""
        return [int(num) for num in self._rows[:, 5]]

    def rows(self, name: str) -> list[Array]:
        """A column as one view per row. Raises KeyError for a field that the consumer does not need."""
        found: list[Array | None] = [None] * len(self)
        for column, pairs in self._columns[name]:
            for row, position in pairs.tolist():
                found[row] = column[position]
        return [row for row in found if row is not None]

    def column(self, name: str) -> Column:
        """A column of all rows; a view if they are consecutive in one block. Raises KeyError as `rows`."""
        parts = self._columns[name]
        if len(parts) == 1:
            column, pairs = parts[0]
            return column.select(pairs[:, 1])
        rows = self.rows(name)
        return Column(np.stack(rows)) if parts[0][0].offsets is None else jagged_column(rows)


class BatchPart(NamedTuple):
    """A block with columns of some rows of a batch; pairs [k, 2]: row of the batch, row of the block."""

    names: tuple[str, ...]
    num_rows: int
    block: Buffer
    pairs: NDArray[np.int32]


class TimedOut(NamedTuple):
    """The result of a put or get that reached its timeout without effect, and what it waited for."""

    wait_s: float
    reason: str


class BlockPacker:
    """Validates some columns of some rows and copies them into a block."""

    def __init__(self, fields: Mapping[str, Field], columns: ColumnData, num_rows: int) -> None:
        """Raises StreamError for an unknown field, a wrong dtype, shape or number of rows."""
        if not columns:
            raise StreamError("no columns: pass at least one")
        if not num_rows:
            raise StreamError("no rows: pass at least one")
        self.names = tuple(columns)
        self._pieces: list[tuple[Array | Sequence[Array], int, int]] = []  # values, offset, number of bytes
        self.num_bytes = 0
        for name, column in columns.items():
            if name not in fields:
                raise StreamError(f"field {name!r} is not declared; declared are {', '.join(fields)}")
            self._add(fields[name], column, num_rows)

    def write(self, buffer: Buffer) -> None:
        """Copy all columns to the start of `buffer`."""
        for values, offset, num_bytes in self._pieces:
            target = np.frombuffer(buffer, np.uint8, num_bytes, offset)
            if isinstance(values, np.ndarray):
                target[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            elif values:
                flat = target.view(values[0].dtype).reshape(-1, *values[0].shape[1:])
                np.concatenate(values, out=flat)

    def _add(self, field: Field, column: Column | Array | Sequence[Array], num_rows: int) -> None:
        if len(column) != num_rows:
            raise StreamError(f"field {field.name!r} has {len(column)} values for {num_rows} rows")
        if isinstance(column, Column):
            self._add_column(field, column)
        elif field.is_jagged:
            rows, dtype, inner_shape = [*column], np.dtype(field.dtype), field.inner_shape
            for row in rows:
                if (
                    type(row) is not np.ndarray
                    or row.dtype != dtype
                    or not row.ndim
                    or row.shape[1:] != inner_shape
                ):
                    _check(field, row)
            self._append(_offsets(rows), 8 * (num_rows + 1))
            self._append(rows, sum(row.nbytes for row in rows))
        else:
            values = column if isinstance(column, np.ndarray) else _stack(field, column)
            _check(field, values[0] if values.ndim > 1 else values[:1].reshape(()))
            self._append(values, values.nbytes)

    def _add_column(self, field: Field, column: Column) -> None:
        if field.is_jagged:
            _check(field, column.values)
            assert column.offsets is not None, f"{field.name} has no offsets"
            self._append(column.offsets, column.offsets.nbytes)
        else:
            _check(field, column[0])
        self._append(column.values, column.values.nbytes)

    def _append(self, values: Array | Sequence[Array], num_bytes: int) -> None:
        self._pieces.append((values, self.num_bytes, num_bytes))
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _stack(field: Field, rows: Sequence[Array]) -> Array:
    for row in rows:
        _check(field, row)
    return np.stack(rows)


def _check(field: Field, value: Any) -> None:
    """Raises StreamError unless `value` has the dtype and shape of one row."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype != np.dtype(field.dtype):
        found = getattr(value, "dtype", type(value).__name__)
        raise StreamError(f"field {field.name!r} is {found} and was declared {field.dtype}: convert it first")
    inner_shape = value.shape[1:] if field.is_jagged else value.shape
    if (field.is_jagged and not value.shape) or inner_shape != field.inner_shape:
        raise StreamError(f"field {field.name!r} has shape {value.shape} and was declared {field.shape}")


def unpack(
    fields: Mapping[str, Field], names: Sequence[str], num_rows: int, block: Buffer
) -> dict[str, Column]:
    """The columns of a block, as read-only views. Raises StreamError for a truncated or corrupt block."""
    block = memoryview(block).toreadonly()
    columns, offset = {}, 0

    def read(dtype: Any, num: int, inner_shape: tuple[int, ...]) -> Array:
        nonlocal offset
        num_bytes = num * math.prod(inner_shape) * np.dtype(dtype).itemsize
        if not 0 <= num_bytes <= len(block) - offset:
            raise StreamError(f"a block of {len(block)} bytes is shorter than its columns")
        values = np.frombuffer(block[offset : offset + num_bytes], dtype)
        offset += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return values.reshape(num, *inner_shape) if inner_shape else values

    for name in names:
        field = fields[name]
        if field.is_jagged:
            offsets = read(np.int64, num_rows + 1, ())
            if offsets[0] != 0 or np.count_nonzero(offsets[1:] < offsets[:-1]):
                raise StreamError(f"field {name!r}: the offsets of a block do not ascend from 0")
            columns[name] = Column(read(field.dtype, int(offsets[-1]), field.inner_shape), offsets)
        else:
            columns[name] = Column(read(field.dtype, num_rows, field.inner_shape))
    return columns
