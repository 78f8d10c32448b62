"""The gradient of one micro-batch: forward, loss, backward.

Gradients are summed into the policy's weights, times what the whole batch amounts to, which may not be
known yet.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dora.trainer.corrections import Corrected, correct
from dora.trainer.loss import kl_divergence, token_shares
from dora.trainer.objective import OBJECTIVES, Tokens
from dora.trainer.packing import Packed, pack_samples
from dora.trainer.policy import Policy
from dora.trainer.routes import Counted, replay
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.speed import forward_flops
from dora.trainer.tally import Tally


@dataclass(frozen=True)
class _Told:
    """What samples say of their N response tokens, one response after the other; all tensors [N]."""

    lengths: list[int]
    behaviour: Tensor
    advantages: Tensor
    staleness: Tensor
    is_fresh: Tensor  # bool: the weights of right now have drawn it
    weights: Tensor  # in the loss, times the batch's total
    proximal: Tensor | None  # None: as the weights of right now
    reference: Tensor | None  # None: nobody has computed them yet


class Backward:
    """Adds shares of a batch's gradient to that of a policy's weights."""

    def __init__(self, policy: Policy, settings: TrainerSettings, reference: Policy | None) -> None:
        """`reference` is what the KL term and pairs compare with, if there is any."""
        self._policy, self._settings, self._reference = policy, settings, reference

    def add(self, samples: Sequence[Sample], tally: Tally) -> None:
        """The share of one micro-batch, times the batch's total; counts it in `tally`."""
        settings, policy = self._settings, self._policy
        routes = [s.routes for s in samples]
        batch = pack_samples(samples, policy.device, routes)
        route = None
        if policy.config.mixture_layers:
            sent = replay(policy.config, batch, routes)
            route = Counted(policy.config, sent, batch.rows)
        logprobs, entropies = policy.logprobs(batch, route)
        told = _told(samples, settings, logprobs)
        corrected = correct(
            settings.correction, logprobs, told.behaviour, told.lengths, told.staleness, told.proximal
        )
        losses, clipped = self._losses(batch, logprobs, entropies, corrected, told, tally)
        torch.autograd.backward((losses * told.weights).sum())
        tally.add(logprobs, told.behaviour, clipped, entropies, told.is_fresh, told.staleness, corrected)
        num_passes = 3 + (self._reference is not None)  # a backward pass is two
        tally.num_flops += num_passes * forward_flops(policy.config, batch)
        if route is not None:
            tally.expert_load = tally.expert_load + route.num_tokens.cpu()

    def _losses(
        self,
        batch: Packed,
        logprobs: Tensor,
        entropies: Tensor,
        corrected: Corrected,
        told: _Told,
        tally: Tally,
    ) -> tuple[Tensor, Tensor]:
        """The loss of every token with all its terms, and whether a bound decided it; all [N]."""
        settings, reference = self._settings, told.reference
        if self._reference is not None:
            with torch.no_grad():
                reference, _ = self._reference.logprobs(batch)
        tokens = Tokens(logprobs, corrected.old_logprobs, told.advantages, told.lengths, reference)
        losses, clipped = OBJECTIVES[settings.policy_loss](tokens, settings.bounds)
        losses = losses * corrected.weights
        tally.pg_loss += float((losses.detach() * told.weights).sum())
        if reference is not None and settings.kl_loss_coef:
            divergence = kl_divergence(logprobs, reference, settings.kl_loss_type)
            tally.kl_loss = (tally.kl_loss or 0.0) + float((divergence.detach() * told.weights).sum())
            losses = losses + settings.kl_loss_coef * divergence
        if settings.entropy_coeff:
            losses = losses - settings.entropy_coeff * entropies
        return losses, clipped


def _told(samples: Sequence[Sample], settings: TrainerSettings, like: Tensor) -> _Told:
    """Numbers of the type of `like`, where that is."""
    lengths = [s.num_drawn for s in samples]
    spread = torch.tensor(lengths, device=like.device)

    def of_tokens(values: Sequence[float]) -> Tensor:
        """A value of each response, given to every token of it: [N]."""
        return torch.tensor(values, device=like.device).repeat_interleave(spread)

    def if_told(values: Sequence[Sequence[float] | None]) -> Tensor | None:
        """Of all samples or of none."""
        there = [own for own in values if own is not None]
        return like.new_tensor([x for own in there for x in own]) if there else None

    return _Told(
        lengths,
        behaviour=like.new_tensor([x for s in samples for x in s.logprobs]),
        advantages=like.new_tensor([x for s in samples for x in s.advantages]),
        staleness=of_tokens([s.staleness for s in samples]),
        is_fresh=of_tokens([s.is_comparable and s.staleness == 0 for s in samples]),
        weights=of_tokens(token_shares(lengths, settings.loss_agg_mode, settings.loss_scale_factor)).to(like),
        proximal=if_told([s.proximal for s in samples]),
        reference=if_told([s.reference for s in samples]),
    )
