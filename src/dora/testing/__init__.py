"""The tiny model of the contract tests: its versions, requests to it, and the log-probs that they must have.

Everything expected is computed by a plain forward pass in fp32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from dora.core.types import GroupId, RequestId
from dora.engine.request import Request, SamplingParams
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
    head_dim=32,  # the smallest that vLLM supports on a CPU
    max_position_embeddings=96,
)
MAX_TOKENS = 12  # of a response


def version_weights(version: int) -> Tensor:
    """Weights [numel] of a version. No two versions agree about most tokens."""
    return initial_weights(CONFIG, seed=version, std=0.4)


def make_request(
    number: int,
    *,
    version: int = 0,
    temperature: float = 1.0,
    max_tokens: int = MAX_TOKENS,
    prompt_ids: tuple[int, ...] | None = None,
    **sampling: Any,
) -> Request:
    """Sibling `number` of a group with a prompt of 9 tokens; `sampling` are fields of `SamplingParams`."""
    group = GroupId(0, 0)
    return Request(
        id=RequestId(*group, number),
        group=group,
        prompt_ids=prompt_ids or tuple((5 + 3 * i) % CONFIG.vocab_size for i in range(9)),
        version=version,
        seed=1000 + number,
        sampling=SamplingParams(temperature, max_tokens, **sampling),
    )


def reference_logprobs(
    version: int, prompt_ids: Sequence[int], token_ids: Sequence[int], temperature: float = 1.0
) -> list[float]:
    """Log-probs of a response's tokens, by a forward pass over prompt and response."""
    settings = TrainerSettings(lr=0.0, num_steps=1, temperature=temperature)
    compute = GroupLogprobs(CONFIG, settings, "cpu")
    compute.load_weights(version_weights(version))
    sample = Sample(prompt_ids, token_ids, [0.0] * len(token_ids), 0.0)
    logprobs: list[float] = compute([sample])[0].tolist()
    return logprobs


def next_token_probs(version: int, token_ids: Sequence[int]) -> list[float]:
    """The probability of every token of the vocabulary after `token_ids`, by a forward pass."""
    compute = GroupLogprobs(CONFIG, TrainerSettings(lr=0.0, num_steps=1), "cpu")
    compute.load_weights(version_weights(version))
    found = compute([Sample(token_ids, [other], [0.0], 0.0) for other in range(CONFIG.vocab_size)])
    return [math.exp(float(logprobs[0])) for logprobs in found]


def filtered_probs(probs: Sequence[float], sampling: SamplingParams) -> dict[int, float]:
    """The tokens that pass the filters, with their probabilities, by the definition in `SamplingParams`."""
    ranked = sorted(enumerate(probs), key=lambda pair: -pair[1])
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    total, mass, passed = sum(p for _, p in ranked), 0.0, []
    for token, p in ranked:
        if mass < sampling.top_p * total and p >= sampling.min_p * ranked[0][1]:
            passed.append((token, p))
        mass += p
    return dict(passed)
