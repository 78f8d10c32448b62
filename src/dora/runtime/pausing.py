"""A whole run stands still when it is asked to, and goes on as if nothing had been.

Engines decode nothing and keep what they have; a training step under way is ended. No fact is told
meanwhile, so the orchestrator orders nothing; deadlines of workers are looked at as ever.
"""

from __future__ import annotations

from dora.runtime import messages as m
from dora.runtime.calls import Inside


def hold(inside: Inside) -> None:
    """Have the run stand still. Raises ServiceError unless it trains."""
    inside.check_training()
    hands = inside.hands
    if hands.is_held:
        return
    hands.is_held = True
    for engine in _working(inside):
        hands.fleet.rest(engine)


def release(inside: Inside) -> None:
    """Have it go on."""
    hands = inside.hands
    if hands.is_held:
        hands.is_held = False
        for engine in _working(inside):
            hands.fleet.send(engine, m.ResumeRows())


def _working(inside: Inside) -> list[int]:
    """Engines that do not rest by an order of their own; while a run is held, these stay the same."""
    engines = inside.state().engines.values()
    return [engine.id for engine in engines if not (engine.is_pausing or engine.is_paused)]
