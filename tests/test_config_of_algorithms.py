"""An algorithm is chosen by names; what is unsafe or would do nothing is refused before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.test_config import file, refusal

from dora.settings import read

__all__ = ["file"]

PAIRS = "algorithm.policy_loss=online_dpo", "algorithm.loss_agg_mode=seq-mean-token-sum"


@pytest.mark.parametrize(
    "loss", ["ppo_clip", "dual_clip", "gspo", "cispo", "triplet_clip loss_agg_mode=seq-mean-token-sum-norm"]
)
def test_a_clipped_loss_may_train_stale_samples(file: Path, loss: str) -> None:
    config = read(file, [f"algorithm.{change}" for change in f"policy_loss={loss}".split()])
    assert config.algorithm.policy_loss == loss.split()[0]


def test_an_unclipped_loss_of_stale_samples_is_refused_with_reason_and_remedy(file: Path) -> None:
    loss = "algorithm.policy_loss=reinforce"
    message = refusal(file, loss)
    assert "policy_loss = reinforce at max_staleness = 2" in message
    assert "choose a clipped loss" in message
    read(file, [loss, "orchestrator.update_policy=sync"])
    read(file, [loss, "correction.token=icepop"])
    read(file, [loss, "correction.proximal=recomputed", "correction.token=tis"])


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["algorithm.policy_loss=triplet_clip"], "set loss_agg_mode = seq-mean-token-sum-norm"),
        (["correction.token=tis"], "correction.token = tis with correction.proximal = behaviour"),
        (["correction.proximal=recomputed"], "choose token = tis or icepop"),
        (["correction.mis_low=1.2"], "correction.mis_low = 1.2: input should be less than or equal to 1"),
        (["algorithm.clip_ratio_c=1.0"], "algorithm.clip_ratio_c = 1.0: input should be greater than 1"),
        (["algorithm.adv_estimator=gae"], "algorithm.adv_estimator = 'gae': input should be 'grpo'"),
        (["algorithm.policy_loss=online_dpo"], "set loss_agg_mode = seq-mean-token-sum or choose another"),
        ([*PAIRS, "correction.token=icepop"], "a correction would do nothing"),
        ([*PAIRS, "trainer.micro_batch_tokens=639"], "it must hold a pair of answers, 2 * 320 = 640 tokens"),
        (["algorithm.overlong_buffer_tokens=65"], "is the end of sampling.max_response_length = 64"),
    ],
)
def test_what_cannot_be_trained_is_refused(file: Path, overrides: list[str], why: str) -> None:
    assert why in refusal(file, *overrides)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["algorithm.clip_ratio_c=4.0"], "without policy_loss = dual_clip or triplet_clip"),
        (
            ["algorithm.policy_loss=reinforce", "correction.token=icepop", "algorithm.clip_ratio_low=0.1"],
            "with policy_loss = reinforce: it clips nothing",
        ),
        (["algorithm.dpo_beta=0.2"], "without policy_loss = online_dpo"),
        ([*PAIRS, "algorithm.kl_loss_coef=0.2"], "with policy_loss = online_dpo: it compares two answers"),
        (["algorithm.kl_loss_type=k2"], "with kl_loss_coef = 0"),
        (["algorithm.overlong_penalty=0.5"], "with overlong_buffer_tokens = 0"),
        (["correction.tis_cap=3.0"], "without correction.token = tis"),
        (["correction.icepop_low=0.4"], "without correction.token = icepop"),
        (["correction.mis_high=1.2"], "without correction.sequence = mis"),
        (["orchestrator.max_staleness=0", "correction.age_decay=0.9"], "with max_staleness = 0"),
    ],
)
def test_a_setting_of_the_objective_without_effect_is_refused(
    file: Path, overrides: list[str], why: str
) -> None:
    assert f"{overrides[-1].split('=')[0]} has no effect {why}" in refusal(file, *overrides)


def test_pairs_may_be_as_stale_as_they_are(file: Path) -> None:
    assert read(file, [*PAIRS, "orchestrator.max_staleness=9"]).streams


def test_a_group_of_one_can_be_compared_with_the_batch(file: Path) -> None:
    alone = "sampling.group_size=1", "algorithm.adv_estimator=reinforce_plus_plus"
    assert read(file, alone).sampling.group_size == 1
    assert "every group would be left out" in refusal(file, *alone, "algorithm.filter_groups=true")
    assert "= 0 in a group of one" in refusal(file, "sampling.group_size=1", "algorithm.adv_estimator=rloo")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algorithm.adv_estimator=reinforce_plus_plus", "its advantages need the whole batch"),
        ("trainer.deterministic=true", "the first group of the order may finish last"),
        ("trainer.elastic=true", "it rests until the batch is complete"),
        ("orchestrator.placement=colocated", "it rests until the batch is complete"),
    ],
)
def test_gradients_are_streamed_unless_something_makes_them_wait(file: Path, override: str, why: str) -> None:
    assert read(file).streams
    assert not read(file, ["trainer.streaming=false"]).streams
    waiting = read(file, [override])
    assert not waiting.streams
    assert why in str(waiting.why_no_streaming)
    message = refusal(file, override, "trainer.streaming=true")
    assert message.startswith("trainer.streaming = true with ")
    assert why in message
