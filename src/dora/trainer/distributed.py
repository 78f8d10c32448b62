"""FSDP2 training (`fully_shard`) on several ranks: rank 0 sends commands, and all ranks execute them.

Commands and samples use a process group of their own, in which followers wait without a time limit while the
trainer is idle. The collectives of the model have a timeout, so a crashed or stuck rank becomes an error of
the others.
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.decoder import LayerRunner
from dora.model.moe import Router
from dora.model.weights import WeightLayout
from dora.trainer.learner import GradientAccumulator
from dora.trainer.metrics import StepMetrics
from dora.trainer.optimizer import ShardedAdamW
from dora.trainer.packing import PackedBatch, pack
from dora.trainer.policy import Policy
from dora.trainer.settings import Sample, TrainerSettings

WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
_NO_TIMEOUT = timedelta(days=365)  # a trainer may be idle; if rank 0 crashes, the group raises
_NORM = "model.norm.weight"

Layer = Callable[[Tensor], Tensor]
ReadSamples = Callable[[Sequence[Sample]], Sequence[Sample]]


@dataclass(frozen=True)
class AccumulateCommand:
    """Add the gradient of one micro-batch; without samples, take part in the collectives of the others.

    Samples that are in the stream come without the columns that a rank can read there. `num_updates` counts
    the updates of the step so far.
    """

    samples: Sequence[Sample]
    num_updates: int


@dataclass(frozen=True)
class StepCommand:
    """Update the weights; as `Learner.step`."""

    divisor: float
    lr: float
    max_grad_norm: float


@dataclass(frozen=True)
class ZeroGradCommand:
    """Clear the accumulated gradient."""


@dataclass(frozen=True)
class SnapshotCommand:
    """Copy weights and moments to host memory."""


@dataclass(frozen=True)
class RestoreCommand:
    """Copy weights and moments back from the last snapshot."""


@dataclass(frozen=True)
class GatherCommand:
    """Gather the weights, or a moment of the optimizer, on rank 0; `dtype` is that of torch."""

    name: str
    dtype: torch.dtype


@dataclass(frozen=True)
class LoadCommand:
    """Load shards of the weights from rank 0, and of the moments if `num_updates` is not 0."""

    num_updates: int


RankCommand = (
    AccumulateCommand
    | StepCommand
    | ZeroGradCommand
    | SnapshotCommand
    | RestoreCommand
    | GatherCommand
    | LoadCommand
)


class RankGroup:
    """The process group of one trainer, as seen from one of its ranks."""

    def __init__(
        self, rendezvous_file: Path, rank: int, num_ranks: int, device: torch.device, timeout_s: float
    ) -> None:
        """Wait for the other ranks at `rendezvous_file`, which is new. `timeout_s` limits each collective."""
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        if sys.platform == "linux":  # all ranks are on one machine: listen on loopback, unless set otherwise
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", "lo")
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "nccl" if device.type == "cuda" else "gloo",
            init_method=f"file://{rendezvous_file.absolute()}",
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        self.mesh = init_device_mesh(device.type, (num_ranks,))
        self._command_group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)

    def scatter(self, commands: Sequence[RankCommand]) -> None:
        """Send one command to each rank, rank 0 included. Rank 0 calls this."""
        dist.scatter_object_list([None], list(commands), src=0, group=self._command_group)

    def receive(self) -> RankCommand:
        """Wait for the next command. The followers call this."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, None, src=0, group=self._command_group)
        command: RankCommand = received[0]
        return command

    def gather(self, own: StepMetrics) -> list[StepMetrics]:
        """The metrics of all ranks on rank 0; an empty list on the others."""
        gathered: list[Any] = [None] * self.num_ranks if self.rank == 0 else []
        dist.gather_object(own, gathered or None, dst=0, group=self._command_group)
        return gathered


