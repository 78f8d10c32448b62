"""Make the prompts and the starting model of a task: a small decoder imitates demonstrations.

A task is a module with an `ALPHABET` and `rows(source)`, which returns training and held-out rows.
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
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from dora.trainer.sft import SftExample, train_sft

Row = dict[str, Any]


def make_task(
    task: Any,
    folder: Path,
    demonstrations: Callable[[list[Row], Tokenizer], Iterator[list[SftExample]]],
    num_steps: int,
    max_tokens: int,
    **options: Any,
) -> None:
    """Write prompts.jsonl, held_out.jsonl and the model folder `start` into the task's folder.

    The model has 0.1 million parameters, one token per character and an end token. `demonstrations` gives
    endless batches; `options` are passed to `train_sft`.
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
    losses = train_sft(config, flat, demonstrations(rows, Tokenizer(folder / "start")), num_steps, **options)
    last = [loss for loss in track(losses, folder.name, total=num_steps)][-1]
    save_pretrained(folder / "start", config, flat)
    print(f"loss {last:.3f} after {num_steps} steps; written to {folder / 'start'}")
