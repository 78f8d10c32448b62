"""Checkpoints: a Hugging Face folder plus everything that a resumed run needs.

A checkpoint is a folder named `step-N` whose manifest has the digest of every file. It is written under
another name, the manifest last, and renamed once it is complete.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained, save_pretrained

MANIFEST = "checkpoint.json"
SNAPSHOT_FILE = "core.json"  # the orchestrator's state, and the number of journal lines that led to it
VERSIONS_FOLDER = "versions"  # older versions, in the format of the weight store
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
    extra_files: Mapping[str, str | bytes | Path] | None = None,
    fsync: bool = False,
) -> None:
    """Write `folder` so that it exists only once it is complete; replaces an existing one.

    `state` is `Trainer.state_dict()`. The tokenizer's files come from the model folder `source`.
    `extra_files` map a name to text, bytes, or the file to copy. With `fsync` the checkpoint survives a power
    failure.
    """
    draft, old = folder.with_name(folder.name + ".draft"), folder.with_name(folder.name + ".old")
    for leftover in (draft, old):
        shutil.rmtree(leftover, ignore_errors=True)
    save_pretrained(draft, config, flat.detach().cpu())
    for name in _TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, draft / name)
    for name, content in (extra_files or {}).items():
        (draft / name).parent.mkdir(exist_ok=True)
        if isinstance(content, Path):
            shutil.copyfile(content, draft / name)
        elif isinstance(content, bytes):
            (draft / name).write_bytes(content)
        else:
            (draft / name).write_text(content)
    torch.save({"step": step, "trainer": state}, draft / "optimizer.pt")
    write_manifest(draft)
    if fsync:
        _fsync_folder(draft)
    if folder.exists():
        os.rename(folder, old)
    os.rename(draft, folder)
    if fsync:
        _fsync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(folder: Path) -> tuple[ModelConfig, Tensor, dict[str, Any], int]:
    """Config, flat weights [numel], trainer state and step of a checkpoint. Raises ModelError."""
    path = folder / "optimizer.pt"
    if not path.is_file():
        raise ModelError(f"{folder} has no optimizer.pt: it is a model, not a checkpoint to resume from")
    if damage := find_damage(folder):
        raise ModelError(f"{folder} is damaged: {damage}; remove it")
    config, flat = load_pretrained(folder)
    saved = torch.load(path, map_location="cpu", weights_only=True)
    return config, flat, saved["trainer"], saved["step"]


def write_manifest(folder: Path) -> None:
    """Write the digests of all other files of a checkpoint."""
    manifest = {"sha256": _file_digests(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n")


def find_damage(folder: Path) -> str:
    """Which file of a checkpoint differs from the manifest, and how; "" if none does. Reads every file."""
    try:
        expected: dict[str, str] = json.loads((folder / MANIFEST).read_text())["sha256"]
        found = _file_digests(folder)
        for name in sorted({*expected, *found}):
            if name not in found:
                return f"{name} is missing"
            if name not in expected:
                return f"{name} is not in {MANIFEST}"
            if found[name] != expected[name]:
                return f"{name} differs from its digest in {MANIFEST}"
    except (KeyError, TypeError, ValueError):
        return f"{MANIFEST} is not a manifest with digests"
    except OSError as error:
        return str(error)
    return ""


def checkpoint_folders(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint, newest first, also damaged ones."""
    matches = ((_NAME.fullmatch(path.name), path) for path in folder.glob("step-*"))
    return dict(sorted(((int(match[1]), path) for match, path in matches if match), reverse=True))


def complete_checkpoints(folder: Path) -> dict[int, Path]:
    """Step -> checkpoint, newest first; folders with missing or damaged files are left out."""
    return {step: path for step, path in checkpoint_folders(folder).items() if not find_damage(path)}


def recover_replaced(folder: Path) -> None:
    """Rename checkpoints back whose replacement a crash interrupted."""
    for old in folder.glob("step-*.old"):
        if not (original := old.with_suffix("")).exists():
            os.rename(old, original)


def prune_checkpoints(folder: Path, num: int) -> None:
    """Remove all but the newest `num` checkpoints, and unfinished ones."""
    steps = checkpoint_folders(folder)
    for step in sorted(steps)[: max(0, len(steps) - num)]:
        old = steps[step].with_name(steps[step].name + ".old")
        os.rename(steps[step], old)  # so that a crash leaves no partly removed checkpoint
    for leftover in (*folder.glob("step-*.old"), *folder.glob("step-*.draft")):
        shutil.rmtree(leftover, ignore_errors=True)


def remove_after(folder: Path, step: int) -> None:
    """Remove checkpoints of steps after `step`, also incomplete ones."""
    for found, path in checkpoint_folders(folder).items():
        if found > step:
            shutil.rmtree(path)


def _file_digests(folder: Path) -> dict[str, str]:
    """Relative path -> SHA-256, of all files but the manifest, computed in parallel."""
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path != folder / MANIFEST)
    with ThreadPoolExecutor() as threads:
        return {
            path.relative_to(folder).as_posix(): digest
            for path, digest in zip(files, threads.map(_file_digest, files), strict=True)
        }


def _file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _fsync_folder(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _fsync(path)


def _fsync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
