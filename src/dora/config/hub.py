"""Models and datasets of the Hugging Face hub, named in place of a path.

A snapshot in the hub's cache has its commit in its path, so the resolved configuration pins what was loaded.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from dora.errors import ConfigError, download_hint

RepoType = Literal["model", "dataset"]
# Without pickled weights, which can run code, and which DORA-RL does not read.
FILES = {"model": ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"], "dataset": None}
_CACHED = re.compile(r"(model|dataset)s--([\w.-]+?)--([\w.-]+)/snapshots/([0-9a-f]{40})")


def fetch(key: str, name: str, kind: RepoType, revision: str | None, path: Path) -> Path:
    """The snapshot of a hub repository in the hub's cache, downloaded if it is not there.

    `revision` is a branch, tag or commit; None: the newest commit. Raises ConfigError with the command that
    downloads it to `path`.
    """
    hint = download_hint(name, path, kind, revision)
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise ConfigError(
            f"{key} = {name!r}: {path} does not exist, and downloads from the hub need pip install "
            f"'dora-rl[data]'{hint}"
        ) from error
    try:
        return Path(snapshot_download(name, repo_type=kind, revision=revision, allow_patterns=FILES[kind]))
    except Exception as error:  # of the hub, the network or the disk: the library raises many types
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{key} = {name!r}: {path} does not exist, and the hub's {kind} of this name could not be "
            f"downloaded ({type(error).__name__}: {reason}); without a network, copy the folder from a "
            f"machine that has one{hint}"
        ) from error


def commit_of(path: str) -> str | None:
    """The commit of a snapshot in the hub's cache; None for any other path."""
    found = _CACHED.search(path)
    return found[4] if found else None


def missing_snapshot_hint(path: str) -> str:
    """The remedy for a snapshot that is no longer in the hub's cache; empty for any other path."""
    found = _CACHED.search(path)
    if found is None:
        return ""
    kind, owner, name, commit = found.groups()
    repo_type = "" if kind == "model" else f" --repo-type {kind}"
    return f"; download it again: `hf download {owner}/{name}{repo_type} --revision {commit}`"
