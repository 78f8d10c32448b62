"""The rewarder's queue: one group at a time, each call under a deadline.

A reward function that hangs or ends its process fails its group by name; the process is
replaced and the next group is judged.
"""

from __future__ import annotations

import time
from collections import deque

from dora.core.events import GroupScored, GroupUnscorable
from dora.core.records import GroupId
from dora.errors import RewardError, RunError
from dora.runtime.messages import Gone, Judge, Judged, Ready, RewarderSpec
from dora.runtime.process import Told, Worker
from dora.runtime.workers import run_rewarder


class Rewarder:
    """Groups in, `GroupScored` or `GroupUnscorable` out."""

    def __init__(self, spec: RewarderSpec, timeout_s: float, start_timeout_s: float, told: Told) -> None:
        """What the worker says is put into `told`; its owner hands it to `heard`."""
        self._spec, self._told = spec, told
        self._timeout_s, self._start_timeout_s = timeout_s, start_timeout_s
        self._waiting: deque[Judge] = deque()
        self._current: Judge | None = None
        self._rewards: list[float] = []
        self.first_failure = ""  # reason and traceback of the first failed call
        self.is_ready = False
        self._was_ever_ready = False
        self._start()

    def _start(self) -> None:
        self.worker = Worker("rewarder", run_rewarder, self._spec, self._told)
        self._since_s = time.monotonic()
        self.is_ready = False

    def submit(self, order: Judge) -> None:
        """Judge a group when its turn comes."""
        self._waiting.append(order)
        self._next()

    def heard(self, message: Ready | Judged | Gone) -> list[GroupScored | GroupUnscorable]:
        """Facts that follow from a message of the worker. Raises as `_died` does."""
        if isinstance(message, Gone):
            return self._died()
        self._since_s = time.monotonic()
        if isinstance(message, Ready):
            self.is_ready = self._was_ever_ready = True
            self._next()
            return []
        current = self._current
        if current is None or message.group != current.group:
            return []  # a late word about a group that has failed already
        if message.outcome.reward is None:
            return self._fail(message.outcome.reason, message.outcome.detail)
        self._rewards.append(message.outcome.reward)
        if len(self._rewards) < len(current.responses):
            return []
        rewards = tuple(self._rewards)
        self._advance()
        return [GroupScored(current.group, rewards)]

    def check_deadline(self) -> list[GroupScored | GroupUnscorable]:
        """Fail the group whose call has taken too long. Raises RunError if the worker does not start."""
        waited_s = time.monotonic() - self._since_s
        if not self.is_ready and waited_s > self._start_timeout_s:
            raise RunError(
                f"the rewarder did not start within runtime.start_timeout_s = {self._start_timeout_s:g} s"
            )
        if not self.is_ready or self._current is None or waited_s <= self._timeout_s:
            return []
        return self._replace(f"reward took longer than reward.timeout_s = {self._timeout_s:g}")

    def _died(self) -> list[GroupScored | GroupUnscorable]:
        """The worker is gone: its group fails, the others go on with a new one.

        Raises RewardError if the function cannot be loaded at the beginning, RunError if it no longer can.
        """
        if not self.is_ready:
            told, _, reason = self.worker.crash.partition("RewardError: ")
            is_input = told and not self._was_ever_ready
            raise RewardError(reason.strip()) if is_input else RunError(self.worker.how_it_ended)
        return self._replace(f"reward ended its process: {self.worker.how_it_ended}")

    def _replace(self, reason: str) -> list[GroupScored | GroupUnscorable]:
        self.worker.kill()
        self._start()
        return self._fail(reason, reason) if self._current else []

    def _fail(self, reason: str, detail: str) -> list[GroupScored | GroupUnscorable]:
        assert self._current is not None
        group: GroupId = self._current.group
        self.first_failure = self.first_failure or f"{reason}\n{detail}"
        self._advance()
        return [GroupUnscorable(group, reason)]

    def _advance(self) -> None:
        self._current, self._rewards = None, []
        self._next()

    def _next(self) -> None:
        if self.is_ready and self._current is None and self._waiting:
            self._current = self._waiting.popleft()
            self._since_s = time.monotonic()
            self.worker.send(self._current)
