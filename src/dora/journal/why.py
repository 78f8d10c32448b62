"""`dora why`: what happened to one request, from admission to its end, according to the journal."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dora.core.actions import (
    Abort,
    Action,
    Admit,
    Commit,
    DecodeOnly,
    Fail,
    Filter,
    Generate,
    Migrate,
    ReportStall,
    ResumeEngine,
    StartEvaluation,
    Train,
)
from dora.core.events import (
    EngineLost,
    EnginePaused,
    Event,
    GroupScored,
    Migrated,
    MigrationFailed,
    OutputsLost,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
    ScoringFailed,
    StepFailed,
    Trained,
    TrainerReplaced,
)
from dora.core.types import Chunk, GroupId, RequestId
from dora.errors import InputError
from dora.journal.reader import Journal, JournalLine, read_journal
from dora.journal.timeline import GroupSpan, Timeline
from dora.text import plural, step_number

History = list[tuple[float, str]]  # (seconds since the run started, what happened), in order

WAITING_FOR_ROW = "pending: waiting for a free row"


def main(run: Path, name: str) -> None:
    """Print the history of the request `name`, or of each request of the group `name`."""
    journal = read_journal(run)
    requests = _parse_name(journal, run, name)
    histories = request_histories(journal.lines, journal.limits.batch_size, requests)
    for number, (request, history) in enumerate(histories.items()):
        if number:
            print()
        print(f"request {request}")
        for t_s, sentence in history:
            print(f"{t_s:10.3f} s  {sentence}")


def request_histories(
    lines: Iterable[JournalLine], batch_size: int, requests: Iterable[RequestId]
) -> dict[RequestId, History]:
    """What happened to each request; the last sentence of an unfinished one is its status.

    `batch_size` in groups.
    """
    timeline = Timeline()
    readers = {request: _RequestReader(request, batch_size, timeline) for request in requests}
    siblings: dict[GroupId, list[_RequestReader]] = {}
    batches: dict[int, set[_RequestReader]] = {}  # by step
    for request, reader in readers.items():
        siblings.setdefault(request.group, []).append(reader)
    for line in lines:
        concerned = [*_concerned(line.record, timeline, readers, siblings, batches)]
        for reader in concerned:
            reader.describe(line.t_s, line.record)
        timeline.observe(line.t_s, line.record)
        if isinstance(line.record, Admit):
            for reader in concerned:
                reader.group = timeline.groups[line.record.group]
        if isinstance(line.record, Commit):
            batches.setdefault(line.record.step, set()).update(concerned)
    return {request: reader.finish() for request, reader in readers.items()}


def _concerned(
    record: Event | Action,
    timeline: Timeline,
    readers: Mapping[RequestId, _RequestReader],
    siblings: Mapping[GroupId, Sequence[_RequestReader]],
    batches: Mapping[int, Iterable[_RequestReader]],
) -> Iterable[_RequestReader]:
    """The readers that a record may concern; most records name one request or group."""
    match record:
        case RequestFinished() | RequestFailed() | Migrate() | Migrated() | MigrationFailed():
            return [readers[record.request]] if record.request in readers else ()
        case Generate() | Abort() | RequestsAborted() | OutputsLost() | ReportStall():
            return [readers[request] for request in record.requests if request in readers]
        case Admit() | GroupScored() | ScoringFailed() | Filter() | Fail() | Commit():
            return siblings.get(record.group, ())
        case DecodeOnly() | EnginePaused() | ResumeEngine() | EngineLost():
            engine = timeline.engines.get(record.engine)
            running = () if engine is None else engine.requests
            return [readers[request] for request in running if request in readers]
        case Train() | StepFailed() | Trained():
            return batches.get(record.step, ())
        case Resumed() | TrainerReplaced() | StartEvaluation():
            return readers.values()
        case _:
            return ()


def _parse_name(journal: Journal, run: Path, name: str) -> list[RequestId]:
    """The request or the group's requests called `name`. Raises InputError if the run has no such request."""
    try:
        numbers = tuple(map(int, name.split("/")))
    except ValueError:
        numbers = ()
    if len(numbers) not in (2, 3):
        raise InputError(
            f"request {name!r} must read epoch/row/sibling, as in 0/12/3, or epoch/row for a whole group"
        )
    group, size = GroupId(*numbers[:2]), journal.limits.group_size
    if group.is_held_out:
        return _held_out_requests(journal, run, numbers)
    admitted = [line.record.group for line in journal.lines if isinstance(line.record, Admit)]
    if group not in admitted:
        last = f", the last one is {admitted[-1]}" if admitted else ""
        raise InputError(
            f"group {group} was not admitted in {run}, which has {plural(len(admitted), 'group')}{last}"
        )
    if len(numbers) == 2:
        return [RequestId(*group, sibling) for sibling in range(size)]
    if not 0 <= numbers[2] < size:
        raise InputError(f"request {name} does not exist: the siblings of a group are 0 to {size - 1}")
    return [RequestId(*group, numbers[2])]


