r"""An example of an inference backend: Hugging Face transformers as DORA's engine.

    dora train examples/gcd.toml --set engine.backend=examples/adapters/transformers_engine.py:Transformers \
      --set orchestrator.placement=static

Each request decodes on its own, with its own KV cache, so it is slow. It holds one version and does not
migrate requests. It passes the contract in `dora.testing.engine_contract`.
"""

from __future__ import annotations

import inspect
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from dora.core.types import Chunk, RequestId
from dora.engine.interface import Capabilities
from dora.engine.request import Completion, EngineError, Request
from dora.model.pretrained import load_config
from dora.model.weights import WeightLayout, weight_digest


@dataclass
class _Row:
    """A request that is being decoded."""

    request: Request
    cache: DynamicCache
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)


class Transformers:
    """An `InferenceEngine` with one model of transformers, which holds one version at a time."""

    capabilities = Capabilities(max_versions=1, is_seeded=True, pauses=True)
    kernels = "transformers"

    def __init__(
        self, *, model: str, max_rows: int, max_context: int, version_slots: int, device: str, dtype: str
    ) -> None:
        config = load_config(Path(model))
        self._layout, self._vocab_size = WeightLayout(config), config.vocab_size
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        has_cache = "cache" in inspect.signature(self._model.forward).parameters
        self._cache_argument = (
            "cache" if has_cache else "past_key_values"
        )  # its name before transformers 5.24
        self._flat = torch.zeros(self._layout.numel)
        views = self._layout.views(self._flat)
        for name, parameter in self._model.named_parameters():
            parameter.data = views[name]  # parameters are views of one buffer, in DORA's order
        self._max_rows, self._max_context = max_rows, max_context
        self._digests: dict[int, str] = {}  # of the loaded version
        self._waiting: deque[Request] = deque()
        self._rows: dict[RequestId, _Row] = {}
        self._is_paused = False
        self.num_decoded, self.busy_row_s = 0, 0.0

    @property
    def versions(self) -> Mapping[int, str]:
        return self._digests

    @property
    def kv_usage(self) -> float:
        num_tokens = sum(len(r.request.prompt_ids) + len(r.token_ids) for r in self._rows.values())
        return num_tokens / (self._max_rows * self._max_context)

    @property
    def can_step(self) -> bool:
        return not self._is_paused and bool(self._rows or self._waiting)

    def load(self, version: int, source: Tensor) -> str:
        if self._digests:
            raise EngineError(f"no free slot for version {version}: {[*self._digests]} is loaded; drop it")
        if source.shape != self._flat.shape:
            raise EngineError(f"version {version} has {source.numel()} weights, not {self._flat.numel()}")
        self._flat.copy_(source)
        self._digests[version] = weight_digest(self._flat)
        return self._digests[version]

    def drop(self, version: int) -> None:
        if version not in self._digests:
            raise EngineError(f"version {version} is not loaded; loaded: {[*self._digests]}")
        if self.progress():
            raise EngineError(f"version {version} has {len(self.progress())} unfinished requests")
        del self._digests[version]

    def submit(self, requests: Sequence[Request]) -> None:
        reasons = {request.id: self._reason_to_reject(request) for request in requests}
        self._waiting += [request for request in requests if not reasons[request.id]]
        if rejected := {id: reason for id, reason in reasons.items() if reason}:
            raise EngineError(f"requests rejected: {rejected}", rejected)

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        progress = self.progress()
        aborted = {id: progress[id] for id in ids if id in progress}
        self._waiting = deque(request for request in self._waiting if request.id not in aborted)
        self._rows = {id: row for id, row in self._rows.items() if id not in aborted}
        return aborted

    def progress(self) -> dict[RequestId, int]:
        waiting = {request.id: 0 for request in self._waiting}
        return waiting | {id: len(row.token_ids) for id, row in self._rows.items()}

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def decode_only(self, ids: Iterable[RequestId]) -> None:
        """Raises EngineError for any ids: `capabilities` does not claim it."""
        if {*ids}:
            raise EngineError(
                "this engine cannot decode some requests only; set orchestrator.prioritize_stragglers = false"
            )

    def step(self) -> list[Completion]:
        if self._is_paused:
            return []
        began_s = time.perf_counter()
        while self._waiting and len(self._rows) < self._max_rows:
            request = self._waiting.popleft()
            generator = torch.Generator().manual_seed(request.seed % 2**63)
            self._rows[request.id] = _Row(request, DynamicCache(), generator)
        rows = [*self._rows.values()]
        completions = [completion for row in rows if (completion := self._decode(row)) is not None]
        for completion in completions:
            del self._rows[completion.id]
        self.num_decoded += len(rows)
        self.busy_row_s += len(rows) * (time.perf_counter() - began_s)
        return completions

    @torch.no_grad()
    def _decode(self, row: _Row) -> Completion | None:
        """Generate one token. Returns the answer if the token was its last."""
        sampling = row.request.sampling
        inputs = row.token_ids[-1:] or [*row.request.prompt_ids]
        cache = {self._cache_argument: row.cache}
        logits = self._model(torch.tensor([inputs]), use_cache=True, **cache).logits[0, -1]
        logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        if sampling.temperature:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=row.generator))
        else:
            token = int(logits.argmax())
        row.token_ids.append(token)
        row.logprobs.append(float(logprobs[token]))
        row.raw_logprobs.append(float(torch.log_softmax(logits, -1)[token]))
        is_stopped = token in sampling.stop_ids
        if not is_stopped and len(row.token_ids) < sampling.max_tokens:
            return None
        version = row.request.version
        return Completion(
            id=row.request.id,
            version=version,
            prompt_ids=np.array(row.request.prompt_ids, np.int32),
            token_ids=np.array(row.token_ids, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            unfiltered_logprobs=np.array(row.logprobs, np.float32),
            raw_logprobs=np.array(row.raw_logprobs, np.float32),
            chunks=(Chunk(version, self._digests[version], len(row.token_ids)),),
            finish_reason="stop" if is_stopped else "length",
        )

    def _reason_to_reject(self, request: Request) -> str:
        if request.version not in self._digests:
            return f"version {request.version} is not loaded; loaded: {[*self._digests]}"
        if not all(0 <= token < self._vocab_size for token in request.prompt_ids):
            return f"its prompt has token ids outside the vocabulary of {self._vocab_size}"
        if request.max_length > self._max_context:
            return f"it may have {request.max_length} tokens, over max_context = {self._max_context}"
        return ""
