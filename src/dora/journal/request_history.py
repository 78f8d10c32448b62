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
from dora.text import plural, step_number

History = list[tuple[float, str]]  # (seconds since the run started, what happened), in order

WAITING_FOR_ROW = "pending: waiting for a free row"


def main(run: Path, name: str) -> int:
    """Print the history of the request `name`, or of each request of the group `name`."""
    journal = read_journal(run)
    for number, request in enumerate(_parse_name(journal, run, name)):
        if number:
            print()
        print(f"request {request}")
        for t_s, sentence in request_history(journal, request):
            print(f"{t_s:10.3f} s  {sentence}")
    return 0


def request_history(journal: Journal, request: RequestId) -> History:
    """What happened to a request; the last sentence of an unfinished one is its status."""
    return request_histories(journal.lines, journal.limits.batch_size, [request])[request]


def request_histories(
    lines: Iterable[JournalLine], batch_size: int, requests: Iterable[RequestId]
) -> dict[RequestId, History]:
    """The histories of many requests in one pass over the lines; `batch_size` in groups."""
    readers = {request: _RequestReader(request, batch_size) for request in requests}
    siblings: dict[GroupId, list[_RequestReader]] = {}
    for request, reader in readers.items():
        siblings.setdefault(request.group, []).append(reader)
    histories: dict[RequestId, History] = {request: [] for request in readers}
    t_s, num_committed = 0.0, 0
    for t_s, record in ((line.t_s, line.record) for line in lines):
        num_committed += isinstance(record, Commit)
        for reader in _concerned(record, readers, siblings):
            sentences = reader.describe(record, num_committed)
            histories[reader.request].extend(
                (t_s, sentence) for sentence in sentences if sentence is not None
            )
    for request, reader in readers.items():
        if reader.status:
            histories[request].append((t_s, reader.status))
    return histories


