"""Requests that cannot run are rejected with the remedy, and change nothing for other requests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.engine.tiny import make_engine, make_request, output_tokens, run

from dora.core.types import RequestId
from dora.engine.engine import Engine
from dora.engine.request import Completion, EngineError, Request


def letter_engine() -> Engine:
    """An engine of 12 KV blocks that detokenizes each token as a letter."""
    return make_engine(max_rows=4, num_blocks=12, detokenize=lambda ids: "".join(chr(97 + i) for i in ids))


def short_request(number: int, **changes: Any) -> Request:
    request = make_request(number, prompt_length=12)
    return replace(request, sampling=replace(request.sampling, **changes))


GOOD = [short_request(i) for i in range(6)]
BAD = {
    "its prompt is empty; give at least one token": replace(short_request(8), prompt_ids=()),
    "token ids outside 0..28; use the model's own tokenizer": replace(short_request(8), prompt_ids=(3, 29)),
    "12 + 85 tokens, over max_context = 96; shorten the prompt, lower max_tokens or raise": short_request(
        8, max_tokens=85
    ),
    "version 7 is not loaded; loaded: [0]": replace(short_request(8), version=7),
    "the engine has this request already": short_request(0),
    "it has 9 stop_ids; give at most 8": short_request(8, stop_ids=tuple(range(9))),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_request_that_cannot_run_changes_nothing_for_others(reason: str) -> None:
    engine, expected = letter_engine(), output_tokens(run(letter_engine(), GOOD))
    engine.submit(GOOD[:4])
    completions: dict[RequestId, Completion] = {}
    for i in range(6):
        completions |= {completion.id: completion for completion in engine.step()}
        if i == 2:
            with pytest.raises(EngineError) as caught:
                engine.submit([GOOD[4], BAD[reason], GOOD[5]])
            assert reason in str(caught.value)
            assert "1 of 3 requests rejected" in str(caught.value)
            assert list(caught.value.rejected) == [BAD[reason].id]
    assert output_tokens(completions | run(engine, [])) == expected


def test_a_request_that_needs_more_blocks_than_the_pool_has_is_rejected_with_both_numbers() -> None:
    engine = make_engine(max_rows=4, num_blocks=4)
    large = make_request(8, prompt_length=40, max_tokens=50)
    with pytest.raises(EngineError, match="it may need 7 KV blocks and the engine has 4; raise num_b"):
        engine.submit([*GOOD[:2], large])
    assert output_tokens(run(engine, [])) == output_tokens(run(letter_engine(), GOOD[:2]))


def test_a_stop_string_that_never_occurs_ends_at_max_tokens() -> None:
    never = short_request(1, stop_strings=("never", "zzz"), stop_ids=(1000,))
    completions = run(letter_engine(), [GOOD[0], never, GOOD[2]])
    assert output_tokens(completions) == output_tokens(run(letter_engine(), GOOD[:3]))
    assert completions[never.id].finish_reason == "length"
    assert len(completions[never.id].token_ids) == never.sampling.max_tokens
