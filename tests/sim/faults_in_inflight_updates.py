"""Deliberate faults in inflight updates, and the message of each."""

from __future__ import annotations

import pytest
from tests.sim.fault_tools import Fault

from dora.core import weight_sync
from dora.core.state import EngineRecord, State


def running_requests_keep_their_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "update_running_requests", lambda state, engine, version: None)


def waiting_requests_keep_their_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "update_waiting_requests", lambda state: None)


def held_out_requests_continue_with_newer_versions(patch: pytest.MonkeyPatch) -> None:
    original = weight_sync.update_running_requests

    def update_running_requests(state: State, engine: EngineRecord, version: int) -> None:
        original(state, engine, version)
        for request, old in engine.requests.items():
            if old < version:
                engine.rows_by_version[old] -= 1
                engine.rows_by_version[version] += 1
                engine.requests[request] = version

    patch.setattr(weight_sync, "update_running_requests", update_running_requests)


def updated_requests_pin_no_version(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(weight_sync, "_change_version", lambda state, request, version: None)


FAULTS: list[tuple[Fault, str]] = [
    (running_requests_keep_their_version, "drops version"),
    (waiting_requests_keep_their_version, "changes its version"),
    (held_out_requests_continue_with_newer_versions, "on its own version"),
    (updated_requests_pin_no_version, "which holds"),
]
