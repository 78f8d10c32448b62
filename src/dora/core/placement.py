"""Which engine runs which waiting request.

Versions closest to their deadline go first. Siblings stay together where rows allow, so that
they share the KV of their prompt; the engine with the most free rows takes the next group.
"""

from __future__ import annotations

from dora.core.actions import Action, Generate
from dora.core.records import RequestId
from dora.core.state import Engine, State


def place(state: State) -> list[Action]:
    """Give waiting requests the free rows of engines that hold their version."""
    orders: list[Action] = []
    for version in sorted(state.waiting):
        waiting = state.waiting[version]
        placed: dict[int, list[RequestId]] = {}
        engines = [e for e in state.holders(version) if e.free_rows > 0]
        while waiting and engines:
            engine = max(engines, key=lambda e: (e.free_rows, -e.id))
            group = waiting[0].group
            while waiting and engine.free_rows > 0 and waiting[0].group == group:
                request = waiting.popleft()
                _assign(state, request, engine, version)
                placed.setdefault(engine.id, []).append(request)
            engines = [e for e in engines if e.free_rows > 0]
        if not waiting:
            del state.waiting[version]
        orders += [Generate(e, version, tuple(requests)) for e, requests in sorted(placed.items())]
    return orders


def _assign(state: State, request: RequestId, engine: Engine, version: int) -> None:
    state.requests[request].engine = engine.id
    engine.requests[request] = version
    engine.running[version] += 1
