"""`dora why`: the life of one request, from its admission to its end, as the journal has it.

Every line is a fact or an order that concerned the request, with its time; what a move cost and
why it was ordered stand beside it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

from dora.core.actions import (
    Abort,
    Action,
    Admit,
    BeginEvaluation,
    Commit,
    Fail,
    Filter,
    Generate,
    Migrate,
    ReportStall,
    Resume,
    Rush,
    Train,
)
from dora.core.events import (
    EngineLost,
    Event,
    GroupScored,
    GroupUnscorable,
    Migrated,
    MigrationFailed,
    Paused,
    RequestFailed,
    RequestFinished,
    RequestsAborted,
    Resumed,
    StepFailed,
    Trained,
    TrainerReplaced,
)
from dora.core.records import Chunk, GroupId, RequestId
from dora.core.wording import counted, nth
from dora.errors import InputError
from dora.observe.journal import Line, RecordedRun, read_journal


def main(run: Path, name: str) -> int:
    """Print the life of the request, or of each request of the group, that `name` is."""
    journal = read_journal(run)
    for number, request in enumerate(_requests(journal, run, name)):
        if number:
            print()
        print(f"request {request}")
        for t_s, sentence in life(journal, request):
            print(f"{t_s:10.3f} s  {sentence}")
    return 0


def life(journal: RecordedRun, request: RequestId) -> list[tuple[float, str]]:
    """(seconds since the run began, what happened) in order; the last one says how it stands."""
    return lives(journal.lines, journal.limits.batch_size, [request])[request]


def lives(
    lines: Iterable[Line], batch_size: int, requests: Iterable[RequestId]
) -> dict[RequestId, list[tuple[float, str]]]:
    """The same of many requests, in one reading of a journal's lines."""
    readers = {request: _Life(request, batch_size) for request in requests}
    siblings: dict[GroupId, list[_Life]] = {}
    for request, reader in readers.items():
        siblings.setdefault(request.group, []).append(reader)
    told: dict[RequestId, list[tuple[float, str]]] = {request: [] for request in readers}
    t_s, num_committed = 0.0, 0
    for t_s, record in ((line.t_s, line.record) for line in lines):
        num_committed += isinstance(record, Commit)
        for reader in _concerned(record, readers, siblings):
            sentences = reader.read(record, num_committed)
            told[reader.request].extend((t_s, sentence) for sentence in sentences if sentence is not None)
    for request, reader in readers.items():
        if reader.standing:
            told[request].append((t_s, reader.standing))
    return told


def _concerned(
    record: Event | Action, readers: Mapping[RequestId, _Life], siblings: Mapping[GroupId, Sequence[_Life]]
) -> Iterable[_Life]:
    """Whose life a record may belong to: of most, only the request or group that they name."""
    match record:
        case RequestFinished() | RequestFailed() | Migrate() | Migrated() | MigrationFailed():
            return [readers[record.request]] if record.request in readers else ()
        case Generate() | Abort() | RequestsAborted() | ReportStall():
            return [readers[request] for request in record.requests if request in readers]
        case Admit() | GroupScored() | GroupUnscorable() | Filter() | Fail() | Commit():
            return siblings.get(record.group, ())
        case Rush() | Paused() | Resume() | EngineLost() | Train() | StepFailed() | Trained():
            return [reader for reader in readers.values() if reader.standing]  # those that have no end yet
        case Resumed() | TrainerReplaced() | BeginEvaluation():
            return readers.values()
        case _:
            return ()


def _requests(journal: RecordedRun, run: Path, name: str) -> list[RequestId]:
    """Raises InputError for what is no request of the run."""
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
        return _held_out(journal, run, numbers)
    admitted = [line.record.group for line in journal.lines if isinstance(line.record, Admit)]
    if group not in admitted:
        known = f", the last one was {admitted[-1]}" if admitted else ""
        raise InputError(f"group {group} was not admitted in {run}; {len(admitted)} groups were{known}")
    if len(numbers) == 2:
        return [RequestId(*group, sibling) for sibling in range(size)]
    if not 0 <= numbers[2] < size:
        raise InputError(f"request {name} does not exist: the siblings of a group are 0 to {size - 1}")
    return [RequestId(*group, numbers[2])]


