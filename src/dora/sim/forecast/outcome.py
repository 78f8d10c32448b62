"""What a forecast found: every step, and the means over the steps in the middle.

Left out are the first steps, in which the pipeline fills, and the last, in which less and less is admitted.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from dora.errors import InputError


@dataclass(frozen=True, slots=True)
class Step:
    """One training step. Seconds; tokens are of prompts and answers."""

    began_s: float
    ended_s: float  # with its version published
    train_s: float  # of it, the trainer's work
    tokens: int
    answers: int
    ages: Counter[int]  # staleness -> groups


@dataclass
class Outcome:
    """Filled while a forecast is played."""

    steps: list[Step] = field(default_factory=list)
    num_events: int = 0
    num_moves: int = 0
    moved_bytes: float = 0.0
    move_s: float = 0.0  # in which moved requests stood still
    copy_s: float = 0.0  # in which their KV was on its way, mostly while they went on
    load_s: float = 0.0  # in which engines loaded weights
    num_answers: int = 0  # that ended
    answer_s: float = 0.0  # from their first placing to their end, summed
    num_refilled: int = 0  # tokens whose KV was computed again
    num_dropped: int = 0  # tokens of answers that were begun and not trained
    num_loads: int = 0
    num_versions: int = 0  # most alive at once
    row_s: float = 0.0  # rows that were decoded, times seconds
    decoded_s: float = 0.0  # engines that decoded, times seconds
    stalled_s: float = 0.0  # of them, ranks that waited for the fullest one
    kv_peak: float = 0.0  # share of the fullest engine

    def figures(self, num_engines: int, num_rows: int, max_staleness: int) -> dict[str, float]:
        """Means over the middle of the run. Raises InputError where it is too short to have one."""
        first, last = middle(len(self.steps), max_staleness)
        steps = self.steps[first:last]
        took_s = steps[-1].ended_s - self.steps[first - 1].ended_s
        step_s, train_s = took_s / len(steps), sum(s.train_s for s in steps) / len(steps)
        ages = sum((s.ages for s in steps), Counter[int]())
        end_s = self.steps[-1].ended_s
        return {
            "step_s": step_s,
            "tokens_per_s": sum(s.tokens for s in steps) / took_s,
            "tokens_per_step": sum(s.tokens for s in steps) / len(steps),
            "train_s": train_s,
            "exposed_s": step_s - train_s,
            "exposed": 1 - train_s / step_s,
            "busy_engines": self.decoded_s / (end_s * num_engines),
            "stalled": self.stalled_s / max(self.decoded_s, 1e-9),
            "busy_rows": self.row_s / (end_s * num_rows),
            "staleness": sum(age * n for age, n in ages.items()) / ages.total(),
            "staleness_max": float(max(ages)),
            "versions": float(self.num_versions),
            "moves": self.num_moves / len(self.steps),
            "move_s": self.move_s / len(self.steps),
            "refilled": self.num_refilled / len(self.steps),
            "dropped": self.num_dropped / len(self.steps),
            "kv_peak": self.kv_peak,
            "loads": self.num_loads / len(self.steps),
            "load_share": self.load_s / (end_s * num_engines),
            "copy_share": self.copy_s / (end_s * num_engines),
            "answer_s": self.answer_s / max(1, self.num_answers),
        }


def middle(num_steps: int, max_staleness: int) -> tuple[int, int]:
    """The steps, first to before last, in which the pipeline is full. Raises InputError if none."""
    first, last = max_staleness + 2, num_steps - max_staleness - 1
    if last - first < 1:
        raise InputError(
            f"{num_steps} steps are too few at S = {max_staleness}: the pipeline fills for {first} "
            f"and drains for {max_staleness + 1}; simulate at least {2 * max_staleness + 5}"
        )
    return first, last
