"""Fake workers of a run: actions become pending events, which a test delivers when it likes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import Any, TypeVar

from tests.core.midrun import checker_of

from dora.core import invariants
from dora.core.actions import (
    Abort,
    Action,
    DecodeOnly,
    FetchPrompts,
    Generate,
    Load,
    Migrate,
    PauseEngine,
    Publish,
    RemoveEngine,
    ReportDigest,
    ResumeEngine,
    Score,
    Train,
)
from dora.core.events import (
    DigestReported,
    EngineJoined,
    EngineLost,
    EnginePaused,
    EngineRemoved,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    ProgressReported,
    PromptsFetched,
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
from dora.core.orchestrator import Orchestrator
from dora.core.state import State
from dora.core.types import BatchMember, Chunk, GroupId, Limits, RequestId
from dora.sim.checker import Checker

ActionT = TypeVar("ActionT", bound=Action)


def limits(**changes: Any) -> Limits:
    """Four steps of two groups with one sibling each, on-policy, except for `changes`."""
    settings: dict[str, Any] = {"num_steps": 4, "batch_size": 2, "group_size": 1, "max_staleness": 0}
    return Limits(**(settings | changes))


def finished(
    engine: int, request: RequestId, version: int, num_tokens: int = 3, digest: str = ""
) -> RequestFinished:
    chunks = (Chunk(version, digest or f"v{version}", num_tokens),)
    return RequestFinished(engine, request, version, num_tokens, chunks, "stop")


def is_work(event: Event) -> bool:
    """Whether an event ends generation, scoring or training: tests deliver these one by one."""
    return isinstance(event, RequestFinished | GroupScored | Trained)


class FakeWorkers:
    """An orchestrator and its workers; `pending` are the events that may be delivered.

    Invariants and checker run after every event. With a `state`, the run is in progress. Events of a
    migrating request come from its owner; a migration ends before one of its engines is lost; a failure
    replaces the pending success.
    """

    def __init__(self, limits: Limits, num_prompts: int = 1000, state: State | None = None) -> None:
        self.orchestrator = Orchestrator(limits, state)
        self.now = state.now_s if state else 0.0
        self.emitted: list[Action] = []
        self.pending: list[Event] = []
        self.checker = checker_of(state, num_prompts) if state else Checker(limits, num_prompts)
        self.solved_rows: Collection[int] = ()  # all responses to these prompts have the reward 1
        self._limits = limits
        self._num_prompts = num_prompts
        self._next_prompt = state.next_index if state else 0
        self._paused = {e.id for e in self.state.engines.values() if e.is_paused}
        self._decode_only: dict[int, tuple[RequestId, ...]] = {}
        self._batches: list[tuple[BatchMember, ...]] = []  # of each trained step
        self._digests: dict[int, str] = {}  # of each version, as last computed
        self._published: dict[int, str] = {}  # of each version in the weight store
        self._checkpoint = 0  # steps
        if state is None:
            self._execute(self.orchestrator.start(self.now))
        else:
            assert invariants.check(state) == []
            running = [(r, request) for r, request in state.requests.items() if request.engine is not None]
            self.pending += [finished(q.engine or 0, r, q.version) for r, q in running]

    @property
    def state(self) -> State:
        return self.orchestrator.snapshot()

    def _digest_of(self, version: int) -> str:
        return self._published.get(version, f"v{version}")

    def actions(self, kind: type[ActionT]) -> list[ActionT]:
        """All actions of a kind so far."""
        return [action for action in self.emitted if isinstance(action, kind)]

    def deliver(self, event: Event) -> list[Action]:
        """Deliver one event, pending or not; returns the actions that follow."""
        if event in self.pending:
            self.pending.remove(event)
        self._update_pending(event)
        if isinstance(event, Trained) and event.step in self.state.batches:
            self._batches.append(self.state.batch_members(event.step))
        actions = self.orchestrator.handle(event, self.now)
        self.checker.observe(event)  # after the core, which may reject the event
        self._execute(actions)
        assert invariants.check(self.state) == []
        return actions

    def deliverable(self) -> list[Event]:
        """Pending events that may come next: prompts arrive in order, preempted requests do not finish."""
        fetches = [event for event in self.pending if isinstance(event, PromptsFetched)]
        return [event for event in self.pending if event not in fetches[1:] and not self._is_preempted(event)]

    def deliver_all(self, unless: Callable[[Event], bool] = lambda event: False) -> None:
        """Deliver pending events and those that follow, in order, except where `unless` is true."""
        while not self.orchestrator.done and (
            events := [event for event in self.deliverable() if not unless(event)]
        ):
            self.deliver(events[0])

    def join(self, engine: int, rows: int, slots: int, is_colocated: bool = False) -> None:
        self.deliver(EngineJoined(engine, rows, slots, is_colocated))

    def crash(
        self, from_step: int, kept: Collection[int] | None = None, num_steps: int | None = None
    ) -> list[Action]:
        """Crash the run and resume it from the checkpoint of a step, which keeps older versions.

        From then on it has `num_steps`, if that is given.
        """
        state, redone = self.state, tuple(self._batches[from_step:])
        self.pending, self._next_prompt = [], state.next_index
        self._paused, self._decode_only = set(), {}
        del self._batches[from_step:]
        older = tuple((v, digest) for v, digest in state.stored_versions.items() if v < from_step)
        kept_versions = tuple(version for version in older if kept is None or version[0] in kept)
        return self.deliver(Resumed(from_step, kept_versions, redone, num_steps))

    def lose_trainer(self) -> list[Action]:
        return self.deliver(TrainerLost("killed"))

    def replace_trainer(self, from_step: int) -> list[Action]:
        """A new trainer starts from the checkpoint of a step."""
        redone, self._checkpoint = self._batches[from_step:], from_step
        batches = tuple(tuple(member.group for member in batch) for batch in redone)
        return self.deliver(TrainerReplaced(from_step, batches))

    def fail_request(self, request: RequestId) -> list[Action]:
        finish = next(e for e in self.pending if isinstance(e, RequestFinished) and e.request == request)
        self.pending.remove(finish)
        return self.deliver(RequestFailed(finish.engine, request, "refused"))

    def finish_group(self, group: GroupId) -> None:
        """Finish all siblings of a group and score it."""
        self.deliver_all(unless=lambda event: not _concerns(event, group))

    def dataset_rows(self, engine: int) -> list[int]:
        """Dataset rows of the requests that an engine runs."""
        return sorted(request.row for request in self.state.engines[engine].requests)

    def _is_preempted(self, event: Event) -> bool:
        if not isinstance(event, RequestFinished):
            return False
        decoded = self._decode_only.get(event.engine)
        return event.engine in self._paused or (decoded is not None and event.request not in decoded)

    def _update_pending(self, event: Event) -> None:
        """Pending events change with a delivered one."""
        match event:
            case RequestFinished(_, request) | RequestFailed(_, request):
                self._fail_migrations(lambda migrated: migrated.request == request, "it has ended")
            case RequestsAborted(_, requests):
                self._fail_migrations(lambda migrated: migrated.request in requests, "it was aborted")
            case Migrated(request, source, destination):
                self.pending = [_after_migration(e, request, source, destination) for e in self.pending]
            case MigrationFailed(request):
                self._withdraw(lambda e: isinstance(e, Migrated) and e.request == request)
            case LoadFailed(engine):
                self._withdraw(lambda e: isinstance(e, Loaded) and e.engine == engine)
            case StepFailed():
                self._withdraw(lambda e: isinstance(e, Trained))
            case TrainerLost():
                self._withdraw(lambda e: isinstance(e, Trained | Published | DigestReported))
            case EnginePaused(engine):
                self._paused.add(engine)
            case ProgressReported(_, lengths):
                known = dict(lengths)
                for migrated in [e for e in self.pending if isinstance(e, Migrated)]:
                    num_tokens = known.get(migrated.request, migrated.num_tokens)
                    self.pending[self.pending.index(migrated)] = replace(migrated, num_tokens=num_tokens)
            case EngineLost(engine):
                while pending := self._migration_of(engine):
                    ends = (pending.source, pending.destination)
                    self.deliver(MigrationFailed(pending.request, *ends, "an engine was lost"))
                self._withdraw(lambda e: getattr(e, "engine", None) == engine)
            case EngineRemoved(engine):
                self._withdraw(lambda e: getattr(e, "engine", None) == engine)

    def _withdraw(self, is_void: Callable[[Event], bool]) -> None:
        self.pending = [event for event in self.pending if not is_void(event)]

    def _migration_of(self, engine: int) -> Migrated | MigrationFailed | None:
        """The pending end of a migration from or to this engine."""
        ends = (event for event in self.pending if isinstance(event, Migrated | MigrationFailed))
        return next((end for end in ends if engine in (end.source, end.destination)), None)

    def _fail_migrations(self, is_over: Callable[[Migrated], bool], reason: str) -> None:
        self.pending = [
            MigrationFailed(e.request, e.source, e.destination, reason)
            if isinstance(e, Migrated) and is_over(e)
            else e
            for e in self.pending
        ]

    def _execute(self, actions: list[Action]) -> None:
        for action in actions:
            self.checker.check(action)
            self.emitted.append(action)
            match action:
                case Abort(_, requests):
                    aborted = [
                        e for e in self.pending if isinstance(e, RequestFinished) and e.request in requests
                    ]
                    self.pending = [e for e in self.pending if e not in aborted]
                case ResumeEngine(engine):
                    self._paused.discard(engine)
                case DecodeOnly(engine, ()):
                    self._decode_only.pop(engine, None)
                case DecodeOnly(engine, requests):
                    self._decode_only[engine] = requests
            self.pending += self._outcome(action)

    def _outcome(self, action: Action) -> list[Event]:
        """The events that report a successful action."""
        match action:
            case FetchPrompts(count):
                first, self._next_prompt = self._next_prompt, self._next_prompt + count
                ids = (GroupId(*divmod(index, self._num_prompts)) for index in range(first, first + count))
                return [PromptsFetched(first, tuple(ids))]
            case Generate(engine, version, requests):
                digest = self._digest_of(version)
                return [finished(engine, request, version, digest=digest) for request in requests]
            case Migrate(request, source, destination):
                num_tokens = self.state.requests[request].num_tokens
                return [Migrated(request, source, destination, num_tokens, 0, 0.0, 0.0)]
            case Abort(engine, requests):
                return [RequestsAborted(engine, requests, 0)]
            case PauseEngine(engine):
                return [EnginePaused(engine)]
            case RemoveEngine(engine):
                return [EngineRemoved(engine)]
            case Score(group):
                rule = self._limits.evaluation
                size = rule.num_answers if group.is_held_out and rule else self._limits.group_size
                rewards = [1.0] * size if group.row in self.solved_rows else map(float, range(size))
                return [GroupScored(group, tuple(rewards))]
            case Train(step):
                return [Trained(step)]
            case Publish(version):
                self._published[version] = self._digests.setdefault(version, f"v{version}")
                return [Published(version, self._published[version])]
            case ReportDigest(version):
                if version > self._checkpoint:
                    self._digests[version] = f"v{version} again"
                return [DigestReported(version, self._digests.get(version, f"v{version}"))]
            case Load(engine, version):
                return [Loaded(engine, version, self._digest_of(version))]
            case _:
                return []


def _after_migration(event: Event, request: RequestId, source: int, destination: int) -> Event:
    """A pending event of a migrated request comes from its destination."""
    match event:
        case RequestFinished(engine, of) if of == request and engine == source:
            return replace(event, engine=destination)
        case RequestsAborted(engine, requests) if engine == source:
            return replace(event, requests=tuple(r for r in requests if r != request))
        case _:
            return event


def _concerns(event: Event, group: GroupId) -> bool:
    match event:
        case RequestFinished(_, request):
            return request.group == group
        case GroupScored(of):
            return of == group
        case _:
            return False


def run_in_step(num_steps: int) -> FakeWorkers:
    """`num_steps` are trained, and the next one is running; two engines of four rows, two groups of two
    siblings per batch.
    """
    run = FakeWorkers(limits(num_steps=9, group_size=2, max_staleness=2))
    for engine in (0, 1):
        run.join(engine, rows=4, slots=3)
    run.deliver_all(unless=lambda event: isinstance(event, Trained) and event.step == num_steps)
    assert run.state.training_step == num_steps
    return run


def one_engine(
    limits: Limits, *, rows: int, slots: int, num_prompts: int = 1000, is_colocated: bool = False
) -> FakeWorkers:
    """The workers of a run whose engine 0 has joined."""
    run = FakeWorkers(limits, num_prompts)
    run.join(0, rows, slots, is_colocated)
    return run
