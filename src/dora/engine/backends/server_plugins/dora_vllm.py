"""Extensions of a vLLM server for DORA-RL: load weights from a file, require an auth token, and list the
weights of a response in each of its events.

    --worker-extension-cls dora_vllm.WorkerExtension --middleware dora_vllm.TokenMiddleware

It runs in vLLM's processes and imports what is installed there: safetensors, NumPy and the standard library.
"""

from __future__ import annotations

import hmac
import math
import os
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

TOKEN_VARIABLE = "DORA_VLLM_TOKEN"
PACE_VARIABLE = "DORA_VLLM_MIN_STEP_S"  # of the executor on a CPU
# Calls of `dora_vllm_versions`: POST {"arguments": [...]}.
DECODE_ONLY_PATH, CONTINUE_PATH = "/dora/decode_only", "/dora/continue_with"
UTILITIES = {DECODE_ONLY_PATH: "dora_decode_only", CONTINUE_PATH: "dora_continue_with"}
PROTOCOL = 4  # of the calls of this folder's modules, and of the events of responses
KEEP = "#keep"  # at the end of a request's `cache_salt`: it keeps its version

AsgiMessage = MutableMapping[str, Any]
AsgiReceive = Callable[[], Awaitable[AsgiMessage]]
AsgiSend = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[AsgiMessage, AsgiReceive, AsgiSend], Awaitable[None]]


class WorkerExtension:
    """A mix-in of vLLM's worker. POST /collective_rpc calls its methods."""

    model_runner: Any
    device: Any

    def dora_info(self) -> dict[str, Any]:
        """Device, dtype and version slots of the server, and the layout of its KV; empty: it cannot leave."""
        connector = _kv_connector()
        return {
            "device": self.device.type,
            "dtype": str(self.model_runner.dtype).removeprefix("torch."),
            "kv_layout": [] if connector is None else connector.layout,
            "version_slots": 1,
            "protocol": PROTOCOL,
        }

    def dora_load_weights(self, version: str, path: str) -> str:
        """Replace the model's weights by those of a version's file. Returns the digest of its data.

        A thread computes the digest while the weights are copied.
        """
        import dora_digest  # type: ignore[import-not-found]

        load = dora_digest.FileLoad(path, math.inf)
        self.model_runner.reload_weights(weights_iterator=load.read_part(path, 0))
        self.pack_again(self.model_runner.get_model())
        return self.record_digest(version, load.digest())

    def pack_again(self, model: Any) -> None:
        """Call this once after each load. On a CPU, LM heads and experts multiply with packed weights.

        vLLM 0.32 packs them at the first load only. A head that is tied to the embedding would stay the
        initial one, and experts would be read as if they were packed.
        """
        if self.device.type != "cpu":
            return
        if (head := getattr(model, "lm_head", None)) is not None:
            head.quant_method.process_weights_after_loading(head)
        for layer in model.modules():
            kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
            if kernel is not None:
                kernel.fused_experts.process_weights_after_loading(layer)

    def record_digest(self, version: str, digest: str) -> str:
        """Let the KV connector know which weights compute for requests of a version. Returns the digest."""
        if (connector := _kv_connector()) is not None:
            connector.weight_digests[version] = digest
        return digest

    def dora_drop_version(self, version: str) -> None:
        """The version gets no more requests."""
        if (connector := _kv_connector()) is not None:
            connector.weight_digests.pop(version, None)

    def dora_drop_all_versions(self) -> None:
        """Another engine of DORA-RL takes over the server."""
        if (connector := _kv_connector()) is not None:
            connector.weight_digests.clear()

    def dora_digest(self, path: str) -> str:
        """The digest of an adapter's file, as this process reads it."""
        import dora_digest

        digest: str = dora_digest.safetensors_digest(path)
        return digest


def _kv_connector() -> Any | None:
    """This worker's KV connector, if the server has one of DORA-RL's."""
    if "dora_vllm_kv" not in sys.modules:
        return None
    from vllm.distributed.kv_transfer import (  # type: ignore[import-not-found]
        get_kv_transfer_group,
        has_kv_transfer_group,
    )

    return get_kv_transfer_group() if has_kv_transfer_group() else None


class TokenMiddleware:
    """Answers 401 to requests without the auth token of the environment, and DORA-RL's own calls itself.

    vLLM's own `--api-key` does not protect the calls that load weights.
    """

    def __init__(self, app: AsgiApp) -> None:
        if not os.environ.get(TOKEN_VARIABLE):
            raise RuntimeError(
                f"{TOKEN_VARIABLE} is not set: give the server and `dora train` the same token"
            )
        _list_weights_in_each_event()
        self._app = app
        self._expected = b"Bearer " + os.environ[TOKEN_VARIABLE].encode()

    async def __call__(self, scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
        given = dict(scope.get("headers", ())).get(b"authorization", b"")
        if scope["type"] == "lifespan" or hmac.compare_digest(given, self._expected):
            own = scope.get("path") in UTILITIES
            await (_call_utility if own else self._app)(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close"})
        else:
            await send({"type": "http.response.start", "status": 401, "headers": []})
            await send({"type": "http.response.body", "body": f"show the {TOKEN_VARIABLE}".encode()})


def _list_weights_in_each_event() -> None:
    """vLLM lists them in the last event of a response only, which does not come if the server is killed."""
    from vllm.v1.engine.output_processor import RequestState  # type: ignore[import-not-found]

    make_output = RequestState._new_completion_output

    def make_output_with_weights(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = make_output(self, *args, **kwargs)
        output.weight_versions = self._weight_version_spans()
        return output

    RequestState._new_completion_output = make_output_with_weights


async def _call_utility(scope: AsgiMessage, receive: AsgiReceive, send: AsgiSend) -> None:
    """Call a method of vLLM's engine core."""
    from starlette.requests import Request
    from starlette.responses import JSONResponse

    arguments = (await Request(scope, receive).json())["arguments"]
    engine = scope["app"].state.engine_client.engine_core
    await engine.call_utility_async(UTILITIES[scope["path"]], *arguments)
    await JSONResponse({})(scope, receive, send)
