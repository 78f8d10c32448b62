import random
import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from dora.errors import RunError
from dora.model.config import ModelConfig
from dora.model.weights import Layout, initial_weights
from dora.trainer.loss import LossAggMode
from dora.trainer.optimizer import learning_rate
from dora.trainer.packing import Tokens, pack
from dora.trainer.policy import Policy
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

TINY = ModelConfig(
    vocab_size=11,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    max_position_embeddings=64,
)
SETTINGS = TrainerSettings(lr=1e-2, num_steps=4, warmup_steps=0, max_grad_norm=1e9)


def initial() -> torch.Tensor:
    return initial_weights(TINY, seed=0, std=0.3)


def samples(num: int = 12) -> list[Sample]:
    """Responses of 1 to 20 tokens with the initial policy's own log-probs; every third has no advantage."""
    source = random.Random(0)
    policy = Policy(TINY, Layout(TINY).views(initial()))
    drawn = []
    for i in range(num):
        prompt = [source.randrange(11) for _ in range(source.randint(1, 4))]
        response = [source.randrange(11) for _ in range(source.randint(1, 20))]
        logprobs, _ = policy.logprobs(pack([prompt], [response], torch.device("cpu")))
        advantage = 0.0 if i % 3 == 0 else source.choice([-1.0, 0.5, 2.0])
        drawn.append(Sample(prompt, response, logprobs.tolist(), advantage))
    return drawn


def gradient(batch: list[Sample], settings: TrainerSettings) -> torch.Tensor:
    """The whole gradient of one step, read off Adam's first moment after it; in double precision."""
    trainer = Trainer(TINY, initial().double(), settings)
    trainer.step(batch)
    moment: torch.Tensor = trainer.state_dict()["optimizer"]["state"][0]["exp_avg"]
    return moment / (1.0 - settings.betas[0])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_micro_batches_accumulate_to_the_whole_batch_gradient(mode: LossAggMode) -> None:
    whole = replace(SETTINGS, loss_agg_mode=mode, micro_batch_tokens=10_000)
    expected = gradient(samples(), whole)
    got = gradient(samples(), replace(whole, micro_batch_tokens=30))
    assert float((got - expected).norm() / expected.norm()) < 1e-12


def test_the_gradient_of_a_batch_is_the_textbook_policy_gradient() -> None:
    batch = samples()
    flat = initial().requires_grad_()
    policy = Policy(TINY, Layout(TINY).views(flat))
    total = torch.zeros(())
    for sample in batch:
        logprobs, _ = policy.logprobs(pack([sample.prompt_ids], [sample.token_ids], flat.device))
        total = total - (torch.tensor(sample.advantages) * logprobs).sum()
    torch.autograd.backward(total / sum(len(s.token_ids) for s in batch))
    assert flat.grad is not None
    torch.testing.assert_close(gradient(batch, SETTINGS).float(), flat.grad, rtol=1e-4, atol=1e-6)


def with_words_between(sample: Sample) -> Sample:
    """The same answer with three tokens in its middle that the policy has read."""
    at, words = len(sample.token_ids) // 2, [1, 2, 3]
    token_ids = [*sample.token_ids[:at], *words, *sample.token_ids[at:]]
    mask = [1] * at + [0] * len(words) + [1] * (len(sample.token_ids) - at)
    return replace(sample, token_ids=token_ids, loss_mask=mask)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_words_between_turns_are_read_and_neither_learnt_nor_counted(mode: LossAggMode) -> None:
    batch = [with_words_between(sample) for sample in samples()]
    flat = initial().requires_grad_()
    policy, total = Policy(TINY, Layout(TINY).views(flat)), torch.zeros(())
    for sample in batch:
        mask = torch.tensor(sample.loss_mask) > 0
        logprobs, _ = policy.logprobs(pack([sample.prompt_ids], [sample.token_ids], flat.device))
        old, num_drawn = torch.tensor(sample.logprobs), int(mask.sum())
        ratio = (logprobs[mask] - old).exp().clamp(0.8, 1.2)
        losses = torch.maximum(
            -sample.advantages[0] * (logprobs[mask] - old).exp(), -sample.advantages[0] * ratio
        )
        share = {"token-mean": 1 / sum(s.num_drawn for s in batch), "seq-mean-token-sum": 1 / len(batch)}
        total = total + losses.sum() * share.get(mode, 1 / len(batch) / num_drawn)
    torch.autograd.backward(total)
    settings = replace(SETTINGS, loss_agg_mode=mode, clip_ratio_low=0.2, clip_ratio_high=0.2)
    assert flat.grad is not None
    torch.testing.assert_close(gradient(batch, settings).float(), flat.grad, rtol=1e-4, atol=1e-6)
    metrics = Trainer(TINY, initial(), settings).step(batch)
    assert metrics["actor/num_tokens"] == sum(len(s.token_ids) for s in samples() if s.has_advantage)


def test_a_sample_of_advantage_zero_counts_only_in_the_denominators() -> None:
    batch = samples()
    kept = [s for s in batch if s.has_advantage]
    share = sum(len(s.token_ids) for s in kept) / sum(len(s.token_ids) for s in batch)
    torch.testing.assert_close(gradient(batch, SETTINGS), gradient(kept, SETTINGS) * share)
    metrics = Trainer(TINY, initial(), SETTINGS).step(batch)
    assert metrics["actor/num_tokens"] == sum(len(s.token_ids) for s in kept)