def _concerned(
    record: Event | Action,
    readers: Mapping[RequestId, _RequestReader],
    siblings: Mapping[GroupId, Sequence[_RequestReader]],
) -> Iterable[_RequestReader]:
    """The readers that a record may concern; most records name one request or group."""
    match record:
        case RequestFinished() | RequestFailed() | Migrate() | Migrated() | MigrationFailed():
            return [readers[record.request]] if record.request in readers else ()
        case Generate() | Abort() | RequestsAborted() | ReportStall():
            return [readers[request] for request in record.requests if request in readers]
        case Admit() | GroupScored() | ScoringFailed() | Filter() | Fail() | Commit():
            return siblings.get(record.group, ())
        case (
            DecodeOnly() | EnginePaused() | ResumeEngine() | EngineLost() | Train() | StepFailed() | Trained()
        ):
            return [reader for reader in readers.values() if reader.status]  # the unfinished ones
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
    """Turns journal records into sentences about one request."""

    def __init__(self, request: RequestId, batch_size: int) -> None:
        self.request, self._group, self._batch_size = request, request.group, batch_size
        self.status = ""  # of an unfinished request; empty before admission and after the end
        self._num_committed = 0  # groups so far
        self._version = 0
        self._engine: int | None = None  # that decodes the request
        self._step: int | None = None  # that its group is committed to
        self._migration_reason = ""
        self._is_decode_only = False  # its engine decodes only some rows

    def describe(self, record: Event | Action, num_committed: int) -> list[str | None]:
        """Sentences about a record; None where it does not concern the request or its group."""
        self._num_committed = num_committed
        return [self._describe_generation(record), self._describe_group(record)]

    def _describe_generation(self, record: Event | Action) -> str | None:
        request = self.request
        match record:
            case Generate(engine, _, requests) if request in requests:
                self._engine, self.status = engine, f"pending: on engine {engine}"
                return f"placed on engine {engine}"
            case Migrate(migrating, source, destination, _, reason) if migrating == request:
                self._migration_reason = reason
                return f"migration from engine {source} to engine {destination} started ({reason})"
            case Migrated() if record.request == request:
                return self._describe_migration(record)
            case MigrationFailed(migrating, source, destination, reason) if migrating == request:
                return f"migration to engine {destination} failed ({reason}): stays on engine {source}"
            case DecodeOnly(engine, requests) if self._engine is not None and engine == self._engine:
                return self._describe_decode_only(engine, request in requests, bool(requests))
            case EnginePaused(engine) if self._engine is not None and engine == self._engine:
                return f"paused: engine {engine} yields its device to the trainer"
            case ResumeEngine(engine) if self._engine is not None and engine == self._engine:
                return f"resumed on engine {engine}"
            case EngineLost(engine, reason) if self._engine is not None and engine == self._engine:
                self._engine, self.status = None, WAITING_FOR_ROW
                return f"engine {engine} was lost ({reason}): the request restarts"
            case Resumed() if self._engine is not None:
                self._engine, self.status = None, WAITING_FOR_ROW
                return "the run was resumed: the request restarts"
            case RequestFinished(engine, finished, _, num_tokens, chunks, reason) if finished == request:
                self._engine, self.status = None, "pending: its group is not scored yet"
                length = plural(num_tokens, "token")
                return f"finished on engine {engine}: {length}, {reason}{self._describe_segments(chunks)}"
            case RequestFailed(engine, failed, reason) if failed == request:
                self._engine = None
                self.status = "" if request.is_held_out else self.status
                return f"rejected by engine {engine}: {reason}"
            case Abort(engine, requests) if request in requests:
                return f"abort requested on engine {engine}: its group has failed"
            case RequestsAborted(engine, requests) if request in requests:
                self._engine = None
                return f"aborted on engine {engine}"
            case ReportStall(step, _, requests) if request in requests:
                return f"step {step_number(step)} waits for this request"
            case _:
                return None

    def _describe_group(self, record: Event | Action) -> str | None:
        match record:
            case Admit(group, index, version, deadline) if group == self._group:
                self._version, self.status = version, WAITING_FOR_ROW
                filling = step_number(self._num_committed // self._batch_size)
                return (
                    f"admitted at version {version}, dataset position {index}, deadline step "
                    f"{step_number(deadline)}; the batch of step {filling} was being filled"
                )
            case StartEvaluation(version) if self._group.is_held_out and version == -1 - self._group.epoch:
                self._version, self.status = version, WAITING_FOR_ROW
                return f"admitted at version {version} for its evaluation: it is not trained on"
            case GroupScored(group, rewards) if group == self._group and group.is_held_out:
                return self._end(group, f"scored: reward {rewards[self.request.sibling]:g}")
            case ScoringFailed(group, reason) if group == self._group and group.is_held_out:
                return self._end(group, f"scoring failed: {reason}")
            case GroupScored(group, rewards) if group == self._group:
                self.status = "pending: its group is not committed to a batch yet"
                return f"scored: reward {rewards[self.request.sibling]:g}"
            case Filter(group, reason):
                return self._end(group, f"its group was filtered: {reason}")
            case Fail(group, reason):
                return self._end(group, f"its group failed: {reason}")
            case Commit(group, step) if group == self._group:
                self._step, self.status = step, f"pending: step {step_number(step)} is not trained yet"
                return f"committed to the batch of step {step_number(step)}, staleness {step - self._version}"
            case _:
                return self._describe_step(record)

    def _describe_step(self, record: Event | Action) -> str | None:
        match record:
            case Train(step) if step == self._step:
                return f"training of step {step_number(step)} started, staleness {step - self._version}"
            case StepFailed(step, reason) if step == self._step:
                return f"step {step_number(step)} failed ({reason}) and changed no weights: it is repeated"
            case Resumed(from_step) if self._step is not None and from_step <= self._step and not self.status:
                self.status = f"pending: step {step_number(self._step)} is not trained yet"
                trained = plural(from_step, "step")
                return f"the run was resumed after {trained}: step {step_number(self._step)} is redone"
            case TrainerReplaced(from_step, redone) if any(self._group in batch for batch in redone):
                step, trained = step_number(self._step or 0), plural(from_step, "step")
                self.status = f"pending: step {step} is redone"
                return f"the trainer was lost and resumed after {trained}: step {step} is redone"
            case Trained(step) if step == self._step:
                return self._end(self._group, f"trained in step {step_number(step)}")
            case _:
                return None

    def _describe_migration(self, event: Migrated) -> str:
        self._engine, self._is_decode_only = event.destination, False
        self.status = f"pending: on engine {event.destination}"
        kv = f"{event.num_bytes / 1e6:.3f} MB of KV copied in {1e3 * event.copy_s:.1f} ms"
        if event.num_prefilled:
            kv = f"KV of {plural(event.num_prefilled, 'token')} recomputed"
        return (
            f"migrated from engine {event.source} to engine {event.destination} ({self._migration_reason}) "
            f"with {plural(event.num_tokens, 'token')}: {kv}, paused for {1e3 * event.stop_s:.1f} ms"
        )

    def _describe_decode_only(self, engine: int, is_named: bool, is_decode_only: bool) -> str | None:
        was_decode_only, self._is_decode_only = self._is_decode_only, is_decode_only
        if not is_decode_only:
            return f"engine {engine} decodes all its rows again" if was_decode_only else None
        if is_named:
            return f"prioritised on engine {engine}: the trainer waits for its group"
        return f"paused: engine {engine} decodes only groups that the trainer waits for"

    def _describe_segments(self, chunks: Sequence[Chunk]) -> str:
        """The segments of a response, unless its own version sampled every token."""
        if {chunk.version for chunk in chunks} <= {self._version}:
            return ""
        segments = (f"version {chunk.version} ({plural(chunk.num_tokens, 'token')})" for chunk in chunks)
        return f"; sampled by {', then '.join(segments)}"

    def _end(self, group: GroupId, sentence: str) -> str | None:
        if group != self._group:
            return None
        self.status = ""
        return sentence
