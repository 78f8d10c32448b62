"""A trainer whose arithmetic is written out: REINFORCE with torch's AdamW and none of DORA's trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.learner import ComputeLogprobs
from dora.trainer.packing import balanced_micro_batches, pack
from dora.trainer.policy import Policy
from dora.trainer.trainer import Sample, Trainer, TrainerSettings


class PlainTrainer(Trainer):
    """For fresh samples REINFORCE has the gradient of PPO's clipped loss."""

    def __init__(
        self,
        config: ModelConfig,
        flat: Tensor,
        settings: TrainerSettings,
        reference: Tensor | None = None,
        exact_logprobs: ComputeLogprobs | None = None,
    ) -> None:
        """`reference` and `exact_logprobs` are not used: REINFORCE has no ratio."""
        self.settings, self.num_steps_done = settings, 0
        layout, self._flat, self._gradient = WeightLayout(config), flat, torch.zeros_like(flat)
        whole = flat.detach().requires_grad_()  # the same memory: one AdamW step is one operation
        whole.grad = self._gradient
        self._adamw = torch.optim.AdamW([whole], weight_decay=settings.weight_decay, fused=True)
        views = {name: view.requires_grad_() for name, view in layout.views(flat.detach()).items()}
        for name, view in layout.views(self._gradient).items():
            views[name].grad = view
        self._policy = Policy(config, views)

    @property
    def flat(self) -> Tensor:
        return self._flat

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        for part in self._micro_batches([s for s in samples if s.has_advantage]):
            batch = pack([s.prompt_ids for s in part], [s.token_ids for s in part], self._flat.device)
            logprobs, _ = self._policy.logprobs(batch)
            advantages = torch.tensor([a for s in part for a in s.advantages])
            torch.autograd.backward(-(advantages * logprobs).sum())
        self._gradient /= sum(len(s.token_ids) for s in samples)
        self._gradient *= min(1.0, self.settings.max_grad_norm / self._norm())
        self._adamw.param_groups[0]["lr"] = self._learning_rate()
        self._adamw.step()
        self._gradient.zero_()
        self.num_steps_done += 1
        return {}

    def _norm(self) -> float:
        """In fp64 over chunks; the chunks are those of the trainer."""
        norms = torch.stack([chunk.norm() for chunk in self._gradient.split(2**16)])
        return math.sqrt(norms.double().square().sum())

    def _learning_rate(self) -> float:
        """Linear warm-up to the peak, then linear to 0 at the end."""
        step, s = self.num_steps_done, self.settings
        if step < s.warmup_steps:
            return s.lr * (step + 1) / (s.warmup_steps + 1)
        return s.lr * ((s.num_steps - step) / (s.num_steps - s.warmup_steps))

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        """Those of the trainer: gradients are rounded as they are summed, so the order matters."""
        prompts, lengths = [s.prompt_ids for s in samples], [s.num_tokens for s in samples]
        parts = balanced_micro_batches(prompts, lengths, self.settings.micro_batch_tokens)
        return [[samples[i] for i in part] for part in parts]
