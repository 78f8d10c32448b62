"""Teachers of on-policy distillation: log-probs of the policy's responses, by models here or on servers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from dora.errors import InputError, RunError
from dora.openai_server import OpenAIServer
from dora.trainer.settings import Sample

# Log-probs (nats) of each sample's tokens of the loss, float32 [tokens].
Teacher = Callable[[Sequence[Sample]], Sequence[Tensor]]


def mean_teacher(teachers: Sequence[Teacher]) -> Teacher:
    """The mean of the log-probs of several teachers, whose KL is the mean of theirs."""

    def score(samples: Sequence[Sample]) -> list[Tensor]:
        scored = [teacher(samples) for teacher in teachers]
        return [torch.stack(parts).mean(0) for parts in zip(*scored, strict=True)]

    return score


class ServerTeacher:
    """A model behind an OpenAI-compatible API: completions with `echo` return log-probs of their prompt.

    The server's first model scores, with temperature 1.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Ask for the name of the model; see `OpenAIServer`. Raises InputError if it does not answer."""
        self._server = OpenAIServer(url, timeout_s)
        try:
            self._model = self._server.first_model()
        except InputError as error:
            raise InputError(f"distillation.teachers: {error}") from error

    def check(self, vocab_size: int) -> None:
        """Score the last token of a vocabulary. Raises InputError if the server does not do this in time."""
        try:
            self([Sample([0], [vocab_size - 1], [0.0], 0.0)])
        except RunError as error:
            raise InputError(str(error)) from error

    def __call__(self, samples: Sequence[Sample]) -> list[Tensor]:
        """As `Teacher`. Raises RunError if the server does not reply in time, or not with log-probs."""
        body = {
            "model": self._model,
            "prompt": [[*sample.prompt_ids, *sample.token_ids] for sample in samples],
            "max_tokens": 1,
            "temperature": 1.0,
            "echo": True,
            "logprobs": 1,
        }
        try:
            reply = self._server.post("completions", body)
        except RunError as error:
            raise RunError(f"distillation.teachers: {error}") from error
        try:
            choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
            pairs = zip(samples, choices, strict=True)
            return [_of_response(sample, choice["logprobs"]["token_logprobs"]) for sample, choice in pairs]
        except (LookupError, TypeError, ValueError) as error:
            raise RunError(
                f"distillation.teachers: {self._server.url} does not return log-probs of a prompt ({error}); "
                "use a server whose /completions has `echo` with `logprobs`, such as vLLM's"
            ) from error


def _of_response(sample: Sample, token_logprobs: Sequence[Any]) -> Tensor:
    """The tokens of the loss, of all tokens of the sequence; more may follow. Raises ValueError."""
    start, stop = len(sample.prompt_ids), sample.num_tokens
    own = [float(x) for x in token_logprobs[start:stop]]
    if len(own) != stop - start or not all(map(math.isfinite, own)):
        raise ValueError(f"{len(own)} finite log-probs for {stop - start} tokens")
    found = torch.tensor(own)
    return found if sample.loss_mask is None else found[torch.tensor(sample.loss_mask) > 0]
