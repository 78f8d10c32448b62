"""A run stops if nothing happens while it waits for input through its service."""

from __future__ import annotations

import pytest

from dora.errors import RunError
from dora.runtime.control.failure_guard import IdleTimeout
from dora.runtime.process.supervisor import DriverClock


def test_a_run_that_waits_too_long_names_the_missing_inputs() -> None:
    idle = IdleTimeout(0.0, DriverClock(), lambda: ["3 prompts", "agents"])
    with pytest.raises(RunError, match=r"no event has arrived .* waits for 3 prompts, agents through its"):
        idle.check(is_active=False)


def test_a_run_without_agents_says_what_they_have_to_do() -> None:
    idle = IdleTimeout(0.0, DriverClock(), lambda: ["agents"], lambda: "open a session with PUT URL")
    with pytest.raises(RunError, match=r"agents through its service \(open a session with PUT URL\); resume"):
        idle.check(is_active=False)


def test_a_run_that_waits_for_its_own_processes_has_no_idle_timeout() -> None:
    IdleTimeout(0.0, DriverClock(), list).check(is_active=False)


def test_an_event_or_a_pause_restarts_the_timeout() -> None:
    idle = IdleTimeout(0.0, DriverClock(), lambda: ["3 prompts"])
    idle.check(is_active=True)


def test_time_in_which_the_driver_was_suspended_does_not_count() -> None:
    times_s = iter([0.0, 0.0, 3600.0, 3601.0])
    idle = IdleTimeout(1.0, DriverClock(lambda: next(times_s)), lambda: ["3 prompts"])
    idle.check(is_active=False)
    with pytest.raises(RunError):
        idle.check(is_active=False)
