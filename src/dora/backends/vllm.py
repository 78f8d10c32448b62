r"""vLLM as an inference engine; `Served` has what it shares with others.

    [engine]
    adapter = "vllm"
    options = { python = "/path/to/vllm/bin/python" }

Its server is a process group of its own, which ends with the engine, or one that is there already. Weights
come to it as a file in memory; it tells their digest, and with each answer whose weights drew its tokens.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dora.backends import server
from dora.backends.inside.dora_vllm import TOKEN_KEY
from dora.backends.served import Served
from dora.backends.server import Body, Product
from dora.backends.words import Row, Word
from dora.engine.sequence import EngineError
from dora.model.folder import load_config
from dora.runtime.stations import Capabilities

LOAD_S = 600.0  # longest that a load may take
PRODUCT = Product(
    "vLLM",
    "vllm.entrypoints.openai.api_server",
    TOKEN_KEY,
    {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1"},  # its calls for weights
)
FLAGS = (
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
    *("--worker-extension-cls", "dora_vllm.Weights", "--middleware", "dora_vllm.Token"),
    *("--skip-tokenizer-init", "--stream-interval", "8", "--load-format", "safetensors"),
    *("--disable-log-stats", "--disable-uvicorn-access-log", "--uvicorn-log-level", "warning"),
)
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_HOST_IP": "127.0.0.1",  # its processes speak to each other on this machine only
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
CPU_FLAGS = ("--enforce-eager",)
CPU_SETTINGS = {
    "TORCHDYNAMO_DISABLE": "1",  # it would compile C++ for a part of the sampler
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}


class Vllm(Served):
    """A vLLM server."""

    product = PRODUCT
    capabilities = Capabilities(
        pauses=True, reprefills=True, dtypes=("float32", "bfloat16"), devices=("cpu", "cuda")
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
    ) -> None:
        """Start a server with the interpreter `python` and more `arguments`, or use the one at `url`.

        One that says nothing for `silence_s` while it has requests is lost.
        """
        server.check(PRODUCT, python, url)
        if python is not None:
            kv_bytes = load_config(Path(model)).kv_bytes_per_token * max_rows * max_context
            sizes = ("--max-model-len", f"{max_context}", "--max-num-seqs", f"{max_rows}")
            flags = ("--model", model, "--dtype", dtype, *sizes, "--seed", f"{secrets.randbits(31)}", *FLAGS)
            own, settings = _of_device(device, kv_bytes)
            found = server.start(PRODUCT, python, (*flags, *own, *arguments), settings)
        else:
            assert url is not None
            found = server.attach(PRODUCT, url, max_context)
            found.call("/abort_requests", {})  # what it is working on for others
            found.call("/resume", {})
        sizes_of = {"max_rows": max_rows, "max_context": max_context}
        super().__init__(found, model=model, dtype=dtype, silence_s=silence_s, **sizes_of)
        (about, *_) = self.server.call("/collective_rpc", {"method": "dora_about"})["results"]
        if about["dtype"] != dtype:
            raise EngineError(f"the vLLM server computes in {about['dtype']}; set engine.dtype to that")
        self.kernels = f"vLLM {self.server.call('/version')['version']} on {about['device']}"

    def _put(self, folder: Path, label: str) -> str:
        order = {"method": "dora_load", "args": [str(folder / "model.safetensors")]}
        digests = set(self.server.call("/collective_rpc", order, LOAD_S)["results"])
        if len(digests) != 1:
            raise EngineError(f"workers of the vLLM server have read different weights: {sorted(digests)}")
        self.server.call("/update_weight_version", {"new_version": label})
        return str(digests.pop())

    def _ask(self, row: Row) -> tuple[str, Body]:
        sampling = row.request.sampling
        return "/inference/v1/generate", {
            "request_id": row.name,
            "token_ids": row.prompt_ids,
            "cache_salt": self._labels[row.request.version],  # KV of one version never serves another
            "stream": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": row.num_left,
                "stop_token_ids": sampling.stop_ids,
                "ignore_eos": True,  # those that end an answer are all among the stop ids
                "detokenize": False,
                "logprobs": 0,  # of the token that was drawn
            },
        }

    def _read(self, row: Row, said: Any) -> Word:
        (choice,) = said["choices"]
        new = choice["token_ids"] or []
        logprobs = [one["logprob"] for one in choice["logprobs"]["content"]] if new else []
        return Word(new, logprobs, choice["finish_reason"], choice.get("weight_versions"))

    def _give_up(self, rows: Iterable[Row]) -> None:
        if names := [f"generate-tokens-{row.name}" for row in rows]:
            self.server.call("/abort_requests", {"request_ids": names})

    def _rest(self, is_paused: bool) -> None:
        self.server.call("/pause?mode=keep" if is_paused else "/resume", {})


def _of_device(device: str, kv_bytes: int) -> tuple[Sequence[str], dict[str, str]]:
    """Flags and variables of a server on a device; a user's own variables count more."""
    kind, _, number = device.partition(":")
    settings = dict(SETTINGS)
    if kind == "cpu":
        settings |= CPU_SETTINGS
        num_gib = math.ceil(2 * kv_bytes / 2**30)  # twice, for rows end within blocks
        settings["VLLM_CPU_KVCACHE_SPACE"] = str(num_gib)
    settings = {key: value for key, value in settings.items() if key not in os.environ}
    if number:
        known = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
        settings["CUDA_VISIBLE_DEVICES"] = known[int(number)] if known else number
    return (CPU_FLAGS if kind == "cpu" else ()), settings
