"""AdamW over one flat buffer or over a rank's shards of it, the learning-rate schedule, and rollback.

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
from typing import TYPE_CHECKING, Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from dora.errors import RunError
from dora.model.weights import WeightLayout
from dora.trainer.recipe import EarlierSchedule

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_NORM_CHUNK = (2**16, 2**28)  # elements, on a CPU and on a GPU
_FP32_GRADIENTS = ("model.embed_tokens.weight", "lm_head.weight")  # sums over tokens, or chunks of them


class FlatAdamW:
    """AdamW (arXiv 1711.05101) on `flat` ([numel], fp32), updated in place."""

    def __init__(
        self, layout: WeightLayout, flat: Tensor, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        self.flat = flat
        self.gradient = torch.zeros_like(flat)
        self.weights = {name: view.detach().requires_grad_() for name, view in layout.views(flat).items()}
        for name, view in layout.views(self.gradient).items():
            self.weights[name].grad = view
        self._weight_decay, self._betas = weight_decay, betas
        self._state = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
        self._state["step"] = torch.zeros((), device=flat.device)

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
        self._update(lr)
        self.gradient.zero_()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments in the layout of torch.optim.AdamW; empty before the first step."""
        return {"state": {0: dict(self._state)} if self._state["step"] else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`."""
        loaded = state["state"].get(0)
        for name, value in self._state.items():
            value.copy_(loaded[name]) if loaded else value.zero_()

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """Call torch's function: its AdamW class does no more, and imports torch's compiler for a second."""
        exp_avg, exp_avg_sq, step = (self._state[name] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = self._betas
        adamw(
            [self.flat],
            [self.gradient],
            [exp_avg],
            [exp_avg_sq],
            [],
            [step],
            fused=True,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=lr,
            weight_decay=self._weight_decay,
            eps=1e-8,
            maximize=False,
        )


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
        assert copy.grad is not None
        assert leaf.grad is not None
        leaf.grad += copy.grad
        copy.grad = None

    copy.register_post_accumulate_grad_hook(add_to_fp32)
    return copy


class ShardedAdamW:
    """AdamW on this rank's shards, updated in place; gradients and moments have the same sharding.

    Autograd leaves in each shard's gradient a sum over the ranks, times the divisor of the batch.
    """

    def __init__(self, shards: Sequence[DTensor], weight_decay: float, betas: tuple[float, float]) -> None:
        self.shards = shards
        for shard in shards:
            shard.grad = torch.zeros_like(shard)
        self._adamw = torch.optim.AdamW(shards, betas=betas, weight_decay=weight_decay, fused=True)

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        """As `FlatAdamW.step`, with the gradient divided by `divisor`; the result is equal on all ranks."""
        gradients = [shard.grad.to_local() for shard in self.shards]  # type: ignore[union-attr]
        squares = torch.stack([_sum_of_squares(gradient) for gradient in gradients]).sum()
        dist.all_reduce(squares)
        norm = math.sqrt(float(squares)) / divisor
        try:
            torch._foreach_mul_(gradients, _clip_factor(norm, max_grad_norm) / divisor)
            self._adamw.param_groups[0]["lr"] = lr
            self._adamw.step()
        finally:
            self.zero_grad()
        return norm

    def zero_grad(self) -> None:
        """Clear the accumulated gradient."""
        for shard in self.shards:
            assert shard.grad is not None
            shard.grad.zero_()

    @property
    def num_updates(self) -> int:
        """Updates of the weights so far; before the first one there are no moments."""
        return max((int(state["step"]) for state in self._adamw.state.values()), default=0)

    @torch.no_grad()
    def snapshot(self) -> list[dict[str, Tensor]]:
        """Copy this rank's weights and moments to host memory, shard by shard."""
        return [
            {name: _local(x).to("cpu", copy=True) for name, x in self._tensors(shard).items()}
            for shard in self.shards
        ]

    @torch.no_grad()
    def restore(self, snapshot: Sequence[Mapping[str, Tensor]]) -> None:
        """Copy weights and moments back from a `snapshot`, and clear the gradient."""
        for shard, saved in zip(self.shards, snapshot, strict=True):
            if len(saved) == 1:  # before the first update
                self._adamw.state.pop(shard, None)
            for name, tensor in self._tensors(shard).items():
                _local(tensor).copy_(saved[name])
        self.zero_grad()

    def _tensors(self, shard: DTensor) -> dict[str, Tensor]:
        return {"weights": shard, **self._adamw.state.get(shard, {})}

    def moments(self, name: str) -> list[DTensor]:
        """The shards of one moment, "exp_avg" or "exp_avg_sq"."""
        return [self._adamw.state[shard][name] for shard in self.shards]

    def load_moments(self, num_updates: int, moments: Mapping[str, Sequence[DTensor]]) -> None:
        """Replace the moments, which have the sharding of the weights; there are none before an update."""
        self._adamw.state.clear()
        for i, shard in enumerate(self.shards if moments else ()):
            step = torch.tensor(float(num_updates), device=shard.device)
            self._adamw.state[shard] = {"step": step, **{name: own[i] for name, own in moments.items()}}


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor."""
    local: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return local.detach()


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
            f"grad_norm = {norm}: it must be finite; lower the learning rate or look for a broken sample"
        )
    return max_norm / norm if norm > max_norm else 1.0


def learning_rate(
    peak: float,
    step: int,
    warmup_steps: int,
    num_steps: int,
    decay: str,
    earlier: Sequence[EarlierSchedule] = (),
) -> float:
    """Rate of the 0-based `step`: linear warm-up to `peak`, then constant or linear to 0 at `num_steps`.

    Steps of an `earlier` schedule of the same run have the rate of the first one that covers them.
    """
    covering = (schedule for schedule in earlier if step < schedule.until_step)
    _, num_steps, decay = next(covering, (None, num_steps, decay))
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if decay == "constant":
        return peak
    return peak * max(0.0, (num_steps - step) / (num_steps - warmup_steps))


class Snapshottable(Protocol):
    """Weights with their optimizer, in one process or in several."""

    def snapshot(self) -> Callable[[], None]:
        """Copy weights and moments to host memory; returns the function that restores them."""


class LocalState(Protocol):
    """Weights with their optimizer in one process."""

    @property
    def flat(self) -> Tensor:
        """The weights [numel], updated in place."""

    def zero_grad(self) -> None:
        """Clear the accumulated gradient."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state."""

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`; the weights may have changed, too."""


@contextmanager
def rollback_on_error(*states: Snapshottable) -> Iterator[None]:
    """Restore weights and moments if the block raises. Snapshots are in host memory."""
    restores = [state.snapshot() for state in states]
    try:
        yield
    except BaseException:
        for restore in restores:
            restore()
        raise


def snapshot_local_state(state: LocalState) -> Callable[[], None]:
    """`Snapshottable.snapshot` for the state of one process."""
    flat, optimizer = state.flat.detach().to("cpu", copy=True), _host_copy(state.state_dict())

    def restore() -> None:
        state.flat.copy_(flat)
        state.zero_grad()
        state.load_state_dict(optimizer)

    return restore


def _host_copy(value: Any) -> Any:
    """Nested dictionaries and lists with copies of their tensors in host memory."""
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, dict):
        return {key: _host_copy(item) for key, item in value.items()}
    return [_host_copy(item) for item in value] if isinstance(value, list) else value
