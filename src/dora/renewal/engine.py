"""An engine whose answers go on with each newer version that it takes, as most asynchronous trainers have it.

Such an answer has segments, and its log-probs are those of the weights that drew each token. What is held out
keeps its version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from dora.core.records import RequestId
from dora.engine.blocks import BLOCK_SIZE
from dora.engine.plan import Plan, Prefill
from dora.engine.sequence import Completion, PromptKey, Request
from dora.engine.sequence import Sequence as Seated
from dora.model.config import ModelConfig
from dora.renewal.places import RenewingScheduler, RenewingSeats
from dora.turns.engine import TurnTakingEngine


class RenewingEngine(TurnTakingEngine):
    """See Engine for `settings`. If it `keeps_kv`, rows go on with what older weights have computed; else the
    KV of prompt and answer so far is computed again, in the next step.
    """

    def __init__(self, config: ModelConfig, *, max_rows: int, keeps_kv: bool, **settings: Any) -> None:
        super().__init__(config, max_rows=max_rows, **settings)
        work, num_ahead = self._workspace, self._runner.num_ahead
        self._scheduler = self._places = RenewingScheduler(max_rows, self._num_blocks, self._prefill_budget)
        self._seats = self._drafts = RenewingSeats(self._rows, work.tables, work.kv, num_ahead)
        self._keeps_kv = keeps_kv
        self._mixed: set[RequestId] = set()  # whose KV is of several versions
        self._bare: set[RequestId] = set()  # swapped out, and without KV
        self.num_recomputed = 0  # tokens of which KV was thrown away and computed again

    def hold(self, version: int, digest: str) -> str:
        """See Engine; what is under way goes on with it."""
        super().hold(version, digest)
        self._disarrange()
        for request in [r for r in self._scheduler.requests() if self._version_for(r) > r.version]:
            keeps_kv = self._keeps_kv and self._has_drawn(request.id)
            sequence = self._places.renew(replace(request, version=version), keeps_kv=keeps_kv)
            if keeps_kv:
                self._mixed.add(request.id)
            elif sequence is not None:
                self._lose_kv(sequence)
        self._arrange()
        return digest

    def submit(self, requests: Sequence[Request]) -> None:
        """See Engine; what was sent before its version became old begins with the newest."""
        super().submit([replace(request, version=self._version_for(request)) for request in requests])

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """See Engine."""
        thrown_away = super().abort(ids)
        self._mixed -= thrown_away.keys()
        self._bare -= thrown_away.keys()
        return thrown_away

    def _collect(self, done: list[Seated]) -> list[Completion]:
        """See Engine."""
        self._mixed -= {sequence.request.id for sequence in done}
        return super()._collect(done)

    def _version_for(self, request: Request) -> int:
        """What a request is decoded with from now on."""
        return request.version if request.id.is_held_out else max(request.version, *self._held)

    def _has_drawn(self, request_id: RequestId) -> bool:
        """Whether it is a row with a token; else KV of old weights would look like that of the new."""
        sequence = self._scheduler.running.get(request_id)
        return sequence is not None and self._rows.num_tokens(sequence) > 0

    def _disarrange(self) -> None:
        """No row decodes, and a step that has been begun with other weights is void."""
        nobody = np.zeros(0, np.int64)
        self._order = []
        self._rows.arrange([])
        self._runner.arrange(nobody, nobody)

    def _lose_kv(self, sequence: Seated) -> None:
        self._drafts.lose_kv(sequence)
        self._bare.add(sequence.request.id)
        self._mixed.discard(sequence.request.id)

    def _schedule(self) -> Plan:
        """See Engine; who comes back without KV has it computed before others, who may share the prompt."""
        plan = super()._schedule()
        for sequence in plan.swapped_out:  # its prompt must not pass for the newest version's
            if sequence.request.id in self._mixed:
                self._lose_kv(sequence)
        back = [(s, num_known) for s, num_known in plan.swapped_in if s.request.id in self._bare]
        self._bare -= {sequence.request.id for sequence, _ in back}
        plan.prefills[:0] = [self._again(sequence, num_known) for sequence, num_known in back]
        return plan

    def _again(self, sequence: Seated, num_known: int) -> Prefill:
        """All that a row has drawn so far and its prompt, but for the blocks that another has computed."""
        request, stop = sequence.request, self._rows.num_computed(sequence)
        tokens = (*request.prompt_ids, *self._rows.draft(sequence).token_ids.tolist())
        self.num_recomputed += stop - num_known * BLOCK_SIZE
        key = PromptKey(request.group, request.version, tokens)
        return Prefill(key, sequence.blocks, num_known * BLOCK_SIZE, stop)
