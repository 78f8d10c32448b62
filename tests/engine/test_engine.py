import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tests.engine.tiny import (
    TINY,
    forward_logprobs,
    full_logits,
    greedy_output,
    make_engine,
    make_request,
    output_tokens,
    run,
    weights,
)
from tests.model.varlen_twin import varlen_attn
from torch import Tensor

import dora.engine.runner as runner_module
from dora.core.types import Chunk, GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.request import EngineError, Request, SamplingParams
from dora.model.attention import VarlenLayout, torch_varlen

KERNELS = ("eager", "numba")


@pytest.mark.parametrize("kernels", KERNELS)
def test_greedy_decoding_takes_the_argmax_of_a_full_forward_at_each_token(kernels: str) -> None:
    requests = [make_request(i, temperature=0.0, max_tokens=24, group_size=1) for i in range(12)]
    completions = run(make_engine(kernels), requests)
    for request in requests:
        assert completions[request.id].token_ids.tolist() == greedy_output(weights(), request.prompt_ids, 24)


@pytest.mark.parametrize("kernels", KERNELS)
def test_logprobs_are_those_of_a_forward_pass_of_the_trainer(kernels: str) -> None:
    requests = [make_request(i, temperature=0.5 + i % 3 / 2) for i in range(16)]
    completions = run(make_engine(kernels), requests)
    for request in requests:
        completion = completions[request.id]
        expected = forward_logprobs(weights(), completion, request.sampling.temperature)
        torch.testing.assert_close(torch.tensor(completion.logprobs), expected, atol=1e-5, rtol=0)


