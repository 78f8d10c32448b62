"""Exact engines report the log-probs that a Scorer finds, to the last bit, whatever happens to a request."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.engine.moving import Stage
from tests.engine.tiny import TINY, request, run, weights
from tests.model.families import CONFIGS, STRETCHED, drawn_weights
from torch import Tensor

from dora.engine.engine import Engine
from dora.engine.exact import Scorer, self_test
from dora.engine.kernels import eager
from dora.engine.kernels.eager import EagerKernels
from dora.engine.sequence import Completion, EngineError, Request, Sampling
from dora.model.config import ModelConfig

MODELS = {**CONFIGS, "stretched": STRETCHED}
QWEN = CONFIGS["qwen3"]
MODES = [("numba", "float32"), ("eager", "float32"), ("eager", "bfloat16")]
WARM = 0.7


def exact_engine(config: ModelConfig, mode: tuple[str, str], **settings: Any) -> Engine:
    """Two versions, up to 16 rows."""
    kernels, dtype = mode
    sizes = {"max_rows": 16, "max_context": 64, "version_slots": 2} | settings
    made = Engine(config, kernels=kernels, dtype=dtype, exact=True, **sizes)
    for version in (0, 1):
        made.load(version, drawn_weights(config, version))
    return made


def asked(num: int = 20, **changes: Any) -> list[Request]:
    """Requests to both versions, with prompts and answers of many lengths."""
    sampling = Sampling(temperature=WARM, max_tokens=12)
    return [
        replace(
            request(i, version=i % 2),
            sampling=replace(sampling, max_tokens=1 + i * 5 % 24, **changes),
        )
        for i in range(num)
    ]


def scores(
    config: ModelConfig,
    mode: tuple[str, str],
    answer: Completion,
    prompt: tuple[int, ...],
    warmth: float = WARM,
) -> list[float]:
    """What the trainer's side finds, alone."""
    scorer = Scorer(config, 64, warmth, *mode)
    found: list[float] = scorer(drawn_weights(config, answer.version), [prompt], [answer.token_ids]).tolist()
    return found


def check(config: ModelConfig, mode: tuple[str, str], requests: list[Request], made: Engine) -> None:
    answers = run(made, requests)
    assert answers.keys() == {one.id for one in requests}
    for one in requests:
        answer = answers[one.id]
        assert answer.logprobs == scores(config, mode, answer, one.prompt_ids)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", MODELS)
def test_two_versions_side_by_side_report_what_a_scorer_finds(name: str, mode: tuple[str, str]) -> None:
    check(MODELS[name], mode, asked(), exact_engine(MODELS[name], mode))


@pytest.mark.parametrize("mode", MODES)
def test_swapped_requests_and_prompts_in_pieces_report_the_same(mode: tuple[str, str]) -> None:
    made = exact_engine(QWEN, mode, num_blocks=9, prefill_budget=7)
    growing = [
        request(i, version=i % 2, temperature=WARM, prompt_length=1 + i % 20, max_tokens=40)
        for i in range(12)
    ]
    check(QWEN, mode, growing, made)
    assert made.num_swapped


@pytest.mark.parametrize("mode", MODES)
def test_an_answer_has_the_same_bits_in_any_company(mode: tuple[str, str]) -> None:
    together = run(exact_engine(QWEN, mode), asked())
    for one in asked()[::3]:
        assert run(exact_engine(QWEN, mode), [one])[one.id] == together[one.id]


@pytest.mark.parametrize("mode", MODES)
def test_raw_and_unfiltered_log_probs_of_filtered_answers_are_exact(mode: tuple[str, str]) -> None:
    requests = asked(8, top_p=0.8, min_p=0.01)
    answers = run(exact_engine(QWEN, mode), requests)
    for one in requests:
        answer = answers[one.id]
        assert answer.unfiltered_logprobs == scores(QWEN, mode, answer, one.prompt_ids)
        assert answer.raw_logprobs == scores(QWEN, mode, answer, one.prompt_ids, warmth=1.0)


def test_a_scorer_finds_the_same_in_any_packing() -> None:
    scorer = Scorer(QWEN, 64, WARM, "auto")
    flat = drawn_weights(QWEN)
    prompts = [one.prompt_ids for one in asked(6)]
    answers = [tuple(range(n)) for n in (1, 3, 0, 20, 7, 2)]
    packed = scorer(flat, prompts, answers)
    alone = [scorer(flat, [p], [a]) for p, a in zip(prompts, answers, strict=True)]
    assert torch.equal(packed, torch.cat(alone))
    assert len(packed) == sum(map(len, answers))


def test_a_moved_request_reports_what_a_scorer_finds(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "numba", exact=True)
    companions = [request(i, max_tokens=30) for i in range(4, 10)]
    one = request(1, max_tokens=30)
    stage.engine("a").submit([one, *companions[:3]])
    stage.engine("b").submit(companions[3:])
    for name in "ab":
        stage.step(name, 9)
    stage.move(one, "a", "b")
    answers = stage.run()
    scorer = Scorer(TINY, 96, 1.0, "numba")
    for each in (one, *companions):
        found = scorer(weights(), [each.prompt_ids], [answers[each.id].token_ids])
        assert answers[each.id].logprobs == found.tolist()


def test_a_product_that_looks_at_its_neighbours_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaning(weights: Tensor, bias: Tensor | None) -> object:
        own = eager.product(weights, bias)

        def times(x: Tensor, /, *, out: Tensor) -> None:
            own(x, out=out)
            out += 1e-6 * out[-1]

        return times

    monkeypatch.setattr(EagerKernels, "product", staticmethod(leaning))
    with pytest.raises(
        EngineError, match=r"exact = true: .*product .*kernels = 'eager', float32 and 1 threads"
    ):
        Engine(QWEN, max_rows=2, max_context=32, version_slots=1, kernels="eager", exact=True)


def test_kernels_that_look_at_their_neighbours_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = EagerKernels.attend

    def leaning(self: EagerKernels, batch: object, positions: object, layer: int) -> None:
        attend(self, batch, positions, layer)  # type: ignore[arg-type]
        attended = self._work.attended
        attended *= 1 + 1e-6 * len(batch)  # type: ignore[arg-type]

    monkeypatch.setattr(EagerKernels, "attend", leaning)
    with pytest.raises(EngineError, match=r"exact = true: a token's logits .* set other kernels"):
        self_test(QWEN, "eager")


def test_exact_mode_is_for_cpus() -> None:
    with pytest.raises(EngineError, match="exact = true runs on a CPU"):
        self_test(QWEN, "auto", device="cuda")
