"""PPO's critic: a model that predicts the return at every token, trained beside the policy.

Its head has one output in place of the vocabulary, under the names of transformers' token classifiers. All
its weights are one flat buffer: the decoder's, then the head's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional as F

from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.device import to_device
from dora.model.weights import WeightLayout, parameter_shapes
from dora.trainer.advantage import gae, whiten
from dora.trainer.learner import LocalWeights
from dora.trainer.loss import value_loss
from dora.trainer.optimizer import FlatAdamW
from dora.trainer.packing import balanced_micro_batches, by_micro_batch, pack_samples, split_mini_batches
from dora.trainer.recipe import Dtype, LearningRateSchedule
from dora.trainer.settings import Sample
from dora.trainer.transformers_policy import policy_class

_HEAD = "score.weight", "score.bias"


@dataclass(frozen=True)
class CriticSettings(LearningRateSchedule):
    """Settings of `Critic`; names and defaults are verl's.

    A step trains `ppo_epochs` times on its batch, in updates of about `mini_batch_tokens` tokens (None: one
    update). A value that moved by more than `cliprange_value` since its prediction has no gradient. `gamma`
    is the discount factor and `lam` GAE's lambda.
    """

    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    ppo_epochs: int = 1
    cliprange_value: float = 0.5
    gamma: float = 1.0
    lam: float = 1.0
    mini_batch_tokens: int | None = None
    micro_batch_tokens: int = 1024
    dtype: Dtype = "float32"
    activation_checkpointing: bool = False


def value_layout(config: ModelConfig) -> WeightLayout:
    """Offsets of a critic's parameters: a decoder's without the vocabulary's head, then the value head's."""
    head = dict(zip(_HEAD, ((1, config.hidden_size), (1,)), strict=True))
    return WeightLayout(parameter_shapes(config.without_head()) | head)


def initial_critic_weights(config: ModelConfig, flat: Tensor) -> Tensor:
    """Flat weights of a critic that starts from the decoder `flat`, with a head of zeros."""
    layout = value_layout(config)
    weights = torch.zeros(layout.numel, dtype=flat.dtype, device=flat.device)
    initial = WeightLayout(config).views(flat)
    for name, view in layout.views(weights).items():
        if name in initial:
            view.copy_(initial[name])
    return weights


@dataclass(frozen=True)
class CriticBatch:
    """A batch with advantages, and the returns [tokens] of each response."""

    samples: list[Sample]
    returns: list[list[float]]

    def metrics(self) -> dict[str, float]:
        """Means of values and returns, and how much of the returns' variance the values explain."""
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


def with_advantages(
    responses: Sequence[Sequence[Sample]], rewards: Sequence[Sequence[float]], gamma: float, lam: float
) -> CriticBatch:
    """GAE advantages and returns of a batch with `values`, whitened over its tokens as in verl.

    A response is one sample, or one for each sequence of its branches, in the order in which they came; the
    `rewards` of its generated tokens, too, continue from one sequence to the next.
    """
    pairs = [
        gae(own_rewards, [value for s in own for value in s.values or ()], gamma, lam)
        for own, own_rewards in zip(responses, rewards, strict=True)
    ]
    raw = [advantage for advantages, _ in pairs for advantage in advantages]
    flat = iter(whiten(raw, [1] * len(raw)) if raw else [])
    flat_returns = iter([value for _, returns in pairs for value in returns])
    samples = [s for own in responses for s in own]
    updated = [replace(s, advantage=[next(flat) for _ in range(s.num_loss_tokens)]) for s in samples]
    return CriticBatch(updated, [[next(flat_returns) for _ in range(s.num_loss_tokens)] for s in samples])


