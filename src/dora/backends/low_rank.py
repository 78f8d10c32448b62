"""What a version that LoRA has trained adds to the weights it began with, as an adapter that PEFT would read.

A version is published as merged matrices, W0 + B A. Here B and A are found again: the difference has no more
than their rank, but for rounding, and a difference that has more is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from dora.engine.sequence import EngineError
from dora.model.weights import Layout

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
FILE = "adapter_model.safetensors"
ROUNDING = 2.0**-18  # of a merged weight, as a share of its matrix's largest: 32 times that of fp32
SPARE = 4  # directions looked for beyond the rank


def factors(delta: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """B [out, rank] and A [rank, in] whose product is nearest to `delta` [out, in], or nearly so.

    Halko, Martinsson, Tropp (arXiv 0909.4061): the range of a low-rank matrix is that of a few of its images.
    """
    num_out, num_in = delta.shape
    source = torch.Generator().manual_seed(0)
    images = delta @ torch.randn(num_in, min(rank + SPARE, num_in), generator=source, dtype=delta.dtype)
    basis = torch.linalg.qr(images).Q
    u, sizes, v = torch.linalg.svd(basis.T @ delta, full_matrices=False)
    b, a = torch.zeros(num_out, rank, dtype=delta.dtype), torch.zeros(rank, num_in, dtype=delta.dtype)
    num = min(rank, sizes.numel())
    b[:, :num], a[:num] = basis @ u[:, :num], sizes[:num, None] * v[:num]
    return b, a


def adapter_of(layout: Layout, base: Tensor, flat: Tensor, rank: int) -> dict[str, Tensor]:
    """The tensors of an adapter by PEFT's names; both buffers are [numel], fp32.

    Raises EngineError if `flat` is not `base` with matrices changed by no more than this rank.
    """
    found: dict[str, Tensor] = {}
    after = layout.views(flat)
    for name, before in layout.views(base).items():
        module = name.removesuffix(".weight")
        if not module.endswith(TARGETS):
            if not torch.equal(before, after[name]):
                raise EngineError(f"{name} has changed, and no LoRA adapter changes it; use adapter = vllm")
            continue
        delta = after[name].double() - before.double()
        b, a = factors(delta, rank)
        off, most = (delta - b @ a).abs().max(), ROUNDING * after[name].abs().max()
        if off > most:
            raise EngineError(
                f"{name} has changed by a matrix whose rank is above {rank}; set rank in engine.options to "
                "trainer.lora_rank"
            )
        found[f"base_model.model.{module}.lora_A.weight"] = a.float().contiguous()
        found[f"base_model.model.{module}.lora_B.weight"] = b.float().contiguous()
    return found


def write_adapter(folder: Path, tensors: Mapping[str, Tensor], rank: int) -> None:
    """The two files of an adapter."""
    about = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,  # A and B have their scale in them
        "target_modules": [*TARGETS],
        "bias": "none",
    }
    (folder / "adapter_config.json").write_text(json.dumps(about), encoding="utf-8")
    save_file(dict(tensors), folder / FILE)
