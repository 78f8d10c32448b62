"""Versions of the contract tests' model as LoRA trains them: the initial weights plus low-rank matrices.

The matrices are random, and large enough that no two versions agree.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dora.model.weights import WeightLayout
from dora.testing import CONFIG, version_weights

RANK = 4
ADAPTED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")


def lora_weights(version: int, rank: int = RANK) -> Tensor:
    """The merged weights [numel] of a version. Version 0 is the initial one."""
    flat, source = version_weights(0), torch.Generator().manual_seed(version)
    for name, matrix in WeightLayout(CONFIG).views(flat).items():
        if version and name.endswith(ADAPTED):
            b = torch.randn(matrix.shape[0], rank, generator=source)
            a = torch.randn(rank, matrix.shape[1], generator=source)
            matrix += 0.05 * b @ a
    return flat
