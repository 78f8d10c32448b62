"""One training step: a batch of samples in, the next version of the weights out.

The batch may come piece by piece: gradients are summed as micro-batches fill, and divided by what
the whole batch amounts to at its end. The weights are one flat buffer, updated in place;
publishing it is the caller's business.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.trainer.critic import Critic
from dora.trainer.learner import Alone, Learner, Score
from dora.trainer.logprobs import answer_logprobs
from dora.trainer.loss import batch_total, token_shares
from dora.trainer.mismatch import spot_check
from dora.trainer.optimizer import learning_rate
from dora.trainer.packing import balanced_micro_batches, micro_batches
from dora.trainer.recipe import TRAITS
from dora.trainer.settings import Sample, TrainerSettings
from dora.trainer.tally import Tally
from dora.trainer.updates import Undoable, undone_if_failed, updates

__all__ = ["Sample", "Trainer", "TrainerSettings"]

Sources = Callable[[int], Tensor | None]


class Trainer:
    """Owns a policy's flat weights ([numel], fp32) and steps them in place."""

    def __init__(
        self,
        config: ModelConfig,
        flat: Tensor,
        settings: TrainerSettings,
        reference: Tensor | None = None,
        score: Score | None = None,
        sources: Sources = lambda version: None,
        learner: Learner | None = None,
        critic: Critic | None = None,
    ) -> None:
        """`reference` are the flat weights that the KL term and pairs compare with; by default as given.

        In exact mode, `score` tells log-probs [N] of answers as engines compute them: from flat weights,
        prompts and answers. `sources` has the flat weights of older versions, as far as they are known.
        A `learner` that is given has the weights already. A `critic` learns in every step from the batch
        that it judged last.
        """
        token_shares([1], settings.loss_agg_mode, settings.loss_scale_factor)
        self.settings = settings
        self.critic = critic
        self.num_steps_done = 0
        self._sources = sources
        self._has_warned = False
        self._learner = learner or Alone(config, flat, settings, reference, score)
        self._is_paired = TRAITS[settings.policy_loss].unit == "pair"
        # A sample of advantage 0 has an exactly zero gradient unless there is a term beside the policy
        # loss. It needs no forward pass, but its tokens stay in the denominators.
        self._skips = not settings.compares and settings.entropy_coeff == 0.0
        self._begin()

    @property
    def flat(self) -> Tensor:
        """The weights as they are now, [numel], fp32."""
        return self._learner.flat

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Consume one batch, update `flat`, return metrics under the names verl uses.

        Means are over the response tokens that went through the model; mismatch/* compares trainer
        and engine log-probs under equal weights, for few of the stale samples. Raises RunError where
        the gradient is not finite; whatever is raised, `flat` is then unchanged and the step can be tried
        again.
        """
        self.forget()
        self.put(samples, is_whole=True)
        return self.finish()

    def put(self, samples: Sequence[Sample], is_whole: bool = False) -> None:
        """Take up whole groups of the next step's batch; what they fill becomes micro-batches.

        A batch may be put piece by piece: the same pieces in the same order give the same bits, whenever
        they come. Micro-batches of one that `is_whole` are balanced. A loss of pairs takes samples with an
        advantage, two of each group or none; a pair with an empty response teaches nothing.
        """
        self._samples += [s for s in samples if s.token_ids]
        if self._is_paired:
            told = [s for s in samples if any(s.advantages or [s.advantage])]  # empty ones may have one
            pairs = zip(told[::2], told[1::2], strict=True)
            whole = [pair for pair in pairs if all(s.token_ids for s in pair)]
            units = [sorted(pair, key=lambda s: sum(s.advantages), reverse=True) for pair in whole]
            samples = [s for unit in units for s in unit]
        else:
            units = [[s] for s in samples if s.token_ids and self._has_gradient(s)]
        self._num_tokens += [s.num_drawn for s in samples]
        self._waiting += units
        if self.settings.batch_tokens is None:
            self._pack(num_left=0 if is_whole else 1, balances=is_whole)

    @property
    def can_work(self) -> bool:
        """Whether a full micro-batch is there for every rank."""
        return len(self._ready) >= self._learner.num_ranks

    def work(self) -> None:
        """Add the share of a micro-batch for every rank to the gradient, up to the batch's total."""
        num = min(self._learner.num_ranks, len(self._ready))
        self._learner.add([self._ready.popleft() for _ in range(num)], self._tally)

    @property
    def num_accumulated(self) -> int:
        """Response tokens of the next step's batch that went through the model."""
        return self._tally.num_tokens

    def finish(self) -> dict[str, float]:
        """Work on what is left, and step; as `step`. The batch is complete."""
        at_risk: list[Undoable] = [] if self.settings.batch_tokens is None else [self._learner]
        learnt: dict[str, float] = {}
        with undone_if_failed(*at_risk, *([self.critic] if self.critic else [])):
            if self.critic is not None:
                learnt = self.critic.learn(self.num_steps_done)
            metrics = self._update()
        if self.critic is not None:
            self.critic.end_step()
        self.num_steps_done += 1
        self._begin()
        return metrics | learnt

    def forget(self) -> None:
        """Begin the step's batch anew: what was put and accumulated is gone."""
        self._learner.forget()
        self._begin()

    def _begin(self) -> None:
        self._samples: list[Sample] = []
        self._num_tokens: list[int] = []  # of every response of the batch so far that counts
        self._waiting: list[list[Sample]] = []  # responses that must share a micro-batch
        self._ready: deque[list[Sample]] = deque()
        self._tally = Tally()

    def _pack(self, num_left: int, balances: bool = False) -> None:
        """Make micro-batches of what waits, but for the last `num_left`, which may not be full yet."""
        waiting, budget = self._waiting, self.settings.micro_batch_tokens
        lengths = [sum(len(s.prompt_ids) + len(s.token_ids) for s in unit) for unit in waiting]
        if balances:
            prompts, num_ranks = [unit[0].prompt_ids for unit in waiting], self._learner.num_ranks
            packs = balanced_micro_batches(prompts, lengths, budget, num_ranks)
        else:
            packs = micro_batches(lengths, budget)
        num_ready = max(0, len(packs) - num_left)
        self._ready.extend([s for i in pack for s in waiting[i]] for pack in packs[:num_ready])
        self._waiting = [waiting[i] for pack in packs[num_ready:] for i in pack]

    def _update(self) -> dict[str, float]:
        """All updates of the step, at one learning rate."""
        settings, tally = self.settings, self._tally
        lr = learning_rate(
            settings.lr, self.num_steps_done, settings.warmup_steps, settings.num_steps, settings.lr_decay
        )
        parts = self._parts()
        total = max(1, batch_total(self._num_tokens, settings.loss_agg_mode))
        norms = []
        for number, waiting in enumerate(parts, start=1):
            self._waiting = waiting
            self._pack(num_left=0, balances=settings.batch_tokens is not None)
            while self._ready:
                self.work()
            if number == len(parts):
                self._check()
            norms.append(self._learner.step(settings.batch_tokens or total, lr, settings.max_grad_norm))
            tally.num_updates += 1
        return tally.metrics(total) | {"actor/grad_norm": math.fsum(norms) / len(norms), "actor/lr": lr}

    def _parts(self) -> list[list[list[Sample]]]:
        """What waits for each update of the step."""
        if self.settings.batch_tokens is None:
            return [self._waiting]
        samples = self._samples
        first, *later = [
            [samples[i] for i in part if self._has_gradient(samples[i])]
            for part in updates([s.num_drawn for s in samples], self.settings.batch_tokens)
        ]
        if self.settings.correction.proximal == "recomputed":
            later = [self._with_proximal(part) for part in later]
        return [[[s] for s in part] for part in (first, *later)]

    def _with_proximal(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the log-probs that the policy gives them now, unless they have been told."""
        if all(s.proximal is not None for s in samples):
            return list(samples)
        found = self._logprobs(self.flat, samples)
        return [replace(s, proximal=own.tolist()) for s, own in zip(samples, found, strict=True)]

    def _has_gradient(self, sample: Sample) -> bool:
        return sample.has_advantage or not self._skips

    def _check(self) -> None:
        """Compare the engine's log-probs of a few samples, stale ones if any, that have not been compared.

        Where that fails, the step goes on without.
        """
        mismatch = self._tally.mismatch
        left = [s for s in self._samples if s.is_comparable and (s.staleness or not mismatch.num_tokens)]
        picked = spot_check([s.num_drawn for s in left], self._tally.num_tokens, self.num_steps_done)
        try:
            for age in sorted({left[i].staleness for i in picked}):
                flat = self._sources(self.num_steps_done - age)
                if flat is not None:
                    own = [left[i] for i in picked if left[i].staleness == age]
                    found = torch.cat(self._logprobs(flat, own))
                    mismatch.add(found, found.new_tensor([x for s in own for x in s.logprobs]))
        except Exception as error:  # out of memory, perhaps: old weights lie beside the new ones
            if not self._has_warned:
                told = f"stale samples are missing in mismatch/*: {type(error).__name__}: {error}"
                warnings.warn(told, RuntimeWarning, stacklevel=2)
            self._has_warned = True

    def _logprobs(self, flat: Tensor, samples: Sequence[Sample]) -> list[Tensor]:
        """Those of each sample's response tokens under the weights `flat`, without a gradient."""
        policy = self._learner.under(flat)
        return answer_logprobs(policy, samples, self.settings.micro_batch_tokens, self._tally)

    def state_dict(self) -> dict[str, Any]:
        """Everything but the weights that a resumed run needs."""
        state = {"num_steps_done": self.num_steps_done, "optimizer": self._learner.state_dict()}
        if self.critic is not None:
            state["critic"] = {"flat": self.critic.flat, "optimizer": self.critic.state_dict()}
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`."""
        self.num_steps_done = state["num_steps_done"]
        self._learner.load_state_dict(state["optimizer"])
        if self.critic is not None:
            self.critic.flat.copy_(state["critic"]["flat"])
            self.critic.load_state_dict(state["critic"]["optimizer"])
