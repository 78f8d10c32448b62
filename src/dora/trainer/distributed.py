"""FSDP2 training (`fully_shard`) on several ranks: rank 0 sends calls of methods of `ShardedRank` to all.

Calls and samples use a process group of their own, in which followers wait without a time limit while the
trainer is idle. The collectives of the model have a timeout, so a crashed or stuck rank becomes an error of
the others.
"""

from __future__ import annotations

import math
import os
import socket
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.decoder import LayerRunner
from dora.model.moe import Router
from dora.model.weights import WeightLayout, layer_of
from dora.trainer.learner import GradientAccumulator
from dora.trainer.lora import Adapters
from dora.trainer.metrics import StepMetrics
from dora.trainer.optimizer import ShardedAdamW, ShardedGradients, host_copy, local_part
from dora.trainer.packing import PackedBatch, pack
from dora.trainer.policy import NORM, Policy
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.transformers_policy import TransformersPolicy, policy_class

WEIGHTS, MOMENTS = "weights", ("exp_avg", "exp_avg_sq")
_NO_TIMEOUT = timedelta(days=365)  # a trainer may be idle; if rank 0 crashes, the group raises

ReadSamples = Callable[[Sequence[Sample]], Sequence[Sample]]
RankCall = Callable[["ShardedRank"], object]  # a method of `ShardedRank`, or `partial` of one


class RankGroup:
    """The process group of one trainer, as seen from one of its ranks."""

    def __init__(
        self, rendezvous: Path | str, rank: int, num_ranks: int, device: torch.device, timeout_s: float
    ) -> None:
        """Wait for the other ranks. `timeout_s` limits each collective.

        `rendezvous` is a new file for ranks of one machine; for ranks of several it is the host:port at which
        rank 0 listens.
        """
        self.rank, self.num_ranks, self.device = rank, num_ranks, device
        self.spans_nodes = isinstance(rendezvous, str)
        if isinstance(rendezvous, str):
            interface, store = _interface_towards(rendezvous), f"tcp://{rendezvous}"
        else:
            interface, store = "lo", f"file://{rendezvous.absolute()}"
        if sys.platform == "linux" and interface:  # where to listen, unless the user says otherwise
            for library in ("GLOO", "NCCL"):
                os.environ.setdefault(f"{library}_SOCKET_IFNAME", interface)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            init_method=store,
            rank=rank,
            world_size=num_ranks,
            timeout=timedelta(seconds=timeout_s),
        )
        self.mesh = init_device_mesh(device.type, (num_ranks,))
        self.host_mesh = init_device_mesh("cpu", (num_ranks,))
        self._call_group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)
        self.checkpoint_group = dist.new_group(backend="gloo", timeout=_NO_TIMEOUT)  # used by a thread

    def scatter(self, calls: Sequence[RankCall]) -> None:
        """Send one call to each rank, rank 0 included. Rank 0 uses this."""
        dist.scatter_object_list([None], list(calls), src=0, group=self._call_group)

    def receive(self) -> RankCall:
        """Wait for the next call. The followers use this."""
        received: list[Any] = [None]
        dist.scatter_object_list(received, None, src=0, group=self._call_group)
        call: RankCall = received[0]
        return call

    def gather(self, own: StepMetrics) -> list[StepMetrics]:
        """The metrics of all ranks on rank 0; an empty list on the others."""
        gathered: list[Any] = [None] * self.num_ranks if self.rank == 0 else []
        dist.gather_object(own, gathered or None, dst=0, group=self._call_group)
        return gathered


def _interface_towards(address: str) -> str:
    """The network interface that this machine uses to reach host:port; "" if none has the source address."""
    host, _, port = address.rpartition(":")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((host, int(port)))  # sends nothing
        own = probe.getsockname()[0]
    interfaces = psutil.net_if_addrs().items()
    return next((name for name, addresses in interfaces if own in {a.address for a in addresses}), "")


