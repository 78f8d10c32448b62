"""The checkpoints that the trainer is told to write, and what comes of them.

One that could not be written costs nothing but itself: the ones before it stay.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from dora.errors import RunError
from dora.runtime import messages as m
from dora.runtime.plan import Plan
from dora.weights.store import WeightStore


class Checkpoints:
    """The driver's side of them."""

    def __init__(self, plan: Plan, weights: WeightStore, notice: Callable[[str], None]) -> None:
        self._plan, self._weights, self._notice = plan, weights, notice
        self._newest, self._failure = plan.out, ""
        self._num_ordered = 0
        self._held: list[Path] = []  # what is kept for those that are not written yet
        self.num_pending = 0

    def order(self, core: str, versions: Sequence[int]) -> m.Save:
        """One more. `core` is what the orchestrator knows now; older `versions` may still be needed."""
        held = self._weights.hold(versions, f"held-{self._num_ordered}")
        self._held.append(held)
        self._num_ordered += 1
        self.num_pending += 1
        config = self._plan.config
        return m.Save(
            folder=self._plan.out / "checkpoints",
            core=core,
            versions=held,
            keep_last=config.trainer.keep_last,
            fsync=config.journal.fsync,
        )

    def hear(self, message: m.Saved | m.SaveRefused) -> None:
        """One is written, or cannot be."""
        self.num_pending -= 1
        del self._held[0]
        self._failure = ""
        if isinstance(message, m.Saved):
            self._newest = message.folder
            return
        self._failure = f"the checkpoint of step {message.step} could not be written: {message.reason}"
        self._notice(f"{self._failure}; the ones before it stay")

    def forget(self) -> None:
        """Who was to write them is gone."""
        for held in self._held:
            shutil.rmtree(held, ignore_errors=True)
        self.num_pending, self._held = 0, []

    def newest(self) -> Path:
        """The folder of the last one. Raises RunError if it could not be written."""
        if self._failure:
            raise RunError(f"{self._failure}; make room and resume the run")
        return self._newest
