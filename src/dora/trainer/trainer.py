"""One training step: a batch of samples in, the next version of the weights out.

The batch may come piece by piece: gradients are summed as micro-batches fill, and divided by what
the whole batch amounts to at its end. The weights are one flat buffer, updated in place;
publishing it is the caller's business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.corrections import correct
from dora.trainer.loss import KLEstimator, LossAggMode, batch_total, kl_divergence, token_shares
from dora.trainer.mismatch import spot_check
from dora.trainer.objective import OBJECTIVES, LossSettings, Tokens
from dora.trainer.optimizer import FlatAdamW, learning_rate
from dora.trainer.packing import micro_batches
from dora.trainer.policy import Policy, Values, pad
from dora.trainer.recipe import TRAITS, Correction, PolicyLoss
from dora.trainer.routes import Counted, replay
from dora.trainer.tally import Tally


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
    clip_ratio_c: float = 3.0
    dpo_beta: float = 0.1
    policy_loss: PolicyLoss = "ppo_clip"
    correction: Correction = field(default_factory=Correction)
    kl_loss_coef: float = 0.0
    kl_loss_type: KLEstimator = "k3"
    entropy_coeff: float = 0.0
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: int | None = None
    micro_batch_tokens: int = 1024
    temperature: float = 1.0

    @property
    def bounds(self) -> LossSettings:
        """What a policy loss reads."""
        return LossSettings(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c, self.dpo_beta)


@dataclass(frozen=True)
class Sample:
    """One scored response. `logprobs` are those of the version that sampled it, per token.

    They are at the sampling temperature, before any token was excluded, for so are the trainer's: drawing
    with filters (top_k, top_p, min_p) chooses what is learnt from, and the ratio is of like with like.
    `staleness` (versions) says with which weights its log-probs can be found again; corrections may
    use it. `routes`
    [tokens - 1, mixture layers * k] are the experts to send its tokens to; without, the likeliest.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float
    staleness: int = 0
    routes: NDArray[np.int16] | None = None


Score = Callable[[Tensor, Sequence[Sequence[int]], Sequence[Sequence[int]]], Tensor]
Sources = Callable[[int], Tensor | None]


