r"""An inference engine that is transformers and nothing else: what an adapter looks like.

    dora train examples/gcd.toml --set engine.adapter=examples/adapters/transformers_engine.py:Transformers \
      --set engine.version_slots=1 --set orchestrator.placement=static --set orchestrator.rush=false

Each request decodes by itself with a cache of its own, so it is slow; it holds one version, and its
requests stay where they are. `dora.contract.inference` has been run against it (tests/contract).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from dora.core.records import Chunk, RequestId
from dora.engine.sequence import Completion, EngineError, Request
from dora.model.folder import load_config
from dora.model.weights import Layout, weight_digest
from dora.runtime.stations import Capabilities


@dataclass
class _Row:
    """A request while it is decoded."""

    request: Request
    cache: DynamicCache
    draws: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)


class Transformers:
    """One model of transformers, which has the weights of one version at a time."""

    capabilities = Capabilities(max_versions=1, is_seeded=True, pauses=True)
    kernels = "transformers"

    def __init__(
        self, *, model: str, max_rows: int, max_context: int, version_slots: int, device: str, dtype: str
    ) -> None:
        """Its parameters are views of one buffer, in DORA's order."""
        config = load_config(Path(model))
        self._layout, self._vocab_size = Layout(config), config.vocab_size
        self._model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).eval()
        self._flat = torch.zeros(self._layout.numel)
        views = self._layout.views(self._flat)
        for name, parameter in self._model.named_parameters():
            parameter.data = views[name]
        self._max_rows, self._max_context = max_rows, max_context
        self._held: dict[int, str] = {}
        self._waiting: deque[Request] = deque()
        self._rows: dict[RequestId, _Row] = {}
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
        if source.shape != self._flat.shape:
            raise EngineError(f"version {version} has {source.numel()} weights, not {self._flat.numel()}")
        self._flat.copy_(source)
        self._held[version] = weight_digest(self._flat)
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
        self._rows = {id: row for id, row in self._rows.items() if id not in given_up}
        return given_up

    def progress(self) -> dict[RequestId, int]:
        waiting = {request.id: 0 for request in self._waiting}
        return waiting | {id: len(row.token_ids) for id, row in self._rows.items()}

    def pause(self) -> None:
        self._is_paused = True

    def resume(self) -> None:
        self._is_paused = False

    def rush(self, ids: Iterable[RequestId]) -> None:
        """Not among the capabilities, so it is never asked."""
        raise EngineError("rows do not stand still here; set orchestrator.rush = false")

    def step(self) -> list[Completion]:
        if self._is_paused:
            return []
        began_s = time.perf_counter()
        while self._waiting and len(self._rows) < self._max_rows:
            request = self._waiting.popleft()
            draws = torch.Generator().manual_seed(request.seed % 2**63)
            self._rows[request.id] = _Row(request, DynamicCache(), draws)
        rows = [*self._rows.values()]
        done = [completion for row in rows if (completion := self._decode(row)) is not None]
        for completion in done:
            del self._rows[completion.id]
        self.num_decoded += len(rows)
        self.busy_row_s += len(rows) * (time.perf_counter() - began_s)
        return done

    @torch.no_grad()
    def _decode(self, row: _Row) -> Completion | None:
        """One token; the answer, if it was the last."""
        sampling = row.request.sampling
        new = row.token_ids[-1:] or [*row.request.prompt_ids]
        logits = self._model(torch.tensor([new]), past_key_values=row.cache, use_cache=True).logits[0, -1]
        logprobs = torch.log_softmax(logits / (sampling.temperature or 1.0), -1)
        if sampling.temperature:
            token = int(torch.multinomial(logprobs.exp(), 1, generator=row.draws))
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
            prompt_ids=row.request.prompt_ids,
            token_ids=row.token_ids,
            logprobs=row.logprobs,
            unfiltered_logprobs=row.logprobs,
            raw_logprobs=row.raw_logprobs,
            chunks=(Chunk(version, self._held[version], len(row.token_ids)),),
            finish_reason="stop" if is_stopped else "length",
        )

    def _reason_to_refuse(self, request: Request) -> str:
        if request.version not in self._held:
            return f"version {request.version} is not held; held: {[*self._held]}"
        if not all(0 <= token < self._vocab_size for token in request.prompt_ids):
            return "its prompt has token ids that the model does not have"
        if request.max_length > self._max_context:
            return f"it may have {request.max_length} tokens, over max_context = {self._max_context}"
        return ""
