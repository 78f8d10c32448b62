"""One training step: a batch of samples in, the next version of the weights out.

The weights are one flat buffer, updated in place; publishing it is the caller's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.loss import LossAggMode, clipped_loss, k3_divergence, token_weights
from dora.trainer.optimizer import FlatAdamW, learning_rate
from dora.trainer.packing import micro_batches
from dora.trainer.policy import Policy, pad


@dataclass(frozen=True)
class TrainerSettings:
    """How to train. `num_steps` is the length of the run, where a linear decay ends.

    `loss_scale_factor` (tokens) is the divisor of loss_agg_mode seq-mean-token-sum-norm.
    `micro_batch_tokens` counts padding; `temperature` is the one the samples were drawn at.
    """

    lr: float
    num_steps: int
    warmup_steps: int = 10
    lr_decay: Literal["linear", "constant"] = "linear"
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    clip_ratio_low: float = 0.2
    clip_ratio_high: float = 0.2
    kl_loss_coef: float = 0.0
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: int | None = None
    micro_batch_tokens: int = 1024
    temperature: float = 1.0


@dataclass(frozen=True)
class Sample:
    """One scored response. `logprobs` are those of the version that sampled it, per token.

    `staleness` (versions) only decides whether its log-probs count as engine mismatch.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float
    staleness: int = 0


class Trainer:
    """Owns a policy's flat weights ([numel], fp32) and steps them in place."""

    def __init__(
        self, config: ModelConfig, flat: Tensor, settings: TrainerSettings, reference: Tensor | None = None
    ) -> None:
        """`reference` are the flat weights the KL term pulls to; by default the weights as given."""
        token_weights([1], settings.loss_agg_mode, settings.loss_scale_factor)
        self.flat = flat
        self.settings = settings
        self.num_steps_done = 0
        self._optimizer = FlatAdamW(config, flat, settings.weight_decay, settings.betas)
        self._policy = Policy(config, self._optimizer.weights, settings.temperature)
        self._reference: Policy | None = None
        if settings.kl_loss_coef:
            frozen = flat.clone() if reference is None else reference
            self._reference = Policy(config, Layout(config).views(frozen), settings.temperature)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Consume one batch, update `flat`, return metrics under the names verl uses.

        Means are over the response tokens that went through the model; mismatch/* compares trainer
        and engine log-probs of on-policy samples. Raises RunError where the gradient is not finite;
        whatever is raised, `flat` is then unchanged and the step can be tried again.
        """
        settings = self.settings
        weights = token_weights(
            [len(s.token_ids) for s in samples], settings.loss_agg_mode, settings.loss_scale_factor
        )
        # A sample of advantage 0 has an exactly zero gradient unless there is a KL term. It needs no
        # forward pass, but its tokens stay in the denominators above.
        chosen = [i for i, s in enumerate(samples) if s.token_ids and (s.advantage or self._reference)]
        lengths = [len(samples[i].prompt_ids) + len(samples[i].token_ids) for i in chosen]
        tally = _Tally()
        self._optimizer.gradient.zero_()  # a step that failed half way has left some
        for batch in micro_batches(lengths, settings.micro_batch_tokens):
            members = [chosen[i] for i in batch]
            self._accumulate([samples[i] for i in members], [weights[i] for i in members], tally)
        lr = learning_rate(
            settings.lr, self.num_steps_done, settings.warmup_steps, settings.num_steps, settings.lr_decay
        )
        grad_norm = self._optimizer.step(lr, settings.max_grad_norm)
        self.num_steps_done += 1
        return tally.metrics() | {"actor/grad_norm": grad_norm, "actor/lr": lr}

    def _accumulate(self, samples: list[Sample], weights: list[float], tally: _Tally) -> None:
        """Add one micro-batch's share of the batch gradient."""
        device = self.flat.device
        batch = pad([s.prompt_ids for s in samples], [s.token_ids for s in samples], device)
        spread = torch.tensor([len(s.token_ids) for s in samples], device=device)
        advantages = torch.tensor([s.advantage for s in samples], device=device).repeat_interleave(spread)
        weight = torch.tensor(weights, device=device).repeat_interleave(spread)
        old = torch.tensor([x for s in samples for x in s.logprobs], device=device)

        logprobs, entropies = self._policy.logprobs(batch)
        settings = self.settings
        losses, clipped = clipped_loss(
            logprobs, old, advantages, settings.clip_ratio_low, settings.clip_ratio_high
        )
        tally.pg_loss += float((losses.detach() * weight).sum())
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference.logprobs(batch)
            divergence = k3_divergence(logprobs, reference)
            tally.kl_loss = (tally.kl_loss or 0.0) + float((divergence.detach() * weight).sum())
            losses = losses + settings.kl_loss_coef * divergence
        torch.autograd.backward((losses * weight).sum())

        fresh = torch.tensor([s.staleness == 0 for s in samples], device=device).repeat_interleave(spread)
        tally.add(logprobs.detach() - old, clipped, entropies, fresh)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that a resumed run needs."""
        return {"num_steps_done": self.num_steps_done, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.num_steps_done = state["num_steps_done"]
        self._optimizer.load_state_dict(state["optimizer"])


@dataclass
class _Tally:
    """Sums over the micro-batches of one step."""

    num_tokens: int = 0
    pg_loss: float = 0.0
    kl_loss: float | None = None
    clipped: float = 0.0
    entropy: float = 0.0
    ppo_kl: float = 0.0
    num_fresh: int = 0
    mismatch_sum: float = 0.0
    mismatch_max: float = 0.0

    def add(self, log_ratio: Tensor, clipped: Tensor, entropies: Tensor, fresh: Tensor) -> None:
        """Count one micro-batch; all [N]."""
        self.num_tokens += len(log_ratio)
        self.clipped += float(clipped.sum())
        self.entropy += float(entropies.sum())
        self.ppo_kl -= float(log_ratio.sum())
        gap = log_ratio[fresh].abs()
        if len(gap):
            self.num_fresh += len(gap)
            self.mismatch_sum += float(gap.sum())
            self.mismatch_max = max(self.mismatch_max, float(gap.max()))

    def metrics(self) -> dict[str, float]:
        """Means over the tokens that were counted; without any, there is no mean to report."""
        metrics = {"actor/pg_loss": self.pg_loss, "actor/num_tokens": float(self.num_tokens)}
        if self.num_tokens:
            metrics |= {
                "actor/pg_clipfrac": self.clipped / self.num_tokens,
                "actor/entropy": self.entropy / self.num_tokens,
                "actor/ppo_kl": self.ppo_kl / self.num_tokens,
            }
        if self.kl_loss is not None:
            metrics["actor/kl_loss"] = self.kl_loss
        if self.num_fresh:
            metrics["mismatch/logprob_abs_diff_mean"] = self.mismatch_sum / self.num_fresh
            metrics["mismatch/logprob_abs_diff_max"] = self.mismatch_max
        return metrics
