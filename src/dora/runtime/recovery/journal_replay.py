"""What a run left behind, read again: everything as it stood when its processes died.

The journal is the state: its facts, told again to a fresh orchestrator and meter, give it back. A
checkpoint says where the trainer goes on; the steps recorded after it are to be redone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dora.core import codec
from dora.core.actions import Action, Commit, Fail, Filter, Train
from dora.core.events import (
    DigestReported,
    Event,
    GroupScored,
    Published,
    RequestFailed,
    RequestFinished,
    Resumed,
    ScoringFailed,
    Trained,
)
from dora.core.state import State
from dora.core.types import BatchMember, GroupId, ProtocolError, RequestId
from dora.errors import InputError
from dora.journal.reader import JOURNAL_FILE, Journal, JournalLine
from dora.journal.replay import group_by_event
from dora.metrics.evaluation import VERSION_KEY, EvaluationTracker
from dora.metrics.rollout import MigrationMetrics
from dora.metrics.run import RunMetrics, TimedOrchestrator
from dora.model.weights import weight_digest
from dora.runtime.recovery.resume import check_initial_weights
from dora.runtime.run_dir import SAMPLES
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.stream.sample_db import SampleStore
from dora.trainer.checkpoint import VERSIONS_FOLDER, complete_checkpoints
from dora.weights.store import WeightStore

NUM_COMPARED = 1000  # prompts, with the dataset
CORE = "core.json"  # of a checkpoint: what the orchestrator knew, and how much of the journal that was


@dataclass(frozen=True)
class Unsettled:
    """Samples of which no fact tells, and groups whose judgement or end the sample store does not know."""

    nameless: set[RequestId]
    judged: dict[GroupId, GroupScored]
    ends: dict[GroupId, tuple[str, int | None]]


@dataclass(frozen=True)
class PreviousRun:
    """A run at its death, and the fact with which it goes on."""

    orchestrator: TimedOrchestrator
    metrics: RunMetrics
    evaluations: EvaluationTracker
    sample_book: SampleBook
    samples: SampleStore
    resumed: Resumed
    checkpoint: Path | None  # None: the start
    digest: str | None  # of the version to go on from, if it was published
    next_seq: int  # lines in the journal
    now_s: float  # of the last one
    unrecorded_actions: list[Action]  # orders of the last fact that were not written any more
    unsettled: Unsettled

    def repair_samples(self) -> None:
        """Have the sample store say what the journal says: it may be a moment ahead or behind."""
        for request in self.unsettled.nameless:
            self.samples.delete(request)
        for group, fact in self.unsettled.judged.items():
            self.sample_book.store_scores(fact, self.sample_book.task_rewards.get(group))
        for group, end in self.unsettled.ends.items():
            self.samples.set_state([group], *end)
        self.samples.commit()

    def restore_versions(self, store: WeightStore) -> dict[int, str]:
        """Put the older versions that are still needed into the store; their digests."""
        for version, _ in self.resumed.kept_versions:
            assert self.checkpoint is not None
            store.publish_file(version, self.checkpoint / VERSIONS_FOLDER / store.file_name(version))
        return dict(self.resumed.kept_versions)

    def check_published(self, version: int, digest: str, plan: RunSetup) -> None:
        """Raises InputError if the version that the run goes on from is not the one that was published."""
        if version == self.resumed.from_step and self.digest not in (None, digest):
            origin = self.checkpoint or f"model.path = {plan.config.model.path!r}"
            raise InputError(
                f"{origin} does not hold version {version} as it was published before; put the old files back"
            )


def read_previous_run(plan: RunSetup, journal: Journal, samples: SampleStore) -> PreviousRun:
    """What a former life left; it is only read.

    Raises InputError where the files do not fit each other, the configuration or this version.
    """
    lines = journal.lines
    _check_prompts(plan, samples)
    step, checkpoint = _newest_checkpoint(plan.out, len(lines))
    check_initial_weights(plan.config, journal, has_checkpoint=checkpoint is not None)
    voided = _voided(lines, step)
    told = _Told(plan, samples, voided, checkpoint)
    for fact, orders in group_by_event(lines):
        told.tell(fact, orders)
    records = [*((seq, record) for seq, _, record in lines), *((-1, order) for order in told.unrecorded)]
    unsettled = _unsettled(samples, records, voided)
    resumed = told.resumed(step, checkpoint)
    _check_versions(plan, resumed, checkpoint)
    _restore(plan, told.core.snapshot(), resumed, told.teller, samples, unsettled)
    made = (r for _, _, r in lines if isinstance(r, Published | DigestReported))
    digests = [fact.digest for fact in made if fact.version == step]
    return PreviousRun(
        orchestrator=told.core,
        metrics=told.meter,
        evaluations=told.evaluations,
        sample_book=told.teller,
        samples=samples,
        resumed=resumed,
        checkpoint=checkpoint,
        digest=digests[-1] if digests else None,
        next_seq=len(lines),
        now_s=lines[-1].t_s,
        unrecorded_actions=told.unrecorded,
        unsettled=unsettled,
    )


class _Told:
    """Tells a fresh orchestrator and a fresh meter what is recorded."""

    def __init__(
        self, plan: RunSetup, samples: SampleStore, voided: set[int], checkpoint: Path | None
    ) -> None:
        self.core = TimedOrchestrator(plan.limits)
        self.teller = SampleBook(plan, samples)
        self.meter = RunMetrics(
            plan.limits, self.teller, MigrationMetrics(lambda group: len(plan.prompt_ids(group)))
        )
        self.evaluations = EvaluationTracker(plan.config.eval.greedy)
        self.unrecorded: list[Action] = []
        self._num_told = 0  # lines
        self._journal, self._voided, self._checkpoint = plan.out / JOURNAL_FILE, voided, checkpoint
        self._members: dict[int, tuple[BatchMember, ...]] = {}  # step -> its batch, as last trained
        self._metrics = _mismatches(plan.out)
        self._num_read = samples.num_observed()
        self._saved: dict[str, Any] = json.loads((checkpoint / CORE).read_text()) if checkpoint else {}

    def tell(self, fact: JournalLine | None, orders: Sequence[JournalLine]) -> None:
        """One recorded fact with its orders; the last one may lack some."""
        if self.unrecorded:
            self._differ(self._num_told)
        first = fact or orders[0]
        event, state = None if fact is None else fact.record, self.core.snapshot()
        assert not isinstance(event, Action)
        if isinstance(event, Trained) and event.step in state.batches:  # else it is redone
            batch = [state.groups[group] for group in state.batches[event.step]]
            self._members[event.step] = tuple(BatchMember(g.id, g.index, g.version) for g in batch)
        try:
            given = self.core.start(first.t_s) if event is None else self.core.handle(event, first.t_s)
        except ProtocolError as error:
            raise InputError(f"{self._journal}, line {first.seq + 2}: {error}") from error
        recorded = [line.record for line in orders]
        if recorded != given[: len(recorded)]:
            self._differ(first.seq)
        self.unrecorded = given[len(recorded) :]
        self._num_told += len(orders) + (fact is not None)
        self._measure(first, event, given)
        if self._num_told == self._saved.get("seq"):
            self._compare()

    def resumed(self, step: int, checkpoint: Path | None) -> Resumed:
        """The fact with which the run goes on from a checkpoint."""
        state = self.core.snapshot()
        files = {int(p.stem): p for p in (checkpoint / VERSIONS_FOLDER).glob("[0-9]*")} if checkpoint else {}
        kept = tuple(
            (v, digest) for v, digest in sorted(state.stored_versions.items()) if v < step and v in files
        )
        num_trained = state.num_trained // state.limits.batch_size
        return Resumed(step, kept, tuple(self._members[k] for k in range(step, num_trained)))

    def _measure(self, line: JournalLine, event: Event | None, orders: Sequence[Action]) -> None:
        """Steps that are redone are counted once, and measured when they are redone."""
        teller, meter = self.teller, self.meter
        is_void = line.seq in self._voided
        match event:
            case None:
                meter.start(line.t_s)
            case RequestFinished(_, request, _, num_tokens) if request.group in self.core.snapshot().groups:
                num_drawn = num_tokens - self._num_read.get(request, 0)
                teller.num_tokens[request.group] = teller.num_tokens.get(request.group, 0) + num_drawn
            case RequestFailed(_, request, reason) if request.is_held_out:
                teller.mark_discarded(request.group, f"failed: {reason}")
            case GroupScored(group, rewards) if not group.is_held_out:
                teller.rewards[group] = rewards
            case Trained(step) if is_void:
                meter.redone_steps += 1
                meter.redone_tokens += sum(teller.num_tokens[m.group] for m in self._members[step])
            case Trained(step):
                teller.step_metrics.append((step, self._metrics.get(step, {})))
            case _:
                pass
        meter.update(line.t_s, None if is_void else event, orders, self.core.snapshot())
        self.evaluations.update(event, orders, self.core.snapshot().limits.evaluation)
        for order in orders:
            if isinstance(order, Filter | Fail):
                teller.forget_group(order.group)

    def _differ(self, seq: int) -> None:
        raise InputError(
            f"{self._journal}: this version of DORA does not order what is recorded from line {seq + 2} on, "
            "so it cannot go on; use the version that wrote it"
        )

    def _compare(self) -> None:
        """A checkpoint keeps what the orchestrator knew: here it must know the same.

        One by an older version names it in other words; the journal has told everything without it.
        """
        if self._saved["state"]["schema"] != codec.SNAPSHOT_SCHEMA:
            return
        known = json.loads(json.dumps(codec.state_to_json(self.core.snapshot())))
        if known != self._saved["state"]:
            raise InputError(f"{self._checkpoint} is not a checkpoint of this run's record; remove it")


def _mismatches(out: Path) -> dict[int, dict[str, float]]:
    """What metrics.jsonl says of the mismatch of each step, as last trained."""
    path = out / "metrics.jsonl"
    whole = path.read_text().split("\n")[:-1] if path.is_file() else []
    lines = [line for line in map(json.loads, whole) if VERSION_KEY not in line]  # those of steps
    return {line["step"]: {k: v for k, v in line.items() if k.startswith("mismatch/")} for line in lines}


def _newest_checkpoint(out: Path, num_lines: int) -> tuple[int, Path | None]:
    """Step and folder of the newest whole checkpoint that the journal knows of; else the start."""
    for step, folder in complete_checkpoints(out / "checkpoints").items():
        if (folder / CORE).is_file() and json.loads((folder / CORE).read_text())["seq"] <= num_lines:
            return step, folder
    return 0, None


def _voided(lines: Sequence[JournalLine], from_step: int) -> set[int]:
    """Lines of steps trained before the run went on from a checkpoint before them."""
    found: set[int] = set()
    for line in reversed(lines):
        if isinstance(line.record, Resumed):
            from_step = min(from_step, line.record.from_step)
        elif isinstance(line.record, Trained) and line.record.step >= from_step:
            found.add(line.seq)
    return found


def _check_prompts(plan: RunSetup, samples: SampleStore) -> None:
    """Raises InputError where a dataset row is not what it was; what begins an episode is not said there."""
    if plan.config.has_episodes:
        return
    for group, prompt_ids in samples.prompts(NUM_COMPARED):
        if prompt_ids != plan.prompt_ids(group):
            key = "eval" if group.is_held_out else "data"
            path = getattr(plan.config, key).path
            raise InputError(
                f"{key}.path = {path!r}: row {group.row} is not what it was when the run began; put the old "
                "prompts back"
            )


def _check_versions(plan: RunSetup, resumed: Resumed, checkpoint: Path | None) -> None:
    """Raises InputError where a version that was kept is not what it was."""
    if checkpoint is None:
        return
    kept = WeightStore(checkpoint / VERSIONS_FOLDER, plan.config.engine.dtype)
    for version, digest in resumed.kept_versions:
        if weight_digest(kept.fetch(version)) != digest:
            path = kept.folder / kept.file_name(version)
            raise InputError(f"{path} is damaged: remove {checkpoint} to go on from the one before")


def _unsettled(
    samples: SampleStore, records: Sequence[tuple[int, Event | Action]], voided: set[int]
) -> Unsettled:
    """Compare the store with the journal."""
    told: set[RequestId] = set()
    judged: dict[GroupId, GroupScored] = {}
    ends: dict[GroupId, tuple[str, int | None]] = {}
    batch: tuple[GroupId, ...] = ()
    for seq, record in records:
        match record:
            case RequestFinished(_, request):
                told.add(request)
            case RequestFailed(_, request, reason) if request.is_held_out:
                ends[request.group] = (f"failed: {reason}", None)
            case ScoringFailed(group, reason) if group.is_held_out:
                ends[group] = (f"failed: {reason}", None)
            case GroupScored(group):
                judged[group] = record
                if group.is_held_out:
                    ends[group] = ("evaluated", None)
            case Filter(group, reason):
                ends[group] = (f"filtered: {reason}", None)
            case Fail(group, reason):
                ends[group] = (f"failed: {reason}", None)
            case Commit(group):
                ends[group] = ("committed", None)
            case Train(_, groups):
                batch = groups
            case Trained(step):
                ends |= dict.fromkeys(batch, ("committed", None) if seq in voided else ("trained", step))
            case _:
                pass
    states, unscored = samples.states(), samples.unscored()
    lost = {group: fact for group, fact in judged.items() if group in unscored}
    return Unsettled(
        nameless={request for request, *_ in states if request not in told},
        judged=lost,
        ends={
            request.group: ends[request.group]
            for request, *said in states
            if request in told and request.group in ends
            if request.group in lost or ends[request.group] != tuple(said)
        },
    )


def _restore(
    plan: RunSetup,
    state: State,
    resumed: Resumed,
    teller: SampleBook,
    samples: SampleStore,
    unsettled: Unsettled,
) -> None:
    """Hand the answers of unscored groups to the teller. Raises InputError if some are not there."""
    size = plan.limits.group_size
    expected = {member.group: [*range(size)] for batch in resumed.redone for member in batch}
    for group in state.groups.values():
        expected[group.id] = [k for k in range(size) if RequestId(*group.id, k) not in group.unfinished]
    expected |= _held_out_answers(state)
    for name, siblings in expected.items():
        found = samples.finished(name)
        answers = [a for a in found if RequestId(*name, a.sibling) not in unsettled.nameless]
        if [answer.sibling for answer in answers] != siblings:
            raise InputError(
                f"{plan.out / SAMPLES} lacks answers of group {name} that the journal knows of; a loss of "
                "power does that without journal.fsync = true, and such a run cannot go on"
            )
        if name in state.groups:
            teller.restore_group(name, state.groups[name].is_scored, answers, size)
        elif name.is_held_out and state.limits.evaluation is not None:
            teller.restore_group(name, False, answers, state.limits.evaluation.num_answers)
        else:  # its step is redone
            teller.restore_task_rewards(name, answers)


def _held_out_answers(state: State) -> dict[GroupId, list[int]]:
    """Finished answers to the prompts of an evaluation that the rewarder still is to see."""
    found: dict[GroupId, list[int]] = {}
    rule, run = state.limits.evaluation, state.evaluation
    if rule is not None and run is not None:
        for request in (rule.request_id(run.version, index) for index in range(run.num_started)):
            is_due = (
                request.group in run.scoring_prompts
                or request.group in run.unfinished_prompts.keys() - run.failed_prompts
            )
            if is_due and request not in state.requests:
                found.setdefault(request.group, []).append(request.sibling)
    return found
