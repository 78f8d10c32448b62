"""What a simulated world is made of.

A whole configuration is drawn from one seed: sizes, speeds, lengths and faults.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from dora.core.records import Limits


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """One world. Times in seconds, lengths in tokens."""

    limits: Limits
    num_prompts: int  # rows of the dataset
    engines: tuple[tuple[int, int], ...]  # (rows, version slots) of each
    speeds: tuple[float, ...]  # seconds per token of each engine
    max_length: int
    tail: float  # sigma of the log-normal lengths
    reward_s: float
    step_s: float
    load_s: float
    share_failed: float  # of groups, in the rewarder
    share_refused: float  # of requests, by the engine
    share_flat: float  # of groups, with equal rewards
    loss_interval_s: float | None  # mean time between engine losses
    return_s: float  # until a lost engine is back


def draw_config(seed: int) -> WorldConfig:
    """The world of `seed`: sizes small enough to be quick, mixed enough to be nasty."""
    rng = Random(f"config {seed}")
    batch_size = rng.choice((1, 1, 2, 3, 4, 8))
    filter_groups = rng.random() < 0.4
    limits = Limits(
        num_steps=rng.choice((1, 2, 5, 8, 12)),
        batch_size=batch_size,
        group_size=rng.choice((2, 3, 4, 8) if filter_groups else (1, 2, 3, 4, 8)),
        max_staleness=rng.choice((0, 0, 1, 1, 2, 3, 4, 8)),
        filter_groups=filter_groups,
        stall_report_s=rng.choice((0.0, 0.5, 5.0)),
    )
    num_engines = rng.choice((1, 1, 2, 2, 3, 5, 8))
    engines = tuple((rng.randint(1, 12), rng.choice((1, 1, 2, 3, 9))) for _ in range(num_engines))
    faulty = rng.random() < 0.6
    return WorldConfig(
        limits=limits,
        num_prompts=rng.choice((1, 3, batch_size, 7 * batch_size + 1, 1000)),
        engines=engines,
        speeds=tuple(10 ** rng.uniform(-3, -1.5) for _ in engines),
        max_length=rng.choice((4, 64, 512)),
        tail=rng.choice((0.0, 0.5, 1.1, 2.0)),
        reward_s=rng.choice((0.0, 0.01, 1.0)),
        step_s=rng.choice((0.0, 0.1, 1.0, 10.0)),
        load_s=rng.choice((0.0, 0.01, 3.0)),
        share_failed=rng.choice((0.0, 0.0, 0.1, 0.3)) if faulty else 0.0,
        share_refused=rng.choice((0.0, 0.0, 0.02)) if faulty else 0.0,
        share_flat=rng.choice((0.0, 0.3, 0.6)) if filter_groups else 0.0,
        loss_interval_s=rng.choice((None, 0.3, 2.0, 10.0)) if faulty else None,
        return_s=rng.choice((0.01, 1.0, 20.0)),
    )


def draw_length(rng: Random, config: WorldConfig) -> int:
    """Tokens of one answer: log-normal around a sixteenth of the limit, cut at the limit."""
    median = max(1.0, config.max_length / 16)
    return min(config.max_length, max(1, round(median * rng.lognormvariate(0.0, config.tail))))
