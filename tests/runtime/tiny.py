"""A task and a policy so small that a whole run takes seconds: a random model learns to write sevens."""

from __future__ import annotations

import json
import string
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from dora.core.types import Chunk, RequestId
from dora.data.gcd import ALPHABET
from dora.data.tokenizer import save_character_tokenizer
from dora.engine.request import Completion
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights

CHARACTERS = ALPHABET + string.ascii_lowercase  # many, so that a random response seldom ends early
MODEL = ModelConfig(
    vocab_size=len(CHARACTERS) + 1,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    head_dim=8,
    max_position_embeddings=64,
)

CONFIG = """
[run]
steps = 4
[model]
path = "start"
[data]
path = "prompts.jsonl"
max_prompt_length = 8
[sampling]
group_size = 2
max_response_length = 24
[engine]
kernels = "eager"
num_engines = 2
max_num_seqs = 4
min_step_time = "10ms"
[reward]
function = "task.py:reward"
[trainer]
batch_size = 2
lr = 1e-2
[eval]
num_prompts = 0
"""

REWARD = """
def reward(prompt, completion, **row):
    return completion.count("7") + len(set(completion)) / 100
"""

PROMPTS = tuple({"prompt": f"{number}:"} for number in range(10, 17))


def save_start(folder: Path) -> Path:
    """Write the initial policy and its tokenizer."""
    save_pretrained(folder, MODEL, initial_weights(MODEL, seed=0))
    save_character_tokenizer(folder, CHARACTERS)
    return folder


def write_task(folder: Path, reward: str = REWARD, prompts: Sequence[Mapping[str, object]] = PROMPTS) -> Path:
    """Write policy, prompts, reward function and configuration; returns the path of the configuration."""
    save_start(folder / "start")
    (folder / "task.py").write_text(reward)
    (folder / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in prompts))
    path = folder / "task.toml"
    path.write_text(CONFIG)
    return path


def drop_engine_settings(task: Path) -> Path:
    """Remove the settings of DORA's own engine from the configuration of a task."""
    text = task.read_text().replace('kernels = "eager"\n', "").replace('min_step_time = "10ms"\n', "")
    task.write_text(text)
    return task


def completion_of(
    request: RequestId, token_ids: Sequence[int], logprobs: Sequence[float], chunks: tuple[Chunk, ...]
) -> Completion:
    """The completion of a request for the prompt (3, 4), as an engine process sends it."""
    columns = (np.array([3, 4], np.int32), np.array(token_ids, np.int32))
    logprob_columns = (np.array(logprobs, np.float32),) * 3
    completion = Completion(request, chunks[0].version, *columns, *logprob_columns, chunks, "stop")
    return completion.without_filtered_logprobs()
