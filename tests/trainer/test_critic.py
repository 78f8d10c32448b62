"""PPO's critic: values, advantages and updates, and its state after a failure or a resume."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.trainer.batches import SETTINGS, TINY, at_the_end, initial, samples, with_nan

from dora.errors import RunError
from dora.model.decoder import lm_head
from dora.model.weights import WeightLayout
from dora.trainer.critic import Critic, CriticSettings, initial_critic_weights, value_layout, with_advantages
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.settings import Sample
from dora.trainer.trainer import Trainer

CRITIC = CriticSettings(lr=1e-2, num_steps=50, lr_decay="constant", max_grad_norm=1e9)
SHORT, LONG = Sample([1], [2], [-1.0], 0.0), Sample([1, 3], [4, 5, 6], [-1.0] * 3, 0.0)


def make_critic(settings: CriticSettings = CRITIC) -> Critic:
    return Critic(TINY, initial_critic_weights(TINY, initial()), settings)


def rewards_of(batch: list[Sample]) -> list[float]:
    """A predictable reward: 1 for a response that begins with a small token."""
    return [float(s.token_ids[0] < 5) for s in batch]


def moments(critic: Critic) -> dict[str, torch.Tensor]:
    """Adam's first moment after one update, by name: a tenth of the gradient."""
    flat: torch.Tensor = critic.state_dict()["state"][0]["exp_avg"]
    return value_layout(TINY).views(flat)


def test_a_critic_has_the_decoder_of_the_policy_and_a_head_of_one_value() -> None:
    layout = value_layout(TINY)
    assert layout.shapes.keys() - WeightLayout(TINY).shapes.keys() == {"score.weight", "score.bias"}
    views, origin = layout.views(initial_critic_weights(TINY, initial())), WeightLayout(TINY).views(initial())
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(views[name], origin[name])
    assert views["score.weight"].shape == (1, TINY.hidden_size)
    assert not views["score.weight"].any()
    untied = replace(TINY, tie_word_embeddings=False)
    assert value_layout(untied).shapes.keys() == layout.shapes.keys()


def test_advantages_of_an_untrained_critic_are_the_whitened_rewards() -> None:
    """Rewards 1, 0, 0, 0 of four tokens: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4."""
    short, long = make_critic().compute_advantages(*at_the_end([SHORT, LONG], [1.0, 0.0]))
    assert short.advantages == pytest.approx([1.5])
    assert long.advantages == pytest.approx([-0.5] * 3)
    assert (long.token_ids, long.logprobs) == (LONG.token_ids, LONG.logprobs)


def test_discount_and_lambda_affect_the_advantages() -> None:
    """With values 0 an advantage is reward * (gamma * lam)**(tokens after it): 1, 4, 16."""
    critic = make_critic(replace(CRITIC, gamma=0.5, lam=0.5))
    (long,) = critic.compute_advantages(*at_the_end([LONG], [16.0]))
    assert long.advantages == pytest.approx([(x - 7.0) / 63**0.5 for x in (1.0, 4.0, 16.0)])


def test_the_first_gradient_of_a_critic_is_the_gradient_of_the_squared_error() -> None:
    critic = make_critic()
    critic.compute_advantages(*at_the_end([SHORT, LONG], [1.0, 0.0]))
    metrics = critic.update(0)
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 / 4)
    assert (metrics["critic/values/mean"], metrics["critic/returns/mean"]) == (0.0, 0.25)
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
    assert moments(critic)["score.bias"].item() == pytest.approx(0.1 * -0.25)
    assert not moments(critic)["model.norm.weight"].any()  # its head is still 0


@pytest.mark.parametrize(
    "settings", [CRITIC, replace(CRITIC, dtype="bfloat16"), replace(CRITIC, activation_checkpointing=True)]
)
def test_a_critic_learns_to_predict_the_returns(settings: CriticSettings) -> None:
    critic, batch = make_critic(settings), samples()
    metrics = []
    for step in range(15):
        critic.compute_advantages(*at_the_end(batch, rewards_of(batch)))
        metrics.append(critic.update(step))
    assert metrics[-1]["critic/vf_loss"] < 0.2 * metrics[0]["critic/vf_loss"]
    assert metrics[-1]["critic/vf_explained_var"] > 0.5 > metrics[0]["critic/vf_explained_var"]


def test_micro_batches_of_a_critic_add_up_to_the_whole_batch() -> None:
    batch = samples()
    gradients = []
    for budget in (10_000, 30):
        critic = make_critic(replace(CRITIC, micro_batch_tokens=budget))
        updated = critic.compute_advantages(*at_the_end(batch, rewards_of(batch)))
        critic.update(0)
        gradients.append(moments(critic)["score.weight"])
        assert [len(s.advantages) for s in updated] == [len(s.token_ids) for s in batch]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_a_value_outside_its_clip_range_is_counted() -> None:
    """Two epochs with a learning rate that moves values by more than the range."""
    settings = replace(CRITIC, lr=1.0, ppo_epochs=2, cliprange_value=1e-3)
    critic = make_critic(settings)
    critic.compute_advantages(*at_the_end([SHORT, LONG], [9.0, 9.0]))
    assert critic.update(0)["critic/vf_clipfrac"] == pytest.approx(0.5)


