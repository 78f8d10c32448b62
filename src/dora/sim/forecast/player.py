"""The stations of a run, played in virtual time for whoever decides: mostly the production orchestrator.

A heap of (time, tie-break, happening). Engines are `FluidEngine`s: each has at most one valid happening, the
next moment at which one of its rows comes to a stop.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Protocol

from dora.core import actions as order
from dora.core import events as fact
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.records import Chunk, GroupId
from dora.sim.forecast.bench import Bench, Contention, Trainer
from dora.sim.forecast.fluid import NEVER, FluidEngine, Row
from dora.sim.forecast.lengths import CHUNK, Answers
from dora.sim.forecast.manner import Manner
from dora.sim.forecast.outcome import Outcome, Step

Happening = Callable[..., Iterable[Event]]
Listener = Callable[[float, Event | Action], None]  # of every fact and order, with its time


class Mind(Protocol):
    """Who decides: `dora.core.Orchestrator`, or rules of another system behind the same door."""

    def start(self, now: float) -> list[Action]: ...
    def handle(self, event: Event, now: float) -> list[Action]: ...
    @property
    def done(self) -> bool: ...


class Deadlock(Exception):
    """The run is not done, and nothing is under way."""


class Group:
    """One that was admitted and is not trained yet."""

    __slots__ = ("cached", "tokens", "version", "work_s")

    def __init__(self, version: int) -> None:
        self.version = version
        self.work_s, self.tokens = 0.0, 0  # to train it
        self.cached: set[tuple[int, int]] = set()  # engine and version that its prompt has KV of


class Player:
    """Carries out orders and tells facts, until the mind is done."""

    def __init__(
        self,
        mind: Mind,
        engines: list[FluidEngine],
        trainer: Trainer,
        lengths: Answers,
        sizes: tuple[int, int],
        manner: Manner,
        listener: Listener | None = None,
    ) -> None:
        self.mind, self.trainer, self.lengths, self.manner = mind, trainer, lengths, manner
        self.engines = {engine.id: engine for engine in engines}
        self.batch_size, self.group_size = sizes
        self.outcome, self._listener = Outcome(), listener
        self.now = 0.0
        self._heap: list[tuple[float, int, Happening, tuple[Any, ...]]] = []
        self._num_planned = 0
        self._dirty: dict[int, None] = {}
        self._cursor = 0
        self._drawn: dict[int, list[list[int]]] = {}
        self._groups: dict[GroupId, Group] = {}
        self._net_s: dict[int, float] = {}  # engine -> when its last move is over
        self._bench = Bench(manner.least_early if manner.is_streamed else None)
        self._training: order.Train | None = None
        self._rest_epoch = 0  # of the bench's end that is planned
        self._began_s: dict[int, float] = {}
        self._carry_out: dict[type, Callable[[Any], None]] = {
            order.Fetch: self._fetch, order.Admit: self._admit, order.Generate: self._generate,
            order.Abort: self._abort, order.Migrate: self._migrate, order.Rush: self._rush,
            order.Pause: self._pause, order.Resume: self._resume, order.Score: self._score,
            order.Commit: self._commit, order.Train: self._train, order.Publish: self._publish,
            order.Load: self._load,
        }  # fmt: skip

    def play(self) -> Outcome:
        """Everything, to the end. Raises Deadlock where it cannot come."""
        for _ in self.steps():
            pass
        return self.outcome

    def steps(self) -> Iterator[int]:
        """Play on, and say so whenever one more training step is over."""
        self._obey(self.mind.start(0.0))
        for engine in self.engines.values():
            self._at(0.0, self._told, fact.EngineJoined(
                engine.id, engine.rows, self.manner.slots, engine.is_colocated
            ))  # fmt: skip
            self._at(self.manner.report_s * (1 + engine.id / len(self.engines)), self._report, engine)
        num_told, heap, mind, found = 0, self._heap, self.mind, self.outcome
        while not mind.done:
            if not heap:
                raise Deadlock("everyone waits, and no fact is under way")
            self.now, _, happen, args = heapq.heappop(heap)
            for event in happen(*args):
                found.num_events += 1
                if self._listener is not None:
                    self._listener(self.now, event)
                self._obey(mind.handle(event, self.now))
            if len(found.steps) > num_told:
                num_told += 1
                yield num_told
        for engine in self.engines.values():
            self.outcome.row_s += engine.row_s
            self.outcome.decoded_s += engine.decoded_s
            self.outcome.stalled_s += engine.stalled_s

    def _at(self, delay_s: float, happen: Happening, *args: Any) -> None:
        self._num_planned += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._num_planned, happen, args))

    def _told(self, event: Event) -> Iterable[Event]:
        return (event,)

    def _obey(self, orders: Iterable[Action]) -> None:
        for one in orders:
            if self._listener is not None:
                self._listener(self.now, one)
            carry_out = self._carry_out.get(type(one))
            if carry_out is not None:
                carry_out(one)
        self._plan()

    def _plan(self) -> None:
        """When engines that have changed come to their next stop, and the trainer to its end."""
        if self.manner.contention is not None:
            self._contend(self.manner.contention)
        if self._bench.epoch != self._rest_epoch:
            self._rest_epoch = self._bench.epoch
            self._at(max(0.0, self._bench.until_s - self.now), self._rest, self._rest_epoch)
        for number in self._dirty:
            engine = self.engines[number]
            engine.stop_s = engine.next_s()
            self._look_at(engine)
        self._dirty.clear()

    def _look_at(self, engine: FluidEngine) -> None:
        """When it stops, if not before: most stops are put off by what comes meanwhile."""
        if engine.stop_s < engine.look_s:
            engine.look_s = engine.stop_s
            self._num_planned += 1
            heapq.heappush(self._heap, (engine.stop_s, self._num_planned, self._stop, (engine,)))

    def _contend(self, both: Contention) -> None:
        """Each is as slow as the other's work makes it."""
        num = sum(engine.num_active > 0 and not engine.is_paused for engine in self.engines.values())
        self._bench.slow(self.now, 1 + both.train * num / len(self.engines))
        slowness = 1 + both.decode * self._bench.is_busy(self.now)
        for engine in self.engines.values():
            if engine.slowness != slowness:
                self._engine(engine.id).slow(slowness)

    def _engine(self, number: int) -> FluidEngine:
        """An engine that is about to change, as it is now."""
        engine = self.engines[number]
        engine.advance(self.now)
        self._dirty[number] = None
        return engine

    # dataset, rewarder

    def _fetch(self, it: order.Fetch) -> None:
        positions = list(range(self._cursor, self._cursor + it.count))
        if self.manner.guesses:
            positions.sort(key=lambda position: -max(self._answers(position)))
        groups = tuple(GroupId(0, position) for position in positions)
        self._at(0.0, self._told, fact.PromptsFetched(self._cursor, groups))
        self._cursor += it.count

    def _answers(self, position: int) -> list[int]:
        chunk, place = divmod(position, CHUNK)
        if chunk not in self._drawn:
            self._drawn[chunk] = self.lengths.draw(chunk, self.group_size, self.batch_size)
            for old in [c for c in self._drawn if c < chunk - 200]:
                del self._drawn[old]
        return self._drawn[chunk][place]

    def _admit(self, it: order.Admit) -> None:
        old = self._groups.get(it.group)
        new = self._groups[it.group] = Group(it.version)
        if old is not None:  # it was dropped, and begins again
            self.outcome.num_dropped += old.tokens
            new.cached = old.cached

    def _score(self, it: order.Score) -> None:
        rewards = tuple(float(k % 2) for k in range(self.group_size))
        self._at(self.manner.reward_s, self._told, fact.GroupScored(it.group, rewards))

    # engines

    def _generate(self, it: order.Generate) -> None:
        engine, prompt = self._engine(it.engine), self.lengths.prompt
        place = (it.engine, it.version)
        for request in it.requests:
            length = self._answers(request.row)[request.sibling]
            stop = -(-length // self.lengths.turns)
            cached = self._groups[request.group].cached
            if place not in cached:
                cached.add(place)
                engine.busy(engine.cost.prefill_s(prompt))
            row = Row(request, it.version, prompt, length, stop)
            row.began_s = self.now
            engine.take(row)

    def _stop(self, engine: FluidEngine) -> Iterable[Event]:
        """Rows have come to a stop, or the KV is full."""
        if self.now >= engine.look_s:
            engine.look_s = NEVER
        if self.now < engine.stop_s:
            self._look_at(engine)
            return ()
        engine.advance(self.now)
        self._dirty[engine.id] = None
        if (share := engine.kv_share) > self.outcome.kv_peak:
            self.outcome.kv_peak = share
        facts: list[Event] = []
        for row in engine.stopped():
            if row.done < row.length:
                self._at(self.lengths.delay_s, self._go_on, row)
            else:
                engine.give(row.request)
                finished = self._finish(engine, row)
                if self.manner.telling_s:
                    self._at(self.manner.telling_s, self._told, finished)
                else:
                    facts.append(finished)
        if took_s := engine.spill():
            engine.busy(took_s)
        if not facts:
            self._plan()
        return facts

    def _go_on(self, row: Row) -> Iterable[Event]:
        """The environment has answered: not before may the row be decoded, wherever it is by now."""
        row.stop = min(row.length, row.stop + -(-row.length // self.lengths.turns))
        for engine in self.engines.values():
            if engine.running.get(row.request) is row:
                self._engine(engine.id).go_on(row)
        self._plan()
        return ()

    def _finish(self, engine: FluidEngine, row: Row) -> Event:
        tokens = row.prompt + row.length
        if (group := self._groups.get(row.request.group)) is not None:
            group.work_s += self.trainer.work_s(tokens)
            group.tokens += tokens
        self.outcome.num_answers += 1
        self.outcome.answer_s += self.now - row.began_s
        chunk = Chunk(row.version, f"v{row.version}", row.length)
        return fact.RequestFinished(engine.id, row.request, row.version, row.length, (chunk,), "stop")

    def _abort(self, it: order.Abort) -> None:
        engine = self._engine(it.engine)
        rows = [engine.give(request) for request in it.requests if request in engine.running]
        num = sum(int(row.done) for row in rows)
        self.outcome.num_dropped += num
        if rows:
            told = fact.RequestsAborted(it.engine, tuple(row.request for row in rows), num)
            self._at(0.0, self._told, told)

    def _rush(self, it: order.Rush) -> None:
        self._engine(it.engine).rush(it.requests)

    def _pause(self, it: order.Pause) -> None:
        self._engine(it.engine).is_paused = True
        self._at(self.manner.switch_s, self._told, fact.Paused(it.engine))

    def _resume(self, it: order.Resume) -> None:
        engine = self._engine(it.engine)
        engine.is_paused = False
        engine.busy(self.manner.switch_s)

    def _load(self, it: order.Load) -> None:
        engine = self._engine(it.engine)
        load_s = engine.cost.load_s()
        if engine.running and self.manner.slots > 1:
            engine.busy(engine.cost.load_stop_s())
        self.outcome.num_loads += 1
        self.outcome.load_s += load_s
        self._at(load_s, self._loaded, engine, it.version)

    def _loaded(self, engine: FluidEngine, version: int) -> Iterable[Event]:
        if self._breaks_c1:
            self._engine(engine.id)
            engine.renew(version)
            if self.manner.refills:
                contexts = [row.prompt + engine.tokens(row) for row in engine.running.values()]
                self.outcome.num_refilled += int(sum(contexts))
                engine.busy(sum(map(engine.cost.prefill_s, contexts)))
        yield fact.Loaded(engine.id, version, f"v{version}")

    @property
    def _breaks_c1(self) -> bool:
        snapshot = getattr(self.mind, "snapshot", None)
        return snapshot is not None and snapshot().limits.breaks_c1

    def _report(self, engine: FluidEngine) -> Iterable[Event]:
        self._at(self.manner.report_s, self._report, engine)
        if not engine.running:
            return
        engine.advance(self.now)
        lengths = tuple((request, int(engine.tokens(row))) for request, row in engine.running.items())
        step_s = engine.pace().seconds(1.0) if engine.num_active else 0.0
        yield fact.Progressed(engine.id, lengths, 1 / step_s if step_s else 0.0, engine.kv_share)

    # moves

    def _migrate(self, it: order.Migrate) -> None:
        source, destination = self.engines[it.source], self.engines[it.destination]
        source.advance(self.now)
        row = source.running.get(it.request)
        copy_s = 0.0
        if row is not None and self.manner.reuses_kv:
            copy_s = source.cost.move_s(row.prompt + source.tokens(row))
        begins = max(self.now, self._net_s.get(source.id, 0.0), self._net_s.get(destination.id, 0.0))
        self._net_s[source.id] = self._net_s[destination.id] = begins + copy_s
        self._at(begins + copy_s - self.now, self._leave, it, copy_s)

    def _leave(self, it: order.Migrate, copy_s: float) -> Iterable[Event]:
        """All of its KV is there but the last: it stands still, and goes on at its destination."""
        source = self.engines[it.source]
        if it.request not in source.running:
            yield fact.MigrationFailed(it.request, it.source, it.destination, "it has finished")
            return
        row = self._engine(it.source).give(it.request)
        self._plan()
        stop_s = source.cost.pace(1, 1, row.prompt + row.done).seconds(1.0)
        self._at(stop_s, self._arrive, it, row, copy_s, stop_s)

    def _arrive(self, it: order.Migrate, row: Row, copy_s: float, stop_s: float) -> Iterable[Event]:
        destination, cost = self._engine(it.destination), self.engines[it.destination].cost
        tokens = int(row.done)
        num_bytes, num_refilled = int((row.prompt + tokens) * cost.kv_bytes), 0
        if not self.manner.reuses_kv:
            num_bytes, num_refilled = 0, row.prompt + tokens
            destination.busy(cost.prefill_s(num_refilled))
            stop_s += cost.prefill_s(num_refilled)
        destination.take(row)
        found = self.outcome
        found.num_moves += 1
        found.moved_bytes += num_bytes
        found.move_s += stop_s
        found.copy_s += copy_s
        found.num_refilled += num_refilled
        yield fact.Migrated(
            it.request, it.source, it.destination, tokens, num_bytes, copy_s, stop_s, num_refilled
        )

    # trainer

    def _commit(self, it: order.Commit) -> None:
        group = self._groups[it.group]
        self._bench.commit(self.now, it.step, group.work_s, group.tokens)

    def _train(self, it: order.Train) -> None:
        self._began_s[it.step], self._training = self.now, it
        self._bench.train(self.now, it.step, self._work_s(it), self.trainer.fixed_s)

    def _work_s(self, it: order.Train) -> float:
        return sum(self._groups[group].work_s for group in it.groups)

    def _rest(self, epoch: int) -> Iterable[Event]:
        """The trainer has done all that it had."""
        if epoch != self._bench.epoch:
            return
        self._bench.rest(self.now)
        it, self._training = self._training, None
        if it is not None:
            yield from self._trained(it)
        else:
            self._plan()

    def _trained(self, it: order.Train) -> Iterable[Event]:
        took_s = self._work_s(it) + self.trainer.fixed_s
        groups = [self._groups.pop(group) for group in it.groups]
        ages = Counter(it.step - group.version for group in groups)
        tokens, num = sum(group.tokens for group in groups), len(groups) * self.group_size
        began_s = self._began_s[it.step]
        self.outcome.steps.append(Step(began_s, self.now, took_s, tokens, num, ages))
        self._bench.end(self.now, it.step)
        yield fact.Trained(it.step)

    def _publish(self, it: order.Publish) -> None:
        alive = {*(group.version for group in self._groups.values()), it.version}
        self.outcome.num_versions = max(self.outcome.num_versions, len(alive))
        self._at(self.trainer.publish_s(), self._told, fact.Published(it.version, f"v{it.version}"))
