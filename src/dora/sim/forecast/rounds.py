"""Synchronous rounds that ask for more groups than they need and drop the slowest, as RollPacker does.

A dropped group goes to a queue of long ones, and begins again in a round of its own kind, without
more groups than needed, once there is a batch of them. What had been decoded of it is lost.
"""

from __future__ import annotations

from collections import deque

from dora.core.actions import Action, Pause, Resume
from dora.core.events import Event, Paused
from dora.core.records import GroupId, Limits, RequestId
from dora.sim.forecast.foreign import Foreign

EXTRA = 1.25  # groups that a short round begins, over those that it needs


class Rounds(Foreign):
    """All engines decode, then all devices train."""

    def __init__(self, limits: Limits) -> None:
        super().__init__(limits)
        self._waiting: deque[RequestId] = deque()
        self._long: deque[GroupId] = deque()
        self._opened = -1  # the step whose round has begun last
        self._closed = -1  # ... has a batch
        self._num_paused = 0
        self._is_decoding = False

    def _hear(self, event: Event) -> list[Action]:
        if isinstance(event, Paused):
            self._num_paused += 1
        return super()._hear(event)

    def _decide(self, now: float) -> list[Action]:
        orders = self._fetch(int(EXTRA * self.limits.batch_size))
        if self.newest != self.step or self.is_training or not self.engines:
            return orders
        if not self._is_decoding:
            self._is_decoding, self._num_paused = True, 0
            orders += [order for e in self.engines.values() for order in (Resume(e.id), self._load(e))]
        if self._opened < self.step and all(e.held == self.newest for e in self.engines.values()):
            orders += self._open()
        orders += self._place()
        if self._closed < self._opened and len(self.ready) >= self.limits.batch_size:
            orders += self._close()
        if self._num_paused == len(self.engines):
            self._is_decoding = False
            orders += self._train()
        return orders

    def _open(self) -> list[Action]:
        size = self.limits.batch_size
        is_long = len(self._long) >= size
        queue, count = (self._long, size) if is_long else (self.prompts, int(EXTRA * size))
        if len(queue) < count:
            return []
        self._opened = self.step
        orders = []
        for _ in range(count):
            order, requests = self._begin(queue.popleft(), self.step)
            orders.append(order)
            self._waiting.extend(requests)
        return orders

    def _place(self) -> list[Action]:
        orders = []
        while self._waiting:
            engine = max(self.engines.values(), key=lambda e: (e.free, -e.id))
            if engine.free <= 0:
                break
            num = min(engine.free, self.limits.group_size, len(self._waiting))
            orders.append(self._seat(engine, [self._waiting.popleft() for _ in range(num)]))
        return orders

    def _close(self) -> list[Action]:
        """There is a batch: the rest is dropped, and the trainer gets the devices."""
        self._closed = self.step
        dropped = list(self.unfinished)
        orders = self._give_up(dropped)
        self._long.extend(dropped)
        self._waiting.clear()
        return [*orders, *(Pause(engine) for engine in self.engines)]