class DistributedLearner:
    """As `LocalLearner`, of several ranks, on rank 0; gathers the weights in `flat` when they are read."""

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
        placeholder = {NORM: torch.empty(0, dtype=self._dtype, device=group.device)}
        self._unsharded = policy_class(config, settings.model)(
            config,
            placeholder,
            settings.temperature,
            logits_chunk_tokens=settings.logits_chunk_tokens,
            torch_compile=settings.torch_compile,
            images=settings.images,
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
        if not self._group.spans_nodes:
            others = [[_without_columns(s) for s in samples] for samples in others]
        sent: list[Sequence[Sample]] = [(), *others]
        sent += [()] * (self.num_ranks - len(sent))
        num_updates, follow = metrics.num_updates, ShardedRank.follow_accumulate
        with self._on_all_ranks([partial(follow, samples=x, num_updates=num_updates) for x in sent]):
            for sums in self._group.gather(self._rank.accumulate(own, num_updates)):
                metrics.merge(sums)

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        follow = partial(ShardedRank.follow_step, divisor=divisor, lr=lr, max_grad_norm=max_grad_norm)
        with self._on_all_ranks(follow, raised_by_all=RunError):
            norm = self._rank.optimizer.step(divisor, lr, max_grad_norm)
        self._is_current = False
        return norm

    def zero_grad(self) -> None:
        if self._failure is None:
            with self._on_all_ranks(ShardedRank.zero_grad):
                self._rank.zero_grad()

    def replace_weights(self, flat: Tensor) -> None:
        self._flat.copy_(flat)
        with self._on_all_ranks(ShardedRank.load_weights):
            self._rank.load_weights(self._flat)
        self._is_current = True

    def snapshot(self) -> Callable[[], None]:
        """Each rank copies its own shards; nothing is gathered."""
        with self._on_all_ranks(ShardedRank.snapshot):
            self._rank.snapshot()
        return self._restore

    def _restore(self) -> None:
        with self._on_all_ranks(ShardedRank.restore):
            self._rank.restore()
        self._is_current = False

    def policy_with_weights(self, flat: Tensor) -> Policy:
        """A policy that rank 0 computes alone; it copies one layer at a time to the device."""
        views = self._layout.views(flat)
        return self._unsharded.with_weights(_LazyWeights(views, self._group.device, self._dtype), None)

    def state_dict(self) -> dict[str, Any]:
        if isinstance(self._rank.optimizer, ShardedLora):
            return self._rank.optimizer.adapters.state_dict()
        state = self._step_state()
        for own in state["state"].values():
            for name in MOMENTS:
                own[name] = torch.empty_like(self._flat)
                self._gather(name, own[name])
        return state

    def save_state(self, folder: Path) -> tuple[dict[str, Any], Future[None] | None]:
        """The state without the moments: ranks copy their shards and write them to the new `folder`.

        The format is torch's of distributed checkpoints; the future is resolved when all are written.
        Ranks of several nodes may not share the folder, so rank 0 gathers their moments.
        """
        if isinstance(self._rank.optimizer, ShardedLora):  # small, and equal on all ranks
            return host_copy(self._rank.optimizer.adapters.state_dict()), None
        if self._group.spans_nodes:
            return self.state_dict(), None
        state = self._step_state()
        if not state["state"]:
            return state, None
        with self._on_all_ranks(partial(ShardedRank.save_moments, folder=folder)):
            saved = self._rank.save_moments(folder)
        return state, saved

    def _step_state(self) -> dict[str, Any]:
        """The state of the optimizer without its moments."""
        num_updates = self._rank.num_updates
        return {"state": {0: {"step": torch.tensor(float(num_updates))}} if num_updates else {}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`, also one of another number of ranks.

        The ranks read the moments from the folder `state["shards"]` if there is one.
        """
        loaded, adapters = state["state"].get(0, {"step": 0}), state if "adapters" in state else None
        num_updates, folder = int(loaded["step"]), state.get("shards")
        call = partial(ShardedRank.load_state, num_updates=num_updates, folder=folder, adapters=adapters)
        with self._on_all_ranks(call):
            call(self._rank, flat=self._flat, moments=loaded)
        self._is_current = adapters is None

    def _gather(self, name: str, flat: Tensor) -> None:
        with self._on_all_ranks(call := partial(ShardedRank.gather, name=name, dtype=flat.dtype)):
            call(self._rank, flat=flat)

    @contextmanager
    def _on_all_ranks(
        self, calls: RankCall | Sequence[RankCall], raised_by_all: type[Exception] | tuple[()] = ()
    ) -> Iterator[None]:
        """Send one call for all ranks, or one for each; rank 0 does its part inside the block.

        After a failure of rank 0 alone the ranks are no longer synchronised, and every later call raises that
        failure. An error of a type in `raised_by_all` leaves the ranks synchronised.
        """
        if self._failure is not None:
            raise RunError(self._failure)
        self._group.scatter(calls if isinstance(calls, Sequence) else [calls] * self.num_ranks)
        try:
            yield
        except raised_by_all:
            raise
        except Exception as error:
            self._failure = f"rank 0 of the trainer failed: {type(error).__name__}: {error}"
            raise


def follow_rank0(group: RankGroup, rank: ShardedRank) -> None:
    """Main loop of every other rank: make the calls that rank 0 sends, until the process is terminated."""
    while True:
        group.receive()(rank)


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
        is_own = policy_class(config, settings.model) is Policy
        make: type[ShardedPolicy] = ShardedPolicy if is_own else ShardedTransformersPolicy
        self._policy = make(config, settings, group.mesh)
        self._policy.load(flat)
        self._reference: ShardedPolicy | None = None
        if settings.computes_reference:
            self._reference = make(config, settings, group.mesh, is_frozen=True)
            self._reference.load(reference)
        self._accumulator = GradientAccumulator(self._policy, settings, self._reference)
        self.optimizer: ShardedAdamW | ShardedLora = (
            ShardedLora(self._policy, config, settings)
            if settings.lora
            else ShardedAdamW(
                self._policy.shards, settings.weight_decay, settings.betas, settings.offload_optimizer
            )
        )
        self._group, self._restore = group, _nothing_saved
        self._writer = ThreadPoolExecutor(max_workers=1)

    @property
    def num_updates(self) -> int:
        """Updates of the weights so far."""
        return 0 if isinstance(self.optimizer, ShardedLora) else self.optimizer.moments.num_updates

    def accumulate(self, samples: Sequence[Sample], num_updates: int) -> StepMetrics:
        """Add the gradient of a micro-batch; returns its metrics.

        `num_updates` counts the updates of the step so far. Without samples, run a dummy forward and backward
        pass, because every rank must join the collectives.
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

    def follow_accumulate(self, samples: Sequence[Sample], num_updates: int) -> None:
        """`accumulate` on a follower. Its samples come without the columns that it can read in the stream."""
        self._group.gather(self.accumulate(self._read_samples(samples), num_updates))

    def follow_step(self, divisor: float, lr: float, max_grad_norm: float) -> None:
        """As `LocalLearner.step`, on a follower: rank 0 raises the same error and reports it."""
        with suppress(RunError):
            self.optimizer.step(divisor, lr, max_grad_norm)

    def zero_grad(self) -> None:
        """Clear the accumulated gradient."""
        self.optimizer.zero_grad()

    def load_weights(self, flat: Tensor | None = None) -> None:
        """Load shards of rank 0's weights `flat` [numel]."""
        self._policy.load(flat)

    def snapshot(self) -> None:
        """Copy this rank's weights and moments to host memory; replaces the last snapshot."""
        self._restore = _nothing_saved  # frees its memory first
        self._restore = self.optimizer.snapshot()

    def restore(self) -> None:
        """Copy weights and moments back from the last snapshot."""
        self._restore()

    def gather(self, name: str, dtype: torch.dtype, flat: Tensor | None = None) -> None:
        """Gather the weights, or one of the optimizer's moments, in rank 0's `flat` ([numel], `dtype`)."""
        shards = self._policy.shards
        if name != WEIGHTS:
            assert isinstance(self.optimizer, ShardedAdamW)
            shards = self._policy.as_shards(getattr(self.optimizer.moments, name))
        self._policy.gather([cast(DTensor, shard.to(dtype)) for shard in shards], flat)

    def save_moments(self, folder: Path) -> Future[None]:
        """Copy this rank's moments to host memory, then write them to a new `folder` in a thread.

        Rank 0 reports an error of any rank.
        """
        assert isinstance(self.optimizer, ShardedAdamW)
        moments = self.optimizer.moments
        copies = {name: [x.to("cpu", copy=True) for x in getattr(moments, name)] for name in MOMENTS}
        group, state = self._group.checkpoint_group, self._host_shards(copies)
        return self._writer.submit(_write_shards, state, folder, group)

    def load_state(
        self,
        num_updates: int,
        folder: Path | None,
        adapters: Mapping[str, Any] | None,
        flat: Tensor | None = None,
        moments: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Load shards of rank 0's weights `flat`, and the moments after `num_updates` updates.

        The moments are read from the checkpoint `folder`; if it is None, they are those of rank 0, [numel]
        each. With `adapters`, a state of `Adapters`, nothing else is loaded.
        """
        if isinstance(self.optimizer, ShardedLora):
            assert adapters is not None
            self.optimizer.load_state_dict(adapters)
            return
        self._policy.load(flat)
        own = self.optimizer.moments
        own.num_updates = num_updates
        for name in MOMENTS:
            shards: list[Tensor] = getattr(own, name)
            if not own.num_updates:
                loaded = [torch.zeros_like(shard) for shard in shards]
            elif folder is None:
                loaded = [*map(local_part, self._policy.scatter(None if moments is None else moments[name]))]
            else:
                loaded = [torch.empty_like(shard, device="cpu") for shard in shards]
                group, parts = self._group.checkpoint_group, self._host_shards({name: loaded})
                load(parts, checkpoint_id=folder, process_group=group)
            for shard, part in zip(shards, loaded, strict=True):
                shard.copy_(part)

    def _host_shards(self, moments: Mapping[str, Sequence[Tensor]]) -> dict[str, Tensor]:
        """Moments in host memory under the names of a checkpoint."""
        shards = {name: self._policy.as_shards(own, self._group.host_mesh) for name, own in moments.items()}
        return {shard_name(name, i): shard for name, own in shards.items() for i, shard in enumerate(own)}


def shard_name(moment: str, unit: int) -> str:
    """The name in a checkpoint of the moment of one `FsdpUnit`."""
    return f"{moment}.{unit}"


def read_moments(folder: Path, config: ModelConfig) -> dict[str, Tensor]:
    """The moments [numel] that ranks wrote to `folder`, whatever their number."""
    units, numel = fsdp_units(config), WeightLayout(config).numel
    moments = {name: torch.empty(numel) for name in MOMENTS}
    parts = {
        shard_name(name, i): unit.slice(flat)
        for name, flat in moments.items()
        for i, unit in enumerate(units)
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that a single process reads them
        load(parts, checkpoint_id=folder, no_dist=True)
    return moments


def _write_shards(state: dict[str, Tensor], folder: Path, group: dist.ProcessGroup) -> None:
    try:
        save(state, checkpoint_id=folder, process_group=group)
    except CheckpointException as error:  # has the error of every rank that failed
        raise next(iter(error.failures.values()))[0] from error


def _nothing_saved() -> None:
    raise RunError("there is no snapshot to restore; take one first")


class ShardedLora(ShardedGradients):
    """AdamW on adapters of sharded weights, whose merged matrices are updated in place.

    Every rank holds all adapters and updates them alike; weights, gradients and the base weights are shards.
    """

    def __init__(self, policy: ShardedPolicy, config: ModelConfig, settings: TrainerSettings) -> None:
        """The shards of `policy` are the base weights."""
        super().__init__(policy.shards)
        assert settings.lora is not None
        self._base = [local_part(shard).clone() for shard in policy.shards]
        layout, decay = WeightLayout(config), settings.weight_decay
        self._offsets = layout.offsets
        self.adapters = Adapters(layout, settings.lora, decay, settings.betas, self._base[0])
        self._policy = policy

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        """As `ShardedAdamW.step`; the norm is that of the adapters' gradient. Gathers one unit at a time."""
        for unit, shard in zip(self._policy.units, self.shards, strict=True):
            if not (targets := self.adapters.target_shapes.keys() & unit.shapes.keys()):
                continue
            assert shard.grad is not None
            views = unit.views(cast(DTensor, shard.grad).full_tensor().div_(divisor))
            for name in targets:
                self.adapters.set_gradient(name, views[name])
        self.zero_grad()
        norm = self.adapters.step(lr, max_grad_norm)
        self._merge()
        return norm

    def snapshot(self) -> Callable[[], None]:
        """Copy weights, adapters and their moments to host memory; returns the function that restores them.

        Weights are not merged again: those of a resumed run may have been merged with other rounding.
        """
        state, saved = host_copy(self.adapters.state_dict()), host_copy([*map(local_part, self.shards)])

        def restore() -> None:
            self.zero_grad()
            self.adapters.load_state_dict(state)
            for shard, copy in zip(self.shards, saved, strict=True):
                local_part(shard).copy_(copy)

        return restore

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a state of `Adapters`, and merge it into the base weights."""
        self.adapters.load_state_dict(state)
        self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        """Write base + alpha / rank * B A to this rank's shards, a matrix at a time."""
        for shard, base, start in zip(self.shards, self._base, self._policy.shard_starts, strict=True):
            local = local_part(shard).copy_(base)
            for name, (num_rows, num_columns) in self.adapters.target_shapes.items():
                offset = self._offsets[name]
                first = max(offset, start)
                last = min(offset + num_rows * num_columns, start + local.numel())
                if first >= last:
                    continue
                rows = slice((first - offset) // num_columns, -(-(last - offset) // num_columns))
                begin = offset + rows.start * num_columns  # of these rows in the flat buffer
                added = self.adapters.product(name, rows).view(-1)[first - begin : last - begin]
                local[first - start : last - start] += added


@dataclass(frozen=True)
class FsdpUnit:
    """A contiguous part of the flat buffer that is gathered at once; `start` is its first element.

    `layer` is the name of a layer, or empty for what is outside the layers.
    """

    layer: str
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
    units = []
    for layer, names in groupby(layout.shapes, layer_of):
        shapes = {name: layout.shapes[name] for name in names}
        units.append(FsdpUnit(layer, shapes, layout.offsets[next(iter(shapes))]))
    return units


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
        device, self._mesh, self.units = torch.device(mesh.device_type), mesh, fsdp_units(config)
        dtype = getattr(torch, settings.dtype)
        gathered = {NORM: torch.empty(0, dtype=dtype, device=device)}  # a placeholder
        self._root = _RootModule(self.units, gathered, dtype)
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
            torch_compile=settings.torch_compile,
            activation_checkpointing=not is_frozen and settings.activation_checkpointing,
            images=settings.images,
        )
        self._run_gathered, self._run_layer = self._run_layer, self._run_layer_module

    @property
    def shards(self) -> list[DTensor]:
        """This rank's shards, in the order of the flat buffer."""
        return [cast(DTensor, module.flat) for module in self._root.units]

    @property
    def shard_starts(self) -> list[int]:
        """Where this rank's shards start in the flat buffer."""
        rank, num_ranks = self._mesh.get_local_rank(), self._mesh.size()
        return [unit.start + min(unit.numel, rank * -(-unit.numel // num_ranks)) for unit in self.units]

    def as_shards(self, parts: Sequence[Tensor], mesh: DeviceMesh | None = None) -> list[DTensor]:
        """This rank's `parts` of flat buffers as shards of the units; by default on the weights' mesh."""
        mesh = mesh or self._mesh
        return [
            DTensor.from_local(
                part.to(mesh.device_type),
                mesh,
                [Shard(0)],
                run_check=False,
                shape=torch.Size((unit.numel,)),
                stride=(1,),
            )
            for unit, part in zip(self.units, parts, strict=True)
        ]

    def logprobs(self, batch: PackedBatch, router: Router | None = None) -> tuple[Tensor, Tensor]:
        result: tuple[Tensor, Tensor] = self._root(partial(super().logprobs, batch, router))
        return result

    def _run_layer_module(self, number: int, layer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return self._root.layers[number](self._run_gathered, number, layer, *args, **kwargs)

    def scatter(self, flat: Tensor | None) -> list[DTensor]:
        """Shards of rank 0's `flat` ([numel]), unit by unit; None on the other ranks."""
        shards = []
        for unit in self.units:
            whole = torch.empty(unit.numel) if flat is None else unit.slice(flat)
            shards.append(distribute_tensor(whole.to(self.device), self._mesh, [Shard(0)]))
        return shards

    @torch.no_grad()
    def gather(self, shards: Sequence[DTensor], flat: Tensor | None) -> None:
        """Gather shards in rank 0's `flat` ([numel]), unit by unit; None on the other ranks."""
        for unit, shard in zip(self.units, shards, strict=True):
            whole = shard.full_tensor()
            if flat is not None:
                unit.slice(flat).copy_(whole)

    @torch.no_grad()
    def load(self, flat: Tensor | None) -> None:
        """Replace the weights with rank 0's `flat` ([numel]); None on the other ranks."""
        for own, given in zip(self.shards, self.scatter(flat), strict=True):
            own.copy_(given)


class ShardedTransformersPolicy(ShardedPolicy, TransformersPolicy):
    """A sharded policy that transformers computes."""

    is_sharded = True

    def hidden_states(self, batch: PackedBatch, router: Router | None = None) -> Tensor:
        """As `TransformersPolicy.hidden_states`; a block gathers all layers, so ranks have equally many."""
        num_blocks = torch.tensor(len(batch.blocks), device=self.device)
        dist.all_reduce(num_blocks, dist.ReduceOp.MAX, self._mesh.get_group())
        hidden = super().hidden_states(batch, router)
        for _ in range(int(num_blocks) - len(batch.blocks)):
            unused = self._model.hidden_states(batch.input_ids[None, :1], run_layer=self._run_layer)
            hidden = hidden + 0.0 * unused.sum()
        return hidden


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

    def forward(
        self, run_layer: LayerRunner, number: int, layer: Callable[..., Any], *args: Any, **kwargs: Any
    ) -> Any:
        def compute(*args: Any, **kwargs: Any) -> Any:
            self.update_views()  # inside, because checkpointing runs the layer again
            return layer(*args, **kwargs)

        return run_layer(number, compute, *args, **kwargs)


class _RootModule(nn.Module):
    """The FSDP module of everything outside the layers, in fp32 except for the norm.

    The dtype of the final norm is the compute dtype: the decoder casts the layers' inputs to it.
    """

    def __init__(self, units: Sequence[FsdpUnit], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._weights, self._dtype = weights, dtype
        self.units = nn.ModuleList(
            (_LayerModule if unit.layer else _UnitModule)(unit, weights) for unit in units
        )
        self.layers = [module for module in self.units if isinstance(module, _LayerModule)]

    def forward(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        for module in self.units:
            if not isinstance(module, _LayerModule):
                cast(_UnitModule, module).update_views()
        self._weights[NORM] = self._weights[NORM].to(self._dtype)
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
    if sample.stream_row is None:
        return sample
    return replace(sample, prompt_ids=(), token_ids=(), logprobs=(), routes=None, loss_mask=None)
