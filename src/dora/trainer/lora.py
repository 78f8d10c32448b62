"""Low-rank adapters (LoRA, arXiv 2106.09685): matrices W + alpha / rank * B A, of which A and B are trained.

Forward pass, publication and checkpoints use the merged matrices, so trainer and engines have the same
weights bit for bit, and a version with adapters is a version like any other. The gradient of a merged matrix
is accumulated as without adapters; once a step, the chain rule gives those of A and B. Checkpoints also
contain the adapters in PEFT's format.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.optimizer import FlatAdamW

A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class LoraSettings:
    """Rank and alpha of the adapters, and the last part of the names of the modules that have one."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def target_shapes(self, layout: WeightLayout) -> dict[str, tuple[int, ...]]:
        """Name -> shape [out, in] of the matrices with an adapter; convolutions may have the same names."""
        suffixes = tuple(f".{target}.weight" for target in self.targets)
        shapes = layout.shapes.items()
        return {name: shape for name, shape in shapes if name.endswith(suffixes) and len(shape) == 2}

    def adapter_layout(self, layout: WeightLayout) -> WeightLayout:
        """A [rank, in] and B [out, rank] of each of these matrices, under PEFT's names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (num_out, num_in) in self.target_shapes(layout).items():
            shapes[_factor_name(name, A)] = (self.rank, num_in)
            shapes[_factor_name(name, B)] = (num_out, self.rank)
        return WeightLayout(shapes)


class Adapters:
    """The factors A and B of all adapted matrices, [numel of the factors], with their AdamW."""

    def __init__(
        self,
        layout: WeightLayout,
        lora: LoraSettings,
        weight_decay: float,
        betas: tuple[float, float],
        like: Tensor,
    ) -> None:
        """`layout` is the whole model's, `like` has device and dtype of its weights.

        As in PEFT, A is drawn at random (seed 0) and B starts at 0.
        """
        self.target_shapes, self._scale = lora.target_shapes(layout), lora.alpha / lora.rank
        adapters = lora.adapter_layout(layout)
        self.flat = _initial_adapters(adapters).to(like)
        self._factors = adapters.views(self.flat)
        self._adamw = FlatAdamW(adapters, self.flat, weight_decay, betas)
        self._gradients = adapters.views(self._adamw.gradient)

    def set_gradient(self, name: str, gradient: Tensor) -> None:
        """Set the factors' gradients from that of the merged matrix `name` [out, in], by the chain rule."""
        a, b = self._factors_of(name)
        torch.mm(b.T, gradient, out=self._gradients[_factor_name(name, A)]).mul_(self._scale)
        torch.mm(gradient, a.T, out=self._gradients[_factor_name(name, B)]).mul_(self._scale)

    def step(self, lr: float, max_grad_norm: float) -> float:
        """As `FlatAdamW.step`; the norm is that of the adapters' gradient."""
        return self._adamw.step(lr, max_grad_norm)

    def product(self, name: str, rows: slice) -> Tensor:
        """These rows of alpha / rank * B A, which adds to the matrix `name` [out, in]."""
        a, b = self._factors_of(name)
        return (b[rows] @ a).mul_(self._scale)

    def merge(self, name: str, base: Tensor, out: Tensor) -> None:
        """Write base + alpha / rank * B A of a matrix [out, in] to `out`."""
        a, b = self._factors_of(name)
        torch.addmm(base, b, a, alpha=self._scale, out=out)

    def _factors_of(self, name: str) -> tuple[Tensor, Tensor]:
        """A [rank, in] and B [out, rank] of a matrix."""
        return self._factors[_factor_name(name, A)], self._factors[_factor_name(name, B)]

    def state_dict(self) -> dict[str, Any]:
        """Adapters [numel of the factors] and their moments."""
        return {**self._adamw.state_dict(), "adapters": self.flat}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`."""
        self.flat.copy_(state["adapters"])
        self._adamw.load_state_dict(dict(state))


class LoraAdamW:
    """AdamW on adapters of `flat` ([numel], fp32), whose merged matrices are updated in place."""

    def __init__(
        self,
        layout: WeightLayout,
        flat: Tensor,
        lora: LoraSettings,
        weight_decay: float,
        betas: tuple[float, float],
    ) -> None:
        """`flat` are the base weights."""
        self.flat = flat
        self._adapters = Adapters(layout, lora, weight_decay, betas, flat)
        targets = WeightLayout(self._adapters.target_shapes)
        self._merged = {name: view for name, view in layout.views(flat).items() if name in targets.shapes}
        self._base = {name: view.detach().clone() for name, view in self._merged.items()}
        self.gradient = torch.zeros(targets.numel, dtype=flat.dtype, device=flat.device)
        self._gradients = targets.views(self.gradient)
        self.weights = {name: view.detach() for name, view in layout.views(flat).items()}
        for name, gradient in self._gradients.items():
            self.weights[name].requires_grad_().grad = gradient

    def step(self, lr: float, max_grad_norm: float) -> float:
        """As `Adapters.step`."""
        for name, gradient in self._gradients.items():
            self._adapters.set_gradient(name, gradient)
        self.gradient.zero_()
        norm = self._adapters.step(lr, max_grad_norm)
        self._merge()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """See `Adapters.state_dict`."""
        return self._adapters.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`, and merge its adapters into the weights."""
        self._adapters.load_state_dict(state)
        self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        for name, merged in self._merged.items():
            self._adapters.merge(name, self._base[name], merged)


def peft_files(
    config: ModelConfig, lora: LoraSettings, adapters: Tensor, base: str
) -> dict[str, str | bytes]:
    """The two files that PEFT's `PeftModel.from_pretrained` reads; `base` is the path of the base model."""
    adapter_config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": lora.rank,
        "lora_alpha": lora.alpha,
        "target_modules": [*lora.targets],
        "lora_dropout": 0.0,
        "bias": "none",
        "inference_mode": True,
    }
    views = lora.adapter_layout(WeightLayout(config)).views(adapters.detach().cpu())
    tensors = {f"base_model.model.{name}.weight": view.contiguous() for name, view in views.items()}
    return {
        "adapter/adapter_config.json": json.dumps(adapter_config, indent=2) + "\n",
        "adapter/adapter_model.safetensors": save(tensors, metadata={"format": "pt"}),
    }


def _factor_name(matrix: str, factor: str) -> str:
    return f"{matrix.removesuffix('.weight')}.{factor}"


def _initial_adapters(layout: WeightLayout) -> Tensor:
    """A uniform between -1 / sqrt(in) and 1 / sqrt(in), B zero, so the merged weights equal the base's."""
    flat, source = torch.zeros(layout.numel), torch.Generator().manual_seed(0)
    for name, view in layout.views(flat).items():
        if name.endswith(A):
            bound = 1.0 / math.sqrt(view.shape[1])
            view.uniform_(-bound, bound, generator=source)
    return flat
