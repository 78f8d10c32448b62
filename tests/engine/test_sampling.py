"""What an engine makes of a request's `Sampling`, wherever the request is answered."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tests.engine.moving import Stage
from tests.engine.tiny import TINY, engine, full_logits, request, run, tokens, weights

from dora.engine.engine import Engine
from dora.engine.sequence import EngineError, Request, Sampling
from dora.handover.engine import MovingEngine

FILTERS: list[dict[str, Any]] = [
    {},
    {"top_k": 4},
    {"top_p": 0.8},
    {"min_p": 0.1},
    {"top_k": 9, "top_p": 0.9, "min_p": 0.02},
]


def read(ids: list[int]) -> str:
    """Two letters for each token."""
    return "".join(chr(97 + i % 5) + chr(110 + i % 7) for i in ids)


READER: dict[str, Any] = {"max_context": 96, "version_slots": 1, "kernels": "eager", "detokenize": read}


def reader(max_rows: int = 32, **settings: Any) -> Engine:
    """An engine that can read."""
    made = Engine(TINY, max_rows=max_rows, **READER, **settings)
    made.load(0, weights())
    return made


def put_reader(stage: Stage, name: str) -> None:
    """One from which requests can move."""
    made = MovingEngine(TINY, max_rows=4, pool=stage.pool(name), clock=lambda: stage.now_s, **READER)
    made.load(0, weights())
    stage.engines[name] = made


def ask(number: int, **changes: Any) -> Request:
    asked = request(number, max_tokens=30)
    return replace(asked, sampling=replace(asked.sampling, **changes))


def test_logprobs_are_those_of_what_was_drawn_from_of_all_tokens_and_of_the_model() -> None:
    requests = [ask(i, temperature=1.0 if i % 2 else 0.7, **FILTERS[i % 5]) for i in range(20)]
    answers = run(engine(), requests)
    for asked in requests:
        answer, how = answers[asked.id], asked.sampling
        start = len(asked.prompt_ids) - 1
        logits = full_logits(weights(), [*asked.prompt_ids, *answer.token_ids])[start:-1]
        ids = torch.tensor(answer.token_ids)[:, None]
        raw = logits.log_softmax(-1).gather(1, ids)[:, 0]
        torch.testing.assert_close(torch.tensor(answer.raw_logprobs), raw, atol=1e-5, rtol=0)
        tempered = (logits / how.temperature).log_softmax(-1).gather(1, ids)[:, 0]
        torch.testing.assert_close(torch.tensor(answer.unfiltered_logprobs), tempered, atol=1e-5, rtol=0)
        if how.top_k == 4 and how.top_p == 1:
            values, kept = (logits / how.temperature).topk(4)
            drawn = values.log_softmax(-1)[kept == ids]
            torch.testing.assert_close(torch.tensor(answer.logprobs), drawn, atol=1e-5, rtol=0)
        if how == request(0, max_tokens=30).sampling:
            assert answer.logprobs == answer.unfiltered_logprobs == answer.raw_logprobs
    assert any(answers[asked.id].logprobs != answers[asked.id].raw_logprobs for asked in requests)


def test_filtered_requests_get_the_same_tokens_alone_and_in_any_batch() -> None:
    requests = [ask(i, **FILTERS[i % 5]) for i in range(20)]
    together = tokens(run(engine(), requests))
    assert tokens(run(engine(max_rows=3), requests[::-1])) == together
    for asked in requests[::4]:
        assert tokens(run(engine(), [asked])) == {asked.id: together[asked.id]}


def test_an_answer_ends_with_the_token_that_completes_a_stop_string() -> None:
    requests = [ask(i) for i in range(16)]
    free = run(reader(), requests)
    stop_strings = (read(free[requests[0].id].token_ids[7:10])[1:-1], "zzz", "oap")
    stopped = run(reader(), [ask(i, stop_strings=stop_strings) for i in range(16)])
    assert len(stopped[requests[0].id].token_ids) <= 10
    for asked in requests:
        ids, answer = free[asked.id].token_ids, stopped[asked.id]
        hits = [n for n in range(1, 31) if any(stop in read(ids[:n]) for stop in stop_strings)]
        assert answer.token_ids == ids[: hits[0] if hits else 30]
        assert answer.finish_reason == ("stop" if hits else "length")
        assert len(answer.raw_logprobs) == len(answer.logprobs) == len(answer.token_ids)
    assert {answer.finish_reason for answer in stopped.values()} == {"stop", "length"}


def test_a_prompt_cannot_complete_a_stop_string_and_the_last_token_can() -> None:
    asked = ask(0)
    ids = run(reader(), [asked])[asked.id].token_ids
    straddling = read([*asked.prompt_ids[-1:], ids[0]])
    first = run(reader(), [ask(0, stop_strings=(straddling,), max_tokens=1)])[asked.id]
    assert first.finish_reason == "length"
    last = run(reader(), [ask(0, stop_strings=(read(ids[:1]),), max_tokens=1)])[asked.id]
    assert (last.finish_reason, last.token_ids) == ("stop", ids[:1])


def test_stop_strings_need_an_engine_that_can_read() -> None:
    made = engine()
    with pytest.raises(EngineError, match=r"stop_strings, but the engine cannot read: give Engine\(detok"):
        made.submit([ask(0, stop_strings=("x",)), ask(1)])
    assert len(run(made, [])) == 1


def test_a_moved_request_keeps_filters_stop_strings_and_both_logprobs(stage: Stage) -> None:
    for name in ("a", "b"):
        put_reader(stage, name)
    free = run(reader(), [ask(1, top_k=6, temperature=0.8)])[ask(1).id]
    asked = ask(1, top_k=6, temperature=0.8, stop_strings=(read(free.token_ids[8:11])[1:],))
    expected = run(reader(), [asked])[asked.id]
    assert expected.finish_reason == "stop"
    stage.engines["a"].submit([asked])
    stage.step("a", min(9, len(expected.token_ids) - 1))
    stage.move(asked, "a", "b")
    answer = stage.run()[asked.id]
    assert (answer.token_ids, answer.finish_reason) == (expected.token_ids, "stop")
    assert answer.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    assert answer.raw_logprobs == pytest.approx(expected.raw_logprobs, abs=1e-5)
    assert answer.unfiltered_logprobs == pytest.approx(expected.unfiltered_logprobs, abs=1e-5)
    assert answer.logprobs != answer.unfiltered_logprobs != answer.raw_logprobs


def test_a_request_with_stop_strings_does_not_move_to_an_engine_that_cannot_read(stage: Stage) -> None:
    put_reader(stage, "a")
    stage.engine("b")
    asked = ask(0, stop_strings=("zzz",))
    stage.engines["a"].submit([asked])
    stage.step("a", 2)
    word = stage.ask(asked, "a", "b")
    assert "the engine cannot read" in str(word)
    assert stage.run()[asked.id].finish_reason == "length"


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
def test_impossible_settings_are_named(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(EngineError, match=message):
        Sampling(**{"temperature": 1.0, "max_tokens": 4} | settings)
