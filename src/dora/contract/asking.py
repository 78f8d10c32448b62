"""What the contracts ask of engines and trainers, and what must come of it by a plain forward pass.

One tiny model, its versions, requests to it, and the probabilities that its weights give.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dora.core.records import GroupId, RequestId
from dora.engine.sequence import Request, Sampling
from dora.model.config import ModelConfig
from dora.model.weights import initial_weights
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample, TrainerSettings

CONFIG = ModelConfig(
    vocab_size=29,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # the smallest that vLLM computes on a CPU
    max_position_embeddings=96,
)
MAX_TOKENS = 12  # of an answer


def weights(version: int) -> Tensor:
    """Weights [numel] that disagree with those of every other version about most tokens."""
    return initial_weights(CONFIG, seed=version, std=0.4)


def logprobs_of(
    version: int, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """What a forward pass over prompt and answer says of the answer's tokens."""
    settings = TrainerSettings(lr=0.0, num_steps=1, temperature=temperature)
    plain = GroupLogprobs(CONFIG, settings, "cpu")
    plain.use(weights(version))
    found: list[float] = plain([Sample(prompt_ids, token_ids, [0.0] * len(token_ids), 0.0)])[0].tolist()
    return found


def distribution(version: int, token_ids: Sequence[int]) -> list[float]:
    """What a forward pass says of every token that may come next: its probability."""
    plain = GroupLogprobs(CONFIG, TrainerSettings(lr=0.0, num_steps=1), "cpu")
    plain.use(weights(version))
    found = plain([Sample(token_ids, [other], [0.0], 0.0) for other in range(CONFIG.vocab_size)])
    return [math.exp(float(logprobs[0])) for logprobs in found]


def kept(probabilities: Sequence[float], sampling: Sampling) -> dict[int, float]:
    """The tokens that the filters leave, with their probabilities, by the definition in `Sampling`."""
    ranked = sorted(enumerate(probabilities), key=lambda pair: -pair[1])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, mass, left = sum(p for _, p in ranked), 0.0, []
    for token, p in ranked:
        if mass < sampling.top_p * total and p >= sampling.min_p * ranked[0][1]:
            left.append((token, p))
        mass += p
    return dict(left)


def request(
    number: int,
    *,
    version: int = 0,
    temperature: float = 1.0,
    max_tokens: int = MAX_TOKENS,
    prompt_ids: tuple[int, ...] | None = None,
    **more: Any,
) -> Request:
    """The number-th sibling of a group with a prompt of 9 tokens; `more` are fields of its sampling."""
    group = GroupId(0, 0)
    return Request(
        id=RequestId(*group, number),
        group=group,
        prompt_ids=prompt_ids or tuple((5 + 3 * i) % CONFIG.vocab_size for i in range(9)),
        version=version,
        seed=1000 + number,
        sampling=Sampling(temperature, max_tokens, **more),
    )
