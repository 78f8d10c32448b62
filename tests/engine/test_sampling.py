"""An engine applies a request's `SamplingParams`, also after a migration."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.engine.engine_cluster import EngineCluster
from tests.engine.tiny import full_logits, make_engine, make_request, output_tokens, run, weights

from dora.engine.request import EngineError, Request, SamplingParams

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
]


def letters(ids: Sequence[int] | NDArray[np.int32]) -> str:
    """Two letters for each token."""
    return "".join(chr(97 + i % 5) + chr(110 + i % 7) for i in ids)


make_text_engine = partial(make_engine, detokenize=letters)


def sampled_request(number: int, **changes: Any) -> Request:
    request = make_request(number, max_tokens=30)
    return replace(request, sampling=replace(request.sampling, **changes))


def test_completions_have_filtered_unfiltered_and_raw_logprobs() -> None:
    requests = [sampled_request(i, temperature=1.0 if i % 2 else 0.7, **FILTERS[i % 5]) for i in range(20)]
    completions = run(make_engine(), requests)
    for request in requests:
        completion, sampling = completions[request.id], request.sampling
        start = len(request.prompt_ids) - 1
        logits = full_logits(weights(), [*request.prompt_ids, *completion.token_ids])[start:-1]
        ids = torch.tensor(completion.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(1, ids)[:, 0]
        torch.testing.assert_close(torch.tensor(completion.raw_logprobs), raw, atol=1e-5, rtol=0)
        tempered = (logits / sampling.temperature).log_softmax(-1).gather(1, ids)[:, 0]
        torch.testing.assert_close(torch.tensor(completion.unfiltered_logprobs), tempered, atol=1e-5, rtol=0)
        if sampling.top_k == 4 and sampling.top_p == 1:
            values, kept = (logits / sampling.temperature).topk(4)
            drawn = values.log_softmax(-1)[kept == ids]
            torch.testing.assert_close(torch.tensor(completion.logprobs), drawn, atol=1e-5, rtol=0)
        if sampling == make_request(0, max_tokens=30).sampling:
            assert (
                completion.logprobs.tolist()
                == completion.unfiltered_logprobs.tolist()
                == completion.raw_logprobs.tolist()
            )
    assert any(
        completions[request.id].logprobs.tolist() != completions[request.id].raw_logprobs.tolist()
        for request in requests
    )


def test_filtered_requests_have_the_same_tokens_alone_and_in_any_batch() -> None:
    requests = [sampled_request(i, **FILTERS[i % 5]) for i in range(20)]
    together = output_tokens(run(make_engine(), requests))
    assert output_tokens(run(make_engine(max_rows=3), requests[::-1])) == together
    for request in requests[::4]:
        assert output_tokens(run(make_engine(), [request])) == {request.id: together[request.id]}


def test_an_output_ends_with_the_token_that_completes_a_stop_string() -> None:
    requests = [sampled_request(i) for i in range(16)]
    unstopped = run(make_text_engine(), requests)
    stop_strings = (letters(unstopped[requests[0].id].token_ids[7:10])[1:-1], "zzz", "oap")
    stopped = run(make_text_engine(), [sampled_request(i, stop_strings=stop_strings) for i in range(16)])
    assert len(stopped[requests[0].id].token_ids) <= 10
    for request in requests:
        ids, completion = unstopped[request.id].token_ids.tolist(), stopped[request.id]
        hits = [n for n in range(1, 31) if any(stop in letters(ids[:n]) for stop in stop_strings)]
        assert completion.token_ids.tolist() == ids[: hits[0] if hits else 30]
        assert completion.finish_reason == ("stop" if hits else "length")
        assert len(completion.raw_logprobs) == len(completion.logprobs) == len(completion.token_ids)
    assert {completion.finish_reason for completion in stopped.values()} == {"stop", "length"}


def test_a_stop_string_may_end_at_the_last_token_but_not_begin_in_the_prompt() -> None:
    request = sampled_request(0)
    ids = run(make_text_engine(), [request])[request.id].token_ids.tolist()
    straddling = letters([*request.prompt_ids[-1:], ids[0]])
    first = run(make_text_engine(), [sampled_request(0, stop_strings=(straddling,), max_tokens=1)])[
        request.id
    ]
    assert first.finish_reason == "length"
    last = run(make_text_engine(), [sampled_request(0, stop_strings=(letters(ids[:1]),), max_tokens=1)])[
        request.id
    ]
    assert (last.finish_reason, last.token_ids.tolist()) == ("stop", ids[:1])


def test_stop_strings_need_an_engine_with_a_tokenizer() -> None:
    engine = make_engine()
    with pytest.raises(
        EngineError, match=r"stop_strings, but the engine has no tokenizer; pass Engine\(detok"
    ):
        engine.submit([sampled_request(0, stop_strings=("x",)), sampled_request(1)])
    assert len(run(engine, [])) == 1


def test_a_migrated_request_keeps_filters_stop_strings_and_all_logprobs(cluster: EngineCluster) -> None:
    for name in "ab":
        cluster.add_engine(name, detokenize=letters)
    unstopped = run(make_text_engine(), [sampled_request(1, top_k=6, temperature=0.8)])[sampled_request(1).id]
    request = sampled_request(
        1, top_k=6, temperature=0.8, stop_strings=(letters(unstopped.token_ids[8:11])[1:],)
    )
    expected = run(make_text_engine(), [request])[request.id]
    assert expected.finish_reason == "stop"
    cluster.engines["a"].submit([request])
    cluster.step("a", min(9, len(expected.token_ids) - 1))
    cluster.migrate(request, "a", "b")
    completion = cluster.run_to_end()[request.id]
    assert (completion.token_ids.tolist(), completion.finish_reason) == (expected.token_ids.tolist(), "stop")
    assert completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert completion.raw_logprobs == pytest.approx(expected.raw_logprobs, abs=1e-5)
    assert completion.unfiltered_logprobs == pytest.approx(expected.unfiltered_logprobs, abs=1e-5)
    assert (
        completion.logprobs.tolist()
        != completion.unfiltered_logprobs.tolist()
        != completion.raw_logprobs.tolist()
    )


def test_a_request_with_stop_strings_does_not_migrate_to_an_engine_without_tokenizer(
    cluster: EngineCluster,
) -> None:
    cluster.add_engine("a", detokenize=letters)
    cluster.add_engine("b")
    request = sampled_request(0, stop_strings=("zzz",))
    cluster.engines["a"].submit([request])
    cluster.step("a", 2)
    reply = cluster.try_reserve(request, "a", "b")
    assert "the engine has no tokenizer" in str(reply)
    assert cluster.run_to_end()[request.id].finish_reason == "length"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"temperature": -1.0}, "temperature = -1.0 must be finite and at least 0; 0 is greedy"),
        ({"temperature": float("nan")}, "temperature = nan must be"),
        ({"temperature": float("inf")}, "temperature = inf must be"),
        ({"max_tokens": 0}, "max_tokens = 0 must be at least 1"),
        ({"top_p": 0.0}, "top_p = 0.0 must be over 0 and at most 1; 1 keeps all tokens"),
        ({"top_p": 1.1}, "top_p = 1.1"),
        ({"top_p": float("nan")}, "top_p = nan"),
        ({"top_k": -1}, "top_k = -1 must be from 0 to 2147483647; 0 keeps all tokens"),
        ({"top_k": 2**31}, "top_k = 2147483648"),
        ({"min_p": 1.5}, "min_p = 1.5 must be from 0 to 1; 0 keeps all tokens"),
        ({"stop_strings": ("a", "")}, r"stop_strings = \('a', ''\) must be a tuple of strings"),
        ({"stop_strings": "abc"}, "stop_strings = 'abc' must be a tuple of strings"),
    ],
)
def test_invalid_parameters_are_rejected(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        SamplingParams(**{"temperature": 1.0, "max_tokens": 4} | settings)
