"""PPO's critic: it judges token by token, learns what to expect, and goes on where it was."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from tests.trainer.test_trainer import SETTINGS, TINY, initial, samples

from dora.errors import RunError
from dora.model.decoder import head
from dora.model.weights import Layout
from dora.trainer.critic import Critic, CriticSettings, ValueLayout, initial_critic, judged
from dora.trainer.packing import pack
from dora.trainer.policy import Policy
from dora.trainer.settings import Sample
from dora.trainer.trainer import Trainer

CRITIC = CriticSettings(lr=1e-2, num_steps=50, lr_decay="constant", max_grad_norm=1e9)
SHORT, LONG = Sample([1], [2], [-1.0], 0.0), Sample([1, 3], [4, 5, 6], [-1.0] * 3, 0.0)


def make(settings: CriticSettings = CRITIC) -> Critic:
    return Critic(TINY, initial_critic(TINY, initial()), settings)


def rewards_of(batch: list[Sample]) -> list[float]:
    """What can be foretold: whether an answer begins with a small token."""
    return [float(s.token_ids[0] < 5) for s in batch]


def moments(critic: Critic) -> dict[str, torch.Tensor]:
    """Adam's first moment after one update, by name: a tenth of the gradient."""
    found: torch.Tensor = critic.state_dict()["state"][0]["exp_avg"]
    return ValueLayout(TINY).views(found)


def test_a_critic_has_the_decoder_of_the_policy_and_a_head_of_one_value() -> None:
    layout = ValueLayout(TINY)
    assert layout.shapes.keys() - Layout(TINY).shapes.keys() == {"score.weight", "score.bias"}
    views, origin = layout.views(initial_critic(TINY, initial())), Layout(TINY).views(initial())
    name = "model.layers.1.mlp.down_proj.weight"
    assert torch.equal(views[name], origin[name])
    assert views["score.weight"].shape == (1, TINY.hidden_size)
    assert not views["score.weight"].any()
    untied = replace(TINY, tie_word_embeddings=False)
    assert ValueLayout(untied).shapes.keys() == layout.shapes.keys()


def test_before_it_has_learnt_a_critic_leaves_rewards_to_be_compared_with_each_other() -> None:
    """Rewards 1, 0, 0, 0 of four tokens: mean 1/4, variance (9/16 + 3/16) / 3 = 1/4."""
    short, long = make().judge([SHORT, LONG], [1.0, 0.0])
    assert short.advantages == pytest.approx([1.5])
    assert long.advantages == pytest.approx([-0.5] * 3)
    assert (long.token_ids, long.logprobs) == (LONG.token_ids, LONG.logprobs)


def test_discount_and_lambda_reach_the_advantages() -> None:
    """With values 0 an advantage is reward * (gamma * lam)**(tokens still to come): 4, 2, 1."""
    made = make(replace(CRITIC, gamma=0.5, lam=0.5)).judge([LONG], [16.0])[0].advantages
    assert made == pytest.approx([(x - 7.0) / 63**0.5 for x in (1.0, 4.0, 16.0)])


def test_the_first_gradient_of_a_critic_is_that_of_the_squared_error() -> None:
    critic = make()
    critic.judge([SHORT, LONG], [1.0, 0.0])
    metrics = critic.learn(0)
    assert metrics["critic/vf_loss"] == pytest.approx(0.5 / 4)
    assert (metrics["critic/values/mean"], metrics["critic/returns/mean"]) == (0.0, 0.25)
    assert metrics["critic/vf_explained_var"] == pytest.approx(0.0, abs=1e-3)
    assert moments(critic)["score.bias"].item() == pytest.approx(0.1 * -0.25)
    assert not moments(critic)["model.norm.weight"].any()  # its head is 0 so far


@pytest.mark.parametrize(
    "settings", [CRITIC, replace(CRITIC, dtype="bfloat16"), replace(CRITIC, activation_checkpointing=True)]
)
def test_a_critic_learns_what_to_expect(settings: CriticSettings) -> None:
    critic, batch = make(settings), samples()
    found = []
    for step in range(15):
        critic.judge(batch, rewards_of(batch))
        found.append(critic.learn(step))
    assert found[-1]["critic/vf_loss"] < 0.2 * found[0]["critic/vf_loss"]
    assert found[-1]["critic/vf_explained_var"] > 0.5 > found[0]["critic/vf_explained_var"]


def test_micro_batches_of_a_critic_add_up_to_the_whole_batch() -> None:
    batch = samples()
    gradients = []
    for budget in (10_000, 30):
        critic = make(replace(CRITIC, micro_batch_tokens=budget))
        judged = critic.judge(batch, rewards_of(batch))
        critic.learn(0)
        gradients.append(moments(critic)["score.weight"])
        assert [len(s.advantages) for s in judged] == [len(s.token_ids) for s in batch]
    torch.testing.assert_close(*gradients, rtol=1e-5, atol=1e-7)


def test_a_value_learns_no_further_than_its_range() -> None:
    """Two epochs at a rate that moves values by more than the range."""
    settings = replace(CRITIC, lr=1.0, ppo_epochs=2, cliprange_value=1e-3)
    critic = make(settings)
    critic.judge([SHORT, LONG], [9.0, 9.0])
    assert critic.learn(0)["critic/vf_clipfrac"] == pytest.approx(0.5)


