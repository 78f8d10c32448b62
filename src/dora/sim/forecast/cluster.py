"""A job and a way to lay it out on devices, and what a forecast of the two says.

What cannot be is refused before anything is played: weights or rows without room, devices that do not add up.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import NamedTuple

from dora.errors import InputError
from dora.sim.forecast.costs import EngineCost, TrainerCost
from dora.sim.forecast.fluid import FluidEngine
from dora.sim.forecast.hardware import Device, Efficiency
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.manner import Manner
from dora.sim.forecast.outcome import Outcome, middle
from dora.sim.forecast.player import Listener, Player
from dora.sim.forecast.rounds import Rounds
from dora.sim.forecast.rules import limits_of, manner_of, policy_of
from dora.sim.forecast.shapes import Shape

ROOMY = 0.9  # share of the KV that rows of usual length may take
MAX_ROWS = 1024  # of one rank, unless asked for more


@dataclass(frozen=True)
class Job:
    """What is to be trained. A batch is `batch_size` groups of `group_size` answers."""

    shape: Shape
    lengths: Lengths
    batch_size: int
    group_size: int
    efficiency: Efficiency = field(default_factory=Efficiency)
    context: int = 1 << 20
    reward_s: float = 0.0
    num_forwards: int = 1
    expert_skew: float = 0.1  # by which the most wanted rank's experts are wanted more

    def __post_init__(self) -> None:
        if min(self.batch_size, self.group_size) < 1:
            raise InputError(f"batch {self.batch_size} x {self.group_size} must be at least 1 x 1")
        self.lengths.check_context(self.context)

    @property
    def num_answers(self) -> int:
        return self.batch_size * self.group_size


@dataclass(frozen=True)
class Layout:
    """Who does what. Rollout devices may be of several kinds; colocated policies use the trainer's only."""

    policy: str
    max_staleness: int
    train: tuple[Device, int]
    rollout: tuple[tuple[Device, int], ...] = ()
    tensor: int = 1
    expert: int = 1
    rows: int | None = None  # of an engine; None: what its KV has room for
    slots: int = 1  # versions that an engine may hold
    slack: int = 0
    without: tuple[str, ...] = ()
    is_elastic: bool = False  # the trainer's devices decode while they have nothing to train
    is_streamed: bool = False
    switch_s: float = 0.0
    interval_s: float = 10.0  # at most so often is the fleet looked at again without an occasion

    @property
    def num_devices(self) -> int:
        return self.train[1] + sum(num for _, num in self.rollout)


class Placed(NamedTuple):
    """One engine."""

    cost: EngineCost
    rows: int
    is_colocated: bool  # on the trainer's devices


@dataclass(frozen=True)
class Setup:
    """A job on a layout."""

    job: Job
    layout: Layout
    num_steps: int

    @cached_property
    def trainer(self) -> TrainerCost:
        device, num = self.layout.train
        return TrainerCost(self.job.shape, device, num, self.job.efficiency, self.job.num_forwards)

    @cached_property
    def engines(self) -> list[Placed]:
        """All of them. Raises InputError where they cannot be."""
        layout, policy = self.layout, policy_of(self.layout.policy)
        if policy.is_colocated == bool(layout.rollout):
            what = "shares all devices with the trainer" if policy.is_colocated else "has devices of its own"
            raise InputError(
                f"policy {policy.name} {what}, and {sum(n for _, n in layout.rollout)} are for rollout alone"
            )
        found: list[Placed] = []
        for device, num in layout.rollout:
            found += self._engines_on(device, num, is_colocated=False)
        if policy.is_colocated or layout.is_elastic:
            found += self._engines_on(*layout.train, is_colocated=True)
        return found

    def _engines_on(self, device: Device, num: int, *, is_colocated: bool) -> list[Placed]:
        job, layout = self.job, self.layout
        skew = job.expert_skew
        cost = EngineCost(job.shape, device, job.efficiency, layout.tensor, layout.expert, skew)
        if num < cost.num_devices or num % cost.num_devices:
            raise InputError(
                f"{num} x {device.name} cannot be shared out among engines of tensor {layout.tensor} "
                f"x expert {layout.expert} = {cost.num_devices} devices"
            )
        longest = job.lengths.prompt + job.lengths.limit
        if cost.kv_tokens < longest:
            raise InputError(
                f"an engine of {cost.num_devices} x {device.name} has room for the KV of {cost.kv_tokens:,} "
                f"tokens beside {job.shape.name}, and one answer may need {longest:,}; raise tensor"
            )
        rows = layout.rows or self._rows(cost)
        return [Placed(cost, rows, is_colocated)] * (num // cost.num_devices)

    def _rows(self, cost: EngineCost) -> int:
        """As many as the KV has room for, and no more than its share of the answers that may be open."""
        job, layout, policy = self.job, self.layout, policy_of(self.layout.policy)
        is_together = policy.one_version or policy.is_colocated  # all rows begin at the same time
        usual = job.lengths.crowded if is_together else job.lengths.resident
        fitting = min(int(ROOMY * cost.kv_tokens / usual), MAX_ROWS * layout.expert)
        bound = 1 if policy.one_version else layout.max_staleness + 1
        num_open = max(job.batch_size, bound * job.batch_size - layout.slack) * job.group_size
        num_devices = layout.num_devices if policy.is_colocated else sum(num for _, num in layout.rollout)
        share = -(-num_open * cost.num_devices // max(1, num_devices))
        return max(1, fitting if policy.mind is Rounds else min(fitting, share))  # who drops begins more

    @property
    def num_rows(self) -> int:
        return sum(rows for _, rows, _ in self.engines)

    def player(self, listener: Listener | None = None) -> Player:
        """Everything, ready to be played."""
        job, layout, policy = self.job, self.layout, policy_of(self.layout.policy)
        sizes = (job.batch_size, job.group_size)
        limits = limits_of(
            policy, sizes, self.num_steps, layout.max_staleness,
            slack=layout.slack, without=layout.without, interval_s=layout.interval_s,
        )  # fmt: skip
        base = Manner(
            is_streamed=layout.is_streamed, switch_s=layout.switch_s, reward_s=job.reward_s,
            report_s=layout.interval_s, slots=layout.slots,
        )  # fmt: skip
        engines = [FluidEngine(number, *engine) for number, engine in enumerate(self.engines)]
        manner = manner_of(policy, base, layout.without)
        return Player(policy.mind(limits), engines, self.trainer, job.lengths, sizes, manner, listener)

    def check(self) -> None:
        """Refuse what cannot be, before anything is played. Raises InputError."""
        _ = (self.trainer, self.player())
        middle(self.num_steps, self.layout.max_staleness)

    def play(self) -> Outcome:
        return self.player().play()

    def figures(self) -> dict[str, float]:
        """Means over the middle steps of a run."""
        outcome = self.play()
        return outcome.figures(len(self.engines), self.num_rows, self.layout.max_staleness)

    def changed(self, **changes: object) -> Setup:
        """The same job on a layout that differs."""
        return replace(self, layout=replace(self.layout, **changes))  # type: ignore[arg-type]
