"""How long unfinished requests will probably go on, by what is known of their siblings.

Finished siblings predict the others best; before there are any, the run's mean does. A request
that has outrun its prediction is expected to double, as long tails do.
"""

from __future__ import annotations

from dora.core.engines import Engine
from dora.core.records import RequestId
from dora.core.state import State


def remaining_tokens(state: State, request_id: RequestId) -> float:
    """Expected tokens still to come of an unfinished request; at least 1."""
    request, group = state.requests[request_id], state.groups.get(request_id.group)
    mean, longest = state.costs.answer_tokens, 0
    if group is not None:  # else a held-out one, of which only the run's mean is known
        num_finished, longest = state.limits.group_size - len(group.unfinished), group.longest_tokens
        mean = group.finished_tokens / num_finished if num_finished else mean
    for expected in (mean, float(longest)):
        if expected > request.num_tokens:
            return max(1.0, expected - request.num_tokens)
    return max(1.0, float(request.num_tokens))


def is_long(state: State, request_id: RequestId) -> bool:
    """Whether it will go on for longer than the run's mean answer."""
    return remaining_tokens(state, request_id) > state.costs.answer_tokens


def horizon_tokens(state: State, engine: Engine, version: int) -> float:
    """Decode steps until the last request of `version` on an engine is expected to end."""
    mine = (r for r, v in engine.requests.items() if v == version)
    return max((remaining_tokens(state, r) for r in mine), default=0.0)
