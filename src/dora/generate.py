"""`dora generate`: answer a prompt with a model, on the rollout engine and without any training.

The engine holds one version and has a row for each answer, up to `_MAX_ROWS`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from dora.core.records import GroupId, RequestId
from dora.core.wording import counted
from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.tokenizer import Tokenizer
from dora.engine.engine import Engine
from dora.engine.sequence import Completion, EngineError, Request, Sampling
from dora.errors import InputError
from dora.model.folder import load_config, load_folder

_MAX_ROWS = 32


@dataclass(frozen=True)
class Computing:
    """What the engine computes with; see `Engine`."""

    kernels: str = "auto"
    device: str = "cpu"
    dtype: str = "float32"


@dataclass(frozen=True)
class Answer:
    """An answer and what is known of each of its tokens; see `Completion`."""

    text: str
    token_ids: list[int]
    logprobs: list[float]
    raw_logprobs: list[float]
    finish_reason: str

    def __str__(self) -> str:
        """The text, and a line about it."""
        drawn, raw = sum(self.logprobs), sum(self.raw_logprobs)
        return (
            f"{self.text}\n  [{self.finish_reason} after {counted(len(self.token_ids), 'token')}, "
            f"log-prob {drawn:.3f} as drawn, {raw:.3f} by the model]"
        )


def main(
    folder: Path, prompt: str, drawing: Mapping[str, Any], computing: Computing, *,
    seed: int, num_answers: int, is_chat: bool, as_json: bool,
) -> str:  # fmt: skip
    """What the command prints: the answers as text, or one JSON object each. Raises InputError.

    `drawing` are the fields of `Sampling`.
    """
    try:
        answers = generate(folder, prompt, Sampling(**drawing), seed, num_answers, computing, is_chat=is_chat)
    except EngineError as error:
        raise InputError(str(error)) from error
    return "\n".join(json.dumps(asdict(answer)) if as_json else str(answer) for answer in answers)


def generate(
    folder: Path, prompt: str, sampling: Sampling, seed: int = 0, num_answers: int = 1,
    computing: Computing = Computing(), *, is_chat: bool = False,
) -> list[Answer]:  # fmt: skip
    """Answers to one prompt by the model in a Hugging Face folder; the k-th has the seed `seed` + k.

    The model's end tokens end answers too. With `is_chat`, the prompt is a user's message, which goes into
    the model's chat template. Raises InputError or EngineError for what cannot be done.
    """
    context, tokenizer = load_config(folder).max_position_embeddings, Tokenizer(folder)
    encoder = PromptEncoder(tokenizer, ChatTemplate(folder) if is_chat else None)
    prompt_ids = tuple(encoder.encode(prompt))
    if not prompt_ids:
        raise InputError("the prompt is empty; give at least one token")
    if len(prompt_ids) + sampling.max_tokens > context:
        raise InputError(
            f"the prompt has {len(prompt_ids)} tokens and the answer may have {sampling.max_tokens}: "
            f"together over the model's context of {context}; shorten the prompt or lower max_tokens"
        )
    sampling = replace(sampling, stop_ids=(*sampling.stop_ids, *tokenizer.stop_ids))
    group = GroupId(0, 0)
    requests = [
        Request(RequestId(*group, k), group, prompt_ids, 0, seed + k, sampling) for k in range(num_answers)
    ]
    completions = _run(folder, tokenizer, requests, computing)
    return [_answer(completions[request.id], tokenizer) for request in requests]


def _run(
    folder: Path, tokenizer: Tokenizer, requests: list[Request], computing: Computing
) -> dict[RequestId, Completion]:
    """An engine's whole life: load, submit, step until idle."""
    config, weights = load_folder(folder)
    engine = Engine(
        config,
        max_rows=min(len(requests), _MAX_ROWS),
        max_context=requests[0].max_length,
        version_slots=1,
        detokenize=tokenizer.decode,
        kernels=computing.kernels,
        device=computing.device,
        dtype=computing.dtype,
    )
    engine.load(0, weights)
    engine.submit(requests)
    completions: dict[RequestId, Completion] = {}
    while not engine.idle:
        completions |= {completion.id: completion for completion in engine.step()}
    return completions


def _answer(completion: Completion, tokenizer: Tokenizer) -> Answer:
    return Answer(
        text=tokenizer.decode(completion.token_ids),
        token_ids=completion.token_ids,
        logprobs=completion.logprobs,
        raw_logprobs=completion.raw_logprobs,
        finish_reason=completion.finish_reason,
    )
