"""Rows from what lies on disk: JSONL and Parquet files, and folders that Hugging Face datasets reads.

Each reader names file, place, rule and remedy where it finds something else.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from dora.errors import DataError

Rows = Sequence[Mapping[str, Any]]


def read_rows(path: Path, split: str | None = None) -> Rows:
    """The rows of a .jsonl or .parquet file, or of a folder and its `split`. Raises DataError.

    Those of a folder stay on disk until they are asked for.
    """
    if path.is_dir():
        return _read_folder(path, split)
    if not path.is_file():
        raise DataError(f"dataset {path} does not exist")
    readers = {".jsonl": _read_jsonl, ".parquet": _read_parquet}
    if path.suffix not in readers:
        raise DataError(
            f"dataset {path} must be one of {', '.join(readers)}, by its name, or a folder saved by datasets"
        )
    if split is not None:
        raise DataError(f"{path}: split = {split!r}, but a file has no splits; remove the split")
    return readers[path.suffix](path)


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
        raise _needs(path, "Parquet", "pyarrow") from error
    try:
        rows: list[Any] = parquet.read_table(path).to_pylist()
    except ArrowException as error:
        raise DataError(f"{path} is not a readable Parquet file: {error}") from error
    return rows


def _read_folder(path: Path, split: str | None) -> Rows:
    """A folder written by `save_to_disk`, or one of .jsonl, .parquet or .csv files."""
    try:
        import datasets
    except ImportError as error:
        raise _needs(path, "a folder", "datasets") from error
    is_saved = any((path / name).is_file() for name in ("dataset_dict.json", "state.json"))
    try:
        found = datasets.load_from_disk(str(path)) if is_saved else datasets.load_dataset(str(path))
    except Exception as error:  # the library raises whatever its readers do
        raise DataError(
            f"{path} cannot be read by datasets: {error}; give a folder that save_to_disk wrote, "
            "or one of .jsonl or .parquet files"
        ) from error
    return _choose(path, found, split)


def _choose(path: Path, found: Any, split: str | None) -> Rows:
    """The wanted split; without one, the only one there is."""
    if not isinstance(found, dict):
        if split is not None:
            raise DataError(f"{path}: split = {split!r}, but it holds no splits; remove the split")
        rows: Rows = found
        return rows
    names = ", ".join(map(str, found))
    if split is None and len(found) > 1:
        raise DataError(f"{path} has the splits {names}; choose one with data.split (eval.split)")
    chosen = next(iter(found)) if split is None else split
    if chosen not in found:
        raise DataError(f"{path}: split = {split!r} is not there; it has {names}")
    rows = found[chosen]
    return rows


def _needs(path: Path, what: str, package: str) -> DataError:
    return DataError(f"{path}: reading {what} needs {package}; run pip install 'dora-rl[data]'")
