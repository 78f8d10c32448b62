"""How unfinished answers go on when an engine takes a newer version, under policies that break C1.

They are finished by it: such an answer has segments, and is as old as the first. The bound needs no rule
of its own, for a group keeps the version it was admitted at and its deadline. Held-out answers keep theirs.
"""

from __future__ import annotations

from dora.core.engines import Engine
from dora.core.indexes import take_one
from dora.core.records import RequestId
from dora.core.state import State


def front(state: State) -> int | None:
    """The newest version that an engine holds and the store keeps: all that begins, begins with it."""
    return max(state.holders.keys() & state.store.keys(), default=None)


def renew(state: State, engine: Engine, version: int) -> None:
    """What runs on an engine goes on with the version that it has just taken; `touch` follows."""
    for request, old in engine.requests.items():
        if old < version and not request.is_held_out:
            num_tokens = state.requests[request].num_tokens
            take_one(engine.running, old)
            engine.kv_tokens[old] -= num_tokens
            engine.running[version] += 1
            engine.kv_tokens[version] += num_tokens
            engine.requests[request] = version
            _change(state, request, version)


def catch_up(state: State) -> None:
    """What waits for a row does not wait for an old version; the oldest comes first."""
    newest_held = front(state) if state.limits.breaks_c1 and state.waiting else None
    if newest_held is None:
        return
    for version in sorted((v for v in state.waiting if v < newest_held), reverse=True):
        for request in [r for r in reversed(state.waiting[version]) if not r.is_held_out]:
            state.wait_no_more(request, version)
            _change(state, request, newest_held)
            state.wait_first(request, newest_held)


def _change(state: State, request: RequestId, version: int) -> None:
    record = state.requests[request]
    old, record.version = record.version, version
    state.pin(version, 1)
    state.unpin(old)
