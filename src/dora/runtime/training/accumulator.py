"""Feeds a trainer with committed groups, before the batch of their step is complete and after.

Gradients are summed in the order of commitment, which the journal records, and micro-batches depend on that
order only. A repeated step therefore gives the same bits, however many of its groups were accumulated early.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.core.types import GroupId
from dora.engine.interface import TrainingEngine
from dora.stream.sample_db import StoredSample
from dora.trainer.advantage import AdvantageSettings, Turn
from dora.trainer.trainer import Sample

# Gets the samples of each response, and the rewards of its tokens; returns the samples one after another.
ComputeAdvantages = Callable[[Sequence[Sequence[Sample]], Sequence[Sequence[float]]], list[Sample]]
Advantage = float | Sequence[float]  # of a response, or of each of its tokens


class Accumulator:
    """Accumulates the groups of one training step at a time."""

    def __init__(
        self,
        trainer: TrainingEngine,
        read_group: Callable[[GroupId], Sequence[StoredSample]],
        weight_digest: Callable[[int], str | None],
        advantage_settings: AdvantageSettings,
        streams_gradients: bool,
        compute_advantages: ComputeAdvantages | None = None,
        masks_truncated: bool = False,
    ) -> None:
        """`weight_digest(version)` is None for a version that this process does not have.

        Without `streams_gradients`, a batch is added once it is complete. With a critic, `compute_advantages`
        gives the advantages of a batch from its values and rewards. With `masks_truncated`, responses that
        ended at their maximum length have advantages and no loss: the trainer does not get them.
        """
        self._trainer, self._read_group, self._weight_digest = trainer, read_group, weight_digest
        self._advantage_settings, self._streams_gradients = advantage_settings, streams_gradients
        self._compute_advantages, self._masks_truncated = compute_advantages, masks_truncated
        self._step: int | None = None  # the current step; None until the version it starts from is published
        self._teacher_kls: list[float] = []  # log policy - log teacher of each token of this step
        self._is_masked: list[bool] = []  # of each response of this step so far
        self._is_compared: list[bool] = []  # of each turn, with `gigpo`: another has the same observation
        self._committed: dict[int, list[GroupId]] = defaultdict(list)  # by step, in order of commitment
        self._added: list[GroupId] = []  # groups of `_step` that the trainer has

    def start_step(self, step: int) -> None:
        """The version that `step` starts from is published, so its groups may be accumulated."""
        self._step = step

    def commit(self, step: int, group: GroupId) -> None:
        """Record that a group is committed to `step`, which may be later than the current step."""
        self._committed[step].append(group)

    @property
    def can_accumulate(self) -> bool:
        """Whether `accumulate` has work for the current step, whose batch is not complete."""
        if not self._streams_gradients or self._step is None:
            return False
        return self._trainer.can_accumulate or len(self._added) < len(self._committed[self._step])

    def accumulate(self) -> None:
        """Compute one micro-batch, or add one group. After an error, `train` computes the whole batch."""
        assert self._step is not None
        try:
            if self._trainer.can_accumulate:
                self._trainer.accumulate()
            else:
                self._add_group(self._step, self._committed[self._step][len(self._added)])
        except Exception:  # such as out of memory: `train` raises it again if it persists
            self._discard()
            self._step = None

    def train(self, step: int, groups: Sequence[GroupId]) -> dict[str, float]:
        """Add the groups that are missing and take the optimizer step; returns the metrics.

        Passes on the trainer's errors. The step can be repeated after one.
        """
        try:
            if self._added != [*groups[: len(self._added)]]:
                self._discard()
            num_early = self._trainer.num_accumulated_tokens
            if self._streams_gradients:
                for group in groups[len(self._added) :]:
                    self._add_group(step, group)
            else:
                self._add_batch(step, sorted(groups))
            metrics = self._trainer.finish_step()
        except BaseException:
            self._discard()
            raise
        finally:
            self._step = None
        metrics |= {"actor/num_tokens_early": float(num_early)}
        if self._teacher_kls:
            metrics["distillation/reverse_kl"] = math.fsum(self._teacher_kls) / len(self._teacher_kls)
        if self._masks_truncated:
            metrics["actor/frac_masked_responses"] = sum(self._is_masked) / len(self._is_masked)
        if self._is_compared:
            metrics["actor/frac_compared_turns"] = sum(self._is_compared) / len(self._is_compared)
        self._added, self._teacher_kls, self._is_masked, self._is_compared = [], [], [], []
        self._committed.pop(step, None)
        return metrics

    def _discard(self) -> None:
        self._trainer.discard_batch()
        self._added, self._teacher_kls, self._is_masked, self._is_compared = [], [], [], []

    def _add_group(self, step: int, group: GroupId) -> None:
        responses = self._read_group(group)
        advantages = self._group_advantages(responses)
        samples = [self._samples(step, s, a) for s, a in zip(responses, advantages, strict=True)]
        self._trainer.add_samples(self._with_loss(responses, samples))
        self._added.append(group)

    def _add_batch(self, step: int, groups: Sequence[GroupId]) -> None:
        """Add a whole batch at once, so that its micro-batches have similar sizes."""
        batch = [self._read_group(group) for group in groups]
        rewards = [[s.reward for s in group] for group in batch]
        lengths = [[len(s.token_ids) for s in group] for group in batch]
        shaped = self._advantage_settings.shape_rewards(rewards, lengths)
        advantages: Sequence[Sequence[Advantage | None]]
        if self._compute_advantages is not None:
            advantages = shaped  # placeholders, replaced below
        elif self._advantage_settings.needs_batch:
            num_tokens = [[len(s.logprobs) for s in group] for group in batch]
            advantages = self._advantage_settings.batch_advantages(rewards, lengths, num_tokens)
        else:
            advantages = [self._group_advantages(group) for group in batch]
        responses = [stored for group in batch for stored in group]
        flat_advantages = [advantage for group in advantages for advantage in group]
        samples = [self._samples(step, s, a) for s, a in zip(responses, flat_advantages, strict=True)]
        if self._compute_advantages is not None:
            flat_rewards = [reward for group in shaped for reward in group]
            by_token = [token_rewards(s, reward) for s, reward in zip(responses, flat_rewards, strict=True)]
            computed = iter(self._compute_advantages(samples, by_token))
            samples = [[next(computed) for _ in own] for own in samples]
        self._trainer.add_samples(self._with_loss(responses, samples), is_whole_batch=True)

    def _group_advantages(self, group: Sequence[StoredSample]) -> Sequence[Advantage | None]:
        """The stored advantages, or those that need the turns."""
        if not self._advantage_settings.needs_turns:
            return [s.advantage for s in group]
        rewards, lengths = [s.reward for s in group], [len(s.token_ids) for s in group]
        turns = [to_turns(s) for s in group]
        observations = Counter(turn.observation for own in turns for turn in own)
        self._is_compared += [observations[turn.observation] > 1 for own in turns for turn in own]
        return self._advantage_settings.turn_advantages(rewards, lengths, turns)

    def _with_loss(
        self, responses: Sequence[StoredSample], samples: Sequence[Sequence[Sample]]
    ) -> list[Sample]:
        """The samples of all responses that are not masked, from the samples of each response."""
        is_masked = [self._masks_truncated and s.is_truncated for s in responses]
        self._is_masked += is_masked
        return [s for own, masked in zip(samples, is_masked, strict=True) if not masked for s in own]

    def _samples(self, step: int, stored: StoredSample, advantage: Advantage | None) -> list[Sample]:
        assert advantage is not None
        is_comparable = self._weight_digest(stored.version) == stored.weight_digest
        samples = to_samples(stored, advantage, step - stored.version, is_comparable)
        has_teachers = self._advantage_settings.teacher_coef > 0
        return [self._with_teachers(s) for s in samples] if has_teachers else samples

    def _with_teachers(self, sample: Sample) -> Sample:
        """The reference column has the teachers' log-probs."""
        theirs = sample.reference_logprobs
        assert theirs is not None
        self._teacher_kls += [own - other for own, other in zip(sample.logprobs, theirs, strict=True)]
        advantages = self._advantage_settings.with_teachers(sample.advantages, sample.logprobs, theirs)
        return replace(sample, advantage=advantages)


