"""Rebuilds the state of a stopped run from its journal, its sample store and its checkpoints.

The recorded events, replayed into a new orchestrator, give the state in which the run stopped. The steps
after the newest checkpoint are redone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
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
from dora.journal.extensions import find_extensions
from dora.journal.reader import JOURNAL_FILE, Journal, JournalLine
from dora.journal.replay import group_by_event
from dora.metrics.evaluation import VERSION_KEY, EvaluationTracker
from dora.metrics.rollout import MigrationMetrics
from dora.metrics.run import RunMetrics, TimedOrchestrator
from dora.metrics.writer import METRICS_FILE, read_metrics
from dora.model.weights import weight_digest
from dora.runtime.recovery.resume import (
    check_initial_weights,
    earlier_schedules,
    find_changed_code,
    find_checkpoint,
    find_damaged_results,
)
from dora.runtime.run_dir import SAMPLES
from dora.runtime.run_setup import RunSetup
from dora.runtime.sample_book import SampleBook
from dora.stream.sample_db import SampleStore
from dora.text import plural
from dora.trainer.checkpoint import SNAPSHOT_FILE, VERSIONS_FOLDER
from dora.trainer.recipe import EarlierSchedule
from dora.weights.store import WeightStore

MAX_COMPARED_PROMPTS = 1000  # with the dataset


@dataclass(frozen=True)
class SampleRepairs:
    """Changes that make the sample store agree with the journal."""

    unrecorded: set[RequestId]  # samples without an event, to be deleted
    scores: dict[GroupId, GroupScored]  # missing in the store
    final_states: dict[GroupId, tuple[str, int | None]]  # group -> (state, trained step), to be set
    unscored: set[GroupId]  # the journal has lost their scores and all later events

    @property
    def num_ahead(self) -> int:
        """Number of groups about which the store knows more than a journal that has lost lines."""
        states = self.final_states.items()
        return len(self.unscored) + sum(s == "scored" and g not in self.scores for g, (s, _) in states)


@dataclass(frozen=True)
class PreviousRun:
    """The state in which a run stopped, and the event with which it resumes."""

    orchestrator: TimedOrchestrator
    metrics: RunMetrics
    evaluations: EvaluationTracker
    sample_book: SampleBook
    samples: SampleStore
    resumed: Resumed
    checkpoint: Path | None  # None: resume from the initial weights
    digest: str | None  # of version `resumed.from_step`, if it was published
    earlier_schedules: tuple[EarlierSchedule, ...]  # of the learning rate, if the run got more steps
    next_seq: int  # number of journal lines
    now_s: float  # time of the last line
    unrecorded_actions: list[Action]  # of the last event, cut off before they were written
    repairs: SampleRepairs
    warnings: tuple[str, ...]  # what is damaged and not used

    def repair_samples(self) -> None:
        """Make the sample store agree with the journal, which may be ahead of it or behind."""
        for request in self.repairs.unrecorded:
            self.samples.delete(request)
        for group in self.repairs.unscored:
            self.samples.remove_scores(group)
        for group, event in self.repairs.scores.items():
            self.sample_book.store_scores(event, self.sample_book.task_rewards.get(group))
        for group, (state, step) in self.repairs.final_states.items():
            self.samples.set_state([group], state, step)
        self.samples.commit()

    def restore_versions(self, store: WeightStore) -> dict[int, str]:
        """Put the older versions that are still needed into the weight store; return their digests."""
        for version, _ in self.resumed.kept_versions:
            assert self.checkpoint is not None
            store.publish_file(version, self.checkpoint / VERSIONS_FOLDER / store.file_name(version))
        return dict(self.resumed.kept_versions)

    def check_published(self, version: int, digest: str, setup: RunSetup) -> None:
        """Raises InputError if the version to resume from has other weights than when it was published."""
        if version == self.resumed.from_step and self.digest not in (None, digest):
            key, path = setup.config.start
            origin = self.checkpoint or f"{key} = {path!r}"
            raise InputError(
                f"{origin} does not hold version {version} with the published digest; restore the old files"
            )


def read_previous_run(setup: RunSetup, journal: Journal, samples: SampleStore) -> PreviousRun:
    """Rebuild the state of a stopped run. Nothing on the disk is changed.

    Raises InputError if the files contradict each other, the configuration or this version of DORA-RL.
    """
    lines = journal.lines
    _check_num_rows(setup, journal)
    _check_prompts(setup, samples)
    step, checkpoint, warnings = find_checkpoint(setup.out, journal)
    warnings += (*find_damaged_results(setup.out), *find_changed_code(setup.config, journal))
    check_initial_weights(setup.config, journal, has_checkpoint=checkpoint is not None)
    voided = _voided_lines(lines, step)
    replay = _JournalReplay(setup, samples, voided, checkpoint, journal.limits.num_steps)
    for event, actions in group_by_event(lines):
        replay.replay(event, actions)
    records = [*((seq, record) for seq, _, record in lines), *((-1, a) for a in replay.unrecorded_actions)]
    repairs = _find_repairs(samples, records, voided)
    if repairs.num_ahead:
        warnings += (_describe_lost_lines(setup, repairs),)
    resumed = replay.resumed(step, checkpoint)
    _check_kept_versions(setup, resumed, checkpoint)
    _restore_samples(setup, replay.orchestrator.snapshot(), resumed, replay.sample_book, samples, repairs)
    published = (r for _, _, r in lines if isinstance(r, Published | DigestReported))
    digests = [event.digest for event in published if event.version == step]
    extensions = find_extensions([*(line.record for line in lines), resumed])
    return PreviousRun(
        orchestrator=replay.orchestrator,
        metrics=replay.metrics,
        evaluations=replay.evaluations,
        sample_book=replay.sample_book,
        samples=samples,
        resumed=resumed,
        checkpoint=checkpoint,
        digest=digests[-1] if digests else None,
        earlier_schedules=earlier_schedules(setup.out, journal.limits.num_steps, extensions),
        next_seq=len(lines),
        now_s=lines[-1].t_s,
        unrecorded_actions=replay.unrecorded_actions,
        repairs=repairs,
        warnings=warnings,
    )


class _JournalReplay:
    """Replays a journal into a new orchestrator, with new metrics and a new sample book."""

    def __init__(
        self,
        setup: RunSetup,
        samples: SampleStore,
        voided: set[int],
        checkpoint: Path | None,
        num_steps: int,
    ) -> None:
        """`voided` are the lines of training steps that are redone; the run began with `num_steps` steps."""
        self._config, self._samples = setup.config, samples
        self._has_several_tasks = len(setup.config.reward_weights) > 1
        self._has_episodes = setup.config.has_episodes
        self.orchestrator = TimedOrchestrator(replace(setup.limits, num_steps=num_steps))
        self.sample_book = SampleBook(setup, samples)
        migrations = MigrationMetrics(lambda group: len(setup.prompt_ids(group)))
        self.metrics = RunMetrics(setup.limits, self.sample_book, migrations)
        self.evaluations = EvaluationTracker(
            setup.config.eval.greedy,
            setup.held_out_sources,
            self.sample_book.task_rewards,
            setup.config.reward.pass_threshold,
        )
        self.unrecorded_actions: list[Action] = []
        self._num_replayed = 0  # lines
        self._journal, self._voided, self._checkpoint = setup.out / JOURNAL_FILE, voided, checkpoint
        self._batches: dict[int, tuple[BatchMember, ...]] = {}  # by step, as last trained
        self._mismatches = _read_mismatches(setup.out)
        self._episode_sizes = samples.episode_sizes()  # tokens that the environment added, and turns
        self._saved: dict[str, Any] = (
            json.loads((checkpoint / SNAPSHOT_FILE).read_text(encoding="utf-8")) if checkpoint else {}
        )

    def replay(self, event_line: JournalLine | None, action_lines: Sequence[JournalLine]) -> None:
        """Replay an event and compare its actions with the recorded ones. The last event may lack some."""
        if self.unrecorded_actions:
            self._raise_difference(self._num_replayed)
        first = event_line or action_lines[0]
        event = None if event_line is None else event_line.record
        assert not isinstance(event, Action)
        self._keep_batch(event)
        try:
            core = self.orchestrator
            actions = core.start(first.t_s) if event is None else core.handle(event, first.t_s)
        except ProtocolError as error:
            raise InputError(f"{self._journal}, line {first.seq + 2}: {error}") from error
        recorded = [line.record for line in action_lines]
        if recorded != actions[: len(recorded)]:
            self._raise_difference(first.seq)
        self.unrecorded_actions = actions[len(recorded) :]
        self._num_replayed += len(recorded) + (event_line is not None)
        self._update_metrics(first, event, actions)
        if self._num_replayed == self._saved.get("seq"):
            self._compare_with_checkpoint()

    def resumed(self, step: int, checkpoint: Path | None) -> Resumed:
        """The event with which the run resumes from a checkpoint of `step`."""
        state = self.orchestrator.snapshot()
        files = {int(p.stem) for p in (checkpoint / VERSIONS_FOLDER).glob("[0-9]*")} if checkpoint else set()
        kept = tuple(
            (version, digest)
            for version, digest in sorted(state.stored_versions.items())
            if version < step and version in files
        )
        num_trained = state.num_trained // state.limits.batch_size
        redone = tuple(self._batches[k] for k in range(step, num_trained))
        num_steps, trainer = self._config.run.steps, self._config.trainer
        partial_outputs = self.sample_book.partial_outputs
        partial_outputs.read(state.requests, are_episodes=self._config.has_episodes)
        resumed = Resumed(step, kept, redone, kept_tokens=partial_outputs.lengths(state.requests))
        if num_steps == state.limits.num_steps:
            return resumed
        return replace(
            resumed, num_steps=num_steps, lr_decay=trainer.lr_decay, min_lr_ratio=trainer.min_lr_ratio
        )

    def _keep_batch(self, event: Event | None) -> None:
        """Keep the batch of a trained step before the orchestrator forgets it; a redone step has none."""
        state = self.orchestrator.snapshot()
        if isinstance(event, Trained) and event.step in state.batches:
            self._batches[event.step] = state.batch_members(event.step)

    def _update_metrics(self, line: JournalLine, event: Event | None, actions: Sequence[Action]) -> None:
        """A voided step counts as redone, and its metrics are those of its repetition."""
        book, metrics = self.sample_book, self.metrics
        is_void = line.seq in self._voided
        match event:
            case None:
                metrics.start(line.t_s)
            case RequestFinished(_, request, _, num_tokens) if (
                request.group in self.orchestrator.snapshot().groups
            ):
                num_observed, num_turns = self._episode_sizes.get(request, (0, 1))
                book.num_tokens.setdefault(request.group, {})[request.sibling] = num_tokens - num_observed
                if self._has_episodes:
                    book.num_turns.setdefault(request.group, {})[request.sibling] = num_turns
            case RequestFailed(_, request, reason) if request.is_held_out:
                book.mark_discarded(request.group, f"failed: {reason}")
            case GroupScored(group, rewards) if not group.is_held_out:
                book.rewards[group] = rewards
            case GroupScored(group, rewards) if group.is_held_out and self._has_several_tasks:
                book.task_rewards[group] = self._samples.task_rewards(group, len(rewards))
            case Trained(step) if is_void:
                metrics.redone_steps += 1
                metrics.redone_tokens += sum(
                    sum(book.num_tokens[m.group].values()) for m in self._batches[step]
                )
            case Trained(step):
                book.step_metrics.append((step, self._mismatches.get(step, {})))
            case _:
                pass
        state = self.orchestrator.snapshot()
        metrics.update(line.t_s, None if is_void else event, actions, state)
        self.evaluations.update(event, actions, state.limits.evaluation)
        for action in actions:
            if isinstance(action, Filter | Fail):
                book.forget_group(action.group)

    def _raise_difference(self, seq: int) -> None:
        raise InputError(
            f"{self._journal}: from line {seq + 2} on, this version of DORA-RL gives other actions than the "
            "journal, so it cannot resume the run; use the version that wrote the journal"
        )

    def _compare_with_checkpoint(self) -> None:
        """Raises InputError if a checkpoint has another state of the orchestrator than the journal gives.

        A snapshot of another schema cannot be compared. It is not needed, because the journal is complete.
        """
        if self._saved["state"]["schema"] != codec.SNAPSHOT_SCHEMA:
            return
        replayed = json.loads(json.dumps(codec.state_to_json(self.orchestrator.snapshot())))
        if replayed != self._saved["state"]:
            raise InputError(f"{self._checkpoint} is not a checkpoint of this run's journal; remove it")


def _read_mismatches(out: Path) -> dict[int, dict[str, float]]:
    """The `mismatch/*` metrics of each step in metrics.jsonl, as last trained."""
    steps = [line for line in read_metrics(out / METRICS_FILE) if VERSION_KEY not in line]
    return {step["step"]: {k: v for k, v in step.items() if k.startswith("mismatch/")} for step in steps}


def _describe_lost_lines(setup: RunSetup, repairs: SampleRepairs) -> str:
    """The warning about a journal that ends too early. Raises InputError if the loss cannot be repaired."""
    lost = f"{setup.out / JOURNAL_FILE} has lost its last lines, as in a power failure without journal.fsync"
    if setup.config.has_episodes and repairs.unscored:
        raise InputError(
            f"{lost}, with rewards of episodes, which no other file has: restore the file to resume the run"
        )
    groups = plural(repairs.num_ahead, "group")
    return f"{lost}; the run continues from the last line, and redoes the lost work of {groups}"


def _voided_lines(lines: Sequence[JournalLine], from_step: int) -> set[int]:
    """Sequence numbers of the `Trained` events that a later resume, or this one from `from_step`, voids."""
    voided: set[int] = set()
    for line in reversed(lines):
        if isinstance(line.record, Resumed):
            from_step = min(from_step, line.record.from_step)
        elif isinstance(line.record, Trained) and line.record.step >= from_step:
            voided.add(line.seq)
    return voided


def _check_num_rows(setup: RunSetup, journal: Journal) -> None:
    """Raises InputError if the sources or the held-out prompts are not as many as when the run started."""
    rules = journal.limits.evaluation, setup.limits.evaluation
    num_held_out = [rule and rule.num_prompts for rule in rules]
    for what, before, now in (
        ("the prompts of the sources were", journal.source_rows, setup.source_rows),
        ("the held-out prompts were", *num_held_out),
    ):
        if before != now:
            raise InputError(f"{what} {before} and are now {now}; restore the old datasets")


def _check_prompts(setup: RunSetup, samples: SampleStore) -> None:
    """Raises InputError if a dataset row has changed. The prompts of episodes come from environments."""
    if setup.config.has_episodes:
        return
    for group, prompt_ids in samples.prompts(MAX_COMPARED_PROMPTS):
        if prompt_ids != setup.prompt_ids(group):
            key = "eval" if group.is_held_out else "data"
            path = getattr(setup.config, key).path
            where = setup.source_of(group).location(group.row) if path is None else f"{key}.path = {path!r}"
            raise InputError(
                f"{where}: row {group.row} has changed since the run started; restore the old prompts"
            )


def _check_kept_versions(setup: RunSetup, resumed: Resumed, checkpoint: Path | None) -> None:
    """Raises InputError if the file of a kept version does not have the published digest."""
    if checkpoint is None:
        return
    store = WeightStore(checkpoint / VERSIONS_FOLDER, setup.config.engine.dtype)
    for version, digest in resumed.kept_versions:
        if weight_digest(store.fetch(version)) != digest:
            path = store.path(version)
            raise InputError(f"{path} is damaged; remove {checkpoint} to resume from the one before")


def _find_repairs(
    samples: SampleStore, records: Sequence[tuple[int, Event | Action]], voided: set[int]
) -> SampleRepairs:
    """Compare the sample store with the journal's (sequence number, record)."""
    finished: set[RequestId] = set()
    scored: dict[GroupId, GroupScored] = {}
    final: dict[GroupId, tuple[str, int | None]] = {}
    batch: tuple[GroupId, ...] = ()
    for seq, record in records:
        match record:
            case RequestFinished(_, request):
                finished.add(request)
            case RequestFailed(_, request, reason) if request.is_held_out:
                final[request.group] = (f"failed: {reason}", None)
            case ScoringFailed(group, reason) if group.is_held_out:
                final[group] = (f"failed: {reason}", None)
            case GroupScored(group):
                scored[group] = record
                final.setdefault(group, ("scored", None))  # until it is committed, filtered or failed
                if group.is_held_out:
                    final[group] = ("evaluated", None)
            case Filter(group, reason):
                final[group] = (f"filtered: {reason}", None)
            case Fail(group, reason):
                final[group] = (f"failed: {reason}", None)
            case Commit(group):
                final[group] = ("committed", None)
            case Train(_, groups):
                batch = groups
            case Trained(step):
                final |= dict.fromkeys(batch, ("committed", None) if seq in voided else ("trained", step))
            case _:
                pass
    stored, unscored = samples.states(), samples.unscored()
    missing_scores = {group: event for group, event in scored.items() if group in unscored}
    unrecorded = {request for request, *_ in stored if request not in finished}
    return SampleRepairs(
        unrecorded=unrecorded,
        scores=missing_scores,
        final_states={
            request.group: final[request.group]
            for request, *state in stored
            if request in finished and request.group in final
            if request.group in missing_scores or final[request.group] != tuple(state)
        },
        unscored=_find_unscored(stored, unrecorded, {*final}),
    )


