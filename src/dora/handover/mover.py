"""The moves of one engine: reserves, streams, hands over and gives up, one poll at a time.

Orders and answers are those of `moves`; each side answers each order of a move once, and a
request belongs to exactly one engine throughout (see `handover`).
"""

from __future__ import annotations

from collections.abc import Callable

from dora.core.records import RequestId
from dora.engine.rows import Rows
from dora.engine.scheduler import Scheduler
from dora.engine.sequence import Sequence
from dora.handover.files import KVFormat, TransferError
from dora.handover.moves import Answer, Kept, NotReceived, Receive, Received, Reserved, Send, Sent
from dora.handover.pool import Blocks, block_bytes
from dora.handover.transfer import Incoming, Outgoing
from dora.handover.ways import Ways

_LEASE_OVER = "its lease is over"


class Mover:
    """Moves in and out of one engine, whose scheduler, rows and KV it works on.

    `form` says what KV of a version held looks like, `seat` makes a row ready to decode, and `compute`
    the KV of what a row has, but for so many tokens that have it. Leases end by `clock`. Other engines
    are reached by `ways`.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        rows: Rows,
        kv: Blocks,
        form: Callable[[int], KVFormat],
        seat: Callable[[Sequence], None],
        compute: Callable[[Sequence, int], None],
        clock: Callable[[], float],
        ways: Ways,
    ) -> None:
        self._scheduler, self._rows, self._form, self._seat = scheduler, rows, form, seat
        self._compute, self._clock = compute, clock
        self._kv, self._ways = kv, ways
        self._outgoing: dict[int, Outgoing] = {}
        self._incoming: dict[int, Incoming] = {}
        self._answers: list[Answer] = []

    def __len__(self) -> int:
        """Moves under way, and those that have yet to be answered."""
        return len(self._outgoing) + len(self._incoming) + len(self._answers)

    def receive(self, order: Receive) -> Reserved | NotReceived:
        """Reserve a row and its first blocks for a request that could run here."""
        try:
            pool = order.source_pool
            peer = None if pool is None else self._ways.peer(pool, block_bytes(self._kv))
        except (OSError, ValueError) as error:
            return NotReceived(order.move, f"the source's KV cannot be read: {error}")
        place = self._scheduler.reserve(order.request)
        if place is None:
            return NotReceived(order.move, "no row or too few KV blocks are free")
        num_known, name = place
        sequence = self._scheduler.arriving[order.request.id]
        try:
            files = self._ways.meet(order.folder, order.move)
            self._incoming[order.move] = Incoming(
                order, files, sequence, num_known, self._scheduler.extend, self._kv, peer, self._clock()
            )
        except OSError as error:
            self._scheduler.remove(order.request.id)
            return NotReceived(order.move, f"the move's files cannot be written: {error}")
        return Reserved(order.move, num_known, name)

    def send(self, order: Send) -> Kept | None:
        """Begin to hand a request over; it goes on decoding."""
        reason = self._reason_not_to_send(order)
        if not reason:
            try:
                files = self._ways.meet(order.folder, order.move)
                self._outgoing[order.move] = Outgoing(order, files, self._kv, self._clock())
            except OSError as error:
                reason = f"the move's files cannot be read: {error}"
        return Kept(order.move, reason) if reason else None

    def cancel(self, move: int) -> None:
        """End a move at its next poll, unless the request is taken by then."""
        for under_way in (self._outgoing.get(move), self._incoming.get(move)):
            if under_way is not None:
                under_way.reason = "it was cancelled"

    def finished(self, request_id: RequestId) -> None:
        """A request has ended here before it was handed over."""
        for move in self._outgoing_of(request_id):
            move.reason = "it has finished here first"

    def swapped_out(self, request_id: RequestId) -> None:
        """A request has given up the blocks that the destination was copying."""
        for move in self._outgoing_of(request_id):
            move.reason = "it was swapped out for want of KV blocks"

    def reclaim(self, request_id: RequestId) -> bool:
        """This engine wants to abort a request: whether it still belongs here, and nobody may take it."""
        for move in self._outgoing_of(request_id):
            if move.is_offered and not move.files.keep():
                return False
            move.is_offered, move.reason = False, "it was aborted"
        return True

    def is_offered(self, request_id: RequestId) -> bool:
        """Whether another engine may have taken it by now."""
        return any(move.is_offered for move in self._outgoing_of(request_id))

    def let_go(self) -> None:
        """Free what was taken: the driver may know of it before this engine's next poll."""
        for move in list(self._outgoing.values()):
            if move.is_offered and move.files.is_taken:
                self._conclude_sent(move)

    def poll(self) -> list[Answer]:
        """Take every move a step further; what is to be answered. Other rows may decode than before."""
        for outgoing in list(self._outgoing.values()):
            self._poll_outgoing(outgoing)
        for incoming in list(self._incoming.values()):
            self._poll_incoming(incoming)
        answers, self._answers = self._answers, []
        return answers

    def check(self) -> None:
        """Every place reserved belongs to a move."""
        expected = {move.order.request.id for move in self._incoming.values()}
        assert self._scheduler.arriving.keys() == expected, f"arriving: {self._scheduler.arriving}"

    def _poll_outgoing(self, move: Outgoing) -> None:
        """One step of a move out."""
        request_id = move.order.request
        if move.is_offered and move.files.is_taken:
            self._conclude_sent(move)
            return
        reason = self._reason_to_end(move)
        if reason:
            if move.is_offered and not move.files.keep():
                self._conclude_sent(move)
            else:
                self._conclude_kept(move, reason)
            return
        sequence = self._scheduler.running.get(request_id)
        if move.is_offered or sequence is None:  # one without a row has nothing to hand over yet
            return
        is_streamed = move.stream(sequence, self._rows.num_computed(sequence))
        if not is_streamed or request_id in self._scheduler.still:  # it goes once it writes on
            return
        try:
            draft = self._rows.draft(sequence)
            move.offer(sequence, self._form(sequence.request.version), draft, self._clock())
        except OSError as error:
            self._conclude_kept(move, f"its snapshot cannot be written: {error}")
            return
        self._scheduler.frozen.add(request_id)

    def _poll_incoming(self, move: Incoming) -> None:
        """One step of a move in."""
        request = move.order.request
        reason = self._reason_to_end(move)
        if reason:
            self._give_up(move, reason)
            return
        try:
            move.copy_published()
            snapshot = move.files.offered()
            if snapshot is None:
                return
            move.finish(snapshot, self._form(request.version))
        except TransferError as error:
            self._give_up(move, str(error))
            return
        if not move.files.take():
            self._give_up(move, "the source has kept it")
            return
        sequence = self._scheduler.settle(request.id)
        self._seat(sequence)
        self._rows.resume(sequence, snapshot.draft)
        del self._incoming[move.order.move]
        num_prefilled = 0
        if move.is_bare:
            self._compute(sequence, move.num_known_tokens)
            num_prefilled = snapshot.num_computed - move.num_known_tokens
        num_tokens, stop_s = len(snapshot.draft.token_ids), max(0.0, self._clock() - snapshot.stopped_s)
        cost = move.num_bytes, move.copy_s, stop_s, num_prefilled
        self._answers.append(Received(move.order.move, request.id, num_tokens, *cost))

    def _reason_to_end(self, move: Outgoing | Incoming) -> str:
        return move.reason or (_LEASE_OVER if move.lease.is_over(move.num_copied, self._clock()) else "")

    def _conclude_sent(self, move: Outgoing) -> None:
        self._scheduler.remove(move.order.request)
        del self._outgoing[move.order.move]
        self._answers.append(Sent(move.order.move))

    def _conclude_kept(self, move: Outgoing, reason: str) -> None:
        self._scheduler.frozen.discard(move.order.request)
        del self._outgoing[move.order.move]
        self._answers.append(Kept(move.order.move, reason))

    def _give_up(self, move: Incoming, reason: str) -> None:
        self._scheduler.remove(move.order.request.id)
        del self._incoming[move.order.move]
        self._answers.append(NotReceived(move.order.move, reason))

    def _outgoing_of(self, request_id: RequestId) -> list[Outgoing]:
        return [move for move in self._outgoing.values() if move.order.request == request_id]

    def _reason_not_to_send(self, order: Send) -> str:
        request = self._scheduler.request(order.request)
        if request is None:
            return "it is not here"
        if self._outgoing_of(order.request):
            return "it is being moved already"
        names, last = self._scheduler.prompt_hashes(request), order.num_known_blocks - 1
        if order.num_known_blocks and names[last : last + 1] != (order.known_hash,):
            return "the destination knows another prompt, or other weights"
        return ""