def test_a_critic_takes_as_many_updates_as_the_policy() -> None:
    batch = samples()
    total = sum(len(s.token_ids) for s in batch)
    critic = make(replace(CRITIC, batch_tokens=total // 3, ppo_epochs=2))
    critic.judge(batch, rewards_of(batch))
    critic.learn(0)
    assert critic.state_dict()["state"][0]["step"] == 6


def test_an_answer_without_tokens_is_not_judged() -> None:
    empty = Sample([1], [], [], 0.0)
    critic = make()
    told = critic.judge([empty, SHORT, LONG], [5.0, 1.0, 0.0])
    assert told[0].advantages == []
    assert told[1].advantages == pytest.approx([1.5])
    assert critic.judge([empty], [5.0])[0].advantages == []
    assert critic.learn(0)["critic/vf_loss"] == 0.0


def test_values_that_were_told_group_by_group_are_as_good_as_foretold_ones() -> None:
    """A station foretells each group by itself; trainer and critic both reckon from that."""
    batch, rewards = samples(), rewards_of(samples())
    apart, whole = make(), make()
    for critic in (apart, whole):  # so that values are not 0
        critic.judge(batch, rewards)
        critic.learn(0)
    told = [s for i in range(0, 12, 4) for s in apart.foretell(batch[i : i + 4])]
    advantages = [s.advantages for s in judged(told, rewards, gamma=1.0, lam=1.0).samples]
    assert [s.advantages for s in apart.judge(told, rewards)] == advantages
    for own, other in zip(advantages, whole.judge(batch, rewards), strict=True):
        assert own == pytest.approx(other.advantages, abs=1e-4)
    assert apart.learn(1)["critic/vf_loss"] == pytest.approx(whole.learn(1)["critic/vf_loss"], rel=1e-4)


def test_policy_and_critic_go_on_where_they_were() -> None:
    def trainer() -> Trainer:
        return Trainer(TINY, initial(), SETTINGS, critic=make())

    def step(one: Trainer) -> None:
        assert one.critic is not None
        one.step(one.critic.judge(samples(), rewards_of(samples())))

    whole, first, second = trainer(), trainer(), trainer()
    for one in (whole, whole, first):
        step(one)
    second.flat.copy_(first.flat)
    second.load_state_dict(first.state_dict())
    step(second)
    assert torch.equal(second.flat, whole.flat)
    assert second.critic is not None
    assert whole.critic is not None
    assert torch.equal(second.critic.flat, whole.critic.flat)


def test_a_step_that_fails_leaves_the_critic_as_it_was() -> None:
    critic = make()
    trainer = Trainer(TINY, initial(), SETTINGS, critic=critic)
    judged = critic.judge(samples(), rewards_of(samples()))
    with pytest.raises(RunError, match="grad_norm"):
        trainer.step([replace(s, advantage=float("nan")) for s in judged])
    assert torch.equal(critic.flat, make().flat)
    metrics = trainer.step(judged)
    assert {"critic/vf_loss", "critic/grad_norm", "critic/lr", "actor/pg_loss"} <= metrics.keys()
    assert not torch.equal(critic.flat, make().flat)


def test_a_batch_is_learnt_once() -> None:
    """A retry finds it again, the next step does not."""
    critic, batch = make(), samples()
    trainer = Trainer(TINY, initial(), SETTINGS, critic=critic)
    trainer.step(critic.judge(batch, rewards_of(batch)))
    policy, values = trainer.flat.clone(), critic.flat.clone()
    with pytest.raises(RunError, match="no batch was judged"):
        trainer.step(batch)
    assert torch.equal(trainer.flat, policy)
    assert torch.equal(critic.flat, values)
    trainer.step(critic.judge(batch, rewards_of(batch)))
    assert trainer.num_steps_done == 2


def answers(trainer: Trainer, source: torch.Generator) -> list[Sample]:
    """Eight answers of six tokens to each of two prompts, drawn from the policy as it is."""
    policy = Policy(TINY, Layout(TINY).views(trainer.flat))
    prompts = [[1]] * 8 + [[2, 3]] * 8
    drawn: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for _ in range(6):
        begun = [[*prompt, *tokens] for prompt, tokens in zip(prompts, drawn, strict=True)]
        batch = pack(begun, [[0]] * 16, policy.device)
        states = policy.hidden(batch).index_select(0, batch.rows)
        distribution = torch.nn.functional.linear(states, head(policy.weights)).log_softmax(-1)
        for i, token in enumerate(torch.multinomial(distribution.exp(), 1, generator=source)[:, 0].tolist()):
            drawn[i].append(token)
            logprobs[i].append(float(distribution[i, token]))
    return [Sample(*parts, 0.0) for parts in zip(prompts, drawn, logprobs, strict=True)]


@torch.no_grad()
def rewarded(trainer: Trainer, source: torch.Generator) -> tuple[list[Sample], list[float]]:
    """Answers, and how many of their tokens are sevens."""
    batch = answers(trainer, source)
    return batch, [float(list(s.token_ids).count(7)) for s in batch]


def test_a_policy_learns_from_what_its_critic_says() -> None:
    source = torch.Generator().manual_seed(0)
    critic = make(replace(CRITIC, lam=0.9, ppo_epochs=2))
    trainer = Trainer(TINY, initial(), replace(SETTINGS, num_steps=20, max_grad_norm=1.0), critic=critic)
    means = []
    for _ in range(20):
        batch, rewards = rewarded(trainer, source)
        metrics = trainer.step(critic.judge(batch, rewards))
        means.append(sum(rewards) / len(rewards))
    assert means[0] < 1.0
    assert sum(means[-5:]) / 5 > 4.5
    assert metrics["critic/values/mean"] > 2.0  # it has seen them coming
