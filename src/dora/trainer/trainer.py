"""One training step: consume a batch of samples and update the flat weights in place.

A batch may arrive in parts: gradients accumulate as micro-batches fill, and are divided by the batch's
divisor at the end. The caller publishes the weights.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dora.model.config import ModelConfig
from dora.model.device import to_device
from dora.trainer.critic import Critic
from dora.trainer.learner import ComputeLogprobs, LocalLearner
from dora.trainer.logprobs import response_logprobs
from dora.trainer.loss import batch_divisor, unnormalized_token_weights
from dora.trainer.metrics import StepMetrics, ages_to_check, choose_spot_checks
from dora.trainer.optimizer import host_copy, rollback_on_error
from dora.trainer.packing import balanced_micro_batches, sequential_micro_batches, split_mini_batches
from dora.trainer.recipe import traits_of
from dora.trainer.settings import Sample, TrainerSettings

if TYPE_CHECKING:
    from dora.trainer.distributed import DistributedLearner

__all__ = ["Sample", "Trainer", "TrainerSettings"]

FindVersion = Callable[[int], Tensor | None]
Unit = list[Sample]  # samples that must share a micro-batch: one response, or a pair


class Trainer:
    """Owns a policy's flat weights ([numel], fp32) and updates them in place."""

    def __init__(
        self,
        config: ModelConfig,
        flat: Tensor,
        settings: TrainerSettings,
        reference: Tensor | None = None,
        exact_logprobs: ComputeLogprobs | None = None,
        find_version: FindVersion = lambda version: None,
        learner: LocalLearner | DistributedLearner | None = None,
        critic: Critic | None = None,
    ) -> None:
        """`reference` are the flat weights of the reference policy; by default a copy of `flat`.

        In exact mode, `exact_logprobs` computes log-probs [N] as engines do, from flat weights, prompts and
        responses. `find_version` returns the flat weights of an older version, or None if they are not
        available. A given `learner` already holds the weights. Each step trains `critic` on the batch of its
        last `compute_advantages`.
        """
        unnormalized_token_weights([1], settings.loss_agg_mode, settings.loss_scale_factor)  # validates them
        self.settings = settings
        self.critic = critic
        self.num_steps_done = 0
        self._find_version = find_version
        self._has_warned = False
        self._learner = learner or LocalLearner(config, flat, settings, reference, exact_logprobs)
        traits = traits_of(settings.policy_loss)
        self._is_paired = traits.unit == "pair"
        # Without a KL or entropy term the gradient of a sample with advantage 0 is exactly zero. It needs no
        # forward pass, but its tokens stay in the denominators.
        has_other_terms = settings.uses_reference or settings.entropy_coeff != 0.0
        self._skips_zero_advantages = traits.needs_advantage and not has_other_terms
        self._start_batch()

    @property
    def flat(self) -> Tensor:
        """The current weights, [numel], fp32."""
        return self._learner.flat

    def published_weights(self, dtype: torch.dtype) -> Tensor:
        """See `LocalLearner.published_weights`."""
        return self._learner.published_weights(dtype)

    def step(self, samples: Sequence[Sample]) -> dict[str, float]:
        """Train on one batch, update `flat`, return metrics under verl's keys.

        Means are over the response tokens that went through the model. mismatch/* compares the log-probs of
        trainer and engine under equal weights, for a few of the stale samples. Raises RunError if the
        gradient is not finite. After any exception `flat` is unchanged and the step can be repeated.
        """
        self.discard_batch()
        self.add_samples(samples, is_whole_batch=True)
        return self.finish_step()

    def add_samples(self, samples: Sequence[Sample], is_whole_batch: bool = False) -> None:
        """Add whole groups to the next step's batch, and pack full micro-batches.

        The same parts in the same order give the same bits, whenever they are added. The micro-batches of a
        whole batch are balanced. A pair loss expects two samples with an advantage in each group, or none; it
        ignores a pair with an empty response.
        """
        self._samples += [s for s in samples if s.token_ids]
        if self._is_paired:
            units = _pairs(samples)
            self._num_tokens += [s.num_loss_tokens for pair in units for s in pair]
        else:
            units = [[s] for s in samples if s.token_ids and self._has_gradient(s)]
            self._num_tokens += [s.num_loss_tokens for s in samples]
        self._unpacked += units
        if self.settings.mini_batch_tokens is None:
            self._pack(num_open=0 if is_whole_batch else 1, is_balanced=is_whole_batch)

    @property
    def can_accumulate(self) -> bool:
        """Whether there is a full micro-batch for every rank."""
        return len(self._packed) >= self._learner.num_ranks

    def accumulate(self) -> None:
        """Add the gradient of one micro-batch per rank."""
        num = min(self._learner.num_ranks, len(self._packed))
        self._learner.accumulate([self._packed.popleft() for _ in range(num)], self._metrics)

    @property
    def num_accumulated_tokens(self) -> int:
        """Response tokens of the next step's batch that went through the model."""
        return self._metrics.num_tokens

    def finish_step(self) -> dict[str, float]:
        """Accumulate the rest of the complete batch and update the weights; as `step`."""
        snapshots = [] if self.settings.mini_batch_tokens is None else [self._learner.snapshot]
        snapshots += [] if self.critic is None else [self.critic.snapshot]
        critic_metrics: dict[str, float] = {}
        with rollback_on_error(*snapshots):
            if self.critic is not None:
                critic_metrics = self.critic.update(self.num_steps_done)
            metrics = self._update()
        if self.critic is not None:
            self.critic.end_step()
        self.num_steps_done += 1
        self._start_batch()
        return metrics | critic_metrics

    def discard_batch(self) -> None:
        """Drop the samples and the gradient of the next step's batch."""
        self._learner.zero_grad()
        self._start_batch()

    def _start_batch(self) -> None:
        self._samples: list[Sample] = []
        self._num_tokens: list[int] = []  # in the loss, of every response of the batch so far
        self._unpacked: list[Unit] = []
        self._packed: deque[list[Sample]] = deque()  # micro-batches
        self._metrics = StepMetrics()

    def _pack(self, num_open: int, is_balanced: bool = False) -> None:
        """Make micro-batches of the unpacked units, except for the last `num_open`, which may not be full."""
        units, budget = self._unpacked, self.settings.micro_batch_tokens
        lengths = [sum(s.num_tokens for s in unit) for unit in units]
        if is_balanced:
            prompts, num_ranks = [unit[0].prompt_ids for unit in units], self._learner.num_ranks
            packs = balanced_micro_batches(prompts, lengths, budget, num_ranks)
        else:
            packs = sequential_micro_batches(lengths, budget)
        num_full = max(0, len(packs) - num_open)
        self._packed.extend([s for i in pack for s in units[i]] for pack in packs[:num_full])
        self._unpacked = [units[i] for pack in packs[num_full:] for i in pack]

    def _update(self) -> dict[str, float]:
        """All updates of the step, at one learning rate."""
        settings, metrics = self.settings, self._metrics
        lr = settings.lr_of(self.num_steps_done)
        mini_batches = self._mini_batches()
        divisor = max(1, batch_divisor(self._num_tokens, settings.loss_agg_mode))
        norms = []
        for number, units in enumerate(mini_batches, start=1):
            self._unpacked = units
            self._pack(num_open=0, is_balanced=settings.mini_batch_tokens is not None)
            while self._packed:
                self.accumulate()
            if number == len(mini_batches):
                self._check_mismatch()
            update_divisor = settings.mini_batch_tokens or divisor
            norms.append(self._learner.step(update_divisor, lr, settings.max_grad_norm))
            metrics.num_updates += 1
        return metrics.metrics(divisor) | {
            "actor/grad_norm": math.fsum(norms) / len(norms),
            "actor/lr": lr,
        }

    def _mini_batches(self) -> list[list[Unit]]:
        """The unpacked units of each update of the step."""
        if self.settings.mini_batch_tokens is None:
            return [self._unpacked]
        samples = self._samples
        lengths = [s.num_loss_tokens for s in samples]
        first, *later = [
            [samples[i] for i in part if self._has_gradient(samples[i])]
            for part in split_mini_batches(lengths, self.settings.mini_batch_tokens)
        ]
        if self.settings.correction.proximal == "recomputed":
            later = [self._with_proximal_logprobs(part) for part in later]
        return [[[s] for s in part] for part in (first, *later)]

    def _with_proximal_logprobs(self, samples: Sequence[Sample]) -> list[Sample]:
        """The samples with the current policy's log-probs, unless they have proximal log-probs already."""
        if all(s.proximal_logprobs is not None for s in samples):
            return list(samples)
        logprobs = self._logprobs(self.flat, samples)
        return [replace(s, proximal_logprobs=x.tolist()) for s, x in zip(samples, logprobs, strict=True)]

    def _has_gradient(self, sample: Sample) -> bool:
        return sample.has_advantage or not self._skips_zero_advantages

    def _check_mismatch(self) -> None:
        """Compare log-probs of trainer and engine for a few samples; for stale samples, if there are any.

        An error here does not fail the step.
        """
        mismatch = self._metrics.mismatch
        needs_fresh = not mismatch.num_tokens
        candidates = [s for s in self._samples if s.is_comparable and (s.staleness or needs_fresh)]
        lengths = [s.num_loss_tokens for s in candidates]
        chosen = choose_spot_checks(lengths, self._metrics.num_tokens, self.num_steps_done)
        try:
            ages = {candidates[i].staleness for i in chosen}
            for staleness in ages_to_check(ages, self.num_steps_done, self._learner.device.type):
                flat = self._find_version(self.num_steps_done - staleness)
                if flat is not None:
                    samples = [candidates[i] for i in chosen if candidates[i].staleness == staleness]
                    logprobs = torch.cat(self._logprobs(flat, samples))
                    reported = torch.tensor([x for s in samples for x in s.logprobs], dtype=logprobs.dtype)
                    mismatch.add(logprobs, to_device(reported, logprobs.device))
        except Exception as error:  # perhaps out of memory: the older weights lie beside the current ones
            if not self._has_warned:
                message = f"mismatch/* leaves out stale samples: {type(error).__name__}: {error}"
                warnings.warn(message, RuntimeWarning, stacklevel=2)
            self._has_warned = True

    def _logprobs(self, flat: Tensor, samples: Sequence[Sample]) -> list[Tensor]:
        """Log-probs of each sample's tokens of the loss under the weights `flat`, without a gradient."""
        policy = self._learner.policy_with_weights(flat)
        return response_logprobs(policy, samples, self.settings.micro_batch_tokens, self._metrics)

    def state_dict(self) -> dict[str, Any]:
        """The state that a resumed run needs in addition to the weights."""
        state = {"num_steps_done": self.num_steps_done, "optimizer": self._learner.state_dict()}
        if self.critic is not None:
            state["critic"] = {"flat": self.critic.flat, "optimizer": self.critic.state_dict()}
        return state

    def save_state(self, folder: Path) -> tuple[dict[str, Any], Future[None] | None]:
        """A copy of the `state_dict` in host memory for a checkpoint; see `DistributedLearner.save_state`."""
        optimizer, shards = self._learner.save_state(folder)
        state: dict[str, Any] = {"num_steps_done": self.num_steps_done, "optimizer": optimizer}
        if (critic := self.critic) is not None:
            state["critic"] = host_copy({"flat": critic.flat, "optimizer": critic.state_dict()})
        return state, shards

    def replace_weights(self, flat: Tensor) -> None:
        """See `LocalLearner.replace_weights`."""
        self._learner.replace_weights(flat)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a `state_dict`. With LoRA the adapters are merged into the weights again."""
        self.num_steps_done = state["num_steps_done"]
        self._learner.load_state_dict(state["optimizer"])
        if self.critic is not None:
            self.critic.flat.copy_(state["critic"]["flat"])
            self.critic.load_state_dict(state["critic"]["optimizer"])


def _pairs(samples: Sequence[Sample]) -> list[Unit]:
    """The preference pair of each group, best response first.

    Without pairs of which one response has no token in the loss.
    """
    members = [s for s in samples if any(s.advantages or [s.advantage])]  # also empty responses
    pairs = zip(members[::2], members[1::2], strict=True)
    nonempty = [pair for pair in pairs if all(s.num_loss_tokens for s in pair)]
    return [sorted(pair, key=lambda s: sum(s.advantages), reverse=True) for pair in nonempty]
