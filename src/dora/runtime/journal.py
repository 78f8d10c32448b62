"""The append-only record of every fact and every order of a run: `journal.jsonl`.

The first line is the header; each further line is `{"seq", "t_s", "kind", ...}`. What is needed
to judge a run or to replay it is in this file and in `samples.sqlite`, and nowhere else.
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
from dora.core.records import Limits

SCHEMA = 2


class Journal:
    """Writes `journal.jsonl`; every line reaches the operating system before it is acted on."""

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
        """`num_prompts` are the rows of the dataset, None if it grows; `critic_digest` is of the weights in
        critic.path, if one is given; `fsync` makes lines survive a loss of power.

        With `seq` the journal is there already, and the next line gets this number.
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

    def record(self, now: float, event: Event | None, orders: Sequence[Action]) -> None:
        """Append one fact (None for the start) and the orders it caused; `now` in seconds."""
        records = orders if event is None else (event, *orders)
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
