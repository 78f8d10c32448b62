"""How a trainer is set up, and what it learns from.

Plain values, which travel between processes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from dora.trainer.lora import Lora
from dora.trainer.loss import KLEstimator, LossAggMode
from dora.trainer.objective import LossSettings
from dora.trainer.recipe import TRAITS, Correction, PolicyLoss


@dataclass(frozen=True)
class TrainerSettings:
    """How to train. `num_steps` is the length of the run, where a linear decay ends.

    `loss_scale_factor` (tokens) is the divisor of loss_agg_mode seq-mean-token-sum-norm. With `batch_tokens`
    a step takes several updates of near so many response tokens each, and divides their gradients by it.
    `temperature` is the one the samples were drawn at. `logits_chunk_tokens` rows of the vocabulary's
    logits exist at a time. With `lora`, adapters are trained instead of the weights. A trainer that
    `is_told_reference` finds the reference's log-probs in its samples.
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
    batch_tokens: int | None = None
    micro_batch_tokens: int = 1024
    temperature: float = 1.0
    dtype: Literal["float32", "bfloat16"] = "float32"  # of forward and backward; weights are stepped in fp32
    activation_checkpointing: bool = False
    logits_chunk_tokens: int = 256
    lora: Lora | None = None
    is_told_reference: bool = False

    @property
    def compares(self) -> bool:
        """Whether the loss compares with a reference policy: in a KL term, or in pairs."""
        return self.kl_loss_coef != 0.0 or TRAITS[self.policy_loss].unit == "pair"

    @property
    def keeps_reference(self) -> bool:
        """Whether the trainer itself has the weights of that policy."""
        return self.compares and not self.is_told_reference

    @property
    def bounds(self) -> LossSettings:
        """What a policy loss reads."""
        return LossSettings(self.clip_ratio_low, self.clip_ratio_high, self.clip_ratio_c, self.dpo_beta)


@dataclass(frozen=True)
class Sample:
    """One scored response. `logprobs` are those of the version that sampled it, per token that it drew.

    They are at the sampling temperature, before any token was excluded, for so are the trainer's: drawing
    with filters (top_k, top_p, min_p) chooses what is learnt from, and the ratio is of like with like.
    `loss_mask` is 0 for tokens that were read between turns (None: all were drawn); what else is told per
    token is told of those that were drawn. `advantage` is one for all tokens, or one per token. `staleness`
    (versions) says with which weights its log-probs can be found again; corrections may use it. `routes`
    [tokens - 1, mixture layers * k] are the experts to send its tokens to; without, the likeliest.
    `is_comparable`: those weights are at hand. `proximal` are log-probs of the policy before the step's first
    update, where that is not the current one, `reference` those of the policy that the loss compares with,
    `values` what a critic foretold of each token: where somebody else has computed them. `stream_index` is
    its row in the sample stream, from where other ranks of the trainer read what they are not sent.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float | Sequence[float]
    staleness: int = 0
    routes: NDArray[np.int16] | None = None
    is_comparable: bool = True
    proximal: Sequence[float] | None = None
    reference: Sequence[float] | None = None
    values: Sequence[float] | None = None
    stream_index: int | None = None
    loss_mask: Sequence[int] | None = None

    @property
    def num_drawn(self) -> int:
        """Tokens that are learnt from."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def advantages(self) -> list[float]:
        """One per token."""
        given = self.advantage
        return [given] * self.num_drawn if isinstance(given, float | int) else list(given)

    @property
    def has_advantage(self) -> bool:
        """Whether any token has one that is not 0."""
        return any(self.advantages)
