"""Replace a file atomically: readers see the old content or the new one, never a part."""

from __future__ import annotations

import os
from pathlib import Path


def write_text_atomically(path: Path, text: str) -> None:
    """Write a file beside `path` and rename it. Raises OSError, and the old content stays."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes, *, fsync: bool = False, mode: int = 0o666) -> None:
    """As `write_text_atomically`; with `fsync` the content survives a loss of power.

    The file has `mode`, less the process's umask, before it has any content.
    """
    draft = path.with_name(f"{path.name}.{os.getpid()}.draft")  # two processes may write the same file
    draft.unlink(missing_ok=True)  # of a killed process with this id
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(content)
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        draft.unlink(missing_ok=True)
        raise
