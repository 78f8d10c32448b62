"""A policy whose weights lie in shards on several ranks: PyTorch's FSDP2, `fully_shard`.

What is gathered at once is one layer, or all that is outside of the layers. A unit's weights are pieces of
the flat buffer and not a matrix each: shards are even whatever the shapes, and an expert that got no tokens
on one rank cannot leave the ranks with different gradients to sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dora.model.config import ModelConfig
from dora.model.routing import Route
from dora.model.weights import Layout
from dora.trainer.packing import Packed
from dora.trainer.policy import Policy
from dora.trainer.settings import TrainerSettings

_NORM = "model.norm.weight"
Compute = Callable[[Tensor], Tensor]
Run = Callable[[Compute, Tensor], Tensor]


@dataclass(frozen=True)
class Piece:
    """Neighbours in the flat buffer, from element `start` on."""

    shapes: dict[str, tuple[int, ...]]
    start: int

    @property
    def numel(self) -> int:
        return sum(map(math.prod, self.shapes.values()))

    def of(self, flat: Tensor) -> Tensor:
        """This part [numel] of a flat buffer."""
        return flat[self.start : self.start + self.numel]

    def views(self, part: Tensor) -> dict[str, Tensor]:
        """Name -> view of `part` [numel]; made by one call, whose gradient is one tensor again."""
        parts = part.split([*map(math.prod, self.shapes.values())])
        return {name: own.view(shape) for own, (name, shape) in zip(parts, self.shapes.items(), strict=True)}


def pieces(config: ModelConfig) -> list[Piece]:
    """The flat buffer cut in order: embedding, each layer, norm with head."""
    layout = Layout(config)
    found: dict[str, list[str]] = {}
    for name in layout.shapes:
        first, *rest = name.removeprefix("model.").split(".")
        unit = f"{first}.{rest[0]}" if first == "layers" else "begin" if not found else "end"
        found.setdefault(unit, []).append(name)
    shapes = layout.shapes
    return [Piece({name: shapes[name] for name in own}, layout.offsets[own[0]]) for own in found.values()]


class _Part(nn.Module):
    """A piece of the weights: whole while its unit is gathered, else this rank's shard of it."""

    def __init__(self, piece: Piece, weights: dict[str, Tensor]) -> None:
        super().__init__()
        self.piece, self._weights = piece, weights
        self.flat = nn.Parameter(torch.empty(piece.numel, device="meta"))

    def show(self) -> None:
        """Put views of the whole piece among the weights."""
        self._weights.update(self.piece.views(self.flat))


class _Layer(_Part):
    """A unit: one layer."""

    def forward(self, layer: Compute, x: Tensor, run: Run) -> Tensor:
        def compute(x: Tensor) -> Tensor:
            self.show()  # here, for layers that run once more on the way back
            return layer(x)

        return run(compute, x)


class _Root(nn.Module):
    """A unit: what is outside of the layers. It stays in fp32, but for what makes the layers' inputs."""

    def __init__(self, parts: Sequence[Piece], weights: dict[str, Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self._weights, self._dtype = weights, dtype
        first, *layers, last = parts
        self.first, self.last = _Part(first, weights), _Part(last, weights)
        self.layers = nn.ModuleList(_Layer(layer, weights) for layer in layers)

    def forward(self, compute: Callable[[], tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        self.first.show()
        self.last.show()
        self._weights[_NORM] = self._weights[_NORM].to(self._dtype)
        return compute()


class ShardedPolicy(Policy):
    """A policy of N ranks, each of which has one N-th of the weights, in fp32.

    Every rank must ask it for log-probs as often as every other, whatever the batch.
    """

    def __init__(
        self, config: ModelConfig, settings: TrainerSettings, mesh: DeviceMesh, is_frozen: bool = False
    ) -> None:
        """One that `is_frozen` has no gradient, and keeps nothing gathered."""
        device, self._mesh, self._pieces = torch.device(mesh.device_type), mesh, pieces(config)
        dtype = getattr(torch, settings.dtype)
        gathered = {_NORM: torch.empty(0, device=device)}  # says where weights will be
        self._root = _Root(self._pieces, gathered, dtype)
        self._root.requires_grad_(not is_frozen)
        precision = MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False)
        for layer in self._root.layers:
            fully_shard(layer, mesh=mesh, mp_policy=precision)
        fully_shard(self._root, mesh=mesh, reshard_after_forward=True if is_frozen else None)
        for unit in (*self._root.layers, self._root):  # gradients are sums over the ranks
            cast(FSDPModule, unit).set_gradient_divide_factor(1.0)
            cast(FSDPModule, unit).set_force_sum_reduction_for_comms(True)
        self._root.to_empty(device=device)
        super().__init__(
            config,
            gathered,
            settings.temperature,
            logits_chunk_tokens=settings.logits_chunk_tokens,
            keeps_activations=is_frozen or not settings.activation_checkpointing,
        )
        self._compute, self._run = self._run, self._run_unit
        self._units: Iterator[nn.Module] = iter(())

    @property
    def shards(self) -> list[DTensor]:
        """This rank's, in the order of the flat buffer."""
        parts = (self._root.first, *self._root.layers, self._root.last)
        return [cast(DTensor, part.flat) for part in parts]

    def logprobs(self, batch: Packed, route: Route | None = None) -> tuple[Tensor, Tensor]:
        self._units = iter(self._root.layers)
        found: tuple[Tensor, Tensor] = self._root(partial(super().logprobs, batch, route))
        return found

    def _run_unit(self, layer: Compute, x: Tensor) -> Tensor:
        found: Tensor = next(self._units)(layer, x, self._compute)
        return found

    def scatter(self, flat: Tensor | None) -> list[DTensor]:
        """Shards of rank 0's `flat` ([numel]), piece by piece; the others have None."""
        found = []
        for piece in self._pieces:
            whole = torch.empty(piece.numel) if flat is None else piece.of(flat)
            found.append(distribute_tensor(whole.to(self.device), self._mesh, [Shard(0)]))
        return found

    @torch.no_grad()
    def gather(self, shards: Sequence[DTensor], flat: Tensor | None) -> None:
        """Bring shards together in rank 0's `flat` ([numel]), piece by piece; the others have None."""
        for piece, shard in zip(self._pieces, shards, strict=True):
            whole = shard.full_tensor()
            if flat is not None:
                piece.of(flat).copy_(whole)

    @torch.no_grad()
    def fill(self, flat: Tensor | None) -> None:
        """Take the weights from rank 0's `flat` ([numel])."""
        for own, given in zip(self.shards, self.scatter(flat), strict=True):
            own.copy_(given)
