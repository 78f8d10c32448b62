"""How prompts and starting models of the verifiable tasks were made, in minutes of one core each.

    python examples/verifiable/make.py chains|countdown|sorting|stories

A model of 0.1 million parameters imitates a teacher who slips. What reinforcement has to do is written in
each task: to remove the slips, and in `chains` to go on where the lessons end.
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
from dora.trainer.sft import Example

HERE = Path(__file__).parent
TASKS = {"chains": 700, "countdown": 1200, "sorting": 400, "stories": 1500}  # and steps of the lessons
EXAMPLES_PER_STEP, LR, MICRO_BATCH_TOKENS = 64, 4e-3, 4096


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
    """Write the task's prompts and its starting model into its folder."""
    sys.path += [str(HERE), str(HERE.parent)]
    task: Any = import_module(name)
    train = {"lr": LR, "micro_batch_tokens": MICRO_BATCH_TOKENS}
    teach = import_module("teaching").teach
    teach(task, HERE / name, partial(lessons, task), TASKS[name], max_tokens=512, **train)


if __name__ == "__main__":
    main(sys.argv[1])
