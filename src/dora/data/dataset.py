"""Datasets of prompts, and their order.

A dataset is a list of rows; each has a prompt and columns for the reward function. Rows come from JSONL,
JSON, CSV and Parquet files, from folders that Hugging Face datasets reads, or are added during a run. A
cursor iterates over epochs; its state is one integer.
"""

from __future__ import annotations

import copy
import csv
import json
import math
import os
import random
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

from dora.data.images import ImageSource, find_images
from dora.errors import DataError, not_utf8

Messages = Sequence[Mapping[str, str]]  # each with a "role" and a "content", both text
Prompt = str | Messages
NumTokens = Callable[[Prompt, Sequence[ImageSource]], int]  # of a prompt with its images
Rows = Sequence[Mapping[str, Any]]
MAX_CSV_FIELD = 2**31 - 1  # characters; csv's own limit is shorter than some prompts
MAX_NAMES = 20  # columns in an error
MAX_PERIOD = 1000  # groups after which the order of several sources repeats
# Reward functions get arguments with these names besides the columns.
RESERVED_COLUMNS = ("prompt", "prompts", "completion", "completions", "completion_ids", "finish_reason")


class Dataset:
    """Rows that each have a prompt. `origin` names them in errors."""

    MIN_ROWS = 1
    num_overlong = 0  # rows that `without_overlong` has left out
    _numbers: Sequence[int] | None = None  # of the rows in their file; None: all of them in order

    def __init__(
        self,
        rows: Rows,
        prompt_key: str = "prompt",
        origin: str = "dataset",
        is_jsonl: bool = False,
        image_key: str = "images",
        folder: Path = Path(),
        reserved: Sequence[str] = RESERVED_COLUMNS,
    ) -> None:
        """With `is_jsonl`, errors count rows as lines from 1, otherwise as rows from 0.

        Paths of images are relative to `folder`. Raises DataError if there are no rows, or one has no valid
        prompt or a `reserved` column.
        """
        if len(rows) < self.MIN_ROWS:
            raise DataError(f"{origin} has no rows; a run needs at least one prompt")
        self.origin = origin
        self.prompt_key, self.image_key = prompt_key, image_key
        self._rows, self._folder = rows, folder
        self._is_jsonl = is_jsonl
        index = -1
        try:
            for index, row in enumerate(rows):
                _check_row(row, prompt_key, self.location(index), reserved)
        except (ValueError, OverflowError) as error:  # of a folder: a text that is not UTF-8, a date too far
            raise DataError(f"{self.location(index + 1)} cannot be read: {error}; correct it") from error

    @classmethod
    def from_path(
        cls,
        path: Path,
        prompt_key: str = "prompt",
        split: str | None = None,
        subset: str | None = None,
        image_key: str = "images",
        reserved: Sequence[str] = RESERVED_COLUMNS,
    ) -> Dataset:
        """Read a file or a folder, see `read_rows`. Raises DataError naming file, line, rule and remedy."""
        folder = path if path.is_dir() else path.parent
        rows, is_jsonl = read_rows(path, split, subset), path.suffix == ".jsonl"
        return cls(rows, prompt_key, str(path), is_jsonl, image_key, folder, reserved)

    def __len__(self) -> int:
        return len(self._rows if self._numbers is None else self._numbers)

    def head(self, num_rows: int) -> Dataset:
        """The first rows, or all if there are fewer."""
        return self._subset(range(min(num_rows, len(self))))

    def _subset(self, indices: Sequence[int]) -> Dataset:
        """Some of the rows, which keep their numbers in errors."""
        subset = copy.copy(self)
        subset._numbers = [*map(self._number, indices)]
        return subset

    def _number(self, index: int) -> int:
        """The number of a row in its file."""
        return index if self._numbers is None else self._numbers[index]

    def _row(self, index: int) -> Mapping[str, Any]:
        return self._rows[self._number(index)]

    def row(self, index: int) -> dict[str, Any]:
        """The row as read, with its prompt."""
        return dict(self._row(index))

    def prompt(self, index: int) -> Prompt:
        """The prompt of a row: text, or the messages of a conversation."""
        prompt: Prompt = self._row(index)[self.prompt_key]
        return prompt

    def images(self, index: int) -> list[ImageSource]:
        """The images of a row, in their order in its prompt. Raises DataError for what cannot be one."""
        return find_images(self._row(index).get(self.image_key), self._folder)

    @property
    def has_images(self) -> bool:
        """Whether any row has an image."""
        return any(self.images(index) for index in range(len(self)))

    def fields(self, index: int) -> dict[str, Any]:
        """The row without its prompt and its images: the `**row` of a reward function."""
        others = (self.prompt_key, self.image_key)
        return {key: value for key, value in self._row(index).items() if key not in others}

    @property
    def columns(self) -> tuple[str, ...] | None:
        """The fields that all rows have; None if there is no row."""
        if not len(self):
            return None
        missing = self._rows_without_columns()
        return tuple(name for name in self.fields(0) if name not in missing)

    def missing_columns(self) -> dict[str, str]:
        """Column that some rows have -> the first row that does not."""
        return {name: self.location(index) for name, index in self._rows_without_columns().items()}

    def _rows_without_columns(self) -> dict[str, int]:
        """Column that some rows have -> index of the first row without it; a folder's rows have the same."""
        found: dict[str, int] = {}
        if not isinstance(self._rows, list):
            return found
        first = self._row(0).keys()
        for index in range(len(self)):
            if (keys := self._row(index).keys()) != first:
                found = dict.fromkeys(first - keys, index) | dict.fromkeys(keys - first, 0) | found
        return found

    def check_prompt_lengths(self, num_tokens: NumTokens, max_prompt_length: int) -> None:
        """Raises DataError for the first prompt without tokens, with too many, or that cannot be tokenized.

        `max_prompt_length` in tokens; `num_tokens` may raise DataError itself.
        """
        for index in range(len(self)):
            if (num := self._num_tokens(index, num_tokens)) > max_prompt_length:
                raise DataError(
                    f"{self.location(index)}: the prompt has {num} tokens; must be 1 "
                    f"to data.max_prompt_length = {max_prompt_length}; shorten it, raise the limit, or leave "
                    "such prompts out with data.filter_overlong_prompts = true"
                )

    def without_overlong(self, num_tokens: NumTokens, max_prompt_length: int) -> Dataset:
        """The rows with a prompt of at most `max_prompt_length` tokens.

        Raises DataError for a prompt without tokens or that cannot be tokenized, and if no row is left.
        """
        lengths = [self._num_tokens(index, num_tokens) for index in range(len(self))]
        kept = self._subset([index for index, num in enumerate(lengths) if num <= max_prompt_length])
        if not len(kept):
            raise DataError(
                f"{self.origin}: all prompts have more than data.max_prompt_length = {max_prompt_length} "
                f"tokens, the shortest {min(lengths)}; raise the limit"
            )
        kept.num_overlong = len(self) - len(kept)
        return kept

    def _num_tokens(self, index: int, num_tokens: NumTokens) -> int:
        """Tokens of a prompt. Raises DataError if there are none, or if it cannot be tokenized."""
        try:
            num = num_tokens(self.prompt(index), self.images(index))
        except DataError as error:
            raise DataError(f"{self.location(index)}: {error}") from error
        if num == 0:
            raise DataError(
                f"{self.location(index)}: the prompt has 0 tokens; it needs at least one, so write a "
                "prompt or remove the row"
            )
        return num

    def location(self, index: int) -> str:
        """A row in an error: file, and line or row."""
        number = self._number(index)
        return f"{self.origin}, " + (f"line {number + 1}" if self._is_jsonl else f"row {number}")


