"""Early accumulation of committed groups gives the same bits as one training step on the whole batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from tests.runtime.tiny import MODEL
from tests.trainer.batches import at_the_end

from dora.core.types import Branch, GroupId, RequestId
from dora.errors import RunError
from dora.model.weights import initial_weights
from dora.runtime.training.accumulator import Accumulator, to_sample, to_samples, to_turns, token_rewards
from dora.stream.sample_db import StoredSample
from dora.trainer.advantage import AdvantageSettings, compute_advantages, grpo_advantages
from dora.trainer.critic import Critic, CriticSettings, initial_critic_weights
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

SETTINGS = TrainerSettings(lr=1e-2, num_steps=9, warmup_steps=0, micro_batch_tokens=12)
GROUPS = tuple(GroupId(0, row) for row in range(8))
FIRST, SECOND = GROUPS[:4][::-1], GROUPS[4:]  # the batches of two steps, in order of commitment
REWARDS = (1.0, 0.25)


def stored(group: GroupId) -> list[StoredSample]:
    """Two samples, of 3 and 5 tokens."""
    row = group.row
    return [
        StoredSample(
            version=0,
            prompt_ids=np.array([1, 2], np.int32),
            token_ids=np.full(num, row + 3, np.int32),
            logprobs=np.full(num, -3.5, np.float32),
            reward=reward,
            advantage=advantage,
            routes=None,
            weight_digest="digest",
        )
        for num, reward, advantage in zip((3, 5), REWARDS, (1.0 + row, -1.0), strict=True)
    ]


class Reader:
    """Reads groups; each of `broken` raises an error once."""

    def __init__(self) -> None:
        self.broken: set[GroupId] = set()
        self.read: list[GroupId] = []
        self.reference: Callable[[int], NDArray[np.float32]] | None = None  # of as many tokens
        self.truncated: set[int] = set()  # the siblings of each group that end at their maximum length

    def __call__(self, group: GroupId) -> list[StoredSample]:
        if group in self.broken:
            self.broken.remove(group)
            raise OSError("cannot read the group")
        self.read.append(group)
        group_samples = [
            s._replace(finish_reason="length" if sibling in self.truncated else "stop")
            for sibling, s in enumerate(stored(group))
        ]
        if self.reference is None:
            return group_samples
        return [s._replace(reference=self.reference(len(s.token_ids))) for s in group_samples]


class AccumulatingTrainer:
    """A trainer with its accumulator and the reader that feeds it."""

    def __init__(
        self,
        settings: AdvantageSettings | None = None,
        streams_gradients: bool = True,
        critic: Critic | None = None,
        masks_truncated: bool = False,
    ) -> None:
        self.reader = Reader()
        self.trainer = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS, critic=critic)
        self.digests = {0: "digest"}
        self.accumulator = Accumulator(
            self.trainer,
            self.reader,
            self.digests.get,
            settings or AdvantageSettings(),
            streams_gradients,
            None if critic is None else critic.compute_advantages,
            masks_truncated,
        )

    def commit(self, step: int, groups: Sequence[GroupId]) -> None:
        for group in groups:
            self.accumulator.commit(step, group)

    def accumulate_all(self) -> None:
        while self.accumulator.can_accumulate:
            self.accumulator.accumulate()

    def train_two_steps(self) -> torch.Tensor:
        """Train FIRST and SECOND without early accumulation; returns the weights [numel]."""
        for step, groups in enumerate((FIRST, SECOND)):
            self.accumulator.start_step(step)
            self.accumulator.train(step, groups)
        return self.trainer.flat


@pytest.fixture(scope="module")
def expected() -> torch.Tensor:
    return AccumulatingTrainer().train_two_steps()


def test_committed_groups_are_accumulated_before_the_batch_is_complete(expected: torch.Tensor) -> None:
    worker = AccumulatingTrainer()
    for step, groups in enumerate((FIRST, SECOND)):
        worker.accumulator.start_step(step)
        worker.commit(step, groups[:3])
        worker.accumulate_all()
        assert worker.reader.read == [*FIRST, *SECOND][: 4 * step + 3]
        worker.commit(step, groups[3:])
        metrics = worker.accumulator.train(step, groups)
        assert 0 < metrics["actor/num_tokens_early"] < metrics["actor/num_tokens"] == 4 * 8
    assert torch.equal(worker.trainer.flat, expected)


def test_groups_of_a_later_step_wait_for_the_version_that_it_starts_from(expected: torch.Tensor) -> None:
    worker = AccumulatingTrainer()
    worker.commit(0, FIRST)
    assert not worker.accumulator.can_accumulate
    worker.accumulator.start_step(0)
    worker.commit(1, SECOND)
    worker.accumulate_all()
    assert worker.reader.read == [*FIRST]
    worker.accumulator.train(0, FIRST)
    assert not worker.accumulator.can_accumulate  # its version is trained but not published
    worker.accumulator.start_step(1)
    worker.accumulate_all()
    assert worker.reader.read == [*FIRST, *SECOND]
    assert worker.accumulator.train(1, SECOND)["actor/num_tokens_early"] > 0
    assert torch.equal(worker.trainer.flat, expected)


def test_groups_that_were_not_committed_early_are_added_by_the_step(expected: torch.Tensor) -> None:
    """A resumed run does not send the commitments of the process before it one by one."""
    worker = AccumulatingTrainer()
    worker.accumulator.start_step(0)
    worker.commit(0, FIRST[2:])
    worker.accumulate_all()
    assert worker.accumulator.train(0, FIRST)["actor/num_tokens_early"] == 0  # another order
    worker.accumulator.start_step(1)
    worker.accumulator.train(1, SECOND)
    assert torch.equal(worker.trainer.flat, expected)


def test_after_an_early_error_the_step_computes_the_whole_batch(expected: torch.Tensor) -> None:
    worker = AccumulatingTrainer()
    worker.accumulator.start_step(0)
    worker.commit(0, FIRST)
    worker.reader.broken = {FIRST[2]}
    worker.accumulate_all()
    assert not worker.accumulator.can_accumulate
    assert worker.trainer.num_accumulated_tokens == 0
    worker.accumulator.train(0, FIRST)
    worker.accumulator.start_step(1)
    worker.accumulator.train(1, SECOND)
    assert torch.equal(worker.trainer.flat, expected)


def test_a_failed_step_can_be_repeated(expected: torch.Tensor) -> None:
    worker = AccumulatingTrainer()
    worker.accumulator.start_step(0)
    worker.commit(0, FIRST)
    worker.accumulator.accumulate()
    worker.reader.broken = {FIRST[3]}
    with pytest.raises(OSError, match="cannot read the group"):
        worker.accumulator.train(0, FIRST)
    worker.accumulator.train(0, FIRST)
    worker.accumulator.start_step(1)
    worker.accumulator.train(1, SECOND)
    assert torch.equal(worker.trainer.flat, expected)


def test_a_gradient_that_is_not_finite_is_discarded(expected: torch.Tensor) -> None:
    worker = AccumulatingTrainer()
    worker.accumulator.start_step(0)
    worker.trainer.add_samples([replace(s, advantage=float("nan")) for s in samples(FIRST)])
    with pytest.raises(RunError, match="grad_norm"):
        worker.accumulator.train(0, FIRST)
    assert torch.equal(worker.train_two_steps(), expected)


def samples(groups: Sequence[GroupId]) -> list[Sample]:
    return [to_sample(s, s.advantage or 0.0) for g in groups for s in stored(g)]


def test_without_streaming_the_order_of_commitment_does_not_matter() -> None:
    one, other = AccumulatingTrainer(streams_gradients=False), AccumulatingTrainer(streams_gradients=False)
    one.commit(0, FIRST)
    one.accumulator.start_step(0)
    assert not one.accumulator.can_accumulate
    one.accumulator.train(0, FIRST)
    other.accumulator.train(0, FIRST[::-1])
    assert torch.equal(one.trainer.flat, other.trainer.flat)


def test_samples_of_other_weights_of_their_version_are_trained_but_not_compared(
    expected: torch.Tensor,
) -> None:
    """A redone step may round differently, after engines sampled from the first result."""
    assert AccumulatingTrainer().accumulator.train(0, FIRST)["mismatch/num_tokens"] == 4 * 8
    worker = AccumulatingTrainer()
    worker.digests[0] = "other"
    metrics = worker.accumulator.train(0, FIRST)
    assert metrics["actor/num_tokens"] == 4 * 8
    assert not [name for name in metrics if name.startswith("mismatch/")]
    worker.accumulator.train(1, SECOND)
    assert torch.equal(worker.trainer.flat, expected)


def test_advantages_of_a_whole_batch_come_from_its_stored_rewards() -> None:
    worker = AccumulatingTrainer(AdvantageSettings("reinforce_plus_plus"), streams_gradients=False)
    worker.accumulator.train(0, FIRST)
    made = compute_advantages("reinforce_plus_plus", [REWARDS] * 4, [(3, 5)] * 4)
    flat = [advantage for group in made for advantage in group]
    reference = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS)
    batch = samples(sorted(FIRST))
    reference.step([replace(s, advantage=a) for s, a in zip(batch, flat, strict=True)])
    assert torch.equal(worker.trainer.flat, reference.flat)


def critic() -> Critic:
    flat = initial_critic_weights(MODEL, initial_weights(MODEL, seed=0))
    return Critic(MODEL, flat, CriticSettings(lr=1e-2, num_steps=9))


def test_a_critic_gets_the_stored_rewards_with_the_overlong_penalty() -> None:
    """Of samples of 3 and 5 tokens, the last two allowed tokens cost up to 1; then both are updated."""
    settings = AdvantageSettings("gae", max_tokens=6, overlong_buffer_tokens=2)
    worker, reference = AccumulatingTrainer(settings, streams_gradients=False, critic=critic()), critic()
    metrics = worker.accumulator.train(0, FIRST)
    scored = at_the_end(samples(sorted(FIRST)), [1.0, 0.25 - 0.5] * 4)
    expected_samples = reference.compute_advantages(*scored)
    trainer = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS, critic=reference)
    trainer.step(expected_samples)
    assert torch.equal(worker.trainer.flat, trainer.flat)
    assert worker.trainer.critic is not None
    assert torch.equal(worker.trainer.critic.flat, reference.flat)
    assert metrics["critic/returns/mean"] == pytest.approx((3 * 1.0 - 5 * 0.25) / 8)


def episodes(group: GroupId) -> list[StoredSample]:
    """`stored`, whose second sample ends with two tokens of an environment."""
    short, long = stored(group)
    mask = np.array([1, 1, 1, 0, 0], np.uint8)
    return [short, long._replace(loss_mask=mask, logprobs=long.logprobs[:3])]


def test_observations_count_towards_the_overlong_penalty_and_have_no_weight_in_means() -> None:
    settings = AdvantageSettings("reinforce_plus_plus", max_tokens=6, overlong_buffer_tokens=2)
    trainer = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS)
    Accumulator(trainer, episodes, {0: "digest"}.get, settings, False).train(0, FIRST)
    made = compute_advantages("reinforce_plus_plus", [[1.0, 0.25 - 0.5]] * 4, [(3, 3)] * 4)
    flat = [advantage for group in made for advantage in group]
    reference = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS)
    batch = [to_sample(s) for group in sorted(FIRST) for s in episodes(group)]
    reference.step([replace(s, advantage=a) for s, a in zip(batch, flat, strict=True)])
    assert torch.equal(trainer.flat, reference.flat)


def test_a_failed_step_with_a_critic_can_be_repeated() -> None:
    worker, undisturbed = (
        AccumulatingTrainer(AdvantageSettings("gae"), streams_gradients=False, critic=critic())
        for _ in range(2)
    )
    worker.reader.broken = {FIRST[3]}
    with pytest.raises(OSError, match="cannot read the group"):
        worker.accumulator.train(0, FIRST)
    for each in (worker, undisturbed):
        each.accumulator.train(0, FIRST)
    assert torch.equal(worker.trainer.flat, undisturbed.trainer.flat)


def branched(turn_rewards: Sequence[float] = ()) -> StoredSample:
    """The tree is 1 2 | 5 6; after 5 an observation 3 and a turn 7; after 1 a turn 8; after 7 a turn 9."""
    (whole, _) = stored(GROUPS[0])
    return whole._replace(
        token_ids=np.array([5, 6, 3, 7, 8, 9], np.int32),
        loss_mask=np.array([1, 1, 0, 1, 1, 1], np.uint8),
        logprobs=np.array([-5, -6, -7, -8, -9], np.float32),
        branches=[Branch(4, 3), Branch(6, 1), Branch(7, 6)],
        turn_rewards=turn_rewards,
    )


def test_each_sequence_of_an_episode_with_branches_is_a_sample() -> None:
    tree = branched()._replace(proximal=np.array([5, 6, 7, 8, 9], np.float32), stream_row=RequestId(0, 3, 0))
    samples = to_samples(tree, advantage=2.0)
    assert [(s.prompt_ids, s.token_ids, s.logprobs, s.proximal_logprobs) for s in samples] == [
        ([1, 2], [5, 6], [-5, -6], [5, 6]),
        ([1, 2, 5, 3], [7], [-7], [7]),
        ([1], [8], [-8], [8]),
        ([1, 2, 5, 3, 7], [9], [-9], [9]),
    ]
    assert {(s.advantage, s.loss_mask, s.stream_row) for s in samples} == {(2.0, None, None)}


def test_a_turn_has_the_observation_before_it_and_its_reward() -> None:
    history = (1, 2, 5, 3, 7)
    expected = [((1, 2), 0.0, 2), ((1, 2, 5, 3), 0.25, 1), ((1,), 0.0, 1), (history, 0.75, 1)]
    assert to_turns(branched([0.0, 0.25, 0.0, 0.75])) == expected
    assert [turn.reward for turn in to_turns(branched())] == [0.0, 0.0, 0.0, 1.0]
    assert to_turns(stored(GROUPS[0])[1]) == [((1, 2), REWARDS[1], 5)]
    long = stored(GROUPS[0])[1]
    turns = long._replace(loss_mask=np.array([0, 1, 1, 0, 1], np.uint8), logprobs=long.logprobs[:3])
    token = int(long.token_ids[0])
    assert to_turns(turns) == [((1, 2, token), 0.0, 2), ((token,), REWARDS[1], 1)]


def test_the_last_token_of_a_turn_has_its_reward() -> None:
    assert token_rewards(branched([0.0, 0.25, 0.0, 0.75]), 1.0) == [0.0, 0.0, 0.25, 0.0, 0.75]
    assert token_rewards(branched([0.0, 0.25, 0.0, 0.75]), 0.5) == [0.0, 0.0, 0.25, 0.0, 0.25]
    assert token_rewards(stored(GROUPS[0])[1], 0.0) == [0.0] * 5


def test_the_sequences_of_an_episode_have_the_advantages_of_their_tokens() -> None:
    samples = to_samples(branched(), advantage=[1.0, 2.0, 3.0, 4.0, 5.0])
    assert [s.advantages for s in samples] == [[1.0, 2.0], [3.0], [4.0], [5.0]]


class Trees(Reader):
    """Groups of an episode with branches, and one of a single turn."""

    def __call__(self, group: GroupId) -> list[StoredSample]:
        return [branched([0.0, 0.25, 0.0, 0.75]), super().__call__(group)[1]]


@pytest.mark.parametrize("streams_gradients", [True, False])
def test_gigpo_gives_each_turn_of_an_episode_its_advantage(streams_gradients: bool) -> None:
    """Both first turns follow the prompt, with returns 0.25 * 0.5 + 0.75 * 0.125 and 0.25."""
    settings = AdvantageSettings("gigpo", gamma=0.5)
    worker = AccumulatingTrainer(settings, streams_gradients)
    worker.accumulator = Accumulator(worker.trainer, Trees(), worker.digests.get, settings, streams_gradients)
    worker.accumulator.train(0, FIRST[:1])
    half = 2**-0.5
    tree, single = Trees()(FIRST[0])
    reference = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS)
    episode, turn = grpo_advantages([1.0, 0.25]), grpo_advantages([0.21875, 0.25])
    assert (episode[0], turn[0]) == pytest.approx((half, -half), abs=1e-4)
    advantages = [episode[0] + turn[0]] * 2 + [episode[0]] * 3
    batch = [*to_samples(tree, advantages), *to_samples(single, episode[1] + turn[1])]
    reference.add_samples(batch, is_whole_batch=not streams_gradients)
    reference.finish_step()
    assert torch.equal(worker.trainer.flat, reference.flat)
    assert not torch.equal(worker.trainer.flat, initial_weights(MODEL, seed=0))


def test_a_critic_gets_the_rewards_of_turns_and_the_sequences_of_an_episode() -> None:
    """Values are 0 at first, so the return of a token is the sum of the rewards from its turn on."""
    settings, own = AdvantageSettings("gae"), critic()
    trainer = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS, critic=own)
    accumulator = Accumulator(trainer, Trees(), {0: "digest"}.get, settings, False, own.compute_advantages)
    metrics = accumulator.train(0, FIRST[:1])
    returns = [1.0, 1.0, 1.0, 0.75, 0.75, *[0.25] * 5]
    assert metrics["critic/returns/mean"] == pytest.approx(sum(returns) / 10)
    assert metrics["actor/num_tokens"] == 10


def test_teachers_give_each_token_an_advantage(expected: torch.Tensor) -> None:
    """The reference column has their log-probs: 1 nat above the policy's, then 2 and more."""
    worker = AccumulatingTrainer(AdvantageSettings(teacher_coef=0.5, reward_coef=2.0))
    worker.reader.reference = lambda num: np.arange(num, dtype=np.float32) - 2.5
    worker.accumulator.start_step(0)
    metrics = worker.accumulator.train(0, FIRST)
    assert metrics["distillation/reverse_kl"] == pytest.approx(-(1 + 2 + 3 + 1 + 2 + 3 + 4 + 5) / 8)
    worker.reader.reference = lambda num: np.full(num, -3.5, np.float32)
    worker.accumulator.start_step(1)
    assert worker.accumulator.train(1, SECOND)["distillation/reverse_kl"] == 0.0
    assert not torch.equal(worker.trainer.flat, expected)


