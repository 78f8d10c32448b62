"""Kernels compute what the eager ones do, for rows with scattered blocks and noise in all buffers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from dora.engine.kernels import Kernels
from dora.engine.kernels.eager import EagerKernels
from dora.engine.kernels.numba_kernels import NumbaKernels
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.model.config import ModelConfig

BUFFERS = ("x", "delta", "hidden", "qkv", "attended", "gate_up", "gated", "kv", "weights")
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}
MAX_CONTEXT, NUM_BLOCKS, NUM_ROWS = 80, 48, 7
BATCH = ForwardBatch(np.array([6, 0, 3, 1, 5, 2, 7]), np.array([0, 0, 2, 2, 2, 1, 1]))
POSITIONS = np.array([0, 1, 15, 16, 30, 63, 79])  # on both sides of block and tile boundaries


def config(heads: int, kv_heads: int, dim: int, family: str = "qwen3") -> ModelConfig:
    return ModelConfig(
        vocab_size=16,
        hidden_size=20,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=512,
        model_type=family,
    )


def workspaces(
    shape: ModelConfig, dtype: str = "float32", max_context: int = MAX_CONTEXT, device: str = "cpu"
) -> tuple[Workspace, Workspace]:
    """Two with the same noise in all buffers: the reference, fp32 on the CPU, and the tested one."""
    num_blocks = NUM_BLOCKS * max_context // MAX_CONTEXT
    reference = Workspace(shape, 8, max_context, 3, num_blocks)
    tested = Workspace(shape, 8, max_context, 3, num_blocks, device=device, dtype=dtype)
    noise = torch.Generator().manual_seed(0)
    for name in BUFFERS:
        buffer = getattr(reference, name).normal_(generator=noise)
        getattr(tested, name).copy_(buffer)
        buffer.copy_(getattr(tested, name))  # the rounded values
    tables = torch.randperm(num_blocks, generator=noise)[: tested.block_tables.numel()]
    for work in (reference, tested):
        work.block_tables.copy_(tables.view(tested.block_tables.shape))
    for name, values in (("positions", POSITIONS), ("rows", BATCH.rows), ("slots", BATCH.slots)):
        getattr(tested, name)[:NUM_ROWS] = torch.from_numpy(values)
    return reference, tested


def check_same(reference: Workspace, tested: Workspace, dtype: str = "float32") -> None:
    """Compare all buffers for the rows of the batch, also those that no kernel writes."""
    for name in BUFFERS:
        rows = slice(None) if name in ("kv", "weights") else slice(NUM_ROWS)
        found, expected = getattr(tested, name)[rows].cpu().float(), getattr(reference, name)[rows]
        torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 3, 4), (8, 1, 32), (6, 2, 10)])
def test_numba_kernels_compute_what_the_eager_ones_do(heads: int, kv_heads: int, dim: int) -> None:
    reference, tested = workspaces(config(heads, kv_heads, dim))
    implementations: list[Kernels] = [EagerKernels(reference), NumbaKernels(tested)]
    for work, kernels in zip((reference, tested), implementations, strict=True):
        kernels.add_norm(BATCH, work.layout.offsets["model.layers.1.post_attention_layernorm.weight"])
        kernels.attend(BATCH, POSITIONS, layer=1)
        kernels.swiglu(BATCH)
    check_same(reference, tested)


def test_numba_attention_stays_finite_for_extreme_scores() -> None:
    _, work = workspaces(config(4, 2, 8))
    work.kv *= 1e3
    work.gate_up *= 1e3
    batch = ForwardBatch(np.arange(NUM_ROWS), np.zeros(NUM_ROWS, np.int64))
    kernels = NumbaKernels(work)
    kernels.attend(batch, np.full(NUM_ROWS, 50), layer=0)
    kernels.swiglu(batch)
    assert work.attended.isfinite().all()
    assert work.gated.isfinite().all()


def test_a_batch_is_split_where_its_slot_changes() -> None:
    assert ForwardBatch(np.arange(5), np.array([1, 1, 0, 2, 2])).segments() == [
        (1, 0, 2),
        (0, 2, 3),
        (2, 3, 5),
    ]
    assert ForwardBatch(np.arange(0), np.zeros(0, np.int64)).segments() == []
