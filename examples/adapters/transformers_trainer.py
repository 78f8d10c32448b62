"""An example of a training backend: Hugging Face transformers and torch's AdamW as DORA's trainer.

    dora train examples/gcd.toml --set trainer.backend=examples/adapters/transformers_trainer.py:Transformers

It has PPO's clipped loss over all sampled tokens of a batch, one answer at a time, and rejects other
settings. It passes the contract in `dora.testing.trainer_contract`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from dora.errors import InputError, RunError
from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout
from dora.trainer.settings import Sample, TrainerSettings

SUPPORTED = ("lr", "num_steps", "warmup_steps", "lr_decay", "min_lr_ratio", "weight_decay", "betas",
         "max_grad_norm", "clip_ratio_low", "clip_ratio_high", "temperature",
         "micro_batch_tokens", "logits_chunk_tokens", "loss_scale_factor", "clip_ratio_c", "dpo_beta",
         "kl_loss_type")  # fmt: skip


class Transformers:
    """A `TrainingEngine` with one model of transformers."""

    def __init__(self, *, config: ModelConfig, flat: Tensor, settings: TrainerSettings, device: str) -> None:
        """Raises InputError for settings that it does not support."""
        if device != "cpu":
            raise InputError(f"trainer.device = {device!r}: the backend supports the CPU only; set it to cpu")
        defaults = asdict(TrainerSettings(lr=settings.lr, num_steps=settings.num_steps))
        for name, value in asdict(settings).items():
            if name not in SUPPORTED and value != defaults[name]:
                raise InputError(
                    f"trainer.backend does not support {name} = {value!r}; set it to {defaults[name]!r}"
                )
        self._settings, self._layout = settings, WeightLayout(config)
        self._flat = flat.clone()
        shape = {key: value for key, value in config.to_dict().items() if key != "dtype"}
        self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**shape))
        views = self._layout.views(self._flat)
        self._parameters = dict(self._model.named_parameters())
        for name, parameter in self._parameters.items():
            parameter.data = views[name]
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), settings.lr, settings.betas, weight_decay=settings.weight_decay
        )
        self.num_steps_done = 0
        self.discard_batch()

    @property
    def flat(self) -> Tensor:
        return self._flat

    @property
    def can_accumulate(self) -> bool:
        return bool(self._waiting)

    @property
    def num_accumulated_tokens(self) -> int:
        return self._num_accumulated_tokens

    def add_samples(self, samples: Sequence[Sample], is_whole_batch: bool = False) -> None:
        self._waiting += [s for s in samples if s.token_ids and s.has_advantage]
        self._num_tokens += sum(s.num_loss_tokens for s in samples)

    def accumulate(self) -> None:
        """Add the gradient of one answer."""
        sample = self._waiting.popleft()
        tokens = torch.tensor([[*sample.prompt_ids, *sample.token_ids]])
        answer = tokens[0, len(sample.prompt_ids) :]
        logits = self._model(tokens).logits[0, len(sample.prompt_ids) - 1 : -1]
        logprobs = torch.log_softmax(logits / self._settings.temperature, -1)
        own = logprobs.gather(1, answer[:, None])[:, 0]
        if sample.loss_mask is not None:
            own = own[torch.tensor(sample.loss_mask, dtype=torch.bool)]
        advantage = torch.tensor(sample.advantages)
        ratio = (own - torch.tensor(sample.logprobs)).exp()
        low, high = 1 - self._settings.clip_ratio_low, 1 + self._settings.clip_ratio_high
        loss = -torch.minimum(ratio * advantage, ratio.clamp(low, high) * advantage).sum()
        loss.backward()
        self._loss += float(loss.detach())
        self._num_accumulated_tokens += sample.num_loss_tokens

    def finish_step(self) -> dict[str, float]:
        while self.can_accumulate:
            self.accumulate()
        s = self._settings
        lr = s.lr_of(self.num_steps_done)
        norm = 0.0
        if self._num_accumulated_tokens:
            for parameter in self._parameters.values():
                parameter.grad = None if parameter.grad is None else parameter.grad / self._num_tokens
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), s.max_grad_norm))
            if not norm < float("inf"):
                raise RunError(f"the gradient norm is {norm}; lower trainer.lr, or check the rewards")
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        metrics = {
            "actor/num_tokens": float(self._num_accumulated_tokens),
            "actor/pg_loss": self._loss / max(1, self._num_tokens),
            "actor/grad_norm": norm,
            "actor/lr": lr,
        }
        self.num_steps_done += 1
        self.discard_batch()
        return metrics

    def discard_batch(self) -> None:
        self._waiting: deque[Sample] = deque()
        self._num_tokens, self._num_accumulated_tokens, self._loss = 0, 0, 0.0
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps_done": self.num_steps_done, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps_done = state["num_steps_done"]
        self._optimizer.load_state_dict(state["optimizer"])
