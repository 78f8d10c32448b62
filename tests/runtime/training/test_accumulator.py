"""A trainer begins with a step when it may, mixes no two, and does in the end what was missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from tests.runtime.tiny import MODEL

from dora.core.types import GroupId
from dora.errors import RunError
from dora.model.weights import initial_weights
from dora.runtime.training.accumulator import Accumulator
from dora.stream.sample_db import StoredSample
from dora.trainer.advantage import AdvantageSettings, compute_advantages
from dora.trainer.critic import Critic, CriticSettings, initial_critic_weights
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

SETTINGS = TrainerSettings(lr=1e-2, num_steps=9, warmup_steps=0, micro_batch_tokens=12)
GROUPS = tuple(GroupId(0, row) for row in range(8))
FIRST, SECOND = GROUPS[:4][::-1], GROUPS[4:]  # the batches of two steps, in the order of commitment
REWARDS = (1.0, 0.25)


def stored(group: GroupId) -> list[StoredSample]:
    """Two answers of 3 and 5 tokens."""
    row = group.row
    return [
        StoredSample(0, [1, 2], [row + 3] * num, [-3.5] * num, reward, advantage, None, "digest")
        for num, reward, advantage in zip((3, 5), REWARDS, (1.0 + row, -1.0), strict=True)
    ]


class Reader:
    """Reads groups; those of `broken` cannot be read once."""

    def __init__(self) -> None:
        self.broken: set[GroupId] = set()
        self.read: list[GroupId] = []

    def __call__(self, group: GroupId) -> list[StoredSample]:
        if group in self.broken:
            self.broken.remove(group)
            raise OSError("no such luck")
        self.read.append(group)
        return stored(group)


class Stage:
    """A trainer, its gathering and what it reads."""

    def __init__(
        self, scoring: AdvantageSettings | None = None, streams: bool = True, critic: Critic | None = None
    ) -> None:
        self.reader = Reader()
        self.trainer = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS, critic=critic)
        self.digests = {0: "digest"}
        judge = None if critic is None else critic.compute_advantages
        scoring = scoring or AdvantageSettings()
        self.gathering = Accumulator(self.trainer, self.reader, self.digests.get, scoring, streams, judge)

    def commit(self, step: int, groups: Sequence[GroupId]) -> None:
        for group in groups:
            self.gathering.commit(step, group)

    def work(self) -> None:
        while self.gathering.can_accumulate:
            self.gathering.accumulate()

    def two_steps(self) -> torch.Tensor:
        """Trained without anything early."""
        for step, groups in enumerate((FIRST, SECOND)):
            self.gathering.start_step(step)
            self.gathering.train(step, groups)
        return self.trainer.flat


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return Stage().two_steps()


def test_what_is_committed_is_worked_on_at_once(expected: torch.Tensor) -> None:
    stage = Stage()
    for step, groups in enumerate((FIRST, SECOND)):
        stage.gathering.start_step(step)
        stage.commit(step, groups[:3])
        stage.work()
        assert stage.reader.read == [*FIRST, *SECOND][: 4 * step + 3]
        stage.commit(step, groups[3:])
        metrics = stage.gathering.train(step, groups)
        assert 0 < metrics["actor/num_tokens_early"] < metrics["actor/num_tokens"] == 4 * 8
    assert torch.equal(stage.trainer.flat, expected)


def test_a_later_step_waits_for_the_version_it_begins_with(expected: torch.Tensor) -> None:
    stage = Stage()
    stage.commit(0, FIRST)
    assert not stage.gathering.can_accumulate
    stage.gathering.start_step(0)
    stage.commit(1, SECOND)
    stage.work()
    assert stage.reader.read == [*FIRST]
    stage.gathering.train(0, FIRST)
    assert not stage.gathering.can_accumulate  # its version is trained, but somebody waits for it
    stage.gathering.start_step(1)
    stage.work()
    assert stage.reader.read == [*FIRST, *SECOND]
    assert stage.gathering.train(1, SECOND)["actor/num_tokens_early"] > 0
    assert torch.equal(stage.trainer.flat, expected)


def test_what_was_never_heard_of_is_worked_on_in_the_end(expected: torch.Tensor) -> None:
    """After a run went on in another life, the commitments of the former are not told again."""
    stage = Stage()
    stage.gathering.start_step(0)
    stage.commit(0, FIRST[2:])
    stage.work()
    assert stage.gathering.train(0, FIRST)["actor/num_tokens_early"] == 0  # the order would be another
    stage.gathering.start_step(1)
    stage.gathering.train(1, SECOND)
    assert torch.equal(stage.trainer.flat, expected)


def test_what_fails_early_is_done_with_the_whole_batch(expected: torch.Tensor) -> None:
    stage = Stage()
    stage.gathering.start_step(0)
    stage.commit(0, FIRST)
    stage.reader.broken = {FIRST[2]}
    stage.work()
    assert not stage.gathering.can_accumulate
    assert stage.trainer.num_accumulated_tokens == 0
    stage.gathering.train(0, FIRST)
    stage.gathering.start_step(1)
    stage.gathering.train(1, SECOND)
    assert torch.equal(stage.trainer.flat, expected)


def test_a_step_that_failed_is_taken_again_from_its_beginning(expected: torch.Tensor) -> None:
    stage = Stage()
    stage.gathering.start_step(0)
    stage.commit(0, FIRST)
    stage.gathering.accumulate()
    stage.reader.broken = {FIRST[3]}
    with pytest.raises(OSError, match="no such luck"):
        stage.gathering.train(0, FIRST)
    stage.gathering.train(0, FIRST)
    stage.gathering.start_step(1)
    stage.gathering.train(1, SECOND)
    assert torch.equal(stage.trainer.flat, expected)


def test_a_gradient_that_is_not_finite_leaves_nothing_behind(expected: torch.Tensor) -> None:
    stage = Stage()
    stage.gathering.start_step(0)
    stage.trainer.add_samples([replace(s, advantage=float("nan")) for s in samples(FIRST)])
    with pytest.raises(RunError, match="grad_norm"):
        stage.gathering.train(0, FIRST)
    assert torch.equal(stage.two_steps(), expected)


def samples(groups: Sequence[GroupId]) -> list[Sample]:
    return [
        Sample(s.prompt_ids, s.token_ids, s.logprobs, s.advantage or 0.0) for g in groups for s in stored(g)
    ]


def test_without_streaming_the_order_of_commitment_does_not_matter() -> None:
    one, other = Stage(streams=False), Stage(streams=False)
    one.commit(0, FIRST)
    one.gathering.start_step(0)
    assert not one.gathering.can_accumulate
    one.gathering.train(0, FIRST)
    other.gathering.train(0, FIRST[::-1])
    assert torch.equal(one.trainer.flat, other.trainer.flat)


def test_what_other_bytes_of_its_version_have_drawn_is_trained_and_not_compared(
    expected: torch.Tensor,
) -> None:
    """A step that was redone rounded differently, and old samples of that version are left."""
    assert Stage().gathering.train(0, FIRST)["mismatch/num_tokens"] == 4 * 8
    stage = Stage()
    stage.digests[0] = "another"
    metrics = stage.gathering.train(0, FIRST)
    assert metrics["actor/num_tokens"] == 4 * 8
    assert not [name for name in metrics if name.startswith("mismatch/")]
    stage.gathering.train(1, SECOND)
    assert torch.equal(stage.trainer.flat, expected)


def test_advantages_of_a_batch_come_from_its_stored_rewards() -> None:
    stage = Stage(AdvantageSettings("reinforce_plus_plus"), streams=False)
    stage.gathering.train(0, FIRST)
    made = compute_advantages("reinforce_plus_plus", [REWARDS] * 4, [(3, 5)] * 4)
    flat = [advantage for group in made for advantage in group]
    reference = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS)
    batch = samples(sorted(FIRST))
    reference.step([replace(s, advantage=a) for s, a in zip(batch, flat, strict=True)])
    assert torch.equal(stage.trainer.flat, reference.flat)


def critic() -> Critic:
    flat = initial_critic_weights(MODEL, initial_weights(MODEL, seed=0))
    return Critic(MODEL, flat, CriticSettings(lr=1e-2, num_steps=9))


def test_a_critic_judges_the_stored_rewards_less_what_long_answers_lose() -> None:
    """Answers of 3 and 5 tokens, the last two tokens of which cost up to 1; then both learn."""
    scoring = AdvantageSettings("gae", max_tokens=6, overlong_buffer_tokens=2)
    stage, reference = Stage(scoring, streams=False, critic=critic()), critic()
    metrics = stage.gathering.train(0, FIRST)
    judged = reference.compute_advantages(samples(sorted(FIRST)), [1.0, 0.25 - 0.5] * 4)
    trainer = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS, critic=reference)
    trainer.step(judged)
    assert torch.equal(stage.trainer.flat, trainer.flat)
    assert stage.trainer.critic is not None
    assert torch.equal(stage.trainer.critic.flat, reference.flat)
    assert metrics["critic/returns/mean"] == pytest.approx((3 * 1.0 - 5 * 0.25) / 8)


def test_a_step_with_a_critic_that_failed_is_taken_again_from_its_beginning() -> None:
    stage, calm = (Stage(AdvantageSettings("gae"), streams=False, critic=critic()) for _ in range(2))
    stage.reader.broken = {FIRST[3]}
    with pytest.raises(OSError, match="no such luck"):
        stage.gathering.train(0, FIRST)
    for one in (stage, calm):
        one.gathering.train(0, FIRST)
    assert torch.equal(stage.trainer.flat, calm.trainer.flat)
