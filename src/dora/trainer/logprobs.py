"""Log-probs of responses under given weights, without a gradient.

The trainer computes them for a few samples of its batch; an auxiliary worker for all samples, group by group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.learner import ComputeLogprobs
from dora.trainer.metrics import StepMetrics
from dora.trainer.packing import balanced_micro_batches, pack_samples
from dora.trainer.perf import forward_flops
from dora.trainer.policy import Policy
from dora.trainer.routing_replay import replay_routes
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.transformers_policy import policy_class


def response_logprobs(
    policy: Policy, samples: Sequence[Sample], micro_batch_tokens: int, metrics: StepMetrics
) -> list[Tensor]:
    """Log-probs of each sample's tokens of the loss, in micro-batches; adds the FLOPs to `metrics`.

    Responses must not be empty.
    """
    results = [torch.empty(0)] * len(samples)
    prompts, lengths = [s.prompt_ids for s in samples], [s.num_tokens for s in samples]
    for members in balanced_micro_batches(prompts, lengths, micro_batch_tokens):
        own = [samples[i] for i in members]
        parts = _micro_batch_logprobs(policy, own, metrics).split([s.num_loss_tokens for s in own])
        for i, logprobs in zip(members, parts, strict=True):
            results[i] = logprobs
    return results


def _micro_batch_logprobs(policy: Policy, samples: Sequence[Sample], metrics: StepMetrics) -> Tensor:
    """Log-probs of all tokens of the loss [N]."""
    config, routes = policy.config, [s.routes for s in samples]
    batch = pack_samples(samples, policy.device, routes)
    router = replay_routes(config, batch, routes) if config.moe_layers and policy.takes_router else None
    metrics.num_flops += forward_flops(config, batch)
    with torch.no_grad():
        return policy.logprobs(batch, router)[0]


class GroupLogprobs:
    """Log-probs of groups under weights that another process trains, or that stay fixed.

    Groups never share a forward pass, so the bits of a group depend on nothing but the group and the weights.
    A repeated step therefore has the same log-probs, whatever else its batch contains.
    """

    def __init__(
        self,
        config: ModelConfig,
        settings: TrainerSettings,
        device: str,
        exact_logprobs: ComputeLogprobs | None = None,
    ) -> None:
        """Computes as the trainer of these settings does; `exact_logprobs` as in `Trainer`."""
        self._config, self._settings, self._exact_logprobs = config, settings, exact_logprobs
        self._device, self._dtype = torch.device(device), getattr(torch, settings.dtype)
        self._flat: Tensor | None = None
        self._policy: Policy | None = None

    def load_weights(self, flat: Tensor) -> None:
        """Use the weights `flat` [numel] from now on; the caller must not change them."""
        self._flat = flat
        if self._exact_logprobs is None:
            views = WeightLayout(self._config).views(flat.to(self._device, self._dtype))
            chunk = self._settings.logits_chunk_tokens
            make = policy_class(self._config, self._settings.model)
            policy = self._policy or make(
                self._config, views, self._settings.temperature, logits_chunk_tokens=chunk,
                torch_compile=self._settings.torch_compile, images=self._settings.images,
            )  # fmt: skip
            self._policy = policy.with_weights(views, None)

    def __call__(self, group: Sequence[Sample]) -> list[Tensor]:
        """Log-probs of each response's tokens of the loss, fp32 on the CPU; empty for an empty response."""
        logprobs = iter(self._compute([s for s in group if s.token_ids]))
        return [next(logprobs).float().cpu() if s.token_ids else torch.empty(0) for s in group]

    def _compute(self, samples: Sequence[Sample]) -> Sequence[Tensor]:
        if not samples:
            return []
        assert self._flat is not None, "load_weights was not called"
        if self._exact_logprobs is not None:
            prompts, responses = [s.prompt_ids for s in samples], [s.token_ids for s in samples]
            logprobs = self._exact_logprobs(self._flat, prompts, responses)
            parts = zip(samples, logprobs.split([len(s.token_ids) for s in samples]), strict=True)
            return [x if s.loss_mask is None else x[torch.tensor(s.loss_mask) > 0] for s, x in parts]
        assert self._policy is not None
        return response_logprobs(self._policy, samples, self._settings.micro_batch_tokens, StepMetrics())
