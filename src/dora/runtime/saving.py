"""Writes a checkpoint, in the process that has the weights.

What is beside them depends on who trains: a trainer of the run has its moments and adapters there, a
stand-in for one outside has nothing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dora.runtime.messages import Save, Saved, SaveRefused

if TYPE_CHECKING:
    from torch import Tensor

Files = dict[str, str | bytes | Path]


def save(
    order: Save, model: Path, flat: Tensor, step: int, extras: Callable[[], tuple[dict[str, Any], Files]]
) -> Saved | SaveRefused:
    """Write `flat` ([numel], fp32) as the checkpoint of a step; a disk without room is no reason to end.

    `extras` makes the trainer's state and further files; `model` is the folder that the run began with.
    """
    from dora.model.folder import load_config
    from dora.trainer.checkpoint import VERSIONS, keep_newest, save_checkpoint

    path = order.folder / f"step-{step}"
    try:
        state, files = extras()
        files |= {"core.json": order.core}
        files |= {f"{VERSIONS}/{file.name}": file for file in order.versions.iterdir()}
        save_checkpoint(path, load_config(model), flat, state, step, model, beside=files, fsync=order.fsync)
        keep_newest(order.folder, order.keep_last)
    except Exception as error:  # OSError, or what safetensors and torch make of one
        shutil.rmtree(path.with_name(path.name + ".draft"), ignore_errors=True)
        return SaveRefused(step, f"{type(error).__name__}: {error}")
    finally:
        shutil.rmtree(order.versions, ignore_errors=True)
    return Saved(path)
