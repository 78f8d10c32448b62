"""Append every event and every action of a run to `journal.jsonl`.

The first line is the header; each further line is `{"seq", "t_s", "kind", ...}`. Together with
`samples.sqlite` the journal holds everything that the audit and the replay need.

Each line ends with `"chain"`, a digest of the line and of the chain before it, so that a changed, removed or
inserted line is found. Lines of the kind `files` have the SHA-256 of other files of the run; the last one,
with the kind `seal`, is written when the run ends.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from dora import __version__
from dora.core.actions import Action
from dora.core.codec import to_json
from dora.core.events import Event
from dora.core.types import Limits

SCHEMA = 5  # 4: lines have a hash chain; 5: other digests of weights, which a GPU can compute
FILES, SEAL = "files", "seal"  # kinds of lines with digests of files; they have no `seq`
SEALED = (  # files beside the journal that do not change after the end of a run
    "summary.json",
    "metrics.jsonl",
    "prompts.jsonl",
    "checkpoints/step-*/checkpoint.json",
)
BEING_WRITTEN = ""  # in place of a digest: the file may be replaced from now on, until its digest follows
CHAIN_BYTES = 16
_LINK = len(', "chain": ""}') + 2 * CHAIN_BYTES  # characters of a line's end


class JournalWriter:
    """Writes `journal.jsonl`; a line reaches the operating system before its action is executed."""

    def __init__(
        self,
        path: Path,
        limits: Limits,
        config_digest: str,
        num_prompts: int | None,
        *,
        source_rows: Sequence[int] | None = None,
        critic_digest: str | None = None,
        seq: int | None = None,
        fsync: bool = False,
    ) -> None:
        """Create the journal, or append to an existing one if `seq`, the number of the next line, is given.

        `num_prompts` is the number of dataset rows, None for a growing dataset, and `source_rows` those of
        each source, if there are several. `critic_digest` is the digest of the weights in critic.path. With
        `fsync` lines survive a power loss.
        """
        self._file = path.open("x" if seq is None else "a", encoding="utf-8")
        self._fsync = fsync
        self.seq = seq or 0  # of the next line
        if seq is not None:
            self._chain = last_chain(path)
            return
        self._chain = ""
        header = {
            "schema": SCHEMA,
            "config_digest": config_digest,
            "dora_version": __version__,
            "limits": asdict(limits),
            "num_prompts": num_prompts,
            "critic_digest": critic_digest,
        }
        if source_rows is not None:
            header["source_rows"] = [*source_rows]
        self._write([header])

    def record(self, now: float, event: Event | None, actions: Sequence[Action]) -> None:
        """Append an event (None for the start) and the actions that it caused; `now` in seconds."""
        records: Sequence[Event | Action] = actions if event is None else (event, *actions)
        if not records:
            return
        self._write({"seq": seq, "t_s": now, **to_json(r)} for seq, r in enumerate(records, self.seq))
        self.seq += len(records)

    def record_files(self, files: Mapping[str, str]) -> None:
        """Append the SHA-256 of files, or BEING_WRITTEN, by path relative to the run folder."""
        self._write([{"kind": FILES, "files": dict(files)}])

    def close(self) -> None:
        self._file.close()

    def _write(self, lines: Iterable[Mapping[str, Any]]) -> None:
        for line in lines:
            text, self._chain = chain_line(json.dumps(line), self._chain)
            self._file.write(text + "\n")
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())


def seal(journal: Path) -> None:
    """Append the last line of a run that has ended: the SHA-256 of its files. Raises OSError.

    Replaces a seal that is already the last line.
    """
    folder = journal.parent
    files = sorted(path for pattern in SEALED for path in folder.glob(pattern))
    digests = {path.relative_to(folder).as_posix(): file_digest(path) for path in files}
    _remove_seal(journal)
    text, _ = chain_line(json.dumps({"kind": SEAL, "files": digests}), last_chain(journal))
    with journal.open("a", encoding="utf-8") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())


def _remove_seal(journal: Path) -> None:
    with journal.open("rb") as file:
        *_, last = file
    if last.startswith(b'{"kind": "%s"' % SEAL.encode()):
        os.truncate(journal, journal.stat().st_size - len(last))


def chain_line(line: str, before: str) -> tuple[str, str]:
    """Add the chain to a line, given that of the line before ("" for the header); also return it alone."""
    chain = chain_of(line.encode(), before)
    return f'{line[:-1]}, "chain": "{chain}"}}', chain


def chain_of(line: bytes, before: str) -> str:
    """The chain of a line, which is given without it, after the chain `before`."""
    return hashlib.blake2b(before.encode() + line, digest_size=CHAIN_BYTES).hexdigest()


def split_chain(line: bytes) -> tuple[bytes, str]:
    """The inverse of `chain_line`: a line without its chain, and the chain."""
    return line[:-_LINK] + b"}", line[-2 * CHAIN_BYTES - 2 : -2].decode("ascii", "replace")


def last_chain(path: Path) -> str:
    """The chain of a journal's last line."""
    with path.open("rb") as file:
        *_, line = file
    return split_chain(line.rstrip(b"\n"))[1]


def file_digest(path: Path) -> str:
    """The SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
