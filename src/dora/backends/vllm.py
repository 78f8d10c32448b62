r"""vLLM as an inference engine: token ids in, token ids and log-probs out, one version at a time.

    [engine]
    adapter = "vllm"
    options = { python = "/path/to/vllm/bin/python" }

Its server is a process group of its own, which ends with the engine, or one that is there already. Weights
come to it as a file in memory; it tells their digest, and with each answer whose weights drew its tokens.
"""

from __future__ import annotations

import math
import os
import queue
import secrets
import shutil
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dora.backends import vllm_server
from dora.backends.weights_file import write_safetensors
from dora.core.records import Chunk, RequestId
from dora.engine.sequence import Completion, EngineError, Request
from dora.errors import ConfigError, RunError
from dora.model.folder import load_config
from dora.model.weights import Layout
from dora.runtime.stations import Capabilities
from dora.weights.store import make_store_folder

WAIT_S = 0.02  # longest that a step waits for the server
LOAD_S = 600.0  # longest that a load may take
GIVE_UP_S = 30.0  # longest that the server may go on with what was given up
FLAGS = (
    *("--enable-scale-out", "--logprobs-mode", "processed_logprobs", "--generation-config", "vllm"),
    *("--worker-extension-cls", "dora_vllm.Weights", "--middleware", "dora_vllm.Token"),
    *("--skip-tokenizer-init", "--stream-interval", "8"),
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


@dataclass(eq=False)
class _Row:
    """A request at the server, which knows it by its `name`."""

    request: Request
    name: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Vllm:
    """One server, which has the weights of one version at a time."""

    capabilities = Capabilities(pauses=True, dtypes=("float32", "bfloat16"), devices=("cpu", "cuda"))

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
        if (python is None) == (url is None):
            raise ConfigError("engine.options: give vLLM either python, an interpreter, or url, a server")
        config = load_config(Path(model))
        self._layout, self._vocab_size, self._dtype = Layout(config), config.vocab_size, dtype
        self._max_rows, self._max_context, self._silence_s = max_rows, max_context, silence_s
        if python is not None:
            sizes = ("--max-model-len", f"{max_context}", "--max-num-seqs", f"{max_rows}")
            flags = ("--model", model, "--dtype", dtype, *sizes, "--seed", f"{secrets.randbits(31)}", *FLAGS)
            own, settings = _of_device(device, config.kv_bytes_per_token * max_rows * max_context)
            self.server = vllm_server.start(python, (*flags, *own, *arguments), settings)
        else:
            assert url is not None
            self.server = vllm_server.attach(url, max_context)
        about = self._about()
        self.kernels = f"vLLM {self.server.call('/version')['version']} on {about['device']}"
        self._held: dict[int, str] = {}
        self._label = ""  # of the weights that are loaded, at the server
        self._waiting: deque[Request] = deque()
        self._rows: dict[RequestId, _Row] = {}
        self._streams: set[_Row] = set()  # that the server may still be working on
        self._said: queue.SimpleQueue[tuple[_Row, Any]] = queue.SimpleQueue()
        self._heard_s = 0.0
        self._is_paused = False
        self.num_decoded, self.busy_row_s = 0, 0.0

    @property
    def versions(self) -> Mapping[int, str]:
        return self._held

    @property
    def kv_share(self) -> float:
        num_tokens = sum(len(r.request.prompt_ids) + len(r.token_ids) for r in self._rows.values())
        return num_tokens / (self._max_rows * self._max_context)

    @property
    def can_step(self) -> bool:
        return not self._is_paused and bool(self._rows or self._waiting)

    def load(self, version: int, source: Tensor) -> str:
        if self._held:
            raise EngineError(f"no place for version {version}: version {[*self._held]} is held; drop it")
        if (source.numel(), str(source.dtype)) != (self._layout.numel, f"torch.{self._dtype}"):
            raise EngineError(
                f"version {version} has {source.numel()} weights in {source.dtype}, not {self._layout.numel} "
                f"in {self._dtype}"
            )
        self._settle()
        folder = make_store_folder(source.nbytes)
        try:
            path = folder / "weights.safetensors"
            write_safetensors(path, self._layout, source)
            order = {"method": "dora_load", "args": [str(path)]}
            digests = set(self.server.call("/collective_rpc", order, LOAD_S)["results"])
        finally:
            shutil.rmtree(folder, ignore_errors=True)
        if len(digests) != 1:
            raise EngineError(f"workers of the vLLM server have read different weights: {sorted(digests)}")
        self._label = f"dora-{version}-{secrets.token_hex(8)}"
        self.server.call("/update_weight_version", {"new_version": self._label})
        (self._held[version],) = digests
        return self._held[version]

    def drop(self, version: int) -> None:
        if version not in self._held:
            raise EngineError(f"version {version} is not held; held: {[*self._held]}")
        if self.progress():
            raise EngineError(f"version {version} has {len(self.progress())} unfinished requests")
        del self._held[version]

    def submit(self, requests: Sequence[Request]) -> None:
        reasons = {request.id: self._reason_to_refuse(request) for request in requests}
        self._waiting += [request for request in requests if not reasons[request.id]]
        if refused := {id: reason for id, reason in reasons.items() if reason}:
            raise EngineError(f"requests refused: {refused}", refused)

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        progress = self.progress()
        given_up = {id: progress[id] for id in ids if id in progress}
        self._waiting = deque(request for request in self._waiting if request.id not in given_up)
        self._give_up([row for id in given_up if (row := self._rows.pop(id, None)) is not None])
        return given_up

    def progress(self) -> dict[RequestId, int]:
        waiting = {request.id: 0 for request in self._waiting}
        return waiting | {id: len(row.token_ids) for id, row in self._rows.items()}

    def pause(self) -> None:
        self.server.call("/pause?mode=keep", {})
        self._is_paused = True

    def resume(self) -> None:
        self.server.call("/resume", {})
        self._is_paused, self._heard_s = False, time.monotonic()

    def rush(self, ids: Iterable[RequestId]) -> None:
        """Not among the capabilities, so it is never asked."""
        raise EngineError("rows do not stand still here; set orchestrator.rush = false")

    def step(self) -> list[Completion]:
        if not self.can_step:
            return []
        began_s = time.monotonic()
        self.server.check()
        self._begin()
        num_rows = len(self._rows)
        done = [answer for row, said in self._hear(num_rows) if (answer := self._take(row, said)) is not None]
        self.busy_row_s += num_rows * (time.monotonic() - began_s)
        if began_s - self._heard_s > self._silence_s:
            raise RunError(f"the vLLM server has said nothing for {self._silence_s:g} s (silence_s)")
        return done

    def close(self) -> None:
        """End a server that was started here."""
        self.server.end()

    def _about(self) -> dict[str, str]:
        """What the server computes with. Raises EngineError if it is not ours to use."""
        (about, *_) = self.server.call("/collective_rpc", {"method": "dora_about"})["results"]
        if about["dtype"] != self._dtype:
            raise EngineError(f"the vLLM server computes in {about['dtype']}; set engine.dtype to that")
        return dict(about)

    def _begin(self) -> None:
        """Send requests that wait, as far as there are rows; a thread listens to each answer."""
        if not self._rows:
            self._heard_s = time.monotonic()
        while self._waiting and len(self._rows) < self._max_rows:
            request = self._waiting.popleft()
            row = self._rows[request.id] = _Row(request, secrets.token_hex(8))
            self._streams.add(row)
            threading.Thread(target=self._listen, args=(row, self._body(row)), daemon=True).start()

    def _body(self, row: _Row) -> dict[str, object]:
        sampling = row.request.sampling
        return {
            "request_id": row.name,
            "token_ids": row.request.prompt_ids,
            "cache_salt": self._label,  # KV of one version never serves another
            "stream": True,
            "sampling_params": {
                "temperature": sampling.temperature,
                "max_tokens": sampling.max_tokens,
                "stop_token_ids": sampling.stop_ids,
                "ignore_eos": True,  # those that end an answer are all among the stop ids
                "detokenize": False,
                "logprobs": 0,  # of the token that was drawn
            },
        }

    def _listen(self, row: _Row, body: dict[str, object]) -> None:
        """In a thread: pass on what the server says of a request; None is the last word."""
        try:
            for event in self.server.stream("/inference/v1/generate", body):
                self._said.put((row, event))
        except (EngineError, RunError) as error:
            self._said.put((row, error))
        finally:
            self._said.put((row, None))

    def _hear(self, at_most: int) -> list[tuple[_Row, Any]]:
        """What was said, after a short wait for a first word; no more than a word for each row."""
        heard: list[tuple[_Row, Any]] = []
        try:
            heard.append(self._said.get(timeout=WAIT_S))
            while len(heard) < at_most:
                heard.append(self._said.get_nowait())
        except queue.Empty:
            pass
        if heard:
            self._heard_s = time.monotonic()
        self._streams -= {row for row, said in heard if said is None}
        return heard

    def _take(self, row: _Row, said: Any) -> Completion | None:
        """A word about a request; its answer, if that was the last of it."""
        if self._rows.get(row.request.id) is not row:  # it has ended, or was given up
            return None
        if isinstance(said, Exception):
            raise RunError(f"request {row.request.id}: {said}") from said
        if said is None or "choices" not in said:
            raise RunError(f"request {row.request.id}: the vLLM server gave no answer, but {said}")
        (choice,) = said["choices"]
        new = choice["token_ids"] or []
        row.token_ids += new
        row.logprobs += [one["logprob"] for one in choice["logprobs"]["content"]] if new else []
        self.num_decoded += len(new)
        return None if choice["finish_reason"] is None else self._finish(row, choice)

    def _finish(self, row: _Row, choice: dict[str, Any]) -> Completion:
        """Raises RunError for an answer that is not of the version it began with, and no other (C1)."""
        del self._rows[row.request.id]
        num_tokens, version = len(row.token_ids), row.request.version
        if choice["finish_reason"] not in ("stop", "length") or len(row.logprobs) != num_tokens:
            raise RunError(f"request {row.request.id} ended as no answer does: {choice}")
        spans = choice["weight_versions"]
        if spans != [{"version": self._label, "start": 0, "end": num_tokens}]:
            raise RunError(
                f"request {row.request.id} is of version {version}, {self._label} at the vLLM server, which "
                f"says that the weights were {spans}; does somebody else use it?"
            )
        is_raw = row.request.sampling.temperature in (0.0, 1.0)
        return Completion(
            id=row.request.id,
            version=version,
            prompt_ids=row.request.prompt_ids,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            unfiltered_logprobs=row.logprobs,
            raw_logprobs=row.logprobs if is_raw else [math.nan] * num_tokens,  # it tells one kind only
            chunks=(Chunk(version, self._held[version], num_tokens),),
            finish_reason=choice["finish_reason"],
        )

    def _give_up(self, rows: Iterable[_Row]) -> None:
        if names := [f"generate-tokens-{row.name}" for row in rows]:
            self.server.call("/abort_requests", {"request_ids": names})

    def _settle(self) -> None:
        """Return once the server works on nothing: weights are never changed under a request."""
        deadline_s = time.monotonic() + GIVE_UP_S
        while self._streams:
            self._hear(len(self._streams))
            self._give_up(self._streams)  # again: it may have come to the server after it was given up
            if time.monotonic() > deadline_s:
                raise RunError(f"the vLLM server goes on with {len(self._streams)} requests given up")

    def _reason_to_refuse(self, request: Request) -> str:
        if request.version not in self._held:
            return f"version {request.version} is not held; held: {[*self._held]}"
        if not all(0 <= token < self._vocab_size for token in request.prompt_ids):
            return "its prompt has token ids that the model does not have"
        if request.max_length > self._max_context:
            return f"it may have {request.max_length} tokens, over max_context = {self._max_context}"
        return ""


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
