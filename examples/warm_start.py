"""How models and prompts of the two examples with episodes were made, in about a minute of one core each.

python examples/warm_start.py calculator
python examples/warm_start.py game

A model of 0.1 million parameters imitates a teacher, turn by turn: what the environment says is read
and not imitated.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from rich.progress import track

from dora.data.tokenizer import Tokenizer, save_character_tokenizer
from dora.envs.base import Environment
from dora.model.config import ModelConfig
from dora.model.folder import save_folder
from dora.model.weights import initial_weights
from dora.trainer.sft import Example, imitate

HERE = Path(__file__).parent
TASKS = {  # module, class, and steps of the teacher
    "calculator": ("calculator", "Calculator", 2500),
    "game": ("simon", "Simon", 1000),
}
EPISODES_PER_STEP, MAX_TURNS = 16, 6


def config_for(alphabet: str) -> ModelConfig:
    """A decoder for as many characters, and one token that ends a turn."""
    return ModelConfig(
        vocab_size=len(alphabet) + 1,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=128,
    )


class Teacher:
    """Plays episodes of a task."""

    def __init__(self, task: Any, environment: Environment, tokenizer: Tokenizer) -> None:
        self._task, self._environment, self._tokenizer = task, environment, tokenizer
        self._source = random.Random(0)

    def batches(self, rows: list[dict[str, Any]]) -> Iterator[list[Example]]:
        """Endless batches of turns, each with all that came before it."""
        while True:
            episodes = [asyncio.run(self._play(row)) for row in self._source.sample(rows, EPISODES_PER_STEP)]
            yield [turn for episode in episodes for turn in episode]

    async def _play(self, row: Mapping[str, Any]) -> list[Example]:
        observed, said = [str(await self._environment.reset(row, self._source.getrandbits(31)))], []
        turns: list[Example] = []
        before = self._tokenizer.encode(observed[0])
        for _ in range(MAX_TURNS):
            said.append(self._task.teacher(row, said, observed, self._source))
            turn = [*self._tokenizer.encode(said[-1]), self._tokenizer.eos_id]
            turns.append((before, turn))
            step = await self._environment.step(said[-1])
            if step.done:
                break
            observed.append(str(step.observation))
            before = [*before, *turn, *self._tokenizer.encode(observed[-1])]
        return turns


def main(name: str) -> None:
    """Write prompts.jsonl, held_out.jsonl and the model folder `start` beside the task."""
    torch.set_num_threads(1)
    folder, (module, environment, num_steps) = HERE / name, TASKS[name]
    sys.path.append(str(folder))
    task: Any = import_module(module)
    rows, held_out = task.rows(random.Random(0))
    for file, part in {"prompts": rows, "held_out": held_out}.items():
        (folder / f"{file}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    save_character_tokenizer(folder / "start", task.ALPHABET)
    teacher = Teacher(task, getattr(task, environment)(), Tokenizer(folder / "start"))
    config = config_for(task.ALPHABET)
    flat = initial_weights(config, seed=0)
    losses = imitate(config, flat, teacher.batches(rows), num_steps)
    last = [loss for loss in track(losses, "warm start", total=num_steps)][-1]
    save_folder(folder / "start", config, flat)
    print(f"loss {last:.3f} after {num_steps} steps; written to {folder / 'start'}")


if __name__ == "__main__":
    main(sys.argv[1])
