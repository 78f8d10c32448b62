"""Requests that continue with newer weights, on the same KV or on recomputed KV."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from tests.engine.tiny import TINY, make_engine, make_request, output_tokens, run, weights
from torch import Tensor
from torch.nn import functional as F

import dora.engine.engine as engine_module
from dora.core.types import GroupId, RequestId
from dora.engine.cuda_graphs import CUDAGraphRunner
from dora.engine.engine import Engine
from dora.engine.request import Completion, EngineError, Request, SamplingParams
from dora.engine.scheduler import RequestStatus
from dora.model.decoder import forward, lm_head, rope_tables
from dora.model.weights import WeightLayout

KINDS = pytest.mark.parametrize("keeps_kv", [True, False], ids=["keeps", "recomputes"])
NUM_BEFORE = 7  # steps with the first weights


def make_inflight_engine(*, keeps_kv: bool, **settings: Any) -> Engine:
    policy = "inflight" if keeps_kv else "partial"
    return make_engine(inflight_update=policy, **{"max_rows": 8} | settings)


def run_with_update(engine: Engine, requests: list[Request], flat: Tensor) -> dict[RequestId, Completion]:
    """Run NUM_BEFORE steps with version 0, then load version 1; returns all completions."""
    engine.submit(requests)
    completions: dict[RequestId, Completion] = {}
    for _ in range(NUM_BEFORE):
        completions |= {c.id: c for c in engine.step()}
        engine.check()
    engine.load(1, flat)
    engine.check()
    engine.drop(0)  # no request uses it any more
    return completions | run(engine, [])


@KINDS
@pytest.mark.parametrize("kernels", ["eager", "numba", "padded"])
def test_an_update_to_equal_weights_changes_nothing(
    monkeypatch: pytest.MonkeyPatch, kernels: str, keeps_kv: bool
) -> None:
    if kernels == "padded":  # as on a GPU, where a step does not wait for the tokens of the last one
        monkeypatch.setattr(engine_module, "ModelRunner", CUDAGraphRunner)
        kernels = "eager"
    requests = [make_request(i) for i in range(8)]
    expected = run(make_inflight_engine(keeps_kv=keeps_kv, kernels=kernels), requests)
    completions = run_with_update(
        make_inflight_engine(keeps_kv=keeps_kv, kernels=kernels), requests, weights(0)
    )
    assert output_tokens(completions) == output_tokens(expected)


@KINDS
@pytest.mark.parametrize("is_padded", [False, True])
def test_chunks_name_the_weights_that_sampled_each_token(
    monkeypatch: pytest.MonkeyPatch, is_padded: bool, keeps_kv: bool
) -> None:
    if is_padded:
        monkeypatch.setattr(engine_module, "ModelRunner", CUDAGraphRunner)
    completions = run_with_update(
        make_inflight_engine(keeps_kv=keeps_kv), [make_request(i) for i in range(4)], weights(1)
    )
    for completion in completions.values():
        assert [(c.version, c.num_tokens) for c in completion.chunks] == [
            (0, NUM_BEFORE),
            (1, 20 - NUM_BEFORE),
        ]
        assert len({c.digest for c in completion.chunks}) == 2
        assert completion.version == 1


def test_with_recomputed_kv_a_request_continues_as_if_the_new_weights_had_the_whole_prompt() -> None:
    requests = [make_request(i, prompt_length=21) for i in range(4)]
    completions = run_with_update(make_inflight_engine(keeps_kv=False), requests, weights(1))
    for old in requests:
        completion = completions[old.id]
        prompt = (*old.prompt_ids, *completion.token_ids[:NUM_BEFORE].tolist())
        sampling = SamplingParams(1.0, max_tokens=20 - NUM_BEFORE)
        engine = make_inflight_engine(keeps_kv=False, num_versions=2)
        (fresh,) = run(engine, [Request(old.id, GroupId(0, 9), prompt, 1, old.seed, sampling)]).values()
        assert completion.token_ids[NUM_BEFORE:].tolist() == fresh.token_ids.tolist()
        assert completion.logprobs[NUM_BEFORE:] == pytest.approx(fresh.logprobs, abs=1e-5)
    assert len(completions) == 4


def test_the_prompt_of_siblings_is_recomputed_once() -> None:
    engine = make_inflight_engine(keeps_kv=False)
    requests = [make_request(i, prompt_length=33) for i in range(4)]
    run_with_update(engine, requests, weights(1))
    own = [33 + NUM_BEFORE - 1 - 32 * (i > 0) for i in range(4)]  # two whole blocks are shared
    assert engine.num_recomputed == sum(own)


def test_with_kept_kv_the_new_weights_attend_to_the_old_kv() -> None:
    """Expected: keys and values of the old weights for all tokens but the last, then the new weights."""
    request = make_request(0, group_size=1, prompt_length=5)
    engine = make_inflight_engine(keeps_kv=True)
    (completion,) = run_with_update(engine, [request], weights(1)).values()
    assert engine.num_recomputed == 0
    ids = [*request.prompt_ids, *completion.token_ids[:NUM_BEFORE].tolist()]
    logits = next_logits(ids, before=weights(0), after=weights(1))
    token = completion.token_ids[NUM_BEFORE]
    assert math.isclose(
        completion.raw_logprobs[NUM_BEFORE], float(logits.log_softmax(-1)[token]), abs_tol=1e-5
    )
    pure = next_logits(ids, before=weights(1), after=weights(1))
    assert float((pure - logits).abs().max()) > 0.01


def next_logits(ids: list[int], *, before: Tensor, after: Tensor) -> Tensor:
    """Logits [vocab] after the last token, which `after` computes; `before` has computed all others."""
    kept: list[tuple[Tensor, Tensor]] = []
    cos, sin = rope_tables(TINY, len(ids))

    def whole(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        kept.append((k, v))
        return attended(q, k, v, is_causal=True)

    def last(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        old_k, old_v = kept[layer]
        return attended(q, torch.cat([old_k, k]), torch.cat([old_v, v]), is_causal=False)

    views, tables = WeightLayout(TINY).views(before), (cos[:-1], sin[:-1])
    forward(views, TINY, torch.tensor(ids[:-1]), *tables, lambda layer: whole)
    views, tables = WeightLayout(TINY).views(after), (cos[-1:], sin[-1:])
    hidden = forward(views, TINY, torch.tensor(ids[-1:]), *tables, lambda layer: partial(last, layer))
    return F.linear(hidden, lm_head(views))[0]


def attended(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool) -> Tensor:
    """Attention [N, heads, dim] of queries, keys and values of that shape."""
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)
    return out[0].transpose(0, 1)


@KINDS
@pytest.mark.parametrize("prefill_budget", [3, 512])
def test_waiting_and_prefilling_requests_start_with_the_newest_version(
    keeps_kv: bool, prefill_budget: int
) -> None:
    engine = make_inflight_engine(keeps_kv=keeps_kv, max_rows=2, prefill_budget=prefill_budget)
    requests = [make_request(i, group_size=1, prompt_length=40) for i in range(4)]
    engine.submit(requests)
    engine.step()
    engine.load(1, weights(1))
    completions = run(engine, [])
    assert completions.keys() == {r.id for r in requests}
    last = completions[requests[-1].id]
    assert [(c.version, c.num_tokens) for c in last.chunks] == [(1, 20)]
    again = replace(requests[-1], prompt_ids=tuple(last.prompt_ids.tolist()), version=1)
    assert output_tokens(run(engine, [again])) == {last.id: last.token_ids.tolist()}


@KINDS
def test_a_request_of_an_old_version_starts_with_the_newest(keeps_kv: bool) -> None:
    engine = make_inflight_engine(keeps_kv=keeps_kv, num_versions=2)
    engine.drop(0)
    (completion,) = run(engine, [make_request(0)]).values()
    assert {chunk.version for chunk in completion.chunks} == {1}


@KINDS
def test_held_out_requests_keep_their_version(keeps_kv: bool) -> None:
    request = make_request(0)
    held_out = replace(request, id=RequestId(-1, 0, 0), group=GroupId(-1, 0))
    engine = make_inflight_engine(keeps_kv=keeps_kv)
    engine.submit([held_out, request])
    for _ in range(NUM_BEFORE):
        engine.step()
    engine.load(1, weights(1))
    completions = run(engine, [])
    assert [c.version for c in completions[held_out.id].chunks] == [0]
    assert [c.version for c in completions[request.id].chunks] == [0, 1]
    expected = run(make_inflight_engine(keeps_kv=keeps_kv), [held_out])
    assert completions[held_out.id].token_ids.tolist() == expected[held_out.id].token_ids.tolist()


@KINDS
def test_with_preemption_all_requests_finish(keeps_kv: bool) -> None:
    """Preempted requests lose mixed KV, which must not be registered for the new weights."""
    engine = make_inflight_engine(keeps_kv=keeps_kv, num_blocks=9)
    requests = [make_request(i, group_size=1, prompt_length=10, max_tokens=60) for i in range(4)]
    engine.submit(requests)
    while not any(engine.status_of(r.id) is RequestStatus.SWAPPED for r in requests):
        engine.step()
        engine.check()
    engine.load(1, weights(1))
    assert run(engine, []).keys() == {r.id for r in requests}
    assert engine.num_recomputed > 0
    other = make_request(9, group_size=1, prompt_length=10, version=1)
    repeated = replace(other, prompt_ids=requests[0].prompt_ids)
    fresh = make_inflight_engine(keeps_kv=keeps_kv, num_versions=2)
    assert output_tokens(run(engine, [repeated])) == output_tokens(run(fresh, [repeated]))


@KINDS
def test_aborted_requests_leave_nothing(keeps_kv: bool) -> None:
    engine = make_inflight_engine(keeps_kv=keeps_kv)
    requests = [make_request(i) for i in range(4)]
    engine.submit(requests)
    engine.step()
    engine.load(1, weights(1))
    engine.abort([r.id for r in requests])
    engine.check()
    assert engine.is_idle
    assert output_tokens(run(engine, requests)).keys() == {r.id for r in requests}


def test_a_request_without_a_token_does_not_keep_the_kv_of_its_prompt() -> None:
    """Else its chunks would name one version while another computed the prompt."""
    engine = make_inflight_engine(keeps_kv=True)
    first, last = make_request(0, prompt_length=20), make_request(4, prompt_length=20)
    engine.submit([first])
    engine.step()
    engine.decode_only([first.id])
    engine.submit([last])
    engine.step()  # it has a row and is paused
    assert engine.progress()[last.id] == 0
    engine.load(1, weights(1))
    engine.decode_only([])
    completions = run(engine, [])
    fresh = make_inflight_engine(keeps_kv=True, num_versions=2)
    assert [(c.version, c.num_tokens) for c in completions[last.id].chunks] == [(1, 20)]
    expected = run(fresh, [replace(last, version=1)])[last.id]
    assert completions[last.id].token_ids.tolist() == expected.token_ids.tolist()
    assert [c.version for c in completions[first.id].chunks] == [0, 1]


def test_a_request_to_an_engine_without_a_version_is_rejected() -> None:
    engine = make_engine(num_versions=0, inflight_update="inflight")
    with pytest.raises(EngineError) as rejection:
        engine.submit([make_request(0)])
    assert rejection.value.rejected == {make_request(0).id: "version 0 is not loaded; loaded: []"}
