"""Engines in bf16, and devices and kernels that are not available."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine import tiny
from tests.engine.engine_cluster import EngineCluster

from dora.engine.engine import Engine
from dora.engine.messages import ExportFailed, ImportFailed
from dora.engine.request import EngineError
from dora.model.weights import weight_digest


def engine(dtype: str = "bfloat16", device: str = "cpu", kernels: str = "auto") -> Engine:
    return tiny.make_engine(kernels, num_versions=0, max_rows=8, dtype=dtype, device=device)


def test_the_digest_of_bf16_weights_is_that_of_the_bytes_they_are_rounded_to() -> None:
    bf16_engine, flat = engine(), tiny.weights()
    assert bf16_engine.kernels == "eager"
    assert bf16_engine.load(0, flat) == bf16_engine.load(1, flat.bfloat16()) == weight_digest(flat.bfloat16())
    bf16_engine.drop(1)
    with pytest.raises(EngineError, match=r"float64 .*, expected float32 or bfloat16"):
        bf16_engine.load(1, flat.double())
    with pytest.raises(EngineError, match=r"bfloat16 .*, expected float32"):
        tiny.make_engine().load(1, flat.bfloat16())


def test_a_bf16_engine_has_almost_the_logprobs_of_an_fp32_one() -> None:
    bf16_engine, flat = engine(), (tiny.weights() / 4).bfloat16()
    bf16_engine.load(0, flat)
    requests = [tiny.make_request(i, max_tokens=24) for i in range(8)]
    for completion in tiny.run(bf16_engine, requests).values():
        expected = tiny.forward_logprobs(flat.float(), completion)
        np.testing.assert_allclose(completion.logprobs, expected.numpy(), atol=0.05)


def test_the_digest_of_a_large_buffer_depends_on_every_chunk() -> None:
    flat = torch.zeros(2**25 + 5)
    before = weight_digest(flat)
    assert before == weight_digest(flat.clone())
    flat[2**24 + 3] = 1e-30
    assert weight_digest(flat) != before


def test_unavailable_dtypes_devices_and_kernels_are_rejected() -> None:
    with pytest.raises(EngineError, match="dtype = 'float16' must be one of float32, bfloat16"):
        engine("float16")
    with pytest.raises(EngineError, match="device = 'tpu' must be"):
        engine(device="tpu")
    with pytest.raises(EngineError, match='supports dtype = "float32" only'):
        engine(kernels="numba")


def test_a_migrated_bf16_request_has_the_tokens_of_one_that_stays(tmp_path: Path) -> None:
    cluster, request = EngineCluster(tmp_path, dtype="bfloat16"), tiny.make_request(0, max_tokens=40)
    cluster.begin(request, 24)
    received = cluster.migrate(request, "a", "b")
    assert received.num_bytes == 2 * tiny.TINY.kv_bytes_per_token * 16 // 2
    bf16_engine = engine(kernels="eager")
    bf16_engine.load(0, tiny.weights())
    expected = tiny.output_tokens(tiny.run(bf16_engine, [request]))
    assert tiny.output_tokens(cluster.run_to_end()) == expected


def test_kv_of_another_dtype_is_not_imported(tmp_path: Path) -> None:
    cluster, request = EngineCluster(tmp_path, dtype="bfloat16"), tiny.make_request(0, max_tokens=40)
    cluster.add_engine("a").submit([request])
    cluster.dtype = "float32"
    cluster.add_engine("b")
    cluster.step("a", 4)
    migration_id = cluster.start_migration(request, "a", "b")
    cluster.run_to_end()
    assert isinstance(cluster.reply_of("b", migration_id), ImportFailed)
    assert isinstance(cluster.reply_of("a", migration_id), ExportFailed)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_missing_gpu_is_rejected() -> None:
    with pytest.raises(EngineError, match="sees no GPU"):
        engine(device="cuda")