@pytest.mark.parametrize("streams_gradients", [True, False])
def test_a_masked_response_has_no_loss_and_its_group_keeps_its_advantages(streams_gradients: bool) -> None:
    worker = AccumulatingTrainer(streams_gradients=streams_gradients, masks_truncated=True)
    worker.reader.truncated = {1}
    worker.accumulator.start_step(0)
    worker.commit(0, FIRST)
    worker.accumulate_all()
    metrics = worker.accumulator.train(0, FIRST)
    reference = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS)
    groups = FIRST if streams_gradients else sorted(FIRST)
    reference.add_samples(samples(groups)[::2], is_whole_batch=not streams_gradients)
    expected = reference.finish_step()
    assert torch.equal(worker.trainer.flat, reference.flat)
    assert metrics["actor/pg_loss"] == expected["actor/pg_loss"]
    assert (metrics["actor/frac_masked_responses"], metrics["actor/num_tokens"]) == (0.5, 4 * 3)


def test_truncated_responses_have_a_loss_unless_they_are_masked(expected: torch.Tensor) -> None:
    worker = AccumulatingTrainer()
    worker.reader.truncated = {0, 1}
    assert torch.equal(worker.train_two_steps(), expected)
    assert "actor/frac_masked_responses" not in worker.accumulator.train(2, FIRST)


