"""Metrics of one training step: sums over micro-batches, and the means that are reported.

Keys are verl's where verl has one. Sums stay on the device until they are reported or sent to another rank,
so that no micro-batch waits for the one before it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.model.device import to_device
from dora.trainer.corrections import CorrectedTokens
from dora.trainer.loss import MAX_LOG_RATIO
from dora.trainer.routing_replay import load_imbalance

KL_BY_STALENESS = "off_policy/kl_k3_age_"  # followed by the staleness of the samples that it covers

# Spot checks recompute this fraction of a step's tokens, forward only: a third of that in FLOPs.
_SPOT_CHECK_FRACTION = 1 / 16
_GPU_CHECK_INTERVAL = 8  # steps
_SPOT_CHECK_STRIDE = 0.618034  # of a batch, from step to step: golden-ratio steps cover it evenly

_MAXIMA = ("num_updates", "max_abs_diff")  # in place of sums, where ranks are merged
Sum = Any  # a float, or an fp64 tensor [] on the device until `StepMetrics.read`


@dataclass
class StepMetrics:
    """Sums over the micro-batches of one step."""

    num_tokens: int = 0
    num_updates: int = 0  # of the weights so far
    pg_loss: Sum = 0.0
    kl_loss: Sum | None = None
    num_clipped: Sum = 0.0
    num_clipped_high: Sum = 0.0  # of these, tokens that are now more probable than when they were sampled
    num_flops: float = 0.0
    num_truncated: Sum = 0.0
    num_masked: Sum = 0.0
    weights: Sum = 0.0
    entropy: Sum = 0.0
    ppo_kl: Sum = 0.0
    mismatch: MismatchMetrics = field(default_factory=lambda: MismatchMetrics())
    off_policy: OffPolicyMetrics = field(default_factory=lambda: OffPolicyMetrics())
    by_staleness: defaultdict[int, OffPolicyMetrics] = field(
        default_factory=lambda: defaultdict(OffPolicyMetrics)
    )
    expert_load: Tensor | int = 0  # tokens [MoE layers, experts]

    def add(
        self,
        logprobs: Tensor,
        behaviour: Tensor,
        is_clipped: Tensor,
        entropies: Tensor,
        is_fresh: NDArray[np.bool_],
        staleness: NDArray[np.int64],
        corrected: CorrectedTokens,
    ) -> None:
        """Add one micro-batch; all [N]. `staleness` and `is_fresh` are on the host."""
        logprobs = logprobs.detach()
        log_ratio = logprobs - behaviour
        self.num_tokens += len(log_ratio)
        self.num_clipped += _sum(is_clipped)
        self.num_clipped_high += _sum(is_clipped & (log_ratio > 0))
        self.num_truncated += _sum(corrected.is_truncated)
        self.num_masked += _sum(corrected.is_masked)
        self.weights += _sum(corrected.weights)
        self.entropy += _sum(entropies.detach())
        self.ppo_kl -= _sum(log_ratio)
        if not self.num_updates:  # after an update the weights are no longer those of the newest version
            self.off_policy.add(logprobs, behaviour)
            for age in np.unique(staleness).tolist():
                self.by_staleness[age].add(*_tokens_where(staleness == age, logprobs, behaviour))
            self.mismatch.add(*_tokens_where(is_fresh, logprobs, behaviour))

    def read(self) -> None:
        """Copy the sums to the host. `metrics` does so, too."""
        found = [(part, f.name) for part in self._parts() for f in fields(part)]
        sums = [(part, name) for part, name in found if _is_number(getattr(part, name))]
        if sums:
            on_host = torch.stack([getattr(part, name) for part, name in sums]).tolist()
            for (part, name), value in zip(sums, on_host, strict=True):
                setattr(part, name, value)
        if isinstance(self.expert_load, Tensor):
            self.expert_load = self.expert_load.cpu()

    def _parts(self) -> list[Any]:
        return [self, self.mismatch, self.off_policy, *self.by_staleness.values()]

    def merge(self, other: StepMetrics) -> None:
        """Add the sums of another rank, which that rank has read."""
        _merge(self, other)

    def metrics(self, divisor: int) -> dict[str, float]:
        """Losses over the batch's `divisor`, the rest as means over tokens; no means without tokens."""
        self.read()
        metrics = {
            "actor/pg_loss": self.pg_loss / divisor,
            "actor/num_tokens": float(self.num_tokens),
            "actor/num_updates": float(self.num_updates),
            "actor/tflop": self.num_flops / 1e12,
        }
        if self.num_tokens:
            metrics |= {
                "actor/pg_clipfrac": self.num_clipped / self.num_tokens,
                "actor/pg_clipfrac_low": (self.num_clipped - self.num_clipped_high) / self.num_tokens,
                "actor/pg_clipfrac_high": self.num_clipped_high / self.num_tokens,
                "actor/entropy": self.entropy / self.num_tokens,
                "actor/ppo_kl": self.ppo_kl / self.num_tokens,
                "off_policy/frac_truncated": self.num_truncated / self.num_tokens,
                "off_policy/frac_masked": self.num_masked / self.num_tokens,
                "off_policy/weight_mean": self.weights / self.num_tokens,
            }
        metrics |= self.off_policy.metrics()
        metrics |= {
            f"{KL_BY_STALENESS}{age}": self.by_staleness[age].kl_k3 for age in sorted(self.by_staleness)
        }
        if isinstance(self.expert_load, Tensor):
            metrics["moe/load_imbalance"] = float(load_imbalance(self.expert_load).mean())
        if self.kl_loss is not None:
            metrics["actor/kl_loss"] = self.kl_loss / divisor
        return metrics | self.mismatch.metrics()


