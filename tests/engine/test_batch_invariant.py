"""Exact engines report the log-probs of a LogprobScorer, bit for bit, in any batch and after preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.engine_cluster import EngineCluster
from tests.engine.tiny import TINY, make_request, run, weights
from tests.model.families import CONFIGS, SCALED_ROPE, random_weights
from torch import Tensor

from dora.engine.batch_invariant import LogprobScorer, self_test
from dora.engine.engine import Engine
from dora.engine.kernels import eager
from dora.engine.kernels.eager import EagerKernels
from dora.engine.request import Completion, EngineError, Request, SamplingParams
from dora.model.config import ModelConfig

MODELS = {**CONFIGS, "scaled RoPE": SCALED_ROPE}
QWEN = CONFIGS["qwen3"]
MODES = [("numba", "float32"), ("eager", "float32"), ("eager", "bfloat16")]
TEMPERATURE = 0.7


def make_exact_engine(config: ModelConfig, mode: tuple[str, str], **settings: Any) -> Engine:
    """An engine with two versions and up to 16 rows."""
    kernels, dtype = mode
    sizes = {"max_rows": 16, "max_context": 64, "version_slots": 2} | settings
    engine = Engine(config, kernels=kernels, dtype=dtype, exact=True, **sizes)
    for version in (0, 1):
        engine.load(version, random_weights(config, version))
    return engine


def make_requests(num: int = 20, **changes: Any) -> list[Request]:
    """Requests of both versions, with prompts and outputs of many lengths."""
    sampling = SamplingParams(temperature=TEMPERATURE, max_tokens=12)
    return [
        replace(
            make_request(i, version=i % 2),
            sampling=replace(sampling, max_tokens=1 + i * 5 % 24, **changes),
        )
        for i in range(num)
    ]


def scorer_logprobs(
    config: ModelConfig,
    mode: tuple[str, str],
    completion: Completion,
    prompt: tuple[int, ...],
    temperature: float = TEMPERATURE,
) -> list[float]:
    """The log-probs that a scorer computes for this output alone."""
    scorer = LogprobScorer(config, 64, temperature, *mode)
    found: list[float] = scorer(
        random_weights(config, completion.version), [prompt], [completion.token_ids.tolist()]
    ).tolist()
    return found


def check_exact(config: ModelConfig, mode: tuple[str, str], requests: list[Request], engine: Engine) -> None:
    completions = run(engine, requests)
    assert completions.keys() == {request.id for request in requests}
    for request in requests:
        completion = completions[request.id]
        assert completion.logprobs.tolist() == scorer_logprobs(config, mode, completion, request.prompt_ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_two_versions_in_a_batch_report_the_logprobs_of_a_scorer(name: str, mode: tuple[str, str]) -> None:
    check_exact(MODELS[name], mode, make_requests(), make_exact_engine(MODELS[name], mode))


@pytest.mark.parametrize("mode", MODES)
def test_preempted_requests_and_chunked_prompts_report_the_logprobs_of_a_scorer(
    mode: tuple[str, str],
) -> None:
    engine = make_exact_engine(QWEN, mode, num_blocks=9, prefill_budget=7)
    requests = [
        make_request(i, version=i % 2, temperature=TEMPERATURE, prompt_length=1 + i % 20, max_tokens=40)
        for i in range(12)
    ]
    check_exact(QWEN, mode, requests, engine)
    assert engine.num_swapped


@pytest.mark.parametrize("mode", MODES)
def test_a_completion_has_the_same_bits_in_any_batch(mode: tuple[str, str]) -> None:
    together = run(make_exact_engine(QWEN, mode), make_requests())
    for request in make_requests()[::3]:
        assert run(make_exact_engine(QWEN, mode), [request])[request.id] == together[request.id]


@pytest.mark.parametrize("mode", MODES)
def test_raw_and_unfiltered_logprobs_of_filtered_requests_are_exact(mode: tuple[str, str]) -> None:
    requests = make_requests(8, top_p=0.8, min_p=0.01)
    completions = run(make_exact_engine(QWEN, mode), requests)
    for request in requests:
        completion = completions[request.id]
        assert completion.unfiltered_logprobs.tolist() == scorer_logprobs(
            QWEN, mode, completion, request.prompt_ids
        )
        assert completion.raw_logprobs.tolist() == scorer_logprobs(
            QWEN, mode, completion, request.prompt_ids, temperature=1.0
        )


def test_a_scorer_computes_the_same_in_any_packing() -> None:
    scorer = LogprobScorer(QWEN, 64, TEMPERATURE, "auto")
    flat = random_weights(QWEN)
    prompts = [request.prompt_ids for request in make_requests(6)]
    completions = [tuple(range(n)) for n in (1, 3, 0, 20, 7, 2)]
    packed = scorer(flat, prompts, completions)
    alone = [scorer(flat, [p], [a]) for p, a in zip(prompts, completions, strict=True)]
    assert torch.equal(packed, torch.cat(alone))
    assert len(packed) == sum(map(len, completions))


def test_a_migrated_request_reports_the_logprobs_of_a_scorer(tmp_path: Path) -> None:
    cluster = EngineCluster(tmp_path, "numba", exact=True)
    others = [make_request(i, max_tokens=30) for i in range(4, 10)]
    request = make_request(1, max_tokens=30)
    cluster.add_engine("a").submit([request, *others[:3]])
    cluster.add_engine("b").submit(others[3:])
    for name in "ab":
        cluster.step(name, 9)
    cluster.migrate(request, "a", "b")
    completions = cluster.run_to_end()
    scorer = LogprobScorer(TINY, 96, 1.0, "numba")
    for each in (request, *others):
        found = scorer(weights(), [each.prompt_ids], [completions[each.id].token_ids.tolist()])
        assert completions[each.id].logprobs.tolist() == found.tolist()


def test_a_linear_layer_that_mixes_rows_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    def mixing_linear(weights: Tensor, bias: Tensor | None) -> object:
        linear = eager.linear(weights, bias)

        def times(x: Tensor, /, *, out: Tensor) -> None:
            linear(x, out=out)
            out += 1e-6 * out[-1]

        return times

    monkeypatch.setattr(EagerKernels, "linear", staticmethod(mixing_linear))
    with pytest.raises(
        EngineError, match=r"exact = true: the product .*kernels = 'eager', float32 and 1 threads"
    ):
        Engine(QWEN, max_rows=2, max_context=32, version_slots=1, kernels="eager", exact=True)


def test_attention_that_mixes_rows_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = EagerKernels.attend

    def mixing_attend(self: EagerKernels, batch: object, positions: object, layer: int) -> None:
        attend(self, batch, positions, layer)  # type: ignore[arg-type]
        attended = self._work.attended
        attended *= 1 + 1e-6 * len(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(EagerKernels, "attend", mixing_attend)
    with pytest.raises(EngineError, match=r"exact = true: the logits of a token .* set other kernels"):
        self_test(QWEN, "eager")


def test_exact_mode_is_rejected_on_a_gpu() -> None:
    with pytest.raises(EngineError, match="exact = true runs on a CPU"):
        self_test(QWEN, "auto", device="cuda")
