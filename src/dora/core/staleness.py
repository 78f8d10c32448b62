"""Measured drift of the policy: lowers the staleness bound, and lets engines skip similar versions.

The trainer measures both in every step on the samples it trains.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from dora.core.types import Limits


@dataclass(slots=True)
class AdaptiveStaleness:
    """The effective staleness bound, max_staleness - `reduction`, adapted to ESS and KL of trained batches.

    The DORA paper sets its bound by hand; this rule is ours. It affects later admissions only: the deadline
    of an admitted group never changes. Without `Limits.adaptive_staleness`, `reduction` stays 0.
    """

    reduction: int = 0  # 0..max_staleness
    num_steps_seen: int = 0  # a redone step is not counted again
    num_batches: int = 0  # in the current window; the following are sums and maxima over it
    ess_loss: float = 0.0  # sum of 1 - ESS
    kl_sum: float = 0.0
    oldest_staleness: int = 0

    def update(self, limits: Limits, step: int, oldest: int, ess: float | None, kl: float | None) -> None:
        """Add the batch of `step`, whose oldest sample has staleness `oldest`, and decide.

        Tighten as soon as the window's mean ESS or KL violates the rule for any values of the remaining
        batches: halve the staleness that the window had, since drift increases drift. Relax by one version
        after a window that stayed within half of both thresholds. Ignore batches older than the current
        bound, which were admitted under a wider one; and drift of on-policy samples, which no bound can
        reduce.
        """
        rule, staleness = limits.adaptive_staleness, limits.max_staleness - self.reduction
        if rule is None or ess is None or kl is None or step < self.num_steps_seen:
            return
        self.num_steps_seen = step + 1
        if oldest > staleness:
            return
        self.num_batches += 1
        self.ess_loss += 1 - ess
        self.kl_sum += kl
        self.oldest_staleness = max(self.oldest_staleness, oldest)
        max_ess_loss, max_kl_sum = rule.window * (1 - rule.min_ess), rule.window * rule.max_kl
        if not (self.ess_loss <= max_ess_loss and self.kl_sum <= max_kl_sum):  # nan is a violation
            has_age = self.oldest_staleness > 0
            self._decide(limits.max_staleness - self.oldest_staleness // 2 if has_age else self.reduction)
        elif self.num_batches == rule.window:
            can_relax = self.ess_loss <= max_ess_loss / 2 and self.kl_sum <= max_kl_sum / 2
            self._decide(max(0, self.reduction - can_relax))

    def _decide(self, reduction: int) -> None:
        """Set the reduction and start a new window."""
        self.reduction = reduction
        self.num_batches, self.ess_loss, self.kl_sum, self.oldest_staleness = 0, 0.0, 0.0, 0


class MeasuredKL(NamedTuple):
    """KL(sampling policy || policy in training), in nats per token, measured in training step `step`."""

    step: int
    kl: float


@dataclass(slots=True)
class Divergence:
    """The newest KL measurement for each staleness; empty unless `Limits.skip_below_kl` is set.

    An engine can skip a version that hardly differs from its own: adaptive actor policy synchronization of
    ClusterEnv (arXiv 2507.10990), within the staleness bound. The samples in training provide it for free.
    """

    by_staleness: dict[int, MeasuredKL] = field(default_factory=dict)

    def update(self, limits: Limits, step: int, kls: Iterable[tuple[int, float]]) -> None:
        """Add the (version, KL) pairs of one step; forget measurements older than max_staleness steps."""
        if limits.skip_below_kl is None:
            return
        self.by_staleness |= {step - version: MeasuredKL(step, kl) for version, kl in kls}
        first = step - limits.max_staleness
        self.by_staleness = {age: found for age, found in self.by_staleness.items() if found.step >= first}

    def is_below_threshold(self, limits: Limits, age: int) -> bool:
        """Whether versions `age` apart differ by less than `skip_below_kl`.

        Without a measurement for `age`, the next larger one counts.
        """
        known = min((measured for measured in self.by_staleness if measured >= age), default=None)
        max_kl = limits.skip_below_kl
        return max_kl is not None and known is not None and self.by_staleness[known].kl < max_kl
