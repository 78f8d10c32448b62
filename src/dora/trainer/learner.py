"""Forward, loss and backward of micro-batches, and a policy with its optimizer in one process.

`distributed` has a learner of several ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.device import to_device
from dora.model.weights import WeightLayout
from dora.trainer.corrections import CorrectedTokens, apply_correction
from dora.trainer.lora import LoraAdamW
from dora.trainer.loss import LossInputs, kl_divergence, policy_loss_function, unnormalized_token_weights
from dora.trainer.metrics import StepMetrics
from dora.trainer.optimizer import Bf16Weights, FlatAdamW, host_copy
from dora.trainer.packing import PackedBatch, TokenIds, pack_samples
from dora.trainer.perf import forward_flops
from dora.trainer.policy import BatchLogprobs, Policy
from dora.trainer.recipe import Dtype
from dora.trainer.routing_replay import CountingRouter, replay_routes
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.transformers_policy import policy_class

# (flat weights, prompts, responses) -> log-probs of all response tokens, as engines compute them.
ComputeLogprobs = Callable[[Tensor, Sequence[TokenIds], Sequence[TokenIds]], Tensor]


class LocalWeights:
    """Weights of one process with their optimizer, and a copy to compute in bf16 with."""

    def __init__(
        self, layout: WeightLayout, flat: Tensor, optimizer: FlatAdamW | LoraAdamW, dtype: Dtype
    ) -> None:
        """`flat` [numel], fp32, is updated in place."""
        self.flat, self._layout, self._optimizer = flat, layout, optimizer
        self._bf16 = Bf16Weights(layout, flat, optimizer.weights) if dtype == "bfloat16" else None

    @property
    def _compute_weights(self) -> Mapping[str, Tensor]:
        return (self._bf16 or self._optimizer).weights

    def _step(self, lr: float, max_grad_norm: float) -> float:
        norm = self._optimizer.step(lr, max_grad_norm)
        self._refresh()
        return norm

    def _refresh(self) -> None:
        if self._bf16:
            self._bf16.refresh()

    def zero_grad(self) -> None:
        """Clear the accumulated gradient."""
        self._optimizer.gradient.zero_()

    def replace_weights(self, flat: Tensor) -> None:
        """Use the weights `flat` [numel] from now on; the state of the optimizer stays."""
        self.flat.copy_(flat)
        self._refresh()

    def snapshot(self) -> Callable[[], None]:
        """Copy weights and moments to host memory; returns the function that restores them."""
        flat, optimizer = self.flat.detach().to("cpu", copy=True), host_copy(self.state_dict())

        def restore() -> None:
            self.zero_grad()
            self.load_state_dict(optimizer)
            self.replace_weights(flat)  # last: adapters may have been merged with other rounding

        return restore

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's state, in the layout of torch's AdamW over one flat parameter."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore a `state_dict`; the weights may have been replaced, too."""
        self._optimizer.load_state_dict(dict(state))
        self._refresh()


