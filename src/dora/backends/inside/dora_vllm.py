"""What a vLLM server needs to serve DORA: it takes weights from a file, and no request without a token.

    --worker-extension-cls dora_vllm.Weights --middleware dora_vllm.Token

It runs in vLLM's own processes and imports what is there: torch, safetensors and the standard library.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_KEY = "DORA_VLLM_TOKEN"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]


class Weights:
    """A mix-in of vLLM's worker; its methods are called with POST /collective_rpc."""

    model_runner: Any

    def dora_about(self) -> dict[str, str]:
        """What the server computes with."""
        parameter = next(self.model_runner.get_model().parameters())
        return {"device": parameter.device.type, "dtype": str(self.model_runner.dtype).removeprefix("torch.")}

    def dora_load(self, path: str) -> str:
        """Take a safetensors file's tensors in place of the model's; returns the digest of their bytes."""
        from dora_digest import digest_of  # type: ignore[import-not-found]
        from safetensors import safe_open

        digest: str = digest_of(path)
        with safe_open(path, "pt") as stored:
            named = ((name, stored.get_tensor(name)) for name in stored.keys())  # noqa: SIM118
            self.model_runner.reload_weights(weights_iterator=named)
        # On a CPU a head multiplies with a packed copy of its weight, and vLLM 0.32 packs none again that
        # has the embedding's: it would go on with the head that the server began with.
        head = getattr(self.model_runner.get_model(), "lm_head", None)
        if head is not None and self.dora_about()["device"] == "cpu":
            head.quant_method.process_weights_after_loading(head)
        return digest

    def dora_digest(self, path: str) -> str:
        """The digest of an adapter's file, as it is read here."""
        from dora_digest import digest_of

        digest: str = digest_of(path)
        return digest


class Token:
    """Answers 401 to whoever does not show the token in the environment.

    vLLM's own `--api-key` leaves the calls for weights open, which are what has to be guarded.
    """

    def __init__(self, app: App) -> None:
        if not os.environ.get(TOKEN_KEY):
            raise RuntimeError(f"{TOKEN_KEY} is not set: give the server and `dora train` the same token")
        self._app = app
        self._expected = b"Bearer " + os.environ[TOKEN_KEY].encode()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": f"show the {TOKEN_KEY}".encode()})