def to_turns(stored: StoredSample) -> list[Turn]:
    """The turns of a response. If only the sum of their rewards is known, the last turn has it."""
    tokens, turns = stored.token_ids, list[Turn]()
    mask = np.ones(len(tokens), np.uint8) if stored.loss_mask is None else stored.loss_mask
    for context, start, stop in stored.sequences:
        ends = np.flatnonzero(np.diff(mask[start:stop], prepend=0, append=0)) + start
        before: Sequence[int] = context
        for first, end in ends.reshape(-1, 2).tolist():
            turns.append(Turn((*before, *tokens[start:first].tolist()), 0.0, end - first))
            before, start = (), end
    rewards = [*stored.turn_rewards]
    if len(rewards) != len(turns):
        rewards = [0.0] * (len(turns) - 1) + [stored.reward]
    return [turn._replace(reward=reward) for turn, reward in zip(turns, rewards, strict=True)]


def token_rewards(stored: StoredSample, reward: float) -> list[float]:
    """The rewards of a response's generated tokens: the last token of each turn has that of the turn.

    `reward` is that of the response after reward shaping, whose difference the last token has.
    """
    rewards = [0.0] * len(stored.logprobs)
    end = -1
    for turn in to_turns(stored):
        end += turn.num_tokens
        rewards[end] = turn.reward
    if rewards:
        rewards[end] += reward - stored.reward
    return rewards


