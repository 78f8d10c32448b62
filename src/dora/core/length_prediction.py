"""Predicted lengths of unfinished requests.

The mean of the finished siblings predicts best; without any, the mean of the run. A request that exceeds its
prediction is expected to double, as in a long-tailed distribution.
"""

from __future__ import annotations

from dora.core.state import EngineRecord, State
from dora.core.types import RequestId


def predict_remaining_tokens(state: State, request_id: RequestId) -> float:
    """Expected tokens still to be generated; at least 1."""
    request, group = state.requests[request_id], state.groups.get(request_id.group)
    mean, longest = state.costs.mean_response_tokens, 0
    if group is not None:  # held-out requests have no group
        num_finished, longest = state.limits.group_size - len(group.unfinished), group.longest_tokens
        mean = group.finished_tokens / num_finished if num_finished else mean
    for expected in (mean, float(longest)):
        if expected > request.num_tokens:
            return max(1.0, expected - request.num_tokens)
    return max(1.0, float(request.num_tokens))


def is_predicted_long(state: State, request_id: RequestId) -> bool:
    """Whether more tokens remain than a mean response has."""
    return predict_remaining_tokens(state, request_id) > state.costs.mean_response_tokens


def predict_remaining_steps(state: State, engine: EngineRecord, version: int) -> float:
    """Decode steps until the last request of `version` on `engine` is expected to finish."""
    of_version = (request for request, v in engine.requests.items() if v == version)
    return max((predict_remaining_tokens(state, request) for request in of_version), default=0.0)
