"""Writes `status.json` about once a second: where the run stands, who is alive, who waits for whom.

It is for `dora status`, and cannot stop the run: a file that cannot be written stays as it was. When nothing
happens for long, the log says who waits for whom, too.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import psutil

from dora.core.events import Event, Progressed, Woken
from dora.core.state import State
from dora.core.waits import Wait, owners, waits
from dora.errors import RunError, SilentError
from dora.observe.status import FILE_NAME, SCHEMA, describe
from dora.runtime.local import LocalHands
from dora.runtime.placing import PLACE, waits_for_places

TRAINING = "training"  # the phase in which the orchestrator is at work
WRITE_S = 1.0
STALL_S = 60.0  # without progress, before the log says who waits for whom
STALL_FACTOR = 2.0  # later, as many times the longest time without progress that came to an end
PLACE_S = 5.0  # without a place to start in, before the log says so
MAX_GAP_S = 5.0  # between two looks; when there is more the driver slept, and that is no stall


class Status:
    """Knows what the run does (`phase`), and how long ago it got on."""

    def __init__(
        self, out: Path, hands: LocalHands, state: Callable[[], State], notice: Callable[[str], None]
    ) -> None:
        self.phase = "starting"
        self._path, self._hands, self._state, self._notice = out / FILE_NAME, hands, state, notice
        process = psutil.Process()
        self._driver = {
            "schema": SCHEMA,
            "host": platform.node(),
            "pid": process.pid,
            "created_s": process.create_time(),
        }
        self._looked_s = self._progress_s = time.monotonic()
        self._longest_s = self._next_s = 0.0
        self._is_reported = False
        self._failure = ""
        self._placeless: set[str] = set()  # of whom the log has told
        self._since_s: dict[tuple[str, str], float] = {}  # who, on -> when that wait was first seen

    def hear(self, event: Event | None) -> None:
        """A fact was heard; if it is more than time going by, the run has got on."""
        is_idle = isinstance(event, Woken) or (isinstance(event, Progressed) and not event.row_tokens_per_s)
        if not is_idle:
            now_s = time.monotonic()
            self._longest_s = max(self._longest_s, now_s - self._progress_s)
            self._progress_s, self._is_reported = now_s, False

    def enter(self, phase: str) -> None:
        """The run begins with something else."""
        self.phase, self._progress_s, self._is_reported = phase, time.monotonic(), False

    def look(self) -> None:
        """Write where the run stands, if the last time is long enough ago."""
        now_s = time.monotonic()
        if (gap_s := now_s - self._looked_s) > MAX_GAP_S:
            self._progress_s += gap_s
        self._looked_s = now_s
        if now_s < self._next_s:
            return
        self._next_s = now_s + WRITE_S
        found = self._waits()
        if self._idle_s > self._patience_s and not self._is_reported:
            self._is_reported = True
            self.report(f"nothing has happened for {self._idle_s:.0f} s", found)
        self._tell_placeless(found)
        self._write("running", "", found)

    def _tell_placeless(self, found: Sequence[Wait]) -> None:
        """Say once of each process that it has had no place for a while."""
        began_s = self._hands.now - PLACE_S
        now = {w.who: w.on for w in found if w.what == PLACE and (w.since_s or 0.0) <= began_s}
        for who in sorted(now.keys() - self._placeless):
            self._notice(f"{who} cannot start yet: {now[who]} has no place for it")
        self._placeless = {*now}

    def report(self, what: str, found: Sequence[Wait] | None = None) -> None:
        """Say in the log who waits for whom."""
        found = self._waits() if found is None else found
        end = f": {found[0].who} waits, in the end, for {', '.join(owners(found))}" if found else ""
        self._notice("\n  ".join([what + end, *describe(found, self._hands.now)]))

    def fail(self, error: RunError) -> None:
        """The run cannot go on; where a process was silent, others may wait for it."""
        self._failure = str(error).partition("\n")[0]
        if isinstance(error, SilentError):
            self.report(self._failure)

    def end(self, stopped: str) -> None:
        """The run is over: by itself, or `stopped` by a signal or an error."""
        why = self._failure or stopped
        state = "failed" if self._failure or stopped == "an error" else "stopped" if stopped else "finished"
        self._write(state, why, self._waits())

    @property
    def _idle_s(self) -> float:
        """Time without progress; in other phases than training nobody tells of any."""
        return time.monotonic() - self._progress_s if self.phase == TRAINING else 0.0

    @property
    def _patience_s(self) -> float:
        """Long steps are no stalls: a run that has waited so long before does so again."""
        return max(STALL_S, STALL_FACTOR * self._longest_s)

    def _waits(self) -> list[Wait]:
        """Those of the orchestrator while it is at work, each since it was first seen."""
        if self.phase != TRAINING:
            return []
        now_s, before = self._hands.now, self._since_s
        found = [*waits(self._state()), *waits_for_places(self._hands.stations())]
        self._since_s = {(w.who, w.on): before.get((w.who, w.on), now_s) for w in found}
        return [
            w._replace(since_s=self._since_s[w.who, w.on] if w.since_s is None else w.since_s) for w in found
        ]

    def _restarts(self, now_s: float) -> list[dict[str, Any]]:
        due_s = {f"engine {engine}": at_s for engine, at_s in self._hands.fleet.restarts.due_s.items()}
        if (trainer_s := self._hands.trainers.due_s) is not None:
            due_s["the trainer"] = trainer_s
        if (storage := self._hands.storage) is not None and storage.due_s is not None:
            due_s["the storage"] = storage.due_s
        return [{"who": who, "in_s": round(max(0.0, at_s - now_s), 3)} for who, at_s in due_s.items()]

    def _write(self, state: str, why: str, found: Sequence[Wait]) -> None:
        """In one piece, or not at all."""
        core, now_s = self._state(), time.monotonic()
        is_running = state == "running"
        told: dict[str, Any] = {
            **self._driver,
            "unix_s": round(time.time(), 3),
            "t_s": round(self._hands.now, 3),
            "state": state,
            "why": why,
            "phase": self.phase,
            "steps": core.num_trained // core.limits.batch_size,
            "num_steps": core.limits.num_steps,
            "idle_s": round(self._idle_s, 3),
            "patience_s": round(self._patience_s, 3),
            "processes": [pulse.to_json(now_s) for pulse in self._hands.pulses()] if is_running else [],
            "restarts": self._restarts(now_s) if is_running else [],
            "waits": [wait._asdict() for wait in found],
            "owners": owners(found),
        }
        draft = self._path.with_suffix(".json.draft")
        with contextlib.suppress(OSError):
            draft.write_text(json.dumps(told) + "\n")
            os.replace(draft, self._path)
