r"""SGLang as an inference engine.

    [engine]
    backend = "sglang"
    options = { python = "/path/to/sglang/bin/python" }

The engine starts a server and stops it, or uses one that is already running (`url`). The server reads the
file of a version in the weight store. It returns the digest of what it has read, and with each response which
weights generated its tokens.
"""

from __future__ import annotations

import os
import re
import secrets
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dora.engine.backends.http_engine import HttpEngine, ServerRequest, StreamDelta
from dora.engine.backends.server import (
    JsonBody,
    ServerKind,
    attach_server,
    check_server_options,
    start_server,
)
from dora.engine.backends.server_plugins.dora_sglang import DIGEST_PREFIX, TOKEN_VARIABLE, WEIGHTS_FILE
from dora.engine.interface import Capabilities
from dora.engine.request import EngineError

LOAD_TIMEOUT_S = 600.0
SPARE_TOKENS = 8  # SGLang accepts only requests that are some tokens shorter than its context
SGLANG = ServerKind(
    "SGLang", "dora_sglang", TOKEN_VARIABLE, {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}
)
FLAGS = (
    *("--skip-tokenizer-init", "--skip-server-warmup", "--sampling-defaults", "openai"),
    *("--load-format", "safetensors"),
    *("--stream-interval", "8", "--incremental-streaming-output", "--log-level", "warning"),
    *("--json-model-override-args", '{"eos_token_id": null}'),  # only a request's stop ids end its response
)
CPU_FLAGS = ("--attention-backend", "torch_native", "--disable-overlap-schedule")
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


class Sglang(HttpEngine):
    """An SGLang server with one version."""

    server_kind = SGLANG
    capabilities = Capabilities(
        episodes=True,
        stop_strings=True,
        pauses=True,
        migrates_without_kv=True,
        tensor_parallel=True,
        dtypes=("float32", "bfloat16"),
        devices=("cpu", "cuda"),
    )

    def __init__(
        self,
        *,
        model: str,
        max_rows: int,
        max_context: int,
        version_slots: int,
        device: str,
        dtype: str,
        python: str | None = None,
        url: str | None = None,
        arguments: Sequence[str] = (),
        silence_s: float = 60.0,
        num_gpus: int = 1,
    ) -> None:
        """Start a server with the interpreter `python` and additional `arguments`, or use the one at `url`.

        A started server divides the model among `num_gpus` GPUs, of which `device` is the first.

        The engine is lost if the server sends nothing for `silence_s` while it has requests.
        """
        check_server_options(SGLANG, python, url)
        if python is not None:
            context = max_context + SPARE_TOKENS
            sizes = ("--context-length", f"{context}", "--max-running-requests", f"{max_rows}")
            own = ("--model-path", model, "--dtype", dtype, *_device_flags(device, num_gpus))
            pool = ("--max-total-tokens", f"{max_rows * context}", "--random-seed", f"{secrets.randbits(31)}")
            flags = (*own, *sizes, *pool, *FLAGS, *arguments)
            environment = {key: value for key, value in ENVIRONMENT.items() if key not in os.environ}
            server = start_server(SGLANG, python, flags, environment)
        else:
            assert url is not None
            server = attach_server(SGLANG, url, max_context + SPARE_TOKENS)
            server.call("/abort_request", {"abort_all": True})  # requests of other clients
            server.call("/continue_generation", {})
        super().__init__(
            server,
            model=model,
            max_rows=max_rows,
            max_context=max_context,
            dtype=dtype,
            silence_s=silence_s,
        )
        info = self.server.call("/server_info")
        if info["dtype"] != dtype:
            raise EngineError(f"{server} computes in {info['dtype']}; set engine.dtype to that")
        self.kernels = f"SGLang {info['version']} on {info['device']}"

    def _send_file(self, label: str, path: Path) -> str:
        """SGLang loads all files of a folder, so this one gets a folder with a link to it."""
        with tempfile.TemporaryDirectory() as folder:
            (Path(folder) / WEIGHTS_FILE).symlink_to(path.absolute())
            call = {"model_path": folder, "weight_version": label}
            message = self.server.call("/update_weights_from_disk", call, LOAD_TIMEOUT_S)["message"]
        if (digest := re.search(rf"{DIGEST_PREFIX}([0-9a-f]{{32}})", message)) is None:
            raise EngineError(
                f"{self.server} does not report the digest of the weights that it loads: start it as "
                "dora_sglang, see docs/sglang.md"
            )
        return digest[1]

    def _generate_call(self, running: ServerRequest) -> tuple[str, JsonBody]:
        sampling = running.request.sampling
        return "/generate", {
            "rid": running.server_id,
            "input_ids": running.prompt_ids,
            "extra_key": self._labels[running.request.version],  # KV of one version never serves another
            "stream": True,
            "return_logprob": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": running.max_tokens,
                "stop_token_ids": sampling.stop_ids,
            },
        }

    def _parse_event(self, running: ServerRequest, event: Any) -> StreamDelta:
        info = event["meta_info"]
        logprobs = [logprob for logprob, *_ in info["output_token_logprobs"]]
        reason = info["finish_reason"] and info["finish_reason"]["type"]
        spans = info.get("weight_versions")
        if reason is None:  # not listed yet: all tokens so far are from the weights that the server has now
            num_tokens = running.num_generated + len(event["output_ids"])
            spans = [{"version": info["weight_version"], "start": 0, "end": num_tokens}]
        return StreamDelta(event["output_ids"], logprobs, reason, spans)

    def _abort_streams(self, streams: Iterable[ServerRequest]) -> None:
        for running in streams:
            self.server.call("/abort_request", {"rid": running.server_id})

    def _set_paused(self, is_paused: bool) -> None:
        if is_paused:
            self.server.call("/pause_generation", {"mode": "in_place"})
        else:
            self.server.call("/continue_generation", {})


def _device_flags(device: str, num_gpus: int) -> Sequence[str]:
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return "--device", kind, *CPU_FLAGS
    return "--device", kind, "--base-gpu-id", number or "0", "--tp-size", f"{num_gpus}"
