"""The routes of MoE models: the experts of each token."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.engine_cluster import EngineCluster
from tests.engine.tiny import make_request, run
from tests.model.families import CONFIGS, compute_logits, random_weights
from torch import Tensor

from dora.engine.engine import Engine
from dora.engine.request import Completion
from dora.trainer.routing_replay import ReplayRouter

CONFIG = CONFIGS["qwen3_moe-mixed"]
FLAT = random_weights(CONFIG)
REQUESTS = [make_request(i, max_tokens=40, prompt_length=18) for i in range(6)]


SETTINGS: dict[str, Any] = {"max_rows": 8, "max_context": 64, "version_slots": 1, "returns_routes": True}


def make_engine(**settings: Any) -> Engine:
    engine = Engine(CONFIG, **SETTINGS, **settings)
    engine.load(0, FLAT)
    return engine


def check_replay(
    completion: Completion, prompt_ids: tuple[int, ...], flat: Tensor = FLAT, atol: float = 2e-5
) -> None:
    """The trainer's log-probs with replayed routes are those of the engine."""
    assert completion.routes is not None
    tokens = torch.tensor([*prompt_ids, *completion.token_ids])
    router = ReplayRouter(CONFIG, torch.from_numpy(completion.routes))
    logits = compute_logits(CONFIG, flat, tokens[None, :-1], router)
    logprobs = logits[0].log_softmax(-1)[len(prompt_ids) - 1 :]
    drawn = logprobs.gather(1, tokens[len(prompt_ids) :, None])[:, 0]
    np.testing.assert_allclose(drawn.numpy(), completion.raw_logprobs, atol=atol)


def test_routes_replay_with_shared_prompts_and_after_preemption() -> None:
    expected = run(make_engine(), REQUESTS)
    small = make_engine(num_blocks=10)
    completions = run(small, REQUESTS)
    assert small.num_swapped
    for request in REQUESTS:
        check_replay(completions[request.id], request.prompt_ids)
        np.testing.assert_array_equal(completions[request.id].routes, expected[request.id].routes)


def test_routes_migrate_with_a_request(tmp_path: Path) -> None:
    stage = EngineCluster(tmp_path, "eager")
    request = REQUESTS[0]
    for name in "ab":
        stage.add_engine(name, versions=(), config=CONFIG, **SETTINGS).load(0, FLAT)
    stage.engines["a"].submit([request])
    stage.step("a", 5)
    stage.migrate(request, "a", "b")
    completion = stage.run_to_end()[request.id]
    check_replay(completion, request.prompt_ids)
    np.testing.assert_array_equal(completion.routes, run(make_engine(), [request])[request.id].routes)


@pytest.mark.parametrize("name", ["qwen3_moe", "llama"])
def test_routes_are_returned_only_if_requested(name: str) -> None:
    engine = Engine(CONFIGS[name], max_rows=2, max_context=64, version_slots=1)
    engine.load(0, random_weights(CONFIGS[name]))
    assert run(engine, REQUESTS[:1])[REQUESTS[0].id].routes is None


def test_a_bf16_moe_model_has_almost_the_logprobs_of_an_fp32_one() -> None:
    flat = FLAT.bfloat16().float()
    engine = Engine(CONFIG, dtype="bfloat16", **SETTINGS)
    engine.load(0, flat)
    for request_id, completion in run(engine, REQUESTS).items():
        (prompt_ids,) = [request.prompt_ids for request in REQUESTS if request.id == request_id]
        check_replay(completion, prompt_ids, flat, atol=0.1)
