"""The checkpoints of a run as folders: list them, find damage, remove old ones. Nothing is loaded.

A checkpoint is a folder named `step-N` whose manifest has the digest of every file.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from dora.errors import InputError

MANIFEST = "checkpoint.json"
NUM_LISTED = 10  # checkpoints that an error names
_NAME = re.compile(r"step-(\d+)")


class KeptCheckpoints(NamedTuple):
    """Checkpoints that are not removed: the newest, and those of at most two evaluated versions.

    `best_first` are the versions with a result; the first one that has a checkpoint keeps it. So does the
    version that is `evaluating`, until its result is known.
    """

    num_newest: int
    best_first: tuple[int, ...] = ()
    evaluating: int | None = None


def write_manifest(folder: Path) -> None:
    """Write the digests of all other files of a checkpoint."""
    manifest = {"sha256": _file_digests(folder)}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")


def find_damage(folder: Path) -> str:
    """Which file of a checkpoint differs from the manifest, and how; "" if none does. Reads every file."""
    if not (folder / MANIFEST).is_file():
        return f"{MANIFEST} is missing"
    try:
        expected: dict[str, str] = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["sha256"]
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


def check_model_folder(option: str, folder: Path) -> None:
    """Refuse the folder of a run, and a checkpoint that does not exist, with those that do.

    `option` names the folder on the command line. Raises InputError.
    """
    if (folder / "config.toml").is_file() and not (folder / "config.json").is_file():
        saved = checkpoint_folders(folder / "checkpoints")
        newest = (
            f"name a checkpoint, the newest is {next(iter(saved.values()))}" if saved else "it has none yet"
        )
        raise InputError(f"{option} {folder} is the folder of a run; its checkpoints are models: {newest}")
    if _NAME.fullmatch(folder.name) and not folder.exists() and (saved := checkpoint_folders(folder.parent)):
        listed = ", ".join(path.name for path in [*saved.values()][:NUM_LISTED])
        more = f" and {len(saved) - NUM_LISTED} older ones" if len(saved) > NUM_LISTED else ""
        raise InputError(f"{option} {folder} does not exist; {folder.parent} has {listed}{more}")


def recover_replaced(folder: Path) -> None:
    """Rename checkpoints back whose replacement a crash interrupted."""
    for old in folder.glob("step-*.old"):
        if not (original := old.with_suffix("")).exists():
            os.rename(old, original)


def find_best(folder: Path, best_first: Iterable[int]) -> int | None:
    """The first of these versions that has a checkpoint; None if none has."""
    steps = checkpoint_folders(folder)
    return next((version for version in best_first if version in steps), None)


def prune_checkpoints(folder: Path, kept: KeptCheckpoints) -> None:
    """Remove all checkpoints but `kept`, and unfinished ones."""
    steps = checkpoint_folders(folder)
    evaluated = find_best(folder, kept.best_first), kept.evaluating
    for step in sorted(steps)[: max(0, len(steps) - kept.num_newest)]:
        if step not in evaluated:
            _remove(steps[step])
    for kind in ("old", "draft", "removed"):
        for leftover in folder.glob(f"step-*.{kind}"):
            shutil.rmtree(leftover, ignore_errors=True)


def remove_after(folder: Path, step: int) -> None:
    """Remove checkpoints of steps after `step`, also incomplete ones."""
    for found, path in checkpoint_folders(folder).items():
        if found > step:
            _remove(path)


def _remove(checkpoint: Path) -> None:
    """Rename a checkpoint first, so that a crash leaves no partly removed one."""
    removed = checkpoint.with_name(checkpoint.name + ".removed")
    os.rename(checkpoint, removed)
    shutil.rmtree(removed, ignore_errors=True)


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
