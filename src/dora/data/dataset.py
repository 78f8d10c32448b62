"""Prompts and their order.

A dataset is a list of rows; each holds a prompt and whatever else the reward wants to know.
A cursor walks it epoch after epoch, and one integer says how far it has come.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dora.errors import DataError


class Dataset:
    """Rows that each have a prompt. `origin` names them in errors."""

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], prompt_key: str = "prompt", origin: str = "dataset"
    ) -> None:
        """Raises DataError where there are no rows or one has no usable prompt."""
        if not rows:
            raise DataError(f"{origin} has no rows; a run needs at least one prompt")
        for index, row in enumerate(rows):
            _check_row(row, prompt_key, f"{origin}, row {index}")
        self.origin = origin
        self.prompt_key = prompt_key
        self._rows = rows

    @classmethod
    def from_file(cls, path: Path, prompt_key: str = "prompt") -> Dataset:
        """Read a .jsonl or .parquet file. Raises DataError naming file, line, rule and remedy."""
        if not path.is_file():
            raise DataError(f"dataset {path} does not exist or is not a file")
        readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
        if path.suffix not in readers:
            raise DataError(f"dataset {path} must be one of {', '.join(readers)}, by its name")
        return cls(readers[path.suffix](path), prompt_key, str(path))

    def __len__(self) -> int:
        return len(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """The row as it was read, prompt included."""
        return dict(self._rows[index])

    def prompt(self, index: int) -> str:
        """The prompt of a row."""
        prompt: str = self._rows[index][self.prompt_key]
        return prompt

    def fields(self, index: int) -> dict[str, Any]:
        """The row without its prompt: what a reward function gets as `**row`."""
        return {key: value for key, value in self._rows[index].items() if key != self.prompt_key}

    def check_prompt_lengths(self, num_tokens: Callable[[str], int], max_prompt_length: int) -> None:
        """Raises DataError for the first prompt that has no token, too many, or cannot be tokenized.

        `max_prompt_length` in tokens; `num_tokens` may raise DataError itself.
        """
        for index in range(len(self)):
            try:
                num = num_tokens(self.prompt(index))
            except DataError as error:
                raise DataError(f"{self.origin}, row {index}: {error}") from error
            if not 1 <= num <= max_prompt_length:
                raise DataError(
                    f"{self.origin}, row {index}: the prompt has {num} tokens; the rule is 1 "
                    f"to data.max_prompt_length = {max_prompt_length}; shorten it or raise the limit"
                )


def _check_row(row: object, prompt_key: str, where: str) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f'{where}: is a {type(row).__name__}, must be an object such as {{"prompt": "..."}}')
    if prompt_key not in row:
        raise DataError(
            f"{where}: has no column {prompt_key!r}; it has {', '.join(map(str, row)) or 'none'}; "
            "name the column with data.prompt_key"
        )
    prompt = row[prompt_key]
    if not isinstance(prompt, str):
        raise DataError(f"{where}: {prompt_key} = {prompt!r} is a {type(prompt).__name__}, must be a string")
    for taken in {"prompt", "completion"} - {prompt_key}:
        if taken in row:
            raise DataError(
                f"{where}: the column {taken!r} hides what the reward function gets by that name; rename it"
            )


def _read_jsonl(path: Path) -> list[Any]:
    return list(_json_lines(path))


def _json_lines(path: Path) -> Iterator[Any]:
    number = 0
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if not line.strip():
                    raise DataError(f"{path}, line {number}: is empty; every line must hold one JSON object")
                yield json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {number}: is not JSON ({error}); every line must hold one object"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, after line {number}: is not UTF-8 ({error}); convert the file") from error


def _read_parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise DataError(f"{path}: reading Parquet needs pyarrow; run pip install 'dora-rl[data]'") from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    return rows


@lru_cache(maxsize=2)
def epoch_order(num_rows: int, epoch: int, seed: int) -> tuple[int, ...]:
    """The rows of one epoch in a shuffled order that depends on the three arguments alone."""
    # Sorted by random(), the one generator method whose sequence Python promises to keep.
    source = random.Random(f"{seed}/{epoch}")
    return tuple(sorted(range(num_rows), key=lambda _: source.random()))


@dataclass
class Cursor:
    """Walks `num_rows` rows epoch after epoch. `index`, the groups handed out so far, is all its state."""

    num_rows: int
    seed: int
    shuffle: bool = True
    index: int = 0

    def group_at(self, index: int) -> tuple[int, int]:
        """(epoch, row) of the group at any index: epoch = index // num_rows."""
        epoch, place = divmod(index, self.num_rows)
        return epoch, epoch_order(self.num_rows, epoch, self.seed)[place] if self.shuffle else place

    def take(self) -> tuple[int, int]:
        """(epoch, row) of the next group."""
        group = self.group_at(self.index)
        self.index += 1
        return group