def test_a_critic_updates_once_per_mini_batch_and_epoch() -> None:
    batch = samples()
    total = sum(len(s.token_ids) for s in batch)
    critic = make_critic(replace(CRITIC, mini_batch_tokens=total // 3, ppo_epochs=2))
    critic.compute_advantages(*at_the_end(batch, rewards_of(batch)))
    critic.update(0)
    assert critic.state_dict()["state"][0]["step"] == 6


def test_an_empty_response_gets_no_advantages() -> None:
    empty = Sample([1], [], [], 0.0)
    critic = make_critic()
    updated = critic.compute_advantages(*at_the_end([empty, SHORT, LONG], [5.0, 1.0, 0.0]))
    assert updated[0].advantages == []
    assert updated[1].advantages == pytest.approx([1.5])
    assert critic.compute_advantages(*at_the_end([empty], [5.0]))[0].advantages == []
    assert critic.update(0)["critic/vf_loss"] == 0.0


def test_values_predicted_group_by_group_are_used_as_they_are() -> None:
    """As an auxiliary worker does, whose values the trainer and the critic share."""
    batch, rewards = samples(), rewards_of(samples())
    grouped, whole = make_critic(), make_critic()
    for critic in (grouped, whole):  # so that values are not 0
        critic.compute_advantages(*at_the_end(batch, rewards))
        critic.update(0)
    predicted = [s for i in range(0, 12, 4) for s in grouped.predict_values(batch[i : i + 4])]
    advantages = [s.advantages for s in with_advantages(*at_the_end(predicted, rewards), 1.0, 1.0).samples]
    assert [s.advantages for s in grouped.compute_advantages(*at_the_end(predicted, rewards))] == advantages
    for own, other in zip(advantages, whole.compute_advantages(*at_the_end(batch, rewards)), strict=True):
        assert own == pytest.approx(other.advantages, abs=1e-4)
    assert grouped.update(1)["critic/vf_loss"] == pytest.approx(whole.update(1)["critic/vf_loss"], rel=1e-4)


def test_a_resumed_trainer_continues_policy_and_critic() -> None:
    def make_trainer() -> Trainer:
        return Trainer(TINY, initial(), SETTINGS, critic=make_critic())

    def step(trainer: Trainer) -> None:
        assert trainer.critic is not None
        trainer.step(trainer.critic.compute_advantages(*at_the_end(samples(), rewards_of(samples()))))

    whole, first, second = make_trainer(), make_trainer(), make_trainer()
    for trainer in (whole, whole, first):
        step(trainer)
    second.flat.copy_(first.flat)
    second.load_state_dict(first.state_dict())
    step(second)
    assert torch.equal(second.flat, whole.flat)
    assert second.critic is not None
    assert whole.critic is not None
    assert torch.equal(second.critic.flat, whole.critic.flat)


def test_a_step_that_fails_leaves_the_critic_unchanged() -> None:
    critic = make_critic()
    trainer = Trainer(TINY, initial(), SETTINGS, critic=critic)
    batch = critic.compute_advantages(*at_the_end(samples(), rewards_of(samples())))
    with pytest.raises(RunError, match="grad_norm"):
        trainer.step(with_nan(batch))
    assert torch.equal(critic.flat, make_critic().flat)
    metrics = trainer.step(batch)
    assert {"critic/vf_loss", "critic/grad_norm", "critic/lr", "actor/pg_loss"} <= metrics.keys()
    assert not torch.equal(critic.flat, make_critic().flat)


def test_the_critic_trains_on_a_batch_once() -> None:
    """A retry uses the batch again, the next step does not."""
    critic, batch = make_critic(), samples()
    trainer = Trainer(TINY, initial(), SETTINGS, critic=critic)
    trainer.step(critic.compute_advantages(*at_the_end(batch, rewards_of(batch))))
    policy, values = trainer.flat.clone(), critic.flat.clone()
    with pytest.raises(RunError, match="this step has no batch"):
        trainer.step(batch)
    assert torch.equal(trainer.flat, policy)
    assert torch.equal(critic.flat, values)
    trainer.step(critic.compute_advantages(*at_the_end(batch, rewards_of(batch))))
    assert trainer.num_steps_done == 2


def sampled(trainer: Trainer, source: torch.Generator) -> list[Sample]:
    """Eight responses of six tokens to each of two prompts, sampled from the current policy."""
    policy = Policy(TINY, WeightLayout(TINY).views(trainer.flat))
    prompts = [[1]] * 8 + [[2, 3]] * 8
    responses: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for _ in range(6):
        prefixes = [[*prompt, *tokens] for prompt, tokens in zip(prompts, responses, strict=True)]
        batch = pack(prefixes, [[0]] * 16, policy.device)
        states = policy.hidden_states(batch).index_select(0, batch.logits_indices)
        distribution = torch.nn.functional.linear(states, lm_head(policy.weights)).log_softmax(-1)
        for i, token in enumerate(torch.multinomial(distribution.exp(), 1, generator=source)[:, 0].tolist()):
            responses[i].append(token)
            logprobs[i].append(float(distribution[i, token]))
    return [Sample(*parts, 0.0) for parts in zip(prompts, responses, logprobs, strict=True)]


@torch.no_grad()
def rewarded(trainer: Trainer, source: torch.Generator) -> tuple[list[Sample], list[float]]:
    """Responses, and how many of their tokens are sevens."""
    batch = sampled(trainer, source)
    return batch, [float(list(s.token_ids).count(7)) for s in batch]


def test_a_policy_learns_from_the_advantages_of_its_critic() -> None:
    source = torch.Generator().manual_seed(0)
    critic = make_critic(replace(CRITIC, lam=0.9, ppo_epochs=2))
    trainer = Trainer(TINY, initial(), replace(SETTINGS, num_steps=20, max_grad_norm=1.0), critic=critic)
    means = []
    for _ in range(20):
        batch, rewards = rewarded(trainer, source)
        metrics = trainer.step(critic.compute_advantages(*at_the_end(batch, rewards)))
        means.append(sum(rewards) / len(rewards))
    assert means[0] < 1.0
    assert sum(means[-5:]) / 5 > 4.5
    assert metrics["critic/values/mean"] > 2.0  # it predicts them
