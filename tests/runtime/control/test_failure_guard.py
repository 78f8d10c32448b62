"""A run stops if too many held-out prompts fail, or if it waits too long for input through its service."""

from __future__ import annotations

from pathlib import Path

import pytest

from dora.config import load
from dora.core.events import Event, RequestFailed, ScoringFailed
from dora.core.state import State
from dora.core.types import EvaluationRule, GroupId, Limits, RequestId
from dora.errors import RunError
from dora.runtime.control.failure_guard import FailureGuard, IdleTimeout
from dora.runtime.process.supervisor import DriverClock


def test_an_evaluation_with_too_many_failed_prompts_ends_the_run(task: Path) -> None:
    """A prompt counts once, and each evaluation on its own."""
    state = State(Limits(8, 2, 1, 0, evaluation=EvaluationRule(2, 10, 2)))
    guard = FailureGuard(load.read_config(task, ["reward.max_failed_fraction=0.2"]), state)
    failures: list[Event] = [
        RequestFailed(0, RequestId(-1, 3, 0), "too long"),
        RequestFailed(0, RequestId(-1, 3, 1), "too long"),
        ScoringFailed(GroupId(-1, 4), "no reward"),
        ScoringFailed(GroupId(-3, 4), "no reward"),
        RequestFailed(0, RequestId(0, 5, 0), "of a group"),
    ]
    for event in failures:
        guard.check(event, [], state, "")
    sentence = r"3 of 10 evaluation prompts could not be scored, more than .* = 0\.2 allows; .*:\ntoo long"
    with pytest.raises(RunError, match=sentence):
        guard.check(ScoringFailed(GroupId(-1, 5), "no reward"), [], state, "")


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
    times_s = iter([0.0, 0.0, 0.9, 1.8, 1.8, 2.7, 2.7])
    idle = IdleTimeout(1.0, DriverClock(lambda: next(times_s)), lambda: ["3 prompts"])
    idle.check(is_active=True)
    for _ in range(2):
        idle.check(is_active=False)
        idle.check(is_active=True)


def test_time_in_which_the_driver_was_suspended_does_not_count() -> None:
    times_s = iter([0.0, 0.0, 3600.0, 3601.0])
    idle = IdleTimeout(1.0, DriverClock(lambda: next(times_s)), lambda: ["3 prompts"])
    idle.check(is_active=False)
    with pytest.raises(RunError, match="no event has arrived"):
        idle.check(is_active=False)
