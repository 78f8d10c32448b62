"""Engines in bf16, and devices and kernels that are not to be had."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine import tiny
from tests.engine.moving import Stage

from dora.engine.engine import Engine
from dora.engine.sequence import EngineError
from dora.handover.engine import MovingEngine
from dora.handover.moves import Kept, NotReceived
from dora.model.weights import weight_digest


def engine(dtype: str = "bfloat16", device: str = "cpu", kernels: str = "auto") -> Engine:
    return Engine(
        tiny.TINY,
        max_rows=8,
        max_context=96,
        version_slots=2,
        dtype=dtype,
        device=device,
        kernels=kernels,
    )


def test_the_digest_of_bf16_weights_is_that_of_the_bytes_they_are_rounded_to() -> None:
    made, flat = engine(), tiny.weights()
    assert made.load(0, flat) == made.load(1, flat.bfloat16()) == weight_digest(flat.bfloat16())
    made.drop(1)
    with pytest.raises(EngineError, match=r"float64 .*, not float32 or bfloat16"):
        made.load(1, flat.double())
    with pytest.raises(EngineError, match=r"bfloat16 .*, not float32"):
        tiny.engine().load(1, flat.bfloat16())


def test_a_bf16_engine_gives_almost_the_log_probs_of_an_fp32_one() -> None:
    made = engine()
    assert made.kernels == "eager"
    flat = (tiny.weights() / 4).bfloat16()
    made.load(0, flat)
    asked = [tiny.request(i, max_tokens=24) for i in range(8)]
    for request_id, answer in tiny.run(made, asked).items():
        prompt = next(request.prompt_ids for request in asked if request.id == request_id)
        logits = tiny.full_logits(flat.float(), [*prompt, *answer.token_ids])[len(prompt) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(answer.token_ids)[:, None])[:, 0]
        np.testing.assert_allclose(answer.logprobs, expected.numpy(), atol=0.05)


def test_a_large_buffer_has_the_digest_of_its_pieces() -> None:
    flat = torch.zeros(2**25 + 5)
    before = weight_digest(flat)
    assert before == weight_digest(flat.clone())
    flat[2**24 + 3] = 1e-30
    assert weight_digest(flat) != before


def test_what_is_not_to_be_had_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="dtype = 'float16' must be one of float32, bfloat16"):
        engine("float16")
    with pytest.raises(EngineError, match="device = 'tpu' must be"):
        engine(device="tpu")
    with pytest.raises(EngineError, match="compute in fp32 only"):
        engine(kernels="numba")
    with pytest.raises(EngineError, match="KV from which requests can move is that of the CPU's kernels"):
        MovingEngine(
            tiny.TINY, max_rows=1, max_context=9, version_slots=1, kernels="triton", pool=tmp_path / "pool"
        )


def test_a_bf16_request_that_moves_has_the_answer_of_one_that_stays(tmp_path: Path) -> None:
    stage, asked = Stage(tmp_path, dtype="bfloat16"), tiny.request(0, max_tokens=40)
    source = stage.engine("a")
    stage.engine("b")
    source.submit([asked])
    stage.step("a", 24)
    received = stage.move(asked, "a", "b")
    assert received.num_bytes == 2 * tiny.TINY.kv_bytes_per_token * 16 // 2
    made = engine(kernels="eager")
    made.load(0, tiny.weights())
    assert stage.run()[asked.id].token_ids == tiny.run(made, [asked])[asked.id].token_ids


def test_kv_of_another_dtype_is_not_taken_over(tmp_path: Path) -> None:
    stage, asked = Stage(tmp_path, dtype="bfloat16"), tiny.request(0, max_tokens=40)
    stage.engine("a").submit([asked])
    stage.dtype = "float32"
    stage.engine("b")
    stage.step("a", 4)
    move = stage.begin(asked, "a", "b")
    stage.run()
    assert isinstance(stage.word_of("b", move), NotReceived)
    assert isinstance(stage.word_of("a", move), Kept)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there_is_refused() -> None:
    with pytest.raises(EngineError, match="sees none"):
        engine(device="cuda")
