"""A run that waits for somebody outside says for whom, and does not wait for ever."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from dora.core.events import TimerFired
from dora.errors import RunError
from dora.runtime.executor import ProcessExecutor
from dora.runtime.training.external import Patience


def hands(patience_s: float, num_wanted: int = 0, agents: bool = False) -> Any:
    service = SimpleNamespace(patience_s=patience_s, agents=agents)
    return SimpleNamespace(
        plan=SimpleNamespace(config=SimpleNamespace(service=service)),
        supply=SimpleNamespace(num_wanted=num_wanted),
        trainer=None,
        facts=[],
        is_held=False,
    )


def test_who_does_not_come_is_named() -> None:
    patience = Patience(cast(ProcessExecutor, hands(0.0, num_wanted=3, agents=True)))
    with pytest.raises(RunError, match=r"nothing has happened .* waits for 3 prompts, agents from outside"):
        patience.check(0.0)


def test_a_run_that_waits_for_its_own_is_patient() -> None:
    Patience(hands(0.0)).check(0.0)


def test_facts_pauses_and_sleep_begin_the_wait_anew() -> None:
    run = hands(0.0, num_wanted=3)
    patience = Patience(run)
    patience.check(asleep_s=60.0)
    run.facts.append(TimerFired())
    patience.check(0.0)
    run.facts.clear()
    run.is_held = True
    patience.check(0.0)