def _held_out_requests(journal: Journal, run: Path, numbers: Sequence[int]) -> list[RequestId]:
    """Requests of an evaluation; the first number of their name is -1 - version."""
    rule, version = journal.limits.evaluation, -1 - numbers[0]
    evaluated = [line.record.version for line in journal.lines if isinstance(line.record, StartEvaluation)]
    siblings = range(rule.num_answers) if rule and numbers[1] in range(rule.num_prompts) else range(0)
    named = numbers[2:] or siblings
    if version not in evaluated or not named or not {*named} <= {*siblings}:
        name = "/".join(map(str, numbers))
        raise InputError(
            f"no evaluation of version {version} in {run} has the held-out prompt or response {name}"
        )
    return [RequestId(-1 - version, numbers[1], sibling) for sibling in named]


class _RequestReader:
    """Turns journal records into sentences about one request. The timeline is that before the record."""

    def __init__(self, request: RequestId, batch_size: int, timeline: Timeline) -> None:
        self.request, self._batch_size, self._timeline = request, batch_size, timeline
        self.group: GroupSpan | None = None  # once it is admitted
        self._history: History = []
        self._is_evaluated = False  # the evaluation of a held-out request has started
        self._is_finished = self._is_ended = False
        self._is_redone = False  # by a replaced trainer
        self._is_decode_only = False  # its engine decodes only some rows

    def describe(self, t_s: float, record: Event | Action) -> None:
        """Append sentences about a record that may concern the request, its group or its engine."""
        for sentence in (self._describe_generation(record), self._describe_group(record)):
            if sentence is not None:
                self._history.append((t_s, sentence))

    def finish(self) -> History:
        """The whole history; the last sentence of an unfinished request is its status."""
        status = self._status()
        return [*self._history, (self._timeline.now_s, status)] if status else self._history

    def _status(self) -> str:
        step = None if self.group is None else self.group.step
        if self._is_ended or (self.group is None and not self._is_evaluated):
            return ""
        if step is not None:
            return (
                f"pending: step {step_number(step)} is {'redone' if self._is_redone else 'not trained yet'}"
            )
        if self.group is not None and self.group.rewards is not None:
            return "pending: its group is not committed to a batch yet"
        if self._is_finished:
            return "pending: its group is not scored yet"
        running = self._timeline.requests.get(self.request)
        return WAITING_FOR_ROW if running is None else f"pending: on engine {running.engine.engine}"

    @property
    def _version(self) -> int:
        if self.request.is_held_out:
            return -1 - self.request.epoch
        return 0 if self.group is None else self.group.admitted.version

    @property
    def _step(self) -> int | None:
        return None if self.group is None else self.group.step

    def _describe_generation(self, record: Event | Action) -> str | None:
        match record:
            case Generate(engine):
                self._is_decode_only = False
                return f"placed on engine {engine}"
            case Migrate(_, source, destination, _, reason):
                return f"migration from engine {source} to engine {destination} started ({reason})"
            case Migrated():
                return self._describe_migration(record)
            case MigrationFailed(_, source, destination, reason):
                return f"migration to engine {destination} failed ({reason}): stays on engine {source}"
            case DecodeOnly(engine, requests):
                return self._describe_decode_only(engine, self.request in requests, bool(requests))
            case EnginePaused(engine):
                return f"paused: engine {engine} yields its device to the trainer"
            case ResumeEngine(engine):
                return f"resumed on engine {engine}"
            case EngineLost(engine, reason, kept_tokens):
                return f"engine {engine} was lost ({reason}): {self._describe_restart(kept_tokens)}"
            case Resumed() if self.request in self._timeline.requests:
                return f"the run was resumed: {self._describe_restart(record.kept_tokens)}"
            case OutputsLost():
                return "its kept tokens are lost: the request restarts from its prompt"
            case RequestFinished(engine, _, _, num_tokens, chunks, reason):
                self._is_finished = True
                length = plural(num_tokens, "token")
                return f"finished on engine {engine}: {length}, {reason}{self._describe_segments(chunks)}"
            case RequestFailed(engine, _, reason, cause):
                self._is_ended |= self.request.is_held_out
                who = f"rejected by engine {engine}" if cause == "engine" else f"failed on engine {engine}"
                return f"{who}: {reason}"
            case Abort(engine):
                return f"abort requested on engine {engine}: its group has failed"
            case RequestsAborted(engine):
                return f"aborted on engine {engine}"
            case ReportStall(step):
                return f"step {step_number(step)} waits for this request"
            case _:
                return None

    def _describe_group(self, record: Event | Action) -> str | None:
        match record:
            case Admit(_, index, version, deadline):
                filling = step_number(self._timeline.num_committed // self._batch_size)
                return (
                    f"admitted at version {version}, dataset position {index}, deadline step "
                    f"{step_number(deadline)}; the batch of step {filling} was being filled"
                )
            case StartEvaluation(version) if self.request.is_held_out and version == self._version:
                self._is_evaluated = True
                return f"admitted at version {version} for its evaluation: it is not trained on"
            case GroupScored(_, rewards):
                self._is_ended |= self.request.is_held_out
                return f"scored: reward {rewards[self.request.sibling]:g}"
            case ScoringFailed(group, reason) if group.is_held_out:
                return self._end(f"scoring failed: {reason}")
            case Filter(_, reason):
                return self._end(f"its group was filtered: {reason}")
            case Fail(_, reason):
                return self._end(f"its group failed: {reason}")
            case Commit(_, step):
                return f"committed to the batch of step {step_number(step)}, staleness {step - self._version}"
            case _:
                return None if self._step is None else self._describe_step(record, self._step)

    def _describe_step(self, record: Event | Action, own: int) -> str | None:
        number = step_number(own)
        match record:
            case Train(step) if step == own:
                return f"training of step {number} started, staleness {step - self._version}"
            case StepFailed(step, reason) if step == own:
                return f"step {number} failed ({reason}) and changed no weights: it is repeated"
            case Resumed(from_step) if from_step <= own and self._is_ended:
                self._is_ended = self._is_redone = False
                return f"the run was resumed after {plural(from_step, 'step')}: step {number} is redone"
            case TrainerReplaced(from_step, redone) if any(self.request.group in batch for batch in redone):
                self._is_ended, self._is_redone = False, True
                trained = plural(from_step, "step")
                return f"the trainer was lost and resumed after {trained}: step {number} is redone"
            case Trained(step) if step == own:
                return self._end(f"trained in step {number}")
            case _:
                return None

    def _describe_migration(self, event: Migrated) -> str:
        self._is_decode_only = False
        migration = self._timeline.migrations.get(self.request)
        reason = "" if migration is None else migration.action.reason
        kv = f"{event.num_bytes / 1e6:.3f} MB of KV copied in {1e3 * event.copy_s:.1f} ms"
        if event.num_prefilled:
            kv = f"KV of {plural(event.num_prefilled, 'token')} recomputed"
        return (
            f"migrated from engine {event.source} to engine {event.destination} ({reason}) "
            f"with {plural(event.num_tokens, 'token')}: {kv}, paused for {1e3 * event.stop_s:.1f} ms"
        )

    def _describe_restart(self, kept_tokens: Sequence[tuple[RequestId, int]]) -> str:
        num_kept = dict(kept_tokens).get(self.request, 0)
        return (
            f"the request continues after {plural(num_kept, 'token')}" if num_kept else "the request restarts"
        )

    def _describe_decode_only(self, engine: int, is_named: bool, is_decode_only: bool) -> str | None:
        was_decode_only, self._is_decode_only = self._is_decode_only, is_decode_only
        if is_named:
            return f"prioritised on engine {engine}: the trainer waits for its group"
        if is_decode_only:
            return f"paused: engine {engine} decodes only groups that the trainer waits for"
        return f"engine {engine} decodes all its rows again" if was_decode_only else None

    def _describe_segments(self, chunks: Sequence[Chunk]) -> str:
        """The segments of a response, unless its own version sampled every token."""
        if {chunk.version for chunk in chunks} <= {self._version}:
            return ""
        segments = (f"version {chunk.version} ({plural(chunk.num_tokens, 'token')})" for chunk in chunks)
        return f"; sampled by {', then '.join(segments)}"

    def _end(self, sentence: str) -> str:
        self._is_ended = True
        return sentence
