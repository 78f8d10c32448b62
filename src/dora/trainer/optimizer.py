"""AdamW over one flat buffer or over a rank's shards of it, and rollback.

Parameters are views of one flat weight buffer, and their gradients are views of one flat gradient. Autograd
sees named matrices; gradient norm, update and publication are one operation each.

Weights and accumulated gradients stay in fp32 even if a model computes in bf16: an AdamW step changes most
weights by less than bf16 resolves, and a bf16 sum loses the gradients of many micro-batches (mixed precision
training, arXiv 1710.03740). bf16 has the range of fp32, so no loss scale is needed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from dora.errors import RunError
from dora.model.weights import WeightLayout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NORM_CHUNK = (2**16, 2**28)  # elements, on a CPU and on a GPU
_OFFLOAD_CHUNK = 2**26  # elements: 256 MB of each moment
_FP32_GRADIENTS = ("model.embed_tokens.weight", "lm_head.weight")  # sums over tokens, or chunks of them


class Moments:
    """AdamW's moments (arXiv 1711.05101) of flat tensors, which `update` changes in place.

    Offloaded moments are in host memory. An update copies them to the device of the weights and back, a
    chunk at a time, and computes there, so both forms give the same bits.
    """

    def __init__(
        self,
        weights: Sequence[Tensor],
        weight_decay: float,
        betas: tuple[float, float],
        is_offloaded: bool = False,
        chunk: int = _OFFLOAD_CHUNK,
    ) -> None:
        """`weights` are of one device, [numel] each. At most `chunk` numbers of a moment are on it."""
        self._weight_decay, self._betas, self._chunk = weight_decay, betas, chunk
        self.is_offloaded, self.num_updates = is_offloaded, 0
        make = _host_zeros if is_offloaded else torch.zeros_like
        self.exp_avg, self.exp_avg_sq = ([*map(make, weights)] for _ in range(2))

    @torch.no_grad()
    def update(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], lr: float) -> None:
        """One step of AdamW at the rate `lr`. Without memory for it, nothing changes."""
        if self.is_offloaded:
            self._compute_in_chunks(weights, gradients, lr)
        else:
            self._compute(weights, gradients, self.exp_avg, self.exp_avg_sq, lr)
        self.num_updates += 1

    def _compute_in_chunks(self, weights: Sequence[Tensor], gradients: Sequence[Tensor], lr: float) -> None:
        size = min(self._chunk, max(map(len, weights)))
        buffers = [weights[0].new_empty(size) for _ in range(2)]  # before the first weight changes
        for whole in zip(weights, gradients, self.exp_avg, self.exp_avg_sq, strict=True):
            for weight, gradient, *saved in zip(*(x.split(self._chunk) for x in whole), strict=True):
                first, second = (buffer[: len(weight)] for buffer in buffers)
                first.copy_(saved[0], non_blocking=True)
                second.copy_(saved[1], non_blocking=True)
                self._compute([weight], [gradient], [first], [second], lr)
                for host, moment in zip(saved, (first, second), strict=True):
                    host.copy_(moment, non_blocking=True)
        if weights[0].is_cuda:
            torch.cuda.current_stream(weights[0].device).synchronize()  # the host may read the moments now

    def _compute(
        self,
        weights: Sequence[Tensor],
        gradients: Sequence[Tensor],
        exp_avg: Sequence[Tensor],
        exp_avg_sq: Sequence[Tensor],
        lr: float,
    ) -> None:
        """Call torch's function: its AdamW class does no more, and imports torch's compiler for a second."""
        beta1, beta2 = self._betas
        steps = [torch.full((), float(self.num_updates), device=x.device) for x in weights]  # so far
        adamw(
            [*weights],
            [*gradients],
            [*exp_avg],
            [*exp_avg_sq],
            [],
            steps,
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=self._weight_decay,
            eps=1e-8,
            maximize=False,
        )


def _host_zeros(like: Tensor) -> Tensor:
    """Zeros in host memory, which a GPU copies from and to directly."""
    return torch.zeros(like.shape, dtype=like.dtype, pin_memory=like.is_cuda)


class FlatAdamW:
    """AdamW on `flat` ([numel], fp32), updated in place."""

    def __init__(
        self,
        layout: WeightLayout,
        flat: Tensor,
        weight_decay: float,
        betas: tuple[float, float],
        is_offloaded: bool = False,
    ) -> None:
        """`is_offloaded`: see `Moments`."""
        self.flat = flat
        self.gradient = torch.zeros_like(flat)
        self.weights = {name: view.detach().requires_grad_() for name, view in layout.views(flat).items()}
        for name, view in layout.views(self.gradient).items():
            self.weights[name].grad = view
        self._moments = Moments([flat], weight_decay, betas, is_offloaded)

    def step(self, lr: float, max_grad_norm: float) -> float:
        """Clip the accumulated gradient, update the weights, clear the gradient.

        Returns the gradient's norm before clipping. Raises RunError, with the weights unchanged, if the norm
        is not finite.
        """
        norm = math.sqrt(float(_sum_of_squares(self.gradient)))
        try:
            if (scale := _clip_factor(norm, max_grad_norm)) != 1.0:
                self.gradient.mul_(scale)
        except RunError:
            self.gradient.zero_()
            raise
        self._moments.update([self.flat], [self.gradient], lr)
        self.gradient.zero_()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments in the layout of torch.optim.AdamW; empty before the first step."""
        moments = self._moments
        if not moments.num_updates:
            return {"state": {}}
        step = torch.tensor(float(moments.num_updates))
        return {
            "state": {0: {"exp_avg": moments.exp_avg[0], "exp_avg_sq": moments.exp_avg_sq[0], "step": step}}
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        moments, loaded = self._moments, state["state"].get(0)
        moments.num_updates = int(loaded["step"]) if loaded else 0
        for name, own in (("exp_avg", moments.exp_avg[0]), ("exp_avg_sq", moments.exp_avg_sq[0])):
            own.copy_(loaded[name]) if loaded else own.zero_()


class Bf16Weights:
    """bf16 copies of `flat` ([numel], fp32) by name, whose gradients are added to the fp32 leaves.

    Embedding and head are the fp32 leaves themselves, because autograd sums their gradients one by one over
    tokens or chunks of tokens. A decoder converts what it reads from them.
    """

    def __init__(self, layout: WeightLayout, flat: Tensor, leaves: Mapping[str, Tensor]) -> None:
        """`leaves` are the fp32 parameters, views of `flat`, with allocated gradients."""
        self._flat, self._copy = flat, flat.detach().to(torch.bfloat16)
        views = layout.views(self._copy)
        self.weights = {
            name: leaf if name in _FP32_GRADIENTS else _bf16_leaf(leaf, views[name])
            for name, leaf in leaves.items()
        }

    def refresh(self) -> None:
        """Copy `flat` again after it changed."""
        self._copy.copy_(self._flat)


def _bf16_leaf(leaf: Tensor, view: Tensor) -> Tensor:
    copy = view.detach().requires_grad_(leaf.requires_grad)
    if not leaf.requires_grad:
        return copy

    def add_to_fp32(copy: Tensor) -> None:
        gradient, copy.grad = copy.grad, None  # first: after an error nothing may be left for the next pass
        assert gradient is not None
        assert leaf.grad is not None
        leaf.grad += gradient

    copy.register_post_accumulate_grad_hook(add_to_fp32)
    return copy


class ShardedGradients:
    """The gradients of this rank's shards, which have the same sharding.

    Autograd leaves in each of them a sum over the ranks, times the divisor of the batch.
    """

    def __init__(self, shards: Sequence[DTensor]) -> None:
        self.shards = shards
        for shard in shards:
            shard.grad = torch.zeros_like(shard)

    def zero_grad(self) -> None:
        """Clear the accumulated gradient."""
        for shard in self.shards:
            assert shard.grad is not None
            shard.grad.zero_()


class ShardedAdamW(ShardedGradients):
    """AdamW on this rank's shards, updated in place; moments have the same sharding."""

    def __init__(
        self,
        shards: Sequence[DTensor],
        weight_decay: float,
        betas: tuple[float, float],
        is_offloaded: bool = False,
    ) -> None:
        """`is_offloaded`: see `Moments`."""
        super().__init__(shards)
        self.moments = Moments([*map(local_part, shards)], weight_decay, betas, is_offloaded)

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        """As `FlatAdamW.step`, with the gradient divided by `divisor`; the result is equal on all ranks."""
        gradients = [local_part(shard.grad) for shard in self.shards]  # type: ignore[arg-type]
        squares = torch.stack([_sum_of_squares(gradient) for gradient in gradients]).sum()
        dist.all_reduce(squares)
        norm = math.sqrt(float(squares)) / divisor
        try:
            torch._foreach_mul_(gradients, _clip_factor(norm, max_grad_norm) / divisor)
            self.moments.update([*map(local_part, self.shards)], gradients, lr)
        finally:
            self.zero_grad()
        return norm

    def snapshot(self) -> Callable[[], None]:
        """Copy this rank's weights and moments to host memory; returns the function that restores them."""
        num_updates = self.moments.num_updates
        saved = [x.to("cpu", copy=True) for x in self._tensors()]

        def restore() -> None:
            self.moments.num_updates = num_updates
            for own, copy in zip(self._tensors(), saved, strict=True):
                own.copy_(copy)
            self.zero_grad()

        return restore

    def _tensors(self) -> list[Tensor]:
        return [*map(local_part, self.shards), *self.moments.exp_avg, *self.moments.exp_avg_sq]


def local_part(tensor: DTensor | Tensor) -> Tensor:
    """This rank's part of a sharded tensor."""
    return cast("DTensor", tensor).to_local().detach()


def _sum_of_squares(flat: Tensor) -> Tensor:
    """Sum of squares of [numel] numbers in fp64.

    A CPU adds numbers one by one; in fp32 the sum over 60 million of them is 0.5 % too small. A GPU adds
    pairs, and each chunk takes time.
    """
    norms: tuple[Tensor, ...] = torch._foreach_norm(flat.split(_NORM_CHUNK[flat.is_cuda]))
    return torch.stack(norms).double().square().sum()


def _clip_factor(norm: float, max_norm: float) -> float:
    """The factor that clips a gradient of this norm. Raises RunError if the norm is not finite."""
    if not math.isfinite(norm):
        raise RunError(
            f"grad_norm = {norm}: it must be finite; lower the learning rate, or look for a broken sample or "
            "policy loss"
        )
    return max_norm / norm if norm > max_norm else 1.0


@contextmanager
def rollback_on_error(*snapshots: Callable[[], Callable[[], None]]) -> Iterator[None]:
    """Restore states if the block raises.

    Each of `snapshots` copies a state to host memory, and returns the function that restores it.
    """
    restores = [snapshot() for snapshot in snapshots]
    try:
        yield
    except BaseException:
        for restore in restores:
            restore()
        raise


def host_copy(value: Any) -> Any:
    """Nested dictionaries and lists with copies of their tensors in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: host_copy(item) for key, item in value.items()}
    return [host_copy(item) for item in value] if isinstance(value, list) else value