class Critic(LocalWeights):
    """Owns its flat weights ([numel of value_layout], fp32) and updates them in place."""

    def __init__(self, config: ModelConfig, flat: Tensor, settings: CriticSettings) -> None:
        """`initial_critic_weights` makes `flat`."""
        self.settings, layout = settings, value_layout(config)
        optimizer = FlatAdamW(layout, flat, settings.weight_decay, (0.9, 0.999))
        super().__init__(layout, flat, optimizer, settings.dtype)
        self._decoder = policy_class(config)(
            config, self._compute_weights, activation_checkpointing=settings.activation_checkpointing
        )
        self._batch: CriticBatch | None = None

    def predict_values(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with a value before every response token."""
        with torch.no_grad():
            values = by_micro_batch(samples, self.settings.micro_batch_tokens, self._values)
        return [replace(s, values=own.tolist()) for s, own in zip(samples, values, strict=True)]

    def compute_advantages(
        self, responses: Sequence[Sequence[Sample]], rewards: Sequence[Sequence[float]]
    ) -> list[Sample]:
        """The batch of the next `update` with advantages, by `with_advantages`; predicts values unless all
        samples have them.
        """
        if any(s.values is None for own in responses for s in own):
            predicted = iter(self.predict_values([s for own in responses for s in own]))
            responses = [[next(predicted) for _ in own] for own in responses]
        self._batch = with_advantages(responses, rewards, self.settings.gamma, self.settings.lam)
        return self._batch.samples

    def update(self, step: int) -> dict[str, float]:
        """Train on the returns of the batch of the last `compute_advantages`; metrics under verl's keys.

        Raises RunError if this step has no such batch, or if a gradient is not finite; earlier updates of the
        step then stay.
        """
        settings, batch = self.settings, self._batch
        if batch is None:
            raise RunError("critic: this step has no batch; call compute_advantages before each update")
        rate = settings.lr_of(step)
        pairs = zip(batch.samples, batch.returns, strict=True)
        answers = [(s, returns) for s, returns in pairs if s.token_ids]
        lengths = [s.num_loss_tokens for s, _ in answers]
        sums = torch.zeros(2, dtype=torch.float64, device=self.flat.device)  # of losses and clipped tokens
        norms: list[float] = []
        for _ in range(settings.ppo_epochs):
            for mini_batch in split_mini_batches(lengths, settings.mini_batch_tokens):
                divisor = settings.mini_batch_tokens or max(1, sum(lengths))
                for members in self._micro_batches([answers[i][0] for i in mini_batch]):
                    sums += self._backward([answers[mini_batch[i]] for i in members], divisor)
                norms.append(self._step(rate, settings.max_grad_norm))
        num_tokens = max(1, sum(lengths) * settings.ppo_epochs)
        loss, num_clipped = sums.tolist()
        return batch.metrics() | {
            "critic/vf_loss": loss / num_tokens,
            "critic/vf_clipfrac": num_clipped / num_tokens,
            "critic/grad_norm": math.fsum(norms) / len(norms),
            "critic/lr": rate,
        }

    def end_step(self) -> None:
        """Drop the step's batch."""
        self._batch = None

    def _micro_batches(self, samples: Sequence[Sample]) -> list[list[int]]:
        prompts, lengths = [s.prompt_ids for s in samples], [s.num_tokens for s in samples]
        return balanced_micro_batches(prompts, lengths, self.settings.micro_batch_tokens)

    def _values(self, samples: Sequence[Sample]) -> Tensor:
        """The value before every response token [N], one response after another."""
        batch = pack_samples(samples, self._decoder.device)
        weight, bias = (self._optimizer.weights[name] for name in _HEAD)
        hidden = self._decoder.hidden_states(batch).index_select(0, batch.logits_indices)
        return F.linear(hidden.float(), weight, bias).squeeze(-1)

    def _backward(self, answers: Sequence[tuple[Sample, list[float]]], divisor: int) -> Tensor:
        """Add the gradient of responses with returns, over `divisor`; sums of losses and clipped tokens."""
        values = self._values([s for s, _ in answers])
        given = [value for s, _ in answers for value in s.values or ()]
        targets = [value for _, own in answers for value in own]
        old, returns = (
            to_device(torch.tensor(column, dtype=values.dtype), values.device) for column in (given, targets)
        )
        losses, is_clipped = value_loss(values, old, returns, self.settings.cliprange_value)
        torch.autograd.backward(losses.sum() / divisor)
        return torch.stack((losses.detach().sum().double(), is_clipped.sum().double()))
