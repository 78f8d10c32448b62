"""Checkpoints: a Hugging Face folder with everything beside it that a run needs to go on.

A folder named `step-N` with a manifest that fits its files is whole; everything else is not a
checkpoint. It gets its name by one rename, once all of it is written.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.folder import load_folder, save_folder
from dora.model.weights import weight_digest

MANIFEST = "checkpoint.json"
VERSIONS = "versions"  # older versions, as the weight store has them
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "generation_config.json",
    "chat_template.jinja",
)
_NAME = re.compile(r"step-(\d+)")


def save_checkpoint(
    folder: Path,
    config: ModelConfig,
    flat: Tensor,
    state: dict[str, Any],
    step: int,
    source: Path,
    *,
    beside: Mapping[str, str | bytes | Path] | None = None,
    fsync: bool = False,
) -> None:
    """Write `folder` so that it exists only once it is complete; an older one is replaced.

    `state` is `Trainer.state_dict()`; the tokenizer's files come from the model folder `source`.
    `beside` are further files: a text, bytes, or the file to copy. `fsync`: survive a loss of power.
    """
    draft, old = folder.with_name(folder.name + ".draft"), folder.with_name(folder.name + ".old")
    for left_over in (draft, old):
        shutil.rmtree(left_over, ignore_errors=True)
    save_folder(draft, config, flat.detach().cpu())
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    for name, content in (beside or {}).items():
        (draft / name).parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, draft / name)
        elif isinstance(content, bytes):
            (draft / name).write_bytes(content)
        else:
            (draft / name).write_text(content)
    torch.save({"step": step, "trainer": state}, draft / "optimizer.pt")
    manifest = {"step": step, "digest": weight_digest(flat.detach().cpu()), "sizes": _sizes(draft)}
    (draft / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")
    if fsync:
        _sync(draft)
    if folder.exists():
        os.rename(folder, old)
    os.rename(draft, folder)
    if fsync:
        _sync_one(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> tuple[ModelConfig, Tensor, dict[str, Any], int]:
    """Config, flat weights [numel], trainer state and step of a saved checkpoint. Raises ModelError."""
    config, flat = load_folder(folder)
    path = folder / "optimizer.pt"
    if not path.is_file():
        raise ModelError(f"{folder} has no optimizer.pt: it is a model, not a checkpoint to resume from")
    saved = torch.load(path, map_location="cpu", weights_only=True)
    if weight_digest(flat) != _manifest(folder).get("digest"):
        raise ModelError(f"{folder} is damaged: its weights are not those that were saved; remove it")
    return config, flat, saved["trainer"], saved["step"]


def whole_checkpoints(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint, newest first; a folder whose files are not all there is left out."""
    found = {step: path for step, path in _named(folder).items() if _is_whole(path)}
    return dict(sorted(found.items(), reverse=True))


def restore(folder: Path) -> None:
    """Give a checkpoint its name back that was to be replaced when everything died."""
    for old in folder.glob("step-*.old"):
        if not (own := old.with_suffix("")).exists():
            os.rename(old, own)


def keep_newest(folder: Path, num: int) -> None:
    """Remove all but the newest `num` checkpoints, and what was never finished."""
    steps = _named(folder)
    for step in sorted(steps)[: max(0, len(steps) - num)]:
        old = steps[step].with_name(steps[step].name + ".old")
        os.rename(steps[step], old)  # so that no half of it is taken for a whole
    for left_over in (*folder.glob("step-*.old"), *folder.glob("step-*.draft")):
        shutil.rmtree(left_over, ignore_errors=True)


def forget_after(folder: Path, step: int) -> None:
    """Remove what is there of checkpoints of more steps: a run goes on without them."""
    for found, path in _named(folder).items():
        if found > step:
            shutil.rmtree(path)


def _named(folder: Path) -> dict[int, Path]:
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return {int(match[1]): path for match, path in matches if match}


def _manifest(folder: Path) -> dict[str, Any]:
    """Empty where there is none that can be read."""
    try:
        raw = json.loads((folder / MANIFEST).read_text())
    except (OSError, ValueError):
        return {}
    return raw if isinstance(raw, dict) else {}


def _is_whole(folder: Path) -> bool:
    sizes = _sizes(folder)
    sizes.pop(MANIFEST, None)
    return _manifest(folder).get("sizes") == sizes


def _sizes(folder: Path) -> dict[str, int]:
    """Bytes of every file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def _sync(folder: Path) -> None:
    """Have everything in the folder on the disk."""
    for path in (*folder.rglob("*"), folder):
        _sync_one(path)


def _sync_one(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
