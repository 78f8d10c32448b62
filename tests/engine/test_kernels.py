import numpy as np
import pytest
import torch

from dora.engine.kernels import Kernels
from dora.engine.kernels.eager import EagerKernels
from dora.engine.kernels.numba_kernels import NumbaKernels
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.model.config import ModelConfig

BUFFERS = ("x", "delta", "hidden", "qkv", "attended", "gate_up", "gated", "kv", "weights")
NUM_ROWS, MAX_CONTEXT = 7, 80


def workspace(heads: int, kv_heads: int, dim: int) -> Workspace:
    """A workspace with noise in all buffers, whose rows have scattered blocks."""
    config = ModelConfig(
        vocab_size=16,
        hidden_size=20,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=MAX_CONTEXT,
    )
    work = Workspace(config, 8, MAX_CONTEXT, 3, num_blocks=48)
    noise = torch.Generator().manual_seed(0)
    for name in BUFFERS:
        getattr(work, name).normal_(generator=noise)
    tables = torch.randperm(48, generator=noise)[: work.block_tables.numel()]
    work.block_tables[:] = tables.view(work.block_tables.shape)
    return work


@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 8), (3, 3, 4), (8, 1, 32), (6, 2, 10)])
def test_numba_kernels_compute_what_the_eager_ones_do(heads: int, kv_heads: int, dim: int) -> None:
    batch = ForwardBatch(np.array([6, 0, 3, 1, 5, 2, 7]), np.array([0, 0, 2, 2, 2, 1, 1]))
    positions = np.array([0, 1, 15, 16, 30, 63, 79])
    workspaces = [workspace(heads, kv_heads, dim) for _ in range(2)]
    implementations: list[Kernels] = [EagerKernels(workspaces[0]), NumbaKernels(workspaces[1])]
    for work, kernels in zip(workspaces, implementations, strict=True):
        kernels.add_norm(batch, work.layout.offsets["model.layers.1.post_attention_layernorm.weight"])
        kernels.attend(batch, positions, layer=1)
        kernels.swiglu(batch)
    for name in BUFFERS:
        rows = slice(None) if name in ("kv", "weights") else slice(NUM_ROWS)
        expected, found = (getattr(work, name)[rows] for work in workspaces)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_numba_attention_stays_finite_for_extreme_scores() -> None:
    work = workspace(4, 2, 8)
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
