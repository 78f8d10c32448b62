"""A workload and a layout of devices for it, and the forecast of both together.

Layouts that cannot work are rejected before anything is simulated: weights or rows without memory, devices
that do not divide into engines.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from dora.errors import InputError
from dora.planner.costs import EngineCost, TrainerCost
from dora.planner.fluid import FluidEngine
from dora.planner.hardware import Device, Efficiency, ModelShape
from dora.planner.lengths import LengthDistribution
from dora.planner.policies import get_policy, make_limits, make_options
from dora.planner.simulator import (
    Listener,
    Metrics,
    SimulationResult,
    Simulator,
    SimulatorOptions,
    steady_steps,
)

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
        self.lengths.check_context(self.context)

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
    version_slots: int = 1  # of an engine
    slack: int = 0  # groups
    ablations: tuple[str, ...] = ()
    is_elastic: bool = False  # the trainer's devices decode while they have nothing to train
    streams_groups: bool = False
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
        if cost.kv_capacity < longest:
            raise InputError(
                f"an engine of {cost.num_devices} x {device.name} holds the KV of {cost.kv_capacity:,} "
                f"tokens beside {workload.model.name}, and one response may need {longest:,}; raise TP"
            )
        num_rows = layout.num_rows or self._choose_num_rows(cost)
        return [PlacedEngine(cost, num_rows, is_colocated)] * (num // cost.num_devices)

    def _choose_num_rows(self, cost: EngineCost) -> int:
        """As many rows as the KV cache takes, and no more than the engine's part of the open responses."""
        workload, layout, policy = self.workload, self.layout, get_policy(self.layout.policy)
        starts_together = policy.is_single_version or policy.is_colocated
        lengths = workload.lengths
        context = lengths.peak_context if starts_together else lengths.mean_context
        fitting = min(int(MAX_KV_FILL * cost.kv_capacity / context), MAX_ROWS_PER_RANK * layout.ep_size)
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

    def simulator(self, listener: Listener | None = None) -> Simulator:
        """A simulator that is ready to run."""
        workload, layout, policy = self.workload, self.layout, get_policy(self.layout.policy)
        limits = make_limits(
            policy,
            workload.batch_size,
            workload.group_size,
            self.num_steps,
            layout.max_staleness,
            slack=layout.slack,
            ablations=layout.ablations,
            rebalance_interval_s=layout.rebalance_interval_s,
        )
        base = SimulatorOptions(
            streams_groups=layout.streams_groups,
            switch_s=layout.switch_s,
            reward_s=workload.reward_s,
            report_interval_s=layout.rebalance_interval_s,
            version_slots=layout.version_slots,
        )
        options = make_options(policy, base, layout.ablations)
        engines = [FluidEngine(number, *engine) for number, engine in enumerate(self.engines)]
        scheduler = policy.scheduler(limits)
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
