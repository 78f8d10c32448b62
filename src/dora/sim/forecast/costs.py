"""Seconds of everything an engine and a trainer do, by roofline: what is read, computed and sent.

A decode step of an engine is `max(compute, weights + KV of its fullest rank) + collectives + host time`.
Between two events its rows are the same and their contexts grow by one token a step, so a step's time is
the greater of a constant and a line (`Pace`): many steps cost one formula, not one event each.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.errors import InputError
from dora.sim.forecast.hardware import Device, Efficiency
from dora.sim.forecast.shapes import BYTES, TRAINED_BYTES, Shape

SPARE = 0.1  # of a device's memory, for activations and buffers


class Pace(NamedTuple):
    """The k-th decode step from now takes `max(floor_s, start_s + k * slope_s)`."""

    floor_s: float
    start_s: float
    slope_s: float

    def seconds(self, steps: float) -> float:
        """That so many steps take."""
        floor, start, slope = self
        flat = self._flat(steps)
        rest, first = steps - flat, max(floor, start)
        return floor * flat + rest * (first + slope * rest / 2)

    def steps(self, seconds: float) -> float:
        """That are made in so many seconds: the inverse of `seconds`."""
        floor, start, slope = self
        flat = self._flat(math.inf)
        if floor * flat >= seconds and flat > 0:
            return seconds / floor
        first, seconds = max(floor, start), seconds - (floor * flat if flat else 0.0)
        if slope * seconds < 1e-12 * first:
            return flat + seconds / first
        return flat + (math.sqrt(first * first + 2 * slope * seconds) - first) / slope

    def _flat(self, most: float) -> float:
        """Steps from now that take `floor_s`."""
        if self.start_s >= self.floor_s:
            return 0.0
        return min(most, (self.floor_s - self.start_s) / self.slope_s) if self.slope_s > 0 else most


class Terms(NamedTuple):
    """Seconds of a decode step: at least; beside; to read weights, a token of KV, a token of each row."""

    floor_s: float
    beside_s: float
    read_s: float
    kv_s: float
    slope_s: float

    def pace(self, rank_context: float, num_versions: int) -> Pace:
        start_s = self.read_s * num_versions + self.kv_s * rank_context + self.beside_s
        return Pace(self.floor_s, start_s, self.slope_s)


@dataclass(frozen=True, slots=True)
class EngineCost:
    """What one engine of `tensor` x `expert` devices takes.

    Attention is split over `tensor` devices; `expert` > 1 makes that many ranks, each with rows of its own
    and a share of the experts, which meet in two all-to-alls a layer, so that the fullest rank stalls all.
    """

    shape: Shape
    device: Device
    efficiency: Efficiency
    tensor: int = 1
    expert: int = 1
    expert_skew: float = 0.1  # by which the most wanted rank's experts are wanted more, whatever is decoded
    _known: dict[tuple[int, int], Terms] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if min(self.tensor, self.expert) < 1:
            raise InputError(f"tensor = {self.tensor} and expert = {self.expert} must be at least 1")
        if self.expert > 1 and self.expert > self.shape.num_experts:
            raise InputError(
                f"expert = {self.expert} ranks need as many experts; {self.shape.name} has "
                f"{self.shape.num_experts}"
            )
        if self.kv_tokens < 1:
            raise InputError(
                f"{self.shape.name} does not fit: its weights take {self.rank_bytes / 1e9:.1f} GB of each "
                f"of {self.num_devices} devices, and {self.device.name} has "
                f"{self.device.memory_bytes * (1 - SPARE) / 1e9:.1f} GB; raise tensor or expert"
            )

    @property
    def num_devices(self) -> int:
        return self.tensor * self.expert

    @property
    def kv_tokens(self) -> int:
        """Tokens whose KV the engine has room for."""
        room = self.device.memory_bytes * (1 - SPARE) - self.rank_bytes
        return max(0, int(room * self.num_devices / self.shape.kv_bytes))

    @property
    def kv_bytes(self) -> float:
        """Of one token."""
        return self.shape.kv_bytes

    @property
    def rank_bytes(self) -> float:
        """Weights on one device."""
        shape = self.shape
        return shape.dense_bytes / self.tensor + (shape.weight_bytes - shape.dense_bytes) / self.num_devices

    @property
    def _memory(self) -> float:
        return self.device.bytes_per_s * self.efficiency.memory

    @property
    def _flops(self) -> float:
        return self.device.flops * self.efficiency.flops

    def pace(self, num_rows: int, rank_rows: int, rank_context: float, num_versions: int = 1) -> Pace:
        """Of decode steps for `num_rows` rows; `rank_rows` with `rank_context` tokens on the fullest rank."""
        return self.terms(num_rows, rank_rows).pace(rank_context, num_versions)

    def terms(self, num_rows: int, rank_rows: int) -> Terms:
        """What of a pace depends on the number of rows alone."""
        key = (num_rows, rank_rows)
        if key not in self._known:
            self._known[key] = self._terms(num_rows, rank_rows)
        return self._known[key]

    def _terms(self, num_rows: int, rank_rows: int) -> Terms:
        shape, experts = self.shape, self._experts(num_rows)
        kv_s = shape.kv_bytes / self.tensor / self._memory
        read_s = (shape.dense_bytes / self.tensor + experts * shape.expert_bytes / self.tensor) / self._memory
        beside_s = self.efficiency.step_s + self._collectives_s(num_rows, rank_rows)
        floor_s = self._compute_s(num_rows, rank_rows) + beside_s
        return Terms(floor_s, beside_s, read_s, kv_s, kv_s * rank_rows)

    def _experts(self, num_rows: int) -> float:
        """Experts of a rank that a step reads."""
        shape = self.shape
        if not shape.num_experts:
            return 0.0
        is_left_out = (1 - shape.experts_per_token / shape.num_experts) ** num_rows
        return shape.num_experts / self.expert * (1 - is_left_out)

    def _compute_s(self, num_rows: int, rank_rows: int) -> float:
        shape = self.shape
        expert = 0.0
        if shape.num_experts:
            expert = shape.expert_parameters * shape.experts_per_token / shape.num_experts
        dense = (shape.active_parameters - expert) * rank_rows
        spread = expert * num_rows / self.expert * self.imbalance(num_rows)
        return 2 * (dense + spread) / self.tensor / self._flops

    def imbalance(self, num_rows: int) -> float:
        """Load of the EP rank with most tokens over the mean: chance, which many rows even out, and skew."""
        if self.expert == 1 or not num_rows:
            return 1.0
        mean = num_rows * self.shape.experts_per_token / self.expert
        return (1 + self.expert_skew) * (1 + math.sqrt(2 * math.log(self.expert) / mean))

    def _collectives_s(self, num_rows: int, rank_rows: int) -> float:
        """Two all-reduces a layer among `tensor` devices, two all-to-alls among `expert` ranks."""
        shape, device, seconds = self.shape, self.device, 0.0
        row_bytes = shape.hidden_size * BYTES
        if self.tensor > 1:
            sent = 2 * rank_rows * row_bytes / (self._link(self.tensor))
            seconds += 2 * shape.num_layers * (self.efficiency.hop_s + sent)
        if self.expert > 1:
            sent = rank_rows * shape.experts_per_token * row_bytes * self.imbalance(num_rows)
            speed = device.net_bytes_per_s if self.num_devices > device.node_size else device.link_bytes_per_s
            hop_s = self.efficiency.hop_s * math.log2(self.expert)
            seconds += 2 * shape.num_layers * (hop_s + sent / (speed * self.efficiency.link))
        return seconds

    def _link(self, size: int) -> float:
        device = self.device
        speed = device.link_bytes_per_s if size <= device.node_size else device.net_bytes_per_s
        return speed * self.efficiency.link

    def prefill_s(self, tokens: float) -> float:
        """Prompts, or answers so far, whose KV is computed (again)."""
        return self.shape.forward_flops(tokens, tokens) / (self.num_devices * self._flops)

    def move_s(self, tokens: float) -> float:
        """One request's KV on its way to another engine, from each device of a rank at once."""
        speed = self.device.net_bytes_per_s * self.efficiency.link * self.tensor
        return tokens * self.shape.kv_bytes / speed

    def swap_s(self, tokens: float) -> float:
        """One request's KV to the host's memory, or back."""
        return tokens * self.shape.kv_bytes / (self.device.host_bytes_per_s * self.tensor)

    def load_s(self) -> float:
        """A version from the devices that have it to those of the engine, all at once."""
        return self.rank_bytes / (self.device.net_bytes_per_s * self.efficiency.link)

    def load_stop_s(self) -> float:
        """Of it, what requests of other versions on the engine stand still."""
        return self.load_s()


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """What the trainer's devices take together."""

    shape: Shape
    device: Device
    num_devices: int
    efficiency: Efficiency
    num_forwards: int = 1  # passes over a batch beside the one that is trained: log-probs, a reference

    def __post_init__(self) -> None:
        room = self.device.memory_bytes * (1 - SPARE) * self.num_devices
        need = self.shape.parameters * TRAINED_BYTES
        if self.num_devices < 1 or need > room:
            raise InputError(
                f"training {self.shape.name} takes {need / 1e9:.0f} GB, and {self.num_devices} x "
                f"{self.device.name} have {room / 1e9:.0f} GB; give the trainer more devices"
            )

    def work_s(self, tokens: float) -> float:
        """One sequence of prompt and answer: forward, backward and what is forward beside."""
        flops = (3 + self.num_forwards) * self.shape.forward_flops(tokens, tokens)
        return flops / (self.num_devices * self.device.flops * self.efficiency.train)

    @property
    def fixed_s(self) -> float:
        """Of a step, whatever is in it."""
        return self.efficiency.train_s

    def publish_s(self) -> float:
        """Weights to where engines load them from, each device its share."""
        speed = self.device.net_bytes_per_s * self.efficiency.link
        return self.shape.weight_bytes / self.num_devices / speed