class LocalLearner(LocalWeights):
    """A policy's weights with gradient and optimizer. `DistributedLearner` has the same methods."""

    num_ranks = 1

    def __init__(
        self,
        config: ModelConfig,
        flat: Tensor,
        settings: TrainerSettings,
        reference: Tensor | None,
        exact_logprobs: ComputeLogprobs | None,
    ) -> None:
        """The arguments are those of `Trainer`."""
        layout, self._exact_logprobs = WeightLayout(config), exact_logprobs
        decay, betas = settings.weight_decay, settings.betas
        optimizer: FlatAdamW | LoraAdamW = (
            LoraAdamW(layout, flat, settings.lora, decay, betas)
            if settings.lora
            else FlatAdamW(layout, flat, decay, betas, settings.offload_optimizer)
        )
        super().__init__(layout, flat, optimizer, settings.dtype)
        self._policy = policy_class(config, settings.model)(
            config,
            self._compute_weights,
            settings.temperature,
            self._exact_logprobs_of(flat),
            logits_chunk_tokens=settings.logits_chunk_tokens,
            torch_compile=settings.torch_compile,
            activation_checkpointing=settings.activation_checkpointing,
            images=settings.images,
        )
        reference_policy: Policy | None = None
        if settings.computes_reference:
            frozen = flat.clone() if reference is None else reference
            reference_policy = self._policy.with_weights(self._compute_views(frozen), None)
        self._accumulator = GradientAccumulator(self._policy, settings, reference_policy)

    @property
    def device(self) -> torch.device:
        return self.flat.device

    def published_weights(self, dtype: torch.dtype) -> Tensor:
        """The current weights [numel] to be stored in `dtype`; in fp32, or in `dtype` if that is cheaper."""
        return self.flat

    def accumulate(self, micro_batches: Sequence[Sequence[Sample]], metrics: StepMetrics) -> None:
        """Add the gradients of micro-batches, at most one per rank, and their sums to `metrics`."""
        for samples in micro_batches:
            self._accumulator.accumulate(samples, metrics)

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        """Divide the gradient, update the weights; returns the gradient's norm before clipping.

        Raises RunError, with the weights unchanged, if the norm is not finite.
        """
        self._optimizer.gradient.div_(divisor)
        return self._step(lr, max_grad_norm)

    def policy_with_weights(self, flat: Tensor) -> Policy:
        """The policy with other weights [numel], without gradients."""
        return self._policy.with_weights(self._compute_views(flat), self._exact_logprobs_of(flat))

    def save_state(self, folder: Path) -> tuple[dict[str, Any], Future[None] | None]:
        """A copy of the `state_dict` in host memory, for a checkpoint; see `DistributedLearner`."""
        return host_copy(self._optimizer.state_dict()), None

    def _compute_views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views without gradients on this device, in the compute dtype; they copy `flat` only if needed."""
        dtype = torch.bfloat16 if self._bf16 else self.flat.dtype
        return self._layout.views(flat.to(self.flat.device, dtype))

    def _exact_logprobs_of(self, flat: Tensor) -> BatchLogprobs | None:
        """In exact mode, the function that computes log-probs of batches with these weights."""
        if (compute := self._exact_logprobs) is None:
            return None
        return lambda batch: compute(flat, batch.prompts, batch.responses)[batch.loss_mask]


class GradientAccumulator:
    """Adds gradients of micro-batches to those of a policy's weights."""

    def __init__(self, policy: Policy, settings: TrainerSettings, reference: Policy | None) -> None:
        """`reference` is the policy of the KL term and of pairs, if the trainer computes it."""
        self._policy, self._settings, self._reference = policy, settings, reference
        self._policy_loss = policy_loss_function(settings.policy_loss, settings.policy_loss_options)

    def accumulate(self, samples: Sequence[Sample], metrics: StepMetrics) -> None:
        """Add the gradient of one micro-batch, times the batch's divisor, and its sums to `metrics`."""
        settings, policy = self._settings, self._policy
        routes = [s.routes for s in samples]
        batch = pack_samples(samples, policy.device, routes)
        router = None
        if policy.config.moe_layers and policy.takes_router:
            replayed = replay_routes(policy.config, batch, routes)
            router = CountingRouter(policy.config, replayed, batch.logits_indices)
        logprobs, entropies = policy.logprobs(batch, router)
        tokens = _token_tensors(samples, settings, logprobs)
        corrected = apply_correction(
            settings.correction, logprobs, tokens.behaviour, tokens.lengths, tokens.staleness, tokens.proximal
        )
        losses, is_clipped = self._losses(batch, logprobs, entropies, corrected, tokens, metrics)
        torch.autograd.backward((losses * tokens.weights).sum())
        metrics.add(
            logprobs, tokens.behaviour, is_clipped, entropies, tokens.is_fresh, tokens.ages, corrected
        )
        num_passes = 3 + (self._reference is not None)  # a backward pass counts as two
        metrics.num_flops += num_passes * forward_flops(policy.config, batch)
        if router is not None:
            metrics.expert_load = metrics.expert_load + router.num_tokens

    def _losses(
        self,
        batch: PackedBatch,
        logprobs: Tensor,
        entropies: Tensor,
        corrected: CorrectedTokens,
        tokens: _TokenTensors,
        metrics: StepMetrics,
    ) -> tuple[Tensor, Tensor]:
        """The loss of every token with all its terms, and whether clipping decided it; all [N]."""
        settings, reference = self._settings, tokens.reference
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference.logprobs(batch)
        inputs = LossInputs(
            logprobs,
            corrected.old_logprobs,
            tokens.advantages,
            tokens.lengths,
            reference,
            tokens.behaviour,
            tokens.staleness,
        )
        losses, is_clipped = self._policy_loss(inputs, settings)
        losses = losses * corrected.weights
        metrics.pg_loss += (losses.detach() * tokens.weights).sum().double()
        if reference is not None and settings.kl_loss_coef:
            divergence = kl_divergence(logprobs, reference, settings.kl_loss_type)
            kl_loss = (divergence.detach() * tokens.weights).sum().double()
            metrics.kl_loss = kl_loss if metrics.kl_loss is None else metrics.kl_loss + kl_loss
            losses = losses + settings.kl_loss_coef * divergence
        if settings.entropy_coeff:
            losses = losses - settings.entropy_coeff * entropies
        return losses, is_clipped


@dataclass(frozen=True)
class _TokenTensors:
    """The samples' values for N response tokens, one response after another; all tensors and arrays [N]."""

    lengths: list[int]
    behaviour: Tensor
    advantages: Tensor
    staleness: Tensor
    ages: NDArray[np.int64]  # the staleness on the host
    is_fresh: NDArray[np.bool_]  # the current weights sampled the token
    weights: Tensor  # in the loss, times the batch's divisor
    proximal: Tensor | None  # None: the current log-probs
    reference: Tensor | None  # None: not computed yet


def _token_tensors(samples: Sequence[Sample], settings: TrainerSettings, like: Tensor) -> _TokenTensors:
    """Tensors of these samples; those of log-probs and weights have the dtype of `like`."""
    lengths = [s.num_loss_tokens for s in samples]

    def column(values: Iterable[Sequence[float]]) -> Tensor:
        """One after another: [N]."""
        return to_device(torch.tensor([x for own in values for x in own], dtype=like.dtype), like.device)

    def optional(columns: Sequence[Sequence[float] | None]) -> Tensor | None:
        """A column that all samples have, or none."""
        present = [values for values in columns if values is not None]
        return column(present) if present else None

    weights = unnormalized_token_weights(lengths, settings.loss_agg_mode, settings.loss_scale_factor)
    ages = np.repeat([s.staleness for s in samples], lengths)
    return _TokenTensors(
        lengths,
        behaviour=column(s.logprobs for s in samples),
        advantages=column(s.advantages for s in samples),
        staleness=to_device(torch.from_numpy(ages), like.device),
        ages=ages,
        is_fresh=np.repeat([s.is_comparable and s.staleness == 0 for s in samples], lengths),
        weights=column([weight] * num for weight, num in zip(weights, lengths, strict=True)),
        proximal=optional([s.proximal_logprobs for s in samples]),
        reference=optional([s.reference_logprobs for s in samples]),
    )
