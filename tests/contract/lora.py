"""Versions of a model as LoRA trains them: the initial weights plus low-rank matrices.

The matrices are random, and large enough that no two versions agree.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from dora import testing
from dora.model.weights import WeightLayout, initial_weights

CONFIG = replace(testing.CONFIG, intermediate_size=64)  # SGLang pads what is no multiple of 32 on a CPU
RANK = 4
ADAPTED = ("q_proj.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")


def lora_weights(version: int, rank: int = RANK) -> Tensor:
    """The merged weights [numel] of a version. Version 0 is the initial one."""
    flat, source = initial_weights(CONFIG, seed=0, std=0.4), torch.Generator().manual_seed(version)
    for name, matrix in WeightLayout(CONFIG).views(flat).items():
        if version and name.endswith(ADAPTED):
            b = torch.randn(matrix.shape[0], rank, generator=source)
            a = torch.randn(rank, matrix.shape[1], generator=source)
            matrix += 0.05 * b @ a
    return flat
