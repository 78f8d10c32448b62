"""Roofline cost model: the time (s) of each operation of an engine and of the trainer.

A decode step takes `max(compute, weights + KV of the fullest rank) + collectives + host time`. Between two
events the rows of an engine are the same and their contexts grow by one token a step, so the time of a step
is the maximum of a constant and a line (`StepTime`): one formula covers many steps.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.errors import InputError
from dora.planner.hardware import (
    BYTES_PER_VALUE,
    TRAINING_BYTES_PER_PARAMETER,
    Device,
    Efficiency,
    ModelShape,
)

MEMORY_RESERVE = 0.1  # fraction of a device's memory that is left for activations and buffers


class DoesNotFitError(InputError):
    """A model or its KV does not fit devices. The remedy depends on the command."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(f"{reason}; {remedy}")
        self.reason = reason


class StepTime(NamedTuple):
    """The k-th decode step from now takes `max(floor_s, first_s + k * slope_s)`; k is continuous."""

    floor_s: float
    first_s: float
    slope_s: float

    def seconds(self, num_steps: float) -> float:
        """Seconds of the next `num_steps` steps."""
        floor, first, slope = self
        num_flat = self._num_flat(num_steps)
        num_rising, start = num_steps - num_flat, max(floor, first)
        return floor * num_flat + num_rising * (start + slope * num_rising / 2)

    def steps(self, seconds: float) -> float:
        """Steps in the next `seconds`: the inverse of `seconds()`."""
        floor, first, slope = self
        num_flat = self._num_flat(math.inf)
        if floor * num_flat >= seconds and num_flat > 0:
            return seconds / floor
        start, seconds = max(floor, first), seconds - (floor * num_flat if num_flat else 0.0)
        if slope * seconds < 1e-12 * start:
            return num_flat + seconds / start
        return num_flat + (math.sqrt(start * start + 2 * slope * seconds) - start) / slope

    def _num_flat(self, most: float) -> float:
        """Steps from now that take `floor_s`, at most `most`."""
        if self.first_s >= self.floor_s:
            return 0.0
        return min(most, (self.floor_s - self.first_s) / self.slope_s) if self.slope_s > 0 else most


class StepTimeTerms(NamedTuple):
    """The parts of a decode step's time that depend on the number of rows alone, in seconds."""

    floor_s: float  # compute and overhead: the least that a step takes
    overhead_s: float  # host and collectives, beside reading memory
    weights_s: float  # reading the weights of one version
    kv_s: float  # reading the KV of one token
    slope_s: float  # added to each further step, because the KV of every row grows

    def step_time(self, rank_context: float, num_versions: int = 1) -> StepTime:
        """For `rank_context` tokens of KV on the fullest rank and rows of so many versions."""
        first_s = self.weights_s * num_versions + self.kv_s * rank_context + self.overhead_s
        return StepTime(self.floor_s, first_s, self.slope_s)


