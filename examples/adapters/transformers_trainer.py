"""A training engine that is transformers and torch's AdamW: what an adapter looks like.

    dora train examples/gcd.toml --set trainer.adapter=examples/adapters/transformers_trainer.py:Transformers

PPO's clipped loss over all tokens of the batch that the policy drew, one answer at a time; it refuses
whatever else is asked of it. `dora.contract.training` has been run against it (tests/contract).
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
from dora.model.weights import Layout
from dora.trainer.optimizer import learning_rate
from dora.trainer.settings import Sample, TrainerSettings

KNOWN = ("lr", "num_steps", "warmup_steps", "lr_decay", "weight_decay", "betas", "max_grad_norm",
         "clip_ratio_low", "clip_ratio_high", "temperature",
         "micro_batch_tokens", "logits_chunk_tokens", "loss_scale_factor", "clip_ratio_c", "dpo_beta",
         "kl_loss_type")  # fmt: skip


class Transformers:
    """One model of transformers, stepped by torch."""

    def __init__(self, *, config: ModelConfig, flat: Tensor, settings: TrainerSettings, device: str) -> None:
        """Raises InputError for settings that it would ignore."""
        if device != "cpu":
            raise InputError("trainer.adapter: it computes on the CPU only; set trainer.device to cpu")
        plain = asdict(TrainerSettings(lr=settings.lr, num_steps=settings.num_steps))
        for name, value in asdict(settings).items():
            if name not in KNOWN and value != plain[name]:
                raise InputError(
                    f"trainer.adapter: it knows no {name} = {value!r}; leave it at {plain[name]!r}"
                )
        self._settings, self._layout = settings, Layout(config)
        self._flat = flat.clone()
        told = {key: value for key, value in config.to_dict().items() if key != "dtype"}
        self._model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**told))
        views = self._layout.views(self._flat)
        self._parameters = dict(self._model.named_parameters())
        for name, parameter in self._parameters.items():
            parameter.data = views[name]
        self._optimizer = torch.optim.AdamW(
            self._parameters.values(), settings.lr, settings.betas, weight_decay=settings.weight_decay
        )
        self.num_steps_done = 0
        self.forget()

    @property
    def flat(self) -> Tensor:
        return self._flat

    @property
    def can_work(self) -> bool:
        return bool(self._waiting)

    @property
    def num_accumulated(self) -> int:
        return self._num_worked

    def put(self, samples: Sequence[Sample], is_whole: bool = False) -> None:
        self._waiting += [s for s in samples if s.token_ids and s.has_advantage]
        self._num_tokens += sum(s.num_drawn for s in samples)

    def work(self) -> None:
        """One answer's share of the gradient."""
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
        self._num_worked += sample.num_drawn

    def finish(self) -> dict[str, float]:
        while self.can_work:
            self.work()
        s = self._settings
        lr = learning_rate(s.lr, self.num_steps_done, s.warmup_steps, s.num_steps, s.lr_decay)
        norm = 0.0
        if self._num_worked:
            for parameter in self._parameters.values():
                parameter.grad = None if parameter.grad is None else parameter.grad / self._num_tokens
            norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), s.max_grad_norm))
            if not norm < float("inf"):
                raise RunError(f"the gradient's norm is {norm}; lower trainer.lr, or look at the rewards")
            for group in self._optimizer.param_groups:
                group["lr"] = lr
            self._optimizer.step()
        metrics = {
            "actor/num_tokens": float(self._num_worked),
            "actor/pg_loss": self._loss / max(1, self._num_tokens),
            "actor/grad_norm": norm,
            "actor/lr": lr,
        }
        self.num_steps_done += 1
        self.forget()
        return metrics

    def forget(self) -> None:
        self._waiting: deque[Sample] = deque()
        self._num_tokens, self._num_worked, self._loss = 0, 0, 0.0
        self._optimizer.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        return {"num_steps_done": self.num_steps_done, "optimizer": self._optimizer.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_steps_done = state["num_steps_done"]
        self._optimizer.load_state_dict(state["optimizer"])
