"""AdamW over one flat buffer, and the learning-rate schedule.

Parameters are leaves that view the flat weights, and their gradients view a flat gradient:
autograd sees named matrices, while the norm, the update and a publication are one operation each.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.weights import Layout


class FlatAdamW:
    """AdamW (arXiv 1711.05101) on `flat` ([numel], fp32), changed in place."""

    def __init__(
        self, config: ModelConfig, flat: Tensor, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        layout = Layout(config)
        self.flat = flat
        self.gradient = torch.zeros_like(flat)
        self.weights = {name: view.detach().requires_grad_() for name, view in layout.views(flat).items()}
        for name, view in layout.views(self.gradient).items():
            self.weights[name].grad = view
        self._whole = flat.detach().requires_grad_()
        self._whole.grad = self.gradient
        self._adamw = torch.optim.AdamW([self._whole], betas=betas, weight_decay=weight_decay, fused=True)

    def step(self, lr: float, max_grad_norm: float) -> float:
        """Clip the accumulated gradient, update, clear it; returns its norm before clipping.

        Raises RunError, with the weights unchanged, where the norm is not finite.
        """
        norm = float(self.gradient.norm())
        if not math.isfinite(norm):
            self.gradient.zero_()
            raise RunError(
                f"grad_norm = {norm}: it must be finite; lower the learning rate or look for a broken sample"
            )
        if norm > max_grad_norm:
            self.gradient.mul_(max_grad_norm / norm)
        self._adamw.param_groups[0]["lr"] = lr
        self._adamw.step()
        self.gradient.zero_()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Moments and settings; plain tensors and numbers."""
        return self._adamw.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self._adamw.load_state_dict(state)


def learning_rate(peak: float, step: int, warmup_steps: int, num_steps: int, decay: str) -> float:
    """Rate of the 0-based `step`: linear warm-up to `peak`, then constant or linear to 0 at `num_steps`."""
    if step < warmup_steps:
        return peak * (step + 1) / (warmup_steps + 1)
    if decay == "constant":
        return peak
    return peak * max(0.0, (num_steps - step) / (num_steps - warmup_steps))
