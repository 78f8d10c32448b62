"""A workload and a layout of devices for it, and the forecast of both together.

Layouts that cannot work are rejected before anything is simulated: weights or rows without memory, devices
that do not divide into engines.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from dora.core.types import ABLATIONS, Limits
from dora.errors import InputError
from dora.planner.costs import DoesNotFitError, EngineCost, TrainerCost
from dora.planner.fluid import FluidEngine
from dora.planner.hardware import Device, Efficiency, ModelShape
from dora.planner.lengths import LengthDistribution
from dora.planner.policies import DORA_ABLATIONS, KV_ABLATION, get_policy
from dora.planner.simulator import Listener, Metrics, SimulationResult, Simulator, steady_steps

MAX_KV_FILL = 0.9  # fraction of the KV cache that rows of usual length may take
MAX_ROWS_PER_RANK = 1024


@dataclass(frozen=True)
class Workload:
    """A model and its training workload. A batch is `batch_size` groups of `group_size` responses."""

    model: ModelShape
    lengths: LengthDistribution
    batch_size: int
    group_size: int
    efficiency: Efficiency = field(default_factory=Efficiency)
    context: int = 1 << 20  # of the model, in tokens
    reward_s: float = 0.0
    expert_skew: float = 0.1  # relative excess load of the busiest rank's experts

    def __post_init__(self) -> None:
        if min(self.batch_size, self.group_size) < 1:
            raise InputError(f"batch {self.batch_size} x {self.group_size} must be at least 1 x 1")
        if not math.isfinite(self.reward_s + self.expert_skew):
            raise InputError(f"reward {self.reward_s} s and expert skew {self.expert_skew} must be finite")
        self.lengths.check_context(self.context)
        self.lengths.check_mean()

    @property
    def num_answers(self) -> int:
        """Answers of a batch."""
        return self.batch_size * self.group_size


@dataclass(frozen=True)
class Layout:
    """A policy and its devices, as (device, number). Colocated policies use the trainer's devices only."""

    policy: str
    max_staleness: int
    trainer: tuple[Device, int]
    rollout: tuple[tuple[Device, int], ...] = ()
    tp_size: int = 1
    ep_size: int = 1
    num_rows: int | None = None  # of an engine; None: as many as its KV cache takes
    slack: int = 0  # groups
    ablations: tuple[str, ...] = ()
    is_elastic: bool = False  # the trainer's devices decode while they have nothing to train
    streams_groups: bool = False  # the trainer works on groups as soon as they are committed
    switch_s: float = 0.0  # a device switches between training and decoding
    rebalance_interval_s: float = 10.0  # also between progress reports

    @property
    def num_devices(self) -> int:
        return self.trainer[1] + self.num_rollout

    @property
    def num_rollout(self) -> int:
        """Devices for rollout alone."""
        return sum(num for _, num in self.rollout)


class PlacedEngine(NamedTuple):
    """One engine of a layout."""

    cost: EngineCost
    num_rows: int
    is_colocated: bool  # on the trainer's devices


