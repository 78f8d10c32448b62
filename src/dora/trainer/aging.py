"""Adaptive version aging: how old samples may be, decided from how much they still say.

The DORA paper sets its bound by hand and leaves this open. The bound it moves is the *effective*
one: it stays within 0..max_staleness, so the guarantee on staleness is untouched.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class AgingRule:
    """When to tighten and when to relax; between the two sets of limits nothing changes.

    `ess` limits are shares of the tokens, `kl` limits are nats per token (`OffPolicyness`). Ours,
    to be set from a run's own curves: no paper gives them.
    """

    ess_low: float = 0.5
    ess_high: float = 0.9
    kl_low: float = 0.02
    kl_high: float = 0.1


def next_staleness(
    rule: AgingRule, staleness: int, max_staleness: int, oldest: int, ess: float, kl: float
) -> int:
    """The effective staleness bound (versions) after a step, from the bound it had.

    Halved where the batch's ESS is below `ess_low`, its KL above `kl_high`, or either is not a
    number: drift feeds on itself. Raised by one where both are on the good side of the other limits
    and the batch's `oldest` sample was as old as the bound allowed; younger batches prove nothing.
    """
    is_healthy = ess >= rule.ess_low and kl <= rule.kl_high  # False for nan
    if not is_healthy:
        return min(staleness // 2, max_staleness)
    is_proven = ess >= rule.ess_high and kl <= rule.kl_low and oldest >= staleness
    return min(staleness + int(is_proven), max_staleness)
