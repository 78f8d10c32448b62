"""A model that is small enough for a full forward pass per token, and requests for it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dora.core.types import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.request import Completion, Request, SamplingParams
from dora.model.config import ModelConfig
from dora.model.decoder import forward, lm_head, rope_tables
from dora.model.weights import WeightLayout, initial_weights
from dora.trainer.policy import packed_attention

TINY = ModelConfig(
    vocab_size=29,
    hidden_size=24,
    intermediate_size=40,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
)


def weights(version: int = 0) -> Tensor:
    """Weights whose most probable tokens mostly differ from those of other versions."""
    return initial_weights(TINY, seed=version, std=0.4)


def make_engine(kernels: str = "eager", *, num_versions: int = 1, **settings: Any) -> Engine:
    """An engine with the versions from 0 on, and room for every request at once."""
    given = {"max_rows": 32, "max_context": 96, "version_slots": 2} | settings
    engine = Engine(TINY, kernels=kernels, **given)
    for version in range(num_versions):
        engine.load(version, weights(version))
    return engine


def make_request(
    number: int,
    *,
    group_size: int = 4,
    version: int = 0,
    temperature: float = 1.0,
    max_tokens: int = 20,
    stop_ids: tuple[int, ...] = (),
    prompt_length: int | None = None,
) -> Request:
    """Request `number`; groups have prompts of different lengths, on both sides of block boundaries."""
    row = number // group_size
    length = prompt_length or 1 + row * 7 % 40
    return Request(
        id=RequestId(0, row, number % group_size),
        group=GroupId(0, row),
        prompt_ids=tuple((row * 5 + i * 3) % TINY.vocab_size for i in range(length)),
        version=version,
        seed=1000 + number,
        sampling=SamplingParams(temperature, max_tokens, stop_ids),
    )


def run(engine: Engine, requests: list[Request]) -> dict[RequestId, Completion]:
    """Submit, step until idle with every invariant checked, and return the completions."""
    engine.submit(requests)
    completions: dict[RequestId, Completion] = {}
    while not engine.is_idle:
        completions |= {completion.id: completion for completion in engine.step()}
        engine.check()
    return completions


def output_tokens(completions: dict[RequestId, Completion]) -> dict[RequestId, list[int]]:
    return {request_id: completion.token_ids.tolist() for request_id, completion in completions.items()}


def is_close(completion: Completion, expected: Completion, has_observations: bool = False) -> bool:
    """Equal except for the last bits of log-probs, which depend on the rows that share a matrix product."""
    return (
        completion.token_ids.tolist() == expected.token_ids.tolist()
        and completion.logprobs == pytest.approx(expected.logprobs, abs=1e-5, nan_ok=has_observations)
        and (completion.version, completion.chunks, completion.finish_reason)
        == (expected.version, expected.chunks, expected.finish_reason)
    )


def all_close(
    completions: dict[RequestId, Completion],
    expected: dict[RequestId, Completion],
    has_observations: bool = False,
) -> bool:
    return completions.keys() == expected.keys() and all(
        is_close(completions[i], expected[i], has_observations) for i in expected
    )


def full_logits(flat: Tensor, token_ids: list[int]) -> Tensor:
    """Logits [length, vocab] of one forward pass of the trainer over a whole sequence."""
    cos, sin = rope_tables(TINY, len(token_ids))
    views, attend = WeightLayout(TINY).views(flat), packed_attention([torch.arange(len(token_ids))[None]])
    hidden = forward(views, TINY, torch.tensor(token_ids), cos, sin, lambda layer: attend)
    return F.linear(hidden, lm_head(views))


def forward_logprobs(flat: Tensor, completion: Completion, temperature: float = 1.0) -> Tensor:
    """Log-probs of the tokens of a completion by one forward pass over the whole sequence."""
    prompt, tokens = completion.prompt_ids.tolist(), completion.token_ids.tolist()
    logits = full_logits(flat, [*prompt, *tokens])[len(prompt) - 1 : -1] / temperature
    return logits.log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]


def greedy_output(flat: Tensor, prompt_ids: tuple[int, ...], num_tokens: int) -> list[int]:
    """Naive decoding: a full forward pass per token."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(full_logits(flat, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]