def test_advantages_of_a_whole_batch_count_its_masked_responses() -> None:
    settings = AdvantageSettings("reinforce_plus_plus")
    worker = AccumulatingTrainer(settings, streams_gradients=False, masks_truncated=True)
    worker.reader.truncated = {0}
    worker.accumulator.train(0, FIRST)
    made = compute_advantages("reinforce_plus_plus", [REWARDS] * 4, [(3, 5)] * 4)
    reference = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS)
    kept = samples(sorted(FIRST))[1::2]
    reference.step([replace(s, advantage=a) for s, (_, a) in zip(kept, made, strict=True)])
    assert torch.equal(worker.trainer.flat, reference.flat)


def test_the_critic_learns_from_masked_responses() -> None:
    settings = AdvantageSettings("gae")
    worker = AccumulatingTrainer(settings, streams_gradients=False, critic=critic(), masks_truncated=True)
    worker.reader.truncated = {1}
    worker.accumulator.train(0, FIRST)
    reference = critic()
    batch = reference.compute_advantages(*at_the_end(samples(sorted(FIRST)), [*REWARDS] * 4))
    trainer = Trainer(MODEL, initial_weights(MODEL, seed=0), SETTINGS, critic=reference)
    trainer.step(batch[::2])
    assert torch.equal(worker.trainer.flat, trainer.flat)
    assert worker.trainer.critic is not None
    assert torch.equal(worker.trainer.critic.flat, reference.flat)


@pytest.mark.parametrize("streams_gradients", [True, False])
def test_a_batch_whose_responses_are_all_masked_is_a_step_without_gradient(streams_gradients: bool) -> None:
    worker = AccumulatingTrainer(streams_gradients=streams_gradients, masks_truncated=True)
    worker.reader.truncated = {0, 1}
    metrics = worker.accumulator.train(0, FIRST)
    assert torch.equal(worker.trainer.flat, initial_weights(MODEL, seed=0))
    assert (metrics["actor/frac_masked_responses"], metrics["actor/grad_norm"]) == (1.0, 0.0)
    worker.reader.truncated = set()
    assert worker.accumulator.train(1, SECOND)["actor/frac_masked_responses"] == 0.0
