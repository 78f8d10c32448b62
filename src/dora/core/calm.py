"""Facts after which there is nothing to weigh: an answer has ended, and nobody wants its row.

In a large fleet many facts are such, for a bound that is full admits nothing. The rules would find all as
they left it.
"""

from __future__ import annotations

from dora.core import placement, slowness
from dora.core.bound import admissible
from dora.core.events import Event, RequestFinished
from dora.core.state import State


def is_calm(state: State, event: Event) -> bool:
    """Whether no rule but those of a waiting trainer can give an order after `event`, which was heard."""
    if not (state.is_settled and isinstance(event, RequestFinished)):
        return False  # the rules may have something to say of their own last orders
    if state.waiting or placement.is_now(state):
        return False
    limits, engine = state.limits, state.engines[event.engine]
    if event.version not in engine.running or not state.is_pinned(event.version):
        return False  # the version may be dropped, or retired
    if state.leaving or state.line or state.evaluation is not None:
        return False  # somebody may go, load or be evaluated as soon as rows are free
    if limits.batches_per_version is not None or limits.is_deferred or limits.breaks_c1:
        return False  # policies that count unfinished answers, or load where a row is free
    newest, top = state.newest, engine.top
    has_newest = newest in state.holders or newest in state.coming or state.is_trained
    if not has_newest or slowness.stranded(state):
        return False  # an engine may find room for a version now
    return top not in state.store or admissible(state, top) == 0
