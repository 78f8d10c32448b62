"""What to say of a folder that is no run: what it lacks, and the newest run that lies beside it.

Every command that wants a run says the same.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

JOURNAL, CONFIG = "journal.jsonl", "config.toml"


def why_no_run(folder: Path, lacks: str = JOURNAL) -> str:
    """One sentence for every command that wants a run; `lacks`: the file that was looked for."""
    if lacks == JOURNAL and (folder / CONFIG).is_file():
        return f"{folder} is a run that has not begun: it has no {JOURNAL} yet; try again in a moment"
    why = f"it has no {lacks}" if folder.is_dir() else "it is a file"
    why = why if folder.exists() else "it does not exist"
    newest = newest_run(folder)
    hint = "no run is nearby" if newest is None else f"the newest run nearby is {newest}"
    return f"{folder} is not the folder of a run: {why}; {hint}"


def newest_run(folder: Path) -> Path | None:
    """The run that a file lies in, else the one written to last: in a folder, beside it, here, or in runs."""
    if (folder.parent / JOURNAL).is_file():
        return folder.parent
    found: dict[float, Path] = {}
    for place in (folder, folder.parent, Path(), Path("runs")):
        with contextlib.suppress(OSError):  # a folder that may not be read
            for journal in place.glob(f"*/{JOURNAL}"):
                found.setdefault(journal.stat().st_mtime, journal.parent)
    return found[max(found)] if found else None
