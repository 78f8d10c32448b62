r"""SGLang as an inference engine; `Served` has what it shares with others.

    [engine]
    adapter = "sglang"
    options = { python = "/path/to/sglang/bin/python" }

Its server is a process group of its own, which ends with the engine, or one that is there already. Weights
come to it as a file in memory; it tells their digest, and with each answer whose weights drew its tokens.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from dora.backends import server
from dora.backends.inside.dora_sglang import TOKEN_KEY, TOLD
from dora.backends.served import Served
from dora.backends.server import Body, Product
from dora.backends.words import Row, Word
from dora.engine.sequence import EngineError
from dora.runtime.stations import Capabilities

LOAD_S = 600.0  # longest that a load may take
SPARE = 8  # tokens of its context that SGLang keeps from a request, and more
PRODUCT = Product("SGLang", "dora_sglang", TOKEN_KEY, {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"})
FLAGS = (
    *("--skip-tokenizer-init", "--skip-server-warmup", "--sampling-defaults", "openai"),
    *("--load-format", "safetensors"),
    *("--stream-interval", "8", "--incremental-streaming-output", "--log-level", "warning"),
    *("--json-model-override-args", '{"eos_token_id": null}'),  # a request says what ends it
)
CPU_FLAGS = ("--attention-backend", "torch_native", "--disable-overlap-schedule")
SETTINGS = {"HF_HUB_OFFLINE": "1"}


class Sglang(Served):
    """An SGLang server."""

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
            kind, _, number = device.partition(":")
            context = max_context + SPARE
            sizes = ("--context-length", f"{context}", "--max-running-requests", f"{max_rows}")
            own = ("--model-path", model, "--dtype", dtype, "--device", kind, "--base-gpu-id", number or "0")
            pool = ("--max-total-tokens", f"{max_rows * context}", "--random-seed", f"{secrets.randbits(31)}")
            flags = (*own, *sizes, *pool, *FLAGS, *(CPU_FLAGS if kind == "cpu" else ()), *arguments)
            settings = {key: value for key, value in SETTINGS.items() if key not in os.environ}
            found = server.start(PRODUCT, python, flags, settings)
        else:
            assert url is not None
            found = server.attach(PRODUCT, url, max_context + SPARE)
            found.call("/abort_request", {"abort_all": True})  # what it is working on for others
            found.call("/continue_generation", {})
        sizes_of = {"max_rows": max_rows, "max_context": max_context}
        super().__init__(found, model=model, dtype=dtype, silence_s=silence_s, **sizes_of)
        about = self.server.call("/server_info")
        if about["dtype"] != dtype:
            raise EngineError(f"the SGLang server computes in {about['dtype']}; set engine.dtype to that")
        self.kernels = f"SGLang {about['version']} on {about['device']}"

    def _put(self, folder: Path, label: str) -> str:
        order = {"model_path": str(folder), "weight_version": label}
        message = self.server.call("/update_weights_from_disk", order, LOAD_S)["message"]
        if (told := re.search(rf"{TOLD}([0-9a-f]{{32}})", message)) is None:
            raise EngineError(
                f"{self.server} does not tell the digest of what it has loaded: start it as dora_sglang, "
                "see docs/sglang.md"
            )
        return told[1]

    def _ask(self, row: Row) -> tuple[str, Body]:
        sampling = row.request.sampling
        return "/generate", {
            "rid": row.name,
            "input_ids": row.prompt_ids,
            "extra_key": self._labels[row.request.version],  # KV of one version never serves another
            "stream": True,
            "return_logprob": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_new_tokens": row.num_left,
                "stop_token_ids": sampling.stop_ids,
            },
        }

    def _read(self, row: Row, said: Any) -> Word:
        about = said["meta_info"]
        logprobs = [logprob for logprob, *_ in about["output_token_logprobs"]]
        reason = about["finish_reason"] and about["finish_reason"]["type"]
        return Word(said["output_ids"], logprobs, reason, about.get("weight_versions"))

    def _give_up(self, rows: Iterable[Row]) -> None:
        for row in rows:
            self.server.call("/abort_request", {"rid": row.name})

    def _rest(self, is_paused: bool) -> None:
        if is_paused:
            self.server.call("/pause_generation", {"mode": "in_place"})
        else:
            self.server.call("/continue_generation", {})
