"""An engine on transformers, for every causal language model that the trainer can train.

Each request decodes on its own with its own cache, so the engine is slow and a request's tokens depend on
nothing but its seed. It serves tests and small models on the CPU; vLLM and SGLang serve the rest.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dora.core.types import FIRST_IMAGE_ID, Chunk, RequestId
from dora.engine.interface import Capabilities
from dora.engine.request import Completion, EngineError, Request
from dora.model.images import ImageFolder
from dora.model.pretrained import load_config
from dora.model.transformers_model import ModelCache, TransformersModel
from dora.model.weights import WeightLayout, copy_with_digest


@dataclass
class _Row:
    """A request that is being decoded."""

    request: Request
    cache: ModelCache
    generator: torch.Generator
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    raw_logprobs: list[float] = field(default_factory=list)


class Transformers:
    """An `InferenceEngine` with one model of transformers for each loaded version."""

    capabilities = Capabilities(
        max_versions=None,
        is_seeded=True,
        pauses=True,
        decode_only=1,
        images=True,
        dtypes=("float32", "bfloat16"),
        devices=("cpu", "cuda"),
    )
    kernels = "transformers"

    def __init__(
        self,
        *,
        model: str,
        max_rows: int,
        max_context: int,
        version_slots: int,
        device: str,
        dtype: str,
        images: Path | None = None,
    ) -> None:
        self._config = load_config(Path(model))
        self._images = images
        self._layout = WeightLayout(self._config)
        self._device, self._dtype = torch.device(device), getattr(torch, dtype)
        self._max_rows, self._max_context, self._num_slots = max_rows, max_context, version_slots
        self._models: dict[int, TransformersModel] = {}
        self._digests: dict[int, str] = {}
        self._waiting: deque[Request] = deque()
        self._rows: dict[RequestId, _Row] = {}
        self._only: set[RequestId] = set()  # requests to decode; empty: all
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
        if version in self._digests:
            raise EngineError(f"version {version} is loaded already; drop it first")
        if len(self._digests) == self._num_slots:
            raise EngineError(f"no free slot for version {version}: {[*self._digests]} are loaded; drop one")
        if source.shape != (self._layout.numel,):
            raise EngineError(f"version {version} has {source.numel()} weights, not {self._layout.numel}")
        flat = torch.empty(self._layout.numel, dtype=self._dtype, device=self._device)
        self._digests[version] = copy_with_digest(flat, source)
        self._models[version] = TransformersModel(
            self._config, self._layout.views(flat), self._device, self._dtype, self._images
        )
        return self._digests[version]

    def drop(self, version: int) -> None:
        if version not in self._digests:
            raise EngineError(f"version {version} is not loaded; loaded: {[*self._digests]}")
        requests = [*self._waiting, *(row.request for row in self._rows.values())]
        if num := sum(request.version == version for request in requests):
            raise EngineError(f"version {version} has {num} unfinished requests")
        del self._digests[version], self._models[version]

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
        self._only = {*ids}

    def step(self) -> list[Completion]:
        if self._is_paused:
            return []
        began_s = time.perf_counter()
        while self._waiting and len(self._rows) < self._max_rows:
            request = self._waiting.popleft()
            generator = torch.Generator().manual_seed(request.seed % 2**63)
            self._rows[request.id] = _Row(request, self._models[request.version].new_cache(), generator)
        chosen = [row for id, row in self._rows.items() if id in self._only]
        rows = chosen or [*self._rows.values()]
        completions = [completion for row in rows if (completion := self._decode(row)) is not None]
        for completion in completions:
            del self._rows[completion.id]
        self.num_decoded += len(rows)
        self.busy_row_s += len(rows) * (time.perf_counter() - began_s)
        return completions

    @torch.no_grad()
    def _decode(self, row: _Row) -> Completion | None:
        """Generate one token. Returns the output if the token was its last."""
        request, sampling = row.request, row.request.sampling
        model = self._models[request.version]
        inputs = torch.tensor([row.token_ids[-1:] or [*request.prompt_ids]], device=self._device)
        logits = model.logits(model.hidden_states(inputs, row.cache)[0, -1:])[0].float().cpu()
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
        chunk = Chunk(request.version, self._digests[request.version], len(row.token_ids))
        return Completion(
            id=request.id,
            version=request.version,
            prompt_ids=np.array(request.prompt_ids, np.int32),
            token_ids=np.array(row.token_ids, np.int32),
            logprobs=np.array(row.logprobs, np.float32),
            unfiltered_logprobs=np.array(row.logprobs, np.float32),
            raw_logprobs=np.array(row.raw_logprobs, np.float32),
            chunks=(chunk,),
            finish_reason="stop" if is_stopped else "length",
        )

    def _reason_to_reject(self, request: Request) -> str:
        if request.version not in self._digests:
            return f"version {request.version} is not loaded; loaded: {[*self._digests]}"
        images = {token for token in request.prompt_ids if token >= FIRST_IMAGE_ID}
        if images and self._images is None:
            return "its prompt has images, and the engine got no folder of images"
        if self._images is not None and (
            missing := [i for i in images if i not in ImageFolder(self._images)]
        ):
            return f"its prompt has the image {missing[0]:08x}, which {self._images} lacks"
        if not all(0 <= token < self._config.vocab_size for token in {*request.prompt_ids} - images):
            return f"its prompt has token ids outside the vocabulary of {self._config.vocab_size}"
        if request.max_length > self._max_context:
            return f"it may have {request.max_length} tokens, over max_context = {self._max_context}"
        return ""
