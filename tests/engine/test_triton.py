"""Every Triton kernel against the eager one: on the GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine import tiny

from dora.engine.kernels.eager import EagerKernels
from dora.engine.workspace import Batch, Workspace
from dora.model.config import ModelConfig

triton_kernels = pytest.importorskip("dora.engine.kernels.triton_kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUFFERS = ("x", "delta", "hidden", "qkv", "attended", "gate_up", "gated", "kv", "weights")
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}
MAX_CONTEXT, NUM_BLOCKS, NUM_ROWS = 80, 48, 7
BATCH = Batch(np.array([6, 0, 3, 1, 5, 2, 7]), np.array([0, 0, 2, 2, 2, 1, 1]))
POSITIONS = np.array([0, 1, 15, 16, 30, 63, 79])  # on both sides of the edges of blocks and tiles
SHAPES = {  # query heads, kv heads, dimensions of a head
    "one query head per kv head": (2, 2, 16),
    "two": (4, 2, 8),
    "four": (4, 1, 32),
    "seven": (7, 1, 10),
}


def config(heads: int, kv_heads: int, dim: int, family: str = "qwen3") -> ModelConfig:
    return ModelConfig(
        vocab_size=16,
        hidden_size=20,
        intermediate_size=13,
        num_hidden_layers=2,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        max_position_embeddings=MAX_CONTEXT,
        model_type=family,
    )


def workspaces(shape: ModelConfig, dtype: str) -> tuple[Workspace, Workspace]:
    """Two with the same noise in every buffer: the reference, fp32 on the CPU, and the one to try."""
    reference = Workspace(shape, 8, MAX_CONTEXT, 3, NUM_BLOCKS)
    tried = Workspace(shape, 8, MAX_CONTEXT, 3, NUM_BLOCKS, device=DEVICE, dtype=dtype)
    noise = torch.Generator().manual_seed(0)
    for name in BUFFERS:
        buffer = getattr(reference, name).normal_(generator=noise)
        getattr(tried, name).copy_(buffer)
        buffer.copy_(getattr(tried, name))  # what rounding leaves
    tables = torch.randperm(NUM_BLOCKS, generator=noise)[: tried.tables.numel()].view(tried.tables.shape)
    reference.tables.copy_(tables)
    tried.tables.copy_(tables)
    for name, values in (("positions", POSITIONS), ("rows", BATCH.rows), ("slots", BATCH.slots)):
        getattr(tried, name)[:NUM_ROWS] = torch.from_numpy(values)
    return reference, tried


def check_same(reference: Workspace, tried: Workspace, dtype: str) -> None:
    """All buffers, for the rows of the batch; what they do not write stays as it is."""
    for name in BUFFERS:
        rows = slice(None) if name in ("kv", "weights") else slice(NUM_ROWS)
        found, expected = getattr(tried, name)[rows].cpu().float(), getattr(reference, name)[rows]
        torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_is_that_of_the_eager_kernels(shape: str, family: str, dtype: str) -> None:
    reference, tried = workspaces(config(*SHAPES[shape], family), dtype)
    EagerKernels(reference).attend(BATCH, POSITIONS, layer=1)
    triton_kernels.TritonKernels(tried).attend(BATCH, POSITIONS, layer=1)
    check_same(reference, tried, dtype)


@pytest.mark.parametrize("num_splits", [2, 3, 5])
def test_splitting_the_context_changes_nothing(num_splits: int) -> None:
    reference, tried = workspaces(config(4, 2, 8), "float32")
    EagerKernels(reference).attend(BATCH, POSITIONS, layer=0)
    triton_kernels.TritonKernels(tried, num_splits).attend(BATCH, POSITIONS, layer=0)
    check_same(reference, tried, "float32")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_norms_and_activations_are_those_of_the_eager_kernels(dtype: str) -> None:
    reference, tried = workspaces(config(4, 2, 8), dtype)
    for work, kernels in ((reference, EagerKernels(reference)), (tried, triton_kernels.TritonKernels(tried))):
        kernels.add_norm(BATCH, work.layout.offsets["model.layers.1.post_attention_layernorm.weight"])
        kernels.swiglu(BATCH)
    check_same(reference, tried, dtype)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # the interpreter's; it is infinite
def test_attention_stays_finite_for_extreme_scores() -> None:
    _, tried = workspaces(config(4, 2, 8), "float32")
    tried.kv *= 1e3
    tried.gate_up *= 1e3
    kernels = triton_kernels.TritonKernels(tried, 4)
    kernels.attend(BATCH, POSITIONS, layer=0)
    kernels.swiglu(BATCH)
    assert tried.attended.isfinite().all()
    assert tried.gated.isfinite().all()


def test_all_kernels_compile_for_a_gpu(tmp_path: Path) -> None:
    program = Path(__file__).with_name("compile_kernels.py")
    paths = os.pathsep.join(sys.path)
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": paths,
    }
    done = subprocess.run(
        [sys.executable, program], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert all(int(num_bytes) > 0 for num_bytes in done.stdout.split())


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu does this on the GPU")
def test_an_engine_with_triton_kernels_gives_the_answers_of_one_with_eager_ones() -> None:
    asked = [tiny.request(i, version=i % 2, group_size=1, max_tokens=3) for i in range(3)]
    found, expected = (
        tiny.run(tiny.engine(kernels, max_rows=5, num_versions=2), asked) for kernels in ("triton", "eager")
    )
    assert tiny.tokens(found) == tiny.tokens(expected)
    for request_id, answer in found.items():
        np.testing.assert_allclose(answer.logprobs, expected[request_id].logprobs, atol=1e-5)
