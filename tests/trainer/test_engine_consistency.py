"""The trainer's log-probs equal the engine's, with sampling filters and with replayed routes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from tests.engine.tiny import TINY, make_request, run, weights
from tests.model.families import CONFIGS, random_weights
from torch import Tensor

from dora.core.types import RequestId
from dora.engine.engine import Engine
from dora.engine.request import Completion, Request
from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.routing_replay import load_imbalance, replay_routes
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

MIXTURE = CONFIGS["qwen3_moe-mixed"]
SETTINGS = TrainerSettings(lr=1e-3, num_steps=4, warmup_steps=0)
CPU = torch.device("cpu")


def answers(
    config: ModelConfig, flat: Tensor, requests: list[Request], **settings: Any
) -> dict[RequestId, Completion]:
    engine = Engine(config, max_rows=8, max_context=64, version_slots=1, **settings)
    engine.load(0, flat)
    return run(engine, requests)


def sampling_request(number: int, **sampling: Any) -> Request:
    plain = make_request(number, max_tokens=24, prompt_length=6)
    return replace(plain, sampling=replace(plain.sampling, **sampling))


def nearly_tied(config: ModelConfig, flat: Tensor) -> tuple[Tensor, Tensor]:
    """Weights whose router gives experts 0 and 1 equal scores, and the same with a tiny difference."""
    tied, other = flat.clone(), flat.clone()
    for i in config.moe_layers:
        router = WeightLayout(config).views(tied)[f"model.layers.{i}.mlp.gate.weight"]
        router[1] = router[0]
        moved = WeightLayout(config).views(other)[f"model.layers.{i}.mlp.gate.weight"]
        moved[0], moved[1] = router[0], router[0] * (1 + 2e-7) + 1e-8
    return tied, other


def test_the_ratio_of_an_on_policy_token_is_one_with_any_sampling_filter() -> None:
    sampling = {"temperature": 0.7, "top_p": 0.8, "top_k": 6, "min_p": 0.01}
    requests = [sampling_request(i, **sampling) for i in range(8)]
    completions = answers(TINY, weights(), requests, kernels="eager")
    samples = [
        Sample(r.prompt_ids, own.token_ids.tolist(), own.unfiltered_logprobs.tolist(), 1.0)
        for r in requests
        for own in [completions[r.id]]
    ]
    assert any(own.logprobs.tolist() != own.unfiltered_logprobs.tolist() for own in completions.values())
    metrics = Trainer(TINY, weights(), replace(SETTINGS, temperature=0.7)).step(samples)
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-6)


def test_replayed_routes_remove_the_mismatch_of_a_router_that_is_nearly_tied() -> None:
    engines, trainers = nearly_tied(MIXTURE, random_weights(MIXTURE))
    requests = [sampling_request(i) for i in range(8)]
    completions = answers(MIXTURE, engines, requests, returns_routes=True)
    policy = Policy(MIXTURE, WeightLayout(MIXTURE).views(trainers))
    gaps: dict[bool, float] = {}
    for is_replayed in (False, True):
        batch = pack(
            [r.prompt_ids for r in requests], [completions[r.id].token_ids.tolist() for r in requests], CPU
        )
        routes = [completions[r.id].routes if is_replayed else None for r in requests]
        logprobs, _ = policy.logprobs(batch, replay_routes(MIXTURE, batch, routes))
        reported = torch.tensor([x for r in requests for x in completions[r.id].logprobs.tolist()])
        gaps[is_replayed] = float((logprobs - reported).abs().max())
    assert gaps[False] > 0.01
    assert gaps[True] < 3e-6


def test_siblings_with_different_routes_do_not_share_their_prompt() -> None:
    """Routes of a prompt differ if two engines computed it; equal routes still share it."""
    prompt, answers, experts = [1, 2, 3], [[4, 5], [6], [7, 8]], [[0, 1], [3, 2], [0, 1]]
    routes = [
        np.array([pair * 2] * (len(prompt) + len(answer) - 1), np.int16)  # 2 MoE layers
        for pair, answer in zip(experts, answers, strict=True)
    ]
    policy = Policy(MIXTURE, WeightLayout(MIXTURE).views(random_weights(MIXTURE)))

    def logprobs(members: list[int]) -> torch.Tensor:
        own = [routes[i] for i in members]
        batch = pack([prompt] * len(members), [answers[i] for i in members], CPU, own)
        num_prompts = min(len(members), 2)
        assert len(batch.input_ids) == num_prompts * len(prompt) + sum(len(answers[i]) - 1 for i in members)
        return policy.logprobs(batch, replay_routes(MIXTURE, batch, own))[0]

    torch.testing.assert_close(logprobs([0, 1, 2]), torch.cat([logprobs([i]) for i in range(3)]))


def test_a_router_learns_from_replayed_routes() -> None:
    flat = random_weights(MIXTURE)
    views = {name: view.requires_grad_() for name, view in WeightLayout(MIXTURE).views(flat).items()}
    batch = pack([[1, 2, 3]], [[4, 5]], CPU)
    routes = torch.tensor([[4, 3]]).repeat(4, 2).short().numpy()  # 2 MoE layers, 2 experts each
    logprobs, _ = Policy(MIXTURE, views).logprobs(batch, replay_routes(MIXTURE, batch, [routes]))
    torch.autograd.backward(logprobs.sum())
    for i in MIXTURE.moe_layers:
        gradient = views[f"model.layers.{i}.mlp.gate.weight"].grad
        assert gradient is not None
        assert gradient[4].any()
        experts = [views[f"model.layers.{i}.mlp.experts.{k}.up_proj.weight"].grad for k in range(5)]
        assert [grad is not None and bool(grad.any()) for grad in experts] == [False] * 3 + [True] * 2


def test_a_step_reports_the_load_imbalance_of_experts() -> None:
    routes = torch.tensor([[0, 1, 2, 3]] * 3 + [[0, 2, 2, 4]] * 2).short().numpy()
    sample = Sample([1, 2], [3, 4, 5, 6], [-3.0] * 4, 1.0, routes=routes)
    metrics = Trainer(MIXTURE, random_weights(MIXTURE), SETTINGS).step([sample])
    # The response's 4 tokens make 8 choices among 5 experts: 4, 2, 2, 0, 0 and 0, 0, 4, 2, 2 tokens.
    assert metrics["moe/load_imbalance"] == pytest.approx(4 / (8 / 5))
    dense = Trainer(TINY, weights(), SETTINGS).step([replace(sample, routes=None)])
    assert "moe/load_imbalance" not in dense


def test_load_imbalance_is_the_busiest_expert_over_the_mean() -> None:
    num_tokens = torch.tensor([[4, 4, 4, 4], [16, 0, 0, 0], [6, 2, 4, 4]])
    assert load_imbalance(num_tokens).tolist() == [1, 4, 1.5]
