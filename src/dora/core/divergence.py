"""How far the policies that sampled have come apart from the one in training: as last measured, by age.

It is known from samples and costs nothing more, so an engine can leave out a version that hardly differs
from its own: adaptive actor policy synchronization of ClusterEnv (arXiv 2507.10990), within the bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.core.records import Limits


class Measured(NamedTuple):
    """KL(policy that sampled || policy in training), in nats per token, in one training step."""

    step: int
    kl: float


@dataclass(slots=True)
class Divergence:
    """What the newest batches have said; empty where no version is ever left out."""

    by_age: dict[int, Measured] = field(default_factory=dict)  # staleness of the samples in that step

    def hear(self, limits: Limits, step: int, kls: Iterable[tuple[int, float]]) -> None:
        """A step has measured the samples of these versions; what is older than the bound is forgotten."""
        if limits.skip_below_kl is None:
            return
        self.by_age |= {step - version: Measured(step, kl) for version, kl in kls}
        first = step - limits.max_staleness
        self.by_age = {age: found for age, found in self.by_age.items() if found.step >= first}

    def is_small(self, limits: Limits, age: int) -> bool:
        """Whether a version is known to be near the one that is `age` versions newer.

        Where no samples were that old, those that were a little older speak for them.
        """
        known = min((measured for measured in self.by_age if measured >= age), default=None)
        most_kl = limits.skip_below_kl
        return most_kl is not None and known is not None and self.by_age[known].kl < most_kl