def test_a_kernel_for_variable_lengths_prefills_chunks_of_all_prompts_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The second half of the requests finds the beginning of its prompts in the prefix cache."""
    requests = [make_request(i, max_tokens=3, group_size=1, prompt_length=50 - i % 30) for i in range(12)]
    requests += [
        replace(request, id=RequestId(1, i, 0), group=GroupId(1, i), prompt_ids=(*request.prompt_ids, 3, i))
        for i, request in enumerate(requests)
    ]

    def completions() -> dict[RequestId, list[int]]:
        return output_tokens(run(make_engine(max_rows=6, prefill_budget=33), requests))

    expected, kernel, layouts = completions(), torch_varlen(varlen_attn), list[VarlenLayout]()

    def attend(q: Tensor, k: Tensor, v: Tensor, layout: VarlenLayout) -> Tensor:
        layouts.append(layout)
        return kernel(q, k, v, layout)

    monkeypatch.setattr(runner_module, "varlen_attention", lambda query: attend)
    assert completions() == expected
    assert any(len(layout.query_starts) > 2 for layout in layouts)
    assert any(layout.max_keys > layout.max_queries for layout in layouts)


def test_a_greedy_token_has_its_logprob_at_temperature_one() -> None:
    request = make_request(0, temperature=0.0, max_tokens=1)
    completion = run(make_engine(), [request])[request.id]
    expected = full_logits(weights(), list(request.prompt_ids))[-1].log_softmax(-1).max()
    assert completion.logprobs == pytest.approx([float(expected)], abs=1e-5)


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_request_has_the_same_tokens_alone_in_any_batch_and_on_another_engine(kernels: str) -> None:
    requests = [make_request(i) for i in range(32)]
    together = output_tokens(run(make_engine(kernels), requests))
    shuffled = random.Random(0).sample(requests, len(requests))
    assert output_tokens(run(make_engine(kernels), shuffled)) == together
    small = make_engine(kernels, max_rows=5)
    assert output_tokens(run(small, requests)) == together
    for request in requests[::5]:
        assert output_tokens(run(small, [request])) == {request.id: together[request.id]}
    assert len({tuple(completion) for completion in together.values()}) == 32


def test_numba_and_eager_kernels_draw_the_same_tokens() -> None:
    requests = [make_request(i, max_tokens=40) for i in range(32)]
    assert output_tokens(run(make_engine("numba"), requests)) == output_tokens(
        run(make_engine("eager"), requests)
    )


@pytest.mark.parametrize("kernels", KERNELS)
def test_two_versions_in_a_batch_generate_what_each_does_alone(kernels: str) -> None:
    requests = [make_request(i, version=i % 3 // 2) for i in range(24)]
    both = run(make_engine(kernels, num_versions=2), requests)
    for version in (0, 1):
        alone = make_engine(kernels, num_versions=0)
        digest = alone.load(version, weights(version))
        own = [request for request in requests if request.version == version]
        assert output_tokens(run(alone, own)) == {
            request.id: both[request.id].token_ids.tolist() for request in own
        }
        for request in own:
            assert both[request.id].chunks == (Chunk(version, digest, 20),)
            assert both[request.id].version == version


def test_chunks_have_the_digest_of_the_weights_that_were_in_the_slot() -> None:
    engine = make_engine()
    engine.drop(0)
    digest = engine.load(0, weights(5))
    request = make_request(0, temperature=0.0)
    completion = run(engine, [request])[request.id]
    assert completion.chunks == (Chunk(0, digest, 20),)
    assert completion.token_ids.tolist() == greedy_output(weights(5), request.prompt_ids, 20)


def test_the_prompt_of_a_group_is_prefilled_once() -> None:
    engine = make_engine(max_rows=6)
    run(engine, [make_request(i, group_size=8, prompt_length=21) for i in range(24)])
    assert engine.num_prefilled == 3 * 20


@pytest.mark.parametrize("kernels", KERNELS)
def test_a_prompt_with_a_cached_prefix_is_prefilled_from_where_they_differ(kernels: str) -> None:
    engine = make_engine(kernels, max_rows=2)
    prefix = tuple(range(20)) * 2
    prompts = [
        prefix[:33],
        (*prefix[:40], 7),
        (*prefix[:40], 8, 9, 8, 9, 8, 9),
        prefix[:32],
        prefix[:33],
    ]
    requests = [
        Request(RequestId(0, row, 0), GroupId(0, row), ids, 0, row, SamplingParams(0.0, 20))
        for row, ids in enumerate(prompts)
    ]
    completions = run(engine, requests)
    assert engine.num_prefilled == 32 + 8 + 13 + 15 + 0
    for request in requests:
        assert completions[request.id].token_ids.tolist() == greedy_output(weights(), request.prompt_ids, 20)


def test_a_prompt_longer_than_a_tile_of_queries_is_prefilled_correctly() -> None:
    request = make_request(0, temperature=0.0, prompt_length=75, group_size=1)
    assert run(make_engine(), [request])[request.id].token_ids.tolist() == greedy_output(
        weights(), request.prompt_ids, 20
    )


def test_abort_frees_rows_and_blocks_and_returns_the_tokens_lost() -> None:
    engine = make_engine(max_rows=4)
    requests = [make_request(i) for i in range(8)]
    expected = output_tokens(run(make_engine(), requests))
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    unknown = RequestId(9, 9, 9)
    assert engine.abort([requests[1].id, requests[7].id, unknown]) == {requests[1].id: 5, requests[7].id: 0}
    engine.check()
    assert engine.num_running == 3
    completions = run(engine, [])
    left = [request.id for request in requests if request not in (requests[1], requests[7])]
    assert output_tokens(completions) == {request_id: expected[request_id] for request_id in left}


def test_progress_counts_the_tokens_of_running_and_waiting_requests() -> None:
    engine = make_engine(max_rows=2)
    requests = [make_request(i) for i in range(3)]
    engine.submit(requests)
    for _ in range(3):
        engine.step()
    assert engine.progress() == {requests[0].id: 3, requests[1].id: 3, requests[2].id: 0}
    assert (engine.num_running, engine.num_waiting, engine.is_idle) == (2, 1, False)


def test_decode_only_pauses_other_requests_until_the_last_of_its_own_has_finished() -> None:
    engine = make_engine()
    requests = [make_request(i, max_tokens=10) for i in range(6)]
    expected = output_tokens(run(make_engine(), requests))
    engine.submit(requests)
    engine.step()
    engine.decode_only([requests[2].id, requests[4].id])
    for _ in range(4):
        engine.step()
    lengths = [1, 1, 5, 1, 5, 1]
    assert engine.progress() == {
        request.id: length for request, length in zip(requests, lengths, strict=True)
    }
    engine.decode_only([])
    engine.step()
    assert set(engine.progress().values()) == {2, 6}
    engine.decode_only([requests[0].id])
    completions = run(engine, [])
    assert output_tokens(completions) == expected
    assert next(iter(completions)) == requests[0].id


def test_a_paused_engine_accepts_requests_and_decodes_nothing() -> None:
    engine = make_engine()
    requests = [make_request(i) for i in range(4)]
    engine.submit(requests[:2])
    engine.step()
    engine.pause()
    engine.submit(requests[2:])
    assert (engine.step(), engine.can_step, engine.is_idle) == ([], False, False)
    assert list(engine.progress().values()) == [1, 1, 0, 0]
    engine.load(1, weights(1))
    assert engine.abort([requests[0].id]) == {requests[0].id: 1}
    engine.drop(1)
    engine.resume()
    assert engine.can_step
    expected = output_tokens(run(make_engine(), requests[1:]))
    assert output_tokens(run(engine, [])) == expected
    assert not engine.can_step


def test_a_version_with_unfinished_requests_cannot_be_dropped() -> None:
    engine = make_engine(num_versions=2)
    engine.submit([make_request(0)])
    with pytest.raises(EngineError, match="version 0 has 1 unfinished requests"):
        engine.drop(0)
    engine.step()
    with pytest.raises(EngineError, match="unfinished"):
        engine.drop(0)
    engine.drop(1)
    with pytest.raises(EngineError, match="version 1 is not loaded; loaded: \\[0\\]"):
        engine.drop(1)
    run(engine, [])
    engine.drop(0)
    engine.check()
    assert engine.versions == {}


def test_loading_too_many_versions_or_one_twice_or_of_another_shape_is_rejected() -> None:
    engine = make_engine()
    with pytest.raises(EngineError, match="loaded already"):
        engine.load(0, weights())
    with pytest.raises(EngineError, match=r"float64 \[3\], expected float32"):
        engine.load(1, torch.zeros(3, dtype=torch.float64))
    engine.load(1, weights(1))
    with pytest.raises(EngineError, match="no free slot for version 2: \\[0, 1\\] are loaded"):
        engine.load(2, weights(2))
    engine.check()


def test_invalid_settings_are_rejected() -> None:
    with pytest.raises(EngineError, match="max_context = 999"):
        Engine(TINY, max_rows=1, max_context=999, version_slots=1)
    with pytest.raises(EngineError, match="max_rows = 0"):
        Engine(TINY, max_rows=0, max_context=9, version_slots=1)
    with pytest.raises(EngineError, match="kernels = 'fast' must be one of auto, numba, eager"):
        make_engine("fast")


def test_pace_pads_steps_and_changes_no_tokens() -> None:
    paced = make_engine(max_rows=4, pace_s=0.02)
    requests = [make_request(i, max_tokens=5) for i in range(4)]
    assert output_tokens(run(paced, requests)) == output_tokens(run(make_engine(), requests))
    assert paced.busy_row_s >= 4 * 5 * 0.02 - 1e-6  # rounding of clock differences


def test_a_kv_pool_without_disk_space_is_rejected(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match=r"no space for \d+ bytes of KV"):
        Engine(TINY, max_rows=1, max_context=9, version_slots=1, num_blocks=2**40, pool=tmp_path / "kv")
    assert not (tmp_path / "kv").exists()


def test_kv_usage_falls_to_zero_when_all_requests_have_finished() -> None:
    engine = make_engine(num_blocks=20)
    engine.submit([make_request(0, prompt_length=33)])
    engine.step()
    assert engine.kv_usage == pytest.approx(3 / 20)
    run(engine, [])
    assert engine.kv_usage == 0


def test_a_prompt_that_is_kept_for_siblings_does_not_count_in_kv_usage() -> None:
    engine, usages = make_engine(max_rows=8, max_context=64), []
    engine.submit([make_request(i, group_size=1, prompt_length=20, max_tokens=44) for i in range(8)])
    while not engine.is_idle:
        usages.append(engine.kv_usage)
        engine.step()
    assert max(usages) == pytest.approx(4 / 5)


def test_blocks_that_siblings_share_count_once_in_kv_usage() -> None:
    engine = make_engine(max_rows=8, num_blocks=20)
    engine.submit([make_request(i, group_size=8, prompt_length=65) for i in range(8)])
    engine.step()
    assert engine.num_running == 8
    assert engine.kv_usage == pytest.approx((4 + 8) / 20)


def test_an_idle_engine_does_nothing() -> None:
    engine = make_engine()
    run(engine, [make_request(i) for i in range(8)])
    before = engine.busy_row_s
    assert engine.step() == []
    assert engine.busy_row_s == before
    engine.check()
