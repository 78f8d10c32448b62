r"""SGLang as an inference engine, with several versions in one server: full weights, or LoRA adapters.

    [engine]
    backend = "sglang"                                   # or "sglang-lora", with the option rank
    options = { python = "/path/to/sglang/bin/python" }

The engine starts a server and stops it, or uses one that is already running (`url`). The server reads the
file of a version in the weight store. With one version slot it generates nothing meanwhile; with several it
reads the file in parts, and generates in between. It returns the digest of what it has read, and with each
response which weights generated its tokens.
"""

from __future__ import annotations

import base64
import os
import re
import secrets
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.engine.backends.http_engine import (
    ABORT_TIMEOUT_S,
    HttpEngine,
    ServerRequest,
    StreamDelta,
    stream_interval,
)
from dora.engine.backends.kv_exchange import nixl_environment
from dora.engine.backends.lora_versions import LoraVersions
from dora.engine.backends.server import EngineServer, JsonBody, ServerKind, attach_server, start_server
from dora.engine.backends.server_plugins.dora_sglang import (
    CONTINUE_WITH,
    DECODE_ONLY,
    DIGEST_PREFIX,
    KEEP,
    KV_CONNECTOR_VARIABLE,
    LOADED_KEY,
    PART_KEY,
    PROTOCOL,
    ROUTES_FLAG,
    SLOTS_VARIABLE,
    TOKEN_VARIABLE,
)
from dora.engine.request import EngineError
from dora.errors import ConfigError
from dora.model.pretrained import load_config

