"""The spans of a run's requests, groups, migrations, loads and training steps, from its events and actions.

`Timeline.observe` takes the next record and returns the spans that it ends; the open ones are the state of
the run at that moment. The fold accepts records in any order: whether a run was correct is the question of
`dora.audit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Literal, TypeVar

from dora.core import actions, events
from dora.core.actions import Action
from dora.core.events import Event
from dora.core.types import GroupId, RequestId
from dora.journal.reader import JournalLine

CRASHED = "all processes crashed"
Phase = Literal["wait", "train", "publish", "publish again", "lost"]
Outcome = Literal["trained", "filtered", "failed", "pending"]


# --- spans


@dataclass(slots=True, eq=False, kw_only=True)
class Span:
    """A state that lasts from `start_s` to `end_s`, in seconds since the run started."""

    start_s: float
    end_s: float | None = None  # None: it is open
    end: str = ""  # what ended it

    def until(self, now_s: float) -> float:
        return now_s if self.end_s is None else self.end_s

    @property
    def duration_s(self) -> float:
        """0 while it is open."""
        return self.until(self.start_s) - self.start_s


@dataclass(slots=True, eq=False, kw_only=True)
class EngineSpan(Span):
    """An engine from when it joined until it was "lost" or "removed", or the run "crashed"."""

    joined: events.EngineJoined
    ordinal: int  # of all engines that joined, from 0
    attempt: int  # of the run, from 0: a resume starts the next one
    reason: str = ""  # of its end
    requests: dict[RequestId, RequestSpan] = field(default_factory=dict)
    versions: dict[int, VersionSpan] = field(default_factory=dict)  # that it holds
    loads: dict[int, LoadSpan] = field(default_factory=dict)  # by version
    pause: PauseSpan | None = None
    decode_only: PauseSpan | None = None

    @property
    def engine(self) -> int:
        return self.joined.engine


@dataclass(slots=True, eq=False, kw_only=True)
class RequestSpan(Span):
    """A request on one engine."""

    request: RequestId
    engine: EngineSpan
    version: int  # with which it started there
    updates: list[tuple[float, int]] = field(default_factory=list)  # inflight: (time, newer version)
    num_tokens_before: int = 0  # response tokens with which it arrived
    num_tokens: int = 0  # as last reported
    finished: events.RequestFinished | None = None
    migrated_to: RequestSpan | None = None
    is_uninterrupted: bool = True  # never paused, and never on another engine

    @property
    def num_new_tokens(self) -> int:
        """Tokens that it got on this engine."""
        return self.num_tokens - self.num_tokens_before

    def segments(self, now_s: float) -> list[tuple[float, float, int]]:
        """(start, end, version) of the parts that one version decoded."""
        starts = [(self.start_s, self.version), *self.updates]
        ends = [*(start_s for start_s, _ in self.updates), self.until(now_s)]
        return [(start_s, end_s, version) for (start_s, version), end_s in zip(starts, ends, strict=True)]


@dataclass(slots=True, eq=False, kw_only=True)
class VersionSpan(Span):
    """A version in a slot of an engine."""

    engine: EngineSpan
    version: int


@dataclass(slots=True, eq=False, kw_only=True)
class LoadSpan(Span):
    """An engine loads a version; `loaded` is None while it does, and if it fails."""

    engine: EngineSpan
    version: int
    loaded: events.Loaded | None = None
    num_paused: int = 0  # requests of the engine at its end


@dataclass(slots=True, eq=False, kw_only=True)
class PauseSpan(Span):
    """An engine decodes nothing, because the trainer needs its device, or `requests` alone."""

    engine: EngineSpan
    name: Literal["pausing", "paused", "decode only"]
    requests: tuple[RequestId, ...] = ()


@dataclass(slots=True, eq=False, kw_only=True)
class MigrationSpan(Span):
    """A request moves; `migrated` is None until it has, `failure` says why it has not."""

    action: actions.Migrate
    source: EngineSpan | None
    destination: EngineSpan | None
    migrated: events.Migrated | None = None
    failure: str | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class GroupSpan(Span):
    """A group from its admission to its outcome; a trained one may be trained again after a crash."""

    admitted: actions.Admit
    responses: dict[int, RequestSpan] = field(default_factory=dict)  # finished, by sibling
    rewards: tuple[float, ...] | None = None
    scored_s: float | None = None
    committed_s: float | None = None
    step: int | None = None  # that it is committed to
    train_s: float | None = None  # when this step first started
    outcome: Outcome = "pending"

    @property
    def group(self) -> GroupId:
        return self.admitted.group

    @property
    def num_tokens(self) -> int:
        return sum(response.num_tokens for response in self.responses.values())


@dataclass(slots=True, eq=False, kw_only=True)
class ScoringSpan(Span):
    """A group, or a held-out prompt, at the reward workers."""

    group: GroupId
    rewards: tuple[float, ...] | None = None


@dataclass(slots=True, eq=False, kw_only=True)
class TrainerSpan(Span):
    """A phase of the trainer; it is in one at a time. `number` is that of a step or version."""

    phase: Phase
    number: int
    groups: tuple[GroupId, ...] = ()  # the batch of "train"
    batch: tuple[GroupSpan, ...] = ()  # those of them that no step has trained before
    result: events.Trained | events.Published | events.DigestReported | None = None
    reason: str = ""  # the trainer was lost


@dataclass(slots=True, eq=False, kw_only=True)
class StoredSpan(Span):
    """A version in the weight store."""

    version: int
    digest: str


@dataclass(slots=True, eq=False, kw_only=True)
class EvaluationSpan(Span):
    """The evaluation of a version."""

    version: int


# --- the fold


class Timeline:
    """The open spans of a run. Its size does not grow with the length of the run."""

    def __init__(self, *, breaks_c1: bool = False) -> None:
        """With `breaks_c1` requests continue with the version that their engine loads."""
        self.now_s = 0.0
        self.attempt = 0  # of the run, from 0
        self.engines: dict[int, EngineSpan] = {}
        self.requests: dict[RequestId, RequestSpan] = {}
        self.migrations: dict[RequestId, MigrationSpan] = {}
        self.groups: dict[GroupId, GroupSpan] = {}
        self.scoring: dict[GroupId, ScoringSpan] = {}
        self.stored: dict[int, StoredSpan] = {}
        self.evaluation: EvaluationSpan | None = None
        self.trainer: TrainerSpan | None = None
        self.num_trained = 0  # steps, without those that are redone
        self.num_committed = 0  # groups
        self._breaks_c1 = breaks_c1
        self._num_engines = 0  # that ever joined
        self._ended: list[Span] = []

    def observe(self, t_s: float, record: Event | Action) -> list[Span]:
        """Follow an event or action; returns the spans that it ends."""
        self.now_s = t_s
        self._ended = ended = list[Span]()
        if (handler := _HANDLERS.get(type(record))) is not None:
            handler(self, record)
        return ended

    def open_spans(self) -> Iterable[Span]:
        """The spans that have not ended."""
        for engine in self.engines.values():
            yield engine
            yield from chain(engine.requests.values(), engine.versions.values(), engine.loads.values())
            yield from filter(None, (engine.pause, engine.decode_only))
        yield from chain(self.migrations.values(), self.groups.values(), self.scoring.values())
        yield from self.stored.values()
        yield from filter(None, (self.evaluation, self.trainer))

    def _end(self, span: Span | None, end: str = "") -> None:
        if span is not None:
            span.end_s, span.end = self.now_s, end
            self._ended.append(span)

    # Engines

    def _on_joined(self, event: events.EngineJoined) -> None:
        self._close_engine(event.engine, "lost", "joined again", "engine joined again")
        self.engines[event.engine] = EngineSpan(
            start_s=self.now_s, joined=event, ordinal=self._num_engines, attempt=self.attempt
        )
        self._num_engines += 1

    def _on_lost(self, event: events.EngineLost) -> None:
        self._close_engine(event.engine, "lost", event.reason, f"engine lost: {event.reason}")

    def _on_removed(self, event: events.EngineRemoved) -> None:
        self._close_engine(event.engine, "removed", "", "engine removed")

    def _close_engine(self, number: int, end: str, reason: str, end_of_parts: str) -> None:
        engine = self.engines.pop(number, None)
        if engine is None:
            return
        for request, migration in [*self.migrations.items()]:
            if migration.source is engine:
                self._end(self.migrations.pop(request), end_of_parts)
        for request, span in engine.requests.items():
            del self.requests[request]
            self._end(span, end_of_parts)
        for part in (*engine.versions.values(), *engine.loads.values(), engine.pause, engine.decode_only):
            self._end(part, end_of_parts)
        for parts in (engine.requests, engine.versions, engine.loads):
            parts.clear()
        engine.reason = reason
        self._end(engine, end)

    def _load(self, action: actions.Load) -> None:
        if (engine := self.engines.get(action.engine)) is not None:
            engine.loads[action.version] = LoadSpan(start_s=self.now_s, engine=engine, version=action.version)

    def _on_loaded(self, event: events.Loaded) -> None:
        engine, version = self.engines.get(event.engine), event.version
        if engine is None:
            return
        if (load := engine.loads.pop(version, None)) is not None:
            load.loaded, load.num_paused = event, len(engine.requests)
            self._end(load)
        self._end(engine.versions.get(version), "loaded again")
        engine.versions[version] = VersionSpan(start_s=self.now_s, engine=engine, version=version)
        if self._breaks_c1:
            for request, span in engine.requests.items():
                before = span.updates[-1][1] if span.updates else span.version
                if before < version and not request.is_held_out:
                    span.updates.append((self.now_s, version))

    def _on_load_failed(self, event: events.LoadFailed) -> None:
        if (engine := self.engines.get(event.engine)) is not None:
            self._end(engine.loads.pop(event.version, None), f"failed: {event.reason}")

    def _drop(self, action: actions.Drop) -> None:
        if (engine := self.engines.get(action.engine)) is not None:
            self._end(engine.versions.pop(action.version, None))

    def _pause(self, record: actions.PauseEngine | events.EnginePaused) -> None:
        if (engine := self.engines.get(record.engine)) is not None:
            self._end(engine.pause)
            name: Any = "pausing" if isinstance(record, actions.PauseEngine) else "paused"
            engine.pause = PauseSpan(start_s=self.now_s, engine=engine, name=name)

    def _resume_engine(self, action: actions.ResumeEngine) -> None:
        if (engine := self.engines.get(action.engine)) is not None:
            self._end(engine.pause)
            engine.pause = None

    def _decode_only(self, action: actions.DecodeOnly) -> None:
        if (engine := self.engines.get(action.engine)) is None:
            return
        self._end(engine.decode_only)
        engine.decode_only = None
        if not action.requests:
            return
        engine.decode_only = PauseSpan(
            start_s=self.now_s, engine=engine, name="decode only", requests=action.requests
        )
        named = {*action.requests}
        for request, span in engine.requests.items():
            span.is_uninterrupted &= request in named

    # Requests

    def _generate(self, action: actions.Generate) -> None:
        engine = self.engines.get(action.engine)
        for request in action.requests:
            self._end_request(request, "restarted")
            if engine is not None:
                self._start_request(request, engine, action.version)

    def _start_request(self, request: RequestId, engine: EngineSpan, version: int) -> RequestSpan:
        span = RequestSpan(
            start_s=self.now_s,
            request=request,
            engine=engine,
            version=version,
            is_uninterrupted=engine.decode_only is None,
        )
        self.requests[request] = engine.requests[request] = span
        return span

    def _end_request(self, request: RequestId, end: str) -> RequestSpan | None:
        span = self.requests.pop(request, None)
        if span is not None:
            del span.engine.requests[request]
            self._end(span, end)
        return span

    def _on_progress(self, event: events.ProgressReported) -> None:
        for request, num_tokens in event.lengths:
            if (span := self.requests.get(request)) is not None:
                span.num_tokens = num_tokens

    def _on_finished(self, event: events.RequestFinished) -> None:
        span = self._end_request(event.request, event.finish_reason)
        if span is not None:
            span.finished, span.num_tokens = event, event.num_tokens
            if (group := self.groups.get(event.request.group)) is not None:
                group.responses[event.request.sibling] = span

    def _on_failed(self, event: events.RequestFailed) -> None:
        how = "rejected" if event.cause == "engine" else "failed"
        self._end_request(event.request, f"{how}: {event.reason}")

    def _on_aborted(self, event: events.RequestsAborted) -> None:
        for request in event.requests:
            self._end_request(request, "aborted")

    def _migrate(self, action: actions.Migrate) -> None:
        self._end(self.migrations.get(action.request), "started again")
        self.migrations[action.request] = MigrationSpan(
            start_s=self.now_s,
            action=action,
            source=self.engines.get(action.source),
            destination=self.engines.get(action.destination),
        )

    def _on_migrated(self, event: events.Migrated) -> None:
        if (migration := self.migrations.pop(event.request, None)) is not None:
            migration.migrated = event
            self._end(migration)
        destination = self.engines.get(event.destination)
        before = self._end_request(event.request, f"migrated to engine {event.destination}")
        if before is None or destination is None:
            return
        before.num_tokens, before.is_uninterrupted = event.num_tokens, False
        version = before.updates[-1][1] if before.updates else before.version
        after = before.migrated_to = self._start_request(event.request, destination, version)
        after.num_tokens_before = after.num_tokens = event.num_tokens
        after.is_uninterrupted = False

    def _on_migration_failed(self, event: events.MigrationFailed) -> None:
        if (migration := self.migrations.pop(event.request, None)) is not None:
            migration.failure = event.reason
            self._end(migration, f"failed: {event.reason}")

    # Groups

    def _admit(self, action: actions.Admit) -> None:
        self._end(self.groups.get(action.group), "admitted again")
        self.groups[action.group] = GroupSpan(start_s=self.now_s, admitted=action)

    def _score(self, action: actions.Score) -> None:
        self._end(self.scoring.get(action.group), "requested again")
        self.scoring[action.group] = ScoringSpan(start_s=self.now_s, group=action.group)

    def _on_scored(self, event: events.GroupScored) -> None:
        if (scoring := self.scoring.pop(event.group, None)) is not None:
            scoring.rewards = event.rewards
            self._end(scoring)
        if (group := self.groups.get(event.group)) is not None:
            group.rewards, group.scored_s = event.rewards, self.now_s

    def _on_scoring_failed(self, event: events.ScoringFailed) -> None:
        self._end(self.scoring.pop(event.group, None), f"failed: {event.reason}")

    def _commit(self, action: actions.Commit) -> None:
        self.num_committed += 1
        if (group := self.groups.get(action.group)) is not None:
            group.committed_s, group.step = self.now_s, action.step

    def _end_untrained(self, action: actions.Filter | actions.Fail) -> None:
        if (group := self.groups.pop(action.group, None)) is not None:
            group.outcome = "filtered" if isinstance(action, actions.Filter) else "failed"
            self._end(group, action.reason)

    # The trainer

    def _enter(self, phase: Phase, number: int) -> TrainerSpan:
        """The trainer starts another phase."""
        self._end_phase()
        self.trainer = TrainerSpan(start_s=self.now_s, phase=phase, number=number)
        return self.trainer

    def _end_phase(self, end: str = "") -> TrainerSpan | None:
        phase, self.trainer = self.trainer, None
        self._end(phase, end)
        return phase

    def _train(self, action: actions.Train) -> None:
        span = self._enter("train", action.step)
        span.groups = action.groups
        known = (self.groups[group] for group in action.groups if group in self.groups)
        span.batch = tuple(group for group in known if group.train_s is None)
        for group in span.batch:
            group.train_s = self.now_s

    def _on_trained(self, event: events.Trained) -> None:
        self.num_trained = event.step + 1
        if (phase := self._end_phase()) is None or phase.phase != "train":
            return
        phase.result = event
        for group in phase.groups:
            if (trained := self.groups.pop(group, None)) is not None:
                trained.outcome = "trained"
                self._end(trained)

    def _on_step_failed(self, event: events.StepFailed) -> None:
        self._end_phase(f"failed: {event.reason}")
        self._enter("wait", event.step)

    def _publish(self, action: actions.Publish | actions.ReportDigest) -> None:
        is_new = isinstance(action, actions.Publish)
        self._enter("publish" if is_new else "publish again", action.version)

    def _on_published(self, event: events.Published | events.DigestReported) -> None:
        if (phase := self._end_phase()) is not None:
            phase.result = event
        self._enter("wait", event.version)
        if isinstance(event, events.Published):
            self._end(self.stored.get(event.version), "published again")
            self.stored[event.version] = StoredSpan(
                start_s=self.now_s, version=event.version, digest=event.digest
            )

    def _retire(self, action: actions.Retire) -> None:
        self._end(self.stored.pop(action.version, None))

    def _on_trainer_lost(self, event: events.TrainerLost) -> None:
        number = 0 if self.trainer is None else self.trainer.number
        self._enter("lost", number).reason = event.reason

    def _on_trainer_replaced(self, event: events.TrainerReplaced) -> None:
        self.num_trained = event.from_step

    def _stop(self, action: actions.Stop) -> None:
        self._end_phase("the run has finished")

    # The run

    def _start_evaluation(self, action: actions.StartEvaluation) -> None:
        self._end(self.evaluation, "another started")
        self.evaluation = EvaluationSpan(start_s=self.now_s, version=action.version)

    def _finish_evaluation(self, action: actions.FinishEvaluation) -> None:
        self._end(self.evaluation)
        self.evaluation = None

    def _on_resumed(self, event: events.Resumed) -> None:
        """All processes are new; groups, and the versions that were kept, remain."""
        for engine in [*self.engines]:
            self._close_engine(engine, "crashed", "the run was resumed", f"{CRASHED}; the run was resumed")
        self._end_phase(CRASHED)
        self._enter("wait", event.from_step)
        for scoring in self.scoring.values():
            self._end(scoring, CRASHED)
        self.scoring.clear()
        for version in self.stored.keys() - {version for version, _ in event.kept_versions}:
            self._end(self.stored.pop(version), CRASHED)
        self.num_trained = event.from_step
        self.attempt += 1


_HANDLERS: dict[type, Callable[[Timeline, Any], None]] = {
    events.EngineJoined: Timeline._on_joined,
    events.EngineLost: Timeline._on_lost,
    events.EngineRemoved: Timeline._on_removed,
    events.EnginePaused: Timeline._pause,
    events.ProgressReported: Timeline._on_progress,
    events.RequestFinished: Timeline._on_finished,
    events.RequestFailed: Timeline._on_failed,
    events.RequestsAborted: Timeline._on_aborted,
    events.Migrated: Timeline._on_migrated,
    events.MigrationFailed: Timeline._on_migration_failed,
    events.GroupScored: Timeline._on_scored,
    events.ScoringFailed: Timeline._on_scoring_failed,
    events.Trained: Timeline._on_trained,
    events.StepFailed: Timeline._on_step_failed,
    events.Published: Timeline._on_published,
    events.TrainerLost: Timeline._on_trainer_lost,
    events.TrainerReplaced: Timeline._on_trainer_replaced,
    events.DigestReported: Timeline._on_published,
    events.Loaded: Timeline._on_loaded,
    events.LoadFailed: Timeline._on_load_failed,
    events.Resumed: Timeline._on_resumed,
    actions.Admit: Timeline._admit,
    actions.Generate: Timeline._generate,
    actions.Migrate: Timeline._migrate,
    actions.DecodeOnly: Timeline._decode_only,
    actions.PauseEngine: Timeline._pause,
    actions.ResumeEngine: Timeline._resume_engine,
    actions.Score: Timeline._score,
    actions.Filter: Timeline._end_untrained,
    actions.Fail: Timeline._end_untrained,
    actions.Commit: Timeline._commit,
    actions.Train: Timeline._train,
    actions.Publish: Timeline._publish,
    actions.ReportDigest: Timeline._publish,
    actions.Drop: Timeline._drop,
    actions.Load: Timeline._load,
    actions.Retire: Timeline._retire,
    actions.StartEvaluation: Timeline._start_evaluation,
    actions.FinishEvaluation: Timeline._finish_evaluation,
    actions.Stop: Timeline._stop,
}


# --- finished journals

S = TypeVar("S", bound=Span)


def fold(lines: Iterable[JournalLine], *, breaks_c1: bool = False) -> list[Span]:
    """All spans of a journal: first those that ended, in this order, then the open ones."""
    timeline = Timeline(breaks_c1=breaks_c1)
    spans = [span for line in lines for span in timeline.observe(line.t_s, line.record)]
    return [*spans, *timeline.open_spans()]


def of_kind(spans: Iterable[Span], kind: type[S]) -> list[S]:
    """The spans of one kind, by their start."""
    return sorted((span for span in spans if isinstance(span, kind)), key=lambda span: span.start_s)