def test_a_first_batch_without_any_advantage_leaves_the_weights_alone() -> None:
    flat = initial()
    metrics = Trainer(TINY, flat, SETTINGS).step([replace(s, advantage=0.0) for s in samples()])
    assert metrics["actor/grad_norm"] == 0.0
    assert "actor/entropy" not in metrics
    assert torch.equal(flat, initial())


def test_a_step_changes_the_flat_buffer_it_was_given() -> None:
    flat = initial()
    trainer = Trainer(TINY, flat, SETTINGS)
    trainer.step(samples())
    assert trainer.flat is flat
    assert not torch.equal(flat, initial())


def test_on_policy_log_probs_agree_with_the_behaviour() -> None:
    metrics = Trainer(TINY, initial(), SETTINGS).step(samples())
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5
    assert metrics["actor/ppo_kl"] == pytest.approx(0.0, abs=1e-5)
    assert metrics["actor/pg_clipfrac"] == 0.0


def test_stale_samples_are_compared_under_the_weights_that_drew_them() -> None:
    versions = {-1: initial()}
    trainer = Trainer(TINY, initial() * 1.5, SETTINGS, sources=versions.get)
    metrics = trainer.step([replace(s, staleness=1) for s in samples()])
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5
    assert abs(metrics["mismatch/kl"]) < 1e-6
    assert abs(metrics["actor/ppo_kl"]) > 1e-3


def test_stale_samples_of_versions_that_are_gone_do_not_count_as_mismatch() -> None:
    metrics = Trainer(TINY, initial(), SETTINGS).step([replace(s, staleness=1) for s in samples()])
    assert "mismatch/logprob_abs_diff_max" not in metrics


def test_stale_samples_of_a_version_are_compared_together() -> None:
    old, found, scored = {-1: initial(), -2: initial()}, list[int](), list[int]()
    batch = [replace(s, staleness=1 + i // 66) for i, s in enumerate(samples(132))]

    def source(version: int) -> torch.Tensor:
        found.append(version)
        return old[version]

    def score(flat: torch.Tensor, prompts: Sequence[Tokens], answers: Sequence[Tokens]) -> torch.Tensor:
        if any(flat is one for one in old.values()):
            scored.append(len(prompts))
        return torch.zeros(sum(map(len, answers)))

    trainer = Trainer(TINY, initial(), SETTINGS, score=score, sources=source)
    metrics = trainer.step(batch)
    assert len(found) == len({*found}) == len(scored)
    assert sum(scored) >= 4
    assert 0 < metrics["mismatch/num_tokens"] <= metrics["actor/num_tokens"] / 16


def test_a_comparison_that_fails_leaves_the_step_alone_and_is_told_once() -> None:
    def source(version: int) -> torch.Tensor:
        raise torch.OutOfMemoryError("no room")

    batch = [replace(s, staleness=1) for s in samples()]
    trainer, other = (Trainer(TINY, initial(), SETTINGS, sources=of) for of in (source, lambda _: None))
    with pytest.warns(RuntimeWarning, match=r"missing in mismatch/\*: OutOfMemoryError: no room"):
        assert trainer.step(batch) == other.step(batch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.step(batch)
    other.step(batch)
    assert torch.equal(trainer.flat, other.flat)


def test_the_mismatch_of_a_batch_without_gradient_is_known_too() -> None:
    trainer = Trainer(TINY, initial(), SETTINGS, sources=lambda version: initial())
    metrics = trainer.step([replace(s, advantage=0.0) for s in samples()])
    assert metrics["mismatch/num_tokens"] >= 1
    assert metrics["mismatch/logprob_abs_diff_max"] < 1e-5


def test_temperature_divides_the_logits() -> None:
    views = Layout(TINY).views(initial())
    batch = pack([[1, 2]], [[3]], torch.device("cpu"))
    warm, _ = Policy(TINY, views, temperature=2.0).logprobs(batch)
    views = dict(views) | {"lm_head.weight": views["model.embed_tokens.weight"] / 2.0}
    halved, _ = Policy(TINY, views).logprobs(batch)
    torch.testing.assert_close(warm, halved)


def test_the_kl_term_pulls_back_to_the_reference() -> None:
    flat = initial()
    settings = replace(SETTINGS, lr=1e-3, kl_loss_coef=1.0)
    noise = 0.05 * initial_weights(TINY, seed=1, std=1.0)
    trainer = Trainer(TINY, flat + noise, settings, reference=flat)
    batch = [replace(s, advantage=0.0) for s in samples()]
    before = trainer.step(batch)["actor/kl_loss"]
    for _ in range(3):
        after = trainer.step(batch)["actor/kl_loss"]
    assert 0.0 < after < before


def test_a_gradient_that_is_not_finite_stops_the_run_with_the_weights_intact() -> None:
    flat = initial()
    broken = [replace(s, advantage=float("nan")) for s in samples()]
    with pytest.raises(RunError, match="grad_norm"):
        Trainer(TINY, flat, SETTINGS).step(broken)
    assert torch.equal(flat, initial())


def test_the_rate_warms_up_and_then_decays_to_zero() -> None:
    rates = [learning_rate(1.0, step, warmup_steps=3, num_steps=7, decay="linear") for step in range(8)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 1.0, 0.75, 0.5, 0.25, 0.0])
    assert learning_rate(1.0, 6, warmup_steps=3, num_steps=7, decay="constant") == 1.0
