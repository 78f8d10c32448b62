"""The hands of a run on one machine: engine, trainer and rewarder processes behind pipes.

Orders become messages, messages become facts. An engine that dies or falls silent is a fact;
the death of the last engine or of the trainer ends the run with RunError.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from functools import singledispatchmethod
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from dora.core.actions import (
    Abort,
    Action,
    Commit,
    Drop,
    Fail,
    Fetch,
    Filter,
    Generate,
    Load,
    Publish,
    ReportStall,
    Retire,
    Score,
    Train,
)
from dora.core.events import EngineJoined, EngineLost, Event, PromptsFetched, Published
from dora.core.records import GroupId
from dora.errors import RunError
from dora.runtime import messages as m
from dora.runtime.plan import Plan
from dora.runtime.process import Told, Worker, take
from dora.runtime.rewarding import Rewarder
from dora.runtime.telling import Teller
from dora.runtime.workers import run_engine, run_trainer
from dora.stream.samples import SampleStore
from dora.weights.store import WeightStore, make_store_folder

POLL_S = 0.2  # how often deadlines are looked at while nothing arrives


class LocalHands:
    """All stations of a run as processes of this machine; `close` ends them."""

    def __init__(
        self, plan: Plan, notice: Callable[[str], None], check_stop: Callable[[], None] = lambda: None
    ) -> None:
        """Start the processes; `notice` gets sentences for the person watching.

        `check_stop` is called while nothing is half done, and may raise to end the run.
        """
        self._began_s = time.monotonic()
        self.plan, self.notice, self._check_stop = plan, notice, check_stop
        samples = plan.out / "samples.sqlite"
        self.samples = SampleStore(samples, fsync=plan.config.journal.fsync)
        self.weights = WeightStore(make_store_folder(plan.stored_bytes))
        self.facts: deque[Event] = deque()
        self.teller = Teller(plan, self.samples)
        self._cursor = plan.cursor()
        self._digests: dict[int, str] = {}
        self._saved: Path | None = None
        self._checked_s = time.monotonic()
        spec = plan.engine_spec(self.weights.folder)
        num_engines = plan.config.engine.num_engines
        self._told: Told = SimpleQueue()  # by all workers
        self.engines = {i: Worker(f"engine {i}", run_engine, spec, self._told) for i in range(num_engines)}
        self._ready: set[int] = set()
        self._last_loss = ""  # of an engine, with its traceback
        trainer_spec = plan.trainer_spec(self.weights.folder, samples)
        self.trainer = Worker("trainer", run_trainer, trainer_spec, self._told)
        self._is_trainer_ready = False
        self.kernels = ""  # how the engines compute
        reward, runtime = plan.config.reward, plan.config.runtime
        self.rewarder = Rewarder(plan.rewarder_spec(), reward.timeout_s, runtime.start_timeout_s, self._told)

    @property
    def now(self) -> float:
        """Seconds since the processes were started."""
        return time.monotonic() - self._began_s

    def wait_until_ready(self) -> None:
        """Return when every process has started. Raises RunError naming those that have not."""
        timeout_s = self.plan.config.runtime.start_timeout_s
        while late := self._late():
            if self.now > timeout_s:
                raise RunError(
                    f"{', '.join(late)} did not start within runtime.start_timeout_s = {timeout_s:g} s"
                )
            self._listen(POLL_S)

    def join_all(self) -> None:
        """Tell the engines that are alive as joined, holding nothing."""
        config = self.plan.config
        rows, slots = config.engine.max_rows, config.version_slots
        self.facts.extend(EngineJoined(engine, rows, slots) for engine in sorted(self.engines))

    def next_fact(self, until: float | None) -> Event | None:
        """The next fact; None once `now` has reached `until`. Raises RunError if the run cannot go on."""
        self._check_stop()
        while not self.facts:
            if not self.engines:
                raise RunError(f"the last engine is lost: {self._last_loss}")
            if until is not None and self.now >= until:
                return None
            self._listen(POLL_S if until is None else max(0.0, min(POLL_S, until - self.now)))
        return self.facts.popleft()

    def save(self) -> Path:
        """Have the trainer write a checkpoint of where it is; its folder. Raises RunError if it fails."""
        self._saved = None
        self.trainer.send(m.Save(self.plan.out / "checkpoints"))
        timeout_s = self.plan.config.runtime.trainer_timeout_s
        deadline_s = time.monotonic() + timeout_s
        while self._saved is None:
            if time.monotonic() > deadline_s or not self.trainer.process.is_alive():
                raise RunError(f"the trainer died or did not save within {timeout_s:g} s")
            self._listen(POLL_S)
        return self._saved

    def close(self) -> None:
        """End every process and remove the versions from memory."""
        for worker in (*self.engines.values(), self.trainer, self.rewarder.worker):
            worker.kill()
        self.weights.close()
        self.samples.close()  # last, for a full disk raises here

    @singledispatchmethod
    def perform(self, order: Action) -> None:
        """Orders that only the journal keeps (admit, stop) need no hand."""

    @perform.register
    def _(self, order: Fetch) -> None:
        first = self._cursor.index
        groups = tuple(GroupId(*self._cursor.take()) for _ in range(order.count))
        self.facts.append(PromptsFetched(first, groups))

    @perform.register
    def _(self, order: Generate) -> None:
        if order.engine in self.engines:
            requests = self.plan.requests(order.requests, order.version)
            self.engines[order.engine].send(m.Submit(requests))

    @perform.register
    def _(self, order: Abort) -> None:
        if order.engine in self.engines:
            self.engines[order.engine].send(m.GiveUp(order.requests))

    @perform.register
    def _(self, order: Load) -> None:
        if order.engine in self.engines:
            self.engines[order.engine].send(m.LoadWeights(order.version))

    @perform.register
    def _(self, order: Drop) -> None:
        if order.engine in self.engines:
            self.engines[order.engine].send(m.DropWeights(order.version))

    @perform.register
    def _(self, order: Score) -> None:
        source = self.plan.source_of(order.group)
        responses = self.teller.responses(order.group)
        prompt, fields = source.prompt(order.group.row), source.fields(order.group.row)
        self.rewarder.submit(m.Judge(order.group, prompt, fields, responses))

    @perform.register
    def _(self, order: Filter) -> None:
        self.teller.end(order.group, f"filtered: {order.reason}")

    @perform.register
    def _(self, order: Fail) -> None:
        self.teller.end(order.group, f"failed: {order.reason}")
        self.notice(f"group {order.group} failed: {order.reason}")

    @perform.register
    def _(self, order: Commit) -> None:
        self.samples.mark([order.group], "committed")

    @perform.register
    def _(self, order: Train) -> None:
        self.samples.commit()
        self.teller.batch = order.groups
        self.trainer.send(m.TrainStep(order.step, order.groups))

    @perform.register
    def _(self, order: Publish) -> None:
        self.trainer.send(m.PublishWeights(order.version))

    @perform.register
    def _(self, order: Retire) -> None:
        self.weights.drop(order.version)

    @perform.register
    def _(self, order: ReportStall) -> None:
        who = ", ".join(map(str, order.requests)) or "its rewards"
        self.notice(f"step {order.step} waits for group {order.group} ({who}) since {order.since_s:.1f} s")

    def _late(self) -> list[str]:
        late = [w.name for i, w in self.engines.items() if i not in self._ready]
        late += [] if self._is_trainer_ready else ["the trainer"]
        return late + ([] if self.rewarder.is_ready else ["the rewarder"])

    def _listen(self, timeout_s: float) -> None:
        """Wait for messages, turn them into facts, and look at the deadlines."""
        self._check_stop()
        for worker, message in take(self._told, timeout_s):
            self._hear(worker, message)
        self.samples.commit()  # payloads are durable before the facts that name them are told
        self._check_silence()
        self.facts.extend(map(self.teller.scored, self.rewarder.check_deadline()))

    def _hear(self, worker: Worker, message: Any) -> None:
        """What is said by a worker that was replaced or given up is not heard any more."""
        if worker is self.rewarder.worker:
            self.facts.extend(map(self.teller.scored, self.rewarder.heard(message)))
        elif worker is self.trainer:
            self._hear_trainer(message)
        else:
            for engine in [i for i, w in self.engines.items() if w is worker]:
                self._hear_engine(engine, message)

    def _hear_trainer(self, message: Any) -> None:
        if isinstance(message, m.Gone):
            sentence = f"{self.trainer.how_it_ended}; the run cannot go on without it"
            raise RunError(f"{sentence}\n{self.trainer.crash}".rstrip())
        if isinstance(message, m.Ready):
            self._is_trainer_ready = True
        elif isinstance(message, m.Saved):
            self._saved = message.folder
        elif isinstance(message, m.WeightsPublished):
            self._digests[message.version] = message.digest
            self.facts.append(Published(message.version, message.digest))
        else:
            self.facts.append(self.teller.trained(message))

    def _hear_engine(self, engine: int, message: Any) -> None:
        if isinstance(message, m.Gone):
            self._lose(engine, self.engines[engine].how_it_ended)
        elif isinstance(message, m.Ready):
            self._ready.add(engine)
            self.kernels = message.note
        elif isinstance(message, m.WeightsLoaded) and message.digest != self._digests[message.version]:
            self._lose(engine, f"its bytes of version {message.version} are not the published ones")
        else:
            self.facts.extend(self.teller.told(engine, message))

    def _lose(self, engine: int, reason: str) -> None:
        worker = self.engines.pop(engine)
        worker.kill()
        self._ready.discard(engine)
        self.facts.append(EngineLost(engine, reason))
        self.notice(f"engine {engine} is lost ({reason}); its requests begin again elsewhere")
        self._last_loss = f"{reason}\n{worker.crash}".rstrip()

    def _check_silence(self) -> None:
        """Who gave no sign of life for too long is lost; time we slept ourselves is no silence."""
        now_s = time.monotonic()
        asleep_s = max(0.0, now_s - self._checked_s - 1.0)
        self._checked_s = now_s
        runtime = self.plan.config.runtime
        for worker in (self.trainer, *self.engines.values()):
            worker.last_heard_s += asleep_s
        for engine in sorted(self._ready):
            if self.engines[engine].is_silent(runtime.heartbeat_timeout_s):
                limit = f"runtime.heartbeat_timeout_s = {runtime.heartbeat_timeout_s:g}"
                self._lose(engine, f"silent for more than {limit}")
        if self._is_trainer_ready and self.trainer.is_silent(runtime.trainer_timeout_s):
            limit = f"runtime.trainer_timeout_s = {runtime.trainer_timeout_s:g}"
            raise RunError(f"the trainer was silent for more than {limit}; the run cannot go on without it")
