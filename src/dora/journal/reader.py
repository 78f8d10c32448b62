"""Read `journal.jsonl` and `samples.sqlite` of a run."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from dora.core import codec
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.types import Branch, Limits, ProtocolError
from dora.errors import DamagedRunError, InputError
from dora.journal.writer import BEING_WRITTEN, FILES, SCHEMA, SEAL, chain_of, split_chain

JOURNAL_FILE, SAMPLES_FILE, CONFIG_FILE = "journal.jsonl", "samples.sqlite", "config.toml"
SUMMARY_FILE = "summary.json"  # present once a run has ended; a resume removes it


# --- the journal


@dataclass(frozen=True)
class JournalHeader:
    """The first line of a journal."""

    limits: Limits
    num_prompts: int | None  # dataset rows; None for a growing dataset
    critic_digest: str | None = None  # of the weights in critic.path, if it is set
    config_digest: str = ""  # of config.toml
    source_rows: tuple[int, ...] | None = None  # of each source; their sum is num_prompts


class JournalLine(NamedTuple):
    """One event or action; `t_s` counts seconds since the run started."""

    seq: int
    t_s: float
    record: Event | Action

    @property
    def is_event(self) -> bool:
        return isinstance(self.record, Event)


class FileDigests(NamedTuple):
    """A line with the SHA-256 of files, by path relative to the run folder."""

    sha256: dict[str, str]
    is_seal: bool  # written when the run ended


@dataclass(frozen=True, kw_only=True)
class Journal(JournalHeader):
    """A journal as it was read: the header's values and all events and actions in order."""

    lines: tuple[JournalLine, ...]
    is_torn: bool  # the last line was cut off and is not among the lines
    files: tuple[FileDigests, ...] = ()
    is_sealed: bool = False  # the last line is a seal
    chain_breaks: tuple[int, ...] = ()  # numbers of the lines whose chain does not continue the one before

    def recorded_digests(self) -> dict[str, str]:
        """The newest SHA-256 of each file. An earlier seal does not count: the run continued after it."""
        digests: dict[str, str] = {}
        for line in self.files:
            if not line.is_seal or (self.is_sealed and line is self.files[-1]):
                digests |= line.sha256
        return {name: digest for name, digest in digests.items() if digest != BEING_WRITTEN}


def read_journal(run: Path) -> Journal:
    """Read the journal of a run folder; a torn last line, left by a crash, is omitted and reported.

    Raises InputError naming the file and the line.
    """
    path = run / JOURNAL_FILE
    try:
        head, *tail = path.read_bytes().split(b"\n")
    except (FileNotFoundError, NotADirectoryError) as error:
        raise InputError(explain_missing_run(run)) from error
    except OSError as error:
        raise InputError(f"{path} cannot be read ({error.strerror})") from error
    header = read_header(path, head)
    torn = tail.pop() if tail else b""  # text after the last line end: empty unless a line was cut off
    lines: list[JournalLine] = []
    files: list[FileDigests] = []
    last: JournalLine | FileDigests | None = None
    for number, text in enumerate(tail, start=2):
        last = read_line(path, number, text)
        if isinstance(last, FileDigests):
            files.append(last)
            continue
        if last.seq != len(lines):
            raise DamagedRunError(
                f"{path}, line {number}: seq is {last.seq}, expected {len(lines)}: lines were removed, "
                "added or moved"
            )
        lines.append(last)
    return Journal(
        **vars(header),
        lines=tuple(lines),
        is_torn=torn != b"",
        files=tuple(files),
        is_sealed=isinstance(last, FileDigests) and last.is_seal and not torn,
        chain_breaks=tuple(_chain_breaks([head, *tail])),
    )


def _chain_breaks(lines: Iterable[bytes]) -> Iterator[int]:
    """Numbers of the lines that were changed, or before which lines were removed or inserted."""
    before = ""
    for number, text in enumerate(lines, start=1):
        line, chain = split_chain(text)
        if chain != chain_of(line, before):
            yield number
        before = chain


