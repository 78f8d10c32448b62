"""What goes wrong in a simulated world, until it heals.

Losses, refusals and failures come from here; after `heal_after` facts nothing fails and nothing
is slow any more, and the run must come to its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

SLOW = 20.0  # a slow load, move or step takes so many times as long


@dataclass(frozen=True, slots=True)
class Faults:
    """The mishaps of one world; without arguments there are none. Shares are of all tries."""

    heal_after: int = 1000  # facts
    detect_s: float = 0.0  # between the death of an engine and its `EngineLost`
    share_returning: float = 1.0  # of lost engines
    drain_interval_s: float | None = None  # mean time between the wishes that an engine leave
    crash_every: int | None = None  # facts between crashes of the orchestrator
    die_every: int | None = None  # facts between deaths of everything
    trainer_loss_interval_s: float | None = None  # mean time between the deaths of a trainer
    share_loads_failed: float = 0.0
    share_loads_slow: float = 0.0
    share_moves_failed: float = 0.0
    share_moves_slow: float = 0.0
    share_steps_failed: float = 0.0
    share_steps_slow: float = 0.0


def draw_faults(rng: Random, unit_s: float) -> dict[str, Any]:
    """The fields of a WorldConfig that concern mishaps; three worlds in ten have none but crashes.

    `unit_s` is the usual time of an answer.
    """
    crash_every = rng.choice((None, None, None, 70, 150, 200))
    die_every = Random(f"deaths {crash_every} {unit_s}").choice((None, None, 41, 90))  # other draws stay
    trainer_loss_interval_s = Random(f"trainers {unit_s}").choice((None, None, 2 * unit_s, 20 * unit_s))
    calm = {"share_failed": 0.0, "share_refused": 0.0, "loss_interval_s": None, "return_s": 1.0}
    if rng.random() < 0.3:
        return calm | {"faults": Faults(crash_every=crash_every, die_every=die_every)}
    return {
        "share_failed": rng.choice((0.0, 0.0, 0.1, 0.3)),
        "share_refused": rng.choice((0.0, 0.02, 0.05, 0.1)),
        "loss_interval_s": rng.choice((None, unit_s, 5 * unit_s, 30 * unit_s)),
        "return_s": unit_s * rng.choice((0.1, 1.0, 10.0)),
        "faults": Faults(
            heal_after=rng.choice((60, 150, 300)),
            detect_s=unit_s * rng.choice((0.0, 0.1, 1.0)),
            share_returning=rng.choice((1.0, 1.0, 0.5)),
            drain_interval_s=rng.choice((None, None, 2 * unit_s, 10 * unit_s)),
            crash_every=crash_every,
            die_every=die_every,
            trainer_loss_interval_s=trainer_loss_interval_s,
            share_loads_failed=rng.choice((0.0, 0.1, 0.5)),
            share_loads_slow=rng.choice((0.0, 0.2)),
            share_moves_failed=rng.choice((0.0, 0.2, 0.6)),
            share_moves_slow=rng.choice((0.0, 0.3)),
            share_steps_failed=rng.choice((0.0, 0.1, 0.4)),
            share_steps_slow=rng.choice((0.0, 0.1)),
        ),
    }


class Luck:
    """Draws what happens; once healed, only good things at their usual pace."""

    def __init__(self, faults: Faults, rng: Random) -> None:
        self.faults, self.rng = faults, rng
        self.is_healed = False

    def fails(self, share: float) -> bool:
        """Whether a try with this share of failures fails."""
        return not self.is_healed and share > 0.0 and self.rng.random() < share

    def takes(self, mean_s: float, share_slow: float = 0.0) -> float:
        """A time around `mean_s`, now and then a slow one."""
        slow = SLOW if self.fails(share_slow) else 1.0
        return mean_s * self.rng.uniform(0.5, 1.5) * slow
