"""The contract of a training engine, as tests: see docs/adapters.md for how to run them.

`dora.runtime.stations` has the words; each test holds one promise.
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

from dora.contract.asking import CONFIG, logprobs_of, weights
from dora.errors import RunError
from dora.runtime.stations import TrainingEngine, TrainingFactory, members
from dora.trainer.logprobs import GroupLogprobs
from dora.trainer.settings import Sample, TrainerSettings

SETTINGS = TrainerSettings(
    lr=1e-3,
    num_steps=10,
    warmup_steps=0,
    lr_decay="constant",
    max_grad_norm=1e6,  # gradients of another size must show
)


class TrainingContract:
    """Subclass it as `Test...`, with the trainer's class as `factory`."""

    factory: ClassVar[TrainingFactory]
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[float] = 1e-3  # of weights after a step, in learning rates

    @pytest.fixture
    def trainer(self) -> TrainingEngine:
        """One that has not stepped yet."""
        return self._made(weights(0))

    def test_it_has_all_that_is_asked_for(self, trainer: TrainingEngine) -> None:
        missing = [name for name in members(TrainingEngine) if not hasattr(trainer, name)]
        assert not missing, f"it has no {', '.join(missing)}; see dora.runtime.stations.TrainingEngine"

    def test_it_begins_with_the_weights_it_was_given(self, trainer: TrainingEngine) -> None:
        assert torch.equal(trainer.flat.cpu(), weights(0))
        assert trainer.flat.dtype == torch.float32
        assert trainer.num_steps_done == 0

    def test_a_step_makes_good_answers_likelier_and_bad_ones_less_likely(
        self, trainer: TrainingEngine
    ) -> None:
        good, bad = sample(0, advantage=1.0), sample(1, advantage=-1.0)
        before = [self._total(trainer, one) for one in (good, bad)]
        metrics = step(trainer, [good, bad])
        after = [self._total(trainer, one) for one in (good, bad)]
        assert after[0] > before[0]
        assert after[1] < before[1]
        assert trainer.num_steps_done == 1
        assert metrics["actor/num_tokens"] == len(good.token_ids) + len(bad.token_ids)
        assert all(math.isfinite(value) for value in metrics.values())

    def test_a_batch_without_advantages_changes_nothing(self, trainer: TrainingEngine) -> None:
        step(trainer, [sample(number, advantage=0.0) for number in range(2)])
        assert torch.equal(trainer.flat.cpu(), weights(0))
        assert trainer.num_steps_done == 1

    def test_what_has_moved_away_is_clipped(self, trainer: TrainingEngine) -> None:
        """PPO: an answer that is far likelier by now than when it was sampled has no more to teach."""
        one = sample(0, advantage=1.0, shift=-5.0)
        step(trainer, [one])
        assert torch.equal(trainer.flat.cpu(), weights(0))

    def test_what_was_read_between_turns_is_no_lesson(self, trainer: TrainingEngine) -> None:
        """Nor does it count in the mean: 2 tokens of advantage 1 weigh as much as 4 of 2, 0, 0, 2."""
        drawn, mask = sample(1, advantage=[2.0, 0.0, 0.0, 2.0]), [1, 0, 0, 1]
        logprobs = [p for p, is_drawn in zip(drawn.logprobs, mask, strict=True) if is_drawn]
        metrics = step(trainer, [replace(drawn, logprobs=logprobs, advantage=1.0, loss_mask=mask)])
        other = self._made(weights(0))
        step(other, [drawn])
        assert metrics["actor/num_tokens"] == sum(mask)
        assert self._gap(trainer, other) < self.tolerance

    def test_pieces_make_the_step_of_the_whole_batch(self, trainer: TrainingEngine) -> None:
        batch = [sample(number, advantage=1.0 - number) for number in range(4)]
        other = self._made(weights(0))
        for one in (trainer, other):  # AdamW's first step is as long whatever the gradient is divided by
            step(one, [sample(number, advantage=number - 5.0) for number in range(4, 6)])
        step(trainer, batch)
        for i in range(0, 4, 2):
            other.put(batch[i : i + 2])
            while other.can_work:
                other.work()
        other.finish()
        assert self._gap(trainer, other) < self.tolerance

    def test_what_is_forgotten_leaves_no_trace(self, trainer: TrainingEngine) -> None:
        trainer.put([sample(0, advantage=1.0), sample(1, advantage=-1.0)])
        while trainer.can_work:
            trainer.work()
        trainer.forget()
        assert trainer.num_accumulated == 0
        assert torch.equal(trainer.flat.cpu(), weights(0))
        batch = [sample(2, advantage=1.0), sample(3, advantage=-1.0)]
        step(trainer, batch)
        other = self._made(weights(0))
        step(other, batch)
        assert self._gap(trainer, other) < self.tolerance

    def test_a_step_that_fails_changes_nothing_and_can_be_taken_again(self, trainer: TrainingEngine) -> None:
        batch = [sample(0, advantage=1.0), sample(1, advantage=-1.0)]
        step(trainer, batch)
        before = trainer.flat.clone()
        trainer.put([sample(2, advantage=math.nan)], is_whole=True)
        with pytest.raises(RunError):
            trainer.finish()
        assert torch.equal(trainer.flat, before)
        assert trainer.num_steps_done == 1
        trainer.forget()
        step(trainer, batch)
        other = self._made(weights(0))
        step(other, batch)
        step(other, batch)
        assert self._gap(trainer, other) < self.tolerance

    def test_a_checkpoint_goes_on_where_it_was_taken(self, trainer: TrainingEngine) -> None:
        batches = [[sample(2 * i, advantage=1.0), sample(2 * i + 1, advantage=-1.0)] for i in range(3)]
        for batch in batches[:2]:
            step(trainer, batch)
        stored = io.BytesIO()
        torch.save(trainer.state_dict(), stored)
        stored.seek(0)
        other = self._made(trainer.flat.clone().cpu())
        other.load_state_dict(torch.load(stored, weights_only=True))
        assert other.num_steps_done == 2
        for one in (trainer, other):
            step(one, batches[2])
        assert self._gap(trainer, other) < self.tolerance

    def test_equal_batches_make_equal_bits(self, trainer: TrainingEngine) -> None:
        batch = [sample(number, advantage=1.0 - number) for number in range(3)]
        other = self._made(weights(0))
        step(trainer, batch)
        step(other, batch)
        assert torch.equal(trainer.flat, other.flat)

    def _made(self, flat: Tensor) -> TrainingEngine:
        return self.factory(config=CONFIG, flat=flat, settings=SETTINGS, device=self.device)

    def _gap(self, one: TrainingEngine, other: TrainingEngine) -> float:
        """Largest difference of two weights, in learning rates."""
        return float((one.flat - other.flat).abs().max()) / SETTINGS.lr

    def _total(self, trainer: TrainingEngine, one: Sample) -> float:
        """Log-prob of an answer under the weights as they are."""
        plain = GroupLogprobs(CONFIG, SETTINGS, "cpu")
        plain.use(trainer.flat.cpu())
        return float(plain([one])[0].sum())


def step(trainer: TrainingEngine, batch: Sequence[Sample]) -> dict[str, float]:
    """Put a batch whole, and step."""
    trainer.put(batch, is_whole=True)
    return trainer.finish()


def sample(number: int, *, advantage: float | Sequence[float], shift: float = 0.0) -> Sample:
    """The number-th answer, of 3 to 6 tokens; its log-probs are those of the first weights, and `shift`."""
    prompt_ids = [(5 + 3 * i) % CONFIG.vocab_size for i in range(4)]
    token_ids = [(7 * number + 11 * i + 2) % CONFIG.vocab_size for i in range(3 + number % 4)]
    logprobs = [p + shift for p in logprobs_of(0, prompt_ids, token_ids)]
    return Sample(prompt_ids, token_ids, logprobs, advantage)