def read_header(path: Path, text: bytes) -> JournalHeader:
    """Parse the first line. Raises InputError."""
    raw = _json_object(path, 1, text)
    if raw.get("schema") != SCHEMA:
        written_by = raw.get("dora_version", "an older version")
        raise InputError(
            f"{path}, line 1: the run was recorded by DORA-RL {written_by} with journal schema "
            f"{raw.get('schema')!r}, and this version reads schema {SCHEMA} only: read it with the version "
            "that wrote it"
        )
    try:
        limits = codec.decode(Limits, raw["limits"])
        num_prompts = codec.decode(int | None, raw["num_prompts"])
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"num_prompts = {num_prompts} must be at least 1")
        critic_digest = codec.decode(str | None, raw.get("critic_digest"))
        source_rows = codec.decode(tuple[int, ...] | None, raw.get("source_rows"))
        if source_rows is not None and (min(source_rows) < 1 or sum(source_rows) != num_prompts):
            raise ValueError(f"source_rows = {list(source_rows)} must be positive with the sum {num_prompts}")
        config_digest = codec.decode(str, raw["config_digest"])
        return JournalHeader(limits, num_prompts, critic_digest, config_digest, source_rows)
    except (KeyError, TypeError, ValueError, ProtocolError) as error:
        raise DamagedRunError(
            f"{path}, line 1: not the header of a journal: {error}; restore the file"
        ) from error


def read_line(path: Path, number: int, text: bytes) -> JournalLine | FileDigests:
    """Parse line `number` of the file, 2 or more. Raises InputError."""
    raw = _json_object(path, number, text)
    kind = raw.get("kind")
    try:
        if kind in (FILES, SEAL):
            return FileDigests({name: codec.decode(str, v) for name, v in raw["files"].items()}, kind == SEAL)
        record = codec.from_json(raw)
        return JournalLine(codec.decode(int, raw["seq"]), codec.decode(float, raw["t_s"]), record)
    except (AttributeError, KeyError, TypeError, ValueError, ProtocolError) as error:
        raise DamagedRunError(f"{path}, line {number}: neither an event nor an action: {error}") from error


def _json_object(path: Path, number: int, text: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(text)
    except ValueError as error:
        raise DamagedRunError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(raw, dict):
        raise DamagedRunError(f"{path}, line {number}: expected a JSON object, found {type(raw).__name__}")
    return raw


# --- the sample store


class SampleRow(NamedTuple):
    """One stored sample without its tokens; the token counts are fractions if a column was truncated."""

    group: str
    sibling: int
    version: int
    weight_digest: str
    num_token_ids: float
    num_logprobs: float
    loss_mask_length: int | None  # None: no mask is stored, the model sampled every token
    reward: float | None
    state: str
    trained_step: int | None
    segments: tuple[tuple[int, int], ...] = ()  # (version, tokens) of a response of several versions


SampleKey = tuple[str, int]  # group, sibling


class StoredResponse(NamedTuple):
    """The tokens of one sample."""

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    routes: Sequence[int]  # [tokens - 1, MoE layers, k], flattened; empty if routing was not recorded
    loss_mask: Sequence[int]  # 1 for a token that the model sampled, 0 for one that the environment inserted
    branches: Sequence[Branch] = ()
    finish_reason: str | None = None  # None: stored by an earlier version of DORA-RL


# What SQLite may have stored in each column: it keeps a value that does not fit the declared type.
_COLUMN_TYPES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("group_id", "weight_digest", "state"), ("text",)),
    **dict.fromkeys(("segments", "branches", "task_rewards"), ("text", "null")),
    **dict.fromkeys(("finish_reason", "turn_rewards"), ("text", "null")),  # earlier versions have neither
    **dict.fromkeys(("sibling", "version"), ("integer",)),
    "trained_step": ("integer", "null"),
    **dict.fromkeys(("reward", "advantage"), ("real", "null")),
    **dict.fromkeys(("prompt_ids", "token_ids", "logprobs"), ("blob",)),
    **dict.fromkeys(("routes", "loss_mask"), ("blob", "null")),
}
_NO_GROUP = "group_id not glob '*[0-9]/[0-9]*' or group_id glob '*[^-0-9/]*' or group_id glob '*/*/*'"


def read_samples(run: Path) -> dict[SampleKey, SampleRow]:
    """Map (group, sibling) to its row in the sample store, in order; no tokens are read.

    Raises InputError, also for a value in any column that cannot be read.
    """
    with open_sample_store(run) as store:
        damage = _find_damage(store)
        rows = store.execute(  # a token id and a log-prob have 4 bytes each
            "select group_id, sibling, version, weight_digest, length(token_ids) / 4.0, "
            "length(logprobs) / 4.0, length(loss_mask), reward, state, trained_step, segments from samples "
            "order by group_id, sibling"
        ).fetchall()
    samples = {}
    for *columns, text in rows if not damage else ():
        row = SampleRow(*columns)
        try:
            row = row._replace(segments=tuple((v, n) for v, n in json.loads(text or "[]")))
        except (TypeError, ValueError):
            damage = f"{row.group}/{row.sibling}: its segments {text!r} cannot be read"
        samples[row.group, row.sibling] = row
    if damage:
        raise DamagedRunError(f"{run / SAMPLES_FILE}: sample {damage}; restore the file")
    return samples


