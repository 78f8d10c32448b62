"""A client of an OpenAI-compatible server, for teachers and judges of a run."""

from __future__ import annotations

import http.client
import json
import os
import time
import urllib.error
import urllib.request
from typing import Any, TypeGuard

from dora.errors import InputError, RunError

_RETRY_INTERVAL_S = 1.0
_REASON_BYTES = 300
_BUSY = (408, 429)  # statuses of a server that accepts the request later
_FAILURES = (OSError, http.client.HTTPException, ValueError)  # ValueError: the reply is not JSON


class OpenAIServer:
    """The API below `url`, as in `http://host:8000/v1`. Threads may share it.

    A key in the environment variable OPENAI_API_KEY is sent.
    """

    def __init__(self, url: str, timeout_s: float) -> None:
        """`timeout_s` is the time limit of a call, with its retries."""
        self.url, self._timeout_s = url.rstrip("/"), timeout_s

    def first_model(self) -> str:
        """The name of the server's first model. Raises InputError if it does not answer."""
        try:
            return str(self._call("models", None, self._timeout_s)["data"][0]["id"])
        except (*_FAILURES, LookupError, TypeError) as error:
            raise InputError(
                f"{self.url}/models names no model within {self._timeout_s:g} s ({error}); start the server, "
                "or raise timeout_s, and give the URL that ends before /models, as in http://host:8000/v1"
            ) from error

    def post(self, path: str, body: object) -> Any:
        """The reply; a server that fails, is busy or is not there is asked again. Raises RunError."""
        until_s = time.monotonic() + self._timeout_s
        while True:
            try:
                return self._call(path, body, until_s - time.monotonic())
            except _FAILURES as error:
                if _is_refusal(error):
                    with error:
                        reason = " ".join(error.read(_REASON_BYTES).decode(errors="replace").split())
                    raise RunError(
                        f"{self.url}/{path} refuses the request ({error}; {reason}); use a server that "
                        "accepts it"
                    ) from error
                if time.monotonic() + _RETRY_INTERVAL_S >= until_s:
                    raise RunError(
                        f"{self.url}/{path} gives no reply within {self._timeout_s:g} s ({error}); check the "
                        "server, or raise timeout_s"
                    ) from error
                time.sleep(_RETRY_INTERVAL_S)

    def _call(self, path: str, body: object | None, timeout_s: float) -> Any:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(f"{self.url}/{path}", content, headers)
        with urllib.request.urlopen(request, timeout=timeout_s) as reply:
            return json.load(reply)


def _is_refusal(error: Exception) -> TypeGuard[urllib.error.HTTPError]:
    """Whether the server will not accept the request later either."""
    return isinstance(error, urllib.error.HTTPError) and 400 <= error.code < 500 and error.code not in _BUSY
