"""The trainer's side of a step: what to work on before the batch is complete, and what is left then.

Gradients are summed in the order of commitment, which the journal has, and what shares a micro-batch
follows from that order alone: a step that is taken again gives the same bits, however much of it was
early.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

from dora.core.types import GroupId
from dora.engine.interface import TrainingEngine
from dora.stream.sample_db import StoredSample
from dora.trainer.advantage import AdvantageSettings
from dora.trainer.trainer import Sample

ComputeAdvantages = Callable[[Sequence[Sample], Sequence[float]], list[Sample]]


class Accumulator:
    """Feeds a trainer with the groups of one step at a time."""

    def __init__(
        self,
        trainer: TrainingEngine,
        read: Callable[[GroupId], Sequence[StoredSample]],
        digest: Callable[[int], str | None],
        scoring: AdvantageSettings,
        streams: bool,
        judge: ComputeAdvantages | None = None,
    ) -> None:
        """`read` gives the samples of a scored group, `digest` that of a version's weights if it is here.

        Without `streams` every batch is taken whole. With a critic, `judge` makes its advantages.
        """
        self._trainer, self._read, self._scoring, self._streams = trainer, read, scoring, streams
        self._digest, self._judge = digest, judge
        self._step: int | None = None  # may be worked on; None: the version it begins with is not out
        self._committed: dict[int, list[GroupId]] = defaultdict(list)  # by step, in order
        self._put: list[GroupId] = []  # of `_step`

    def start_step(self, step: int) -> None:
        """The version that the step begins with is published, so nobody waits for the trainer."""
        self._step = step

    def commit(self, step: int, group: GroupId) -> None:
        """The group belongs to the step's batch, which may be a later one."""
        self._committed[step].append(group)

    @property
    def can_accumulate(self) -> bool:
        """Whether there is something to do for the step before its batch is complete."""
        if not self._streams or self._step is None:
            return False
        return self._trainer.can_accumulate or len(self._put) < len(self._committed[self._step])

    def accumulate(self) -> None:
        """One micro-batch, or a group's way to one. What fails here is tried again with the whole batch."""
        assert self._step is not None
        try:
            if self._trainer.can_accumulate:
                self._trainer.accumulate()
            else:
                self._put_group(self._step, self._committed[self._step][len(self._put)])
        except Exception:  # out of memory, perhaps: the step itself will say so, and who is told
            self._forget()
            self._step = None

    def train(self, step: int, groups: Sequence[GroupId]) -> dict[str, float]:
        """The batch is complete: work on what is missing, and step; the trainer's metrics and one more.

        Raises what the trainer raises; the step can then be tried again.
        """
        try:
            if self._put != [*groups[: len(self._put)]]:
                self._forget()
            num_early = self._trainer.num_accumulated_tokens
            if self._streams:
                for group in groups[len(self._put) :]:
                    self._put_group(step, group)
            else:
                self._put_whole(step, sorted(groups))
            metrics = self._trainer.finish_step()
        except BaseException:
            self._forget()
            raise
        finally:
            self._step = None
        self._put = []
        self._committed.pop(step, None)
        return metrics | {"actor/num_tokens_early": float(num_early)}

    def _forget(self) -> None:
        self._trainer.discard_batch()
        self._put = []

    def _put_group(self, step: int, group: GroupId) -> None:
        self._trainer.add_samples([self._sample(step, s, s.advantage) for s in self._read(group)])
        self._put.append(group)

    def _put_whole(self, step: int, groups: Sequence[GroupId]) -> None:
        """All at once, so that micro-batches are of like sizes."""
        batch = [self._read(group) for group in groups]
        rewards = [[s.reward for s in group] for group in batch]
        num_tokens = [[len(s.logprobs) for s in group] for group in batch]
        shaped = self._scoring.shape_rewards(rewards, num_tokens)
        advantages: Sequence[Sequence[float | None]] = [[s.advantage for s in group] for group in batch]
        if self._judge is not None:
            advantages = shaped  # until they have been judged
        elif self._scoring.needs_batch:
            advantages = self._scoring.batch_advantages(rewards, num_tokens)
        pairs = [
            (s, a)
            for group, own in zip(batch, advantages, strict=True)
            for s, a in zip(group, own, strict=True)
        ]
        samples = [self._sample(step, stored, advantage) for stored, advantage in pairs]
        if self._judge is not None:
            samples = self._judge(samples, [reward for group in shaped for reward in group])
        self._trainer.add_samples(samples, is_whole_batch=True)

    def _sample(self, step: int, s: StoredSample, advantage: float | None) -> Sample:
        assert advantage is not None
        is_comparable = self._digest(s.version) == s.weight_digest
        return Sample(
            s.prompt_ids,
            s.token_ids,
            s.logprobs,
            advantage,
            step - s.version,
            s.routes,
            is_comparable,
            s.proximal,
            s.reference,
            s.values,
            s.stream_index,
            s.loss_mask,
        )
