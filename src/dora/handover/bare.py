"""Moves of an engine whose KV nobody else can read: tokens and log-probs change hands, and no KV.

Words and files are those of all moves. The source halts the request, waits for its last tokens and offers
what it has; the destination computes the KV of it again, with the same weights. A request that the source
keeps after all goes on there in the same way.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from dora.core.records import RequestId
from dora.engine.rows import Draft
from dora.engine.sequence import Request
from dora.handover.files import Handover, KVFormat, Snapshot, TransferError
from dora.handover.moves import Answer, Kept, NotReceived, Receive, Received, Reserved, Send, Sent

LEASE_OVER = "its lease is over"


class Holder(Protocol):
    """The engine that requests move from and to."""

    def form(self, version: int) -> KVFormat:
        """What requests of a version held are computed with."""

    def request(self, request_id: RequestId) -> Request | None:
        """An unfinished request that is here."""

    def reason_not_to_take(self, request: Request) -> str:
        """Why a request cannot come, or an empty string."""

    def take_up(self, request: Request, draft: Draft) -> None:
        """Go on with a request that is no other engine's any more."""

    def halted(self, request_id: RequestId) -> Draft | None:
        """What a request has, once nothing more comes of it here; to be asked until it is told."""

    def go_on(self, request_id: RequestId) -> None:
        """The request stays; it may have been halted."""

    def forget(self, request_id: RequestId) -> None:
        """The request is another engine's."""


@dataclass
class _Move:
    """One side of a move, which gives up at `until_s`, or as soon as there is a `reason`."""

    order: Receive | Send
    files: Handover
    until_s: float
    reason: str = ""
    is_offered: bool = False


