"""The smallest configuration, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.config.load import read_config
from dora.errors import ConfigError

MINIMAL = """
[run]
steps = 10
[model]
path = "model"
[data]
path = "prompts.jsonl"
[sampling]
max_response_length = 64
[reward]
function = "reward.py:reward"
[trainer]
batch_size = 4
lr = 1e-3
"""
REWARD_SECTION = '[reward]\nfunction = "reward.py:reward"\n'


def write_minimal(folder: Path) -> Path:
    """Write the configuration and the files it names; returns its path."""
    (folder / "model").mkdir()
    (folder / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (folder / "reward.py").write_text("def reward(prompt, completion): return 1.0\n")
    (folder / "run.toml").write_text(MINIMAL)
    return folder / "run.toml"


def error_of(file: Path, *overrides: str) -> str:
    """The message with which a configuration is refused."""
    with pytest.raises(ConfigError) as error:
        read_config(file, overrides)
    return str(error.value)
