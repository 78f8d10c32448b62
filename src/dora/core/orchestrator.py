"""The orchestrator: hears one fact, changes its state, and gives the orders that follow.

The rules are called in journey order. Nothing here reads a clock, draws a number or does I/O,
so a recorded run replayed through a fresh orchestrator gives the same orders.
"""

from __future__ import annotations

from dora.core import (
    admission,
    batching,
    calm,
    deadlines,
    evaluating,
    hearing,
    migration,
    placement,
    renewing,
    sharing,
    slowness,
    versions,
)
from dora.core.actions import Action, Publish
from dora.core.events import Event, Resumed
from dora.core.records import Limits, ProtocolError
from dora.core.state import State


class Orchestrator:
    """One mind for a whole run; `handle` is its only door."""

    def __init__(self, limits: Limits, state: State | None = None) -> None:
        self._state = state or State(limits)

    def start(self, now: float) -> list[Action]:
        """The first orders: publish the initial policy, fetch the first prompts."""
        self._state.now_s, self._state.publishing = now, 0
        return [Publish(0), *self._decide()]

    def handle(self, event: Event, now: float) -> list[Action]:
        """Orders that follow from `event`, heard at `now` (seconds on any steady clock).

        Raises ProtocolError, with the state unchanged in substance, where the fact cannot be true.
        """
        state = self._state
        if state.stopped and not isinstance(event, Resumed):
            raise ProtocolError(f"{event} was told after the run had stopped")
        state.now_s = now
        orders = hearing.hear(state, event)
        orders += self._decide(self._is_calm(event))
        return orders

    def next_wakeup(self) -> float | None:
        """When to send `Woken`: the moment a waiting trainer's straggler is to be named."""
        state = self._state
        if state.stall_group is None or state.is_stall_reported:
            return None
        return state.stall_since_s + state.limits.stall_report_s

    def snapshot(self) -> State:
        """The state itself, for reading."""
        return self._state

    @property
    def done(self) -> bool:
        """The last step is trained and its version published."""
        return self._state.stopped

    def _is_calm(self, event: Event) -> bool:
        return calm.is_calm(self._state, event)

    def _decide(self, is_calm: bool = False) -> list[Action]:
        """After a calm fact only what a waiting trainer needs, and then what follows from that."""
        state = self._state
        orders: list[Action] = []
        is_due = False
        if is_calm:
            state.touched.clear()  # who was touched has nothing to load or drop
        else:
            orders, is_due = self._arrange()
        if state.stopped:
            return orders
        moves = slowness.escape(state)
        if moves or not is_calm:
            orders += moves
            orders += self._fill(is_due)
            state.is_settled = not orders
        orders += deadlines.watch_stall(state)
        orders += deadlines.rush(state)
        state.changed.clear()
        return orders

    def _arrange(self) -> tuple[list[Action], bool]:
        """Batches, and which engine has which version and requests; whether they were looked at again."""
        state = self._state
        renewing.catch_up(state)
        orders = [*batching.commit(state), *sharing.share(state), *batching.train(state)]
        if state.stopped:
            return orders, False
        orders += placement.place(state)  # what begins again comes before what moves
        versions.listen(state)
        is_due = placement.is_due(state)
        if is_due:
            slowness.measure(state)
        is_cut_short = is_due and placement.repartition(state)
        orders += versions.load(state, is_due)
        if is_due or state.is_rebalance_due:  # a version without engine may have got one to be cleared
            state.is_rebalance_due = is_cut_short
            orders += migration.migrate(state)
        return orders, is_due

    def _fill(self, is_due: bool) -> list[Action]:
        """Rows that are free, then all that may go."""
        state = self._state
        orders = admission.admit(state)
        evaluating.begin(state)
        orders += placement.place(state)
        orders += versions.lend(state, is_due)
        orders += admission.fetch(state)
        orders += versions.retire(state)
        orders += versions.dismiss(state)
        return orders
