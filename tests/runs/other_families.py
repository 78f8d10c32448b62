"""The tiny task with a model that the own decoder does not support."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from tests.model.transformers_families import FAMILIES, SHAPE
from tests.runtime.tiny import CHARACTERS, write_task
from transformers import AutoConfig, AutoModelForCausalLM

FITTING: dict[str, Any] = {"engine__backend": "transformers", "orchestrator__placement": "static"}


def other_family_task(folder: Path, kind: str = "gemma3_text", **changes: Any) -> Path:
    """The tiny task with a model of this model_type, without settings of the own engine.

    `changes` are those of its `config.json`.
    """
    path = write_task(folder)
    text = path.read_text().replace('kernels = "eager"\n', "").replace('min_step_time = "10ms"\n', "")
    path.write_text(text)
    for old in (folder / "start").glob("model*"):
        old.unlink()
    torch.manual_seed(0)
    shape = {**SHAPE, **FAMILIES.get(kind, {}), **changes, "vocab_size": len(CHARACTERS) + 1}
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **shape))
    model.float().save_pretrained(folder / "start")
    return path