LOAD_TIMEOUT_S = 600.0
SPARE_TOKENS = 8  # SGLang accepts only requests that are some tokens shorter than its context
SGLANG = ServerKind(
    "SGLang",
    "dora_sglang",
    TOKEN_VARIABLE,
    {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"},
    PROTOCOL,
    packages=("sglang",),
    tested_versions="0.5.23",
    remedy="sglang==0.5.23",
)
FLAGS = (
    *("--skip-tokenizer-init", "--skip-server-warmup", "--sampling-defaults", "openai"),
    *("--load-format", "safetensors"),
    *("--incremental-streaming-output", "--log-level", "warning"),
    *("--json-model-override-args", '{"eos_token_id": null}'),  # only a request's stop ids end its response
)
CPU_FLAGS = (
    *("--attention-backend", "torch_native", "--disable-overlap-schedule"),
    "--sleep-on-idle",  # else it spins without requests, too
)
CPU_ALIGNMENT = 32
ENVIRONMENT = {"HF_HUB_OFFLINE": "1"}


@dataclass(kw_only=True, eq=False, repr=False)
class Sglang(HttpEngine):
    """An SGLang server, with DORA-RL's scheduler. With `returns_routes` requests migrate without KV."""

    returns_routes: bool = False

    server_kind = SGLANG
    capabilities = replace(HttpEngine.capabilities, routes=True, filters=True)

    def _start(self, python: str) -> EngineServer:
        context, num_rows = self.max_context + SPARE_TOKENS, self.max_rows
        flags = (
            *("--model-path", self.model, "--dtype", self.dtype, *_device_flags(self.device, self.num_gpus)),
            *("--context-length", f"{context}", "--max-running-requests", f"{num_rows}"),
            *("--max-total-tokens", f"{num_rows * context}", "--random-seed", f"{secrets.randbits(31)}"),
            *((ROUTES_FLAG,) if self.returns_routes else ()),
            *(*FLAGS, *self.arguments),
        )
        environment = {key: value for key, value in ENVIRONMENT.items() if key not in os.environ}
        environment |= {SLOTS_VARIABLE: f"{self._num_server_slots}", KV_CONNECTOR_VARIABLE: self.kv_connector}
        if self.kv_connector == "nixl":
            environment |= nixl_environment(self.host, self.device)
        return start_server(SGLANG, python, flags, environment)

    def _attach(self, url: str) -> EngineServer:
        server = attach_server(SGLANG, url, self.max_context + SPARE_TOKENS)
        server.call("/abort_request", {"abort_all": True})  # requests of other clients
        server.call("/continue_generation", {})
        server.call_raw(f"/flush_cache?timeout={ABORT_TIMEOUT_S:.0f}", {})  # once they have ended
        return server

    def _use_server(self) -> str:
        info = self.server.call("/server_info")
        SGLANG.check_version(info["version"], str(self.server))
        if self.returns_routes and not info["enable_return_routed_experts"]:
            raise EngineError(f"{self.server} must be started with {ROUTES_FLAG} for trainer.routing_replay")
        self._use_plugins(info["internal_states"][0].get("dora", {}) | {"dtype": info["dtype"]})
        return f"SGLang {info['version']} on {info['device']}"

    def _reset_server(self) -> None:
        self._set_state(CONTINUE_WITH)
        self._set_state(DECODE_ONLY)

    def _start_load(self, version: int, send: Callable[[str], str]) -> Future[str]:
        self._loaded = [self._labels[loaded] for loaded in self._digests]
        return super()._start_load(version, send)

    def _send_file(self, label: str, path: Path) -> str:
        call: dict[str, Any] = {"model_path": str(path.absolute()), "weight_version": label}
        call["flush_cache"] = not self._is_multi_version
        part, digest = 0, None
        while digest is None:  # it comes with the last part
            call["manifest"] = {LOADED_KEY: self._loaded, PART_KEY: [part, self._max_part_bytes]}
            message = self.server.call("/update_weights_from_disk", call, LOAD_TIMEOUT_S)["message"]
            part, digest = part + 1, re.search(rf"{DIGEST_PREFIX}([0-9a-f]{{32}})", message)
        return digest[1]

    def _unload(self, label: str) -> None:
        """The next load says which versions stay."""

    def _keep_kv(self, version: int) -> None:
        self._set_state(CONTINUE_WITH, self._labels[version])

    def _send_decode_only(self, server_ids: Sequence[str]) -> None:
        self._set_state(DECODE_ONLY, *server_ids)

    def _set_state(self, call: str, *arguments: str) -> None:
        """A call of DORA-RL's scheduler. SGLang transmits names with numbers."""
        self.server.call("/set_internal_state", {"server_args": dict.fromkeys((call, *arguments), 1)})

    def _generate_call(self, running: ServerRequest) -> tuple[str, JsonBody]:
        sampling, folders = running.request.sampling, self._kv_folders(running)
        label = self._labels[running.request.version] + (KEEP if self._keeps_version(running) else "")
        return "/generate", {
            "rid": running.server_id,
            "input_ids": running.prompt_ids,
            "extra_key": label,  # KV of one version never serves another
            "stream": True,
            "return_logprob": True,
            "return_routed_experts": self.returns_routes,
            "sampling_params": {
                "temperature": sampling.temperature,
                **sampling.filters,
                "max_new_tokens": running.max_tokens,
                "stop_token_ids": sampling.stop_ids,
                "stream_interval": stream_interval(sampling),
                **({"custom_params": folders} if folders else {}),
            },
        }

    def _parse_event(self, running: ServerRequest, event: Any) -> StreamDelta:
        info = event["meta_info"]
        logprobs = [logprob for logprob, *_ in info["output_token_logprobs"]]
        reason = info["finish_reason"] and info["finish_reason"]["type"]
        if not running.num_generated and event["output_ids"]:
            self._on_prefilled(running, info["prompt_tokens"] - info["cached_tokens"])
        routes, spans = info.get("routed_experts"), info.get("weight_versions")
        found = None if routes is None else self._parse_routes(routes)
        return StreamDelta(event["output_ids"], logprobs, reason, spans, found)

    def _parse_routes(self, routes: str) -> NDArray[np.int16]:
        """[tokens, MoE layers, k], from SGLang's base64 of int32 [tokens, layers, k]."""
        config = self._config
        shape = -1, config.num_hidden_layers, config.num_experts_per_tok
        experts = np.frombuffer(base64.b64decode(routes), np.int32).reshape(shape)
        return experts[:, config.moe_layers].astype(np.int16)

    def _abort_streams(self, streams: Iterable[ServerRequest]) -> None:
        for running in streams:
            self.server.call("/abort_request", {"rid": running.server_id})

    def _set_paused(self, is_paused: bool) -> None:
        if is_paused:
            self.server.call("/pause_generation", {"mode": "in_place"})
        else:
            self.server.call("/continue_generation", {})


class SglangLora(LoraVersions, Sglang):
    """An SGLang server of the initial model with several versions, each a LoRA adapter."""

    @classmethod
    def check_options(cls, *, rank: object = 0, **others: object) -> None:
        """As `HttpEngine.check_options`. Raises ConfigError for a rank that is no positive integer."""
        super().check_options(**others)
        if not isinstance(rank, int) or rank < 1:
            raise ConfigError(f"rank = {rank!r} must be a positive integer, at least trainer.lora_rank")

    def _lora_flags(self) -> Sequence[str]:
        slots, names = f"{self.version_slots}", load_config(Path(self.model)).linear_names
        modules = dict.fromkeys(name.rpartition(".")[2] for name in names)
        return (
            *("--enable-lora", "--max-lora-rank", f"{self.rank}", "--lora-target-modules", *modules),
            *("--max-loras-per-batch", slots, "--max-loaded-loras", slots),
            *(("--lora-backend", "torch_native") if self.device == "cpu" else ()),
        )

    def _check_base(self) -> None:
        info, path = self.server.call("/server_info"), Path(self.model).resolve()
        if not info["enable_lora"] or Path(info["model_path"]).resolve() != path:
            raise EngineError(f"{self.server} must be started with --enable-lora and --model-path {path}")
        aligned, size = CPU_ALIGNMENT * info["tp_size"], self._config.intermediate_size
        if info["device"] == "cpu" and size % aligned:  # SGLang pads the weights of MLPs, but no adapters
            raise ConfigError(
                f"{self.model} has intermediate_size = {size}: on a CPU, adapters at {self.server} need a "
                f"multiple of {aligned}; set engine.backend = sglang"
            )
        for limit in ("max_loras_per_batch", "max_loaded_loras"):
            if (most := info[limit]) is not None and most < self.num_slots:
                flag = f"--{limit.replace('_', '-')} {self.num_slots}"
                raise EngineError(f"{self.server} holds {most} adapters at most: start it with {flag}")

    def _load_adapter(self, label: str, folder: Path) -> str:
        adapter = {"lora_name": label, "lora_path": str(folder)}
        digest: str = self.server.call("/load_lora_adapter", adapter, LOAD_TIMEOUT_S)["error_message"]
        return digest

    def _unload_adapter(self, label: str) -> None:
        # It waits for loads of other adapters.
        self.server.call_raw("/unload_lora_adapter", {"lora_name": label}, LOAD_TIMEOUT_S)

    def _generate_call(self, running: ServerRequest) -> tuple[str, JsonBody]:
        path, body = super()._generate_call(running)
        return path, {**body, "lora_path": self._labels[running.request.version]}


def _device_flags(device: str, num_gpus: int) -> Sequence[str]:
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return "--device", kind, *CPU_FLAGS
    return "--device", kind, "--base-gpu-id", number or "0", "--tp-size", f"{num_gpus}"