@dataclass
class OffPolicyMetrics:
    """Sums over tokens of r = current / behaviour, the distance to the policy that sampled."""

    num_tokens: int = 0
    ratio: Sum = 0.0
    ratio_squared: Sum = 0.0
    log_ratio: Sum = 0.0

    def add(self, logprobs: Tensor, behaviour: Tensor) -> None:
        """Add one micro-batch; both [N]."""
        log_ratio = (logprobs.detach() - behaviour).double().clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        ratio = log_ratio.exp()
        self.num_tokens += len(log_ratio)
        self.ratio += _sum(ratio)
        self.ratio_squared += _sum(ratio.square())
        self.log_ratio += _sum(log_ratio)

    @property
    def ess(self) -> float:
        """Effective sample size as a fraction of the tokens: (sum r)**2 / (N * sum r**2), in (0, 1].

        1 if all tokens have equal weights (Kong 1992; PipelineRL's rl/ess, arXiv 2509.19128).
        """
        return float(self.ratio**2 / (self.num_tokens * self.ratio_squared))

    @property
    def kl_k1(self) -> float:
        """KL(behaviour || current) per token, in nats: the mean of -log r; noisy, may be negative."""
        return float(-self.log_ratio / self.num_tokens)

    @property
    def kl_k3(self) -> float:
        """KL(behaviour || current) per token, in nats: the mean of r - 1 - log r, never negative."""
        return float((self.ratio - self.log_ratio) / self.num_tokens - 1.0)

    def metrics(self) -> dict[str, float]:
        """ess, kl_k1 and kl_k3; empty without tokens."""
        if not self.num_tokens:
            return {}
        return {"off_policy/ess": self.ess, "off_policy/kl_k1": self.kl_k1, "off_policy/kl_k3": self.kl_k3}


@dataclass
class MismatchMetrics:
    """Sums over tokens whose log-probs trainer and engine computed with the same weights."""

    num_tokens: int = 0
    abs_diff: Sum = 0.0
    max_abs_diff: Sum = 0.0
    k3: Sum = 0.0

    def add(self, logprobs: Tensor, reported: Tensor) -> None:
        """Compare the trainer's log-probs with the engine's, each [N]."""
        if len(logprobs):
            log_ratio = (logprobs - reported).double()
            abs_diff = log_ratio.abs()
            self.num_tokens += len(abs_diff)
            self.abs_diff += _sum(abs_diff)
            self.max_abs_diff = abs_diff.max().clamp(min=self.max_abs_diff)
            self.k3 += _sum(log_ratio.expm1() - log_ratio)

    def metrics(self) -> dict[str, float]:
        """Mean, maximum and KL(engine || trainer) by the k3 estimate, per token; empty without tokens."""
        if not self.num_tokens:
            return {}
        return {
            "mismatch/num_tokens": float(self.num_tokens),
            "mismatch/logprob_abs_diff_mean": float(self.abs_diff / self.num_tokens),
            "mismatch/logprob_abs_diff_max": float(self.max_abs_diff),
            "mismatch/kl": float(self.k3 / self.num_tokens),
        }


def _merge(own: Any, other: Any) -> None:
    """Add the sums of a dataclass to those of another one, also of the dataclasses in them."""
    for name in (f.name for f in fields(own)):
        value, added = getattr(own, name), getattr(other, name)
        if is_dataclass(value):
            _merge(value, added)
        elif isinstance(value, dict):
            for key, part in added.items():
                _merge(value[key], part)
        elif value is None or added is None:
            setattr(own, name, added if value is None else value)
        else:
            setattr(own, name, max(value, added) if name in _MAXIMA else value + added)


def _sum(values: Tensor) -> Tensor:
    """The sum [] in fp64, on the device of the values."""
    return values.sum().double()


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) and value.dim() == 0


def _tokens_where(chosen: NDArray[np.bool_], *columns: Tensor) -> tuple[Tensor, ...]:
    """The chosen tokens of each column [N]."""
    indices = to_device(torch.from_numpy(chosen.nonzero()[0]), columns[0].device)
    return tuple(column.index_select(0, indices) for column in columns)


def ages_to_check(ages: Collection[int], step: int, device: str) -> list[int]:
    """Of the staleness of samples, those to compare in this `step`, each with the weights of its version.

    On a GPU it is the largest one, in every eighth step from step 1: copying a version of a large model takes
    seconds.
    """
    if device == "cpu":
        return sorted(ages)
    return [max(ages)] if ages and step % _GPU_CHECK_INTERVAL == 1 else []


def choose_spot_checks(lengths: Sequence[int], num_trained: int, step: int) -> list[int]:
    """Indices of samples of these `lengths` (tokens) whose log-probs to recompute in this `step`.

    At least one sample, then as many as fit into a small fraction of the `num_trained` tokens of the step.
    The choice rotates from step to step.
    """
    num, room = len(lengths), num_trained * _SPOT_CHECK_FRACTION
    first = int(num * (step * _SPOT_CHECK_STRIDE % 1))
    chosen: list[int] = []
    for i in ((first + offset) % num for offset in range(num)):
        if not chosen or lengths[i] <= room:
            chosen.append(i)
            room -= lengths[i]
    return chosen