class MixedDataset(Dataset):
    """The rows of several named datasets, one after another, each with its name in the column `source`."""

    def __init__(self, parts: Mapping[str, Dataset], table: str = "source") -> None:
        """`table` is the table that names the parts. Raises DataError if a row has a column `source`."""
        self.parts, self.origin, self.table = dict(parts), "the sources", table
        self.num_overlong = sum(part.num_overlong for part in parts.values())
        self._starts = [*accumulate((len(part) for part in parts.values()), initial=0)]
        for name, part in parts.items():
            if "source" in (part.columns or ()):
                raise DataError(
                    f"{table}.{name}: {part.origin} has a column 'source', which is reserved for the name of "
                    "the source; rename it"
                )

    def __len__(self) -> int:
        return self._starts[-1]

    def head(self, num_rows: int) -> MixedDataset:
        """The first rows of each source."""
        return MixedDataset({name: part.head(num_rows) for name, part in self.parts.items()}, self.table)

    def without_overlong(self, num_tokens: NumTokens, max_prompt_length: int) -> MixedDataset:
        parts = {}
        for name, part in self.parts.items():
            with naming_source(name, self.table):
                parts[name] = part.without_overlong(num_tokens, max_prompt_length)
        return MixedDataset(parts, self.table)

    @property
    def rows_by_source(self) -> dict[str, range]:
        """The indices of the rows of each source."""
        return {name: range(*ends) for name, ends in zip(self.parts, pairwise(self._starts), strict=True)}

    def name_of(self, index: int) -> str:
        """The source of a row."""
        return [*self.parts][bisect_right(self._starts, index) - 1]

    def row(self, index: int) -> dict[str, Any]:
        name, part, own = self._find(index)
        return {**part.row(own), "source": name}

    def prompt(self, index: int) -> Prompt:
        _, part, own = self._find(index)
        return part.prompt(own)

    def images(self, index: int) -> list[ImageSource]:
        _, part, own = self._find(index)
        return part.images(own)

    def fields(self, index: int) -> dict[str, Any]:
        name, part, own = self._find(index)
        return {**part.fields(own), "source": name}

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Those that all sources have."""
        first, *others = ((*(part.columns or ()), "source") for part in self.parts.values())
        return tuple(name for name in first if all(name in other for other in others))

    def missing_columns(self) -> dict[str, str]:
        known = {name: part.columns or () for name, part in self.parts.items()}
        columns = dict.fromkeys(column for own in known.values() for column in own)
        found = {
            column: f"{self.table}.{name} ({part.origin})"
            for name, part in self.parts.items()
            for column in columns
            if column not in known[name]
        }
        for name, part in self.parts.items():
            found |= {column: f"{self.table}.{name}: {row}" for column, row in part.missing_columns().items()}
        return found

    def location(self, index: int) -> str:
        name, part, own = self._find(index)
        return f"{self.table}.{name}: {part.location(own)}"

    def _find(self, index: int) -> tuple[str, Dataset, int]:
        name = self.name_of(index)
        return name, self.parts[name], index - self._starts[bisect_right(self._starts, index) - 1]


@contextmanager
def naming_source(name: str, table: str) -> Iterator[None]:
    """Errors of the dataset of a table, such as [[source]], begin with the table's name."""
    try:
        yield
    except DataError as error:
        raise DataError(f"{table}.{name}: {error}") from error


