"""Writes a checkpoint, in the process that has the weights.

What is beside them depends on who trains: a trainer of the run has its moments and adapters there, a
stand-in for one outside has nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora.errors import RunError
from dora.runtime.process import messages as m
from dora.runtime.process.messages import CheckpointFailed, CheckpointSaved, SaveCheckpoint
from dora.runtime.run_setup import RunSetup
from dora.weights.store import WeightStore

if TYPE_CHECKING:
    from torch import Tensor


ExtraFiles = dict[str, str | bytes | Path]


def write_checkpoint(
    order: SaveCheckpoint,
    model: Path,
    flat: Tensor,
    step: int,
    extras: Callable[[], tuple[dict[str, Any], ExtraFiles]],
) -> CheckpointSaved | CheckpointFailed:
    """Write `flat` ([numel], fp32) as the checkpoint of a step; a disk without room is no reason to end.

    `extras` makes the trainer's state and further files; `model` is the folder that the run began with.
    """
    from dora.model.pretrained import load_config
    from dora.trainer.checkpoint import VERSIONS_FOLDER, prune_checkpoints, save_checkpoint

    path = order.folder / f"step-{step}"
    try:
        state, files = extras()
        files |= {"core.json": order.core}
        files |= {f"{VERSIONS_FOLDER}/{file.name}": file for file in order.versions.iterdir()}
        save_checkpoint(
            path, load_config(model), flat, state, step, model, extra_files=files, fsync=order.fsync
        )
        prune_checkpoints(order.folder, order.keep_last)
    except Exception as error:  # OSError, or what safetensors and torch make of one
        shutil.rmtree(path.with_name(path.name + ".draft"), ignore_errors=True)
        return CheckpointFailed(step, f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(order.versions, ignore_errors=True)
    return CheckpointSaved(path)


# === dora.runtime.training.checkpoints: The checkpoints that the trainer is told to write, and what comes of them.
#
# One that could not be written costs nothing but itself: the ones before it stay.


class CheckpointManager:
    """The driver's side of them."""

    def __init__(self, plan: RunSetup, weights: WeightStore, notice: Callable[[str], None]) -> None:
        self._plan, self._weights, self._notice = plan, weights, notice
        self._newest, self._failure = plan.out, ""
        self._num_ordered = 0
        self._held: list[Path] = []  # what is kept for those that are not written yet
        self.num_pending = 0

    def request(self, core: str, versions: Sequence[int]) -> m.SaveCheckpoint:
        """One more. `core` is what the orchestrator knows now; older `versions` may still be needed."""
        held = self._weights.link_versions(versions, f"held-{self._num_ordered}")
        self._held.append(held)
        self._num_ordered += 1
        self.num_pending += 1
        config = self._plan.config
        return m.SaveCheckpoint(
            folder=self._plan.out / "checkpoints",
            core=core,
            versions=held,
            keep_last=config.trainer.keep_last,
            fsync=config.journal.fsync,
        )

    def on_message(self, message: m.CheckpointSaved | m.CheckpointFailed) -> None:
        """One is written, or cannot be."""
        self.num_pending -= 1
        del self._held[0]
        self._failure = ""
        if isinstance(message, m.CheckpointSaved):
            self._newest = message.folder
            return
        self._failure = f"the checkpoint of step {message.step} could not be written: {message.reason}"
        self._notice(f"{self._failure}; the ones before it stay")

    def discard_pending(self) -> None:
        """Who was to write them is gone."""
        for held in self._held:
            shutil.rmtree(held, ignore_errors=True)
        self.num_pending, self._held = 0, []

    def newest(self) -> Path:
        """The folder of the last one. Raises RunError if it could not be written."""
        if self._failure:
            raise RunError(f"{self._failure}; make room and resume the run")
        return self._newest