def to_samples(
    stored: StoredSample, advantage: Advantage = 0.0, staleness: int = 0, is_comparable: bool = True
) -> list[Sample]:
    """Samples for a training engine: one, or one for each sequence of an episode with branches.

    `advantage` is that of the episode, or of each token. Each token is in the loss once. The ranks of a
    trainer get the columns of several from rank 0, because a row of the stream holds them together.
    """
    whole = to_sample(stored, advantage, staleness, is_comparable)
    if not stored.branches:
        return [whole]
    mask = np.ones(len(whole.token_ids), np.uint8) if stored.loss_mask is None else stored.loss_mask
    num_before = np.concatenate(([0], np.cumsum(mask)))  # sampled tokens before each token
    samples = []
    for context, start, stop in stored.sequences:
        sampled = np.flatnonzero(mask[start:stop])
        if not len(sampled):
            continue
        first = start + int(sampled[0])  # the observation before it is part of the prompt
        part = slice(int(num_before[start]), int(num_before[stop]))

        def column(values: Sequence[float] | None, part: slice = part) -> Sequence[float] | None:
            return None if values is None else values[part]

        samples.append(
            replace(
                whole,
                advantage=whole.advantage if isinstance(whole.advantage, float) else whole.advantage[part],
                prompt_ids=[*context, *whole.token_ids[start:first]],
                token_ids=whole.token_ids[first:stop],
                loss_mask=None if mask[first:stop].all() else mask[first:stop].tolist(),
                logprobs=whole.logprobs[part],
                proximal_logprobs=column(whole.proximal_logprobs),
                reference_logprobs=column(whole.reference_logprobs),
                values=column(whole.values),
                stream_row=None,
            )
        )
    return samples


def to_sample(
    stored: StoredSample, advantage: Advantage = 0.0, staleness: int = 0, is_comparable: bool = True
) -> Sample:
    """A sample for a training engine, whose columns are lists; branches are ignored."""

    def column(values: NDArray[Any] | None) -> list[Any] | None:
        return None if values is None else values.tolist()

    return Sample(
        stored.prompt_ids.tolist(),
        stored.token_ids.tolist(),
        stored.logprobs.tolist(),
        advantage,
        staleness,
        stored.routes,
        is_comparable,
        column(stored.proximal),
        column(stored.reference),
        column(stored.values),
        stored.stream_row,
        column(stored.loss_mask),
    )
