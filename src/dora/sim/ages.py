"""Adaptive aging, seen from outside the core: which measurements a world tells, and what must follow.

`Drift` makes up the figures of training steps, `Ages` follows the effective staleness by the facts alone
and shares no code with the rule it checks.
"""

from __future__ import annotations

from random import Random

from dora.core.events import Trained
from dora.core.records import AgingRule, Limits

# What a batch uses up of what a rule allows, from and to.
_STRAINS = {"calm": (0.0, 0.5), "middling": (0.5, 1.0), "drifting": (1.0, 2.0)}


class Drift:
    """ESS and KL of each training step; phases of all kinds, and steps without a measurement."""

    def __init__(self, rule: AgingRule | None, rng: Random) -> None:
        self._rule, self._rng = rule or AgingRule(0.5, 0.1, 1), rng
        self._phase = "calm"

    def measure(self) -> tuple[float | None, float | None]:
        rng, rule = self._rng, self._rule
        if rng.random() < 0.3:
            self._phase = rng.choice(("calm", "calm", "middling", "drifting"))
        if rng.random() < 0.05:
            return None, None
        strain = rng.uniform(*_STRAINS[self._phase])
        other = rng.uniform(0.0, strain)
        of_ess, of_kl = rng.choice(((strain, other), (other, strain)))
        return max(0.0, 1 - of_ess * (1 - rule.min_ess)), of_kl * rule.max_kl


class Ages:
    """The effective staleness; all batches are heard of in the order of their steps, some twice."""

    def __init__(self, limits: Limits) -> None:
        self.staleness = self._most = limits.max_staleness
        self._rule = limits.aging
        self._batches: list[tuple[float, float, int]] = []  # lost ESS, KL, oldest sample; not judged yet
        self.next_step = 0  # the first that was not heard of

    def hear(self, fact: Trained, oldest: int) -> None:
        """A step, the oldest sample of which was so many versions old."""
        rule = self._rule
        if rule is None or fact.ess is None or fact.kl is None or fact.step < self.next_step:
            return
        self.next_step = fact.step + 1
        if oldest > self.staleness:
            return
        self._batches.append((1 - fact.ess, fact.kl, oldest))
        lost, kl, ages = zip(*self._batches, strict=True)
        strain = max(sum(lost) / (1 - rule.min_ess), sum(kl) / rule.max_kl) / rule.window
        if strain > 1 and max(ages) > 0:
            self.staleness = max(ages) // 2
        elif strain <= 0.5 and len(self._batches) == rule.window:
            self.staleness = min(self._most, self.staleness + 1)
        elif strain <= 1 and len(self._batches) < rule.window:
            return
        self._batches.clear()
