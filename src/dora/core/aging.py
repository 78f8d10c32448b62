"""Adaptive version aging: how far the staleness bound is lowered, by how much old samples still say.

The DORA paper sets its bound by hand and leaves this open; the rule is ours. It moves the *effective*
staleness within 0..max_staleness, and only of what is admitted later: no deadline ever changes.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.core.records import Limits


@dataclass(slots=True)
class Aging:
    """What the run's batches have said of age so far; all as at the start with `Limits.aging` = None."""

    lowered: int = 0  # versions by which the effective staleness is below max_staleness
    num_heard: int = 0  # training steps, each once: redone ones say nothing new
    num_batches: int = 0  # since the last judgement, of which the following are
    ess_lost: float = 0.0  # sum of 1 - ESS
    kl: float = 0.0  # sum
    oldest: int = 0  # staleness of the oldest sample

    def hear(self, limits: Limits, step: int, oldest: int, ess: float | None, kl: float | None) -> None:
        """Judge the batches heard lately; `oldest` is the staleness of the oldest sample of this one.

        As soon as so much ESS is lost, or so much KL is there, that the mean of `window` batches is beyond
        its limit whatever else comes: half the age they had, for drift feeds on itself. After `window`
        batches, if they had less than half of both: one version more. Nothing is said by a batch older
        than the bound, which was admitted under a wider one, nor by the drift of fresh samples.
        """
        rule, staleness = limits.aging, limits.max_staleness - self.lowered
        if rule is None or ess is None or kl is None or step < self.num_heard:
            return
        self.num_heard = step + 1
        if oldest > staleness:
            return
        self.num_batches += 1
        self.ess_lost += 1 - ess
        self.kl += kl
        self.oldest = max(self.oldest, oldest)
        most_lost, most_kl = rule.window * (1 - rule.min_ess), rule.window * rule.max_kl
        if not (self.ess_lost <= most_lost and self.kl <= most_kl):  # so that nan is too much
            self._judge(limits.max_staleness - self.oldest // 2 if self.oldest else self.lowered)
        elif self.num_batches == rule.window:
            is_calm = self.ess_lost <= most_lost / 2 and self.kl <= most_kl / 2
            self._judge(max(0, self.lowered - is_calm))

    def _judge(self, lowered: int) -> None:
        self.lowered = lowered
        self.num_batches, self.ess_lost, self.kl, self.oldest = 0, 0.0, 0.0, 0
