"""A run stops if nothing happens while it waits for input through its service."""

from __future__ import annotations

import pytest

from dora.errors import RunError
from dora.runtime.control.failure_guard import IdleTimeout


def test_a_run_that_waits_too_long_names_the_missing_inputs() -> None:
    idle = IdleTimeout(0.0, lambda: ["3 prompts", "agents"])
    with pytest.raises(RunError, match=r"no event has arrived .* waits for 3 prompts, agents through its"):
        idle.check(is_active=False, driver_asleep_s=0.0)


def test_a_run_that_waits_for_its_own_processes_has_no_idle_timeout() -> None:
    IdleTimeout(0.0, list).check(is_active=False, driver_asleep_s=0.0)


def test_an_event_or_a_pause_restarts_the_timeout() -> None:
    idle = IdleTimeout(0.0, lambda: ["3 prompts"])
    idle.check(is_active=True, driver_asleep_s=0.0)


def test_time_in_which_the_driver_was_suspended_does_not_count() -> None:
    idle = IdleTimeout(0.0, lambda: ["3 prompts"])
    idle.check(is_active=False, driver_asleep_s=60.0)
    idle.check(is_active=False, driver_asleep_s=0.0)