def _find_unscored(
    stored: Sequence[tuple[RequestId, str, int | None]], unrecorded: set[RequestId], recorded: set[GroupId]
) -> set[GroupId]:
    """Groups that have scores or a later state in the store, and no scores in a journal that lost lines.

    Scores alone may precede their event, and so may the state of a held-out prompt, which ends with them. A
    later state cannot, nor can the group's last sample.
    """
    incomplete = {request.group for request in unrecorded}
    return {
        request.group
        for request, state, _ in stored
        if request not in unrecorded and request.group not in recorded and state != "finished"
        if not (state == "scored" or request.is_held_out) or request.group in incomplete
    }


def _restore_samples(
    setup: RunSetup,
    state: State,
    resumed: Resumed,
    sample_book: SampleBook,
    samples: SampleStore,
    repairs: SampleRepairs,
) -> None:
    """Restore the samples of unfinished and redone groups. Raises InputError if some are missing."""
    size = setup.limits.group_size
    expected = {member.group: [*range(size)] for batch in resumed.redone for member in batch}
    for group in state.groups.values():
        expected[group.id] = [k for k in range(size) if RequestId(*group.id, k) not in group.unfinished]
    expected |= _expected_held_out(state)
    for group_id, siblings in expected.items():
        stored = samples.finished(group_id)
        if group_id in repairs.unscored:
            stored = [sample._replace(reward=None, is_scored=False) for sample in stored]
        found = [s for s in stored if RequestId(*group_id, s.sibling) not in repairs.unrecorded]
        if [sample.sibling for sample in found] != siblings:
            raise InputError(
                f"{setup.out / SAMPLES} lacks samples of group {group_id} that the journal has, so the run "
                "cannot be resumed; restore the file. Without journal.fsync = true a loss of power can cause "
                "this"
            )
        if group_id in state.groups:
            sample_book.restore_group(group_id, state.groups[group_id].is_scored, found, size)
        elif group_id.is_held_out and state.limits.evaluation is not None:
            sample_book.restore_group(group_id, False, found, state.limits.evaluation.num_answers)
        else:  # of a step that is redone
            sample_book.restore_task_rewards(group_id, found)


def _expected_held_out(state: State) -> dict[GroupId, list[int]]:
    """Siblings of finished responses to held-out prompts that are not scored yet, by prompt."""
    expected: dict[GroupId, list[int]] = {}
    rule, run = state.limits.evaluation, state.evaluation
    if rule is not None and run is not None:
        unscored = run.scoring_prompts | (run.unfinished_prompts.keys() - run.failed_prompts)
        for request in (rule.request_id(run.version, index) for index in range(run.num_started)):
            if request.group in unscored and request not in state.requests:
                expected.setdefault(request.group, []).append(request.sibling)
    return expected
