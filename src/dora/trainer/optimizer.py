"""AdamW over one flat buffer, or over one rank's shards of it; and the learning-rate schedule.

In one buffer, parameters are leaves that view the flat weights, and their gradients view a flat gradient:
autograd sees named matrices, while the norm, the update and a publication are one operation each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from dora.errors import RunError
from dora.model.weights import Layout

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

_PIECE = 2**16  # elements


class FlatAdamW:
    """AdamW (arXiv 1711.05101) on `flat` ([numel], fp32), changed in place."""

    def __init__(self, layout: Layout, flat: Tensor, weight_decay: float, betas: tuple[float, float]) -> None:
        self.flat = flat
        self.gradient = torch.zeros_like(flat)
        self.weights = {name: view.detach().requires_grad_() for name, view in layout.views(flat).items()}
        for name, view in layout.views(self.gradient).items():
            self.weights[name].grad = view
        self._weight_decay, self._betas = weight_decay, betas
        self._state = {name: torch.zeros_like(flat) for name in ("exp_avg", "exp_avg_sq")}
        self._state["step"] = torch.zeros((), device=flat.device)

    def step(self, lr: float, max_grad_norm: float) -> float:
        """Clip the accumulated gradient, update, clear it; returns its norm before clipping.

        Raises RunError, with the weights unchanged, where the norm is not finite.
        """
        norm = math.sqrt(float(_sum_of_squares(self.gradient)))
        try:
            if (scale := _scale(norm, max_grad_norm)) != 1.0:
                self.gradient.mul_(scale)
        except RunError:
            self.gradient.zero_()
            raise
        self._update(lr)
        self.gradient.zero_()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments, as torch.optim.AdamW has them; none before the first step."""
        return {"state": {0: dict(self._state)} if self._state["step"] else {}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        found = state["state"].get(0)
        for name, value in self._state.items():
            value.copy_(found[name]) if found else value.zero_()

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """By the function: the class does no more, but it imports torch's compiler, which takes a second."""
        of_weights, of_squares, step = (self._state[name] for name in ("exp_avg", "exp_avg_sq", "step"))
        beta1, beta2 = self._betas
        adamw(
            [self.flat],
            [self.gradient],
            [of_weights],
            [of_squares],
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


class ShardedAdamW:
    """AdamW on this rank's shards, changed in place; gradients and moments are sharded as they are.

    Gradients are where autograd puts them: sums over the ranks, times what the batch amounts to.
    """

    def __init__(self, shards: Sequence[DTensor], weight_decay: float, betas: tuple[float, float]) -> None:
        self.shards = shards
        for shard in shards:
            shard.grad = torch.zeros_like(shard)
        self._adamw = torch.optim.AdamW(shards, betas=betas, weight_decay=weight_decay, fused=True)

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        """As that of one buffer, with the gradient divided by `divisor`; the same on all ranks."""
        gradients = [shard.grad.to_local() for shard in self.shards]  # type: ignore[union-attr]
        squares = torch.stack([_sum_of_squares(gradient) for gradient in gradients]).sum()
        dist.all_reduce(squares)
        norm = math.sqrt(float(squares)) / divisor
        try:
            torch._foreach_mul_(gradients, _scale(norm, max_grad_norm) / divisor)
            self._adamw.param_groups[0]["lr"] = lr
            self._adamw.step()
        finally:
            self.forget()
        return norm

    def forget(self) -> None:
        """Begin the gradient anew."""
        for shard in self.shards:
            assert shard.grad is not None
            shard.grad.zero_()

    @property
    def num_updates(self) -> int:
        """How often the weights were updated; until then there are no moments."""
        return max((int(state["step"]) for state in self._adamw.state.values()), default=0)

    @torch.no_grad()
    def kept(self) -> list[dict[str, Tensor]]:
        """A copy of this rank's weights and moments in the host's memory, shard by shard."""
        return [
            {name: _own(x).to("cpu", copy=True) for name, x in self._parts(shard).items()}
            for shard in self.shards
        ]

    @torch.no_grad()
    def put_back(self, kept: Sequence[Mapping[str, Tensor]]) -> None:
        """Weights and moments as they were when they were `kept`, and no gradient."""
        for shard, was in zip(self.shards, kept, strict=True):
            if len(was) == 1:  # before the first update
                self._adamw.state.pop(shard, None)
            for name, now in self._parts(shard).items():
                _own(now).copy_(was[name])
        self.forget()

    def _parts(self, shard: DTensor) -> dict[str, Tensor]:
        return {"weights": shard, **self._adamw.state.get(shard, {})}

    def moments(self, name: str) -> list[DTensor]:
        """The shards of one moment, "exp_avg" or "exp_avg_sq"."""
        return [self._adamw.state[shard][name] for shard in self.shards]

    def resume(self, num_updates: int, moments: Mapping[str, Sequence[DTensor]]) -> None:
        """Go on with these moments, which are shards as the weights are; there are none before an update."""
        self._adamw.state.clear()
        for i, shard in enumerate(self.shards if moments else ()):
            step = torch.tensor(float(num_updates), device=shard.device)
            self._adamw.state[shard] = {"step": step, **{name: own[i] for name, own in moments.items()}}


def _own(tensor: Tensor) -> Tensor:
    """What this rank has of it."""
    found: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found.detach()


def _sum_of_squares(flat: Tensor) -> Tensor:
    """Of [numel] numbers, in fp64: a CPU sums one by one, and in fp32 that lacks 0.5 % of 60 million."""
    norms: tuple[Tensor, ...] = torch._foreach_norm(flat.split(_PIECE))
    return torch.stack(norms).double().square().sum()


def _scale(norm: float, max_norm: float) -> float:
    """What a gradient of this norm is multiplied with. Raises RunError where the norm is not finite."""
    if not math.isfinite(norm):
        raise RunError(
            f"grad_norm = {norm}: it must be finite; lower the learning rate or look for a broken sample"
        )
    return max_norm / norm if norm > max_norm else 1.0


def learning_rate(peak: float, step: int, warmup_steps: int, num_steps: int, decay: str) -> float:
    """Rate of the 0-based `step`: linear warm-up to `peak`, then constant or linear to 0 at `num_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if decay == "constant":
        return peak
    return peak * max(0.0, (num_steps - step) / (num_steps - warmup_steps))
