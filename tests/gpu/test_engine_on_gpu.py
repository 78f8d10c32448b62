"""An engine on a GPU against one on the CPU. Skipped without a GPU; `benchmarks/gpu.sh` runs it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from tests.engine.test_sampler import random_logits, random_params
from tests.engine.tiny import run
from tests.fake_cuda import SMALL

from dora.core.types import GroupId, RequestId
from dora.engine.cuda_graphs import CUDAGraphRunner
from dora.engine.engine import Engine
from dora.engine.kernels.device_sampler import DeviceSamplingMetadata, device_metadata, sample_on_device
from dora.engine.kernels.sampler import SAMPLING_DTYPE, sample, sampling_metadata
from dora.engine.request import Completion, Request, SamplingParams
from dora.engine.runner import causal_attention, fused_causal_attention
from dora.model.attention import varlen_attention, varlen_layout
from dora.model.weights import initial_weights, weight_digest
from dora.weights.store import WeightStore

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

WIDER = replace(SMALL, hidden_size=256, intermediate_size=384, num_hidden_layers=3)
GPU = torch.device("cuda")
Completions = dict[RequestId, Completion]


def weights(version: int) -> torch.Tensor:
    return initial_weights(WIDER, seed=version, std=0.1)


def make_engine(device: str, dtype: str = "float32", num_blocks: int | None = None) -> Engine:
    engine = Engine(
        WIDER,
        max_rows=24,
        max_context=256,
        version_slots=2,
        num_blocks=num_blocks,
        device=device,
        dtype=dtype,
    )
    for version in (0, 1):
        engine.load(version, weights(version))
    return engine


def make_requests(
    num_tokens: int = 60, temperature: float = 1.0, version: int | None = None
) -> list[Request]:
    """Groups of four requests of two versions, with prompts on both sides of block boundaries."""
    return [
        Request(
            id=RequestId(0, i // 4, i % 4),
            group=GroupId(0, i // 4),
            prompt_ids=tuple((i // 4 * 5 + j * 3) % WIDER.vocab_size for j in range(14 + i // 4)),
            version=i // 4 % 2 if version is None else version,
            seed=i,
            sampling=SamplingParams(temperature, num_tokens + i % 7, stop_ids=(1, 2)),
        )
        for i in range(32)
    ]


def check_same(found: Completions, expected: Completions, tolerance: float = 2e-4) -> None:
    """Compare log-probs up to the first different token; rounding may change a few samples."""
    num_different = 0
    for request_id, completion in found.items():
        other = expected[request_id]
        pairs = list(zip(completion.token_ids, other.token_ids, strict=False))
        num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        num_different += completion.token_ids.tolist() != other.token_ids.tolist()
        np.testing.assert_allclose(completion.logprobs[:num_same], other.logprobs[:num_same], atol=tolerance)
    assert num_different <= len(found) // 16


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_completions_are_those_of_the_cpu(temperature: float) -> None:
    requests = make_requests(temperature=temperature)
    engine = make_engine("cuda")
    assert engine.kernels == "triton"
    check_same(run(engine, requests), run(make_engine("cpu"), requests))


def test_replayed_steps_have_the_bits_of_called_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = run(make_engine("cuda"), make_requests())
    monkeypatch.setattr(CUDAGraphRunner, "_capture", lambda _, step: step)
    called = run(make_engine("cuda"), make_requests())
    for request_id, completion in replayed.items():
        assert completion.token_ids.tolist() == called[request_id].token_ids.tolist()
        assert completion.logprobs.tolist() == called[request_id].logprobs.tolist()


def test_a_graph_uses_the_current_weights_of_its_slot() -> None:
    engine, on_cpu = make_engine("cuda"), make_engine("cpu")
    for version in range(1, 4):
        requests = make_requests(num_tokens=12, version=version)
        check_same(run(engine, requests), run(on_cpu, requests))
        for either in (engine, on_cpu):
            either.drop(version)
            either.load(version + 1, weights(version + 1))


def test_preempted_requests_return_with_their_kv() -> None:
    engine = make_engine("cuda", num_blocks=60)
    found = run(engine, make_requests())
    assert engine.num_swapped
    check_same(found, run(make_engine("cpu"), make_requests()))


def test_bf16_weights_are_rounded_when_loaded_and_give_almost_the_same_logprobs() -> None:
    engine = make_engine("cuda", "bfloat16")
    assert engine.versions[0] == weight_digest(weights(0).bfloat16())
    requests = make_requests(num_tokens=1, temperature=0.0)
    found, expected = run(engine, requests), run(make_engine("cpu"), requests)
    errors = [
        abs(found[i].logprobs[0] - expected[i].logprobs[0])
        for i in found
        if found[i].token_ids.tolist() == expected[i].token_ids.tolist()
    ]
    assert len(errors) > len(found) / 2
    assert float(np.mean(errors)) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_weights_on_the_gpu_are_published_with_the_digest_of_the_host(dtype: str, tmp_path: Path) -> None:
    flat = torch.randn(2**23 + 3)
    store = WeightStore(tmp_path, dtype, {"weight": (flat.numel(),)})
    rounded = flat.to(getattr(torch, dtype))
    assert store.publish(0, flat.to(GPU)) == weight_digest(rounded) == weight_digest(rounded.to(GPU))
    assert torch.equal(store.fetch(0), rounded)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("num_new", "length"), [(1, 1), (70, 70), (5, 70), (64, 129)])
def test_prefill_attention_is_causal(num_new: int, length: int, dtype: torch.dtype, tolerance: float) -> None:
    noise = torch.Generator().manual_seed(0)
    shapes = ((num_new, 8, 64), (length, 2, 64), (length, 2, 64))
    q, k, v = (torch.randn(shape, generator=noise).to(dtype) for shape in shapes)
    found = fused_causal_attention(q.to(GPU), k.to(GPU), v.to(GPU)).cpu().float()
    torch.testing.assert_close(
        found, causal_attention(q.float(), k.float(), v.float()), atol=tolerance, rtol=tolerance
    )


def test_the_kernel_for_variable_lengths_is_causal() -> None:
    noise = torch.Generator().manual_seed(0)
    num_queries, num_keys = (70, 1, 5, 64), (70, 1, 70, 129)
    shapes = ((sum(num_queries), 8, 64), (sum(num_keys), 2, 64), (sum(num_keys), 2, 64))
    q, k, v = (torch.randn(shape, generator=noise).bfloat16() for shape in shapes)
    kernel = varlen_attention(q.to(GPU))
    assert kernel is not None
    found = kernel(q.to(GPU), k.to(GPU), v.to(GPU), varlen_layout(num_queries, num_keys, GPU)).cpu().float()
    parts = zip(
        *(x.float().split(n) for x, n in ((q, num_queries), (k, num_keys), (v, num_keys))), strict=True
    )
    expected = torch.cat([causal_attention(*part) for part in parts])
    torch.testing.assert_close(found, expected, atol=3e-2, rtol=3e-2)


@pytest.mark.parametrize("is_captured", [False, True])
def test_the_device_sampler_samples_what_the_host_sampler_does(is_captured: bool) -> None:
    source, num_rows, vocab = np.random.default_rng(0), 32, 50_000
    logits, positions = random_logits(source, num_rows, vocab), np.arange(num_rows)
    requests = np.array(
        [sampling_metadata(seed, random_params(source)) for seed in range(num_rows)], SAMPLING_DTYPE
    )
    on_host = device_metadata(requests, np.arange(num_rows), num_rows, vocab)
    rules = DeviceSamplingMetadata(*(values.to(GPU) for values in on_host))
    inputs = torch.from_numpy(logits).to(GPU), torch.from_numpy(positions).to(GPU)
    found = sample_on_device(*inputs, rules, is_modified=True, has_filters=True)
    if is_captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = sample_on_device(*inputs, rules, is_modified=True, has_filters=True)
        graph.replay()
    expected = sample(logits, positions, requests)
    same = found.tokens.cpu().numpy() == expected.tokens
    assert same.mean() >= 31 / 32
    for ours, theirs in zip(found.logprobs.cpu().numpy(), expected[1:], strict=True):
        np.testing.assert_allclose(ours[same], theirs[same], atol=1e-5)
