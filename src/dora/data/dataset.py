"""Prompts and their order.

A dataset is a list of rows; each holds a prompt and whatever else the reward wants to know.
A cursor walks it epoch after epoch, and one integer says how far it has come.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from dora.data.files import Rows, read_rows
from dora.errors import DataError

Messages = Sequence[Mapping[str, str]]  # each with a "role" and a "content", both text
Prompt = str | Messages
# What reward functions get by these names, beside the columns.
TAKEN = ("prompt", "prompts", "completion", "completions", "completion_ids")


class Dataset:
    """Rows that each have a prompt. `origin` names them in errors."""

    MIN_ROWS = 1

    def __init__(
        self, rows: Rows, prompt_key: str = "prompt", origin: str = "dataset", is_lines: bool = False
    ) -> None:
        """Rows that are lines of a file are counted from 1, others from 0.

        Raises DataError where there are no rows or one has no usable prompt.
        """
        if len(rows) < self.MIN_ROWS:
            raise DataError(f"{origin} has no rows; a run needs at least one prompt")
        self.origin = origin
        self.prompt_key = prompt_key
        self._rows = rows
        self._is_lines = is_lines
        for index, row in enumerate(rows):
            _check_row(row, prompt_key, self._place(index))

    @classmethod
    def from_path(cls, path: Path, prompt_key: str = "prompt", split: str | None = None) -> Dataset:
        """Read a file or a folder, see `read_rows`. Raises DataError naming file, line, rule and remedy."""
        return cls(read_rows(path, split), prompt_key, str(path), is_lines=path.suffix == ".jsonl")

    def __len__(self) -> int:
        return len(self._rows)

    def head(self, num_rows: int) -> Dataset:
        """The first rows. Raises DataError if there are fewer."""
        if num_rows > len(self):
            raise DataError(
                f"eval.num_prompts = {num_rows}, but {self.origin} has {len(self)} rows; lower it"
            )
        rows = [self._rows[index] for index in range(num_rows)]
        return Dataset(rows, self.prompt_key, self.origin, self._is_lines)

    def row(self, index: int) -> dict[str, Any]:
        """The row as it was read, prompt included."""
        return dict(self._rows[index])

    def prompt(self, index: int) -> Prompt:
        """The prompt of a row: text, or the messages of a conversation."""
        prompt: Prompt = self._rows[index][self.prompt_key]
        return prompt

    def fields(self, index: int) -> dict[str, Any]:
        """The row without its prompt: what a reward function gets as `**row`."""
        return {key: value for key, value in self._rows[index].items() if key != self.prompt_key}

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The fields of the first row; None while there is no row."""
        return tuple(self.fields(0)) if len(self) else None

    def check_prompt_lengths(self, num_tokens: Callable[[Prompt], int], max_prompt_length: int) -> None:
        """Raises DataError for the first prompt that has no token, too many, or cannot be tokenized.

        `max_prompt_length` in tokens; `num_tokens` may raise DataError itself.
        """
        for index in range(len(self)):
            try:
                num = num_tokens(self.prompt(index))
            except DataError as error:
                raise DataError(f"{self._place(index)}: {error}") from error
            if not 1 <= num <= max_prompt_length:
                raise DataError(
                    f"{self._place(index)}: the prompt has {num} tokens; the rule is 1 "
                    f"to data.max_prompt_length = {max_prompt_length}; shorten it or raise the limit"
                )

    def _place(self, index: int) -> str:
        return f"{self.origin}, " + (f"line {index + 1}" if self._is_lines else f"row {index}")


def _check_row(row: object, prompt_key: str, where: str) -> None:
    if not isinstance(row, Mapping):
        raise DataError(f'{where}: is a {type(row).__name__}, must be an object such as {{"prompt": "..."}}')
    if prompt_key not in row:
        raise DataError(
            f"{where}: has no column {prompt_key!r} among its {len(row)}; "
            "name the column with data.prompt_key"
        )
    if not _is_prompt(prompt := row[prompt_key]):
        raise DataError(
            f"{where}: {prompt_key} is a {type(prompt).__name__}, must be a string, or messages "
            'such as [{"role": "user", "content": "..."}]'
        )
    for taken in {*TAKEN} - {prompt_key}:
        if taken in row:
            raise DataError(
                f"{where}: the column {taken!r} hides what the reward function gets by that name; rename it"
            )


def _is_prompt(prompt: object) -> bool:
    """Whether it is text, or messages of a conversation."""
    if isinstance(prompt, list) and prompt:
        return all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in prompt
        )
    return isinstance(prompt, str)


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
