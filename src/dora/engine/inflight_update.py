"""An engine whose running requests continue with each newer version, as in most asynchronous trainers.

The output of such a request has chunks of several versions, and its log-probs are those of the weights that
sampled each token. Held-out requests keep their version.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Any

import numpy as np

from dora.core.types import RequestId
from dora.engine.block_manager import BLOCK_SIZE
from dora.engine.episodes import EpisodeEngine
from dora.engine.request import Completion, PromptKey, Request, Sequence
from dora.engine.scheduler import PrefillChunk, SchedulerOutput
from dora.model.config import ModelConfig


class InflightUpdateEngine(EpisodeEngine):
    """An engine that changes the version of requests when it loads one; `settings` are those of Engine.

    With `keeps_kv`, rows continue on the KV of older weights. Otherwise the KV of prompt and output is
    recomputed in the next step.
    """

    def __init__(self, config: ModelConfig, *, keeps_kv: bool, **settings: Any) -> None:
        super().__init__(config, **settings)
        self._keeps_kv = keeps_kv
        self._with_mixed_kv: set[RequestId] = set()  # their KV is of several versions
        self._without_kv: set[RequestId] = set()  # they are swapped out, with output and no KV
        self.num_recomputed = 0  # tokens whose KV was discarded and computed again

    def activate(self, version: int, digest: str) -> str:
        """See Engine; unfinished requests continue with the version."""
        super().activate(version, digest)
        self._clear_batch()
        for request in [r for r in self._scheduler.requests() if self._version_for(r) > r.version]:
            keeps_kv = self._keeps_kv and self._has_output(request.id)
            sequence = self._scheduler.change_version(replace(request, version=version), keeps_kv=keeps_kv)
            if keeps_kv:
                self._with_mixed_kv.add(request.id)
            elif sequence is not None:
                self._discard_kv(sequence)
        self._update_batch()
        return digest

    def submit(self, requests: Collection[Request]) -> None:
        """See Engine; requests of an older version start with the newest one."""
        super().submit([replace(request, version=self._version_for(request)) for request in requests])

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        lost = super().abort(ids)
        self._with_mixed_kv -= lost.keys()
        self._without_kv -= lost.keys()
        return lost

    def _collect(self, done: list[Sequence]) -> list[Completion]:
        self._with_mixed_kv -= {sequence.request.id for sequence in done}
        return super()._collect(done)

    def _version_for(self, request: Request) -> int:
        """The version that decodes a request from now on."""
        return request.version if request.id.is_held_out else max(request.version, *self._loaded)

    def _has_output(self, request_id: RequestId) -> bool:
        """Whether a request has a row and a token. Without a token, KV would pass for the new weights'."""
        sequence = self._scheduler.running.get(request_id)
        return sequence is not None and self._batch.num_output_tokens(sequence) > 0

    def _clear_batch(self) -> None:
        """Decode no row, so that the runner discards a step in flight, which uses the old weights."""
        no_rows = np.zeros(0, np.int64)
        self._decoding = []
        self._batch.set_active([])
        self._runner.set_batch(no_rows, no_rows)

    def _discard_kv(self, sequence: Sequence) -> None:
        self._kv_cache.discard_kv(sequence)
        self._without_kv.add(sequence.request.id)
        self._with_mixed_kv.discard(sequence.request.id)

    def _schedule(self) -> SchedulerOutput:
        """See Engine; KV is recomputed before other prefills, which may share the prompt."""
        scheduled = super()._schedule()
        for sequence in scheduled.swapped_out:
            # Back in its row, mixed KV of a prompt would be registered for the newest version.
            if sequence.request.id in self._with_mixed_kv:
                self._discard_kv(sequence)
        back = [(s, num_cached) for s, num_cached in scheduled.swapped_in if s.request.id in self._without_kv]
        self._without_kv -= {sequence.request.id for sequence, _ in back}
        scheduled.prefills[:0] = [self._recompute(sequence, num_cached) for sequence, num_cached in back]
        return scheduled

    def _recompute(self, sequence: Sequence, num_cached: int) -> PrefillChunk:
        """The prompt and output of a sequence, except its first `num_cached` blocks."""
        request, stop = sequence.request, self._batch.num_computed_tokens(sequence)
        tokens = (*request.prompt_ids, *self._batch.partial_output(sequence).token_ids.tolist())
        start = num_cached * BLOCK_SIZE
        self.num_recomputed += stop - start
        key = PromptKey(request.group, request.version, tokens)
        return PrefillChunk(key, sequence.block_table, start, stop)
