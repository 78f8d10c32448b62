"""What an engine says about the experts its tokens were sent to."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.moving import Stage
from tests.engine.tiny import request, run
from tests.model.families import CONFIGS, drawn_weights, our_logits

from dora.engine.engine import Engine
from dora.engine.sequence import Completion
from dora.handover.engine import MovingEngine
from dora.trainer.routes import Replay

CONFIG = CONFIGS["qwen3_moe-mixed"]
FLAT = drawn_weights(CONFIG)
ASKED = [request(i, max_tokens=40, prompt_length=18) for i in range(6)]


SETTINGS: dict[str, Any] = {"max_rows": 8, "max_context": 64, "version_slots": 1, "returns_routes": True}


def engine(**settings: Any) -> Engine:
    made = Engine(CONFIG, **SETTINGS, **settings)
    made.load(0, FLAT)
    return made


def check_replay(answer: Completion, prompt_ids: tuple[int, ...]) -> None:
    """The trainer's log-probs along the routes are those of the engine."""
    assert answer.routes is not None
    tokens = torch.tensor([*prompt_ids, *answer.token_ids])
    logits = our_logits(CONFIG, FLAT, tokens[None, :-1], Replay(CONFIG, torch.from_numpy(answer.routes)))
    logprobs = logits[0].log_softmax(-1)[len(prompt_ids) - 1 :]
    drawn = logprobs.gather(1, tokens[len(prompt_ids) :, None])[:, 0]
    np.testing.assert_allclose(drawn.numpy(), answer.raw_logprobs, atol=2e-5)


def test_answers_replay_whoever_shared_the_prompt_and_whoever_was_swapped_out() -> None:
    expected = run(engine(), ASKED)
    crowded = engine(num_blocks=10)
    answers = run(crowded, ASKED)
    assert crowded.num_swapped
    for asked in ASKED:
        check_replay(answers[asked.id], asked.prompt_ids)
        np.testing.assert_array_equal(answers[asked.id].routes, expected[asked.id].routes)


def test_routes_move_with_a_request(tmp_path: Path) -> None:
    stage = Stage(tmp_path, "eager")
    asked = ASKED[0]
    for name in "ab":
        made = MovingEngine(CONFIG, pool=stage.pool(name), clock=lambda: stage.now_s, **SETTINGS)
        made.load(0, FLAT)
        stage.engines[name] = made
    stage.engines["a"].submit([asked])
    stage.step("a", 5)
    stage.move(asked, "a", "b")
    answer = stage.run()[asked.id]
    check_replay(answer, asked.prompt_ids)
    np.testing.assert_array_equal(answer.routes, run(engine(), [asked])[asked.id].routes)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_routes_are_returned_only_when_asked_for(name: str) -> None:
    made = Engine(CONFIGS[name], max_rows=2, max_context=64, version_slots=1)
    made.load(0, drawn_weights(CONFIGS[name]))
    assert run(made, ASKED[:1])[ASKED[0].id].routes is None


def test_a_mixture_in_bf16_routes_and_computes_almost_as_one_in_fp32() -> None:
    flat = FLAT.bfloat16().float()
    made = Engine(CONFIG, dtype="bfloat16", **SETTINGS)
    made.load(0, flat)
    for request_id, answer in run(made, ASKED).items():
        (prompt_ids,) = [asked.prompt_ids for asked in ASKED if asked.id == request_id]
        assert answer.routes is not None
        tokens = torch.tensor([*prompt_ids, *answer.token_ids])
        logits = our_logits(CONFIG, flat, tokens[None, :-1], Replay(CONFIG, torch.from_numpy(answer.routes)))
        logprobs = logits[0].log_softmax(-1)[len(prompt_ids) - 1 :]
        drawn = logprobs.gather(1, tokens[len(prompt_ids) :, None])[:, 0]
        np.testing.assert_allclose(drawn.numpy(), answer.raw_logprobs, atol=0.1)
