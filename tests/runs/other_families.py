"""The tiny task with a model that the own decoder does not support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.model.transformers_families import save_tiny
from tests.runtime.tiny import CHARACTERS, drop_engine_settings, write_task

FITTING: dict[str, Any] = {"engine__backend": "transformers", "orchestrator__placement": "static"}


def other_family_task(folder: Path, kind: str = "gemma3_text", **changes: Any) -> Path:
    """The tiny task with a model of this model_type, without settings of the own engine.

    `changes` are those of its `config.json`.
    """
    path = drop_engine_settings(write_task(folder))
    for old in (folder / "start").glob("model*"):
        old.unlink()
    save_tiny(kind, folder / "start", **changes, vocab_size=len(CHARACTERS) + 1)
    return path
