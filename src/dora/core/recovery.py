"""Recovery from a checkpoint, after a crash of the trainer alone or of the whole run.

Steps after the checkpoint are repeated with their recorded batches. No deadline changes, so the staleness
bound needs no extra rule.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from dora.core.actions import Action, Publish, ReportDigest, Score
from dora.core.events import DigestReported, Resumed, TrainerLost, TrainerReplaced
from dora.core.staleness import Divergence
from dora.core.state import GroupRecord, State
from dora.core.types import RequestId, require


def on_trainer_lost(state: State, event: TrainerLost) -> list[Action]:
    """The trainer is lost. If a replacement is lost before it was ready, the state stays the same."""
    state.is_trainer_lost = True
    state.training_step = state.publishing_version = None
    state.redo_batches.clear()
    return []


def on_trainer_replaced(state: State, event: TrainerReplaced) -> list[Action]:
    """The new trainer repeats steps while engines, requests and admission continue.

    A published version keeps its bytes: the trainer only reports the digest of a version that it recomputes.
    """
    num_trained = state.num_trained // state.limits.batch_size
    require(state.is_trainer_lost, event, "the trainer must be lost first", state.is_trainer_lost)
    is_complete = event.from_step >= 0 and event.from_step + len(event.redone) == num_trained
    require(is_complete, event, "redone must have every trained step since the checkpoint", num_trained)
    state.is_trainer_lost = False
    state.redo_batches = dict(enumerate(event.redone, start=event.from_step))
    return publish_or_report_digest(state, event.from_step)


def on_digest_reported(state: State, event: DigestReported) -> list[Action]:
    is_due = event.version == state.publishing_version
    require(is_due, event, "the digest of this version must be due", state.publishing_version)
    newest = state.newest_published
    require(is_published(state, event.version), event, "a new version must be published instead", newest)
    state.publishing_version = None
    return []


def publish_or_report_digest(state: State, version: int) -> list[Action]:
    """The trainer has reached `version`, for the first time or again."""
    state.publishing_version = version
    return [ReportDigest(version) if is_published(state, version) else Publish(version)]


def is_published(state: State, version: int) -> bool:
    """Whether `version` has been published before, so that engines may hold it."""
    return state.newest_published is not None and version <= state.newest_published


def on_resumed(state: State, event: Resumed) -> list[Action]:
    """Resume from the state after the last recorded event, with the trainer at the checkpoint.

    Engines, migrations and unanswered actions are lost. Until all later steps are repeated, no group is
    admitted. Unfinished requests restart on their own version once it is published again. A run that gets
    more steps keeps the deadlines of its groups, which are no later than the new last step allows.
    """
    kept = dict(event.kept_versions)
    _check_resumable(state, event, kept)
    if event.num_steps is not None:
        state.limits = replace(state.limits, num_steps=event.num_steps)
        state.admissible_cache.clear()
    _lose_engines(state, dict(event.kept_tokens))
    _restore_batches(state, event)
    state.divergence = Divergence()  # measured again in the repeated steps
    state.redo_until_version = max(state.redo_until_version, state.newest_published or 0)
    state.training_step, state.newest_published, state.publishing_version = None, None, event.from_step
    state.is_trainer_lost, state.redo_batches = False, {}
    state.stored_versions, state.num_fetching, state.is_stopped = kept, 0, False
    state.is_rebalance_due = True
    unscored = [g for g in state.groups.values() if not (g.unfinished or g.is_scored)]
    scores = [Score(group.id) for group in sorted(unscored, key=lambda g: g.index)]
    if state.evaluation is not None:
        scores += [Score(group) for group in sorted(state.evaluation.scoring_prompts)]
    return [Publish(event.from_step), *scores]


def _check_resumable(state: State, event: Resumed, kept: dict[int, str]) -> None:
    num_trained = state.num_trained // state.limits.batch_size
    num_redone = num_trained - event.from_step
    require(num_redone >= 0, event, "the checkpoint must not be ahead of the trained steps", num_trained)
    is_complete = len(event.redone) == num_redone
    require(is_complete, event, "redone must have every trained step since the checkpoint", num_trained)
    before = state.limits.num_steps
    is_longer = event.num_steps is None or event.num_steps > before
    require(is_longer, event, "num_steps can only grow", before)
    needed = {*state.num_unfinished, *([state.evaluation.version] if state.evaluation else [])}
    missing = [v for v in sorted(needed) if v < event.from_step and v not in kept]
    require(not missing, event, "every pinned version before the checkpoint must be kept", missing)
    stored = state.stored_versions
    wrong = [v for v, digest in kept.items() if stored.get(v) != digest or v >= event.from_step]
    require(not wrong, event, "kept versions must precede the checkpoint and keep their digest", wrong)


def _lose_engines(state: State, kept_tokens: Mapping[RequestId, int]) -> None:
    """Remove all engines; their requests are queued before those that waited already."""
    state.migrations.clear()
    for record in state.requests.values():
        if record.engine is None:
            state.count_kept(record, kept_tokens.get(record.id, 0))
    for engine in [state.engines[number] for number in sorted(state.engines, reverse=True)]:
        state.remove_engine(engine)
        state.restart_requests(engine, kept_tokens)


def _restore_batches(state: State, event: Resumed) -> None:
    """The batches of void steps are complete batches again."""
    for step, batch in enumerate(event.redone, start=event.from_step):
        for group, position, version in batch:
            deadline = state.limits.deadline(version)
            state.groups[group] = GroupRecord(group, position, version, deadline, set(), is_scored=True)
        state.batches[step] = tuple(member.group for member in batch)
        state.num_trained -= len(batch)
