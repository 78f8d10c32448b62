"""The trainer's bench: what was put on it, and when it is done, at a speed that may change meanwhile.

Where engines and trainer share cores, each is slower while the other works; on devices of its own neither.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


class Trainer(Protocol):
    """What a trainer takes."""

    def work_s(self, tokens: float) -> float: ...
    @property
    def fixed_s(self) -> float: ...
    def publish_s(self) -> float: ...


@dataclass(frozen=True, slots=True)
class Contention:
    """By what share things take longer: decoding while the trainer works, training while engines decode."""

    decode: float = 0.0
    train: float = 0.0


class Bench:
    """Work in order of arrival; that of groups may come before their batch is complete."""

    def __init__(self, least_early: float | None) -> None:
        """Tokens from which on incomplete batches are worked on; None: they are not."""
        self.until_s = 0.0
        self.slowness = 1.0
        self.epoch = 0  # of its end
        self._least_early = least_early
        self._early: dict[int, tuple[float, int]] = {}  # step -> seconds and tokens that were not begun
        self._next: int | None = 0  # the step that may be worked on early; None: one is in training

    def commit(self, now: float, step: int, work_s: float, tokens: int) -> None:
        """A group belongs to the step."""
        if self._least_early is not None:
            before_s, before = self._early.get(step, (0.0, 0))
            self._early[step] = (before_s + work_s, before + tokens)
            self._work_early(now)

    def _work_early(self, now: float) -> None:
        found = None if self._next is None else self._early.get(self._next)
        if self._next is not None and found is not None and found[1] >= (self._least_early or 0):
            del self._early[self._next]
            self._put(now, found[0])

    def train(self, now: float, step: int, work_s: float, fixed_s: float) -> None:
        """The batch is complete: what is left of its work, and what a step takes beside."""
        left_s = work_s if self._least_early is None else self._early.pop(step, (0.0, 0))[0]
        self._next = None
        self._put(now, left_s + fixed_s)

    def end(self, now: float, step: int) -> None:
        """The step is over, and groups of the next one may be worked on."""
        self._next = step + 1
        self._work_early(now)

    def slow(self, now: float, slowness: float) -> None:
        """Work takes so many times as long from now on."""
        if slowness != self.slowness:
            self.until_s = now + max(0.0, self.until_s - now) * slowness / self.slowness
            self.slowness = slowness
            self.epoch += 1

    def rest(self, now: float) -> None:
        """All is done."""
        self.until_s = now

    def is_busy(self, now: float) -> bool:
        return now < self.until_s

    def _put(self, now: float, work_s: float) -> None:
        """Seconds of a trainer that is alone."""
        self.until_s = max(now, self.until_s) + self.slowness * work_s
        self.epoch += 1
