"""Files of the repository as pages of the site, with highlighted code."""

from __future__ import annotations

import posixpath
from pathlib import Path, PurePath

LANGUAGES = {".py": "python", ".toml": "toml", ".json": "json", ".sh": "bash", ".jsonl": "json"}
MAX_CHARACTERS = 60_000
HEAD = "---\nsearch:\n  exclude: true\n---\n\n"  # search finds the documentation, not the code


def path_of(page: PurePath, target: str) -> str:
    """Path in the repository of the target of a link on a page of docs/."""
    return posixpath.normpath(posixpath.join("docs", page.parent.as_posix(), target))


def page(file: Path, path: str) -> str:
    """The page of a file: its text, at most MAX_CHARACTERS; of a folder: its content."""
    if file.is_dir():
        names = sorted(f"{entry.name}/" if entry.is_dir() else entry.name for entry in file.iterdir())
        return HEAD + "\n".join(
            [f"# {path}/", "", *(f"* `{name}`" for name in names if name[0] not in "._"), ""]
        )
    text = file.read_text(encoding="utf-8")
    shown = text[:MAX_CHARACTERS]
    rest = "" if shown == text else f"\nThe first {len(shown):,} of {len(text):,} characters.\n"
    return f"{HEAD}# {path}\n\n`````{LANGUAGES.get(file.suffix, 'text')}\n{shown.rstrip()}\n`````\n{rest}"
