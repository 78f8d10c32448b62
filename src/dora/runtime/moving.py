"""The moves under way: which side has answered, and what the core is told of each, exactly once.

The two engines settle by one atomic rename who owns the request; the driver carries words between
them. Once neither has anything left to say, the name of the file says how the move has ended.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from dora.core.actions import Migrate
from dora.core.events import Event, Migrated, MigrationFailed, RequestFailed, RequestFinished
from dora.core.records import RequestId
from dora.engine.sequence import Request
from dora.handover.files import Handover
from dora.runtime import messages as m

Word = m.Reserved | m.Received | m.NotReceived | m.Sent | m.Kept


@dataclass
class Move:
    """One move. A side is open from its first order to its last word, or to its death."""

    id: int
    order: Migrate
    carries_kv: bool
    is_destination_open: bool = True
    is_source_open: bool = False
    received: m.Received | None = None
    reason: str = ""  # why it was given up: the first one given
    held: list[Event] = field(default_factory=list)  # to be told after how the move ended

    @property
    def is_over(self) -> bool:
        return not (self.is_source_open or self.is_destination_open)

    def concerns(self, engine: int) -> bool:
        return engine in (self.order.source, self.order.destination)


class Moves:
    """Carries `Migrate` orders out; `folder` is where the engines meet."""

    def __init__(
        self,
        folder: Path,
        lease_s: float,
        facts: deque[Event],
        send: Callable[[int, object], bool],
        length: Callable[[RequestId], int],
    ) -> None:
        """`facts` gets what came of moves. `send(engine, message)` is False where the engine is gone.

        A side on which nothing is copied for `lease_s` gives up.
        `length` is what an answer was last known to have, in tokens.
        """
        self._folder, self._lease_s, self._facts = folder, lease_s, facts
        self._send, self._length = send, length
        self._count = 0
        self.under_way: dict[int, Move] = {}

    def begin(self, order: Migrate, request: Request, source_pool: Any) -> None:
        """Ask the destination for a place; without a `source_pool` that it can read, no KV moves.

        Without a destination the move has failed.
        """
        move = Move(self._count, order, carries_kv=source_pool is not None)
        self._count += 1
        ask = m.Receive(move.id, request, source_pool, self._folder, self._lease_s)
        if not self._send(order.destination, ask):
            self.refuse(order)
            return
        self.under_way[move.id] = move

    def refuse(self, order: Migrate) -> None:
        """An engine of the move is lost, so that it has failed."""
        # Before all that waits to be told, for the loss of that engine may be among it.
        self._facts.appendleft(_failed(order, "an engine is lost"))

    def heard(self, word: Word) -> None:
        """One side has answered; a late word about a move that is over changes nothing."""
        move = self.under_way.get(word.move)
        if move is None:
            return
        match word:
            case m.Reserved():
                self._reserved(move, word)
            case m.Received():
                move.is_destination_open, move.received = False, word
            case m.NotReceived(_, reason):
                move.is_destination_open = False
                self._give_up(move, reason)
            case m.Sent():
                move.is_source_open = False
            case m.Kept(_, reason):
                move.is_source_open = False
                self._give_up(move, reason)
        self._close(move)

    def lost(self, engine: int) -> None:
        """The process of `engine` has ended: it says no more, and the other side is asked to end."""
        for move in [move for move in self.under_way.values() if move.concerns(engine)]:
            if engine == move.order.destination:
                move.is_destination_open = False
            else:
                move.is_source_open = False
            self._give_up(move, f"engine {engine} is lost")
            self._close(move)

    def tell(self, fact: Event) -> None:
        """Tell what an engine says; of a request that it took, after the core knows of the move.

        It knows once the source has let go, so that what it orders finds the source's row free.
        """
        if isinstance(fact, RequestFinished | RequestFailed):
            for move in self.under_way.values():
                if (move.order.request, move.order.destination) == (fact.request, fact.engine):
                    move.held.append(fact)
                    return
        self._facts.append(fact)

    def is_unsettled(self, engine: int) -> bool:
        """Whether the core has yet to hear of a move from or to `engine`."""
        return any(move.concerns(engine) for move in self.under_way.values())

    def _reserved(self, move: Move, word: m.Reserved) -> None:
        if move.reason:
            return
        order = move.order
        known = word.num_known_blocks, word.known_hash
        send = m.Send(move.id, order.request, self._folder, *known, self._lease_s, move.carries_kv)
        move.is_source_open = self._send(order.source, send)

    def _give_up(self, move: Move, reason: str) -> None:
        """The move ends on one side: the other one is told so, and answers."""
        move.reason = move.reason or reason
        if move.is_destination_open:
            self._send(move.order.destination, m.CancelMove(move.id))
        if move.is_source_open:
            self._send(move.order.source, m.CancelMove(move.id))

    def _close(self, move: Move) -> None:
        """Once nobody can rename the file any more, its name is how the move has ended."""
        if not move.is_over:
            return
        files = Handover(self._folder, move.id)
        self._facts.append(self._migrated(move) if files.is_taken else _failed(move.order, move.reason))
        self._facts.extend(move.held)
        del self.under_way[move.id]
        files.remove()

    def _migrated(self, move: Move) -> Migrated:
        order, word = move.order, move.received
        if word is None:  # the destination died before it could say more
            word = m.Received(move.id, order.request, self._length(order.request), 0, 0.0, 0.0)
        return Migrated(
            order.request,
            order.source,
            order.destination,
            word.num_tokens,
            word.num_bytes,
            word.copy_s,
            word.stop_s,
            word.num_prefilled,
        )


def _failed(order: Migrate, reason: str) -> MigrationFailed:
    return MigrationFailed(order.request, order.source, order.destination, reason)
