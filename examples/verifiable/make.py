"""How prompts and starting models of the verifiable tasks were made, in minutes of one core each.

    python examples/verifiable/make.py chains|countdown|sorting|stories

A model of 0.1 million parameters imitates a teacher who slips. What reinforcement has to do is written in
each task: to remove the slips, and in `chains` to go on where the lessons end.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from dora.data.tokenizer import Tokenizer, save_character_tokenizer
from dora.model.config import ModelConfig
from dora.model.folder import save_folder
from dora.model.weights import initial_weights
from dora.trainer.sft import Example, imitate

HERE = Path(__file__).parent
TASKS = {"chains": 700, "countdown": 1200, "sorting": 400, "stories": 1500}  # and steps of the lessons
EXAMPLES_PER_STEP, LR, MICRO_BATCH_TOKENS = 64, 4e-3, 4096


def config_for(alphabet: str) -> ModelConfig:
    """A decoder for as many characters, and one token that ends an answer."""
    return ModelConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=512,
    )


def lessons(task: Any, rows: list[dict[str, Any]], tokenizer: Tokenizer) -> Iterator[list[Example]]:
    """Endless batches of what the teacher writes about training prompts, as far as it is taught."""
    source = random.Random(0)
    while True:
        batch: list[Example] = []
        while len(batch) < EXAMPLES_PER_STEP:
            row = source.choice(rows)
            text = task.lesson(row, source)
            if text is not None:
                answer = [*tokenizer.encode(text), tokenizer.eos_id]
                batch.append((tokenizer.encode(row["prompt"]), answer))
        yield batch


def main(name: str) -> None:
    """Write prompts.jsonl, held_out.jsonl and the model folder `start` into the task's folder."""
    torch.set_num_threads(1)
    sys.path.append(str(HERE))
    task: Any = import_module(name)
    folder, num_steps = HERE / name, TASKS[name]
    folder.mkdir(exist_ok=True)
    rows, held_out = task.rows(random.Random(0))
    for file, part in {"prompts": rows, "held_out": held_out}.items():
        lines = [json.dumps(row, ensure_ascii=False) + "\n" for row in part]
        (folder / f"{file}.jsonl").write_text("".join(lines), encoding="utf-8")
    save_character_tokenizer(folder / "start", task.ALPHABET)
    config = config_for(task.ALPHABET)
    flat = initial_weights(config, seed=0)
    batches = lessons(task, rows, Tokenizer(folder / "start"))
    losses = imitate(config, flat, batches, num_steps, LR, micro_batch_tokens=MICRO_BATCH_TOKENS)
    last = [loss for loss in track(losses, name, total=num_steps)][-1]
    save_folder(folder / "start", config, flat)
    print(f"loss {last:.3f} after {num_steps} steps; written to {folder / 'start'}")


if __name__ == "__main__":
    main(sys.argv[1])