@dataclass(frozen=True)
class Deployment:
    """A workload on a layout."""

    workload: Workload
    layout: Layout
    num_steps: int

    @cached_property
    def trainer(self) -> TrainerCost:
        """Raises InputError if the model does not fit."""
        workload = self.workload
        device, num = self.layout.trainer
        return TrainerCost(workload.model, device, num, workload.efficiency)

    @cached_property
    def engines(self) -> list[PlacedEngine]:
        """All engines. Raises InputError if the layout cannot have them."""
        layout, policy = self.layout, get_policy(self.layout.policy)
        if policy.is_colocated and layout.rollout:
            raise InputError(
                f"policy {policy.name} shares all devices with the trainer, and {layout.num_rollout} are "
                "for rollout alone"
            )
        if not policy.is_colocated and not layout.rollout:
            raise InputError(f"policy {policy.name} needs devices for rollout alone, and there are none")
        engines: list[PlacedEngine] = []
        for device, num in layout.rollout:
            engines += self._engines_on(device, num, is_colocated=False)
        if policy.is_colocated or layout.is_elastic:
            engines += self._engines_on(*layout.trainer, is_colocated=True)
        return engines

    def _engines_on(self, device: Device, num: int, *, is_colocated: bool) -> list[PlacedEngine]:
        workload, layout = self.workload, self.layout
        cost = EngineCost(
            workload.model, device, workload.efficiency, layout.tp_size, layout.ep_size, workload.expert_skew
        )
        if num < cost.num_devices or num % cost.num_devices:
            raise InputError(
                f"{num} x {device.name} do not divide into engines of TP {layout.tp_size} x EP "
                f"{layout.ep_size} = {cost.num_devices} devices"
            )
        longest = workload.lengths.max_prompt + workload.lengths.limit
        if cost.kv_capacity < cost.kv_tokens(longest):
            raise DoesNotFitError(
                f"an engine of {cost.num_devices} x {device.name} holds the KV of {cost.kv_capacity:,} "
                f"tokens beside {workload.model.name}, and one response may need {longest:,}",
                "raise --tp, or lower --limit",
            )
        num_rows = layout.num_rows or self._choose_num_rows(cost)
        return [PlacedEngine(cost, num_rows, is_colocated)] * (num // cost.num_devices)

    def _choose_num_rows(self, cost: EngineCost) -> int:
        """As many rows as the KV cache takes, and no more than the engine's part of the open responses."""
        workload, layout, policy = self.workload, self.layout, get_policy(self.layout.policy)
        starts_together = policy.is_single_version or policy.is_colocated
        lengths = workload.lengths
        context = lengths.peak_context if starts_together else lengths.mean_context
        row_kv = cost.kv_tokens(context)
        fitting = min(int(MAX_KV_FILL * cost.kv_capacity / row_kv), MAX_ROWS_PER_RANK * layout.ep_size)
        num_batches = 1 if policy.is_single_version else layout.max_staleness + 1
        num_groups = max(workload.batch_size, num_batches * workload.batch_size - layout.slack)
        num_open = num_groups * workload.group_size
        num_devices = layout.num_devices if policy.is_colocated else layout.num_rollout
        needed = -(-num_open * cost.num_devices // max(1, num_devices))
        return max(1, fitting if policy.oversamples else min(fitting, needed))

    @property
    def num_rows(self) -> int:
        """Rows of all engines."""
        return sum(engine.num_rows for engine in self.engines)

    @property
    def limits(self) -> Limits:
        """The orchestrator's limits. Raises InputError if the policy does not support S or an ablation."""
        workload, layout, policy = self.workload, self.layout, get_policy(self.layout.policy)
        max_staleness, ablations = layout.max_staleness, layout.ablations
        if max_staleness < 0:
            raise InputError(f"S = {max_staleness} must be at least 0")
        fixed = policy.max_staleness
        if fixed is not None and max_staleness != fixed:
            raise InputError(f"S = {max_staleness}: policy {policy.name} has S = {fixed} by definition")
        unknown = [part for part in ablations if part not in DORA_ABLATIONS]
        if unknown or (ablations and policy.name != "dora"):
            raise InputError(
                f"without {', '.join(ablations)}: only policy dora has these parts; the parts are "
                f"{', '.join(DORA_ABLATIONS)}"
            )
        batches_per_version = None
        if policy.is_single_version:
            batches_per_version = max_staleness + 1 if fixed is None else 1
        return Limits(
            num_steps=self.num_steps,
            batch_size=workload.batch_size,
            group_size=workload.group_size,
            max_staleness=max_staleness,
            batches_per_version=batches_per_version,
            slack=layout.slack,
            defers_loads=policy.defers_loads,
            is_static=policy.breaks_c1,
            breaks_c1=policy.breaks_c1,
            prioritize_stragglers=not policy.breaks_c1,  # systems with inflight updates do not prioritise
            rebalance_interval_s=layout.rebalance_interval_s,
            ablations=tuple(part for part in ABLATIONS if part in ablations),
        )

    def simulator(self, listener: Listener | None = None) -> Simulator:
        """A simulator that is ready to run."""
        workload, layout, policy = self.workload, self.layout, get_policy(self.layout.policy)
        limits = self.limits
        scheduler = policy.scheduler(limits)
        options = replace(
            policy.options,
            min_stream_tokens=0 if layout.streams_groups else policy.options.min_stream_tokens,
            migrates_kv=KV_ABLATION not in layout.ablations,
            switch_s=layout.switch_s,
            reward_s=workload.reward_s,
            report_interval_s=layout.rebalance_interval_s,
        )
        engines = [FluidEngine(number, *engine) for number, engine in enumerate(self.engines)]
        return Simulator(scheduler, engines, self.trainer, workload.lengths, limits, options, listener)

    def check(self) -> None:
        """Raise InputError if the deployment cannot be simulated."""
        _ = (self.trainer, self.simulator())
        steady_steps(self.num_steps, self.layout.max_staleness)

    def simulate(self) -> SimulationResult:
        return self.simulator().run()

    def metrics(self) -> Metrics:
        """Means over the steps of a simulated run in which the pipeline is full."""
        result = self.simulate()
        return result.metrics(len(self.engines), self.num_rows, self.layout.max_staleness)

    def with_layout(self, **changes: object) -> Deployment:
        """The same workload on a layout that differs in these fields."""
        return replace(self, layout=replace(self.layout, **changes))  # type: ignore[arg-type]
