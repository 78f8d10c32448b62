"""The reading side of `samples.sqlite`: what the audit needs to know of each sample.

Tokens stay on disk, and only their number is read, but for the few answers that are asked for.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

from dora.errors import InputError

FILE_NAME = "samples.sqlite"
TOKEN_BYTES = 4  # token ids are int32, log-probs float32


class SampleRow(NamedTuple):
    """One sibling as stored; the numbers of tokens are fractions where a column was cut."""

    group: str
    sibling: int
    version: int
    weight_digest: str
    num_token_ids: float
    num_logprobs: float
    num_masked: int | None  # tokens of which it is said whether they were drawn; None: all were
    reward: float | None
    state: str
    trained_step: int | None
    segments: tuple[tuple[int, int], ...] = ()  # (version, tokens) of an answer that several versions drew


class Answer(NamedTuple):
    """What one sibling was asked, answered, and how likely that was."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    routes: Sequence[int]  # [tokens - 1, mixture layers, k], flattened; empty if they were not recorded
    loss_mask: Sequence[int]  # 1 for each token that was drawn, 0 for those that were read


def read_samples(run: Path) -> dict[tuple[str, int], SampleRow]:
    """(group, sibling) -> row of the store in the folder of a run. Raises InputError."""
    with opened(run) as store:
        rows = store.execute(
            "select group_id, sibling, version, weight_digest, length(token_ids), length(logprobs), "
            f"length({_loss_mask(store)}), reward, state, trained_step, {_segments(store)} from samples"
        ).fetchall()
    return {(row[0], row[1]): _row(*row) for row in rows}


def read_answers(run: Path, rows: Iterable[SampleRow]) -> list[Answer | None]:
    """The answers of rows of the same store; None for one that was cut. Raises InputError."""
    with opened(run) as store:
        query = (
            f"select prompt_ids, token_ids, logprobs, coalesce(routes, x''), {_loss_mask(store)} "
            "from samples where group_id = ? and sibling = ?"
        )
        return [_answer(*store.execute(query, (row.group, row.sibling)).fetchone()) for row in rows]


def _row(
    group: str,
    sibling: int,
    version: int,
    digest: str,
    ids: int,
    logprobs: int,
    masked: int | None,
    reward: float | None,
    state: str,
    step: int | None,
    segments: str | None,
) -> SampleRow:
    """Of the columns as they are read."""
    told = tuple((v, num) for v, num in json.loads(segments or "[]"))
    sizes = ids / TOKEN_BYTES, logprobs / TOKEN_BYTES
    return SampleRow(group, sibling, version, digest, *sizes, masked, reward, state, step, told)


def _answer(
    prompt: bytes, response: bytes, logprobs: bytes, routes: bytes, mask: bytes | None
) -> Answer | None:
    try:
        ids, told = array("i", response), array("f", logprobs)
        mask = bytes([1]) * len(ids) if mask is None else mask
        return Answer(array("i", prompt), ids, told, array("h", routes), mask)
    except (TypeError, ValueError):
        return None


def _loss_mask(store: sqlite3.Connection) -> str:
    """The column; runs that began before there were episodes have none."""
    return "loss_mask" if "loss_mask" in columns(store) else "null"


def _segments(store: sqlite3.Connection) -> str:
    """The column; not every policy makes any."""
    return "segments" if "segments" in columns(store) else "null"


def columns(store: sqlite3.Connection) -> set[str]:
    """Names of what is stored of a sample; older runs have fewer."""
    return {name for _, name, *_ in store.execute("pragma table_info(samples)")}


@contextmanager
def opened(run: Path) -> Iterator[sqlite3.Connection]:
    """Raises InputError where the store is not there or cannot be read."""
    path = run / FILE_NAME
    if not path.is_file():
        raise InputError(f"{path} does not exist: the run has no answers yet, or they were removed")
    # A store that was closed has no write-ahead log and may lie in a folder that is read-only.
    mode = "mode=ro" if path.with_name(FILE_NAME + "-wal").exists() else "immutable=1"
    try:
        with closing(sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)) as store:
            yield store
    except sqlite3.Error as error:
        raise InputError(f"{path} cannot be read: {error}") from error
