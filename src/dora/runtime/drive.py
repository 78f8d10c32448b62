"""THE MAIN LOOP: hear a fact, ask the core, record both, carry out the orders.

who          tells                                    waits for
dataset      PromptsFetched                           Fetch
engine       Loaded, Progressed, RequestFinished      Load, Generate, Abort, Drop, Rush
two engines  Migrated, MigrationFailed                Migrate
rewarder     GroupScored, GroupUnscorable             Score
trainer      Trained, Published                       Train, Publish
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from dora.core.actions import Action
from dora.core.events import Event, Woken
from dora.core.orchestrator import Orchestrator

Record = Callable[[float, Event | None, Sequence[Action]], None]


class Hands(Protocol):
    """All stations of a run, behind one door. Real ones and simulated ones pass the same tests."""

    @property
    def now(self) -> float:
        """Seconds since the run began, on a clock that never steps back."""

    def perform(self, order: Action) -> None:
        """Carry out an order; whatever comes of it is told later as a fact."""

    def next_fact(self, until: float | None) -> Event | None:
        """The next fact, or None once `now` has reached `until`."""


def drive(core: Orchestrator, hands: Hands, record: Record, event: Event | None = None) -> None:
    """Run until the core is done; `event` is what a run that goes on begins with. Errors pass through."""
    now = hands.now
    orders = core.start(now) if event is None else core.handle(event, now)
    while True:
        record(now, event, orders)
        for order in orders:
            hands.perform(order)
        if core.done:
            return
        event = hands.next_fact(core.next_wakeup()) or Woken()
        now = hands.now
        orders = core.handle(event, now)