class Trainer:
    """Owns a policy's flat weights ([numel], fp32) and steps them in place."""

    def __init__(
        self,
        config: ModelConfig,
        flat: Tensor,
        settings: TrainerSettings,
        reference: Tensor | None = None,
        score: Score | None = None,
        sources: Sources = lambda version: None,
    ) -> None:
        """`reference` are the flat weights that the KL term and pairs compare with; by default as given.

        In exact mode, `score` tells log-probs [N] of answers as engines compute them: from flat weights,
        prompts and answers. `sources` has the flat weights of older versions, as far as they are known.
        """
        token_shares([1], settings.loss_agg_mode, settings.loss_scale_factor)
        self.flat = flat
        self.settings = settings
        self.num_steps_done = 0
        self._optimizer = FlatAdamW(config, flat, settings.weight_decay, settings.betas)
        self._score, self._sources = score, sources
        self._policy = Policy(config, self._optimizer.weights, settings.temperature, self._values(flat))
        self._reference: Policy | None = None
        self._is_paired = TRAITS[settings.policy_loss].unit == "pair"
        if settings.kl_loss_coef or self._is_paired:
            frozen = flat.clone() if reference is None else reference
            self._reference = Policy(config, Layout(config).views(frozen), settings.temperature)
        self._begin()

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Consume one batch, update `flat`, return metrics under the names verl uses.

        Means are over the response tokens that went through the model; mismatch/* compares trainer
        and engine log-probs under equal weights, for few of the stale samples. Raises RunError where
        the gradient is not finite; whatever is raised, `flat` is then unchanged and the step can be tried
        again.
        """
        self.forget()
        self.put(samples)
        return self.finish()

    def put(self, samples: Sequence[Sample]) -> None:
        """Take up whole groups of the next step's batch; what they fill becomes micro-batches.

        A batch may be put piece by piece: the same pieces in the same order give the same bits,
        whenever they come. A loss of pairs takes those with an advantage, two of each group or none.
        """
        self._samples += [s for s in samples if s.token_ids]
        if self._is_paired:
            told = [s for s in samples if s.advantage]
            pairs = zip(told[::2], told[1::2], strict=True)
            units = [sorted(p, key=lambda s: -s.advantage) for p in pairs if all(s.token_ids for s in p)]
            samples = [s for unit in units for s in unit]
        else:
            # A sample of advantage 0 has an exactly zero gradient unless there is a term beside the policy
            # loss. It needs no forward pass, but its tokens stay in the denominators.
            has_term = self._reference is not None or self.settings.entropy_coeff != 0.0
            units = [[s] for s in samples if s.token_ids and (s.advantage or has_term)]
        self._num_tokens += [len(s.token_ids) for s in samples]
        self._waiting += units
        self._pack(num_left=1)

    @property
    def can_work(self) -> bool:
        """Whether a full micro-batch is there."""
        return bool(self._ready)

    def work(self) -> None:
        """Add the share of one full micro-batch to the gradient, up to the batch's total."""
        self._accumulate(self._ready.popleft())

    @property
    def num_accumulated(self) -> int:
        """Response tokens of the next step's batch that went through the model."""
        return self._tally.num_tokens

    def finish(self) -> dict[str, float]:
        """Work on what is left, and step; as `step`. The batch is complete."""
        settings = self.settings
        self._pack(num_left=0)
        while self._ready:
            self.work()
        self._check()
        total = max(1, batch_total(self._num_tokens, settings.loss_agg_mode))
        self._optimizer.gradient.div_(total)
        lr = learning_rate(
            settings.lr, self.num_steps_done, settings.warmup_steps, settings.num_steps, settings.lr_decay
        )
        grad_norm = self._optimizer.step(lr, settings.max_grad_norm)
        self.num_steps_done += 1
        metrics = self._tally.metrics(total)
        self._begin()
        return metrics | {"actor/grad_norm": grad_norm, "actor/lr": lr}

    def forget(self) -> None:
        """Begin the step's batch anew: what was put and accumulated is gone."""
        self._optimizer.gradient.zero_()
        self._begin()

    def _begin(self) -> None:
        self._samples: list[Sample] = []
        self._num_tokens: list[int] = []  # of every response of the batch so far that counts
        self._waiting: list[list[Sample]] = []  # responses that must share a micro-batch
        self._ready: deque[list[Sample]] = deque()
        self._tally = Tally()

    def _pack(self, num_left: int) -> None:
        """Make micro-batches of what waits, but for the last `num_left`, which may not be full yet."""
        waiting = self._waiting
        lengths = [len(unit) * max(len(s.prompt_ids) + len(s.token_ids) for s in unit) for unit in waiting]
        packs = micro_batches(lengths, self.settings.micro_batch_tokens)
        num_ready = max(0, len(packs) - num_left)
        self._ready.extend([s for i in pack for s in waiting[i]] for pack in packs[:num_ready])
        self._waiting = [waiting[i] for pack in packs[num_ready:] for i in pack]

    def _accumulate(self, samples: list[Sample]) -> None:
        """Add one micro-batch's share of the batch gradient, times the batch's total."""
        settings, device = self.settings, self.flat.device
        batch = pad([s.prompt_ids for s in samples], [s.token_ids for s in samples], device)
        lengths = [len(s.token_ids) for s in samples]

        def of_tokens(values: Sequence[float]) -> Tensor:
            """A value of each response, given to every token of it: [N]."""
            return torch.tensor(values, device=device).repeat_interleave(torch.tensor(lengths, device=device))

        staleness = of_tokens([s.staleness for s in samples])
        weight = of_tokens(token_shares(lengths, settings.loss_agg_mode, settings.loss_scale_factor))
        behaviour = torch.tensor([x for s in samples for x in s.logprobs], device=device)
        config, route, tally = self._policy.config, None, self._tally
        if config.mixture_layers:
            route = Counted(config, replay(config, batch, [s.routes for s in samples]), batch.rows)
        logprobs, entropies = self._policy.logprobs(batch, route, settings.entropy_coeff != 0.0)

        corrected = correct(settings.correction, logprobs, behaviour, lengths, staleness)
        advantages, reference = of_tokens([s.advantage for s in samples]), None
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference.logprobs(batch)
        tokens = Tokens(logprobs, corrected.old_logprobs, advantages, lengths, reference)
        losses, clipped = OBJECTIVES[settings.policy_loss](tokens, settings.bounds)
        losses = losses * corrected.weights
        tally.pg_loss += float((losses.detach() * weight).sum())
        if reference is not None and settings.kl_loss_coef:
            divergence = kl_divergence(logprobs, reference, settings.kl_loss_type)
            tally.kl_loss = (tally.kl_loss or 0.0) + float((divergence.detach() * weight).sum())
            losses = losses + settings.kl_loss_coef * divergence
        if settings.entropy_coeff:
            losses = losses - settings.entropy_coeff * entropies
        torch.autograd.backward((losses * weight).sum())

        tally.add(logprobs, behaviour, clipped, entropies, staleness == 0, corrected)
        if route is not None:
            tally.expert_load = tally.expert_load + route.num_tokens

    def _check(self) -> None:
        """Compare the engine's log-probs of a few samples, stale ones if any, that have not been compared."""
        mismatch, config, device = self._tally.mismatch, self._policy.config, self.flat.device
        left = [s for s in self._samples if s.staleness or not mismatch.num_tokens]
        for i in spot_check([len(s.token_ids) for s in left], self._tally.num_tokens, self.num_steps_done):
            sample, flat = left[i], self._sources(self.num_steps_done - left[i].staleness)
            if flat is None:
                continue
            batch = pad([sample.prompt_ids], [sample.token_ids], device)
            route = replay(config, batch, [sample.routes]) if config.mixture_layers else None
            policy = self._policy.under(Layout(config).views(flat.to(device)), self._values(flat))
            with torch.no_grad():
                logprobs, _ = policy.logprobs(batch, route)
            mismatch.add(logprobs, torch.tensor(sample.logprobs, device=device))

    def _values(self, flat: Tensor) -> Values | None:
        """In exact mode, the log-probs of batches with these weights."""
        score = self._score
        return None if score is None else lambda batch: score(flat, batch.prompts, batch.responses)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that a resumed run needs."""
        return {"num_steps_done": self.num_steps_done, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.num_steps_done = state["num_steps_done"]
        self._optimizer.load_state_dict(state["optimizer"])
