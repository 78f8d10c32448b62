"""The hands of a run: engine, trainer and rewarder processes, on the ground that the run has.

Orders become messages, messages become facts. An engine that dies or falls silent is a fact;
the death of the last engine ends the run with RunError. `fleet` has the engines, `trainers` the trainer.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import singledispatchmethod
from pathlib import Path
from typing import Any

from dora.core.actions import (
    Abort,
    Action,
    Attest,
    Commit,
    Dismiss,
    Drop,
    Fail,
    Fetch,
    Filter,
    Generate,
    Load,
    Migrate,
    Pause,
    Publish,
    RefuseDrain,
    ReportStall,
    Resume,
    Retire,
    Rush,
    Score,
    Train,
)
from dora.core.events import Event, GroupScored, GroupUnscorable, Migrated
from dora.core.records import GroupId
from dora.core.waits import ENGINES, REWARDS, TRAINER
from dora.core.wording import nth
from dora.errors import RunError
from dora.runtime import messages as m
from dora.runtime.checkpoints import Checkpoints
from dora.runtime.elastic import Elastic
from dora.runtime.episodes import Episodes
from dora.runtime.fleet import Fleet
from dora.runtime.ground import make_ground
from dora.runtime.judging import question_of
from dora.runtime.outside import OutsideTrainer, Patience
from dora.runtime.past import SAMPLES, Past
from dora.runtime.plan import Plan
from dora.runtime.playing import make_player
from dora.runtime.process import Pulse, Told, Worker, take
from dora.runtime.rewarding import Rewarding, reward_tasks
from dora.runtime.storage import InProcess, make_feed
from dora.runtime.supply import Supply
from dora.runtime.telling import Teller
from dora.runtime.trainers import Trainers
from dora.stream.samples import SampleStore
from dora.weights.store import WeightStore, make_store_folder

POLL_S = 0.2  # how often deadlines are looked at while nothing arrives


class LocalHands:
    """All stations of a run as processes; `close` ends them."""

    def __init__(
        self,
        plan: Plan,
        notice: Callable[[str], None],
        check_stop: Callable[[], None] = lambda: None,
        past: Past | None = None,
    ) -> None:
        """Start the processes. `notice` gets sentences for the person watching, `check_stop` is called while
        nothing is half done, and may raise to end the run. With a `past` they go on from there.
        """
        self._ground = make_ground(plan, notice)
        self._started_s = self._checked_s = time.monotonic()
        self._began_s = self._started_s  # later, once a run that goes on has started
        self.plan, self.notice, self._check_stop = plan, notice, check_stop
        fsync = plan.config.journal.fsync
        self.samples = past.samples if past else SampleStore(plan.out / SAMPLES, fsync=fsync)
        self.weights = WeightStore(make_store_folder(plan.stored_bytes), plan.config.engine.dtype)
        self.stream_folder = self.weights.folder / "stream"
        self.facts: deque[Event] = deque()
        self.teller = past.teller if past else Teller(plan, self.samples)
        kept = past.restore_versions(self.weights) if past else {}
        self.supply = Supply(plan, past.core.snapshot().next_index if past else 0)
        self._past = past
        self._checkpoints = Checkpoints(plan, self.weights, notice)
        self._told = Told(self._ground.start)  # by all workers
        self.fleet = Fleet(plan, self.weights.folder, self._told, self.facts, self.teller, notice)
        self._elastic = Elastic(plan, self._ground, self.fleet, self.facts, notice)
        self.refusals: dict[int, str] = {}  # engine -> why it may not leave, until somebody has read it
        self.fleet.digests.update(kept)
        start = (past.resumed.from_step, past.checkpoint) if past else (0, None)
        self.trainers = Trainers(
            plan,
            (self.weights.folder, self.stream_folder),
            start,
            self._told,
            self.facts,
            self.teller,
            self._checkpoints,
            self._announce,
            notice,
        )
        tasks = reward_tasks(plan.config, plan.dataset.columns)
        self._feed = make_feed(plan, self.stream_folder, tasks, self._ground, notice)
        self.storage = storage if isinstance(storage := self._feed.storage, InProcess) else None
        self.samples.follow(self._feed)
        self.patience = Patience(self)
        self.is_held = False  # held: no fact is told, so no order is given
        limit_s = plan.config.runtime.start_timeout_s
        self.rewarding = Rewarding(tasks, self._feed, limit_s, self._told, notice)
        player = make_player(plan, self._told, notice)
        self.episodes = Episodes(plan, player, self.fleet, self.facts, self.teller)

    @property
    def now(self) -> float:
        """Seconds since the processes were started; all lives of a run make one clock."""
        return time.monotonic() - self._began_s

    def wait_until_ready(self) -> None:
        """Return when every process has started. Raises RunError naming those that have not."""
        timeout_s = self.plan.config.runtime.start_timeout_s
        while late := self._late():
            if time.monotonic() > self._started_s + timeout_s:
                raise RunError(
                    f"{', '.join(late)} did not start within runtime.start_timeout_s = {timeout_s:g} s"
                )
            self._listen(POLL_S)
        if (why := self.plan.config.why_no_streaming) is not None:
            self.notice(f"gradients wait for the whole batch, with {why}")
        if self._past is not None:
            self._began_s = time.monotonic() - self._past.now_s

    @property
    def trainer(self) -> Worker:
        """The trainer's first process, of the day."""
        return self.trainers.now

    @property
    def engines(self) -> list[int]:
        """The engines that have started and are to stay, in order."""
        return sorted(self.fleet.staying)

    def pulses(self) -> list[Pulse]:
        """What is known of each process, and when it was last heard."""
        told = [pulse for pulses in self.stations().values() for pulse in pulses]
        return told if self.storage is None else [*told, self.storage.pulse()]

    def stations(self) -> dict[str, list[Pulse]]:
        """The same, by the name that waits have for those who do one thing."""
        engines, trainer = self.fleet.pulses(), self.trainers.pulses()
        return {ENGINES: engines, TRAINER: trainer, REWARDS: self.rewarding.pulses()}

    def join_all(self) -> None:
        """Tell the engines that are alive as joined, holding nothing; later ones join by themselves."""
        self.fleet.open()
        self.trainers.open(may_replace=True)

    def settle(self) -> None:
        """Wait until no move is under way, and give up what was moved: nobody needs it any more."""
        while self.fleet.moves.under_way:
            self._listen(POLL_S)
        for fact in self.facts:
            if isinstance(fact, Migrated):
                self.perform(Abort(fact.destination, (fact.request,)))

    def next_fact(self, until: float | None) -> Event | None:
        """The next fact; None once `now` has reached `until`. Raises RunError if the run cannot go on."""
        self._check_stop()
        while not self.facts or self.is_held:
            self.fleet.check_any()
            left_s = POLL_S if until is None or self.is_held else until - self.now
            if left_s <= 0.0:
                return None
            self._listen(min(POLL_S, left_s))
        self.samples.commit()  # payloads are durable before the fact that names them is told
        return self.facts.popleft()

    def accumulate(self, step: int, groups: Sequence[GroupId]) -> None:
        """Have the trainer begin with scored groups of a step's batch, where it may."""
        if self.plan.config.streams or self.plan.columns:
            self.samples.commit()  # so that the trainer can read them
            for group in groups:
                self.trainers.send(m.Accumulate(step, group))

    def brief(self, groups: Sequence[GroupId]) -> None:
        """A new trainer has to find these groups in the stream, whatever the last one did with them."""
        self.samples.offer_again(groups)

    def save(self, core: str, versions: Sequence[int]) -> None:
        """Have the trainer write a checkpoint, once it has done what it was told before.

        `core` is what the orchestrator knows now; older `versions` are those that may still be needed.
        """
        self.trainers.send(self._checkpoints.order(core, versions))

    def wait_until_saved(self) -> Path:
        """The folder of the last checkpoint, once it is there. Raises RunError if it could not be written."""
        self._wait_for_trainer(lambda: not self._checkpoints.num_pending, "save")
        newest = self._checkpoints.newest()
        self.trainers.excuse()
        return newest

    def wait_until_trained(self) -> None:
        """Until the trainer has ended the step it is in, if any. Raises RunError if it does not."""
        self._wait_for_trainer(lambda: not self._is_in_step(), "end its step")

    def _is_in_step(self) -> bool:
        """Whether a step may end at any moment: one outside only does once its weights are here."""
        trainer = self.trainer
        return trainer.is_taking if isinstance(trainer, OutsideTrainer) else self.trainers.is_in_step

    def _wait_for_trainer(self, is_done: Callable[[], bool], what: str) -> None:
        timeout_s = self.plan.config.runtime.trainer_timeout_s
        deadline_s = time.monotonic() + timeout_s
        self.trainers.open(may_replace=False)
        while not is_done():
            if time.monotonic() > deadline_s or not self.trainer.is_alive:
                raise RunError(f"the trainer died or did not {what} within {timeout_s:g} s")
            self._listen(POLL_S)

    def nudge(self) -> None:
        """Have the driver look up at once, should it wait for somebody's word; from any thread."""
        self._told.put((None, None))

    def close(self) -> None:
        """End every process and remove the versions from memory."""
        self.fleet.kill()
        self.rewarding.kill()
        self.episodes.close()
        self.trainers.kill()
        self.samples.follow(None)
        self._feed.close()
        self._ground.close()
        self.weights.close()
        self.samples.close()  # last, for a full disk raises here

    @singledispatchmethod
    def perform(self, order: Action) -> None:
        """Orders that only the journal keeps (admit, stop) need no hand."""

    @perform.register
    def _(self, order: Fetch) -> None:
        self.facts.extend(self.supply.fetch(order.count))

    @perform.register
    def _(self, order: Generate) -> None:
        self.episodes.generate(order)

    @perform.register
    def _(self, order: Abort) -> None:
        self.episodes.give_up(order)

    @perform.register
    def _(self, order: Migrate) -> None:
        self.episodes.move(order)

    @perform.register
    def _(self, order: Rush) -> None:
        self.fleet.send(order.engine, m.RushRows(order.requests))

    @perform.register
    def _(self, order: Pause) -> None:
        self.fleet.send(order.engine, m.PauseRows())

    @perform.register
    def _(self, order: Resume) -> None:
        self.fleet.send(order.engine, m.ResumeRows())

    @perform.register
    def _(self, order: Dismiss) -> None:
        self.fleet.dismiss(order.engine)

    @perform.register
    def _(self, order: RefuseDrain) -> None:
        self.refusals[order.engine] = order.reason
        self.notice(f"engine {order.engine} stays: {order.reason}")

    @perform.register
    def _(self, order: Load) -> None:
        self.fleet.send(order.engine, m.LoadWeights(order.version))

    @perform.register
    def _(self, order: Drop) -> None:
        self.fleet.send(order.engine, m.DropWeights(order.version))

    @perform.register
    def _(self, order: Score) -> None:
        if (rewards := self.teller.rewards.get(order.group)) is not None:  # judged before everything died
            self.teller.held_out(order.group)
            self.facts.append(GroupScored(order.group, rewards))
            return
        if (fact := self.teller.scored_by_itself(order.group)) is not None:
            self.facts.append(fact)
            return
        source, row = self.plan.source_of(order.group), order.group.row
        question = question_of(source.prompt(row), source.fields(row))
        self.rewarding.submit(order.group, question, self.teller.held_out(order.group))

    @perform.register
    def _(self, order: Filter) -> None:
        self.teller.end(order.group, f"filtered: {order.reason}")

    @perform.register
    def _(self, order: Fail) -> None:
        self.episodes.end(order.group)
        self.teller.end(order.group, f"failed: {order.reason}")
        self.notice(f"group {order.group} failed: {order.reason}")

    @perform.register
    def _(self, order: Commit) -> None:
        self.accumulate(order.step, [order.group])
        self.samples.mark([order.group], "committed")

    @perform.register
    def _(self, order: Train) -> None:
        self.samples.commit()
        self.teller.batch = order.groups
        self.trainers.send(m.TrainStep(order.step, order.groups))

    @perform.register
    def _(self, order: Publish) -> None:
        self.trainers.send(m.PublishWeights(order.version))

    @perform.register
    def _(self, order: Attest) -> None:
        self.trainers.send(m.PublishWeights(order.version, is_stored=False))

    @perform.register
    def _(self, order: Retire) -> None:
        self.weights.drop(order.version)

    @perform.register
    def _(self, order: ReportStall) -> None:
        step, who = nth(order.step), ", ".join(map(str, order.requests)) or "its rewards"
        self.notice(f"step {step} waits for group {order.group} ({who}) since {order.since_s:.1f} s")

    def _late(self) -> list[str]:
        late = [w.name for i, w in self.fleet.workers.items() if i not in self.fleet.ready]
        return late + self.trainers.late + self.rewarding.late + self.episodes.late

    def _listen(self, timeout_s: float) -> None:
        """Wait for messages, turn them into facts, and look at the deadlines."""
        self._check_stop()
        for worker, message in take(self._told, timeout_s):
            self._hear(worker, message)
        self.samples.commit()  # who follows the store need not wait for a fact
        self._check_silence()
        self.episodes.check_deadlines()

    def _hear(self, worker: Worker | None, message: Any) -> None:
        """What is said by a worker that was replaced or given up is not heard any more."""
        if (judged := self.rewarding.hear(worker, message)) is not None:
            self._tell_scored(judged)
        elif worker in self.trainers.ranks:
            self.trainers.hear(worker, message)
        elif (engine := self.fleet.number_of(worker)) is not None:
            self.episodes.hear_engine(engine, message)
            self.fleet.hear(engine, message)
        else:
            self.episodes.hear(worker, message)

    def _tell_scored(self, facts: Sequence[GroupScored | GroupUnscorable]) -> None:
        for fact in facts:
            self.facts.append(self.teller.scored(fact, self.rewarding.by_task(fact.group)))

    def _announce(self, version: int, digest: str) -> None:
        if self._past is not None:
            self._past.check_published(version, digest, self.plan)
        self.fleet.announce(version, digest)

    def _tell_again(self) -> None:
        """Another storage is there, and has nothing."""
        self.trainers.refill()  # first, for what stations find there they would fill
        self._feed.begin_again()
        self.samples.follow(self._feed)
        self.rewarding.ask_again()

    def _check_silence(self) -> None:
        """Who gave no sign of life for too long is lost; time we slept ourselves is no silence."""
        now_s = time.monotonic()
        asleep_s = max(0.0, now_s - self._checked_s - 1.0)
        self._checked_s = now_s
        self.fleet.check_silence(asleep_s)
        self._elastic.look()
        if self.storage is not None and self.storage.is_new(asleep_s=asleep_s):
            self._tell_again()
        self.patience.check(asleep_s)
        self._tell_scored(self.rewarding.check_deadlines(asleep_s))
        self.trainers.check(asleep_s)