@dataclass(frozen=True, slots=True)
class EngineCost:
    """Costs of an engine of `tp_size` x `ep_size` devices.

    Attention is split over `tp_size` devices. `ep_size` > 1 makes that many ranks with rows of their own and
    a part of the experts each; each layer has two all-to-alls, so that all ranks wait for the fullest rank.
    """

    model: ModelShape
    device: Device
    efficiency: Efficiency
    tp_size: int = 1
    ep_size: int = 1
    expert_skew: float = 0.1  # relative excess load of the busiest rank's experts
    _terms: dict[tuple[int, int], StepTimeTerms] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        if min(self.tp_size, self.ep_size) < 1:
            raise InputError(f"TP = {self.tp_size} and EP = {self.ep_size} must be at least 1")
        if self.model.num_heads % self.tp_size:
            raise InputError(
                f"TP = {self.tp_size} must divide the {self.model.num_heads} attention heads of "
                f"{self.model.name}"
            )
        if self.ep_size > 1 and self.ep_size > self.model.num_experts:
            raise InputError(
                f"EP = {self.ep_size} must be at most the number of experts; {self.model.name} has "
                f"{self.model.num_experts}"
            )
        if self.kv_capacity < 1:
            raise DoesNotFitError(
                f"{self.model.name} does not fit: its weights take {self.device_weight_bytes / 1e9:.1f} GB "
                f"of each of {self.num_devices} devices, and {self.device.name} has "
                f"{self.device.memory_bytes * (1 - MEMORY_RESERVE) / 1e9:.1f} GB",
                "raise --tp or --ep",
            )

    @property
    def num_devices(self) -> int:
        return self.tp_size * self.ep_size

    @property
    def kv_capacity(self) -> int:
        """Tokens whose KV fits beside the weights, if every layer keeps it."""
        free = self.device.memory_bytes * (1 - MEMORY_RESERVE) - self.device_weight_bytes
        return max(0, int(free * self.ep_size / self.device_kv_bytes))

    @property
    def kv_bytes(self) -> float:
        """KV cache of one token."""
        return self.model.kv_bytes

    @property
    def kv_growth(self) -> float:
        """KV that a row gains with each token, in tokens that every layer keeps."""
        return self.model.kv_growth

    def kv_tokens(self, context: float, final: float = 0.0) -> float:
        """KV of a row in tokens that every layer keeps: `ModelShape.kv_tokens`."""
        return self.model.kv_tokens(context, final)

    @property
    def device_kv_bytes(self) -> float:
        """KV cache of one token on each of the devices that share it; no device has less than a KV head."""
        return self.model.kv_bytes / min(self.tp_size, self.model.num_kv_heads)

    @property
    def device_weight_bytes(self) -> float:
        """Weights on one device."""
        model = self.model
        expert_bytes = model.weight_bytes - model.dense_bytes
        return model.dense_bytes / self.tp_size + expert_bytes / self.num_devices

    @property
    def _flops_per_s(self) -> float:
        return self.device.flops_per_s * self.efficiency.flops

    @property
    def _network_bandwidth(self) -> float:
        return self.device.network_bandwidth * self.efficiency.link

    def terms(self, num_rows: int, rank_rows: int) -> StepTimeTerms:
        """Of steps with `num_rows` rows; the fullest rank has `rank_rows`. Cached."""
        key = (num_rows, rank_rows)
        if key not in self._terms:
            self._terms[key] = self._compute_terms(num_rows, rank_rows)
        return self._terms[key]

    def _compute_terms(self, num_rows: int, rank_rows: int) -> StepTimeTerms:
        model, bandwidth = self.model, self.device.memory_bandwidth * self.efficiency.memory
        kv_s = self.device_kv_bytes / bandwidth
        expert_bytes = self._num_read_experts(num_rows) * model.expert_bytes
        weights_s = (model.dense_bytes / self.tp_size + expert_bytes / self.tp_size) / bandwidth
        overhead_s = self.efficiency.decode_step_s + self._collectives_s(num_rows, rank_rows)
        floor_s = self._compute_s(num_rows, rank_rows) + overhead_s
        return StepTimeTerms(floor_s, overhead_s, weights_s, kv_s, kv_s * self.kv_growth * rank_rows)

    def _num_read_experts(self, num_rows: int) -> float:
        """Expected number of experts per rank that a step uses."""
        model = self.model
        if not model.num_experts:
            return 0.0
        unused = (1 - model.experts_per_token / model.num_experts) ** num_rows
        return model.num_experts / self.ep_size * (1 - unused)

    def _compute_s(self, num_rows: int, rank_rows: int) -> float:
        model = self.model
        per_token = 0.0  # expert parameters that one token uses
        if model.num_experts:
            per_token = model.num_expert_parameters * model.experts_per_token / model.num_experts
        dense = (model.active_parameters - per_token) * rank_rows
        expert = per_token * num_rows / self.ep_size * self.expert_imbalance(num_rows)
        return 2 * (dense + expert) / self.tp_size / self._flops_per_s

    def expert_imbalance(self, num_rows: int) -> float:
        """Load of the busiest EP rank over the mean: chance, which many rows even out, and skew."""
        if self.ep_size == 1 or not num_rows:
            return 1.0
        mean = num_rows * self.model.experts_per_token / self.ep_size
        return (1 + self.expert_skew) * (1 + math.sqrt(2 * math.log(self.ep_size) / mean))

    def _collectives_s(self, num_rows: int, rank_rows: int) -> float:
        """Two all-reduces a layer among `tp_size` devices, two all-to-alls among `ep_size` ranks."""
        model, seconds = self.model, 0.0
        row_bytes = model.hidden_size * BYTES_PER_VALUE
        if self.tp_size > 1:
            sent_s = 2 * rank_rows * row_bytes / self._link_bandwidth(self.tp_size)
            seconds += 2 * model.num_layers * (self.efficiency.collective_s + sent_s)
        if self.ep_size > 1:
            sent = rank_rows * model.experts_per_token * row_bytes * self.expert_imbalance(num_rows)
            latency_s = self.efficiency.collective_s * math.log2(self.ep_size)
            seconds += 2 * model.num_layers * (latency_s + sent / self._link_bandwidth(self.num_devices))
        return seconds

    def _link_bandwidth(self, size: int) -> float:
        device = self.device
        bandwidth = device.link_bandwidth if size <= device.node_size else device.network_bandwidth
        return bandwidth * self.efficiency.link

    def prefill_s(self, num_tokens: float) -> float:
        """Compute the KV of a prompt, or of a prompt with its response so far."""
        flops = self.model.forward_flops(num_tokens, num_tokens)
        return flops / (self.num_devices * self._flops_per_s)

    def migrate_s(self, num_tokens: float) -> float:
        """Copy one request's KV to another engine, from all devices of a rank at once."""
        return self.kv_tokens(num_tokens) * self.device_kv_bytes / self._network_bandwidth

    def swap_s(self, num_tokens: float) -> float:
        """Copy one request's KV to host memory, or back."""
        return self.kv_tokens(num_tokens) * self.device_kv_bytes / self.device.host_bandwidth

    @property
    def load_s(self) -> float:
        """Load a version over the network, all devices at once."""
        return self.device_weight_bytes / self._network_bandwidth

    @property
    def load_stop_s(self) -> float:
        """Time of a load in which the engine decodes nothing."""
        return self.load_s


