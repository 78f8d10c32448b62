"""PPO's critic: a decoder that says of every token what reward is to come, learnt beside the policy.

It has a head of one value in place of the vocabulary's, named as transformers' token classifiers name
it. All its weights are one flat buffer: the decoder's, then the head's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.advantage import gae, whitened
from dora.trainer.loss import value_loss
from dora.trainer.optimizer import FlatAdamW, learning_rate
from dora.trainer.packing import balanced_micro_batches, pack_samples
from dora.trainer.policy import Policy
from dora.trainer.precision import Bf16Weights
from dora.trainer.settings import Sample
from dora.trainer.updates import kept_whole, updates

_HEAD = "score.weight", "score.bias"


@dataclass(frozen=True)
class CriticSettings:
    """How a critic judges and learns; names and defaults are verl's. `num_steps` is the run's length.

    A step learns `ppo_epochs` times from its batch, in updates of near `batch_tokens` tokens (None: one
    update); a value that moved by more than `cliprange_value` in it learns no further.
    """

    lr: float
    num_steps: int
    warmup_steps: int = 0
    lr_decay: Literal["linear", "constant"] = "linear"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ppo_epochs: int = 1
    cliprange_value: float = 0.5
    gamma: float = 1.0
    lam: float = 1.0
    batch_tokens: int | None = None
    micro_batch_tokens: int = 1024
    dtype: Literal["float32", "bfloat16"] = "float32"
    activation_checkpointing: bool = False


class ValueLayout(Layout):
    """Where a critic's parameters lie: a decoder's without the vocabulary's head, then its own head's."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(replace(config, tie_word_embeddings=True))
        self.num_decoder = self.numel
        for name, shape in zip(_HEAD, ((1, config.hidden_size), (1,)), strict=True):
            self.shapes[name], self.offsets[name] = shape, self.numel
            self.numel += math.prod(shape)


def initial_critic(config: ModelConfig, flat: Tensor) -> Tensor:
    """Flat weights of a critic that begins as the decoder `flat`, and with all values at 0."""
    layout = ValueLayout(config)
    made = torch.zeros(layout.numel, dtype=flat.dtype, device=flat.device)
    made[: layout.num_decoder] = flat[: layout.num_decoder]
    return made


@dataclass(frozen=True)
class Judged:
    """A batch with advantages of its tokens, and what they come from, response by response."""

    samples: list[Sample]
    returns: list[list[float]]

    def metrics(self) -> dict[str, float]:
        """What was foretold of the batch, and how good that was."""
        values = torch.tensor([value for s in self.samples for value in s.values or ()])
        if not len(values):
            return {}
        returns = torch.tensor([value for own in self.returns for value in own])
        unexplained = (returns - values).var(correction=0) / (returns.var(correction=0) + 1e-5)
        return {
            "critic/values/mean": float(values.mean()),
            "critic/returns/mean": float(returns.mean()),
            "critic/vf_explained_var": 1.0 - float(unexplained),
        }


def judged(samples: Sequence[Sample], rewards: Sequence[float], gamma: float, lam: float) -> Judged:
    """A batch whose `values` are known. Advantages are whitened over its tokens, as in verl.

    A response's reward comes with its last token. Empty responses have no tokens to judge.
    """
    made = [gae(reward, s.values or (), gamma, lam) for s, reward in zip(samples, rewards, strict=True)]
    raw = [advantage for advantages, _ in made for advantage in advantages]
    flat = iter(whitened(raw, [1] * len(raw)) if raw else [])
    told = [replace(s, advantage=[next(flat) for _ in range(s.num_drawn)]) for s in samples]
    return Judged(told, [returns for _, returns in made])


