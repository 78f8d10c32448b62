"""The contract of a training engine as tests. docs/backends.md shows how to run them.

Each test checks one rule of `dora.engine.interface.TrainingEngine`.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import pytest
import torch
from torch import Tensor

from dora.engine.interface import TrainingEngine, TrainingFactory, required_members
from dora.errors import RunError
from dora.testing import CONFIG, reference_logprobs, version_weights
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample, TrainerSettings

SETTINGS = TrainerSettings(
    lr=1e-3,
    num_steps=10,
    warmup_steps=0,
    lr_decay="constant",
    max_grad_norm=1e6,  # no clipping, so that a gradient of the wrong size changes the step
)


class TrainingContract:
    """Subclass it as `Test...`, with the trainer's class as `factory`."""

    factory: ClassVar[TrainingFactory]
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-3  # of weights after a step, in learning rates

    @pytest.fixture
    def trainer(self) -> TrainingEngine:
        """A trainer before its first step."""
        return self._make(version_weights(0))

    def test_it_has_every_member_of_the_protocol(self, trainer: TrainingEngine) -> None:
        missing = [name for name in required_members(TrainingEngine) if not hasattr(trainer, name)]
        assert not missing, f"missing: {', '.join(missing)}; see dora.engine.interface.TrainingEngine"

    def test_it_starts_from_the_given_weights(self, trainer: TrainingEngine) -> None:
        assert torch.equal(trainer.flat.cpu(), version_weights(0))
        assert trainer.flat.dtype == torch.float32
        assert trainer.num_steps_done == 0

    def test_a_step_makes_good_answers_likelier_and_bad_ones_less_likely(
        self, trainer: TrainingEngine
    ) -> None:
        good, bad = sample(0, advantage=1.0), sample(1, advantage=-1.0)
        before = [self._total_logprob(trainer, answer) for answer in (good, bad)]
        metrics = step(trainer, [good, bad])
        after = [self._total_logprob(trainer, answer) for answer in (good, bad)]
        assert after[0] > before[0]
        assert after[1] < before[1]
        assert trainer.num_steps_done == 1
        assert metrics["actor/num_tokens"] == len(good.token_ids) + len(bad.token_ids)
        assert all(math.isfinite(value) for value in metrics.values())

    def test_a_batch_without_advantages_changes_nothing(self, trainer: TrainingEngine) -> None:
        step(trainer, [sample(number, advantage=0.0) for number in range(2)])
        assert torch.equal(trainer.flat.cpu(), version_weights(0))
        assert trainer.num_steps_done == 1

    def test_a_batch_without_samples_changes_nothing(self, trainer: TrainingEngine) -> None:
        metrics = step(trainer, [])
        assert torch.equal(trainer.flat.cpu(), version_weights(0))
        assert (trainer.num_steps_done, metrics["actor/num_tokens"]) == (1, 0)
        assert all(math.isfinite(value) for value in metrics.values())

    def test_a_clipped_ratio_has_no_gradient(self, trainer: TrainingEngine) -> None:
        """PPO: a response whose probability has grown beyond the clip range adds nothing."""
        step(trainer, [sample(0, advantage=1.0, shift=-5.0)])
        assert torch.equal(trainer.flat.cpu(), version_weights(0))

    def test_observation_tokens_have_no_loss(self, trainer: TrainingEngine) -> None:
        """They do not count in the mean: 2 tokens of advantage 1 weigh as much as 4 of 2, 0, 0, 2."""
        sampled, mask = sample(1, advantage=[2.0, 0.0, 0.0, 2.0]), [1, 0, 0, 1]
        logprobs = [p for p, is_sampled in zip(sampled.logprobs, mask, strict=True) if is_sampled]
        metrics = step(trainer, [replace(sampled, logprobs=logprobs, advantage=1.0, loss_mask=mask)])
        other = self._make(version_weights(0))
        step(other, [sampled])
        assert metrics["actor/num_tokens"] == sum(mask)
        assert self._max_difference(trainer, other) < self.tolerance

    def test_a_batch_in_pieces_makes_the_same_step(self, trainer: TrainingEngine) -> None:
        batch = [sample(number, advantage=1.0 - number) for number in range(4)]
        other = self._make(version_weights(0))
        for either in (trainer, other):  # the length of AdamW's first step does not depend on the gradient's
            step(either, [sample(number, advantage=number - 5.0) for number in range(4, 6)])
        step(trainer, batch)
        for i in range(0, 4, 2):
            other.add_samples(batch[i : i + 2])
            while other.can_accumulate:
                other.accumulate()
        other.finish_step()
        assert self._max_difference(trainer, other) < self.tolerance

    def test_a_discarded_batch_leaves_no_trace(self, trainer: TrainingEngine) -> None:
        trainer.add_samples([sample(0, advantage=1.0), sample(1, advantage=-1.0)])
        while trainer.can_accumulate:
            trainer.accumulate()
        trainer.discard_batch()
        assert trainer.num_accumulated_tokens == 0
        assert torch.equal(trainer.flat.cpu(), version_weights(0))
        batch = [sample(2, advantage=1.0), sample(3, advantage=-1.0)]
        step(trainer, batch)
        other = self._make(version_weights(0))
        step(other, batch)
        assert self._max_difference(trainer, other) < self.tolerance

    def test_a_failed_step_changes_nothing_and_can_be_repeated(self, trainer: TrainingEngine) -> None:
        batch = [sample(0, advantage=1.0), sample(1, advantage=-1.0)]
        step(trainer, batch)
        before = trainer.flat.clone()
        trainer.add_samples([sample(2, advantage=math.nan)], is_whole_batch=True)
        with pytest.raises(RunError):
            trainer.finish_step()
        assert torch.equal(trainer.flat, before)
        assert trainer.num_steps_done == 1
        trainer.discard_batch()
        step(trainer, batch)
        other = self._make(version_weights(0))
        step(other, batch)
        step(other, batch)
        assert self._max_difference(trainer, other) < self.tolerance

    def test_training_resumes_from_a_checkpoint(self, trainer: TrainingEngine) -> None:
        batches = [[sample(2 * i, advantage=1.0), sample(2 * i + 1, advantage=-1.0)] for i in range(3)]
        for batch in batches[:2]:
            step(trainer, batch)
        stored = io.BytesIO()
        torch.save(trainer.state_dict(), stored)
        stored.seek(0)
        other = self._make(trainer.flat.clone().cpu())
        other.load_state_dict(torch.load(stored, weights_only=True))
        assert other.num_steps_done == 2
        for either in (trainer, other):
            step(either, batches[2])
        assert self._max_difference(trainer, other) < self.tolerance

    def test_equal_batches_make_bitwise_equal_weights(self, trainer: TrainingEngine) -> None:
        batch = [sample(number, advantage=1.0 - number) for number in range(3)]
        other = self._make(version_weights(0))
        step(trainer, batch)
        step(other, batch)
        assert torch.equal(trainer.flat, other.flat)

    def _make(self, flat: Tensor) -> TrainingEngine:
        return self.factory(config=CONFIG, flat=flat, settings=SETTINGS, device=self.device)

    def _max_difference(self, one: TrainingEngine, other: TrainingEngine) -> float:
        """The largest difference of two weights, in learning rates."""
        return float((one.flat - other.flat).abs().max()) / SETTINGS.lr

    def _total_logprob(self, trainer: TrainingEngine, sample: Sample) -> float:
        """The log-prob of a response under the current weights."""
        compute = GroupLogprobs(CONFIG, SETTINGS, "cpu")
        compute.load_weights(trainer.flat.cpu())
        return float(compute([sample])[0].sum())


def step(trainer: TrainingEngine, batch: Sequence[Sample]) -> dict[str, float]:
    """One step on a whole batch."""
    trainer.add_samples(batch, is_whole_batch=True)
    return trainer.finish_step()


def sample(number: int, *, advantage: float | Sequence[float], shift: float = 0.0) -> Sample:
    """Answer `number`, of 3 to 6 tokens. `shift` is added to its log-probs under the initial weights."""
    prompt_ids = [(5 + 3 * i) % CONFIG.vocab_size for i in range(4)]
    token_ids = [(7 * number + 11 * i + 2) % CONFIG.vocab_size for i in range(3 + number % 4)]
    logprobs = [p + shift for p in reference_logprobs(0, prompt_ids, token_ids)]
    return Sample(prompt_ids, token_ids, logprobs, advantage)
