"""Where the prompts of a run come from: those it trains on, and those held out.

The built-in task gcd has both.
"""

from __future__ import annotations

from pathlib import Path

from dora.config import Config
from dora.data import gcd
from dora.data.chat import ChatTemplate
from dora.data.dataset import Dataset
from dora.data.inflow import Inflow

PUT_PROMPTS = "prompts.jsonl"  # in the run's folder


def template_of(config: Config) -> ChatTemplate | None:
    """How conversations become text; None: prompts are texts."""
    if not config.data.chat_template:
        return None
    return ChatTemplate(Path(config.model.path), config.data.system_prompt)


def training_prompts(config: Config, out: Path) -> Dataset:
    """All rows of data.path, or what was put into the run's folder through its service. Raises DataError."""
    if config.data.path == "service":
        return Inflow(out / PUT_PROMPTS, config.data.prompt_key, fsync=config.journal.fsync)
    if config.data.path == "gcd":
        return Dataset(gcd.training_rows(), "prompt", "the built-in task gcd")
    return Dataset.from_path(Path(config.data.path), config.data.prompt_key, config.data.split)


def held_out_prompts(config: Config) -> Dataset | None:
    """The first `eval.num_prompts` rows of eval.path; None: no evaluation. Raises DataError."""
    path, num_prompts = config.eval.path, config.eval.num_prompts
    if num_prompts == 0 or path is None:
        return None
    if path == "gcd":
        return Dataset(gcd.held_out_rows(), "prompt", "the held-out part of gcd").head(num_prompts)
    return Dataset.from_path(Path(path), config.data.prompt_key, config.eval.split).head(num_prompts)
