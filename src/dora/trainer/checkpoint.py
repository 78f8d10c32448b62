"""Checkpoints: a Hugging Face folder with the trainer's state beside it.

A folder of that name is complete, or it is not there.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.folder import load_folder, save_folder

_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)


def save_checkpoint(
    folder: Path, config: ModelConfig, flat: Tensor, state: dict[str, Any], step: int, source: Path
) -> None:
    """Write `folder` so that it exists only once it is complete; an older one is replaced.

    `state` is `Trainer.state_dict()`; the tokenizer's files come from the model folder `source`.
    """
    draft = folder.with_name(folder.name + ".draft")
    shutil.rmtree(draft, ignore_errors=True)
    save_folder(draft, config, flat.detach().cpu())
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    torch.save({"step": step, "trainer": state}, draft / "optimizer.pt")
    if folder.exists():
        shutil.rmtree(folder)
    os.rename(draft, folder)


def load_checkpoint(folder: Path) -> tuple[ModelConfig, Tensor, dict[str, Any], int]:
    """Config, flat weights [numel], trainer state and step of a saved checkpoint."""
    config, flat = load_folder(folder)
    path = folder / "optimizer.pt"
    if not path.is_file():
        raise ModelError(f"{folder} has no optimizer.pt: it is a model, not a checkpoint to resume from")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return config, flat, saved["trainer"], saved["step"]
