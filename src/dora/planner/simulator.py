"""Simulates a run in virtual time: engines and a trainer with modelled costs, under the production
orchestrator.

The event queue is a heap of (time, number, callback). Engines are `FluidEngine`s; each has at most one valid
callback, for the next moment at which one of its requests stops. Other schedulers (`other_systems`) can take
the orchestrator's place.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from dora.core import actions, events
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.types import Chunk, GroupId, Limits
from dora.errors import InputError
from dora.planner.fluid import NEVER, FluidEngine, FluidRequest
from dora.planner.lengths import CHUNK_SIZE, LengthSource
from dora.sim.event_queue import EventQueue

Metrics = dict[str, float]
Listener = Callable[[float, Event | Action], None]  # gets every event and action with its time
CACHED_CHUNKS = 200  # of lengths
# Of the metrics with a spread over steps, those that are means over all steps
WHOLE_RUN = frozenset(
    ("engine_utilization", "row_utilization", "migrations", "recomputed_tokens", "dropped_tokens")
)


class RolloutScheduler(Protocol):
    """The scheduler of a run: `dora.core.orchestrator.Orchestrator`, or the rules of another system."""

    def start(self, now: float) -> list[Action]: ...
    def handle(self, event: Event, now: float) -> list[Action]: ...
    @property
    def done(self) -> bool: ...


class TrainerCosts(Protocol):
    """Costs of the trainer: by roofline (`TrainerCost`), or fitted to real runs (`FittedCosts`)."""

    def sequence_s(self, num_tokens: float) -> float: ...
    @property
    def step_overhead_s(self) -> float: ...
    @property
    def publish_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Contention:
    """Relative slowdown of engines and trainer on shared cores; 0.3: a step takes 1.3 times as long."""

    decode: float = 0.0  # while the trainer works
    train: float = 0.0  # while all engines decode


@dataclass(frozen=True)
class SimulatorOptions:
    """Behaviour of workers that differs between systems. By default workers share no devices and report at
    once.
    """

    min_stream_tokens: int | None = None  # of an incomplete batch at which the trainer starts; None: never
    recomputes_kv: bool = False  # of running requests, when they continue with new weights
    migrates_kv: bool = True  # else the KV of migrated requests is computed again
    switch_s: float = 0.0  # a device switches between training and decoding
    reward_s: float = 0.0
    finish_report_s: float = 0.0  # from the end of a response to its `RequestFinished`
    contention: Contention | None = None  # None: engines and trainer have their own devices
    report_interval_s: float = 10.0  # between the progress reports of an engine
    version_slots: int = 1  # of an engine
    zero_variance: frozenset[int] = frozenset()  # positions of groups whose rewards are equal
    longest_first: bool = False  # the dataset orders prompts by the length of their responses


@dataclass
class Totals:
    """Of all engines, since the start of the run."""

    row_s: float = 0.0  # decoded rows x seconds
    decode_s: float = 0.0  # decoding engines x seconds
    num_migrations: int = 0
    num_recomputed: int = 0  # tokens whose KV was computed again
    num_dropped: int = 0  # tokens of responses that were started and not trained


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """One training step."""

    ended_s: float
    train_s: float  # work of the trainer
    num_tokens: int  # of prompts and responses
    num_response_tokens: int
    staleness: Counter[int]  # -> groups
    totals: Totals  # at its end


@dataclass
class SimulationResult(Totals):
    """Totals of a simulated run, filled while it runs."""

    steps: list[SimulatedStep] = field(default_factory=list)
    num_events: int = 0
    migration_stop_s: float = 0.0  # pauses of migrating requests
    migration_copy_s: float = 0.0  # copies of their KV, during which they decode
    load_s: float = 0.0
    num_loads: int = 0
    num_finished: int = 0  # responses
    answer_s: float = 0.0  # from the first start of a response to its end, summed over responses
    max_versions: int = 0  # alive at once
    stall_s: float = 0.0  # part of `decode_s` in which EP ranks wait for the fullest
    max_kv_usage: float = 0.0

    def metrics(self, num_engines: int, num_rows: int, max_staleness: int) -> Metrics:
        """Means over the steps in which the pipeline is full; of WHOLE_RUN over all steps.

        NAME_std is the standard deviation over the same steps. Raises InputError if the pipeline is never
        full.
        """
        first, last = steady_steps(len(self.steps), max_staleness)
        ends = [(0.0, Totals()), *((step.ended_s, step.totals) for step in self.steps)]
        steady = mean_metrics(self.steps[first:last], *ends[first], num_engines, num_rows)
        whole = mean_metrics(self.steps, *ends[0], num_engines, num_rows)
        single = [
            mean_metrics([step], *end, num_engines, num_rows)
            for step, end in zip(self.steps, ends, strict=False)
        ]
        means = {name: (whole if name in WHOLE_RUN else steady)[name] for name in steady}
        spreads = {
            f"{name}_std": statistics.pstdev(
                one[name] for one in (single if name in WHOLE_RUN else single[first:last])
            )
            for name in means
        }
        num_steps, end_s = len(self.steps), self.steps[-1].ended_s
        return {
            **means,
            "exposed_s": means["step_s"] - means["train_s"],
            "stall_fraction": self.stall_s / max(self.decode_s, 1e-9),
            "staleness_max": float(max(max(step.staleness) for step in self.steps[first:last])),
            "versions": float(self.max_versions),
            "migration_stop_s": self.migration_stop_s / num_steps,
            "migration_copy_fraction": self.migration_copy_s / (end_s * num_engines),
            "kv_usage_max": self.max_kv_usage,
            "loads": self.num_loads / num_steps,
            "load_fraction": self.load_s / (end_s * num_engines),
            "answer_s": self.answer_s / max(1, self.num_finished),
            **spreads,
        }


def mean_metrics(
    steps: Sequence[SimulatedStep], started_s: float, before: Totals, num_engines: int, num_rows: int
) -> Metrics:
    """Means over consecutive steps. The step before them ended at `started_s`, with the totals `before`."""
    num_steps, totals = len(steps), steps[-1].totals
    elapsed_s, num_tokens = steps[-1].ended_s - started_s, sum(step.num_tokens for step in steps)
    train_s = sum(step.train_s for step in steps)
    staleness = sum((step.staleness for step in steps), Counter[int]())
    return {
        "step_s": elapsed_s / num_steps,
        "tokens_per_s": sum(step.num_response_tokens for step in steps) / elapsed_s,
        "total_tokens_per_s": num_tokens / elapsed_s,
        "total_tokens_per_step": num_tokens / num_steps,
        "train_s": train_s / num_steps,
        "exposed_fraction": 1 - train_s / elapsed_s,
        "staleness_mean": statistics.fmean(staleness, weights=staleness.values()),
        "engine_utilization": (totals.decode_s - before.decode_s) / (elapsed_s * num_engines),
        "row_utilization": (totals.row_s - before.row_s) / (elapsed_s * num_rows),
        "migrations": (totals.num_migrations - before.num_migrations) / num_steps,
        "recomputed_tokens": (totals.num_recomputed - before.num_recomputed) / num_steps,
        "dropped_tokens": (totals.num_dropped - before.num_dropped) / num_steps,
    }


def steady_steps(num_steps: int, max_staleness: int) -> tuple[int, int]:
    """The steps, first to before last, in which the pipeline is full. Raises InputError if there are none."""
    first, last = max_staleness + 2, num_steps - max_staleness - 1
    if last - first < 1:
        raise InputError(
            f"{num_steps} steps are too few at S = {max_staleness}: the pipeline fills for {first} "
            f"and drains for {max_staleness + 1}; simulate at least {2 * max_staleness + 5}"
        )
    return first, last


class TrainerQueue:
    """Work of the trainer, in order of arrival, at a speed that may change. Groups may come before their
    batch.

    `done_s` is when all work is done. `epoch` changes with it, so that a scheduled end can be recognised as
    void.
    """

    def __init__(self, min_stream_tokens: int | None) -> None:
        """`min_stream_tokens`: tokens of an incomplete batch at which the trainer starts on it; None:
        never.
        """
        self.done_s = 0.0
        self.epoch = 0
        self._slowdown = 1.0
        self._min_stream_tokens = min_stream_tokens
        self._waiting: dict[int, tuple[float, int]] = {}  # step -> seconds and tokens of waiting groups
        self._next_step: int | None = 0  # whose groups may be worked on early; None during a step

    def commit(self, now: float, step: int, work_s: float, num_tokens: int) -> None:
        """Add a group to the batch of a step."""
        if self._min_stream_tokens is not None:
            waiting_s, waiting = self._waiting.get(step, (0.0, 0))
            self._waiting[step] = (waiting_s + work_s, waiting + num_tokens)
            self._work_early(now)

    def train(self, now: float, step: int, work_s: float, overhead_s: float) -> None:
        """Train a complete batch: the work that is left, and the fixed time of a step."""
        left_s = work_s if self._min_stream_tokens is None else self._waiting.pop(step, (0.0, 0))[0]
        self._next_step = None
        self._add(now, left_s + overhead_s)

    def end_step(self, now: float, step: int) -> None:
        self._next_step = step + 1
        self._work_early(now)

    def set_slowdown(self, now: float, slowdown: float) -> None:
        """From now on, work takes `slowdown` times as long."""
        if slowdown != self._slowdown:
            self.done_s = now + max(0.0, self.done_s - now) * slowdown / self._slowdown
            self._slowdown = slowdown
            self.epoch += 1

    def end(self, now: float) -> None:
        """All work is done."""
        self.done_s = now

    def is_busy(self, now: float) -> bool:
        return now < self.done_s

    def _work_early(self, now: float) -> None:
        step = self._next_step
        if step is None or step not in self._waiting:
            return
        work_s, num_tokens = self._waiting[step]
        if num_tokens >= (self._min_stream_tokens or 0):
            del self._waiting[step]
            self._add(now, work_s)

    def _add(self, now: float, work_s: float) -> None:
        """Add work, in seconds of a trainer without contention."""
        self.done_s = max(now, self.done_s) + self._slowdown * work_s
        self.epoch += 1


@dataclass(slots=True, eq=False)
class _OpenGroup:
    """A group that is admitted and not trained."""

    version: int
    work_s: float = 0.0  # to train its finished responses
    num_tokens: int = 0  # of its finished responses
    num_response_tokens: int = 0  # `num_tokens` without the prompts
    cached_on: set[tuple[int, int]] = field(default_factory=set)  # (engine, version) with its prompt's KV


class Simulator(EventQueue[Iterable[Event]]):
    """Executes actions in virtual time and returns events, until the scheduler is done."""

    def __init__(
        self,
        scheduler: RolloutScheduler,
        engines: list[FluidEngine],
        trainer: TrainerCosts,
        lengths: LengthSource,
        limits: Limits,
        options: SimulatorOptions,
        listener: Listener | None = None,
    ) -> None:
        super().__init__()
        self.scheduler, self.trainer, self.lengths = scheduler, trainer, lengths
        self.limits, self.options = limits, options
        self.engines = {engine.id: engine for engine in engines}
        self.result, self._listener = SimulationResult(), listener
        self._changed_engines: dict[int, None] = {}  # their next stop must be scheduled again
        self._dataset_index = 0
        self._chunk = lru_cache(CACHED_CHUNKS)(self._draw_chunk)
        self._groups: dict[GroupId, _OpenGroup] = {}
        self._network_free_s: dict[int, float] = {}  # engine -> end of its last KV copy
        self._queue = TrainerQueue(options.min_stream_tokens)
        self._queue_epoch = 0  # of the scheduled end
        self._training: actions.Train | None = None
        self._handlers: dict[type, Callable[[Any], None]] = {
            actions.FetchPrompts: self._fetch_prompts,
            actions.Admit: self._admit,
            actions.Generate: self._generate,
            actions.Abort: self._abort,
            actions.Migrate: self._migrate,
            actions.DecodeOnly: self._decode_only,
            actions.PauseEngine: self._pause,
            actions.ResumeEngine: self._resume,
            actions.Score: self._score,
            actions.Commit: self._commit,
            actions.Train: self._train,
            actions.Publish: self._publish,
            actions.Load: self._load,
        }

    def run(self) -> SimulationResult:
        """Run to the end. Raises Deadlock if no event is scheduled before the end."""
        for _ in self.run_steps():
            pass
        return self.result

    def run_steps(self) -> Iterator[int]:
        """Run to the end, yielding the number of training steps after each."""
        self._execute(self.scheduler.start(0.0))
        self._start_engines()
        num_yielded, scheduler, result = 0, self.scheduler, self.result
        while not scheduler.done:
            for event in self.run_next():
                result.num_events += 1
                if self._listener is not None:
                    self._listener(self.now, event)
                self._execute(scheduler.handle(event, self.now))
            if len(result.steps) > num_yielded:
                num_yielded += 1
                yield num_yielded
        for engine in self.engines.values():
            result.row_s += engine.row_s
            result.decode_s += engine.decode_s
            result.stall_s += engine.stall_s

    def _start_engines(self) -> None:
        for engine in self.engines.values():
            joined = events.EngineJoined(
                engine.id, engine.num_rows, self.options.version_slots, engine.is_colocated
            )
            self.schedule(0.0, self._report, joined)
            first_report_s = self.options.report_interval_s * (1 + engine.id / len(self.engines))
            self.schedule(first_report_s, self._report_progress, engine)

    def _report(self, event: Event) -> Iterable[Event]:
        return (event,)

    def _execute(self, new_actions: Iterable[Action]) -> None:
        for action in new_actions:
            if self._listener is not None:
                self._listener(self.now, action)
            handler = self._handlers.get(type(action))
            if handler is not None:
                handler(action)
        self._update_schedule()

    def _update_schedule(self) -> None:
        """Schedule the next stop of engines that have changed, and the end of the trainer's work."""
        if self.options.contention is not None:
            self._update_contention(self.options.contention)
        if self._queue.epoch != self._queue_epoch:
            self._queue_epoch = self._queue.epoch
            self.schedule(max(0.0, self._queue.done_s - self.now), self._end_work, self._queue_epoch)
        for number in self._changed_engines:
            engine = self.engines[number]
            engine.next_stop_s = engine.find_next_stop()
            self._schedule_check(engine)
        self._changed_engines.clear()

    def _schedule_check(self, engine: FluidEngine) -> None:
        """Schedule a check of the engine at its next stop, unless an earlier check is scheduled: most stops
        are postponed.
        """
        if engine.next_stop_s < engine.next_check_s:
            engine.next_check_s = engine.next_stop_s
            self.schedule_at(engine.next_stop_s, self._check_stop, engine)

    def _update_contention(self, contention: Contention) -> None:
        engines = self.engines.values()
        num_decoding = sum(engine.num_active > 0 and not engine.is_paused for engine in engines)
        self._queue.set_slowdown(self.now, 1 + contention.train * num_decoding / len(engines))
        slowdown = 1 + contention.decode * self._queue.is_busy(self.now)
        for engine in engines:
            if engine.slowdown != slowdown:
                self._changing(engine.id).set_slowdown(slowdown)

    def _changing(self, number: int) -> FluidEngine:
        """An engine that is about to change, advanced to now."""
        engine = self.engines[number]
        engine.advance(self.now)
        self._changed_engines[number] = None
        return engine

    # Dataset and rewards

    def _fetch_prompts(self, action: actions.FetchPrompts) -> None:
        positions = list(range(self._dataset_index, self._dataset_index + action.count))
        if self.options.longest_first:
            positions.sort(key=lambda position: -max(self._lengths_of(position)[1]))
        groups = tuple(GroupId(0, position) for position in positions)
        self.schedule(0.0, self._report, events.PromptsFetched(self._dataset_index, groups))
        self._dataset_index += action.count

    def _lengths_of(self, position: int) -> tuple[int, list[int]]:
        """Lengths of a group's prompt and of its responses."""
        chunk, index = divmod(position, CHUNK_SIZE)
        prompts, responses = self._chunk(chunk)
        return prompts[index], responses[index]

    def _draw_chunk(self, chunk: int) -> tuple[Sequence[int], list[list[int]]]:
        """Lengths of prompts and of responses of `CHUNK_SIZE` groups."""
        group_size, batch_size = self.limits.group_size, self.limits.batch_size
        prompts = self.lengths.draw_prompts(chunk, group_size)
        return prompts, self.lengths.draw(chunk, group_size, batch_size)

    def _admit(self, action: actions.Admit) -> None:
        dropped = self._groups.get(action.group)
        group = self._groups[action.group] = _OpenGroup(action.version)
        if dropped is not None:  # it is admitted again
            self.result.num_dropped += dropped.num_tokens
            group.cached_on = dropped.cached_on

    def _score(self, action: actions.Score) -> None:
        is_equal = action.group.row in self.options.zero_variance
        rewards = tuple(0.0 if is_equal else float(k % 2) for k in range(self.limits.group_size))
        self.schedule(self.options.reward_s, self._report, events.GroupScored(action.group, rewards))

    # Engines

    def _generate(self, action: actions.Generate) -> None:
        engine = self._changing(action.engine)
        cache_key = (action.engine, action.version)
        for request_id in action.requests:
            prompt, lengths = self._lengths_of(request_id.row)
            length = lengths[request_id.sibling]
            turn_length = -(-length // self.lengths.num_turns)
            cached_on = self._groups[request_id.group].cached_on
            if cache_key not in cached_on:
                cached_on.add(cache_key)
                engine.delay(engine.cost.prefill_s(prompt))
            request = FluidRequest(request_id, action.version, prompt, length, turn_length)
            request.started_s = self.now
            engine.add(request)

    def _check_stop(self, engine: FluidEngine) -> Iterable[Event]:
        """Handle requests that have stopped, and a full KV cache."""
        if self.now >= engine.next_check_s:
            engine.next_check_s = NEVER
        if self.now < engine.next_stop_s:
            self._schedule_check(engine)
            return ()
        self._changing(engine.id)
        self.result.max_kv_usage = max(self.result.max_kv_usage, engine.kv_usage)
        finished: list[Event] = []
        for request in engine.stop_finished():
            if request.num_tokens < request.length:
                self.schedule(self.lengths.turn_delay_s, self._start_turn, request)
                continue
            engine.remove(request.id)
            event = self._finish(engine, request)
            if self.options.finish_report_s:
                self.schedule(self.options.finish_report_s, self._report, event)
            else:
                finished.append(event)
        if swap_s := engine.swap():
            engine.delay(swap_s)
        if not finished:
            self._update_schedule()
        return finished

    def _start_turn(self, request: FluidRequest) -> Iterable[Event]:
        """The environment has answered: decode the next turn, on the engine where the request is now."""
        turn_length = -(-request.length // self.lengths.num_turns)
        request.stop_length = min(request.length, request.stop_length + turn_length)
        for engine in self.engines.values():
            if engine.requests.get(request.id) is request:
                self._changing(engine.id).resume(request)
        self._update_schedule()
        return ()

    def _finish(self, engine: FluidEngine, request: FluidRequest) -> Event:
        num_tokens = request.prompt + request.length
        if (group := self._groups.get(request.id.group)) is not None:
            group.work_s += self.trainer.sequence_s(num_tokens)
            group.num_tokens += num_tokens
            group.num_response_tokens += request.length
        self.result.num_finished += 1
        self.result.answer_s += self.now - request.started_s
        chunks = (Chunk(request.version, f"v{request.version}", request.length),)
        return events.RequestFinished(engine.id, request.id, request.version, request.length, chunks, "stop")

    def _abort(self, action: actions.Abort) -> None:
        engine = self._changing(action.engine)
        aborted = [engine.remove(request) for request in action.requests if request in engine.requests]
        num_tokens = sum(int(request.num_tokens) for request in aborted)
        self.result.num_dropped += num_tokens
        if aborted:
            ids = tuple(request.id for request in aborted)
            self.schedule(0.0, self._report, events.RequestsAborted(action.engine, ids, num_tokens))

    def _decode_only(self, action: actions.DecodeOnly) -> None:
        self._changing(action.engine).decode_only(action.requests)

    def _pause(self, action: actions.PauseEngine) -> None:
        self._changing(action.engine).is_paused = True
        self.schedule(self.options.switch_s, self._report, events.EnginePaused(action.engine))

    def _resume(self, action: actions.ResumeEngine) -> None:
        engine = self._changing(action.engine)
        engine.is_paused = False
        engine.delay(self.options.switch_s)

    def _load(self, action: actions.Load) -> None:
        engine = self._changing(action.engine)
        load_s = engine.cost.load_s
        if engine.requests and self.options.version_slots > 1:
            engine.delay(engine.cost.load_stop_s)
        self.result.num_loads += 1
        self.result.load_s += load_s
        self.schedule(load_s, self._loaded, engine, action.version)

    def _loaded(self, engine: FluidEngine, version: int) -> Iterable[Event]:
        if self.limits.breaks_c1:  # running requests continue with newer weights
            self._changing(engine.id)
            engine.switch_version(version)
            if self.options.recomputes_kv:
                contexts = [r.prompt + engine.tokens_of(r) for r in engine.requests.values()]
                self.result.num_recomputed += int(sum(contexts))
                engine.delay(sum(map(engine.cost.prefill_s, contexts)))
        yield events.Loaded(engine.id, version, f"v{version}")

    def _report_progress(self, engine: FluidEngine) -> Iterable[Event]:
        self.schedule(self.options.report_interval_s, self._report_progress, engine)
        if not engine.requests:
            return
        engine.advance(self.now)
        lengths = tuple((r.id, int(engine.tokens_of(r))) for r in engine.requests.values())
        step_s = engine.step_time().seconds(1.0) if engine.num_active else 0.0
        rate = 1 / step_s if step_s else 0.0
        yield events.ProgressReported(engine.id, lengths, rate, engine.kv_usage)

    # Migrations

    def _migrate(self, action: actions.Migrate) -> None:
        """Copy the KV while the source decodes, one copy at a time per engine."""
        source = self.engines[action.source]
        source.advance(self.now)
        request = source.requests.get(action.request)
        copy_s = 0.0
        if request is not None and self.options.migrates_kv:
            copy_s = source.cost.migrate_s(request.prompt + source.tokens_of(request))
        free_s = self._network_free_s
        start_s = max(self.now, free_s.get(action.source, 0.0), free_s.get(action.destination, 0.0))
        free_s[action.source] = free_s[action.destination] = start_s + copy_s
        self.schedule(start_s + copy_s - self.now, self._stop_migrating, action, copy_s)

    def _stop_migrating(self, action: actions.Migrate, copy_s: float) -> Iterable[Event]:
        """All KV but the last step's is copied: stop the request, to continue at its destination."""
        source = self.engines[action.source]
        if action.request not in source.requests:
            yield events.MigrationFailed(
                action.request, action.source, action.destination, "the request has finished"
            )
            return
        request = self._changing(action.source).remove(action.request)
        self._update_schedule()
        kv = source.cost.kv_tokens(request.prompt + request.num_tokens)
        stop_s = source.cost.terms(1, 1).step_time(kv).seconds(1.0)
        self.schedule(stop_s, self._complete_migration, action, request, copy_s, stop_s)

    def _complete_migration(
        self, action: actions.Migrate, request: FluidRequest, copy_s: float, stop_s: float
    ) -> Iterable[Event]:
        destination, result = self._changing(action.destination), self.result
        cost, num_tokens = destination.cost, int(request.num_tokens)
        num_bytes = int(cost.kv_tokens(request.prompt + num_tokens) * cost.kv_bytes)
        num_recomputed = 0
        if not self.options.migrates_kv:
            num_bytes, num_recomputed = 0, request.prompt + num_tokens
            prefill_s = cost.prefill_s(num_recomputed)
            destination.delay(prefill_s)
            stop_s += prefill_s
        destination.add(request)
        result.num_migrations += 1
        result.migration_stop_s += stop_s
        result.migration_copy_s += copy_s
        result.num_recomputed += num_recomputed
        ends = (action.source, action.destination)
        yield events.Migrated(action.request, *ends, num_tokens, num_bytes, copy_s, stop_s, num_recomputed)

    # Trainer

    def _commit(self, action: actions.Commit) -> None:
        group = self._groups[action.group]
        self._queue.commit(self.now, action.step, group.work_s, group.num_tokens)

    def _train(self, action: actions.Train) -> None:
        self._training = action
        self._queue.train(self.now, action.step, self._work_s(action), self.trainer.step_overhead_s)

    def _work_s(self, action: actions.Train) -> float:
        return sum(self._groups[group].work_s for group in action.groups)

    def _end_work(self, epoch: int) -> Iterable[Event]:
        """All work of the trainer is done."""
        if epoch != self._queue.epoch:
            return
        self._queue.end(self.now)
        action, self._training = self._training, None
        if action is not None:
            yield from self._trained(action)
        else:
            self._update_schedule()

    def _trained(self, action: actions.Train) -> Iterable[Event]:
        train_s = self._work_s(action) + self.trainer.step_overhead_s
        groups = [self._groups.pop(group) for group in action.groups]
        staleness = Counter(action.step - group.version for group in groups)
        record = SimulatedStep(
            self.now,
            train_s,
            sum(group.num_tokens for group in groups),
            sum(group.num_response_tokens for group in groups),
            staleness,
            self._totals(),
        )
        self.result.steps.append(record)
        self._queue.end_step(self.now, action.step)
        yield events.Trained(action.step)

    def _totals(self) -> Totals:
        row_s = decode_s = 0.0
        for engine in self.engines.values():
            unread_s = engine.decoding_s(self.now)
            decode_s += engine.decode_s + unread_s
            row_s += engine.row_s + unread_s * engine.num_active
        result = self.result
        return Totals(row_s, decode_s, result.num_migrations, result.num_recomputed, result.num_dropped)

    def _publish(self, action: actions.Publish) -> None:
        alive = {*(group.version for group in self._groups.values()), action.version}
        self.result.max_versions = max(self.result.max_versions, len(alive))
        published = events.Published(action.version, f"v{action.version}")
        self.schedule(self.trainer.publish_s, self._report, published)
