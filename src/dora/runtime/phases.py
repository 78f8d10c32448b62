"""Where the time of each training step went, and how much was under way at its end.

The trainer waits, trains or publishes: these three add up to the step. Meanwhile answers are generated
and judged, so those two overlap with them and with each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from dora.core.actions import Action, Fail, Score
from dora.core.events import Event, GroupScored, GroupUnscorable, RequestFinished
from dora.core.records import GroupId
from dora.core.state import State

_TRAINERS = ("wait", "train", "publish")
_OTHERS = ("rollout", "reward")


class Phases:
    """Read from facts, orders and state; nothing here decides."""

    def __init__(self) -> None:
        self._since_s = 0.0
        self._under_way: tuple[str, ...] = ("wait",)
        self._passed_s = defaultdict[str, float](float)
        self._judged: set[GroupId] = set()
        self._first_s: dict[GroupId, float] = {}  # when the first sibling of an unfinished group had finished
        self._spreads_s: list[float] = []

    def begin(self, now: float) -> None:
        """What was before is not counted."""
        self._since_s = now
        self._passed_s.clear()

    def pass_to(self, now: float) -> None:
        """Time has passed while all was as last seen."""
        for phase in self._under_way:
            self._passed_s[phase] += now - self._since_s
        self._since_s = now

    def look(self, now: float, event: Event | None, orders: Sequence[Action], state: State) -> None:
        """Take in one fact and its orders, after the state has changed."""
        if isinstance(event, RequestFinished) and event.request.group in state.groups:
            self._first_s.setdefault(event.request.group, now)
        elif isinstance(event, GroupScored | GroupUnscorable):
            self._judged.discard(event.group)
        for order in orders:
            if isinstance(order, Score):
                self._judged.add(order.group)
                if order.group in self._first_s:  # held-out prompts are no groups
                    self._spreads_s.append(now - self._first_s.pop(order.group))
            elif isinstance(order, Fail):
                self._judged.discard(order.group)
                self._first_s.pop(order.group, None)
        is_published = state.publishing is None
        self._under_way = (
            "train" if state.training is not None else "wait" if is_published else "publish",
            *(["rollout"] if state.unfinished else []),
            *(["reward"] if self._judged else []),
        )

    def end_step(self, state: State) -> dict[str, float]:
        """What the metrics of a step say of it; the next one begins."""
        passed, spreads = self._passed_s, self._spreads_s
        self._passed_s, self._spreads_s = defaultdict(float), []
        engines = state.engines.values()
        num_ready = len(state.ready) + len(state.committed) + sum(map(len, state.batches.values()))
        num_running = sum(len(engine.requests) for engine in engines)
        metrics = {f"timing_s/{phase}": round(passed[phase], 4) for phase in (*_TRAINERS, *_OTHERS)}
        whole_s = sum(passed[phase] for phase in _TRAINERS)
        return metrics | {
            "timing_s/group_spread_mean": round(sum(spreads) / max(1, len(spreads)), 4),
            "timing_s/group_spread_max": round(max(spreads, default=0.0), 4),
            "trainer/idle_ratio": round(passed["wait"] / max(1e-9, whole_s), 4),
            "rollout/num_engines": len(state.engines),
            "rollout/num_versions": sum(1 for num in state.unfinished.values() if num),
            "rollout/num_running": num_running,
            "rollout/num_waiting": len(state.requests) - num_running,
            "rollout/kv_share_max": max((engine.kv_share for engine in engines), default=0.0),
            "groups/num_admitted": state.num_admitted,
            "groups/num_filtered": state.num_filtered,
            "groups/num_failed": state.num_failed,
            "groups/num_ready": num_ready,
        }
