"""How models and prompts of the two examples with episodes were made, in about a minute of one core each.

python examples/warm_start.py calculator
python examples/warm_start.py game

A model of 0.1 million parameters imitates a teacher, turn by turn: what the environment says is read
and not imitated.
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from dora.data.tokenizer import Tokenizer
from dora.envs.base import Environment
from dora.trainer.sft import Example

HERE = Path(__file__).parent
TASKS = {  # module, class, and steps of the teacher
    "calculator": ("calculator", "Calculator", 2500),
    "game": ("simon", "Simon", 1000),
}
EPISODES_PER_STEP, MAX_TURNS = 16, 6


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
    folder, (module, environment, num_steps) = HERE / name, TASKS[name]
    sys.path += [str(folder), str(HERE)]
    task: Any = import_module(module)

    def lessons(rows: list[dict[str, Any]], tokenizer: Tokenizer) -> Iterator[list[Example]]:
        return Teacher(task, getattr(task, environment)(), tokenizer).batches(rows)

    import_module("teaching").teach(task, folder, lessons, num_steps, max_tokens=128)


if __name__ == "__main__":
    main(sys.argv[1])
