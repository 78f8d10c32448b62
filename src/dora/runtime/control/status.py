"""Write `status.json` about once a second: progress, the state of each process, and the wait-for graph.

`dora status` reads the file. A file that cannot be written keeps its old content and never stops the run.
After a long time without progress, the log also names what the run is waiting for.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import psutil

from dora.atomic_file import write_text_atomically
from dora.core.events import Event, ProgressReported, TimerFired
from dora.core.state import State
from dora.core.types import RequestId
from dora.core.wait_graph import WaitEdge, find_root_causes, find_waits
from dora.errors import RunError, WorkerTimeoutError
from dora.metrics.status import SCHEMA, STATUS_FILE, describe_waits
from dora.runtime.control.requests import RunEnd
from dora.runtime.process.supervisor import DriverClock
from dora.runtime.process.worker_process import WorkerState
from dora.text import plural

TRAINING = "training"  # the phase in which the orchestrator runs
WRITE_S = 1.0
STALL_S = 60.0  # time without progress before the wait-for graph is logged
STALL_FACTOR = 2.0  # the threshold is at least this many times the longest pause so far
SLOT_WAIT_S = 5.0  # without a slot in the cluster, before a log line
SLOT = "a free slot to start in"


class ObservedExecutor(Protocol):
    """The part of the executor that the status shows."""

    @property
    def now(self) -> float: ...

    @property
    def clock(self) -> DriverClock: ...

    @property
    def is_paused(self) -> bool:
        """Whether a client has paused the run."""

    def worker_states(self) -> list[WorkerState]: ...

    def workers_by_role(self) -> Mapping[str, Sequence[WorkerState]]:
        """The same, by the names that the wait-for graph uses."""

    def restart_times(self) -> Mapping[str, float]:
        """Seconds until each lost worker is restarted."""

    def agent_waits(self) -> Mapping[RequestId, str]:
        """Requests whose episodes wait for an agent -> what the agent has to do."""

    def missing_agents(self) -> str:
        """That episodes wait and no agent has a session, and what an agent has to do; else ""."""


class StatusWriter:
    """Tracks the phase of a run and the time since its last progress."""

    def __init__(
        self,
        out: Path,
        executor: ObservedExecutor,
        state: Callable[[], State],
        notice: Callable[[str], None],
        num_steps: int = 0,
        resume_command: str = "dora train --resume",
    ) -> None:
        """`num_steps` is the length of a run that gets more steps, before the orchestrator knows it."""
        self.phase, self._num_steps, self._resume_command = "starting", num_steps, resume_command
        self._path, self._executor, self._state, self._notice = out / STATUS_FILE, executor, state, notice
        process = psutil.Process()
        self._driver = {
            "schema": SCHEMA,
            "host": platform.node(),
            "pid": process.pid,
            "created_s": process.create_time(),
        }
        self._clock = executor.clock
        self._progress_s = self._clock.now_s
        self._longest_pause_s = self._next_write_s = 0.0
        self._is_stall_reported = False
        self._failure = ""
        self._waiting_for_slot: set[str] = set()  # workers that the log has named
        self._first_seen_s: dict[tuple[str, str], float] = {}  # (waiter, target) -> run clock

    def on_event(self, event: Event | None) -> None:
        """Any event but a timer or an idle engine's report is progress."""
        is_idle = isinstance(event, TimerFired) or (
            isinstance(event, ProgressReported) and not event.row_tokens_per_s
        )
        if not is_idle:
            now_s = self._clock.now_s
            self._longest_pause_s = max(self._longest_pause_s, now_s - self._progress_s)
            self._progress_s, self._is_stall_reported = now_s, False

    def enter(self, phase: str) -> None:
        """Begin another phase of the run."""
        self.phase, self._progress_s, self._is_stall_reported = phase, self._clock.now_s, False

    def update(self) -> None:
        """Write the file and report stalls, if WRITE_S has passed since the last time."""
        now_s = self._clock.now_s
        if now_s < self._next_write_s:
            return
        self._next_write_s = now_s + WRITE_S
        if self._executor.is_paused:
            self._progress_s = now_s  # a pause is no stall
        waits = self._waits()
        if self._idle_s > self._stall_after_s and not self._is_stall_reported:
            self._is_stall_reported = True
            self.report(f"no progress for {self._idle_s:.0f} s", waits)
        if not self._executor.is_paused:  # a pause has no wait-for graph
            self._report_slot_waits(waits)
        self._write("running", "", waits)

    def report(self, what: str, waits: Sequence[WaitEdge] | None = None) -> None:
        """Log `what` with the wait-for graph."""
        waits = self._waits() if waits is None else waits
        cause = (
            f": {waits[0].waiter} ultimately waits for {', '.join(find_root_causes(waits))}" if waits else ""
        )
        self._notice("\n  ".join([what + cause, *describe_waits(waits, self._executor.now)]))

    def fail(self, error: RunError) -> None:
        """Record why the run failed. After a timeout of a worker, also log the wait-for graph."""
        self._failure = str(error).partition("\n")[0]
        if isinstance(error, WorkerTimeoutError):
            self.report(self._failure)

    def how_ended(self, stopped: str) -> RunEnd:
        """How the run has ended; `stopped` is the signal or "an error", "" if the run finished."""
        core = self._state()
        num_steps = core.num_trained // core.limits.batch_size
        after = f"after {num_steps} of {plural(core.limits.num_steps, 'step')}"
        remedy = "dora serve --resume resumes it"
        if self._failure or stopped == "an error":
            reason = self._failure or "the console of the run has the error"
            return RunEnd("failed", f"the run has failed {after}: {reason}; {remedy}")
        if stopped:
            return RunEnd("stopped", f"the run was stopped by {stopped} {after}; {remedy}")
        did = f"{plural(num_steps, 'step')} trained" if core.limits.num_steps else "the model is evaluated"
        return RunEnd("finished", f"the run has finished: {did}")

    def end(self, state: str, stopped: str) -> None:
        """Write the final state; `stopped` as in `how_ended`."""
        if state == "finished":
            self.phase = state
        self._write(state, self._failure or stopped, self._waits())

    @property
    def _idle_s(self) -> float:
        """Time without progress; 0 in other phases than training, which report none."""
        return self._clock.now_s - self._progress_s if self.phase == TRAINING else 0.0

    @property
    def _stall_after_s(self) -> float:
        """A pause as long as an earlier one is not a stall: steps may simply be long."""
        return max(STALL_S, STALL_FACTOR * self._longest_pause_s)

    def _waits(self) -> list[WaitEdge]:
        """The wait-for graph during training; an edge without a start begins when first seen."""
        if self.phase != TRAINING or self._executor.is_paused:
            return []
        now_s, before = self._executor.now, self._first_seen_s
        executor = self._executor
        waits = find_waits(self._state(), executor.agent_waits())
        waits += find_slot_waits(executor.workers_by_role())
        self._first_seen_s = {(w.waiter, w.target): before.get((w.waiter, w.target), now_s) for w in waits}
        return [
            w._replace(since_s=self._first_seen_s[w.waiter, w.target] if w.since_s is None else w.since_s)
            for w in waits
        ]

    def _report_slot_waits(self, waits: Sequence[WaitEdge]) -> None:
        """Log once for each worker that the cluster has no slot for it."""
        began_s = self._executor.now - SLOT_WAIT_S
        now = {w.waiter: w.target for w in waits if w.reason == SLOT and (w.since_s or 0.0) <= began_s}
        for waiter in sorted(now.keys() - self._waiting_for_slot):
            self._notice(f"{waiter} cannot start yet: {now[waiter]} has no free slot for it")
        self._waiting_for_slot = {*now}

    def _write(self, state: str, reason: str, waits: Sequence[WaitEdge]) -> None:
        core, now_s = self._state(), self._clock.now_s
        is_running = state == "running"
        restarts = self._executor.restart_times() if is_running else {}
        phase = "evaluating" if self.phase == TRAINING and core.is_only_evaluating else self.phase
        content: dict[str, Any] = {
            **self._driver,
            "unix_s": round(time.time(), 3),
            "t_s": round(self._executor.now, 3),
            "state": state,
            "reason": reason,
            "phase": "paused" if is_running and self._executor.is_paused else phase,
            "steps": core.num_trained // core.limits.batch_size,
            "num_steps": max(self._num_steps, core.limits.num_steps),
            "idle_s": round(self._idle_s, 3),
            "stall_after_s": round(self._stall_after_s, 3),
            "processes": [each.to_json(now_s) for each in self._executor.worker_states()]
            if is_running
            else [],
            "restarts": [{"worker": worker, "in_s": round(in_s, 3)} for worker, in_s in restarts.items()],
            "waits": [wait._asdict() for wait in waits],
            "root_causes": find_root_causes(waits),
            "resume_command": self._resume_command,
            "missing_agents": self._executor.missing_agents() if is_running else "",
        }
        with contextlib.suppress(OSError):
            write_text_atomically(self._path, json.dumps(content) + "\n")


def find_slot_waits(workers_by_role: Mapping[str, Sequence[WorkerState]]) -> Iterator[WaitEdge]:
    """Workers that wait for a slot in a cluster, and roles none of whose workers is ready because of that.

    The orchestrator has no record of a process that is not ready, so these edges are derived from the
    processes.
    """
    for role, states in workers_by_role.items():
        waiting = [each.worker for each in states if not each.is_ready and each.worker.process.waiting_for]
        if not any(each.is_ready for each in states):
            yield from (WaitEdge(role, worker.name, "it starts") for worker in waiting if worker.name != role)
        yield from (WaitEdge(worker.name, worker.process.waiting_for, SLOT) for worker in waiting)
