"""Who holds a policy in training, and makes its gradients.

Here that is one process with all of it; `ranks` has several with a share each.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.gradient import Backward
from dora.trainer.lora import AdapterAdamW
from dora.trainer.optimizer import FlatAdamW
from dora.trainer.packing import Tokens
from dora.trainer.policy import Policy, Values
from dora.trainer.precision import Bf16Weights
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.tally import Tally
from dora.trainer.updates import kept_whole

Score = Callable[[Tensor, Sequence[Tokens], Sequence[Tokens]], Tensor]


class Learner(Protocol):
    """A policy's weights with their gradient and their optimizer, on `num_ranks` processes."""

    num_ranks: int

    @property
    def flat(self) -> Tensor:
        """The weights as they are now, [numel], fp32."""

    def add(self, packs: Sequence[Sequence[Sample]], tally: Tally) -> None:
        """The gradient's shares of micro-batches, at most one for each rank; counts them in `tally`."""

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        """Divide the gradient, update the weights; returns the gradient's norm before clipping.

        Raises RunError, with the weights unchanged, where the norm is not finite.
        """

    def forget(self) -> None:
        """Begin the gradient anew."""

    def keep(self) -> Callable[[], None]:
        """Copy weights and moments to the host's memory; what is returned puts them back."""

    def under(self, flat: Tensor) -> Policy:
        """The policy with other weights [numel], without gradients."""

    def state_dict(self) -> dict[str, Any]:
        """The optimizer's, as torch's AdamW has it over one flat parameter."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a `state_dict`, be it of another number of ranks."""


class Alone:
    """One process with all of it; `flat` is stepped in place."""

    num_ranks = 1

    def __init__(
        self,
        config: ModelConfig,
        flat: Tensor,
        settings: TrainerSettings,
        reference: Tensor | None,
        score: Score | None,
    ) -> None:
        """As `Trainer`, which says more."""
        self.flat, self._score = flat, score
        self._layout = Layout(config)
        decay, betas = settings.weight_decay, settings.betas
        self._optimizer: FlatAdamW | AdapterAdamW = (
            AdapterAdamW(self._layout, flat, settings.lora, decay, betas)
            if settings.lora
            else FlatAdamW(self._layout, flat, decay, betas)
        )
        self._copies = None
        if settings.dtype == "bfloat16":
            self._copies = Bf16Weights(self._layout, flat, self._optimizer.weights)
        self._policy = Policy(
            config,
            (self._copies or self._optimizer).weights,
            settings.temperature,
            self._values(flat),
            logits_chunk_tokens=settings.logits_chunk_tokens,
            keeps_activations=not settings.activation_checkpointing,
        )
        compared: Policy | None = None
        if settings.keeps_reference:
            frozen = flat.clone() if reference is None else reference
            compared = self._policy.under(self._views(frozen), None)
        self._backward = Backward(self._policy, settings, compared)

    def add(self, packs: Sequence[Sequence[Sample]], tally: Tally) -> None:
        for samples in packs:
            self._backward.add(samples, tally)

    def step(self, divisor: float, lr: float, max_grad_norm: float) -> float:
        self._optimizer.gradient.div_(divisor)
        norm = self._optimizer.step(lr, max_grad_norm)
        if self._copies:
            self._copies.refresh()
        return norm

    def forget(self) -> None:
        self._optimizer.gradient.zero_()

    def keep(self) -> Callable[[], None]:
        return kept_whole(self)

    def under(self, flat: Tensor) -> Policy:
        return self._policy.under(self._views(flat), self._values(flat))

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._optimizer.load_state_dict(dict(state))
        if self._copies:
            self._copies.refresh()  # the weights may have been set to those of the moments

    def _views(self, flat: Tensor) -> dict[str, Tensor]:
        """Weights to compute with, without gradients; a copy unless they are on this device, in this type."""
        dtype = torch.bfloat16 if self._copies else self.flat.dtype
        return self._layout.views(flat.to(self.flat.device, dtype))

    def _values(self, flat: Tensor) -> Values | None:
        """In exact mode, the log-probs of batches with these weights."""
        if (score := self._score) is None:
            return None
        return lambda batch: score(flat, batch.prompts, batch.responses)[batch.drawn]
