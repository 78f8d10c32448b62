"""The configuration of a simulated world, and its random draw from a seed.

Each part is drawn from a random stream of its own, seeded with a string, so a new part does not change the
others. Changing one of these strings changes every world, and thus every seed in `tests/sim/regressions.txt`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any

from dora.core.types import ABLATIONS, AdaptiveStalenessRule, CurriculumRule, EvaluationRule, Limits

LENGTH_FAMILIES = ("log_normal", "pareto", "bimodal", "zipf", "constant")
SLOWDOWN = 20.0  # of a load, migration or training step that is drawn as slow


@dataclass(frozen=True, slots=True)
class FaultConfig:
    """The faults of one world until it heals; by default there are none. Rates are probabilities per
    attempt.
    """

    heal_after_events: int = 1000  # after this time nothing fails or is slow, and the run must finish
    loss_detection_s: float = 0.0  # from the crash of an engine to its `EngineLost`
    engine_restart_rate: float = 1.0  # of lost and drained engines that are started again
    drain_interval_s: float | None = None  # mean time between requests to drain an engine
    orchestrator_crash_every: int | None = None  # events
    run_crash_every: int | None = None  # events; every process crashes at once
    trainer_loss_interval_s: float | None = None  # mean time between crashes of the trainer
    trainer_start_failure_rate: float = 0.0  # of replacements of a lost trainer, before they are ready
    load_failure_rate: float = 0.0
    slow_load_rate: float = 0.0
    migration_failure_rate: float = 0.0
    slow_migration_rate: float = 0.0
    step_failure_rate: float = 0.0
    slow_step_rate: float = 0.0


@dataclass(frozen=True, slots=True)
class WorldConfig:
    """One world. Times in seconds, lengths in tokens."""

    limits: Limits
    num_prompts: int  # rows of the dataset
    engines: tuple[tuple[int, int], ...]  # (rows, version slots) of each
    seconds_per_token: tuple[float, ...]  # of a row, for each engine
    max_length: int
    tail: float  # how heavy the tail of the lengths is, 0 to 2
    reward_s: float
    step_s: float
    load_s: float
    scoring_failure_rate: float  # of groups
    request_failure_rate: float  # of requests, by the engine
    equal_reward_rate: float  # of groups, whose rewards are all equal
    engine_loss_interval_s: float | None  # mean time between engine losses
    engine_restart_s: float  # until a lost engine is back, with a new id
    length_family: str = "log_normal"
    sibling_spread: float = 1.0  # fraction of the spread of lengths that siblings do not have in common
    num_colocated: int = 0  # the last so many engines share the trainer's device
    join_delays_s: tuple[float, ...] = ()  # of each engine; empty: all join at once
    kv_tokens_per_row: int = 0  # KV capacity of an engine; 0: unlimited
    report_interval_s: float = 1.0  # between the progress reports of an engine
    kv_copy_s: float = 0.01  # mean time to copy the KV of a migrating request
    kv_stop_s: float = 0.002  # pause of the request at the end of the copy
    pause_s: float = 0.01  # until an engine has paused
    faults: FaultConfig = field(default_factory=FaultConfig)

    @property
    def deadlock_timeout_s(self) -> float:
        """Longer than any activity takes in a healed world: a run without progress for this long is
        deadlocked.
        """
        answer_s = self.max_length * max(self.seconds_per_token)
        migration_s = self.kv_copy_s + self.kv_stop_s
        delays_s = 30 * (self.reward_s + self.load_s + self.step_s + migration_s + self.pause_s)
        restarts_s = 10 * self.engine_restart_s
        return 10 + 3 * answer_s + delays_s + restarts_s + 10 * self.limits.rebalance_interval_s


def draw_world_config(seed: int) -> WorldConfig:
    """Draw the world of `seed`: small, so that it runs fast, with a random combination of features and
    faults.

    Delays are multiples of the usual time of a response, so that any two activities can overlap.
    """
    rng = Random(f"config {seed}")
    num_engines = _draw_num_engines(rng)
    max_length = rng.choice((4, 64, 64, 512))
    token_s = 10 ** rng.uniform(-3, -1.5)
    unit_s = token_s * max_length / 16
    limits = _draw_all_limits(seed, rng, num_engines, unit_s)
    max_rows = 12 if num_engines < 16 else 3
    staleness = limits.max_staleness
    slots = (2, 2, 3) if limits.breaks_c1 else (1, 1, 1, 2, 2, 3, staleness + 1, staleness + 4)
    spread = rng.choice((0.0, 0.3, 1.0))
    return WorldConfig(
        limits=limits,
        num_prompts=rng.choice((1, 3, limits.batch_size, 7 * limits.batch_size + 1, 1000)),
        engines=tuple((rng.randint(1, max_rows), rng.choice(slots)) for _ in range(num_engines)),
        seconds_per_token=tuple(token_s * 10 ** rng.uniform(-spread, spread) for _ in range(num_engines)),
        max_length=max_length,
        tail=rng.choice((0.0, 0.5, 1.1, 2.0)),
        reward_s=unit_s * rng.choice((0.0, 0.1, 3.0)),
        step_s=unit_s * rng.choice((0.0, 0.1, 1.0, 5.0)),
        load_s=unit_s * rng.choice((0.0, 0.1, 0.5, 5.0)),
        equal_reward_rate=rng.choice((0.0, 0.3, 0.6)) if limits.filter_groups else 0.0,
        length_family=rng.choice(LENGTH_FAMILIES),
        sibling_spread=rng.choice((0.2, 1.0)),
        num_colocated=rng.choice((0, 0, 0, 0, 0, 0, 1, num_engines)),
        join_delays_s=tuple(
            unit_s * rng.choice((0.0, 0.0, 0.5, 10.0)) * rng.random() for _ in range(num_engines)
        ),
        kv_tokens_per_row=rng.choice((0, max_length // 8 + 1, max_length // 16 + 1)),
        report_interval_s=unit_s * rng.choice((1.0, 4.0, 20.0)),
        kv_copy_s=unit_s * rng.choice((0.0, 0.01, 0.1, 1.0)),
        kv_stop_s=unit_s * rng.choice((0.0, 0.01, 0.3)),
        pause_s=unit_s * rng.choice((0.0, 0.01, 0.3)),
        **_draw_faults(rng, unit_s),
    )


def _draw_num_engines(rng: Random) -> int:
    if rng.random() < 0.03:
        return rng.randint(7, 64)
    return rng.choice((1, 1, 2, 2, 2, 3, 3, 4, 4, 5, 6, 8, 12))


def _draw_all_limits(seed: int, rng: Random, num_engines: int, unit_s: float) -> Limits:
    limits = _draw_limits(rng, num_engines, unit_s)
    limits = _draw_adaptive_staleness(Random(f"aging {seed}"), limits)
    limits = _draw_evaluation(Random(f"evaluation {seed}"), limits)
    limits = _draw_curriculum(Random(f"curriculum {seed}"), limits)
    limits = _draw_loading(Random(f"loading {seed}"), limits)
    limits = _draw_inflight_updates(Random(f"renewal {seed}"), limits)
    limits = replace(limits, num_queued=Random(f"queued {seed}").choice((0, 0, 1, 2)), max_retries=seed % 3)
    return _draw_ablations(seed, limits)


def _draw_limits(rng: Random, num_engines: int, unit_s: float) -> Limits:
    batch_size = rng.choice((1, 1, 2, 2, 3, 4, 8))
    max_staleness = rng.choice((0, 0, 1, 1, 2, 2, 3, 4, 5, 6, 7, 8))
    filter_groups = rng.random() < 0.4
    group_size = rng.choice((2, 3, 4, 8) if filter_groups else (1, 1, 2, 3, 4, 8))
    events_per_step = batch_size * (group_size + 1) + num_engines + 3
    num_events = rng.choice((74, 148, 170, 190))
    return Limits(
        num_steps=max(1, min(40, num_events // events_per_step)),
        batch_size=batch_size,
        group_size=group_size,
        max_staleness=max_staleness,
        filter_groups=filter_groups,
        stall_report_s=unit_s * rng.choice((0.0, 0.5, 5.0)),
        batches_per_version=rng.randint(1, max_staleness + 1) if rng.random() < 0.2 else None,
        slack=rng.randint(0, max_staleness * batch_size) if rng.random() < 0.4 else 0,
        weight_sync_interval=rng.randint(1, max_staleness + 1) if rng.random() < 0.3 else 1,
        is_static=rng.random() < 0.08,
        balance_running=rng.random() < 0.3,
        prioritize_stragglers=rng.random() < 0.8,
        rebalance_interval_s=unit_s * rng.choice((0.1, 1.0, 10.0)),
        kv_watermark=rng.choice((0.3, 0.9, 1.0)),
        max_migrations=rng.choice((1, 3, 10_000)),
    )


def _draw_adaptive_staleness(rng: Random, limits: Limits) -> Limits:
    """Four in ten worlds with S > 0 lower the bound while the policies of samples and trainer differ."""
    if limits.max_staleness == 0 or rng.random() < 0.6:
        return limits
    rule = AdaptiveStalenessRule(rng.choice((0.5, 0.9)), rng.choice((0.001, 0.1)), rng.choice((1, 1, 2, 3)))
    return replace(limits, adaptive_staleness=rule)


def _draw_evaluation(rng: Random, limits: Limits) -> Limits:
    """Four in ten worlds evaluate held-out prompts; most of them also during training."""
    if rng.random() < 0.6:
        return limits
    rule = EvaluationRule(rng.choice((0, 1, 1, 2, 3)), rng.choice((1, 2, 5, 12)), rng.choice((1, 2, 4)))
    return replace(limits, evaluation=rule)


def _draw_curriculum(rng: Random, limits: Limits) -> Limits:
    """Two in ten worlds skip prompts whose groups were easy or hard, in some of them all prompts."""
    if rng.random() < 0.8:
        return limits
    easy, hard = rng.choice(((1.0, None), (0.5, None), (None, 0.0), (None, 0.5), (1.0, 0.0)))
    return replace(limits, curriculum=CurriculumRule(easy, hard, rng.choice((1, 1, 2, 5))))


def _draw_loading(rng: Random, limits: Limits) -> Limits:
    """In some worlds engines load one after another, or skip versions."""
    skip_below_kl = rng.choice((None, None, None, 0.01, 0.05)) if limits.max_staleness else None
    return replace(limits, defers_loads=rng.random() < 0.3, skip_below_kl=skip_below_kl)


def _draw_inflight_updates(rng: Random, limits: Limits) -> Limits:
    """In some worlds running requests continue with newer weights."""
    if limits.batches_per_version is not None or rng.random() < 0.85:
        return limits
    return replace(limits, breaks_c1=True, is_static=True)


def _draw_ablations(seed: int, limits: Limits) -> Limits:
    """Two in ten worlds leave out parts of the rules. Each part has a random stream of its own."""
    rng = Random(f"without {seed}")
    if rng.random() > 0.2:
        return limits
    rate = rng.choice((0.15, 0.4, 1.0))
    parts = [part for part in ABLATIONS if Random(f"without {part} {seed}").random() < rate]
    return replace(limits, ablations=tuple(parts))


def _draw_faults(rng: Random, unit_s: float) -> dict[str, Any]:
    """The fields of a WorldConfig that concern faults; three worlds in ten only have crashes of the
    orchestrator.

    `unit_s` is the usual time of a response.
    """
    orchestrator_crash_every = rng.choice((None, None, None, 70, 150, 200))
    run_crash_every = Random(f"deaths {orchestrator_crash_every} {unit_s}").choice((None, None, 41, 90))
    trainer_loss_interval_s = Random(f"trainers {unit_s}").choice((None, None, 2 * unit_s, 20 * unit_s))
    if rng.random() < 0.3:
        return {
            "scoring_failure_rate": 0.0,
            "request_failure_rate": 0.0,
            "engine_loss_interval_s": None,
            "engine_restart_s": 1.0,
            "faults": FaultConfig(
                orchestrator_crash_every=orchestrator_crash_every, run_crash_every=run_crash_every
            ),
        }
    return {
        "scoring_failure_rate": rng.choice((0.0, 0.0, 0.1, 0.3)),
        "request_failure_rate": rng.choice((0.0, 0.02, 0.05, 0.1)),
        "engine_loss_interval_s": rng.choice((None, unit_s, 5 * unit_s, 30 * unit_s)),
        "engine_restart_s": unit_s * rng.choice((0.1, 1.0, 10.0)),
        "faults": FaultConfig(
            heal_after_events=rng.choice((60, 150, 300)),
            loss_detection_s=unit_s * rng.choice((0.0, 0.1, 1.0)),
            engine_restart_rate=rng.choice((1.0, 1.0, 0.5)),
            drain_interval_s=rng.choice((None, None, 2 * unit_s, 10 * unit_s)),
            orchestrator_crash_every=orchestrator_crash_every,
            run_crash_every=run_crash_every,
            trainer_loss_interval_s=trainer_loss_interval_s,
            trainer_start_failure_rate=Random(f"replacements {unit_s}").choice((0.0, 0.2, 0.5)),
            load_failure_rate=rng.choice((0.0, 0.1, 0.5)),
            slow_load_rate=rng.choice((0.0, 0.2)),
            migration_failure_rate=rng.choice((0.0, 0.2, 0.6)),
            slow_migration_rate=rng.choice((0.0, 0.3)),
            step_failure_rate=rng.choice((0.0, 0.1, 0.4)),
            slow_step_rate=rng.choice((0.0, 0.1)),
        ),
    }


class FaultDraw:
    """Draws failures and delays while a world runs; a healed world has no failures and usual delays."""

    def __init__(self, rng: Random) -> None:
        self.is_healed = False
        self._rng = rng

    def fails(self, rate: float) -> bool:
        """Whether an attempt with this failure rate fails."""
        return not self.is_healed and rate > 0.0 and self._rng.random() < rate

    def delay_s(self, mean_s: float, slow_rate: float = 0.0) -> float:
        """A delay around `mean_s`, multiplied by `SLOWDOWN` at the rate `slow_rate`."""
        slowdown = SLOWDOWN if self.fails(slow_rate) else 1.0
        return mean_s * self._rng.uniform(0.5, 1.5) * slowdown


class RequestLengths:
    """Tokens of each response. A request that is generated again has the same length."""

    def __init__(self, config: WorldConfig, rng: Random) -> None:
        self._config, self._rng = config, rng
        self._median = max(1.0, config.max_length / 16)
        self._lengths: dict[tuple[int, int, int], int] = {}
        self._group_factors: dict[tuple[int, int], float] = {}

    def of(self, request: tuple[int, int, int]) -> int:
        """Between 1 and `max_length`; siblings of a group have part of their spread in common."""
        length = self._lengths.get(request)
        if length is None:
            spread = self._config.sibling_spread
            tokens = self._median * self._group_factor(request[:2]) * self._draw() ** spread
            length = self._lengths[request] = max(1, min(self._config.max_length, round(tokens)))
        return length

    def _group_factor(self, group: tuple[int, int]) -> float:
        factor = self._group_factors.get(group)
        if factor is None:
            spread = self._config.sibling_spread
            factor = self._group_factors[group] = 1.0 if spread == 1.0 else self._draw() ** (1 - spread)
        return factor

    def _draw(self) -> float:
        """A length in medians."""
        rng, tail, family = self._rng, self._config.tail, self._config.length_family
        if family == "log_normal":
            return rng.lognormvariate(0.0, tail)
        if family == "pareto":
            return float(rng.paretovariate(3.0 - 1.2 * tail))
        if family == "bimodal":
            return 16.0 if rng.random() < 0.1 * tail else 0.5
        if family == "zipf":
            return math.pow(1.0 - 0.999 * rng.random(), -tail / 2)
        return 1.0


# Drift of a batch relative to the limits of `AdaptiveStalenessRule`, as (min, max) ratio.
_DRIFT_PHASES = {"weak": (0.0, 0.5), "moderate": (0.5, 1.0), "strong": (1.0, 2.0)}


class PolicyDrift:
    """ESS and KL that the simulated trainer reports: phases of weak and strong drift, and missing values."""

    def __init__(self, rule: AdaptiveStalenessRule | None, rng: Random) -> None:
        self._rule, self._rng = rule or AdaptiveStalenessRule(0.5, 0.1, 1), rng
        self._phase = "weak"

    def draw(self) -> tuple[float | None, float | None]:
        """ESS and KL of the next training step; None where the trainer measured nothing."""
        rng, rule = self._rng, self._rule
        if rng.random() < 0.3:
            self._phase = rng.choice(("weak", "weak", "moderate", "strong"))
        if rng.random() < 0.05:
            return None, None
        drift = rng.uniform(*_DRIFT_PHASES[self._phase])
        weaker = rng.uniform(0.0, drift)
        of_ess, of_kl = rng.choice(((drift, weaker), (weaker, drift)))
        return max(0.0, 1 - of_ess * (1 - rule.min_ess)), of_kl * rule.max_kl


def draw_kls(rng: Random, step: int, max_staleness: int) -> tuple[tuple[int, float], ...]:
    """(version, KL) of some versions' samples in a training step; KL grows with their age."""
    per_version = rng.choice((0.0, 0.004, 0.03))
    ages = [age for age in range(min(step, max_staleness) + 1) if rng.random() < 0.7]
    return tuple((step - age, per_version * age * rng.uniform(0.5, 1.5)) for age in ages)
