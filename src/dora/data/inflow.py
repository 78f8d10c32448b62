"""Prompts that somebody adds while a run goes: a dataset that only grows.

Its rows are the lines of a file, in the order in which they came. What was added is there again after the
death of the process; a line that was cut off was never promised to anybody.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dora.data.dataset import Dataset
from dora.errors import DataError


class Inflow(Dataset):
    """The rows of the JSONL file `path`, which is made when the first come."""

    MIN_ROWS = 0

    def __init__(self, path: Path, prompt_key: str = "prompt", *, fsync: bool = False) -> None:
        """`fsync`: rows survive a loss of power. Raises DataError for a file that is damaged."""
        self._path, self._fsync = path, fsync
        written = path.read_bytes() if path.exists() else b""
        self._num_bytes = written.rfind(b"\n") + 1
        try:
            self._own = [json.loads(line) for line in written[: self._num_bytes].splitlines()]
        except ValueError as error:
            raise DataError(f"{path} is damaged ({error}); the run cannot go on with it") from error
        super().__init__(self._own, prompt_key, str(path), is_lines=True)

    def has(self, first: int, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether rows, counted from `first`, are there already."""
        return self._own[first : first + len(rows)] == [*rows]

    def add(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows with a usable prompt each; they are durable when this returns. Raises DataError.

        So does a file that has lost rows meanwhile. An OSError leaves everything as it was.
        """
        Dataset(rows, self.prompt_key, "what was put")  # which checks them
        try:
            lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        except ValueError as error:
            raise DataError("what was put holds nan or inf, which JSON has not; leave them out") from error
        is_there = self._path.exists()
        if (self._path.stat().st_size if is_there else 0) < self._num_bytes:
            raise DataError(f"{self._path} has lost rows that were put; put it back as it was")
        with self._path.open("r+b" if is_there else "xb") as file:
            file.truncate(self._num_bytes)
            file.seek(self._num_bytes)
            file.write(lines)
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        self._num_bytes += len(lines)
        self._own += map(dict, rows)
