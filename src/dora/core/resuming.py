"""How a run goes on after the death of everything: from a checkpoint, with what is recorded.

Engines, moves and orders under way are gone. Steps after the checkpoint are redone with the batches
they had, and until they are, nothing is admitted; unfinished requests begin again on *their*
version, once it is there (again). The bound needs no rule of its own: no deadline changes.
"""

from __future__ import annotations

from dora.core.actions import Action, Publish, Score
from dora.core.divergence import Divergence
from dora.core.events import Resumed
from dora.core.fleet import require
from dora.core.group import Group
from dora.core.state import State


def resumed(event: Resumed, state: State) -> list[Action]:
    """The state is that of the last recorded fact; the trainer is at the checkpoint."""
    num_trained = state.num_trained // state.limits.batch_size
    num_redone = num_trained - event.from_step
    require(num_redone >= 0, event, "a checkpoint has no more steps than were trained", num_trained)
    require(len(event.redone) == num_redone, event, "each step after the checkpoint is redone", num_trained)
    kept = dict(event.kept)
    needed = {*state.unfinished, *([state.evaluation.version] if state.evaluation else [])}
    lost = [v for v in sorted(needed) if v < event.from_step and v not in kept]
    require(not lost, event, "every pinned version before the checkpoint is kept", lost)
    wrong = [v for v, digest in kept.items() if state.store.get(v) != digest or v >= event.from_step]
    require(not wrong, event, "only versions before the checkpoint are kept, and they do not change", wrong)
    _lose_engines(state)
    _redo(event, state)
    state.divergence = Divergence()  # it is measured again, on the way
    state.redo_until = max(state.redo_until, state.newest or 0)
    state.training, state.newest, state.publishing = None, None, event.from_step
    state.is_trainer_lost, state.redo = False, {}
    state.store, state.num_fetching, state.stopped = kept, 0, False
    state.is_rebalance_due = True
    unjudged = [g for g in state.groups.values() if not (g.unfinished or g.scored)]
    scores = [Score(group.id) for group in sorted(unjudged, key=lambda g: g.index)]
    scores += [Score(group) for group in sorted(state.evaluation.judging)] if state.evaluation else []
    return [Publish(event.from_step), *scores]


def _lose_engines(state: State) -> None:
    """Nobody has an engine any more; who had one comes before those that waited."""
    state.moves.clear()
    for engine in [state.engines[number] for number in sorted(state.engines, reverse=True)]:
        state.remove(engine)
        for request_id in reversed(engine.requests):
            request = state.requests[request_id]
            state.num_regenerated_tokens += request.num_tokens
            request.engine, request.num_tokens = None, 0
            state.wait_first(request_id, request.version)


def _redo(event: Resumed, state: State) -> None:
    """The batches of voided steps are complete batches again, to be trained in their order."""
    for step, batch in enumerate(event.redone, start=event.from_step):
        for group, position, version in batch:
            deadline = state.limits.deadline(version)
            state.groups[group] = Group(group, position, version, deadline, set(), scored=True)
        state.batches[step] = tuple(member.group for member in batch)
        state.num_trained -= len(batch)
