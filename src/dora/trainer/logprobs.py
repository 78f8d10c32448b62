"""Log-probs that weights give to answers, without a gradient: of another policy, or of another time.

The trainer asks for a few of its batch; a station beside it for all of them, group by group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.weights import Layout
from dora.trainer.learner import Score
from dora.trainer.packing import balanced_micro_batches, pack_samples
from dora.trainer.policy import Policy
from dora.trainer.routes import replay
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.speed import forward_flops
from dora.trainer.tally import Tally


def answer_logprobs(
    policy: Policy, samples: Sequence[Sample], micro_batch_tokens: int, tally: Tally
) -> list[Tensor]:
    """Those of each sample's response tokens, in micro-batches; the work counts in `tally`.

    Responses may not be empty.
    """
    found = [torch.empty(0)] * len(samples)
    lengths = [len(s.prompt_ids) + len(s.token_ids) for s in samples]
    for members in balanced_micro_batches([s.prompt_ids for s in samples], lengths, micro_batch_tokens):
        own = [samples[i] for i in members]
        parts = _of_micro_batch(policy, own, tally).split([s.num_drawn for s in own])
        for i, logprobs in zip(members, parts, strict=True):
            found[i] = logprobs
    return found


def _of_micro_batch(policy: Policy, samples: Sequence[Sample], tally: Tally) -> Tensor:
    """Log-probs of all response tokens [N]."""
    config, routes = policy.config, [s.routes for s in samples]
    batch = pack_samples(samples, policy.device, routes)
    route = replay(config, batch, routes) if config.mixture_layers else None
    tally.num_flops += forward_flops(config, batch)
    with torch.no_grad():
        return policy.logprobs(batch, route)[0]


class GroupLogprobs:
    """Log-probs of groups under weights that somebody else steps, if anybody does.

    Groups never share a forward pass, so the bits of one depend on nothing but itself and the weights: a
    step that is redone, in whatever company, has the same.
    """

    def __init__(
        self, config: ModelConfig, settings: TrainerSettings, device: str, score: Score | None = None
    ) -> None:
        """Computes as the trainer of these settings does; `score` in exact mode, as `Trainer`."""
        self._config, self._settings, self._score = config, settings, score
        self._device, self._dtype = torch.device(device), getattr(torch, settings.dtype)
        self._flat: Tensor | None = None
        self._policy: Policy | None = None

    def use(self, flat: Tensor) -> None:
        """Compute with the weights `flat` [numel] from now on; they must stay as they are."""
        self._flat = flat
        if self._score is None:
            views = Layout(self._config).views(flat.to(self._device, self._dtype))
            chunk = self._settings.logits_chunk_tokens
            before = self._policy or Policy(
                self._config, views, self._settings.temperature, logits_chunk_tokens=chunk
            )
            self._policy = before.under(views, None)

    def __call__(self, group: Sequence[Sample]) -> list[Tensor]:
        """Those of each answer's tokens, fp32 on the CPU; an empty answer has none."""
        found = iter(self._found([s for s in group if s.token_ids]))
        return [next(found).float().cpu() if s.token_ids else torch.empty(0) for s in group]

    def _found(self, told: Sequence[Sample]) -> Sequence[Tensor]:
        if not told:
            return []
        assert self._flat is not None, "no weights yet"
        if self._score is not None:
            logprobs = self._score(self._flat, [s.prompt_ids for s in told], [s.token_ids for s in told])
            parts = zip(told, logprobs.split([len(s.token_ids) for s in told]), strict=True)
            return [x if s.loss_mask is None else x[torch.tensor(s.loss_mask) > 0] for s, x in parts]
        assert self._policy is not None
        return answer_logprobs(self._policy, told, self._settings.micro_batch_tokens, Tally())
