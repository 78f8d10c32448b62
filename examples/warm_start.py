"""Make the prompts and starting models of the two examples with episodes, in a minute of one core each.

    python examples/warm_start.py calculator|game

A model of 0.1 million parameters imitates demonstrations turn by turn. Observations are its input, not its
target.
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
from dora.trainer.sft import SftExample

HERE = Path(__file__).parent
TASKS = {  # module, class and training steps
    "calculator": ("calculator", "Calculator", 2500),
    "game": ("simon", "Simon", 1000),
}
EPISODES_PER_STEP, MAX_TURNS = 16, 6


class Demonstrator:
    """Runs episodes of a task with its `demonstration` as the policy."""

    def __init__(self, task: Any, environment: Environment, tokenizer: Tokenizer) -> None:
        self._task, self._environment, self._tokenizer = task, environment, tokenizer
        self._source = random.Random(0)

    def batches(self, rows: list[dict[str, Any]]) -> Iterator[list[SftExample]]:
        """Endless batches of turns, each with the whole episode before it as its prompt."""
        while True:
            episodes = [
                asyncio.run(self._episode(row)) for row in self._source.sample(rows, EPISODES_PER_STEP)
            ]
            yield [turn for episode in episodes for turn in episode]

    async def _episode(self, row: Mapping[str, Any]) -> list[SftExample]:
        observed = [str(await self._environment.reset(row, self._source.getrandbits(31)))]
        turns: list[SftExample] = []
        context = self._tokenizer.encode(observed[0])
        for _ in range(MAX_TURNS):
            action = self._task.demonstration(row, observed, self._source)
            turn = [*self._tokenizer.encode(action), self._tokenizer.eos_id]
            turns.append((context, turn))
            step = await self._environment.step(action)
            if step.done:
                break
            observed.append(str(step.observation))
            context = [*context, *turn, *self._tokenizer.encode(observed[-1])]
        return turns


def main(name: str) -> None:
    """Write prompts.jsonl, held_out.jsonl and the model folder `start` beside the task."""
    folder, (module, environment, num_steps) = HERE / name, TASKS[name]
    sys.path += [str(folder), str(HERE)]
    task: Any = import_module(module)

    def demonstrations(rows: list[dict[str, Any]], tokenizer: Tokenizer) -> Iterator[list[SftExample]]:
        return Demonstrator(task, getattr(task, environment)(), tokenizer).batches(rows)

    import_module("teaching").make_task(task, folder, demonstrations, num_steps, max_tokens=128)


if __name__ == "__main__":
    main(sys.argv[1])
