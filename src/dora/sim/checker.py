"""C1, C2 and C3, watched from outside the core.

The checker keeps its own small ledger from the facts and orders alone and shares no code with
the rules it checks; the first broken guarantee raises Violation. What concerns engines is in
`seats.py`, what concerns groups, versions and steps is here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

from dora.core.actions import (
    Abort,
    Action,
    Admit,
    Attest,
    BeginEvaluation,
    Commit,
    Dismiss,
    Drop,
    EndEvaluation,
    Fail,
    Filter,
    Generate,
    Load,
    Migrate,
    Pause,
    Publish,
    RefuseDrain,
    Resume,
    Retire,
    Rush,
    Score,
    Skip,
    SkipEvaluation,
    Stop,
    Train,
)
from dora.core.events import (
    DrainAsked,
    EngineJoined,
    EngineLeft,
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    Paused,
    Progressed,
    Published,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
    StepFailed,
    Trained,
    TrainerLost,
    TrainerReplaced,
)
from dora.core.records import GroupId, Limits, RequestId
from dora.sim import admissions
from dora.sim.ages import Ages
from dora.sim.engines import Violation
from dora.sim.held_out import HeldOut
from dora.sim.loads import Loads
from dora.sim.renewals import Renewals
from dora.sim.seats import Seats, require
from dora.sim.steps import Steps

__all__ = ["Ledger", "Violation"]


class Ledger:
    """What the checker has seen."""

    def __init__(self, limits: Limits) -> None:
        self.limits = limits
        self.seats = Seats()
        self.ages = Ages(limits)
        self.loads = Loads(limits, self.seats)
        self.held_out = HeldOut(limits)
        self.version_of: dict[GroupId, int] = {}
        self.deadline_of: dict[GroupId, int] = {}
        self.end_of: dict[GroupId, str] = {}
        self.finished: dict[RequestId, int] = {}
        self.unfinished: dict[GroupId, int] = {}  # siblings without their last token
        self.scored: set[GroupId] = set()
        self.pins: Counter[int] = Counter()  # version -> unfinished requests
        self.open: Counter[int] = Counter()  # deadline -> admitted, not committed or ended
        self.live: Counter[int] = Counter()  # version -> groups admitted, not filtered or failed
        self.store: set[int] = set()
        self.renewals = Renewals(limits, self.seats, self.pins)
        self.next_index = 0
        self.next_step = 0  # n
        self.num_committed = 0  # c
        self.steps = Steps()
        self.redo_until = 0  # version that is published again before anything is admitted
        self.max_seen_staleness = 0

    def hear(self, event: Event) -> None:
        """Take note of a fact, before the core hears it."""
        self.seats.begin(event)
        self.held_out.begin_fact()
        if (note := _FACTS.get(type(event))) is not None:
            note(self, event)
        self.renewals.catch_up(self.store)

    def obey(self, order: Action) -> None:
        """Check an order, before a station hears it."""
        if (check := _ORDERS.get(type(order))) is not None:
            check(self, order)

    def check_idleness(self) -> None:
        """Nothing stands still that could go on; costs a look at all requests."""
        self.seats.check_idleness(self.pins)

    def close(self) -> None:
        """At the end of a whole run every admitted group has an end, and every step was trained."""
        left = self.version_of.keys() - self.end_of.keys()
        require(not left, f"C2: {sorted(left)[:3]} were admitted and have no end")
        self.steps.end(self.limits.num_steps)

    # facts

    def _joined(self, fact: EngineJoined) -> None:
        self.seats.join(fact)
        self.held_out.joined(sum(engine.num_rows for engine in self.seats.engines.values()))

    def _finish(self, fact: RequestFinished) -> None:
        request, version = fact.request, fact.version
        given_up = request in self.seats.aborting
        self.seats.free(fact.engine, request)
        if self.limits.breaks_c1 and not request.is_held_out:
            version = self.renewals.first_version(fact, self.version_of[request.group])
        elif any(chunk.version != version for chunk in fact.chunks):
            raise Violation(f"C1: {request} mixes versions: {fact.chunks}")
        if request.is_held_out:
            self._end_held_out(request, version, is_failed=False)
        elif not given_up:
            self.finished[request] = version
            self.unfinished[request.group] -= 1
            self.renewals.end(request, version)

    def _fail_request(self, fact: RequestFailed) -> None:
        self.seats.free(fact.engine, fact.request)
        if fact.request.is_held_out:
            self._end_held_out(fact.request, -1 - fact.request.epoch, is_failed=True)

    def _end_held_out(self, request: RequestId, version: int, *, is_failed: bool) -> None:
        require(version == self.held_out.version, f"C1: {request} was generated on version {version}")
        self.held_out.end(request, is_failed=is_failed)
        self.pins[version] -= 1

    def _aborted(self, fact: RequestsAborted) -> None:
        for request in fact.requests:
            require(request in self.seats.aborting, f"{request} was given up unasked")
            self.seats.free(fact.engine, request)

    def _judge(self, fact: GroupScored | GroupUnscorable) -> None:
        if fact.group.is_held_out:
            self.held_out.judge(fact.group)
        elif isinstance(fact, GroupScored):
            self.scored.add(fact.group)

    def _loaded(self, fact: Loaded) -> None:
        self.seats.loaded(fact)
        self.renewals.loaded(fact)

    def _published(self, fact: Published) -> None:
        self.store.add(fact.version)
        self.steps.published(fact)
        self.loads.published(fact)
        self.held_out.published(fact.version)

    def _trained(self, fact: Trained) -> None:
        """Of one that is redone nothing new is learnt."""
        is_redo = self.steps.is_redo
        if (order := self.steps.trained()) is not None and not is_redo:
            self.ages.hear(fact, fact.step - min(self.version_of[group] for group in order.groups))
            self.loads.trained(fact)

    def _resumed(self, fact: Resumed) -> None:
        """Steps after the checkpoint are trained again, with the groups that ended in them."""
        self.seats.lose_all()
        self.loads.resumed(fact)
        self.redo_until = max({self.redo_until, *self.store})
        self.store = {version for version, _ in fact.kept}
        self.steps.resumed(fact.from_step)

    # orders

    def _admit(self, order: Admit) -> None:
        group, version, limits = order.group, order.version, self.limits
        require(group not in self.version_of, f"C2: {group} admitted twice")
        require(order.index == self.next_index, f"C2: dataset gap before {group}")
        require(
            self.redo_until in {0, *self.store} or max(self.store) > self.redo_until, f"{group} in a redo"
        )
        require(self.seats.copies[version] > 0, f"{group} at a version nobody holds")
        self.version_of[group], self.next_index = version, order.index + 1
        self.unfinished[group] = limits.group_size
        self.pins[version] += limits.group_size
        siblings = (RequestId(*group, k) for k in range(limits.group_size))
        self.renewals.admitted(siblings, version, self.store)
        deadline = self.deadline(version)
        require(order.deadline == deadline, f"C3: {group} gets deadline {order.deadline}, not {deadline}")
        self.deadline_of[group] = deadline
        self.open[deadline] += 1
        self.live[version] += 1
        self._check_bound(f"admitting {group} at version {version}")
        admissions.check(self, group, version)

    def _generate(self, order: Generate) -> None:
        versions = []
        for request in order.requests:
            group = request.group
            if request.is_held_out:
                versions.append(self._generate_held_out(request))
                continue
            if request in self.finished or group in self.end_of:
                raise Violation(f"{request} is generated after its end")
            versions.append(self.renewals.version_of(request, self.version_of[group]))
        self.seats.generate(order, versions)

    def _generate_held_out(self, request: RequestId) -> int:
        is_new = request not in self.held_out.running
        version = self.held_out.generate(request, is_over=self.next_step == self.limits.num_steps)
        self.pins[version] += is_new
        return version

    def _score(self, order: Score) -> None:
        if order.group.is_held_out:
            return self.held_out.score(order.group)
        require(not self.unfinished[order.group], f"C2: {order.group} is scored before it is whole")

    def _end_untrained(self, order: Filter | Fail) -> None:
        group = order.group
        self._end(group, type(order).__name__)
        version = self.version_of[group]
        self.live[version] -= 1
        del self.unfinished[group]
        for request in (RequestId(*group, k) for k in range(self.limits.group_size)):
            if request not in self.finished:
                self.renewals.end(request, version)

    def _commit(self, order: Commit) -> None:
        group = order.group
        require(group in self.scored, f"C2: {group} is committed without rewards")
        require(order.step == self.next_step, f"{group} is committed to step {order.step}, not the next")
        self._end(group, f"step {order.step}")
        self.num_committed += 1
        if self.num_committed == self.limits.batch_size:
            self.next_step, self.num_committed = self.next_step + 1, 0
        self._check_bound(f"committing {group}")

    def _end(self, group: GroupId, how: str) -> None:
        if group not in self.version_of or group in self.end_of:
            raise Violation(
                f"C2: {group} ends {how}; before, it was {self.end_of.get(group, 'not admitted')}"
            )
        self.end_of[group] = how
        self.open[self.deadline_of[group]] -= 1

    def _train(self, order: Train) -> None:
        step, groups = order.step, order.groups
        self.steps.train(order)
        self.seats.check_device()
        require(len(set(groups)) == self.limits.batch_size, f"C2: batch {step} has {len(groups)} groups")
        for group in groups:
            require(self.end_of.get(group) == f"step {step}", f"C2: {group} trained uncommitted")
            versions = {self.finished.get(RequestId(*group, k)) for k in range(self.limits.group_size)}
            if self.limits.breaks_c1:
                self.renewals.check_group(group, versions, self.version_of[group], step)
            else:
                require(versions == {self.version_of[group]}, f"C1: {group} has versions {versions}")
            staleness = step - self.version_of[group]
            require(0 <= staleness <= self.limits.max_staleness, f"C3: {group} has staleness {staleness}")
            require(step <= self.deadline_of[group], f"C3: {group} is trained after its deadline")
            self.max_seen_staleness = max(self.max_seen_staleness, staleness)

    def _migrate(self, order: Migrate) -> None:
        require(not self.limits.is_static, f"{order.request} is moved, and is_static = true")
        self.seats.migrate(order)

    def _drop(self, order: Drop) -> None:
        self.seats.drop(order, self.pins[order.version] > 0)

    def _load(self, order: Load) -> None:
        require(order.version in self.store, f"version {order.version} is loaded but not stored")
        self.loads.load(order)
        self.seats.load(order, order.version == self.held_out.version)

    def _skip(self, order: Skip) -> None:
        """Only while a group may still be begun with what the engine stays with."""
        deadline = self.deadline(self.loads.skip(order))
        require(deadline > self.next_step, f"engine {order.engine} stays with a version that expires")
        self.open[deadline] += 1
        self._check_bound(f"{order}")
        self.open[deadline] -= 1

    def _retire(self, order: Retire) -> None:
        version = order.version
        require(not self.pins[version], f"version {version} is retired under {self.pins[version]} requests")
        require(version != self.held_out.version, f"version {version} is retired under its evaluation")
        loading = [e.id for e in self.seats.engines.values() if e.loading == version]
        require(not loading, f"version {version} is retired while engines {loading} load it")
        self.store.discard(version)

    def _resume(self, order: Resume) -> None:
        require(self.steps.training is None, f"engine {order.engine} is resumed during a step")
        self.seats.resume(order.engine)

    def _rush(self, order: Rush) -> None:
        require(self.limits.rush or not order.requests, "a rush is ordered, and rush = false")
        self.seats.rush(order)

    def _stop(self, order: Stop) -> None:
        self.steps.end(self.limits.num_steps)
        require(self.limits.num_steps in self.store, "the run stops before its last version is published")
        require(self.held_out.version is None, "the run stops under an evaluation")

    def deadline(self, version: int) -> int:
        """Last step that may train what is admitted at `version` now."""
        return min(version + self.ages.staleness, self.limits.num_steps - 1)

    def _check_bound(self, doing: str) -> None:
        """C3 beforehand: every open group still has a place by its deadline."""
        num_before = 0
        for deadline, count in sorted(self.open.items()):
            num_before += count
            places = self.limits.batch_size * (deadline - self.next_step + 1) - self.num_committed
            if count and num_before > max(0, places):
                raise Violation(f"C3: {doing} leaves {num_before} groups {places} places by step {deadline}")


Note = Callable[[Ledger, Any], None]
_FACTS: dict[type, Note] = {
    EngineJoined: Ledger._joined,
    EngineLost: lambda ledger, fact: ledger.seats.lose(fact),
    EngineLeft: lambda ledger, fact: ledger.seats.leave(fact),
    DrainAsked: lambda ledger, fact: ledger.seats.ask_drain(fact.engine, True),
    Paused: lambda ledger, fact: ledger.seats.paused(fact.engine),
    Progressed: lambda ledger, fact: ledger.seats.progress(fact),
    RequestFinished: Ledger._finish,
    RequestFailed: Ledger._fail_request,
    RequestsAborted: Ledger._aborted,
    Migrated: lambda ledger, fact: ledger.seats.move(fact),
    MigrationFailed: lambda ledger, fact: ledger.seats.stay(fact),
    GroupScored: Ledger._judge,
    GroupUnscorable: Ledger._judge,
    Trained: Ledger._trained,
    StepFailed: lambda ledger, fact: ledger.steps.has_failed(),
    TrainerLost: lambda ledger, fact: ledger.steps.lost(),
    TrainerReplaced: lambda ledger, fact: ledger.steps.replaced(fact),
    Resumed: Ledger._resumed,
    Published: Ledger._published,
    Loaded: Ledger._loaded,
    LoadFailed: lambda ledger, fact: ledger.seats.load_failed(fact),
}
_ORDERS: dict[type, Note] = {
    Admit: Ledger._admit,
    Generate: Ledger._generate,
    Abort: lambda ledger, order: ledger.seats.abort(order),
    Migrate: Ledger._migrate,
    Rush: Ledger._rush,
    Pause: lambda ledger, order: ledger.seats.pause(order.engine),
    Resume: Ledger._resume,
    Dismiss: lambda ledger, order: ledger.seats.dismiss(order.engine),
    RefuseDrain: lambda ledger, order: ledger.seats.ask_drain(order.engine, False),
    Score: Ledger._score,
    Filter: Ledger._end_untrained,
    Fail: Ledger._end_untrained,
    Commit: Ledger._commit,
    Train: Ledger._train,
    Publish: lambda ledger, order: ledger.steps.publish(order),
    Attest: lambda ledger, order: ledger.steps.attest(order),
    Drop: Ledger._drop,
    Load: Ledger._load,
    Skip: Ledger._skip,
    Retire: Ledger._retire,
    BeginEvaluation: lambda ledger, order: ledger.held_out.begin(order),
    SkipEvaluation: lambda ledger, order: ledger.held_out.skip(order),
    EndEvaluation: lambda ledger, order: ledger.held_out.finish(order),
    Stop: Ledger._stop,
}
