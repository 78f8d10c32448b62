"""The orchestrator: handles one event, updates its state, and returns the actions that follow.

The rules run in the order of a prompt's journey. Nothing here reads a clock, draws a random number or does
I/O, so a recorded run replayed through a new orchestrator yields the same actions.
"""

from __future__ import annotations

from dora.core import (
    admission,
    batching,
    colocation,
    evaluation,
    event_handlers,
    migration,
    placement,
    stragglers,
    weight_sync,
)
from dora.core.actions import Action, Publish
from dora.core.bound import cached_num_admissible
from dora.core.events import Event, RequestFinished, Resumed
from dora.core.state import State
from dora.core.types import Limits, ProtocolError


class Orchestrator:
    """Schedules a whole run: `handle` turns events into actions."""

    def __init__(self, limits: Limits, state: State | None = None) -> None:
        self._state = state or State(limits)

    def start(self, now: float) -> list[Action]:
        """The first actions: publish the initial policy, fetch the first prompts."""
        self._state.now_s, self._state.publishing_version = now, 0
        return [Publish(0), *self._decide()]

    def handle(self, event: Event, now: float) -> list[Action]:
        """The actions that follow from `event` at time `now` (seconds on any monotonic clock).

        Raises ProtocolError, with the state effectively unchanged, if the event contradicts the state.
        """
        state = self._state
        if state.is_stopped and not isinstance(event, Resumed):
            raise ProtocolError(f"{event} arrived after the run had stopped; only Resumed may follow")
        state.now_s = now
        actions = event_handlers.handle(state, event)
        actions += self._decide(self._needs_no_decision(event))
        return actions

    def next_wakeup(self) -> float | None:
        """When to send `TimerFired`: the time at which the current stall must be reported. None: never."""
        state = self._state
        if state.stall_group is None or state.is_stall_reported:
            return None
        return state.stall_since_s + state.limits.stall_report_s

    def snapshot(self) -> State:
        """The live state, for reading only; `codec.state_to_json` makes a copy."""
        return self._state

    @property
    def done(self) -> bool:
        """Whether the last version is published, and evaluated if the run evaluates."""
        return self._state.is_stopped

    def _decide(self, is_fast_path: bool = False) -> list[Action]:
        """Run the rules; on the fast path, only those for a stall and what follows from them."""
        state = self._state
        actions: list[Action] = []
        is_rebalance = False
        if is_fast_path:
            state.load_candidates.clear()  # the event lets no engine load or drop
        else:
            actions, is_rebalance = self._arrange_engines()
        if state.is_stopped:
            return actions
        migrations = stragglers.migrate_stragglers(state)
        if migrations or not is_fast_path:
            actions += migrations
            actions += self._fill_rows(is_rebalance)
            state.is_quiescent = not actions
        actions += stragglers.update_stall(state)
        actions += stragglers.decode_stragglers_only(state)
        state.dirty_engines.clear()
        return actions

    def _arrange_engines(self) -> tuple[list[Action], bool]:
        """Commit, train, and assign versions and requests to engines; returns whether it rebalanced."""
        state = self._state
        weight_sync.update_waiting_requests(state)
        actions = [*batching.commit(state), *colocation.pause_or_resume(state), *batching.train(state)]
        if state.is_stopped:
            return actions, False
        actions += placement.place_waiting(state)  # restarted requests come before migrated ones
        weight_sync.update_demand(state)
        is_rebalance = placement.begin_rebalance(state)
        if is_rebalance:
            stragglers.update_lags(state)
        is_cut_short = is_rebalance and placement.repartition(state)
        actions += weight_sync.load_versions(state, is_rebalance)
        if is_rebalance or state.is_rebalance_due:  # load_versions may have found a version to evict
            state.is_rebalance_due = is_cut_short
            actions += migration.migrate(state)
        return actions, is_rebalance

    def _fill_rows(self, is_rebalance: bool) -> list[Action]:
        """Fill free rows, then release versions and engines that are no longer needed."""
        state = self._state
        actions = admission.admit(state)
        evaluation.start_requests(state)
        actions += placement.place_waiting(state)
        actions += weight_sync.load_for_evaluation(state, is_rebalance)
        actions += admission.fetch_prompts(state)
        actions += weight_sync.retire_versions(state)
        actions += weight_sync.remove_drained_engines(state)
        return actions

    def _needs_no_decision(self, event: Event) -> bool:
        """Fast path: whether only the rules for a stall can return an action after `event`, already handled.

        In a large fleet most finished requests free a row that no other request may use, since a full bound
        admits nothing. True only if every rule would find the state in which it last returned no action.
        """
        state = self._state
        if not (state.is_quiescent and isinstance(event, RequestFinished)):
            return False  # the rules may follow up on their own last actions
        if state.waiting or placement.needs_rebalance(state):
            return False
        limits, engine = state.limits, state.engines[event.engine]
        if event.version not in engine.rows_by_version or not state.is_pinned(event.version):
            return False  # the version may be dropped or retired
        if state.draining or state.load_queue or state.evaluation is not None:
            return False  # an engine may leave, load or evaluate as soon as rows are free
        if limits.batches_per_version is not None or limits.defers_loads or limits.breaks_c1:
            return False  # these policies depend on unfinished requests or free rows
        newest = state.newest_published
        has_newest = newest in state.holders or newest in state.pending_holders or state.is_training_done
        if not has_newest or stragglers.versions_without_fast_engine(state):
            return False  # an engine may now have a slot for a version
        version = engine.newest_version
        return version not in state.stored_versions or cached_num_admissible(state, version) == 0