class DistributedLearner:
    """A `Learner` of several ranks, on rank 0; it gathers the weights in `flat` when they are read."""

    def __init__(
        self,
        group: RankGroup,
        config: ModelConfig,
        flat: Tensor,
        settings: TrainerSettings,
        reference: Tensor | None,
    ) -> None:
        """The arguments are those of `Trainer`; flat buffers may be on any device.

        The other ranks run `follow_rank0`.
        """
        self.num_ranks, self._group = group.num_ranks, group
        self._flat, self._is_current = flat, True
        self._rounded: Tensor | None = None  # pinned for ranks on GPUs
        self._rank = ShardedRank(group, config, settings, flat, flat if reference is None else reference)
        self._layout, self._dtype = WeightLayout(config), getattr(torch, settings.dtype)
        placeholder = {_NORM: torch.empty(0, device=group.device)}
        self._unsharded = Policy(
            config, placeholder, settings.temperature, logits_chunk_tokens=settings.logits_chunk_tokens
        )
        self._failure: str | None = None

    @property
    def flat(self) -> Tensor:
        if not self._is_current:
            self._gather(WEIGHTS, self._flat)
            self._is_current = True
        return self._flat

    @property
    def device(self) -> torch.device:
        return self._group.device

    def published_weights(self, dtype: torch.dtype) -> Tensor:
        """Ranks round their shards before they are gathered. The result is valid until the next call."""
        if self._is_current or dtype == self._flat.dtype:
            return self.flat
        if self._rounded is None or self._rounded.dtype != dtype:
            is_pinned = self._group.device.type == "cuda"
            self._rounded = torch.empty(self._flat.shape, dtype=dtype, pin_memory=is_pinned)
        self._gather(WEIGHTS, self._rounded)
        return self._rounded

    def accumulate(self, micro_batches: Sequence[Sequence[Sample]], metrics: StepMetrics) -> None:
        own, *others = micro_batches
        sent: list[Sequence[Sample]] = [(), *([_without_columns(s) for s in samples] for samples in others)]
        sent += [()] * (self.num_ranks - len(sent))
        with self._on_all_ranks([AccumulateCommand(samples, metrics.num_updates) for samples in sent]):
            for sums in self._group.gather(self._rank.accumulate(own, metrics.num_updates)):
                metrics.merge(sums)

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        with self._on_all_ranks(StepCommand(divisor, lr, max_grad_norm)):
            norm = self._rank.optimizer.step(divisor, lr, max_grad_norm)
        self._is_current = False
        return norm

    def zero_grad(self) -> None:
        if self._failure is None:
            with self._on_all_ranks(ZeroGradCommand()):
                self._rank.optimizer.zero_grad()

    def snapshot(self) -> Callable[[], None]:
        """Each rank copies its own shards; nothing is gathered."""
        with self._on_all_ranks(SnapshotCommand()):
            self._rank.snapshot()
        return self._restore

    def _restore(self) -> None:
        with self._on_all_ranks(RestoreCommand()):
            self._rank.restore()
        self._is_current = False

    def policy_with_weights(self, flat: Tensor) -> Policy:
        """A policy that rank 0 computes alone; it copies one weight at a time to the device."""
        views = self._layout.views(flat)
        return self._unsharded.with_weights(_LazyWeights(views, self._group.device, self._dtype), None)

    def state_dict(self) -> dict[str, Any]:
        optimizer = self._rank.optimizer
        state: dict[str, Any] = {}
        if optimizer.num_updates:
            state["step"] = torch.tensor(float(optimizer.num_updates))
            for name in MOMENTS:
                state[name] = torch.empty_like(self._flat)
                self._gather(name, state[name])
        return {"state": {0: state} if state else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        loaded = state["state"].get(0, {"step": 0})
        num_updates, moments = int(loaded["step"]), [loaded[name] for name in MOMENTS if name in loaded]
        with self._on_all_ranks(LoadCommand(num_updates)):
            self._rank.load_state(num_updates, self._flat, moments)
        self._is_current = True

    def _gather(self, name: str, flat: Tensor) -> None:
        with self._on_all_ranks(GatherCommand(name, flat.dtype)):
            self._rank.gather(name, flat.dtype, flat)

    @contextmanager
    def _on_all_ranks(self, commands: RankCommand | Sequence[RankCommand]) -> Iterator[None]:
        """Send the commands; rank 0 executes its own inside the block.

        After a failure of rank 0 alone the ranks are no longer synchronised, and every later call raises that
        failure.
        """
        if self._failure is not None:
            raise RunError(self._failure)
        self._group.scatter(commands if isinstance(commands, Sequence) else [commands] * self.num_ranks)
        try:
            yield
        except RunError:  # all ranks raise it
            raise
        except Exception as error:
            self._failure = f"rank 0 of the trainer failed: {type(error).__name__}: {error}"
            raise


def follow_rank0(group: RankGroup, rank: ShardedRank) -> None:
    """Main loop of every other rank: execute rank 0's commands until the process is terminated."""
    while True:
        metrics = rank.execute(group.receive())
        if metrics is not None:
            group.gather(metrics)


class ShardedRank:
    """One rank's shards of a policy, its gradient and its optimizer.

    All ranks call the same methods at the same time. Arguments that exist on rank 0 alone are None elsewhere.
    """

    def __init__(
        self,
        group: RankGroup,
        config: ModelConfig,
        settings: TrainerSettings,
        flat: Tensor | None = None,
        reference: Tensor | None = None,
        read_samples: ReadSamples = lambda samples: samples,
    ) -> None:
        """Rank 0 passes the weights `flat` [numel], and those of the reference policy if the loss needs one.

        `read_samples` adds the stream's columns to samples that came without them.
        """
        self._read_samples = read_samples
        self._policy = ShardedPolicy(config, settings, group.mesh)
        self._policy.load(flat)
        self._reference: ShardedPolicy | None = None
        if settings.computes_reference:
            self._reference = ShardedPolicy(config, settings, group.mesh, is_frozen=True)
            self._reference.load(reference)
        self._accumulator = GradientAccumulator(self._policy, settings, self._reference)
        self.optimizer = ShardedAdamW(self._policy.shards, settings.weight_decay, settings.betas)
        self.saved_shards: list[dict[str, Tensor]] = []

    def execute(self, command: RankCommand) -> StepMetrics | None:
        """Execute a follower's part of a command; returns the metrics to gather, if there are any."""
        match command:
            case AccumulateCommand(samples, num_updates):
                return self.accumulate(self._read_samples(samples), num_updates)
            case StepCommand(divisor, lr, max_grad_norm):
                with suppress(RunError):  # rank 0 raises the same error and reports it
                    self.optimizer.step(divisor, lr, max_grad_norm)
            case ZeroGradCommand():
                self.optimizer.zero_grad()
            case SnapshotCommand():
                self.snapshot()
            case RestoreCommand():
                self.restore()
            case GatherCommand(name, dtype):
                self.gather(name, dtype, None)
            case LoadCommand(num_updates):
                self.load_state(num_updates, None, None)
        return None

    def accumulate(self, samples: Sequence[Sample], num_updates: int) -> StepMetrics:
        """Add the gradient of a micro-batch; returns its metrics.

        Without samples, run a dummy forward and backward pass, because every rank must join the collectives.
        """
        metrics = StepMetrics(num_updates=num_updates)
        if samples:
            self._accumulator.accumulate(samples, metrics)
            metrics.read()
            return metrics
        batch = pack([[0]], [[0]], self._policy.device)
        logprobs, _ = self._policy.logprobs(batch)
        if self._reference is not None:
            with torch.no_grad():
                self._reference.logprobs(batch)
        torch.autograd.backward((logprobs * 0.0).sum())
        return metrics

    def snapshot(self) -> None:
        """Copy this rank's weights and moments to host memory; replaces the last snapshot."""
        self.saved_shards = []  # frees its memory first
        self.saved_shards = self.optimizer.snapshot()

    def restore(self) -> None:
        """Copy weights and moments back from the last snapshot."""
        self.optimizer.restore(self.saved_shards)

    def gather(self, name: str, dtype: torch.dtype, flat: Tensor | None) -> None:
        """Gather the weights, or one of the optimizer's moments, in `flat` ([numel], `dtype`)."""
        shards = self._policy.shards if name == WEIGHTS else self.optimizer.moments(name)
        self._policy.gather([cast(DTensor, shard.to(dtype)) for shard in shards], flat)

    def load_state(self, num_updates: int, flat: Tensor | None, moments: Sequence[Tensor] | None) -> None:
        """Load the weights, and the optimizer's moments after `num_updates` updates; [numel] each."""
        self._policy.load(flat)
        shards = {}
        if num_updates:
            given: Sequence[Tensor | None] = moments or [None] * len(MOMENTS)
            shards = {name: self._policy.scatter(m) for name, m in zip(MOMENTS, given, strict=True)}
        self.optimizer.load_moments(num_updates, shards)


@dataclass(frozen=True)
class FsdpUnit:
    """A contiguous part of the flat buffer that is gathered at once; `start` is its first element."""

    shapes: dict[str, tuple[int, ...]]
    start: int

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def slice(self, flat: Tensor) -> Tensor:
        """This part [numel] of a flat buffer."""
        return flat[self.start : self.start + self.numel]

    def views(self, part: Tensor) -> dict[str, Tensor]:
        """Name -> view of `part` [numel], by one split, so that its gradient is one tensor."""
        parts = part.split([*map(math.prod, self.shapes.values())])
        return {name: own.view(shape) for own, (name, shape) in zip(parts, self.shapes.items(), strict=True)}


def fsdp_units(config: ModelConfig) -> list[FsdpUnit]:
    """The flat buffer cut in order: embedding, each layer, final norm with head."""
    layout = WeightLayout(config)
    units: dict[str, list[str]] = {}
    for name in layout.shapes:
        first, *rest = name.removeprefix("model.").split(".")
        unit = f"{first}.{rest[0]}" if first == "layers" else "begin" if not units else "end"
        units.setdefault(unit, []).append(name)
    shapes = layout.shapes
    return [FsdpUnit({name: shapes[name] for name in own}, layout.offsets[own[0]]) for own in units.values()]


class ShardedPolicy(Policy):
    """A policy whose fp32 weights are sharded over N ranks.

    FSDP gathers one layer at a time, and everything outside the layers at once. A parameter of FSDP is the
    part of the flat buffer of one unit and not a matrix, so shards are even for all shapes, and an expert
    without tokens on one rank cannot give the ranks different sets of gradients to reduce.

    Every rank must call `logprobs` equally often, whatever its batch.
    """

    def __init__(
        self, config: ModelConfig, settings: TrainerSettings, mesh: DeviceMesh, is_frozen: bool = False
    ) -> None:
        """A frozen policy has no gradient, and keeps no gathered weights."""
        device, self._mesh, self._fsdp_units = torch.device(mesh.device_type), mesh, fsdp_units(config)
        dtype = getattr(torch, settings.dtype)
        gathered = {_NORM: torch.empty(0, device=device)}  # a placeholder that has the device
        self._root = _RootModule(self._fsdp_units, gathered, dtype)
        self._root.requires_grad_(not is_frozen)
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for layer in self._root.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(self._root, mesh=mesh, reshard_after_forward=True if is_frozen else None)
        for module in (*self._root.layers, self._root):  # gradients are sums over the ranks
            cast(FSDPModule, module).set_gradient_divide_factor(1.0)
            cast(FSDPModule, module).set_force_sum_reduction_for_comms(True)
        self._root.to_empty(device=device)
        super().__init__(
            config,
            gathered,
            settings.temperature,
            logits_chunk_tokens=settings.logits_chunk_tokens,
            activation_checkpointing=not is_frozen and settings.activation_checkpointing,
        )
        self._run_gathered, self._run_layer = self._run_layer, self._run_layer_module
        self._next_layers: Iterator[nn.Module] = iter(())

    @property
    def shards(self) -> list[DTensor]:
        """This rank's shards, in the order of the flat buffer."""
        modules = (self._root.first, *self._root.layers, self._root.last)
        return [cast(DTensor, module.flat) for module in modules]

    def logprobs(self, batch: PackedBatch, router: Router | None = None) -> tuple[Tensor, Tensor]:
        self._next_layers = iter(self._root.layers)
        result: tuple[Tensor, Tensor] = self._root(partial(super().logprobs, batch, router))
        return result

    def _run_layer_module(self, layer: Layer, x: Tensor) -> Tensor:
        out: Tensor = next(self._next_layers)(layer, x, self._run_gathered)
        return out

    def scatter(self, flat: Tensor | None) -> list[DTensor]:
        """Shards of rank 0's `flat` ([numel]), unit by unit; None on the other ranks."""
        shards = []
        for unit in self._fsdp_units:
            whole = torch.empty(unit.numel) if flat is None else unit.slice(flat)
            shards.append(distribute_tensor(whole.to(self.device), self._mesh, [Shard(0)]))
        return shards

    @torch.no_grad()
    def gather(self, shards: Sequence[DTensor], flat: Tensor | None) -> None:
        """Gather shards in rank 0's `flat` ([numel]), unit by unit; None on the other ranks."""
        for unit, shard in zip(self._fsdp_units, shards, strict=True):
            whole = shard.full_tensor()
            if flat is not None:
                unit.slice(flat).copy_(whole)

    @torch.no_grad()
    def load(self, flat: Tensor | None) -> None:
        """Replace the weights with rank 0's `flat` ([numel]); None on the other ranks."""
        for own, given in zip(self.shards, self.scatter(flat), strict=True):
            own.copy_(given)


class _UnitModule(nn.Module):
    """The weights of one unit in one parameter: whole while gathered, else this rank's shard."""

    def __init__(self, unit: FsdpUnit, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.unit, self._weights = unit, weights
        self.flat = nn.Parameter(torch.empty(unit.numel, device="meta"))

    def update_views(self) -> None:
        """Replace the unit's entries in `weights` with views of the gathered parameter."""
        self._weights.update(self.unit.views(self.flat))


class _LayerModule(_UnitModule):
    """The FSDP module of one layer."""

    def forward(self, layer: Layer, x: Tensor, run_layer: LayerRunner) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            self.update_views()  # inside, because checkpointing runs the layer again
            return layer(x)

        return run_layer(compute, x)


class _RootModule(nn.Module):
    """The FSDP module of everything outside the layers, in fp32 except for the norm.

    The dtype of the final norm is the compute dtype: the decoder casts the layers' inputs to it.
    """

    def __init__(self, units: Sequence[FsdpUnit], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._weights, self._dtype = weights, dtype
        first, *layers, last = units
        self.first, self.last = _UnitModule(first, weights), _UnitModule(last, weights)
        self.layers = nn.ModuleList(_LayerModule(layer, weights) for layer in layers)

    def forward(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        self.first.update_views()
        self.last.update_views()
        self._weights[_NORM] = self._weights[_NORM].to(self._dtype)
        return compute()


class _LazyWeights(Mapping[str, Tensor]):
    """Weights that are copied to a device and dtype each time they are read."""

    def __init__(self, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype) -> None:
        self._weights, self._device, self._dtype = weights, device, dtype

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[name].to(self._device, self._dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)


def _without_columns(sample: Sample) -> Sample:
    """The sample without the columns that another rank reads in the stream."""
    if sample.stream_index is None:
        return sample
    return replace(sample, prompt_ids=(), token_ids=(), logprobs=(), routes=None, loss_mask=None)
