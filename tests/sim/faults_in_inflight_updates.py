"""Deliberate faults in inflight updates, and the message of each."""

from __future__ import annotations

from tests.sim.fault_tools import Function, add_fault, replaces

from dora.core import weight_sync
from dora.core.state import EngineRecord, State

add_fault(
    "running_requests_keep_their_version",
    "drops version",
    (weight_sync, "update_running_requests", lambda state, engine, version: None),
)
add_fault(
    "waiting_requests_keep_their_version",
    "changes its version",
    (weight_sync, "update_waiting_requests", lambda state: None),
)
add_fault(
    "updated_requests_pin_no_version",
    "which holds",
    (weight_sync, "_change_version", lambda state, request, version: None),
)


@replaces("on its own version", weight_sync, "update_running_requests")
def held_out_requests_continue_with_newer_versions(
    original: Function, state: State, engine: EngineRecord, version: int
) -> None:
    original(state, engine, version)
    for request, old in engine.requests.items():
        if old < version:
            engine.rows_by_version[old] -= 1
            engine.rows_by_version[version] += 1
            engine.requests[request] = version
