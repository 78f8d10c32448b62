"""The reading side of `samples.sqlite`: what the audit needs to know of each sample.

Tokens stay on disk; only their number is read.
"""

from __future__ import annotations

import sqlite3
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
    reward: float | None
    state: str
    trained_step: int | None


def read_samples(run: Path) -> dict[tuple[str, int], SampleRow]:
    """(group, sibling) -> row of the store in the folder of a run. Raises InputError."""
    path = run / FILE_NAME
    if not path.is_file():
        raise InputError(f"{path} does not exist: give the folder of a run")
    # A store that was closed has no write-ahead log and may lie in a folder that is read-only.
    mode = "mode=ro" if path.with_name(FILE_NAME + "-wal").exists() else "immutable=1"
    query = (
        "select group_id, sibling, version, weight_digest, length(token_ids), length(logprobs), "
        "reward, state, trained_step from samples"
    )
    try:
        connection = sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)
        try:
            rows = connection.execute(query).fetchall()
        finally:
            connection.close()
    except sqlite3.Error as error:
        raise InputError(f"{path} cannot be read: {error}") from error
    return {
        (group, sibling): SampleRow(
            group, sibling, version, digest, ids / TOKEN_BYTES, logprobs / TOKEN_BYTES, *rest
        )
        for group, sibling, version, digest, ids, logprobs, *rest in rows
    }
