"""How running requests move between the engines of a simulated world.

Copied while the source goes on decoding, stopped, then taken by the destination or kept by the
source; whatever dies when, one engine owns the request, and the outcome of each move is told
once, before the loss of either engine.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from dora.core.actions import Migrate
from dora.core.events import Event, Migrated, MigrationFailed
from dora.sim.engines import Move, SimEngine, Stage, Violation

if TYPE_CHECKING:
    from dora.sim.world import World

KV_BYTES = 1024  # of one simulated token


class Moves:
    """Carries out `Migrate`."""

    def __init__(self, world: World) -> None:
        self._world = world

    def begin(self, order: Migrate) -> None:
        world, truth = self._world, self._world.truth
        source, destination = truth.engines.get(order.source), truth.engines.get(order.destination)
        if source is None or destination is None or source.is_lost or destination.is_lost:
            fact = MigrationFailed(order.request, order.source, order.destination, "an engine is dead")
            world.due.appendleft(fact)  # its loss may be the next fact of all
            return
        row = source.rows.get(order.request)
        if row is None:
            raise Violation(f"{order.request} is moved from engine {source.id}, where it is not")
        config, luck = world.config, world.luck
        copy_s = luck.takes(config.move_s, config.faults.share_moves_slow)
        is_doomed = luck.fails(config.faults.share_moves_failed)
        move = Move(row, source, destination, copy_s, luck.takes(config.stop_s), is_doomed)
        truth.reserve(move)
        row.move = move
        if is_doomed and luck.fails(0.5):
            world.at(copy_s, self._refuse, move)
        else:
            world.at(copy_s, self._stop, move)

    def fail(self, move: Move, reason: str, delay_s: float = 0.0) -> None:
        """The request stays, or has ended, where it is; that is told after `delay_s`."""
        self._end(move, Stage.FAILED, reason)
        self._world.rollout.pace(move.row)
        self._world.at(delay_s, self.tell, move)

    def tell(self, move: Move) -> Event | None:
        """The outcome, once."""
        if move.is_told:
            return None
        move.is_told = True
        row, source, destination = move.row, move.source, move.destination
        del source.moves[row.request], destination.moves[row.request]
        if move.stage is Stage.FAILED:
            return MigrationFailed(row.request, source.id, destination.id, move.reason)
        num_tokens = move.num_tokens
        num_bytes = num_tokens * KV_BYTES
        return Migrated(
            row.request, source.id, destination.id, num_tokens, num_bytes, move.copy_s, move.stop_s
        )

    def bury(self, engine: SimEngine) -> list[Event]:
        """The outcomes of all moves of an engine that is dead; none of them can succeed any more."""
        told = []
        for move in list(engine.moves.values()):
            if move.stage in (Stage.COPYING, Stage.STOPPED):
                self._end(move, Stage.FAILED, f"engine {engine.id} is dead")
                if move.source.is_lost:
                    self._world.truth.where.pop(move.row.request, None)
                else:
                    self._world.rollout.pace(move.row)
            fact = self.tell(move)
            assert fact is not None, "a move that was told is not in the list"
            told.append(fact)
        return told

    def _refuse(self, move: Move) -> None:
        if move.stage is Stage.COPYING and not move.destination.is_lost:
            self.fail(move, "the destination refused it")

    def _stop(self, move: Move) -> None:
        """All but the last of it is copied: the request stands still."""
        if move.stage is not Stage.COPYING or move.source.is_lost or move.destination.is_lost:
            return
        move.stage = Stage.STOPPED
        self._world.rollout.pace(move.row)
        self._world.at(move.stop_s, self._take, move)

    def _take(self, move: Move) -> None:
        """The destination owns it from now on, unless the source's lease is over."""
        if move.stage is not Stage.STOPPED or move.destination.is_lost:
            return
        world, row = self._world, move.row
        if move.is_doomed and not move.source.is_lost:
            return self.fail(move, "the lease was over", world.luck.takes(0.001))
        told_s = world.luck.takes(world.config.stop_s + world.config.move_s)  # much may happen meanwhile
        self._end(move, Stage.TAKEN, "")
        world.truth.unseat(row)
        world.truth.seat(row, move.destination)
        move.num_tokens = int(row.done)
        move.source.departed[row.request] = move.num_tokens
        row.told_from = world.now + told_s
        world.at(told_s, self.tell, move)
        world.rollout.start_reports(move.destination)
        world.rollout.pace(row)

    def _end(self, move: Move, stage: Stage, reason: str) -> None:
        move.stage, move.reason = stage, reason
        move.row.move = None
        del move.destination.arriving[move.row.request]