class GrowingDataset(Dataset):
    """The rows of a JSONL file that grows during a run, in the order in which they were put.

    Appended rows survive a crash. An incomplete last line was never confirmed, so it is overwritten.
    """

    MIN_ROWS = 0

    def __init__(
        self, path: Path, prompt_key: str = "prompt", *, fsync: bool = False, image_key: str = "images"
    ) -> None:
        """The file is created by the first `append`. With `fsync`, rows survive a loss of power.

        Raises DataError for a corrupt file.
        """
        self._path, self._fsync = path, fsync
        content = path.read_bytes() if path.exists() else b""
        self._num_bytes = content.rfind(b"\n") + 1
        try:
            self._own_rows = [json.loads(line) for line in content[: self._num_bytes].splitlines()]
        except ValueError as error:
            raise DataError(f"{path} is corrupt ({error}): restore the file to resume the run") from error
        super().__init__(self._own_rows, prompt_key, str(path), is_jsonl=True, image_key=image_key)

    def _rows_without_columns(self) -> dict[str, int]:
        """Not known: a client may put rows with other columns at any time."""
        return {}

    def contains(self, first: int, rows: Sequence[Mapping[str, Any]]) -> bool:
        """Whether the dataset has these rows, starting at index `first`."""
        return self._own_rows[first : first + len(rows)] == [*rows]

    def append(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Append rows; they are durable when this returns.

        Raises DataError for a row without a valid prompt and for a file that was truncated, OSError as the
        file system does; the dataset is then unchanged.
        """
        Dataset(rows, self.prompt_key, "the request")  # checks them
        try:
            lines = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows).encode()
        except ValueError as error:
            raise DataError("the request holds nan or inf, which JSON cannot express; remove them") from error
        exists = self._path.exists()
        if (self._path.stat().st_size if exists else 0) < self._num_bytes:
            raise DataError(
                f"{self._path} is shorter than {self._num_bytes} bytes, so rows are lost: restore the file"
            )
        with self._path.open("r+b" if exists else "xb") as file:
            file.truncate(self._num_bytes)
            file.seek(self._num_bytes)
            file.write(lines)
            file.flush()
            if self._fsync:
                os.fsync(file.fileno())
        self._num_bytes += len(lines)
        self._own_rows += map(dict, rows)


def _check_row(row: object, prompt_key: str, location: str, reserved: Sequence[str]) -> None:
    if not isinstance(row, Mapping):
        raise DataError(
            f'{location}: is a {type(row).__name__}, must be an object such as {{"prompt": "..."}}'
        )
    if prompt_key not in row:
        raise DataError(
            f"{location}: has no column {prompt_key!r}; name the prompt's column with prompt_key (dora sft: "
            f"--prompt-key); columns: {_names(row)}"
        )
    if not _is_prompt(prompt := row[prompt_key]):
        raise DataError(
            f"{location}: {prompt_key} is a {_describe(prompt)}, must be a string, or messages "
            'such as [{"role": "user", "content": "..."}]'
        )
    for name in {*reserved} - {prompt_key}:
        if name in row:
            raise DataError(
                f"{location}: the column {name!r} has the name of an argument of rewards; rename it"
            )


def _names(row: Mapping[str, Any]) -> str:
    """The first columns of a row."""
    names = [*map(str, row)]
    return ", ".join(names[:MAX_NAMES]) + (", ..." if len(names) > MAX_NAMES else "") or "none"


def _is_prompt(prompt: object) -> bool:
    """Whether it is text, or the messages of a conversation."""
    if isinstance(prompt, list) and prompt:
        return all(
            isinstance(message, Mapping)
            and isinstance(message.get("role"), str)
            and isinstance(message.get("content"), str)
            for message in prompt
        )
    return isinstance(prompt, str)


def num_shared_rows(held_out: Dataset, training: Dataset) -> int:
    """Held-out rows that are training rows, too: equal in all columns but `source`."""
    prompts = {repr(held_out.prompt(index)) for index in range(len(held_out))}
    found = {
        _content(training.row(index))
        for index in range(len(training))
        if repr(training.prompt(index)) in prompts
    }
    return sum(_content(held_out.row(index)) in found for index in range(len(held_out)))


def _content(row: Mapping[str, Any]) -> str:
    return repr(sorted((name, value) for name, value in row.items() if name != "source"))


def last_text(prompt: Prompt) -> str:
    """The prompt's text, or that of a conversation's last message."""
    return prompt if isinstance(prompt, str) else prompt[-1]["content"]


def _describe(prompt: object) -> str:
    """What an invalid prompt is, with the first message whose content is no text."""
    for index, message in enumerate(prompt if isinstance(prompt, list) else ()):
        content = message.get("content", "") if isinstance(message, Mapping) else ""
        if not isinstance(content, str):
            return f"list whose message {index} has a {type(content).__name__} as content"
    return type(prompt).__name__


@lru_cache(maxsize=16)
def epoch_order(num_rows: int, epoch: int, seed: int) -> tuple[int, ...]:
    """The rows of one epoch in a shuffled order that depends on the three arguments alone."""
    # Sorted by random(), the only method of the generator whose sequence Python keeps between versions.
    source = random.Random(f"{seed}/{epoch}")
    return tuple(sorted(range(num_rows), key=lambda _: source.random()))


@dataclass
class Cursor:
    """Iterates over `num_rows` rows, epoch after epoch. Its state is `index`, the next group."""

    num_rows: int
    seed: int
    shuffle: bool = True
    index: int = 0

    def group_at(self, index: int) -> tuple[int, int]:
        """(epoch, row) of the group at any index: epoch = index // num_rows."""
        epoch, position = divmod(index, self.num_rows)
        row = epoch_order(self.num_rows, epoch, self.seed)[position] if self.shuffle else position
        return epoch, row

    def next_group(self) -> tuple[int, int]:
        """(epoch, row) of the next group."""
        group = self.group_at(self.index)
        self.index += 1
        return group


@dataclass
class MixedCursor(Cursor):
    """Iterates over the rows of several sources, each with epochs of its own, in the given ratios.

    Of any number of consecutive groups from the start, each source has its share, rounded up or down or one
    off. `num_rows` is the sum of `lengths`.
    """

    lengths: Sequence[int] = ()
    ratios: Sequence[float] = ()

    def group_at(self, index: int) -> tuple[int, int]:
        """(epoch of its source, row) of the group at any index."""
        schedule = mixing_schedule(tuple(self.ratios))
        period, position = divmod(index, len(schedule))
        source = schedule[position]
        own = period * schedule.count(source) + schedule[:position].count(source)
        epoch, row = Cursor(self.lengths[source], self.seed, self.shuffle).group_at(own)
        return epoch, sum(self.lengths[:source]) + row


@lru_cache(maxsize=4)
def mixing_schedule(ratios: tuple[float, ...]) -> tuple[int, ...]:
    """The sources of one period of groups, by number: smooth weighted round robin.

    Ratios are rounded to 1/MAX_PERIOD of their sum, and each source has at least one group in a period.
    """
    fractions = [Fraction(ratio / math.fsum(ratios)).limit_denominator(MAX_PERIOD) for ratio in ratios]
    # A ratio that rounds to 0 still gets a group, of the longest period.
    shortest = math.lcm(*(fraction.denominator for fraction in fractions))
    period = MAX_PERIOD if 0 in fractions else min(MAX_PERIOD, shortest)
    weights = [max(1, round(fraction * period)) for fraction in fractions]
    credits, order = [0] * len(weights), list[int]()
    for _ in range(sum(weights)):
        credits = [credit + weight for credit, weight in zip(credits, weights, strict=True)]
        chosen = max(range(len(weights)), key=lambda source: credits[source])
        credits[chosen] -= sum(weights)
        order.append(chosen)
    return tuple(order)


def read_rows(path: Path, split: str | None = None, subset: str | None = None) -> Rows:
    """The rows of a .jsonl, .json, .csv or .parquet file, or of a folder, its `subset` and its `split`.

    Rows of a folder stay on disk until they are read. Raises DataError.
    """
    if path.is_dir():
        return _read_folder(path, split, subset)
    if not path.is_file():
        raise DataError(f"dataset {path} does not exist; name an existing file or folder")
    readers = {".jsonl": _read_jsonl, ".json": _read_json, ".csv": _read_csv, ".parquet": _read_parquet}
    if path.suffix not in readers:
        *kinds, last = readers
        raise DataError(
            f"dataset {path} must be a {', '.join(kinds)} or {last} file, or a folder saved by datasets"
        )
    for key, value in (("split", split), ("subset", subset)):
        if value is not None:
            raise DataError(f"{path}: {key} = {value!r}, but a file has no {key}s; remove the {key}")
    return readers[path.suffix](path)


def _read_jsonl(path: Path) -> list[Any]:
    """Lines may be empty at the end of the file only, so that the number of a row is that of its line."""
    rows, number, empty = [], 0, 0
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, start=1):
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
                if not text.strip():
                    empty = empty or number
                elif empty:
                    raise DataError(f"{path}, line {empty}: is empty, and other lines follow; remove it")
                else:
                    rows.append(json.loads(text))
    except json.JSONDecodeError as error:
        raise DataError(
            f"{path}, line {number}: is not JSON ({error}); every line must hold one object"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path}, line {number}: {not_utf8(error)}") from error
    except (ValueError, RecursionError) as error:  # a very long number, very deep nesting
        raise DataError(f"{path}, line {number}: cannot be read ({error}); make it a text") from error
    return rows


