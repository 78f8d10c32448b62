"""Every Triton kernel against the eager one: on a GPU if there is one, else in Triton's interpreter."""

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
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.model.config import ModelConfig

triton_kernels = pytest.importorskip("dora.engine.kernels.triton_kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BUFFERS = ("x", "delta", "hidden", "qkv", "attended", "gate_up", "gated", "kv", "weights")
TOLERANCES = {"float32": 1e-5, "bfloat16": 3e-2}
MAX_CONTEXT, NUM_BLOCKS, NUM_ROWS = 80, 48, 7
BATCH = ForwardBatch(np.array([6, 0, 3, 1, 5, 2, 7]), np.array([0, 0, 2, 2, 2, 1, 1]))
POSITIONS = np.array([0, 1, 15, 16, 30, 63, 79])  # on both sides of block and tile boundaries
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
    """Two with the same noise in all buffers: the reference, fp32 on the CPU, and the tested one."""
    reference = Workspace(shape, 8, MAX_CONTEXT, 3, NUM_BLOCKS)
    tested = Workspace(shape, 8, MAX_CONTEXT, 3, NUM_BLOCKS, device=DEVICE, dtype=dtype)
    noise = torch.Generator().manual_seed(0)
    for name in BUFFERS:
        buffer = getattr(reference, name).normal_(generator=noise)
        getattr(tested, name).copy_(buffer)
        buffer.copy_(getattr(tested, name))  # the rounded values
    tables = torch.randperm(NUM_BLOCKS, generator=noise)[: tested.block_tables.numel()].view(
        tested.block_tables.shape
    )
    reference.block_tables.copy_(tables)
    tested.block_tables.copy_(tables)
    for name, values in (("positions", POSITIONS), ("rows", BATCH.rows), ("slots", BATCH.slots)):
        getattr(tested, name)[:NUM_ROWS] = torch.from_numpy(values)
    return reference, tested


def check_same(reference: Workspace, tested: Workspace, dtype: str) -> None:
    """Compare all buffers for the rows of the batch, also those that no kernel writes."""
    for name in BUFFERS:
        rows = slice(None) if name in ("kv", "weights") else slice(NUM_ROWS)
        found, expected = getattr(tested, name)[rows].cpu().float(), getattr(reference, name)[rows]
        torch.testing.assert_close(found, expected, atol=TOLERANCES[dtype], rtol=TOLERANCES[dtype])


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("shape", SHAPES)
def test_attention_equals_that_of_the_eager_kernels(shape: str, family: str, dtype: str) -> None:
    reference, tested = workspaces(config(*SHAPES[shape], family), dtype)
    EagerKernels(reference).attend(BATCH, POSITIONS, layer=1)
    triton_kernels.TritonKernels(tested).attend(BATCH, POSITIONS, layer=1)
    check_same(reference, tested, dtype)


@pytest.mark.parametrize("num_splits", [2, 3, 5])
def test_splitting_the_context_does_not_change_attention(num_splits: int) -> None:
    reference, tested = workspaces(config(4, 2, 8), "float32")
    EagerKernels(reference).attend(BATCH, POSITIONS, layer=0)
    triton_kernels.TritonKernels(tested, num_splits).attend(BATCH, POSITIONS, layer=0)
    check_same(reference, tested, "float32")


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_norms_and_activations_equal_those_of_the_eager_kernels(dtype: str) -> None:
    reference, tested = workspaces(config(4, 2, 8), dtype)
    for work, kernels in (
        (reference, EagerKernels(reference)),
        (tested, triton_kernels.TritonKernels(tested)),
    ):
        kernels.add_norm(BATCH, work.layout.offsets["model.layers.1.post_attention_layernorm.weight"])
        kernels.swiglu(BATCH)
    check_same(reference, tested, dtype)


@pytest.mark.filterwarnings(
    "ignore:overflow encountered in exp"
)  # in the interpreter; the result is infinite
def test_attention_stays_finite_for_extreme_scores() -> None:
    _, tested = workspaces(config(4, 2, 8), "float32")
    tested.kv *= 1e3
    tested.gate_up *= 1e3
    kernels = triton_kernels.TritonKernels(tested, 4)
    kernels.attend(BATCH, POSITIONS, layer=0)
    kernels.swiglu(BATCH)
    assert tested.attended.isfinite().all()
    assert tested.gated.isfinite().all()


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
def test_engines_with_triton_and_eager_kernels_generate_the_same_tokens() -> None:
    requests = [tiny.make_request(i, version=i % 2, group_size=1, max_tokens=3) for i in range(3)]
    found, expected = (
        tiny.run(tiny.make_engine(kernels, max_rows=5, num_versions=2), requests)
        for kernels in ("triton", "eager")
    )
    assert tiny.output_tokens(found) == tiny.output_tokens(expected)
    for request_id, completion in found.items():
        np.testing.assert_allclose(completion.logprobs, expected[request_id].logprobs, atol=1e-5)
