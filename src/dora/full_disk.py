"""Errors that say that a file system is full, and which one."""

from __future__ import annotations

import errno
import os
import shutil
import sqlite3
from collections.abc import Sequence
from pathlib import Path

from dora.text import size

FULL = (errno.ENOSPC, errno.EDQUOT)


def is_full(error: BaseException) -> bool:
    """Whether a file system was full, or a quota used up. Libraries in Rust only say so in their message."""
    if isinstance(error, sqlite3.Error):
        return getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_FULL
    code = error.errno if isinstance(error, OSError) else None
    return code in FULL or any(os.strerror(number) in str(error) for number in FULL)


def find_full_disk(error: BaseException, folders: Sequence[Path]) -> Path:
    """The folder whose file system is full: that of the failing path.

    An error without a path is that of the folder with the least free space; SQLite's is that of the first.
    """
    if isinstance(error, sqlite3.Error):
        return folders[0]
    path = Path(os.fsdecode(error.filename)) if isinstance(error, OSError) and error.filename else None
    named = [folder for folder in folders if path is not None and path.is_relative_to(folder)]
    return named[0] if named else min(folders, key=_free_bytes)


def describe_full_disk(folder: Path, needed: int) -> str:
    """What is missing, and the remedy. `needed`: the maximum that a run writes to the folder, in bytes."""
    return (
        f"the disk of {folder} is full: up to {size(needed)} needed, {size(_free_bytes(folder))} free. Free "
        "disk space there"
    )


def _free_bytes(folder: Path) -> int:
    """Of its file system, also once the folder has been removed."""
    for existing in (folder, *folder.parents):
        if existing.exists():
            return shutil.disk_usage(existing).free
    return 0
