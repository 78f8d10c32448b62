"""What one training step is told about itself: sums over micro-batches, and the means they end as.

The names are verl's where verl has one.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from torch import Tensor

from dora.trainer.corrections import KL_BY_AGE, Corrected, OffPolicyness
from dora.trainer.mismatch import Mismatch
from dora.trainer.routes import imbalance


@dataclass
class Tally:
    """Sums over the micro-batches of one step."""

    num_tokens: int = 0
    num_updates: int = 0  # of the weights so far
    pg_loss: float = 0.0
    kl_loss: float | None = None
    clipped: float = 0.0
    clipped_high: float = 0.0  # of these, more probable than when they were drawn
    num_flops: float = 0.0
    truncated: float = 0.0
    masked: float = 0.0
    weights: float = 0.0
    entropy: float = 0.0
    ppo_kl: float = 0.0
    mismatch: Mismatch = field(default_factory=Mismatch)
    off_policy: OffPolicyness = field(default_factory=OffPolicyness)
    by_age: defaultdict[int, OffPolicyness] = field(default_factory=lambda: defaultdict(OffPolicyness))
    expert_load: Tensor | int = 0  # tokens [mixture layers, experts]

    def add(
        self,
        logprobs: Tensor,
        behaviour: Tensor,
        clipped: Tensor,
        entropies: Tensor,
        fresh: Tensor,
        staleness: Tensor,
        corrected: Corrected,
    ) -> None:
        """Count one micro-batch; all [N]."""
        log_ratio = logprobs.detach() - behaviour
        self.num_tokens += len(log_ratio)
        self.clipped += float(clipped.sum())
        self.clipped_high += float((clipped & (log_ratio > 0)).sum())
        self.truncated += float(corrected.is_truncated.sum())
        self.masked += float(corrected.is_masked.sum())
        self.weights += float(corrected.weights.sum())
        self.entropy += float(entropies.detach().sum())
        self.ppo_kl -= float(log_ratio.sum())
        if not self.num_updates:  # later the weights are no longer those of the newest version
            self.off_policy.add(logprobs, behaviour)
            for age in staleness.unique().tolist():
                of_age = staleness == age
                self.by_age[int(age)].add(logprobs[of_age], behaviour[of_age])
            self.mismatch.add(logprobs.detach()[fresh], behaviour[fresh])

    def join(self, other: Tally) -> None:
        """Count what another rank has counted, too."""
        sums = ("num_tokens", "num_flops", "pg_loss", "clipped", "clipped_high", "truncated", "masked")
        for name in (*sums, "weights", "entropy", "ppo_kl"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        if other.kl_loss is not None:
            self.kl_loss = (self.kl_loss or 0.0) + other.kl_loss
        self.expert_load = self.expert_load + other.expert_load
        self.mismatch.join(other.mismatch)
        self.off_policy.join(other.off_policy)
        for age, counted in other.by_age.items():
            self.by_age[age].join(counted)

    def metrics(self, total: int) -> dict[str, float]:
        """Losses over the batch's `total`, else means over the tokens counted; without any there is none."""
        metrics = {
            "actor/pg_loss": self.pg_loss / total,
            "actor/num_tokens": float(self.num_tokens),
            "actor/num_updates": float(self.num_updates),
            "actor/tflop": self.num_flops / 1e12,
        }
        if self.num_tokens:
            metrics |= {
                "actor/pg_clipfrac": self.clipped / self.num_tokens,
                "actor/pg_clipfrac_low": (self.clipped - self.clipped_high) / self.num_tokens,
                "actor/pg_clipfrac_high": self.clipped_high / self.num_tokens,
                "actor/entropy": self.entropy / self.num_tokens,
                "actor/ppo_kl": self.ppo_kl / self.num_tokens,
                "off_policy/frac_truncated": self.truncated / self.num_tokens,
                "off_policy/frac_masked": self.masked / self.num_tokens,
                "off_policy/weight_mean": self.weights / self.num_tokens,
            }
        metrics |= self.off_policy.metrics()
        metrics |= {f"{KL_BY_AGE}{age}": self.by_age[age].kl_k3 for age in sorted(self.by_age)}
        if isinstance(self.expert_load, Tensor):
            metrics["moe/load_imbalance"] = float(imbalance(self.expert_load).mean())
        if self.kl_loss is not None:
            metrics["actor/kl_loss"] = self.kl_loss / total
        return metrics | self.mismatch.metrics()
