"""An engine whose running requests can move to others that hold the same version, with their KV.

It is an engine that owns a Mover, and tells it what happens to the requests under way.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from dora.core.records import RequestId
from dora.engine.plan import Plan
from dora.engine.runner import Prompt
from dora.engine.sequence import Completion
from dora.engine.sequence import Sequence as Seated
from dora.engine.workspace import DTYPES
from dora.handover.files import FORMAT, KVFormat
from dora.handover.mover import Mover
from dora.handover.moves import Answer, Kept, NotReceived, Receive, Reserved, Send
from dora.handover.pool import as_blocks, make_pool
from dora.handover.ways import Ways
from dora.model.config import ModelConfig
from dora.turns.engine import TurnTakingEngine


class MovingEngine(TurnTakingEngine):
    """An engine, on the CPU, that hands requests over and takes them; see there for `settings`.

    Its KV lies in the file `pool`, where other engines can read it; it reaches them by `ways`. Leases of
    moves end by `clock`, which all engines of a machine share.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        pool: Path,
        clock: Callable[[], float] = time.monotonic,
        ways: Ways | None = None,
        dtype: str = "float32",
        **settings: Any,
    ) -> None:
        def memory(shape: tuple[int, ...]) -> Tensor:
            kind = DTYPES[dtype]
            return torch.from_numpy(make_pool(pool, math.prod(shape) * kind.itemsize)).view(kind).view(shape)

        super().__init__(config, kv_memory=memory, dtype=dtype, **settings)
        self._dtype, own = dtype, self._workspace.kv
        self.blocks = as_blocks(own.flatten().view(torch.uint8).numpy(), len(own))
        how = self._form, self._seats.seat, self._compute_again
        self._mover = Mover(self._scheduler, self._rows, self.blocks, *how, clock, ways or Ways())

    @property
    def num_moves(self) -> int:
        """Moves under way, out and in."""
        return len(self._mover)

    def receive(self, order: Receive) -> Reserved | NotReceived:
        """Reserve a place for a request that another engine is decoding; `poll_moves` fetches it."""
        self._mover.let_go()  # the request may come back
        reason = self._reason_to_refuse(order.request)
        return NotReceived(order.move, reason) if reason else self._mover.receive(order)

    def send(self, order: Send) -> Kept | None:
        """Begin to hand a request over, by `poll_moves`; it decodes on. Kept says why that cannot be."""
        return self._mover.send(order)

    def cancel_move(self, move: int) -> None:
        """End a move, at the next poll, if its request has not been taken by then; it is answered there."""
        self._mover.cancel(move)

    def poll_moves(self) -> list[Answer]:
        """Take all moves a step further; what is to be answered. To be called between steps."""
        answers = self._mover.poll()
        self._arrange()
        return answers

    def drop(self, version: int) -> None:
        """See Engine; requests of the version that arrive are unfinished ones."""
        self._mover.let_go()
        super().drop(version)

    def abort(self, ids: Iterable[RequestId]) -> dict[RequestId, int]:
        """See Engine; requests that another engine has taken are ignored too."""
        own = [i for i in ids if self._scheduler.request(i) is not None and self._mover.reclaim(i)]
        return super().abort(own)

    def progress(self) -> dict[RequestId, int]:
        """See Engine; requests that another engine may have taken are left out."""
        return {i: num for i, num in super().progress().items() if not self._mover.is_offered(i)}

    def check(self) -> None:
        """See Engine; moves under way included."""
        super().check()
        self._mover.check()

    def _schedule(self) -> Plan:
        plan = super()._schedule()
        for sequence in plan.swapped_out:
            self._mover.swapped_out(sequence.request.id)
        return plan

    def _collect(self, done: list[Seated]) -> list[Completion]:
        completions = super()._collect(done)
        for completion in completions:
            self._mover.finished(completion.id)
        return completions

    def _compute_again(self, sequence: Seated, num_known: int) -> None:
        """Compute the KV of all that a row has, but for its first `num_known` tokens and its next input."""
        request, stop = sequence.request, self._rows.num_computed(sequence)
        tokens = (*request.prompt_ids, *self._rows.draft(sequence).token_ids.tolist())[:stop]
        slot = self._held[request.version].slot
        self._runner.prefill(slot, [Prompt(tokens, num_known, sequence.blocks)])

    def _form(self, version: int) -> KVFormat:
        """What KV of a version held looks like here."""
        shape = tuple(self._workspace.kv.shape[1:])
        return KVFormat(FORMAT, self._model_digest, self._held[version].digest, self._dtype, shape)
