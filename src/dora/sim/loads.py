"""How versions come to engines, seen from outside the core: who may load now, and who may do without.

`draw_kls` makes up how near versions are, `Loads` follows it by the facts alone and shares no code with the
rules it checks.
"""

from __future__ import annotations

from random import Random

from dora.core.actions import Load, Skip
from dora.core.events import Published, Resumed, Trained
from dora.core.records import Limits
from dora.sim.seats import Seats, require

ENGINES_PER_LOAD = 4  # where loads are deferred; always one


def draw_kls(rng: Random, step: int, max_staleness: int) -> tuple[tuple[int, float], ...]:
    """KL of some versions' samples in a step: the more, the older they are."""
    pace = rng.choice((0.0, 0.004, 0.03))
    ages = [age for age in range(min(step, max_staleness) + 1) if rng.random() < 0.7]
    return tuple((step - age, pace * age * rng.uniform(0.5, 1.5)) for age in ages)


class Loads:
    """Half of the checker of what `Seats` leaves open."""

    def __init__(self, limits: Limits, seats: Seats) -> None:
        self._limits, self._seats = limits, seats
        self._newest: int | None = None
        self._told: list[Trained] = []  # since everything died last
        self.skipped: dict[int, int] = {}  # engine -> the last version it was told to do without

    def published(self, fact: Published) -> None:
        self._newest = fact.version

    def trained(self, fact: Trained) -> None:
        self._told.append(fact)

    def resumed(self, fact: Resumed) -> None:
        self._newest = None
        self._told.clear()
        self.skipped.clear()

    def load(self, order: Load) -> None:
        """Only few engines at a time take the newest; what requests wait for is loaded in any case."""
        engines, most = self._seats.engines, max(1, len(self._seats.engines) // ENGINES_PER_LOAD)
        if self._limits.is_deferred and order.version == self._newest:
            others = [engine.id for engine in engines.values() if engine.loading is not None]
            require(len(others) < most, f"engine {order.engine} loads out of turn, while {others} do")

    def skip(self, order: Skip) -> int:
        """An engine does without the newest: the version that it stays with, which must be near."""
        engine, version = self._seats.engines[order.engine], order.version
        require(version == self._newest, f"engine {engine.id} skips version {version}, not the newest")
        require(self.skipped.get(engine.id) != version, f"engine {engine.id} skips {version} twice")
        self.skipped[engine.id] = version
        coming = set() if engine.loading is None else {engine.loading}
        stays_with = max(engine.held | coming, default=version)
        is_near = stays_with < version and self._is_known_near(version - stays_with)
        require(is_near, f"engine {engine.id} skips version {version}, which is far from {stays_with}")
        return stays_with

    def _is_known_near(self, age: int) -> bool:
        """Whether the newest measurement of the ages closest to this one is below the threshold."""
        last = self._told[-1].step if self._told else 0
        found = {
            fact.step - version: kl
            for fact in self._told
            if fact.step >= last - self._limits.max_staleness
            for version, kl in fact.kls
        }
        nearest = sorted(measured for measured in found if measured >= age)
        return bool(nearest) and found[nearest[0]] < (self._limits.skip_below_kl or 0.0)
