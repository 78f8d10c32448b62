"""Versions of the contracts' model as LoRA trains them: what it began with, and low-rank matrices added.

The matrices are drawn, and large enough that versions disagree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora.contract.asking import CONFIG, weights
from dora.model.weights import Layout

RANK = 4
ADAPTED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")


def lora_weights(version: int, rank: int = RANK) -> Tensor:
    """Weights [numel] of a version; version 0 is what it began with."""
    flat, source = weights(0), torch.Generator().manual_seed(version)
    for name, matrix in Layout(CONFIG).views(flat).items():
        if version and name.endswith(ADAPTED):
            b = torch.randn(matrix.shape[0], rank, generator=source)
            a = torch.randn(rank, matrix.shape[1], generator=source)
            matrix += 0.05 * b @ a
    return flat
