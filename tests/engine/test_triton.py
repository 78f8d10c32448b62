"""Every Triton kernel against the eager one: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine import tiny
from tests.engine.test_kernels import BATCH, NUM_ROWS, POSITIONS, TOLERANCES, check_same, config
from tests.engine.test_kernels import workspaces as workspaces_on

from dora.engine import cuda_graphs
from dora.engine.kernels.eager import EagerKernels

triton_kernels = pytest.importorskip("dora.engine.kernels.triton_kernels")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SHAPES = {  # query heads, kv heads, dimensions of a head
    "one query head per kv head": (2, 2, 16),
    "two": (4, 2, 8),
    "four": (4, 1, 32),
    "seven": (7, 1, 10),
}
workspaces = partial(workspaces_on, device=DEVICE)


@pytest.mark.parametrize("dtype", TOLERANCES)
@pytest.mark.parametrize(
    ("shape", "family"), [*((shape, "qwen3") for shape in SHAPES), ("seven", "llama")]
)  # llama: without norms of queries and keys
def test_attention_equals_that_of_the_eager_kernels(shape: str, family: str, dtype: str) -> None:
    reference, tested = workspaces(config(*SHAPES[shape], family), dtype)
    for kernels in (EagerKernels(reference), triton_kernels.TritonKernels(tested)):
        for layer in (0, 1):
            kernels.attend(BATCH, POSITIONS, layer)
    check_same(reference, tested, dtype)


@pytest.mark.parametrize("partition", [16, 32, 48])
@pytest.mark.parametrize("max_programs", [6, 10**6])
def test_partitions_of_the_context_do_not_change_attention(
    partition: int, max_programs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "_MAX_PROGRAMS", max_programs)
    monkeypatch.setattr(triton_kernels, "PARTITION", partition)
    reference, tested = workspaces(config(4, 2, 8), "float32")
    EagerKernels(reference).attend(BATCH, POSITIONS, layer=0)
    triton_kernels.TritonKernels(tested).attend(BATCH, POSITIONS, layer=0)
    check_same(reference, tested, "float32")


def test_a_long_row_among_short_ones_is_divided(monkeypatch: pytest.MonkeyPatch) -> None:
    """300 tokens are ten partitions, each of another program, and a short row is one."""
    monkeypatch.setattr(triton_kernels, "PARTITION", 32)
    reference, tested = workspaces(config(4, 2, 8), "float32", max_context=304)
    positions = np.array([4, 4, 4, 299, 4, 4, 4])
    tested.positions[:NUM_ROWS] = torch.from_numpy(positions)
    kernels = triton_kernels.TritonKernels(tested)
    EagerKernels(reference).attend(BATCH, positions, layer=0)
    kernels.attend(BATCH, positions, layer=0)
    check_same(reference, tested, "float32")
    assert kernels._ends[:NUM_ROWS].tolist() == [1, 2, 3, 13, 14, 15, 16]
    assert kernels._owners[:16].tolist() == [0, 1, 2, *[3] * 10, 4, 5, 6]


@pytest.mark.parametrize(
    ("num_rows", "partition"), [(1, 32), (8, 32), (16, 64), (32, 128), (64, 256), (128, 512), (256, 512)]
)
def test_small_batches_have_short_partitions(
    num_rows: int, partition: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_kernels, "_NUM_PROGRAMS", 1024)
    _, tested = workspaces(config(8, 8, 2), "float32")
    assert triton_kernels.TritonKernels(tested)._partition(num_rows) == partition


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
def test_attention_stays_finite_for_extreme_scores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kernels, "PARTITION", 32)
    _, tested = workspaces(config(4, 2, 8), "float32")
    tested.kv *= 1e3
    tested.gate_up *= 1e3
    kernels = triton_kernels.TritonKernels(tested)
    kernels.attend(BATCH, POSITIONS, layer=0)
    kernels.swiglu(BATCH)
    assert tested.attended.isfinite().all()
    assert tested.gated.isfinite().all()


def test_kernels_compile_for_gpus_and_stay_within_their_limits(tmp_path: Path) -> None:
    """Some GPUs, heads and dtypes; `python -m tests.engine.compile_kernels` compiles for all of them."""
    within = ["80:bfloat16:128:4", "120:float32:64:7"]
    faults = ["90:bfloat16:128:4:num_warps=1", "90:bfloat16:128:4:num_stages=12"]
    *problems, num_compiled = compiled(tmp_path, *within, *faults)
    assert int(num_compiled) == 2 * 6 + 2 * 2
    spills, too_large = problems[:2], problems[2:]
    assert all(re.match(r"_attend on sm90 spills \d+ bytes of registers, with bf", x) for x in spills)
    assert all(re.match(r"_attend on sm90 uses \d+ bytes of shared memory", x) for x in too_large)
    assert len(spills) == len(too_large) == 2  # for 8 and for 64 rows


def compiled(cache: Path, *cases: str) -> list[str]:
    """The lines that the program prints for these cases."""
    environment = os.environ | {
        "TRITON_INTERPRET": "0",
        "TRITON_CACHE_DIR": str(cache),
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    command = [sys.executable, "-m", "tests.engine.compile_kernels", *cases]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.skipif(DEVICE == "cuda", reason="tests/gpu does this on the GPU")
def test_engines_with_triton_and_eager_kernels_generate_the_same_tokens(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cuda_graphs, "_BUCKET", 2)  # the interpreter is slow
    requests = [tiny.make_request(i, version=i % 2, group_size=1, max_tokens=2) for i in range(2)]
    found, expected = (
        tiny.run(tiny.make_engine(kernels, max_rows=5, num_versions=2), requests)
        for kernels in ("triton", "eager")
    )
    assert tiny.output_tokens(found) == tiny.output_tokens(expected)
    for request_id, completion in found.items():
        np.testing.assert_allclose(completion.logprobs, expected[request_id].logprobs, atol=1e-5)
