"""How long the dead were missed: a trainer, until another one is where it was, and engines in their places.

Read from facts and state; nothing here decides.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from dora.core.events import EngineJoined, EngineLost, Event, Resumed, TrainerLost
from dora.core.state import State


@dataclass
class Recoveries:
    """Of a run; times in seconds."""

    trainer_losses: int = 0
    trainer_s: list[float] = field(default_factory=list)  # from each loss until all was redone
    engine_s: list[float] = field(
        default_factory=list
    )  # from each loss until another one joined in its place
    _lost_s: float | None = None  # when the trainer was
    _engines: dict[int, float] = field(default_factory=dict)  # lost -> when
    _of_step_s: float = 0.0

    def hear(self, now: float, event: Event | None, state: State) -> None:
        """Take in one fact, after the state has changed."""
        match event:
            case EngineLost(engine):
                self._engines[engine] = now
            case EngineJoined(replaces=int(engine)) if engine in self._engines:
                self.engine_s.append(now - self._engines.pop(engine))
            case TrainerLost():
                self.trainer_losses += 1
                if self._lost_s is None:  # else it is lost again, before it had recovered
                    self._lost_s = now
            case Resumed():
                self._lost_s = None
                self._engines.clear()
            case _:
                pass
        if self._lost_s is not None and not (state.is_trainer_lost or state.redo or _is_attested(state)):
            self.trainer_s.append(now - self._lost_s)
            self._of_step_s += self.trainer_s[-1]
            self._lost_s = None

    def end_step(self) -> dict[str, float]:
        """What the metrics of a step say; the next one begins."""
        passed_s, self._of_step_s = self._of_step_s, 0.0
        return {"timing_s/recovery": round(passed_s, 4)}

    def to_json(self) -> dict[str, Any]:
        """What the summary says."""
        return {
            "trainer_losses": self.trainer_losses,
            "trainer_recovery_s_max": _most(self.trainer_s),
            "engine_recovery_s_max": _most(self.engine_s),
        }


def _is_attested(state: State) -> bool:
    """Whether the trainer still has to say what it has made again."""
    return state.publishing is not None and state.newest is not None and state.publishing <= state.newest


def _most(times_s: list[float]) -> float | None:
    return round(max(times_s), 3) if times_s else None
