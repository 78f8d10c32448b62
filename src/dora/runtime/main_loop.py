"""The main loop: wait for an event, pass it to the orchestrator, record event and actions, execute the
actions.

component    sends events                             receives actions
dataset      PromptsFetched                           FetchPrompts
engine       Loaded, ProgressReported,                Load, Drop, Generate, Abort,
             RequestFinished                          DecodeOnly
two engines  Migrated, MigrationFailed                Migrate
rewards      GroupScored, ScoringFailed               Score
trainer      Trained, Published                       Train, Publish
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dora.core.actions import Action
from dora.core.events import Event, TimerFired
from dora.core.orchestrator import Orchestrator

Record = Callable[[float, Event | None, Sequence[Action]], None]


class Executor(Protocol):
    """Executes actions and delivers events. Processes and the simulator pass the same tests."""

    @property
    def now(self) -> float:
        """Seconds since the run began, on a clock that never steps back."""

    def execute(self, action: Action, /) -> None:
        """Start an action; its outcome arrives as an event."""

    def next_event(self, until: float | None) -> Event | None:
        """The next event; None if none has arrived yet, at the latest once `now` has reached `until`."""


def run_main_loop(
    orchestrator: Orchestrator,
    executor: Executor,
    record: Record,
    first_event: Event | None = None,
    between_events: Callable[[], None] = lambda: None,
) -> None:
    """Run until the orchestrator is done. `first_event` is the first event of a resumed run.

    `record` gets each event with its actions before they are executed. `between_events` is called when no
    action is half done: it saves checkpoints, handles requests and may raise to end the run. Errors of all
    callees propagate.
    """
    event, now, execute = first_event, executor.now, executor.execute
    actions = orchestrator.start(now) if event is None else orchestrator.handle(event, now)
    while True:
        record(now, event, actions)
        for action in actions:
            execute(action)
        if orchestrator.done:
            return
        event = _wait_for_event(executor, orchestrator.next_wakeup(), between_events)
        now = executor.now
        actions = orchestrator.handle(event, now)


def _wait_for_event(executor: Executor, until: float | None, between_events: Callable[[], None]) -> Event:
    """The next event, or TimerFired once the executor's clock has reached `until`."""
    while True:
        between_events()
        event = executor.next_event(until)
        if event is not None:
            return event
        if until is not None and executor.now >= until:
            return TimerFired()
