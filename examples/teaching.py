"""Makes the prompts and the starting model of a task: a small decoder imitates the task's teacher.

A task is a module with an `ALPHABET` and `rows(source)`, which returns training and held-out prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from dora.data.tokenizer import Tokenizer, save_character_tokenizer
from dora.model.config import ModelConfig
from dora.model.folder import save_folder
from dora.model.weights import initial_weights
from dora.trainer.sft import Example, imitate

Row = dict[str, Any]


def teach(
    task: Any,
    folder: Path,
    lessons: Callable[[list[Row], Tokenizer], Iterator[list[Example]]],
    num_steps: int,
    max_tokens: int,
    **training: Any,
) -> None:
    """Write prompts.jsonl, held_out.jsonl and the model folder `start` into the task's folder.

    A model of 0.1 million parameters, with a token for each character and one that ends an answer; `lessons`
    gives endless batches, `training` goes to `imitate`.
    """
    torch.set_num_threads(1)
    folder.mkdir(exist_ok=True)
    rows, held_out = task.rows(random.Random(0))
    for file, part in {"prompts": rows, "held_out": held_out}.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in part]
        (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
    save_character_tokenizer(folder / "start", task.ALPHABET)
    config = ModelConfig(
        vocab_size=len(task.ALPHABET) + 1,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=max_tokens,
    )
    flat = initial_weights(config, seed=0)
    losses = imitate(config, flat, lessons(rows, Tokenizer(folder / "start")), num_steps, **training)
    last = [loss for loss in track(losses, folder.name, total=num_steps)][-1]
    save_folder(folder / "start", config, flat)
    print(f"loss {last:.3f} after {num_steps} steps; written to {folder / 'start'}")