def _find_damage(store: sqlite3.Connection) -> str:
    """The first sample with a value of an impossible type, and which one it is; "" if there is none."""
    present = {row[1] for row in store.execute("pragma table_info(samples)")}
    columns = {name: kinds for name, kinds in _COLUMN_TYPES.items() if name in present}
    types = {name: f"typeof({name})" for name in columns}
    allowed = {name: ", ".join(map(repr, kinds)) for name, kinds in columns.items()}
    wrong = " or ".join(f"{types[name]} not in ({kinds})" for name, kinds in allowed.items())
    query = f"select group_id, sibling, {', '.join(types.values())} from samples where {wrong} or {_NO_GROUP}"
    if (found := store.execute(query).fetchone()) is None:
        return ""
    group, sibling, *kinds = found
    for (name, expected), kind in zip(columns.items(), kinds, strict=True):
        if kind not in expected:
            return f"{group}/{sibling}: its {name} is {kind}, must be {' or '.join(expected)}"
    return f"{group}/{sibling}: its group is not EPOCH/ROW"


def read_responses(run: Path, rows: Iterable[SampleRow]) -> list[StoredResponse | None]:
    """Read the tokens of rows of the same store; None for a truncated one. Raises InputError."""
    with open_sample_store(run) as store:
        names = {row[1] for row in store.execute("pragma table_info(samples)")}
        finish_reason = "finish_reason" if "finish_reason" in names else "null"
        query = (
            "select prompt_ids, token_ids, logprobs, coalesce(routes, x''), loss_mask, branches, "
            f"{finish_reason} from samples where group_id = ? and sibling = ?"
        )
        return [_stored_response(*store.execute(query, (row.group, row.sibling)).fetchone()) for row in rows]


@contextlib.contextmanager
def open_sample_store(run: Path) -> Iterator[sqlite3.Connection]:
    """Open the sample store read-only. Raises InputError if it is missing or cannot be read."""
    path = run / SAMPLES_FILE
    if not run.is_dir():
        raise InputError(explain_missing_run(run))
    if not path.is_file():
        raise InputError(f"{path} does not exist: the run has no responses yet, or the file was removed")
    # A closed store has no write-ahead log; it can be in a read-only folder.
    mode = "mode=ro" if path.with_name(SAMPLES_FILE + "-wal").exists() else "immutable=1"
    try:
        with contextlib.closing(sqlite3.connect(f"{path.resolve().as_uri()}?{mode}", uri=True)) as store:
            yield store
    except sqlite3.Error as error:
        raise DamagedRunError(f"{path} cannot be read: {error}") from error


def _stored_response(
    prompt: bytes,
    response: bytes,
    logprobs: bytes,
    routes: bytes,
    mask: bytes | None,
    branches: str | None,
    finish_reason: str | None,
) -> StoredResponse | None:
    try:
        ids = array("i", response)
        mask = bytes([1]) * len(ids) if mask is None else mask
        tree = [Branch(*map(int, branch)) for branch in json.loads(branches or "[]")]
        columns = array("i", prompt), ids, array("f", logprobs), array("h", routes)
        return StoredResponse(*columns, mask, tree, finish_reason)
    except (TypeError, ValueError):
        return None


# --- the run folder


def explain_missing_run(folder: Path, missing: str = JOURNAL_FILE) -> str:
    """One sentence: why `folder`, which has no `missing`, is not a run, and which run nearby is the
    newest.
    """
    if missing == JOURNAL_FILE and (folder / CONFIG_FILE).is_file():
        return f"{folder} is a run that has not started yet: it has no {JOURNAL_FILE}; try again in a moment"
    why = f"it has no {missing}" if folder.is_dir() else "it is a file"
    why = why if folder.exists() else "it does not exist"
    newest = find_newest_run(folder)
    hint = "there is no run nearby" if newest is None else f"the newest run nearby is {newest}"
    return f"{folder} is not the folder of a run: {why}; {hint}"


def find_newest_run(path: Path) -> Path | None:
    """The run that contains the file `path`, else the most recently written run in or near `path`."""
    if (path.parent / JOURNAL_FILE).is_file():
        return path.parent
    found: dict[float, Path] = {}
    for folder in (path, path.parent, Path(), Path("runs")):
        with contextlib.suppress(OSError):  # the folder may be unreadable
            for journal in folder.glob(f"*/{JOURNAL_FILE}"):
                found.setdefault(journal.stat().st_mtime, journal.parent)
    return found[max(found)] if found else None