class BareMover:
    """Moves in and out of one engine, its `holder`. Leases end by `clock`, which all engines share."""

    def __init__(self, holder: Holder, clock: Callable[[], float] = time.monotonic) -> None:
        self._holder, self._clock = holder, clock
        self._outgoing: dict[RequestId, _Move] = {}
        self._incoming: dict[RequestId, _Move] = {}
        self._answers: list[Answer] = []

    def __len__(self) -> int:
        """Moves under way, and those that have yet to be answered."""
        return len(self._outgoing) + len(self._incoming) + len(self._answers)

    @property
    def num_arriving(self) -> int:
        """Requests that a place is kept for."""
        return len(self._incoming)

    def num_arriving_of(self, version: int) -> int:
        """Those among them that are of this version."""
        orders = (move.order for move in self._incoming.values())
        return sum(isinstance(order, Receive) and order.request.version == version for order in orders)

    def receive(self, order: Receive) -> Reserved | NotReceived:
        """Keep a place for a request."""
        self.let_go()  # the request may come back
        request = order.request
        reason = "it is here already" if request.id in self._incoming else ""
        if reason := reason or self._holder.reason_not_to_take(request):
            return NotReceived(order.move, reason)
        self._incoming[request.id] = self._begin(order)
        return Reserved(order.move, 0, "")

    def send(self, order: Send) -> Kept | None:
        """Begin to hand a request over."""
        if self._holder.request(order.request) is None:
            return Kept(order.move, "it is not here")
        if order.request in self._outgoing:
            return Kept(order.move, "it is being moved already")
        self._outgoing[order.request] = self._begin(order)
        return None

    def cancel(self, move: int) -> None:
        """End a move at its next poll, unless the request is taken by then."""
        for under_way in (*self._outgoing.values(), *self._incoming.values()):
            if under_way.order.move == move:
                under_way.reason = "it was cancelled"

    def finished(self, request_id: RequestId) -> None:
        """A request has ended here before it was handed over."""
        if request_id in self._outgoing:
            self._outgoing[request_id].reason = "it has finished here first"

    def reclaim(self, request_id: RequestId) -> bool:
        """This engine wants to abort a request: whether it still belongs here, and nobody may take it."""
        move = self._outgoing.get(request_id)
        if move is not None:
            if move.is_offered and not move.files.keep():
                return False
            move.is_offered, move.reason = False, "it was aborted"
        return True

    def is_offered(self, request_id: RequestId) -> bool:
        """Whether another engine may have taken it by now."""
        return request_id in self._outgoing and self._outgoing[request_id].is_offered

    def let_go(self) -> None:
        """Forget what was taken: the driver may know of it before this engine's next poll."""
        for request_id, move in list(self._outgoing.items()):
            if move.is_offered and move.files.is_taken:
                self._sent(request_id, move)

    def poll(self) -> list[Answer]:
        """Take every move a step further; what is to be answered."""
        for request_id, move in list(self._outgoing.items()):
            self._poll_outgoing(request_id, move)
        for request_id, move in list(self._incoming.items()):
            self._poll_incoming(request_id, move)
        answers, self._answers = self._answers, []
        return answers

    def _begin(self, order: Receive | Send) -> _Move:
        return _Move(order, Handover(order.folder, order.move), self._clock() + order.lease_s)

    def _poll_outgoing(self, request_id: RequestId, move: _Move) -> None:
        if move.is_offered and move.files.is_taken:
            self._sent(request_id, move)
        elif reason := self._reason_to_end(move):
            if move.is_offered and not move.files.keep():
                self._sent(request_id, move)
            else:
                self._keep(request_id, move, reason)
        elif not move.is_offered and (draft := self._holder.halted(request_id)) is not None:
            try:
                self._offer(request_id, move, draft)
            except OSError as error:
                self._keep(request_id, move, f"its snapshot cannot be written: {error}")

    def _offer(self, request_id: RequestId, move: _Move, draft: Draft) -> None:
        request = self._holder.request(request_id)
        assert request is not None
        snapshot = Snapshot(
            format=self._holder.form(request.version).without_kv(),
            request=request,
            draft=draft,
            num_computed=len(request.prompt_ids) + len(draft.token_ids) - 1,
            blocks=np.zeros(0, np.int64),
            sums=np.zeros(0, np.uint64),
            stopped_s=self._clock(),
        )
        move.files.offer(snapshot)
        move.is_offered = True

    def _poll_incoming(self, request_id: RequestId, move: _Move) -> None:
        assert isinstance(move.order, Receive)
        request = move.order.request
        reason = self._reason_to_end(move)
        try:
            if not reason and (snapshot := move.files.offered()) is not None:
                form = self._holder.form(request.version)
                snapshot.check(form.without_kv(), request)
                _check_drawn(snapshot.draft, request, form)
                reason = self._take(move, request, snapshot)
        except TransferError as error:
            reason = str(error)
        if reason:
            del self._incoming[request_id]
            self._answers.append(NotReceived(move.order.move, reason))

    def _take(self, move: _Move, request: Request, snapshot: Snapshot) -> str:
        """Why the request cannot be had, or an empty string: then it goes on here."""
        if not move.files.take():
            return "the source has kept it"
        del self._incoming[request.id]
        self._holder.take_up(request, snapshot.draft)
        num_tokens, stop_s = len(snapshot.draft.token_ids), self._clock() - snapshot.stopped_s
        self._answers.append(
            Received(move.order.move, request.id, num_tokens, 0, 0.0, stop_s, snapshot.num_computed)
        )
        return ""

    def _sent(self, request_id: RequestId, move: _Move) -> None:
        del self._outgoing[request_id]
        self._holder.forget(request_id)
        self._answers.append(Sent(move.order.move))

    def _keep(self, request_id: RequestId, move: _Move, reason: str) -> None:
        del self._outgoing[request_id]
        self._holder.go_on(request_id)
        self._answers.append(Kept(move.order.move, reason))

    def _reason_to_end(self, move: _Move) -> str:
        return move.reason or (LEASE_OVER if self._clock() > move.until_s else "")


def _check_drawn(draft: Draft, request: Request, form: KVFormat) -> None:
    """Raises TransferError if tokens were drawn from other weights than those that go on with them (C1)."""
    drawn_from = {(chunk.version, chunk.digest) for chunk in draft.chunks}
    if not drawn_from <= {(request.version, form.weight_digest)}:
        raise TransferError(f"its tokens were drawn from {sorted(drawn_from)}")
