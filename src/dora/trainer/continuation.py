"""Start a run with the weights and the optimizer of another run's checkpoint."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.pretrained import load_config, load_pretrained
from dora.model.weights import WeightLayout
from dora.trainer.checkpoint import OPTIMIZER_FILE, SHARDS_FOLDER, load_checkpoint
from dora.trainer.checkpoint_folders import MANIFEST, find_damage
from dora.trainer.lora import LoraAdamW, LoraSettings

_MOMENTS = {"step", "exp_avg", "exp_avg_sq"}
_RTOL, _ATOL = 1e-5, 1e-6  # rounding of merged adapters on another device


def load_start(
    checkpoint: Path | None, continued: Path | None, *, reads_shards: bool = True
) -> tuple[Tensor, dict[str, Any], int] | None:
    """Flat weights [numel], trainer state and number of steps with which a trainer starts.

    They are those of the run's own `checkpoint`, else those of the checkpoint of another run that is
    `continued`, with 0 steps. None: the trainer starts with the initial model. `reads_shards`: see
    `load_checkpoint`.
    """
    if checkpoint is not None:
        _, flat, state, step = load_checkpoint(checkpoint, reads_shards=reads_shards)
        return flat, state, step
    if continued is not None:
        _, flat, state, _ = load_checkpoint(continued, reads_shards=reads_shards)
        return flat, {**state, "num_steps_done": 0}, 0
    return None


def check_start(folder: Path, model: Path, lora: LoraSettings | None, num_critic_weights: int) -> None:
    """Raises ModelError if a run of `model` cannot start with the weights and optimizer of a checkpoint.

    `lora` are the adapters that the run trains, `num_critic_weights` the numel of its critic, 0 without one.
    """
    if reason := _misfit(folder, model, lora, num_critic_weights):
        has_weights = (folder / "config.json").is_file()
        remedy = f"--set model.path={folder} without --continue-from"
        raise ModelError(
            f"trainer.continue_from = {str(folder)!r}: {reason}"
            + (f"; or start with its weights and a new optimizer: {remedy}" if has_weights else "")
        )


def _misfit(folder: Path, model: Path, lora: LoraSettings | None, num_critic_weights: int) -> str:
    """Why a checkpoint does not fit, and the remedy; "" if it does."""
    for name in (OPTIMIZER_FILE, MANIFEST):
        if not (folder / name).is_file():
            return f"it has no {name}, so it is not a checkpoint of a run: name RUN/checkpoints/step-N"
    if damage := find_damage(folder):
        return f"the checkpoint is damaged: {damage}: name another one"
    config, saved_config = load_config(model), load_config(folder)
    if differing := _differing(saved_config, config):
        return f"it has another architecture than model.path: {differing}: set model.path to that of its run"
    try:
        saved = torch.load(folder / OPTIMIZER_FILE, map_location="cpu", weights_only=True, mmap=True)
        state = saved["trainer"]
    except (KeyError, TypeError, RuntimeError, UnpicklingError) as error:
        return f"{OPTIMIZER_FILE} cannot be read: {str(error).splitlines()[0]}: name another checkpoint"
    reason = _optimizer_misfit(state.get("optimizer"), WeightLayout(config), lora, folder / SHARDS_FOLDER)
    if not reason and lora is not None:
        reason = _adapter_misfit(folder, model, lora, state["optimizer"]["adapters"])
    return reason or _critic_misfit(state.get("critic"), num_critic_weights)


def _differing(saved: ModelConfig, own: ModelConfig) -> str:
    """The first value in which two architectures differ."""
    for field in fields(own):
        there, here = getattr(saved, field.name), getattr(own, field.name)
        if there != here:
            return f"{field.name} is {there} there and {here} here"
    return ""


def _optimizer_misfit(optimizer: Any, layout: WeightLayout, lora: LoraSettings | None, shards: Path) -> str:
    states = optimizer.get("state") if isinstance(optimizer, dict) else None
    expected_keys = {"step"} if shards.is_dir() else _MOMENTS  # shards have the same architecture, as checked
    if not isinstance(states, dict) or any(moments.keys() != expected_keys for moments in states.values()):
        return "its optimizer is not DORA-RL's AdamW: another trainer wrote it"
    has_adapters = "adapters" in optimizer
    if has_adapters != (lora is not None):
        trained, own = ("LoRA adapters", "all weights") if has_adapters else ("all weights", "LoRA adapters")
        return f"its run trained {trained}, and this one trains {own}: set trainer.lora_rank as in its run"
    expected = layout.numel if lora is None else lora.adapter_layout(layout).numel
    found = {moments["exp_avg"].numel() for moments in states.values() if "exp_avg" in moments}
    if has_adapters:
        found.add(optimizer["adapters"].numel())
    if found - {expected}:
        keys = "trainer.lora_rank and lora_targets" if has_adapters else "model.path"
        return (
            f"its optimizer has {max(found)} values, and this run needs {expected}: set {keys} as in its run"
        )
    return ""


def _adapter_misfit(folder: Path, model: Path, lora: LoraSettings, adapters: Tensor) -> str:
    """The weights of the checkpoint must be those of model.path with the adapters added."""
    (config, merged), (_, flat) = load_pretrained(model), load_pretrained(folder)
    optimizer = LoraAdamW(WeightLayout(config), merged, lora, weight_decay=0.0, betas=(0.9, 0.999))
    optimizer.load_state_dict({"state": {}, "adapters": adapters})
    if torch.allclose(merged, flat, _RTOL, _ATOL):
        return ""
    return (
        "its weights are not those of model.path with its adapters: set model.path and trainer.lora_alpha "
        "as in its run"
    )


def _critic_misfit(critic: Any, num_weights: int) -> str:
    if not num_weights:
        return ""
    if critic is None:
        return "its run had no critic, and algorithm.adv_estimator = gae needs one: change adv_estimator"
    found = critic["flat"].numel()
    if found != num_weights:
        return (
            f"its critic has {found} weights, and this run's has {num_weights}: set critic.path as in its run"
        )
    return ""
