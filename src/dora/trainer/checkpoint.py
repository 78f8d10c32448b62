"""Checkpoints: a Hugging Face folder plus everything that a resumed run needs.

A checkpoint is written under another name, its manifest last, and renamed once it is complete. Several ranks
write the optimizer's moments as shards, in torch's format of distributed checkpoints.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained, save_pretrained
from dora.trainer.checkpoint_folders import find_damage, write_manifest

OPTIMIZER_FILE = "optimizer.pt"  # the trainer's state
SNAPSHOT_FILE = "core.json"  # the orchestrator's state, and the number of journal lines that led to it
SHARDS_FOLDER = "optimizer"  # moments, if several ranks trained
VERSIONS_FOLDER = "versions"  # older versions, in the format of the weight store
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
)


def new_draft(folder: Path) -> Path:
    """Where `folder` is written before it is complete; remains of an interrupted one are removed."""
    draft = folder.with_name(folder.name + ".draft")
    for leftover in (draft, folder.with_name(folder.name + ".old")):
        shutil.rmtree(leftover, ignore_errors=True)
    return draft


def save_checkpoint(
    folder: Path,
    config: ModelConfig,
    flat: Tensor,
    state: dict[str, Any],
    step: int,
    source: Path,
    *,
    extra_files: Mapping[str, str | bytes | Path] | None = None,
    shards: Future[None] | None = None,
    fsync: bool = False,
) -> None:
    """Write `folder` so that it exists only once it is complete; replaces an existing one.

    `state` is `Trainer.state_dict()`. The tokenizer's files come from the model folder `source`.
    `extra_files` map a name to text, bytes, or the file to copy. `shards` is `Trainer.save_state`'s, which
    writes to SHARDS_FOLDER of `new_draft(folder)`. With `fsync` the checkpoint survives a power failure.
    """
    if shards is None:
        new_draft(folder)
    draft, old = folder.with_name(folder.name + ".draft"), folder.with_name(folder.name + ".old")
    save_pretrained(draft, config, flat.detach().cpu())
    copy_tokenizer(source, draft)
    for name, content in (extra_files or {}).items():
        (draft / name).parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, draft / name)
        elif isinstance(content, bytes):
            (draft / name).write_bytes(content)
        else:
            (draft / name).write_text(content, encoding="utf-8")
    torch.save({"step": step, "trainer": state}, draft / OPTIMIZER_FILE)
    if shards is not None:
        shards.result()
    write_manifest(draft)
    if fsync:
        for path in (*draft.rglob("*"), draft):
            _fsync(path)
    if folder.exists():
        os.rename(folder, old)
    os.rename(draft, folder)
    if fsync:
        _fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the files of tokenizer and image processor from one model folder to another."""
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)


def load_checkpoint(
    folder: Path, *, reads_shards: bool = True
) -> tuple[ModelConfig, Tensor, dict[str, Any], int]:
    """Config, flat weights [numel], trainer state and step of a checkpoint. Raises ModelError.

    Without `reads_shards` moments that several ranks wrote stay where they are: the state names their folder.
    """
    path = folder / OPTIMIZER_FILE
    if not path.is_file():
        raise ModelError(f"{folder} has no {OPTIMIZER_FILE}: it is a model, not a checkpoint to resume from")
    if damage := find_damage(folder):
        raise ModelError(f"{folder} is damaged: {damage}; remove it")
    config, flat = load_pretrained(folder)
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if (shards := folder / SHARDS_FOLDER).is_dir():
        if reads_shards:
            from dora.trainer.distributed import read_moments  # imports FSDP, which takes seconds

            saved["trainer"]["optimizer"]["state"][0] |= read_moments(shards, config)
        else:
            saved["trainer"]["optimizer"]["shards"] = shards
    return config, flat, saved["trainer"], saved["step"]


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
