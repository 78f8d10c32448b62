"""Checkpoints of a run: written in the trainer's process, requested and tracked by the driver.

A checkpoint that cannot be written does not end the run, because the earlier ones stay.
"""

from __future__ import annotations

import shutil
import tomllib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora.errors import RunError
from dora.full_disk import describe_full_disk, is_full
from dora.runtime.process.messages import CheckpointFailed, CheckpointSaved, SaveCheckpoint
from dora.runtime.run_setup import RunSetup
from dora.trainer.checkpoint_folders import KeptCheckpoints, prune_checkpoints
from dora.weights.store import WeightStore

if TYPE_CHECKING:
    from torch import Tensor

ExtraFiles = dict[str, str | bytes | Path]
Reply = CheckpointSaved | CheckpointFailed


@dataclass(frozen=True)
class TrainerState:
    """What a checkpoint of a trainer after `step` is made of, in host memory.

    `flat` are the weights [numel] in fp32, `state` is `TrainingEngine.state_dict()`. `shards` resolves once
    all ranks have written the moments. `finish` may add to state and files before they are written.
    """

    step: int
    flat: Tensor
    state: dict[str, Any]
    shards: Future[None] | None = None
    finish: Callable[[dict[str, Any]], ExtraFiles] = lambda state: {}


class CheckpointWriter:
    """Writes the checkpoints of one trainer in a thread, one after another.

    The trainer stops while its state is copied, and while the previous checkpoint is not written yet.
    """

    def __init__(self, model: Path, send: Callable[[Reply], None]) -> None:
        """`model` is the folder of the initial policy; `send` sends the reply of each request."""
        self._model, self._send = model, send
        self._thread = ThreadPoolExecutor(max_workers=1)
        self._pending: Future[None] | None = None

    def start(self, request: SaveCheckpoint, step: int, copy_state: Callable[[Path], TrainerState]) -> None:
        """Copy the state after `step`; the reply is sent once the checkpoint is written, or cannot be.

        `copy_state` gets a new folder for shards.
        """
        from dora.trainer.checkpoint import SHARDS_FOLDER, new_draft

        if self._pending is not None:
            self._pending.result()
        try:
            state = copy_state(new_draft(request.folder / f"step-{step}") / SHARDS_FOLDER)
        except Exception as error:  # out of host memory, for one
            self._send(_failed(request, step, error))
            return
        self._pending = self._thread.submit(self._write, request, state)

    def _write(self, request: SaveCheckpoint, state: TrainerState) -> None:
        self._send(write_checkpoint(request, self._model, state))


def write_checkpoint(request: SaveCheckpoint, model: Path, trainer: TrainerState) -> Reply:
    """Write a checkpoint; `model` is the folder of the initial policy."""
    from dora.model.pretrained import load_config
    from dora.trainer.checkpoint import SNAPSHOT_FILE, VERSIONS_FOLDER, save_checkpoint

    path = request.folder / f"step-{trainer.step}"
    try:
        files = trainer.finish(trainer.state) | {SNAPSHOT_FILE: request.core} | _card(request, trainer)
        files |= {f"{VERSIONS_FOLDER}/{file.name}": file for file in request.versions.iterdir()}
        save_checkpoint(
            path,
            load_config(model),
            trainer.flat,
            trainer.state,
            trainer.step,
            model,
            extra_files=files,
            shards=trainer.shards,
            fsync=request.fsync,
        )
        prune_checkpoints(request.folder, request.kept)
    except Exception as error:  # OSError, or what safetensors and torch raise instead
        if trainer.shards is not None:
            wait([trainer.shards])  # before their folder is removed
        return _failed(request, trainer.step, error)
    shutil.rmtree(request.versions, ignore_errors=True)
    return CheckpointSaved(path)


def _card(request: SaveCheckpoint, trainer: TrainerState) -> ExtraFiles:
    """The model card, if the folder of the run has its configuration."""
    from dora import __version__
    from dora.trainer.model_card import model_card

    path = request.folder.parent / "config.toml"
    if not path.exists():
        return {}
    config = tomllib.loads(path.read_text(encoding="utf-8"))
    return {"README.md": model_card(config, trainer.step, __version__)}


def _failed(request: SaveCheckpoint, step: int, error: Exception) -> CheckpointFailed:
    """Remove what was written, and say why."""
    shutil.rmtree(request.folder / f"step-{step}.draft", ignore_errors=True)
    shutil.rmtree(request.versions, ignore_errors=True)
    return CheckpointFailed(step, f"{type(error).__name__}: {error}", is_full(error))


class CheckpointManager:
    """Tracks the checkpoints that the trainer is asked to write."""

    def __init__(self, setup: RunSetup, weights: WeightStore, notice: Callable[[str], None]) -> None:
        self._setup, self._weights, self._notice = setup, weights, notice
        self._newest: Path | None = None
        self._failure = ""
        self._num_requested = 0
        self._kept_versions: list[Path] = []  # folders of the versions that pending checkpoints need
        self.num_pending = 0
        self.saved: list[Path] = []  # not recorded in the journal yet

    def request(self, core: str, versions: Sequence[int], kept: KeptCheckpoints) -> SaveCheckpoint:
        """The request for one more checkpoint, after which the checkpoints `kept` stay.

        `core` is the orchestrator's state as JSON. `versions` are older versions to keep in the checkpoint.
        """
        linked = self._weights.link_versions(versions, f"held-{self._num_requested}")
        self._kept_versions.append(linked)
        self._num_requested += 1
        self.num_pending += 1
        return SaveCheckpoint(
            folder=self._setup.out / "checkpoints",
            core=core,
            versions=linked,
            kept=kept,
            fsync=self._setup.config.journal.fsync,
        )

    def on_message(self, message: Reply) -> None:
        """Handle the trainer's reply to the oldest pending request."""
        self.num_pending -= 1
        del self._kept_versions[0]
        self._failure = ""
        if isinstance(message, CheckpointSaved):
            self._newest = message.folder
            self.saved.append(message.folder)
            return
        self._failure = f"the checkpoint of step {message.step} could not be written: {message.reason}"
        if message.is_disk_full:
            setup = self._setup
            self._failure += f"; {describe_full_disk(setup.out, setup.checkpoint_bytes)}"
        self._notice(f"{self._failure}; earlier checkpoints stay valid")

    def discard_pending(self) -> None:
        """Forget all pending requests, because the trainer is lost."""
        for kept in self._kept_versions:
            shutil.rmtree(kept, ignore_errors=True)
        self.num_pending, self._kept_versions = 0, []

    def newest(self) -> Path | None:
        """The folder of the last checkpoint, None without one. Raises RunError if it could not be written."""
        if self._failure:
            resume = f"{self._setup.config.resume_command} {self._setup.out}"
            raise RunError(f"{self._failure}; resume the run: {resume}")
        return self._newest
