"""Engines follow the nodes of a cluster: they leave those that are drained, and join where room has come.

Who leaves takes nothing along: its requests move to other engines first, with their KV, as whenever an engine
is drained. Others start one by one, up to `ray.max_engines`.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

from dora.core.events import DrainAsked, Event
from dora.fleets import num_engines
from dora.runtime.fleet import Fleet
from dora.runtime.ground import Ground
from dora.runtime.plan import Plan

ASK_AGAIN_S = 10.0  # an engine that may not leave yet, being the last one say


class Elastic:
    """Looks at the ground; whatever comes of it is told by the fleet."""

    def __init__(
        self, plan: Plan, ground: Ground, fleet: Fleet, facts: deque[Event], notice: Callable[[str], None]
    ) -> None:
        self._ground, self._fleet, self._facts, self._notice = ground, fleet, facts, notice
        most = plan.config.ray.max_engines
        self._num_to_come = 0 if most is None else most - num_engines(plan.config)
        self._asked_s: dict[int, float] = {}  # engine -> when it was last asked to leave its node
        self._starting: int | None = None

    def look(self) -> None:
        """Ask who is on a node that goes to leave it, and start an engine where there is room for one."""
        now_s = time.monotonic()
        for engine in [engine for engine in self._asked_s if engine not in self._fleet.workers]:
            del self._asked_s[engine]
            self._num_to_come += self._fleet.ends[engine] == "left"  # what is lost is started again anyway
        for engine in sorted(self._fleet.joined & self._fleet.staying):
            node = self._fleet.workers[engine].node
            if node in self._ground.leaving and now_s > self._asked_s.get(engine, 0.0):
                if engine not in self._asked_s:
                    self._notice(f"node {node[:8]} is drained: engine {engine} leaves it")
                self._asked_s[engine] = now_s + ASK_AGAIN_S
                self._facts.append(DrainAsked(engine))
        is_starting = self._starting in self._fleet.workers and self._starting not in self._fleet.joined
        if self._num_to_come and self._ground.num_free and not is_starting:
            self._num_to_come -= 1
            self._starting = self._fleet.start()
            self._notice(f"engine {self._starting} starts, for there is room")
