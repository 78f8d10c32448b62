"""How training goes on after the death of the trainer alone: from a checkpoint, while engines generate.

Steps after the checkpoint are redone with the batches they had. A number that was published keeps its
bytes: the redone ones are attested, for the record, and never stored. So engines, requests, admission and the
bound hear nothing of it, and the next version to be published is the one that was next before.
"""

from __future__ import annotations

from dora.core.actions import Action, Attest, Publish
from dora.core.events import Attested, TrainerLost, TrainerReplaced
from dora.core.fleet import require
from dora.core.state import State


def lost(event: TrainerLost, state: State) -> list[Action]:
    """What it was at is void."""
    require(not state.is_trainer_lost, event, "a trainer is lost once", state.is_trainer_lost)
    state.is_trainer_lost = True
    state.training = state.publishing = None
    state.redo.clear()
    return []


def replaced(event: TrainerReplaced, state: State) -> list[Action]:
    """The new one stands where the checkpoint does."""
    num_trained = state.num_trained // state.limits.batch_size
    require(state.is_trainer_lost, event, "only a lost trainer is replaced", state.is_trainer_lost)
    is_whole = event.from_step >= 0 and event.from_step + len(event.redone) == num_trained
    require(is_whole, event, "each step after the checkpoint is redone, and no other", num_trained)
    state.is_trainer_lost = False
    state.redo = dict(enumerate(event.redone, start=event.from_step))
    return publish(state, event.from_step)


def attested(event: Attested, state: State) -> list[Action]:
    require(event.version == state.publishing, event, "the attestation was ordered", state.publishing)
    require(is_out(state, event.version), event, "a new version is published", state.newest)
    state.publishing = None
    return []


def publish(state: State, version: int) -> list[Action]:
    """The trainer has come to this version, for the first time or again."""
    state.publishing = version
    return [Attest(version) if is_out(state, version) else Publish(version)]


def is_out(state: State, version: int) -> bool:
    """Whether engines were told of the version already."""
    return state.newest is not None and version <= state.newest
