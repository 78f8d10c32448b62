"""The beginning of a move, whichever rule orders it.

The request stays where it is until the engines have told that it has moved.
"""

from __future__ import annotations

from dora.core.actions import Migrate
from dora.core.engines import Engine
from dora.core.records import RequestId
from dora.core.state import Move, State


def begin(state: State, request: RequestId, source: Engine, destination: Engine, reason: str) -> Migrate:
    """Keep a row for it; who has ordered all its moves calls `touch` for their destinations."""
    version = source.requests[request]
    state.moves[request] = Move(source.id, destination.id, version)
    destination.arriving[request] = version
    destination.running[version] += 1
    return Migrate(request, source.id, destination.id, version, reason)
