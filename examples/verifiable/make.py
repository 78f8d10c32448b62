"""Make the prompts and starting models of the verifiable tasks, in minutes of one core each.

    python examples/verifiable/make.py chains|countdown|sorting|stories

A model of 0.1 million parameters imitates demonstrations with errors. Reinforcement learning has to remove
the errors; in `chains` it also has to continue beyond the length of the demonstrations.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

from dora.data.tokenizer import Tokenizer
from dora.trainer.sft import SftExample

HERE = Path(__file__).parent
TASKS = {"chains": 700, "countdown": 1200, "sorting": 400, "stories": 1500}  # task -> training steps
EXAMPLES_PER_STEP, LR, MICRO_BATCH_TOKENS = 64, 4e-3, 4096


def demonstrations(task: Any, rows: list[dict[str, Any]], tokenizer: Tokenizer) -> Iterator[list[SftExample]]:
    """Endless batches of demonstrations for random training prompts."""
    source = random.Random(0)
    while True:
        batch: list[SftExample] = []
        while len(batch) < EXAMPLES_PER_STEP:
            row = source.choice(rows)
            text = task.demonstration(row, source)
            if text is not None:
                answer = [*tokenizer.encode(text), tokenizer.eos_id]
                batch.append((tokenizer.encode(row["prompt"]), answer))
        yield batch


def main(name: str) -> None:
    """Write the task's prompts and its starting model into its folder."""
    sys.path += [str(HERE), str(HERE.parent)]
    task: Any = import_module(name)
    options = {"lr": LR, "micro_batch_tokens": MICRO_BATCH_TOKENS}
    make_task = import_module("teaching").make_task
    make_task(task, HERE / name, partial(demonstrations, task), TASKS[name], max_tokens=512, **options)


if __name__ == "__main__":
    main(sys.argv[1])