def _held_out(journal: RecordedRun, run: Path, numbers: Sequence[int]) -> list[RequestId]:
    """Answers to a held-out prompt, which are named -1 - version/row/sibling."""
    rule, version = journal.limits.evaluation, -1 - numbers[0]
    evaluated = [line.record.version for line in journal.lines if isinstance(line.record, BeginEvaluation)]
    siblings = range(rule.num_answers) if rule and numbers[1] in range(rule.num_prompts) else range(0)
    named = numbers[2:] or siblings
    if version not in evaluated or not named or not {*named} <= {*siblings}:
        name = "/".join(map(str, numbers))
        raise InputError(
            f"no evaluation of version {version} in {run} has a held-out prompt or answer {name}"
        )
    return [RequestId(-1 - version, numbers[1], sibling) for sibling in named]


class _Life:
    """Reads the journal once; each record gives the sentence it means for one request, or None."""

    def __init__(self, request: RequestId, batch_size: int) -> None:
        self.request, self._group, self._batch_size = request, request.group, batch_size
        self._num_committed = 0  # groups, by now
        self._version = 0
        self._engine: int | None = None  # that has it
        self._step: int | None = None  # that its group is committed to
        self._move = ""  # reason of the move under way
        self._is_rushed = False
        self.standing = ""  # how it stands, until it has its end

    def read(self, record: Event | Action, num_committed: int) -> list[str | None]:
        self._num_committed = num_committed
        return [self._of_request(record), self._of_group(record)]

    def _of_request(self, record: Event | Action) -> str | None:
        """What happens to it on the engines."""
        request = self.request
        match record:
            case Generate(engine, _, requests) if request in requests:
                self._engine, self.standing = engine, f"pending: it is on engine {engine}"
                return f"placed on engine {engine}"
            case Migrate(moved, source, destination, _, reason) if moved == request:
                self._move = reason
                return f"begins to move from engine {source} to engine {destination} ({reason})"
            case Migrated() if record.request == request:
                return self._moved(record)
            case MigrationFailed(moved, source, destination, reason) if moved == request:
                return f"the move to engine {destination} failed ({reason}); it stays on engine {source}"
            case Rush(engine, requests) if self._engine is not None and engine == self._engine:
                return self._rushed(request in requests, bool(requests))
            case Paused(engine) if self._engine is not None and engine == self._engine:
                return f"stands still: engine {engine} gives way to the trainer"
            case Resume(engine) if self._engine is not None and engine == self._engine:
                return f"decodes again on engine {engine}"
            case EngineLost(engine, reason) if self._engine is not None and engine == self._engine:
                self._engine, self.standing = None, "pending: it waits for a row"
                return f"engine {engine} was lost ({reason}); it begins again"
            case Resumed() if self._engine is not None:
                self._engine, self.standing = None, "pending: it waits for a row"
                return "the run was resumed; it begins again"
            case RequestFinished(engine, finished, _, num_tokens, chunks, reason) if finished == request:
                self._engine, self.standing = None, "pending: its group is not scored"
                length = counted(num_tokens, "token")
                return f"finished on engine {engine}: {length}, {reason}{self._drawn_by(chunks)}"
            case RequestFailed(engine, failed, reason) if failed == request:
                self._engine = None
                self.standing = "" if request.is_held_out else self.standing
                return f"refused by engine {engine}: {reason}"
            case Abort(engine, requests) if request in requests:
                return f"to be given up on engine {engine}, for its group has failed"
            case RequestsAborted(engine, requests) if request in requests:
                self._engine = None
                return f"given up on engine {engine}"
            case ReportStall(step, _, requests) if request in requests:
                return f"step {nth(step)} waits for it"
            case _:
                return None

    def _of_group(self, record: Event | Action) -> str | None:
        """What happens to its group before and after."""
        match record:
            case Admit(group, index, version, deadline) if group == self._group:
                self._version, self.standing = version, "pending: it waits for a row"
                step = self._num_committed // self._batch_size
                return (
                    f"admitted at version {version}, position {index} of the data, to be trained by step "
                    f"{nth(deadline)}; step {nth(step)} was being filled"
                )
            case BeginEvaluation(version) if self._group.is_held_out and version == -1 - self._group.epoch:
                self._version, self.standing = version, "pending: it waits for a row"
                return f"admitted at version {version}, whose evaluation begins: it is never trained"
            case GroupScored(group, rewards) if group == self._group and group.is_held_out:
                return self._end(group, f"scored: reward {rewards[self.request.sibling]:g}")
            case GroupUnscorable(group, reason) if group == self._group and group.is_held_out:
                return self._end(group, f"could not be scored: {reason}")
            case GroupScored(group, rewards) if group == self._group:
                self.standing = "pending: its group is in no batch"
                return f"scored: reward {rewards[self.request.sibling]:g}"
            case Filter(group, reason):
                return self._end(group, f"its group was filtered: {reason}")
            case Fail(group, reason):
                return self._end(group, f"its group failed: {reason}")
            case Commit(group, step) if group == self._group:
                return self._committed(step)
            case Train(step) if step == self._step:
                return f"training of step {nth(step)} begins, on it with staleness {step - self._version}"
            case StepFailed(step, reason) if step == self._step:
                return f"step {nth(step)} failed ({reason}) and changed nothing; it is repeated"
            case Resumed(from_step) if (
                self._step is not None and from_step <= self._step and not self.standing
            ):
                self.standing = f"pending: step {nth(self._step)} is not trained"
                trained = counted(from_step, "step")
                return f"the run was resumed after {trained}; step {nth(self._step)} is redone"
            case TrainerReplaced(from_step, redone) if any(self._group in batch for batch in redone):
                self.standing = f"pending: step {nth(self._step or 0)} is redone"
                return f"the trainer was lost, and another began after {counted(from_step, 'step')}"
            case Trained(step) if step == self._step:
                return self._end(self._group, f"trained in step {nth(step)}")
            case _:
                return None

    def _moved(self, fact: Migrated) -> str:
        self._engine, self._is_rushed = fact.destination, False
        self.standing = f"pending: it is on engine {fact.destination}"
        copied = f"{fact.num_bytes / 1e6:.3f} MB of KV copied in {1e3 * fact.copy_s:.1f} ms"
        if fact.num_prefilled:
            copied = f"KV of {counted(fact.num_prefilled, 'token')} computed again"
        return (
            f"moved from engine {fact.source} to engine {fact.destination} ({self._move}) with "
            f"{counted(fact.num_tokens, 'token')}: {copied}, it stood still for {1e3 * fact.stop_s:.1f} ms"
        )

    def _rushed(self, is_named: bool, is_rush: bool) -> str | None:
        was_rushed, self._is_rushed = self._is_rushed, is_rush
        if not is_rush:
            return "all rows of its engine decode again" if was_rushed else None
        return "decodes alone, for the trainer waits" if is_named else "stands still, for the trainer waits"

    def _drawn_by(self, chunks: Sequence[Chunk]) -> str:
        """The segments of an answer that newer versions than its own have drawn, too."""
        if {chunk.version for chunk in chunks} <= {self._version}:
            return ""
        drawn = (f"version {chunk.version} ({counted(chunk.num_tokens, 'token')})" for chunk in chunks)
        return f"; drawn by {', then '.join(drawn)}"

    def _committed(self, step: int) -> str:
        self._step, self.standing = step, f"pending: step {nth(step)} is not trained"
        return f"committed to step {nth(step)}, staleness {step - self._version}"

    def _end(self, group: GroupId, sentence: str) -> str | None:
        if group != self._group:
            return None
        self.standing = ""
        return sentence
