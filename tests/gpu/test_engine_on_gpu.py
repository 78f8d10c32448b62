"""An engine on a GPU against one on the CPU. Skipped where there is none; `benchmarks/gpu.sh` runs it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tests.engine.test_sampler import drawn_logits, drawn_sampling

from dora.core.records import GroupId, RequestId
from dora.engine.device_sampler import DeviceRules, draw, rules_for
from dora.engine.engine import Engine
from dora.engine.graphs import GraphRunner
from dora.engine.runner import _causal, _causal_on_gpu
from dora.engine.sampler import RULE, rule, sample
from dora.engine.sequence import Completion, Request, Sampling
from dora.model.config import ModelConfig
from dora.model.weights import initial_weights, weight_digest

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

SMALL = ModelConfig(
    vocab_size=512,
    hidden_size=256,
    intermediate_size=384,
    num_hidden_layers=3,
    num_attention_heads=8,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=512,
)
GPU = torch.device("cuda")
Answers = dict[RequestId, Completion]


def weights(version: int) -> torch.Tensor:
    return initial_weights(SMALL, seed=version, std=0.1)


def engine(device: str, dtype: str = "float32", num_blocks: int | None = None) -> Engine:
    made = Engine(
        SMALL,
        max_rows=24,
        max_context=256,
        version_slots=2,
        num_blocks=num_blocks,
        device=device,
        dtype=dtype,
    )
    for version in (0, 1):
        made.load(version, weights(version))
    return made


def requests(num_tokens: int = 60, temperature: float = 1.0, version: int | None = None) -> list[Request]:
    """Groups of four of two versions, with prompts on both sides of a block's edge."""
    return [
        Request(
            id=RequestId(0, i // 4, i % 4),
            group=GroupId(0, i // 4),
            prompt_ids=tuple((i // 4 * 5 + j * 3) % SMALL.vocab_size for j in range(14 + i // 4)),
            version=i // 4 % 2 if version is None else version,
            seed=i,
            sampling=Sampling(temperature, num_tokens + i % 7, stop_ids=(1, 2)),
        )
        for i in range(32)
    ]


def run(made: Engine, asked: list[Request]) -> Answers:
    made.submit(asked)
    found: Answers = {}
    while not made.idle:
        found |= {completion.id: completion for completion in made.step()}
        made.check()
    return found


def check_same(found: Answers, expected: Answers, tolerance: float = 2e-4) -> None:
    """Rounding may turn a draw that is almost even, so a few answers may part; what is before is the same."""
    num_apart = 0
    for request_id, answer in found.items():
        other = expected[request_id]
        pairs = list(zip(answer.token_ids, other.token_ids, strict=False))
        num_same = next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
        num_apart += answer.token_ids != other.token_ids
        np.testing.assert_allclose(answer.logprobs[:num_same], other.logprobs[:num_same], atol=tolerance)
    assert num_apart <= len(found) // 16


@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0])
def test_answers_are_those_of_the_cpu(temperature: float) -> None:
    asked = requests(temperature=temperature)
    made = engine("cuda")
    assert made.kernels == "triton"
    check_same(run(made, asked), run(engine("cpu"), asked))


def test_replayed_steps_give_the_bits_of_called_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    replayed = run(engine("cuda"), requests())
    monkeypatch.setattr(GraphRunner, "_recorded", lambda _, step: step)
    called = run(engine("cuda"), requests())
    for request_id, answer in replayed.items():
        assert answer.token_ids == called[request_id].token_ids
        assert answer.logprobs == called[request_id].logprobs


def test_a_graph_uses_the_weights_that_are_in_its_slot_now() -> None:
    made, on_cpu = engine("cuda"), engine("cpu")
    for version in range(1, 4):
        asked = requests(num_tokens=12, version=version)
        check_same(run(made, asked), run(on_cpu, asked))
        for either in (made, on_cpu):
            either.drop(version)
            either.load(version + 1, weights(version + 1))


def test_requests_swapped_out_come_back_with_their_kv() -> None:
    made = engine("cuda", num_blocks=60)
    found = run(made, requests())
    assert made.num_swapped
    check_same(found, run(engine("cpu"), requests()))


def test_bf16_weights_are_rounded_as_they_are_loaded_and_give_almost_the_same_log_probs() -> None:
    made = engine("cuda", "bfloat16")
    assert made.versions[0] == weight_digest(weights(0).bfloat16())
    asked = requests(num_tokens=1, temperature=0.0)
    found, expected = run(made, asked), run(engine("cpu"), asked)
    errors = [
        abs(found[i].logprobs[0] - expected[i].logprobs[0])
        for i in found
        if found[i].token_ids == expected[i].token_ids
    ]
    assert len(errors) > len(found) / 2
    assert float(np.mean(errors)) < 0.05


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 3e-2)])
@pytest.mark.parametrize(("num_new", "length"), [(1, 1), (70, 70), (5, 70), (64, 129)])
def test_prefill_attention_is_causal(num_new: int, length: int, dtype: torch.dtype, tolerance: float) -> None:
    noise = torch.Generator().manual_seed(0)
    shapes = ((num_new, 8, 64), (length, 2, 64), (length, 2, 64))
    q, k, v = (torch.randn(shape, generator=noise).to(dtype) for shape in shapes)
    found = _causal_on_gpu(q.to(GPU), k.to(GPU), v.to(GPU)).cpu().float()
    torch.testing.assert_close(
        found, _causal(q.float(), k.float(), v.float()), atol=tolerance, rtol=tolerance
    )


@pytest.mark.parametrize("is_recorded", [False, True])
def test_the_sampler_on_the_gpu_draws_what_the_one_on_the_host_does(is_recorded: bool) -> None:
    source, num_rows, vocab = np.random.default_rng(0), 32, 50_000
    logits, positions = drawn_logits(source, num_rows, vocab), np.arange(num_rows)
    asked = np.array([rule(seed, drawn_sampling(source)) for seed in range(num_rows)], RULE)
    on_host = rules_for(asked, np.arange(num_rows), num_rows, vocab)
    rules = DeviceRules(*(values.to(GPU) for values in on_host))
    inputs = torch.from_numpy(logits).to(GPU), torch.from_numpy(positions).to(GPU)
    found = draw(*inputs, rules, is_changed=True, has_filters=True)
    if is_recorded:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = draw(*inputs, rules, is_changed=True, has_filters=True)
        graph.replay()
    expected = sample(logits, positions, asked)
    same = found.tokens.cpu().numpy() == expected.tokens
    assert same.mean() >= 31 / 32
    for ours, theirs in zip(found.logprobs.cpu().numpy(), expected[1:], strict=True):
        np.testing.assert_allclose(ours[same], theirs[same], atol=1e-5)
