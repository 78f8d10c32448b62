"""What the engines of a simulated world do with their orders.

A row ends when it has gained its tokens; whatever changes its pace plans its end anew.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dora.core.actions import Abort, Dismiss, Drop, Generate, Load, Pause, Resume, Rush
from dora.core.events import (
    EngineLeft,
    Event,
    Loaded,
    LoadFailed,
    Paused,
    Progressed,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
)
from dora.core.records import Chunk, RequestId
from dora.sim.engines import Row, SimEngine
from dora.sim.models import Lengths

if TYPE_CHECKING:
    from dora.sim.world import World


def digest_of(version: int) -> str:
    """What stands for the digest of a version's bytes in simulated runs."""
    return f"sim-{version:08x}"


class Rollout:
    """Carries out the orders to engines."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._lengths = Lengths(world.config, world.rng)
        self._orders: dict[type, Callable[[SimEngine, Any], None]] = {
            Generate: self._generate,
            Abort: self._abort,
            Rush: self._rush,
            Pause: self._pause,
            Resume: self._resume,
            Dismiss: self._dismiss,
            Load: self._load,
            Drop: self._drop,
        }

    def carry_out(self, order: Any) -> None:
        """Orders that no engine is meant to obey come to nothing, and so do orders to a dead one."""
        obey = self._orders.get(type(order))
        if obey is not None:
            engine = self._world.truth.engines.get(order.engine)
            if engine is not None and not engine.is_lost:
                obey(engine, order)

    def pace(self, row: Row) -> None:
        """What a row gains from now on, and when it ends."""
        if row.is_over:
            return
        world, engine = self._world, row.engine
        row.settle(world.now)
        row.rate = rate = engine.rate_of(row)
        row.ticket += 1
        if rate:
            left_s = (row.length - row.done) / rate
            world.at(max(left_s, row.told_from - world.now), self._finish, row, row.ticket)
            if engine.is_colocated and world.truth.is_training:
                world.truth.check_device()

    def start_reports(self, engine: SimEngine) -> None:
        """An engine with requests reports on them."""
        if not engine.is_reporting:
            engine.is_reporting = True
            self._world.at(self._world.config.report_s, self._report, engine)

    def _generate(self, engine: SimEngine, order: Generate) -> None:
        world = self._world
        for request in order.requests:
            version = self._version(engine, request, order.version)
            row = Row(request, version, self._lengths.of(request), engine, world.now)
            world.truth.seat(row, engine)
            if world.luck.fails(world.config.share_refused):
                row.is_refused = True
                in_vain_s = row.length / engine.speed * world.rng.choice((0.0, 0.5, 1.0))
                world.at(world.luck.takes(0.001 + in_vain_s), self._refuse, row)
            else:
                self.pace(row)
        self.start_reports(engine)

    def _version(self, engine: SimEngine, request: RequestId, version: int) -> int:
        """What a request is truly decoded with."""
        if not self._world.config.limits.breaks_c1 or request.is_held_out:
            return version
        return max(version, *engine.held)

    def _finish(self, row: Row, ticket: int) -> Event | None:
        if row.ticket != ticket or row.is_over:
            return None
        self._vacate(row)
        chunks = tuple(Chunk(version, digest_of(version), num) for version, num in row.chunks())
        return RequestFinished(row.engine.id, row.request, row.version, row.length, chunks, "stop")

    def _refuse(self, row: Row) -> Event | None:
        if row.is_over:
            return None
        if self._world.now < row.told_from:
            self._world.at(row.told_from - self._world.now, self._refuse, row)
            return None
        self._vacate(row)
        return RequestFailed(row.engine.id, row.request, "refused by the simulated engine")

    def _vacate(self, row: Row, reason: str = "it ended first") -> None:
        """The row is free; a move that was under way has failed."""
        move = row.move
        self._world.truth.unseat(row)
        if move is not None:
            self._world.moves.fail(move, reason, self._world.luck.takes(0.001))

    def _abort(self, engine: SimEngine, order: Abort) -> None:
        world = self._world
        delay_s = world.luck.takes(max(0.005, 2 * world.config.stop_s))  # often too late for a move
        world.at(delay_s, self._give_up, engine, order.requests)

    def _give_up(self, engine: SimEngine, requests: tuple[RequestId, ...]) -> Event | None:
        """Those that ended or were taken by another engine meanwhile are not among them."""
        if engine.is_lost:
            return None
        rows = [row for request in requests if (row := engine.rows.get(request)) is not None]
        rows = [row for row in rows if row.told_from <= self._world.now]
        for row in rows:
            row.settle(self._world.now)
            self._vacate(row, "it was given up")
        given_up = tuple(row.request for row in rows)
        return RequestsAborted(engine.id, given_up, sum(int(row.done) for row in rows))

    def _rush(self, engine: SimEngine, order: Rush) -> None:
        engine.rushed = frozenset(order.requests)
        self._pace_all(engine)

    def _pause(self, engine: SimEngine, order: Pause) -> None:
        engine.is_pausing = True
        self._world.at(self._world.luck.takes(self._world.config.pause_s), self._paused, engine)

    def _paused(self, engine: SimEngine) -> Event | None:
        if engine.is_lost:
            return None
        engine.is_pausing = False
        engine.is_paused = not engine.is_resuming
        engine.is_resuming = False
        self._pace_all(engine)
        return Paused(engine.id)

    def _resume(self, engine: SimEngine, order: Resume) -> None:
        if engine.is_pausing:
            engine.is_resuming = True
            return
        engine.is_paused = False
        self._pace_all(engine)

    def _pace_all(self, engine: SimEngine) -> None:
        for row in engine.rows.values():
            self.pace(row)

    def _dismiss(self, engine: SimEngine, order: Dismiss) -> None:
        self._world.truth.check_dismissal(engine)
        engine.is_leaving = True
        self._world.at(self._world.luck.takes(0.01), self._leave, engine)

    def _leave(self, engine: SimEngine) -> Event:
        engine.is_lost = True
        del self._world.truth.engines[engine.id]
        return EngineLeft(engine.id)

    def _load(self, engine: SimEngine, order: Load) -> None:
        world = self._world
        world.truth.check_load(engine)
        engine.loading = order.version
        load_s = world.luck.takes(world.config.load_s, world.config.faults.share_loads_slow)
        world.at(load_s, self._loaded, engine, order.version)

    def _loaded(self, engine: SimEngine, version: int) -> Event | None:
        if engine.is_lost:
            return None
        engine.loading = None
        if self._world.luck.fails(self._world.config.faults.share_loads_failed):
            return LoadFailed(engine.id, version, "simulated load failure")
        engine.held.add(version)
        for row in engine.rows.values():
            if (newer := self._version(engine, row.request, row.version)) > row.version:
                row.renew(newer, self._world.now)
                self.pace(row)
        return Loaded(engine.id, version, digest_of(version))

    def _drop(self, engine: SimEngine, order: Drop) -> None:
        self._world.truth.check_drop(engine, order.version)
        engine.held.discard(order.version)

    def _report(self, engine: SimEngine) -> Event | None:
        """Lengths of all rows; one that was taken since the last report is named a last time."""
        if engine.is_lost or not engine.rows:
            engine.is_reporting = False
            return None
        world = self._world
        world.at(world.config.report_s, self._report, engine)
        for row in engine.rows.values():
            row.settle(world.now)
        rows = [row for row in engine.rows.values() if row.told_from <= world.now]
        lengths = [(row.request, int(row.done)) for row in rows]
        lengths += [(r, n) for r, n in engine.departed.items() if r not in engine.rows]
        engine.departed.clear()
        room = engine.num_rows * world.config.kv_row_tokens
        kv_share = min(1.0, sum(int(row.done) for row in rows) / room) if room else 0.0
        rate = max((row.rate for row in rows), default=0.0)
        return Progressed(engine.id, tuple(lengths), rate, kv_share)
