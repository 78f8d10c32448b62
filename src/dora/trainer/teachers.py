"""Teachers of on-policy distillation: log-probs of the policy's responses, by models here or on servers."""

from __future__ import annotations

import http.client
import json
import math
import os
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dora.errors import ConfigError, RunError
from dora.trainer.settings import Sample

_RETRY_INTERVAL_S = 1.0
_FAILURES = (OSError, http.client.HTTPException, ValueError)  # ValueError: the reply is not JSON


class Teacher(Protocol):
    """A model that scores responses."""

    def __call__(self, samples: Sequence[Sample], /) -> Sequence[Tensor]:
        """Log-probs (nats) of each sample's tokens of the loss, float32 [tokens]."""


class Teachers:
    """The mean of the log-probs of several teachers, whose KL is the mean of theirs."""

    def __init__(self, teachers: Sequence[Teacher]) -> None:
        self._teachers = teachers

    def __call__(self, samples: Sequence[Sample]) -> list[Tensor]:
        """As `Teacher`."""
        scored = [teacher(samples) for teacher in self._teachers]
        return [torch.stack(parts).mean(0) for parts in zip(*scored, strict=True)]


class ServerTeacher:
    """A model behind an OpenAI-compatible API: completions with `echo` return log-probs of their prompt.

    `url` ends before `/completions`, as in `http://host:8000/v1`. A key in OPENAI_API_KEY is sent. The
    server's first model scores, with temperature 1.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """Ask for the name of the model. Raises ConfigError if the server does not answer."""
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        try:
            self._model = str(self._call("models", None)["data"][0]["id"])
        except (*_FAILURES, LookupError, TypeError) as error:
            raise ConfigError(
                f"distillation.teachers: {self._url}/models names no model ({error}); start the server, and "
                "give the URL that ends before /models, as in http://host:8000/v1"
            ) from error

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
        reply = self._call_until_timeout("completions", body)
        try:
            choices = sorted(reply["choices"], key=lambda choice: int(choice["index"]))
            pairs = zip(samples, choices, strict=True)
            return [_of_response(sample, choice["logprobs"]["token_logprobs"]) for sample, choice in pairs]
        except (LookupError, TypeError, ValueError) as error:
            raise RunError(
                f"distillation.teachers: {self._url} does not return log-probs of a prompt ({error}); use a "
                "server whose /completions has `echo` with `logprobs`, such as vLLM's"
            ) from error

    def _call_until_timeout(self, path: str, body: object) -> Any:
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._call(path, body)
            except _FAILURES as error:
                is_refused = isinstance(error, urllib.error.HTTPError) and error.code < 500
                if is_refused or time.monotonic() > until_s:
                    raise RunError(
                        f"distillation.teachers: {self._url} does not score responses within "
                        f"{self._timeout_s:g} s ({error}); check the server, or raise distillation.timeout_s"
                    ) from error
                time.sleep(_RETRY_INTERVAL_S)

    def _call(self, path: str, body: object | None) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self._url}/{path}", content, headers)
        with urllib.request.urlopen(request, timeout=self._timeout_s) as reply:
            return json.load(reply)


def _of_response(sample: Sample, token_logprobs: Sequence[Any]) -> Tensor:
    """The tokens of the loss, of all tokens of the sequence; more may follow. Raises ValueError."""
    start, stop = len(sample.prompt_ids), sample.num_tokens
    own = [float(x) for x in token_logprobs[start:stop]]
    if len(own) != stop - start or not all(map(math.isfinite, own)):
        raise ValueError(f"{len(own)} finite log-probs for {stop - start} tokens")
    found = torch.tensor(own)
    return found if sample.loss_mask is None else found[torch.tensor(sample.loss_mask) > 0]
