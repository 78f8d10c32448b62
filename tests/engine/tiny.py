"""A model small enough to generate from by the slowest method, and requests to it."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.core.records import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.sequence import Completion, Request, Sampling
from dora.model.config import ModelConfig
from dora.model.decoder import forward, head, rope_tables
from dora.model.weights import Layout, initial_weights
from dora.trainer.attention import attend_in_blocks

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
    """Weights that disagree with those of every other version about most tokens."""
    return initial_weights(TINY, seed=version, std=0.4)


def engine(
    kernels: str = "eager", max_rows: int = 32, num_versions: int = 1, num_blocks: int | None = None
) -> Engine:
    made = Engine(
        TINY, max_rows=max_rows, max_context=96, version_slots=2, kernels=kernels, num_blocks=num_blocks
    )
    for version in range(num_versions):
        made.load(version, weights(version))
    return made


def request(
    number: int,
    *,
    group_size: int = 4,
    version: int = 0,
    temperature: float = 1.0,
    max_tokens: int = 20,
    stop_ids: tuple[int, ...] = (),
    prompt_length: int | None = None,
) -> Request:
    """The number-th request; groups have prompts of other lengths, on both sides of a block's edge."""
    row = number // group_size
    length = prompt_length or 1 + row * 7 % 40
    return Request(
        id=RequestId(0, row, number % group_size),
        group=GroupId(0, row),
        prompt_ids=tuple((row * 5 + i * 3) % TINY.vocab_size for i in range(length)),
        version=version,
        seed=1000 + number,
        sampling=Sampling(temperature, max_tokens, stop_ids),
    )


def run(made: Engine, requests: list[Request]) -> dict[RequestId, Completion]:
    """Submit, step until idle with every invariant checked, and return the answers."""
    made.submit(requests)
    answers: dict[RequestId, Completion] = {}
    while not made.idle:
        answers |= {completion.id: completion for completion in made.step()}
        made.check()
    return answers


def tokens(answers: dict[RequestId, Completion]) -> dict[RequestId, list[int]]:
    return {request_id: answer.token_ids for request_id, answer in answers.items()}


def full_logits(flat: Tensor, token_ids: list[int]) -> Tensor:
    """Logits [length, vocab] of one training forward over a whole sequence."""
    cos, sin = rope_tables(TINY, len(token_ids))
    views, attend = Layout(TINY).views(flat), attend_in_blocks([torch.arange(len(token_ids))[None]])
    return F.linear(forward(views, TINY, torch.tensor(token_ids), cos, sin, attend), head(views))


def greedy_answer(flat: Tensor, prompt_ids: tuple[int, ...], num_tokens: int) -> list[int]:
    """The naive way: a full forward for every token."""
    ids = list(prompt_ids)
    for _ in range(num_tokens):
        ids.append(int(full_logits(flat, ids)[-1].argmax()))
    return ids[len(prompt_ids) :]