@dataclass(frozen=True, slots=True)
class TrainerCost:
    """Costs of the trainer's devices together."""

    model: ModelShape
    device: Device
    num_devices: int
    efficiency: Efficiency

    def __post_init__(self) -> None:
        capacity = self.device.memory_bytes * (1 - MEMORY_RESERVE) * self.num_devices
        needed = self.model.num_parameters * TRAINING_BYTES_PER_PARAMETER
        if self.num_devices < 1 or needed > capacity:
            raise DoesNotFitError(
                f"training {self.model.name} takes {needed / 1e9:.0f} GB, and {self.num_devices} x "
                f"{self.device.name} have {capacity / 1e9:.0f} GB",
                "give the trainer more devices: raise --trainer or --devices",
            )

    def sequence_s(self, num_tokens: float) -> float:
        """Train one sequence of prompt and response: log-probs, forward, and backward, which counts twice."""
        flops = 4 * self.model.forward_flops(num_tokens, num_tokens)
        return flops / (self.num_devices * self.device.flops_per_s * self.efficiency.train)

    @property
    def step_overhead_s(self) -> float:
        """Fixed time of a training step."""
        return self.efficiency.train_step_s

    @property
    def publish_s(self) -> float:
        """Write the weights to the store, each device its part."""
        bandwidth = self.device.network_bandwidth * self.efficiency.link
        return self.model.weight_bytes / self.num_devices / bandwidth
