"""Search for the fastest layout of a workload: policy, staleness bound, devices, parallel sizes and rows.

A formula ranks all possible layouts; it uses rates and the longest response, and ignores queues. The best
layout of each policy and bound is simulated. Then hill climbing starts at the fastest layout: it simulates
the neighbours, which differ in one choice by one step, until no neighbour is faster. A layout with which
another policy is the fastest is simulated with `dora`, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from dora.errors import InputError
from dora.planner.cluster import Deployment, Layout, Workload
from dora.planner.costs import DoesNotFitError
from dora.planner.hardware import Device
from dora.planner.policies import UpdatePolicy, get_policy
from dora.planner.simulator import Metrics

PARALLEL_SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # of TP and EP
TRAINER_FRACTIONS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # of the devices
ROW_FRACTIONS = (1.0, 0.5, 0.25)  # of the rows that an engine's KV cache takes
NUM_STEADY_STEPS = 10  # simulated steps in which the pipeline is full
NUM_QUANTILES = 12  # sampled lengths, to estimate a burst
Choices = tuple[float, ...]  # (policy, S, TP, EP, rows, trainer's fraction); indices but for S and the last


@dataclass(frozen=True)
class SearchProblem:
    """A planning problem. `ep_size` None: the search chooses it. Raises InputError if no policy can keep
    S.
    """

    workload: Workload
    device: Device
    num_devices: int
    max_staleness: int
    policies: tuple[str, ...]
    ep_size: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise InputError(f"S = {self.max_staleness} must be at least 0")
        if self.num_devices < 1:
            raise InputError(f"devices = {self.num_devices} must be at least 1")
        unbounded = [name for name in self.policies if not get_policy(name).is_bounded]
        if unbounded:
            raise InputError(
                f"policies {', '.join(unbounded)} have no staleness bound and cannot promise "
                f"S = {self.max_staleness}; leave them out"
            )
        least = min((get_policy(name).max_staleness or 0 for name in self.policies), default=0)
        if least > self.max_staleness or not self.policies:
            raise InputError(
                f"policies {', '.join(self.policies) or 'none'}: none is possible with S = "
                f"{self.max_staleness}; their smallest bound is {least}"
            )


@dataclass(frozen=True)
class SimulatedPlan:
    """A layout that was simulated."""

    deployment: Deployment
    metrics: Metrics

    @property
    def tokens_per_s(self) -> float:
        return self.metrics["tokens_per_s"]


def search(problem: SearchProblem, max_simulated: int) -> Iterator[SimulatedPlan]:
    """Yield up to `max_simulated` plans as they are simulated, then `dora` in the layout of the fastest."""
    found, formula = candidates(problem), StepTimeFormula(problem.workload)
    ranked = sorted(found, key=lambda choices: formula.step_s(found[choices]))
    best_of_each = {choices[:2]: choices for choices in reversed(ranked)}
    queue = sorted(best_of_each.values(), key=ranked.index)
    simulated: dict[Choices, SimulatedPlan] = {}
    layouts: dict[Layout, SimulatedPlan] = {}
    while queue and len(simulated) < max_simulated:
        choices = queue.pop(0)
        plan = simulated[choices] = SimulatedPlan(found[choices], found[choices].metrics())
        layouts[plan.deployment.layout] = plan
        yield plan
        if not queue:
            best = max(simulated, key=lambda one: simulated[one].tokens_per_s)
            near = neighbours(best, found) - simulated.keys()
            queue = [one for one in ranked if one in near]
        if not queue or len(simulated) == max_simulated:
            for same in _with_dora(problem, max(layouts.values(), key=lambda one: one.tokens_per_s)):
                if same.layout not in layouts:
                    layouts[same.layout] = SimulatedPlan(same, same.metrics())
                    yield layouts[same.layout]


def _with_dora(problem: SearchProblem, best: SimulatedPlan) -> Iterator[Deployment]:
    """If `best` has another policy: `dora` in its layout, at its bound and at the largest bound.

    Nothing if the problem has no `dora`, or if the engines of `best` share the trainer's devices: `dora`
    generates during training, which needs devices of its own.
    """
    layout = best.deployment.layout
    policy = get_policy(layout.policy)
    if policy.name == "dora" or policy.is_colocated or "dora" not in problem.policies:
        return
    num_rows = best.deployment.engines[0].num_rows
    for bound in sorted({layout.max_staleness, problem.max_staleness} - {0}):
        yield best.deployment.with_layout(policy="dora", max_staleness=bound, num_rows=num_rows)


def candidates(problem: SearchProblem) -> dict[Choices, Deployment]:
    """All layouts that fit. Raises InputError, about the largest engines, if there are none."""
    rejected: dict[int, InputError] = {}  # by devices of an engine
    found: dict[Choices, Deployment] = {}
    for choices, layout, row_fraction in _layouts(problem):
        num_steps = 2 * problem.max_staleness + 3 + NUM_STEADY_STEPS
        deployment = Deployment(problem.workload, layout, num_steps)
        try:
            num_rows = int(deployment.engines[0].num_rows * row_fraction)
            _ = deployment.trainer
        except InputError as error:
            rejected.setdefault(layout.tp_size * layout.ep_size, error)
            continue
        if num_rows:
            found[choices] = deployment if row_fraction == 1 else deployment.with_layout(num_rows=num_rows)
    if not found:
        if rejected:
            cause = rejected[max(rejected)]
            if not isinstance(cause, DoesNotFitError):
                raise cause
            shorter = ", or lower --limit" if "--limit" in str(cause) else ""
            raise InputError(
                f"no layout of {problem.num_devices} x {problem.device.name} fits: {cause.reason}; raise "
                f"--devices, or choose a --device with more memory{shorter}"
            ) from cause
        raise InputError(f"{problem.num_devices} devices are too few for any layout; raise --devices")
    return found


def _layouts(problem: SearchProblem) -> Iterator[tuple[Choices, Layout, float]]:
    """Choices, their layout, and the fraction of rows."""
    device, num = problem.device, problem.num_devices
    max_ep_size, num_heads = problem.workload.model.num_experts or 1, problem.workload.model.num_heads
    ep_sizes = [problem.ep_size] if problem.ep_size else [n for n in PARALLEL_SIZES if n <= max_ep_size]
    for index, name in enumerate(problem.policies):
        policy = get_policy(name)
        for tp_size, ep_size, row_fraction in product(PARALLEL_SIZES, ep_sizes, ROW_FRACTIONS):
            engine_size = tp_size * ep_size
            if tp_size > device.node_size or engine_size > num or num_heads % tp_size:
                continue
            splits = [num] if policy.is_colocated else _trainer_sizes(num, engine_size)
            for num_train, bound in product(splits, _bounds(policy, problem.max_staleness)):
                rollout = ((device, num - num_train),) if num_train < num else ()
                layout = Layout(name, bound, (device, num_train), rollout, tp_size, ep_size)
                sizes = (
                    PARALLEL_SIZES.index(tp_size),
                    ep_sizes.index(ep_size),
                    ROW_FRACTIONS.index(row_fraction),
                )
                yield (index, bound, *sizes, num_train / num), layout, row_fraction


def _trainer_sizes(num: int, engine_size: int) -> list[int]:
    """Devices of the trainer that leave whole engines for rollout."""
    sizes = {num - max(1, round(num * (1 - part) / engine_size)) * engine_size for part in TRAINER_FRACTIONS}
    return sorted(size for size in sizes if 0 < size < num)


def _bounds(policy: UpdatePolicy, max_staleness: int) -> Sequence[int]:
    if policy.max_staleness is not None:
        return [policy.max_staleness] if policy.max_staleness <= max_staleness else []
    return range(min(1, max_staleness), max_staleness + 1)


def neighbours(choices: Choices, among: Iterable[Choices]) -> set[Choices]:
    """Choices that differ in one entry by one step; if that is not the split, with the nearest split."""
    splits_of: dict[Choices, list[float]] = {}
    for other in among:
        splits_of.setdefault(other[:-1], []).append(other[-1])
    found: set[Choices] = set()
    split = choices[-1]
    for others, splits in splits_of.items():
        distance = sum(abs(a - b) for a, b in zip(others, choices, strict=False))
        if others[0] != choices[0] or distance > 1:
            continue
        if distance:
            found.add((*others, min(splits, key=lambda other: abs(other - split))))
        else:
            smaller, larger = [s for s in splits if s < split], [s for s in splits if s > split]
            found |= {(*others, other) for other in (*sorted(smaller)[-1:], *sorted(larger)[:1])}
    return found


class StepTimeFormula:
    """Estimates the seconds of a step by rates: of training, rollout, and the longest response."""

    def __init__(self, workload: Workload) -> None:
        lengths = workload.lengths.sample
        self.workload, self.mean = workload, float(lengths.mean())
        self.context = workload.lengths.mean_context
        self.longest = float(np.quantile(lengths, 1 - 0.5 / workload.num_answers))
        quantiles = np.quantile(lengths, np.arange(NUM_QUANTILES) / NUM_QUANTILES)
        self.quantiles: list[float] = [*quantiles.tolist(), self.longest]

    def step_s(self, deployment: Deployment) -> float:
        workload, layout = self.workload, deployment.layout
        policy, bound = get_policy(layout.policy), layout.max_staleness
        sequence_s = deployment.trainer.sequence_s(workload.lengths.mean_prompt + self.mean)
        train_s = workload.num_answers * sequence_s + deployment.trainer.step_overhead_s
        if bound == 0:
            return train_s + self._burst_s(deployment)
        if policy.is_single_version:
            return max(train_s, self._burst_s(deployment))
        rollout_s = self._pipelined_s(deployment, train_s)
        return train_s + rollout_s if policy.is_colocated else rollout_s

    def _pipelined_s(self, deployment: Deployment, train_s: float) -> float:
        """A step of rollout that overlaps with others.

        Its time depends on the rows that decode, and their number on the time that they have to fill: a fixed
        point.
        """
        num_engines, bound = len(deployment.engines), deployment.layout.max_staleness
        full = rows = deployment.num_rows / num_engines
        num_tokens, step_s = self.workload.num_answers * self.mean / num_engines, 0.0
        for _ in range(12):
            decode_s = self._decode_s(deployment, rows)
            step_s = max(train_s, num_tokens * decode_s / full, self.longest * decode_s / bound)
            rows = (rows + min(full, num_tokens * decode_s / step_s)) / 2
        return step_s

    def _burst_s(self, deployment: Deployment) -> float:
        """A batch that starts together: rounds of full rows, and a last one in which rows become free."""
        num_engines = len(deployment.engines)
        num_answers, full = self.workload.num_answers / num_engines, deployment.num_rows / num_engines
        rows = min(full, num_answers)
        last_round_s = sum(
            (end - start) * self._decode_s(deployment, rows * (1 - (k + 1) / NUM_QUANTILES) + 1)
            for k, (start, end) in enumerate(pairwise(self.quantiles))
        )
        return (num_answers / rows - 1) * self.mean * self._decode_s(deployment, full) + last_round_s

    def _decode_s(self, deployment: Deployment, num_rows: float) -> float:
        """One decode step of the first engine, with so many rows of mean context."""
        cost, rows = deployment.engines[0].cost, max(1, round(num_rows))
        rank_rows = -(-rows // cost.ep_size)
        kv = rank_rows * cost.kv_tokens(self.context)
        return cost.terms(rows, rank_rows).step_time(kv).seconds(1.0)


def with_heavier_tail(plan: SimulatedPlan) -> Metrics:
    """Metrics of a plan with the 99th percentile of responses twice as long, and the same median."""
    workload = plan.deployment.workload
    heavier = replace(workload, lengths=workload.lengths.with_heavier_tail())
    return replace(plan.deployment, workload=heavier).metrics()
