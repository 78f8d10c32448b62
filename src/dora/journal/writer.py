"""Append every event and every action of a run to `journal.jsonl`.

The first line is the header; each further line is `{"seq", "t_s", "kind", ...}`. Together with
`samples.sqlite` the journal holds everything that the audit and the replay need.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from dora import __version__
from dora.core.actions import Action
from dora.core.codec import to_json
from dora.core.events import Event
from dora.core.types import Limits

SCHEMA = 3  # 3: events and actions have the field's names


class JournalWriter:
    """Writes `journal.jsonl`; a line reaches the operating system before its action is executed."""

    def __init__(
        self,
        path: Path,
        limits: Limits,
        config_digest: str,
        num_prompts: int | None,
        *,
        critic_digest: str | None = None,
        seq: int | None = None,
        fsync: bool = False,
    ) -> None:
        """Create the journal, or append to an existing one if `seq`, the number of the next line, is given.

        `num_prompts` is the number of dataset rows, None for a growing dataset. `critic_digest` is the digest
        of the weights in critic.path. With `fsync` lines survive a power loss.
        """
        self._file = path.open("x" if seq is None else "a", encoding="utf-8")
        self._fsync = fsync
        self.seq = seq or 0  # of the next line
        if seq is not None:
            return
        header = {
            "schema": SCHEMA,
            "config_digest": config_digest,
            "dora_version": __version__,
            "limits": asdict(limits),
            "num_prompts": num_prompts,
            "critic_digest": critic_digest,
        }
        self._file.write(json.dumps(header) + "\n")
        self._flush()

    def record(self, now: float, event: Event | None, actions: Sequence[Action]) -> None:
        """Append an event (None for the start) and the actions that it caused; `now` in seconds."""
        records = actions if event is None else (event, *actions)
        if not records:
            return
        lines = []
        for record in records:
            lines.append(json.dumps({"seq": self.seq, "t_s": now, **to_json(record)}))
            self.seq += 1
        self._file.write("\n".join(lines) + "\n")
        self._flush()

    def close(self) -> None:
        self._file.close()

    def _flush(self) -> None:
        self._file.flush()
        if self._fsync:
            os.fsync(self._file.fileno())
