"""Low-rank adapters (LoRA, arXiv 2106.09685): matrices W + alpha / rank * B A, of which A and B are trained.

What is computed with, published and saved are the merged matrices, so trainer and engines have the same
weights to the last bit, and a version is a version like any other. The gradient of a merged matrix is
summed as without adapters; by the chain rule that of A and B follows from the sum, once a step. Adapters
are also written as PEFT reads them.
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
from dora.model.weights import Layout
from dora.trainer.optimizer import FlatAdamW

A, B = "lora_A", "lora_B"


@dataclass(frozen=True)
class Lora:
    """Which matrices have adapters, by the last part of their module's name, and of which rank."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    def adapted(self, layout: Layout) -> dict[str, tuple[int, ...]]:
        """Name -> shape [out, in] of the matrices with an adapter."""
        ends = tuple(f".{target}.weight" for target in self.targets)
        return {name: shape for name, shape in layout.shapes.items() if name.endswith(ends)}

    def factors(self, layout: Layout) -> Matrices:
        """A [rank, in] and B [out, rank] of each of them, by PEFT's names."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, (num_out, num_in) in self.adapted(layout).items():
            shapes[_of(name, A)], shapes[_of(name, B)] = (self.rank, num_in), (num_out, self.rank)
        return Matrices(shapes)


class Matrices(Layout):
    """Where some matrices lie in a flat buffer of their own."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]]) -> None:
        self.shapes, self.offsets, self.numel = dict(shapes), {}, 0
        for name, shape in shapes.items():
            self.offsets[name] = self.numel
            self.numel += math.prod(shape)


class AdapterAdamW:
    """AdamW on adapters of `flat` ([numel], fp32), whose merged matrices are changed in place."""

    def __init__(
        self, layout: Layout, flat: Tensor, lora: Lora, weight_decay: float, betas: tuple[float, float]
    ) -> None:
        """`flat` are the weights without adapters. They begin as PEFT's: A is drawn, with seed 0, B is 0."""
        self.flat, self._scale = flat, lora.alpha / lora.rank
        adapted, factors = Matrices(lora.adapted(layout)), lora.factors(layout)
        self._merged = {name: view for name, view in layout.views(flat).items() if name in adapted.shapes}
        self._base = {name: view.detach().clone() for name, view in self._merged.items()}
        self.gradient = torch.zeros(adapted.numel, dtype=flat.dtype, device=flat.device)
        self._gradients = adapted.views(self.gradient)
        self.weights = {name: view.detach() for name, view in layout.views(flat).items()}
        for name, gradient in self._gradients.items():
            self.weights[name].requires_grad_().grad = gradient
        self._adapters = _initial(factors).to(flat)
        self._factors = factors.views(self._adapters)
        self._adamw = FlatAdamW(factors, self._adapters, weight_decay, betas)
        self._factor_gradients = factors.views(self._adamw.gradient)

    def step(self, lr: float, max_grad_norm: float) -> float:
        """As that of `FlatAdamW`; the norm is that of the adapters' gradient."""
        found = self._factor_gradients
        for name, gradient in self._gradients.items():
            a, b = self._factors[_of(name, A)], self._factors[_of(name, B)]
            torch.mm(b.T, gradient, out=found[_of(name, A)]).mul_(self._scale)
            torch.mm(gradient, a.T, out=found[_of(name, B)]).mul_(self._scale)
        self.gradient.zero_()
        norm = self._adamw.step(lr, max_grad_norm)
        self._merge()
        return norm

    def state_dict(self) -> dict[str, Any]:
        """Adapters [numel of the factors] and their moments."""
        return {**self._adamw.state_dict(), "adapters": self._adapters}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; the weights follow."""
        self._adapters.copy_(state["adapters"])
        self._adamw.load_state_dict(state)
        self._merge()

    @torch.no_grad()
    def _merge(self) -> None:
        for name, merged in self._merged.items():
            a, b = self._factors[_of(name, A)], self._factors[_of(name, B)]
            torch.addmm(self._base[name], b, a, alpha=self._scale, out=merged)


def adapter_files(config: ModelConfig, lora: Lora, adapters: Tensor, base: str) -> dict[str, str | bytes]:
    """The two files that PEFT's `PeftModel.from_pretrained` reads; `base` is where the base model is."""
    described = {
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
    views = lora.factors(Layout(config)).views(adapters.detach().cpu())
    tensors = {f"base_model.model.{name}.weight": view.contiguous() for name, view in views.items()}
    return {
        "adapter/adapter_config.json": json.dumps(described, indent=2) + "\n",
        "adapter/adapter_model.safetensors": save(tensors, metadata={"format": "pt"}),
    }


def _of(matrix: str, factor: str) -> str:
    return f"{matrix.removesuffix('.weight')}.{factor}"


def _initial(factors: Matrices) -> Tensor:
    """A uniform between -1 / sqrt(in) and 1 / sqrt(in), B zero, so that the merged weights are the base's."""
    flat, source = torch.zeros(factors.numel), torch.Generator().manual_seed(0)
    for name, view in factors.views(flat).items():
        if name.endswith(A):
            bound = 1.0 / math.sqrt(view.shape[1])
            view.uniform_(-bound, bound, generator=source)
    return flat
