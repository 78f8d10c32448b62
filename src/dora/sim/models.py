"""What a simulated world is made of, and how a whole one is drawn from a seed.

Sizes, policies, speeds, lengths and delays; `faults` draws what goes wrong.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random

from dora.core.records import ABLATIONS, AgingRule, EvaluationRule, Limits
from dora.sim.faults import Faults, draw_faults

FAMILIES = ("log_normal", "pareto", "bimodal", "zipf", "constant")


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """One world. Times in seconds, lengths in tokens."""

    limits: Limits
    num_prompts: int  # rows of the dataset
    engines: tuple[tuple[int, int], ...]  # (rows, version slots) of each
    speeds: tuple[float, ...]  # seconds per token of each engine
    max_length: int
    tail: float  # how heavy the tail of the lengths is, 0 to 2
    reward_s: float
    step_s: float
    load_s: float
    share_failed: float  # of groups, in the rewarder
    share_refused: float  # of requests, by the engine
    share_flat: float  # of groups, with equal rewards
    loss_interval_s: float | None  # mean time between engine losses
    return_s: float  # until a lost engine is back, under a new id
    family: str = "log_normal"  # of the lengths
    share_sibling: float = 1.0  # of the spread that siblings do not have in common
    num_colocated: int = 0  # the last so many engines share the trainer's device
    late_s: tuple[float, ...] = ()  # when each engine joins; not given: at once
    kv_row_tokens: int = 0  # KV of an engine, in tokens per row; 0: ample
    report_s: float = 1.0  # between the reports of an engine
    move_s: float = 0.01  # mean time to copy a request's KV
    stop_s: float = 0.002  # of it, the request stands still at the end
    pause_s: float = 0.01  # until an engine has paused
    faults: Faults = field(default_factory=Faults)

    @property
    def patience_s(self) -> float:
        """Longer than anything takes once the world is healed: nothing done by then is a deadlock."""
        answer_s = self.max_length * max(self.speeds)
        delays_s = 30 * (self.reward_s + self.load_s + self.step_s + self.move_s + self.stop_s + self.pause_s)
        return 10 + 3 * answer_s + delays_s + 10 * self.return_s + 10 * self.limits.rebalance_interval_s


def draw_config(seed: int) -> WorldConfig:
    """The world of `seed`: sizes small enough to be quick, mixed enough to be nasty.

    Times are drawn in units of a usual answer's, so that all kinds of things overlap.
    """
    rng = Random(f"config {seed}")
    num_engines = _draw_num_engines(rng)
    max_length = rng.choice((4, 64, 64, 512))
    usual_s = 10 ** rng.uniform(-3, -1.5)  # per token
    unit_s = usual_s * max_length / 16
    limits = _draw_aging(Random(f"aging {seed}"), _draw_limits(rng, num_engines, unit_s))
    limits = _draw_evaluation(Random(f"evaluation {seed}"), limits)
    limits = _draw_loading(Random(f"loading {seed}"), limits)
    limits = _draw_renewal(Random(f"renewal {seed}"), limits)
    limits = _draw_without(seed, limits)
    max_rows = 12 if num_engines < 16 else 3
    slots = (
        (2, 2, 3)
        if limits.breaks_c1
        else (1, 1, 1, 2, 2, 3, limits.max_staleness + 1, limits.max_staleness + 4)
    )
    spread = rng.choice((0.0, 0.3, 1.0))
    return WorldConfig(
        limits=limits,
        num_prompts=rng.choice((1, 3, limits.batch_size, 7 * limits.batch_size + 1, 1000)),
        engines=tuple((rng.randint(1, max_rows), rng.choice(slots)) for _ in range(num_engines)),
        speeds=tuple(usual_s * 10 ** rng.uniform(-spread, spread) for _ in range(num_engines)),
        max_length=max_length,
        tail=rng.choice((0.0, 0.5, 1.1, 2.0)),
        reward_s=unit_s * rng.choice((0.0, 0.1, 3.0)),
        step_s=unit_s * rng.choice((0.0, 0.1, 1.0, 5.0)),
        load_s=unit_s * rng.choice((0.0, 0.1, 0.5, 5.0)),
        share_flat=rng.choice((0.0, 0.3, 0.6)) if limits.filter_groups else 0.0,
        family=rng.choice(FAMILIES),
        share_sibling=rng.choice((0.2, 1.0)),
        num_colocated=rng.choice((0, 0, 0, 0, 0, 0, 1, num_engines)),
        late_s=tuple(unit_s * rng.choice((0.0, 0.0, 0.5, 10.0)) * rng.random() for _ in range(num_engines)),
        kv_row_tokens=rng.choice((0, max_length // 8 + 1, max_length // 16 + 1)),
        report_s=unit_s * rng.choice((1.0, 4.0, 20.0)),
        move_s=unit_s * rng.choice((0.0, 0.01, 0.1, 1.0)),
        stop_s=unit_s * rng.choice((0.0, 0.01, 0.3)),
        pause_s=unit_s * rng.choice((0.0, 0.01, 0.3)),
        **draw_faults(rng, unit_s),
    )


def _draw_num_engines(rng: Random) -> int:
    if rng.random() < 0.03:
        return rng.randint(7, 64)
    return rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12))


def _draw_limits(rng: Random, num_engines: int, unit_s: float) -> Limits:
    batch_size = rng.choice((1, 1, 2, 2, 3, 4, 8))
    max_staleness = rng.choice((0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8))
    filter_groups = rng.random() < 0.4
    group_size = rng.choice((2, 3, 4, 8) if filter_groups else (1, 1, 2, 3, 4, 8))
    facts_per_step = batch_size * (group_size + 1) + num_engines + 3
    num_facts = rng.choice((74, 148, 170, 190))
    return Limits(
        num_steps=max(1, min(40, num_facts // facts_per_step)),
        batch_size=batch_size,
        group_size=group_size,
        max_staleness=max_staleness,
        filter_groups=filter_groups,
        stall_report_s=unit_s * rng.choice((0.0, 0.5, 5.0)),
        batches_per_version=rng.randint(1, max_staleness + 1) if rng.random() < 0.2 else None,
        slack=rng.randint(0, max_staleness * batch_size) if rng.random() < 0.4 else 0,
        load_interval=rng.randint(1, max_staleness + 1) if rng.random() < 0.3 else 1,
        is_static=rng.random() < 0.08,
        level_running=rng.random() < 0.3,
        rush=rng.random() < 0.8,
        rebalance_interval_s=unit_s * rng.choice((0.1, 1.0, 10.0)),
        kv_watermark=rng.choice((0.3, 0.9, 1.0)),
        max_moves=rng.choice((1, 3, 10_000)),
    )


def _draw_aging(rng: Random, limits: Limits) -> Limits:
    """In some worlds the bound is lowered while samples say little."""
    if limits.max_staleness == 0 or rng.random() < 0.6:
        return limits
    rule = AgingRule(rng.choice((0.5, 0.9)), rng.choice((0.001, 0.1)), rng.choice((1, 1, 2, 3)))
    return replace(limits, aging=rule)


def _draw_evaluation(rng: Random, limits: Limits) -> Limits:
    """In some worlds held-out prompts are answered while they go on."""
    if rng.random() < 0.6:
        return limits
    rule = EvaluationRule(rng.choice((1, 1, 2, 3)), rng.choice((1, 2, 5, 12)), rng.choice((1, 2, 4)))
    return replace(limits, evaluation=rule)


def _draw_loading(rng: Random, limits: Limits) -> Limits:
    """In some worlds engines load one after another, or leave versions out."""
    skip_below_kl = rng.choice((None, None, None, 0.01, 0.05)) if limits.max_staleness else None
    return replace(limits, is_deferred=rng.random() < 0.3, skip_below_kl=skip_below_kl)


def _draw_renewal(rng: Random, limits: Limits) -> Limits:
    """In some worlds answers go on with newer versions."""
    if limits.batches_per_version is not None or rng.random() < 0.85:
        return limits
    return replace(limits, breaks_c1=True, is_static=True)


def _draw_without(seed: int, limits: Limits) -> Limits:
    """In some worlds parts of the rules are left out; a part that is new changes nothing of the others."""
    rng = Random(f"without {seed}")
    if rng.random() > 0.2:
        return limits
    share = rng.choice((0.15, 0.4, 1.0))
    parts = [part for part in ABLATIONS if Random(f"without {part} {seed}").random() < share]
    return replace(limits, without=tuple(parts))


class Lengths:
    """Tokens of the answers: drawn once per request, so one that begins again is the same."""

    def __init__(self, config: WorldConfig, rng: Random) -> None:
        self._config, self._rng = config, rng
        self._median = max(1.0, config.max_length / 16)
        self._of: dict[tuple[int, int, int], int] = {}
        self._factor: dict[tuple[int, int], float] = {}

    def of(self, request: tuple[int, int, int]) -> int:
        """Between 1 and the limit; the siblings of a group have part of their spread in common."""
        length = self._of.get(request)
        if length is None:
            share = self._config.share_sibling
            group = request[:2]
            factor = self._factor.get(group)
            if factor is None:
                factor = self._factor[group] = 1.0 if share == 1.0 else self._draw() ** (1 - share)
            tokens = self._median * factor * self._draw() ** share
            length = self._of[request] = max(1, min(self._config.max_length, round(tokens)))
        return length

    def _draw(self) -> float:
        """How many times the median."""
        rng, tail, family = self._rng, self._config.tail, self._config.family
        if family == "log_normal":
            return rng.lognormvariate(0.0, tail)
        if family == "pareto":
            return float(rng.paretovariate(3.0 - 1.2 * tail))
        if family == "bimodal":
            return 16.0 if rng.random() < 0.1 * tail else 0.5
        if family == "zipf":
            return math.pow(1.0 - 0.999 * rng.random(), -tail / 2)
        return 1.0
