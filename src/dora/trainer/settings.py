"""Settings of a trainer, and the samples that it learns from: plain values, which processes exchange."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dora.core.types import RequestId
from dora.trainer.lora import LoraSettings
from dora.trainer.loss import LossSettings
from dora.trainer.recipe import (
    Correction,
    Dtype,
    KLEstimator,
    LearningRateSchedule,
    LossAggMode,
    ModelImplementation,
    traits_of,
)


@dataclass(frozen=True)
class TrainerSettings(LossSettings, LearningRateSchedule):
    """Settings of `Trainer`.

    `loss_scale_factor` (tokens) is the divisor of seq-mean-token-sum-norm. With `mini_batch_tokens` a step
    takes several updates of about this many response tokens each, and divides their gradients by it.
    `model` chooses who computes the policy: transformers, or for a family that it knows the own decoder.
    `temperature` is the sampling temperature of the samples. At most `logits_chunk_tokens` rows of vocabulary
    logits exist at a time. `torch_compile`: see `Policy`. With
    `lora`, adapters are trained instead of the weights. With `offload_optimizer` AdamW's moments of the
    weights are in host memory. With `samples_have_reference` the trainer reads the reference policy's
    log-probs from its samples. `images` is the run's `ImageFolder`, for prompts with images.
    """

    warmup_steps: int = 10
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.999)
    max_grad_norm: float = 1.0
    policy_loss: str = "ppo_clip"  # a name of `LOSS_TRAITS`, or "file.py:function"
    policy_loss_options: Mapping[str, object] = field(default_factory=dict)  # arguments of that function
    correction: Correction = field(default_factory=Correction)
    kl_loss_coef: float = 0.0
    kl_loss_type: KLEstimator = "k3"
    entropy_coeff: float = 0.0
    loss_agg_mode: LossAggMode = "token-mean"
    loss_scale_factor: int | None = None
    mini_batch_tokens: int | None = None
    micro_batch_tokens: int = 1024
    temperature: float = 1.0
    dtype: Dtype = "float32"  # of forward and backward; weights are stepped in fp32
    activation_checkpointing: bool = False
    logits_chunk_tokens: int = 256
    torch_compile: bool = False
    model: ModelImplementation = "auto"
    lora: LoraSettings | None = None
    offload_optimizer: bool = False
    samples_have_reference: bool = False
    images: Path | None = None

    @property
    def uses_reference(self) -> bool:
        """Whether the loss needs a reference policy: for a KL term, or for pairs."""
        return self.kl_loss_coef != 0.0 or traits_of(self.policy_loss).unit == "pair"

    @property
    def computes_reference(self) -> bool:
        """Whether the trainer itself holds the reference policy's weights."""
        return self.uses_reference and not self.samples_have_reference


@dataclass(frozen=True)
class Sample:
    """One response with its reward turned into an advantage.

    `loss_mask` is 1 for the response tokens that the policy sampled and 0 for those that an environment
    inserted between turns; None if the policy sampled all of them. Every other per-token field has one
    entry for each token of mask 1.

    `logprobs` are the engine's at the sampling temperature, before top_k, top_p or min_p excluded a token, as
    the trainer's are. `advantage` is one for the whole response, or one per token. `staleness` (versions) is
    the distance to the policy that sampled. `is_comparable`: the trainer can find that policy's weights by
    the staleness, and they are those that the engine reported. `routes` [tokens - 1, MoE layers * k] are the
    experts that the engine chose; without them the trainer's router chooses.

    Other workers may have computed the log-probs of the policy before the step's first update
    (`proximal_logprobs`), those of the reference policy (`reference_logprobs`) and the critic's `values`.
    `stream_row` is the row in the sample stream from which other ranks of the trainer read the columns.
    """

    prompt_ids: Sequence[int]
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    advantage: float | Sequence[float]
    staleness: int = 0
    routes: NDArray[np.int16] | None = None
    is_comparable: bool = True
    proximal_logprobs: Sequence[float] | None = None
    reference_logprobs: Sequence[float] | None = None
    values: Sequence[float] | None = None
    stream_row: RequestId | None = None
    loss_mask: Sequence[int] | None = None

    @property
    def num_loss_tokens(self) -> int:
        """Response tokens of mask 1."""
        return len(self.token_ids) if self.loss_mask is None else sum(self.loss_mask)

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and response."""
        return len(self.prompt_ids) + len(self.token_ids)

    @property
    def advantages(self) -> list[float]:
        """One per token of mask 1."""
        given = self.advantage
        return [given] * self.num_loss_tokens if isinstance(given, float | int) else list(given)

    @property
    def has_advantage(self) -> bool:
        """Whether the advantage of any token is not 0."""
        return any(self.advantages)
