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
from dora.trainer.packing import by_micro_batch, pack_samples
from dora.trainer.perf import forward_flops
from dora.trainer.policy import Policy
from dora.trainer.routing_replay import replay_routes
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.transformers_policy import policy_class


def response_logprobs(
    policy: Policy, samples: Sequence[Sample], micro_batch_tokens: int, metrics: StepMetrics
) -> list[Tensor]:
    """Log-probs of each sample's tokens of the loss, in micro-batches; adds the FLOPs to `metrics`."""
    config = policy.config

    def compute(own: list[Sample]) -> Tensor:
        routes = [s.routes for s in own]
        batch = pack_samples(own, policy.device, routes)
        router = replay_routes(config, batch, routes) if config.moe_layers and policy.takes_router else None
        metrics.num_flops += forward_flops(config, batch)
        return policy.logprobs(batch, router)[0]

    with torch.no_grad():
        return by_micro_batch(samples, micro_batch_tokens, compute)


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
        assert self._flat is not None, "load_weights was not called"
        if self._policy is not None:
            budget = self._settings.micro_batch_tokens
            return [x.float().cpu() for x in response_logprobs(self._policy, group, budget, StepMetrics())]
        assert self._exact_logprobs is not None
        answers = [s for s in group if s.token_ids]
        prompts, responses = [s.prompt_ids for s in answers], [s.token_ids for s in answers]
        logprobs = self._exact_logprobs(self._flat, prompts, responses)
        parts = zip(group, logprobs.split([len(s.token_ids) for s in group]), strict=True)
        return [x if s.loss_mask is None else x[torch.tensor(s.loss_mask) > 0] for s, x in parts]