class Critic:
    """Owns its flat weights ([numel of ValueLayout], fp32) and learns in place."""

    def __init__(self, config: ModelConfig, flat: Tensor, settings: CriticSettings) -> None:
        """`flat` is stepped in place; `initial_critic` makes one."""
        self.flat, self.settings = flat, settings
        layout = ValueLayout(config)
        self._optimizer = FlatAdamW(layout, flat, settings.weight_decay, (0.9, 0.999))
        self._copies = None
        if settings.dtype == "bfloat16":
            self._copies = Bf16Weights(layout, flat, self._optimizer.weights)
        weights = (self._copies or self._optimizer).weights
        self._decoder = Policy(config, weights, keeps_activations=not settings.activation_checkpointing)
        self._judged: Judged | None = None

    def foretell(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with a value before every response token."""
        answers = [s for s in samples if s.token_ids]
        values: list[Tensor] = [torch.empty(0)] * len(answers)
        for members in self._micro_batches(answers):
            own = [answers[i] for i in members]
            with torch.no_grad():
                found = self._values(own).split([s.num_drawn for s in own])
            for i, of_one in zip(members, found, strict=True):
                values[i] = of_one
        told = iter(values)
        return [replace(s, values=next(told).tolist() if s.token_ids else []) for s in samples]

    def judge(self, samples: Sequence[Sample], rewards: Sequence[float]) -> list[Sample]:
        """A batch with advantages of its tokens, as `judged`; values that it has are not foretold again."""
        if any(s.values is None for s in samples):
            samples = self.foretell(samples)
        self._judged = judged(samples, rewards, self.settings.gamma, self.settings.lam)
        return self._judged.samples

    def learn(self, step: int) -> dict[str, float]:
        """Learn to foretell the returns of the batch that was judged last; metrics as verl names them.

        Raises RunError where none was judged in this step, or where the gradient is not finite; updates
        that were taken before stay.
        """
        settings, judged = self.settings, self._judged
        if judged is None:
            raise RunError("critic: no batch was judged since the last step; pass each one to `judge` first")
        rate = learning_rate(settings.lr, step, settings.warmup_steps, settings.num_steps, settings.lr_decay)
        told = zip(judged.samples, judged.returns, strict=True)
        answers = [(s, returns) for s, returns in told if s.token_ids]
        lengths = [s.num_drawn for s, _ in answers]
        loss = clipped = 0.0
        norms: list[float] = []
        for _ in range(settings.ppo_epochs):
            for part in updates(lengths, settings.batch_tokens):
                total = settings.batch_tokens or max(1, sum(lengths))
                for members in self._micro_batches([answers[i][0] for i in part]):
                    added = self._add([answers[part[i]] for i in members], total)
                    loss, clipped = loss + added[0], clipped + added[1]
                norms.append(self._optimizer.step(rate, settings.max_grad_norm))
                if self._copies:
                    self._copies.refresh()
        num_learnt = max(1, sum(lengths) * settings.ppo_epochs)
        return judged.metrics() | {
            "critic/vf_loss": loss / num_learnt,
            "critic/vf_clipfrac": clipped / num_learnt,
            "critic/grad_norm": math.fsum(norms) / len(norms),
            "critic/lr": rate,
        }

    def end_step(self) -> None:
        """What was judged has been learnt, and counts no more."""
        self._judged = None

    def forget(self) -> None:
        """Begin the gradient anew."""
        self._optimizer.gradient.zero_()

    def keep(self) -> Callable[[], None]:
        """Copy weights and moments to the host's memory; what is returned puts them back."""
        return kept_whole(self)

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's; a resumed run needs the weights, too."""
        return self._optimizer.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`; the weights may have changed, too."""
        self._optimizer.load_state_dict(state)
        if self._copies:
            self._copies.refresh()

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[int]]:
        prompts = [s.prompt_ids for s in samples]
        lengths = [len(s.prompt_ids) + len(s.token_ids) for s in samples]
        return balanced_micro_batches(prompts, lengths, self.settings.micro_batch_tokens)

    def _values(self, samples: Sequence[Sample]) -> Tensor:
        """The value before every response token [N], one response after the other."""
        batch = pack_samples(samples, self._decoder.device)
        weight, bias = (self._optimizer.weights[name] for name in _HEAD)
        states = self._decoder.hidden(batch).index_select(0, batch.rows)
        return F.linear(states.float(), weight, bias).squeeze(-1)

    def _add(self, answers: Sequence[tuple[Sample, list[float]]], total: int) -> tuple[float, float]:
        """Add the gradient of some responses over `total`; the sums of losses and of clipped tokens."""
        values = self._values([s for s, _ in answers])
        old = values.new_tensor([value for s, _ in answers for value in s.values or ()])
        returns = values.new_tensor([value for _, own in answers for value in own])
        losses, is_clipped = value_loss(values, old, returns, self.settings.cliprange_value)
        torch.autograd.backward(losses.sum() / total)
        return float(losses.detach().sum()), float(is_clipped.sum())
