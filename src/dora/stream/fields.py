"""Columns: fields with a dtype and a shape, and blocks, which hold some columns of some rows as bytes.

A block has its columns one after the other, each from a multiple of 64 bytes on. A jagged column is
int64 offsets [rows + 1] and then the values of all rows, end to end: nothing is padded.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.errors import StreamError

ALIGNMENT = 64  # bytes
Array = NDArray[Any]
Buffer = memoryview | bytearray | bytes


@dataclass(frozen=True)
class Field:
    """A column: numpy's name of its dtype, and the shape of one row's value; None in front: any length."""

    name: str
    dtype: str
    shape: tuple[int | None, ...] = ()

    def __post_init__(self) -> None:
        if None in self.shape[1:]:
            raise StreamError(f"field {self.name!r}: shape {self.shape} may have None in front only")
        if np.dtype(self.dtype).hasobject:
            raise StreamError(
                f"field {self.name!r}: dtype {self.dtype!r} has no fixed size; use numbers or 'u1'"
            )

    @property
    def is_jagged(self) -> bool:
        return self.shape[:1] == (None,)

    @property
    def inner(self) -> tuple[int, ...]:
        """The part of the shape that is the same for all rows."""
        return tuple(size for size in self.shape if size is not None)


@dataclass(frozen=True)
class Column:
    """The values of some rows: [rows, *shape], or [sum of lengths, *inner] with offsets [rows + 1]."""

    values: Array
    offsets: NDArray[np.int64] | None = None

    def __len__(self) -> int:
        return len(self.values) if self.offsets is None else len(self.offsets) - 1

    def __getitem__(self, row: int) -> Array:
        if self.offsets is None:
            return self.values[row : row + 1].reshape(self.values.shape[1:])  # a view, of a scalar too
        return self.values[self.offsets[row] : self.offsets[row + 1]]

    def part(self, rows: NDArray[np.int32]) -> Column:
        """Some rows in the order given; a view, where they follow one another."""
        first, num = int(rows[0]), len(rows)
        if bool((np.diff(rows) == 1).all()):
            if self.offsets is None:
                return Column(self.values[first : first + num])
            offsets = self.offsets[first : first + num + 1]
            return Column(self.values[offsets[0] : offsets[-1]], offsets - offsets[0])
        if self.offsets is None:
            return Column(self.values[rows])
        return joined([self[row] for row in rows.tolist()])


Given = Mapping[str, Column | Array | Sequence[Array]]


def joined(rows: Sequence[Array]) -> Column:
    """A jagged column of these rows."""
    return Column(np.concatenate(rows), _offsets(rows))


def _offsets(rows: Sequence[Array]) -> NDArray[np.int64]:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum([len(row) for row in rows], out=offsets[1:])
    return offsets


class Packing:
    """Some columns of some rows, checked, before they are copied into a block."""

    def __init__(self, fields: Mapping[str, Field], given: Given, num_rows: int) -> None:
        """Raises StreamError for an unknown field, a wrong dtype, shape or number of rows."""
        if not given:
            raise StreamError("no column was given")
        if not num_rows:
            raise StreamError("no row was given")
        self.names = tuple(given)
        self._parts: list[tuple[Array | Sequence[Array], int, int]] = []  # values, at byte, bytes
        self.num_bytes = 0
        for name, column in given.items():
            if name not in fields:
                raise StreamError(f"field {name!r} is not declared; declared are {', '.join(fields)}")
            self._add(fields[name], column, num_rows)

    def write(self, buffer: Buffer) -> None:
        """Copy everything once, to the beginning of `buffer`."""
        for values, at, num_bytes in self._parts:
            into = np.frombuffer(buffer, np.uint8, num_bytes, at)
            if isinstance(values, np.ndarray):
                into[:] = np.ascontiguousarray(values).reshape(-1).view(np.uint8)
            elif values:
                flat = into.view(values[0].dtype).reshape(-1, *values[0].shape[1:])
                np.concatenate(values, out=flat)

    def _add(self, field: Field, column: Column | Array | Sequence[Array], num_rows: int) -> None:
        if len(column) != num_rows:
            raise StreamError(f"field {field.name!r} has {len(column)} values for {num_rows} rows")
        if isinstance(column, Column):
            self._add_column(field, column)
        elif field.is_jagged:
            rows, dtype, inner = [*column], np.dtype(field.dtype), field.inner
            for row in rows:
                if (
                    type(row) is not np.ndarray
                    or row.dtype != dtype
                    or not row.ndim
                    or row.shape[1:] != inner
                ):
                    _check(field, row)
            self._append(_offsets(rows), 8 * (num_rows + 1))
            self._append(rows, sum(row.nbytes for row in rows))
        else:
            values = column if isinstance(column, np.ndarray) else _stacked(field, column)
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
        self._parts.append((values, self.num_bytes, num_bytes))
        self.num_bytes += -(-num_bytes // ALIGNMENT) * ALIGNMENT


def _stacked(field: Field, rows: Sequence[Array]) -> Array:
    for row in rows:
        _check(field, row)
    return np.stack(rows)


def _check(field: Field, value: Any) -> None:
    """Raises StreamError unless `value` may be one row's value of the field."""
    if not isinstance(value, np.ndarray | np.generic) or value.dtype != np.dtype(field.dtype):
        found = getattr(value, "dtype", type(value).__name__)
        raise StreamError(f"field {field.name!r} is {found} and was declared {field.dtype}: convert it first")
    inner = value.shape[1:] if field.is_jagged else value.shape
    if (field.is_jagged and not value.shape) or inner != field.inner:
        raise StreamError(f"field {field.name!r} has shape {value.shape} and was declared {field.shape}")


def unpack(
    fields: Mapping[str, Field], names: Sequence[str], num_rows: int, block: Buffer
) -> dict[str, Column]:
    """The columns of a block, as views of it that cannot be written to. Raises StreamError if it is cut."""
    block = memoryview(block).toreadonly()
    columns, at = {}, 0

    def take(dtype: Any, num: int, inner: tuple[int, ...]) -> Array:
        nonlocal at
        num_bytes = num * math.prod(inner) * np.dtype(dtype).itemsize
        if not 0 <= num_bytes <= len(block) - at:
            raise StreamError("a block is shorter than its columns")
        values = np.frombuffer(block[at : at + num_bytes], dtype)
        at += -(-num_bytes // ALIGNMENT) * ALIGNMENT
        return values.reshape(num, *inner) if inner else values

    for name in names:
        field = fields[name]
        if field.is_jagged:
            offsets = take(np.int64, num_rows + 1, ())
            if offsets[0] != 0 or np.count_nonzero(offsets[1:] < offsets[:-1]):
                raise StreamError(f"field {name!r}: a block whose offsets do not ascend")
            columns[name] = Column(take(field.dtype, int(offsets[-1]), field.inner), offsets)
        else:
            columns[name] = Column(take(field.dtype, num_rows, field.inner))
    return columns