def _read_json(path: Path) -> list[Any]:
    rule = "it must hold one list of objects; name a file with one object per line .jsonl"
    try:
        rows = json.loads(path.read_bytes().decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {not_utf8(error)}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not readable JSON ({error}); {rule}") from error
    if not isinstance(rows, list):
        raise DataError(f"{path} holds a {type(rows).__name__}; {rule}")
    return rows


def _read_csv(path: Path) -> list[Any]:
    """The first row names the columns; all values stay text."""
    rows = list[dict[str, str]]()
    limit = csv.field_size_limit(MAX_CSV_FIELD)  # of the whole process
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            reader = csv.reader(lines, strict=True)
            columns = next(reader, [])
            if len({*columns}) < len(columns):
                raise DataError(f"{path}: two columns have the same name; rename one of {', '.join(columns)}")
            for values in filter(None, reader):  # an empty line is no row
                if len(values) != len(columns):
                    raise DataError(
                        f"{path}, row {len(rows)}: has {len(values)} values for {len(columns)} columns; "
                        "write values with commas or quotes in quotes"
                    )
                rows.append(dict(zip(columns, values, strict=True)))
    except UnicodeDecodeError as error:
        raise DataError(f"{path}: {not_utf8(error)}") from error
    except csv.Error as error:
        raise DataError(f"{path}, row {len(rows)}: is not CSV ({error}); correct it") from error
    finally:
        csv.field_size_limit(limit)
    return rows


def _read_parquet(path: Path) -> list[Any]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as error:
        raise _missing_package(path, "Parquet", "pyarrow") from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except (ArrowException, ValueError, OverflowError) as error:  # a text that is not UTF-8, a date too far
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    return rows


def _read_folder(path: Path, split: str | None, subset: str | None) -> Rows:
    """A folder written by `save_to_disk`, or one of .jsonl, .parquet or .csv files."""
    try:
        import datasets
    except ImportError as error:
        raise _missing_package(path, "a folder", "datasets") from error
    is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    if subset is not None and is_saved:
        raise DataError(
            f"{path}: subset = {subset!r}, but save_to_disk wrote a single one; remove the subset"
        )
    try:
        found = datasets.load_from_disk(str(path)) if is_saved else datasets.load_dataset(str(path), subset)
    except Exception as error:  # the library raises many types
        raise DataError(
            f"{path} cannot be read by datasets: {' '.join(str(error).split())}; give a folder that "
            "save_to_disk wrote, or one of .jsonl or .parquet files; choose one of several subsets with "
            "data.subset"
        ) from error
    return _select_split(path, found, split)


def _select_split(path: Path, found: Any, split: str | None) -> Rows:
    """The named split; without a name, the only one."""
    if not isinstance(found, dict):
        if split is not None:
            raise DataError(f"{path}: split = {split!r}, but it holds no splits; remove the split")
        return _with_encoded_images(found)
    names = ", ".join(map(str, found))
    if split is None and len(found) > 1:
        raise DataError(f"{path} has the splits {names}; choose one with data.split (eval.split)")
    chosen = next(iter(found)) if split is None else split
    if chosen not in found:
        raise DataError(f"{path}: split = {split!r} does not exist; it has {names}")
    return _with_encoded_images(found[chosen])


def _with_encoded_images(rows: Any) -> Rows:
    """Rows of Python values, whatever the format that the dataset was saved with.

    Images are the bytes of their files: decoding each when a row is read would be slow.
    """
    from datasets import Image

    rows = rows.with_format(None)
    for name, feature in rows.features.items():
        if isinstance(feature, Image):
            rows = rows.cast_column(name, Image(decode=False))
        elif isinstance(getattr(feature, "feature", None), Image):
            rows = rows.cast_column(name, type(feature)(Image(decode=False)))
    encoded: Rows = rows
    return encoded


def _missing_package(path: Path, kind: str, package: str) -> DataError:
    return DataError(f"{path}: reading {kind} needs {package}; run pip install 'dora-rl[data]'")
