"""Requests that cannot run are refused with the remedy, and those beside them never notice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from tests.engine.tiny import TINY, request, run, tokens, weights

from dora.core.records import RequestId
from dora.engine.engine import Engine
from dora.engine.sequence import Completion, EngineError, Request


def engine(**settings: Any) -> Engine:
    """An engine of 12 KV blocks that reads each token as one letter."""
    made = Engine(
        TINY, max_rows=4, max_context=96, version_slots=1, num_blocks=12, kernels="eager",
        detokenize=lambda ids: "".join(chr(97 + i) for i in ids), **settings,
    )  # fmt: skip
    made.load(0, weights())
    return made


def asking(number: int, **changes: Any) -> Request:
    asked = request(number, prompt_length=12)
    return replace(asked, sampling=replace(asked.sampling, **changes))


GOOD = [asking(i) for i in range(6)]
BAD = {
    "its prompt is empty; give at least one token": replace(asking(8), prompt_ids=()),
    "token ids outside 0..28; use the model's own tokenizer": replace(asking(8), prompt_ids=(3, 29)),
    "12 + 85 tokens, over max_context = 96; shorten the prompt, lower max_tokens or raise": asking(
        8, max_tokens=85
    ),
    "version 7 is not held; held: [0]": replace(asking(8), version=7),
    "it is here already": asking(0),
    "it has 9 stop_ids; at most 8": asking(8, stop_ids=tuple(range(9))),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_request_that_cannot_run_disturbs_nobody(reason: str) -> None:
    made, expected = engine(), tokens(run(engine(), GOOD))
    made.submit(GOOD[:4])
    answers: dict[RequestId, Completion] = {}
    for i in range(6):
        answers |= {completion.id: completion for completion in made.step()}
        if i == 2:
            with pytest.raises(EngineError) as caught:
                made.submit([GOOD[4], BAD[reason], GOOD[5]])
            assert reason in str(caught.value)
            assert list(caught.value.refused) == [BAD[reason].id]
    assert tokens(answers | run(made, [])) == expected


def test_a_request_that_alone_overfills_the_memory_is_refused_with_both_numbers() -> None:
    made = Engine(TINY, max_rows=4, max_context=96, version_slots=1, num_blocks=4, kernels="eager")
    made.load(0, weights())
    large = request(8, prompt_length=40, max_tokens=50)
    with pytest.raises(EngineError, match="it may need 7 KV blocks and the engine has 4 in all; raise num_b"):
        made.submit([*GOOD[:2], large])
    assert tokens(run(made, [])) == tokens(run(engine(), GOOD[:2]))


def test_a_stop_text_that_never_comes_ends_at_max_tokens() -> None:
    never = asking(1, stop_strings=("never", "zzz"), stop_ids=(1000,))
    answers = run(engine(), [GOOD[0], never, GOOD[2]])
    assert tokens(answers) == tokens(run(engine(), GOOD[:3]))
    assert answers[never.id].finish_reason == "length"
    assert len(answers[never.id].token_ids) == never.sampling.max_tokens
