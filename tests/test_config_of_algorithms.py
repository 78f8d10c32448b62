"""An algorithm is chosen by names; what is unsafe or would do nothing is refused before anything starts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from tests.test_config import file, refusal

from dora.settings import read

__all__ = ["file"]

GAE = "algorithm.adv_estimator=gae"
RECOMPUTED = "correction.proximal=recomputed", "correction.token=tis"
INTERPOLATED = "correction.proximal=interpolated", "correction.token=tis"
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
        (["algorithm.adv_estimator=ppo"], "algorithm.adv_estimator = 'ppo': input should be 'grpo'"),
        ([GAE, "algorithm.filter_groups=true"], "being compared with a critic's values"),
        ([GAE, "critic.path=nowhere"], "critic.path = 'nowhere': "),
        (["trainer.lora_rank=4", "trainer.num_ranks=2"], "adapters are not shared; remove one of the two"),
        (["trainer.lora_rank=4", "trainer.lora_targets=[]"], "trainer.lora_targets = []: list should have"),
        (["trainer.lora_rank=4", "trainer.lora_targets=['qkv']"], "input should be 'q_proj', 'k_proj'"),
        (
            [*RECOMPUTED, "trainer.stations=['proximal']", "engine.dtype=bfloat16"],
            "trainer.stations names proximal, with engine.dtype = bfloat16 and trainer.dtype = float32",
        ),
        (["trainer.stations=['actor']"], "input should be 'reference', 'proximal' or 'critic'"),
        (["trainer.batch_tokens=63"], "trainer.batch_tokens = 63: an update has one answer of up to"),
        (["trainer.batch_tokens=2049"], "32 of a batch, 2048 tokens, at most; choose a number between"),
        (["trainer.batch_tokens=99", "algorithm.loss_agg_mode=seq-mean-token-sum"], "what token-mean means"),
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
        ([*RECOMPUTED, "algorithm.clip_ratio_low=0.1"], "with correction.proximal = recomputed: in the only"),
        ([*RECOMPUTED, "algorithm.clip_ratio_high=0.3"], "with correction.proximal = recomputed: in the"),
        (
            [*RECOMPUTED, "algorithm.policy_loss=dual_clip", "algorithm.clip_ratio_c=4.0"],
            "with correction.proximal = recomputed: in the only update of a step the ratio to it is 1",
        ),
        (
            [*INTERPOLATED, "orchestrator.max_staleness=0", "algorithm.clip_ratio_low=0.1"],
            "with correction.proximal = interpolated and max_staleness = 0: the ratio to it is 1",
        ),
        (["algorithm.dpo_beta=0.2"], "without policy_loss = online_dpo"),
        ([*PAIRS, "algorithm.kl_loss_coef=0.2"], "with policy_loss = online_dpo: it compares two answers"),
        (["algorithm.kl_loss_type=k2"], "with kl_loss_coef = 0"),
        (["algorithm.overlong_penalty=0.5"], "with overlong_buffer_tokens = 0"),
        (["correction.tis_cap=3.0"], "without correction.token = tis"),
        (["correction.icepop_low=0.4"], "without correction.token = icepop"),
        (["correction.mis_high=1.2"], "without correction.sequence = mis"),
        (["orchestrator.max_staleness=0", "correction.age_decay=0.9"], "with max_staleness = 0"),
        (["algorithm.lam=0.9"], "without adv_estimator = gae"),
        (["critic.lr=1e-4"], "without algorithm.adv_estimator = gae"),
        (["trainer.lora_alpha=8.0"], "without trainer.lora_rank"),
        ([GAE, "critic.cliprange_value=0.1"], "with critic.ppo_epochs = 1: in the only update of a step"),
        ([*PAIRS, GAE], "with policy_loss = online_dpo: it compares two answers"),
        (["trainer.stations=['reference']"], "for reference, with kl_loss_coef = 0"),
        (["trainer.stations=['proximal']"], "for proximal, with correction.proximal = behaviour"),
        (["trainer.stations=['critic']"], "for critic, with algorithm.adv_estimator = grpo"),
        (["trainer.station_device=cuda:1"], "without trainer.stations"),
    ],
)
def test_a_setting_of_the_objective_without_effect_is_refused(
    file: Path, overrides: list[str], why: str
) -> None:
    assert f"{overrides[-1].split('=')[0]} has no effect {why}" in refusal(file, *overrides)


def test_a_clip_range_around_the_proximal_policy_is_kept_where_it_may_act(file: Path) -> None:
    wider = "algorithm.clip_ratio_high=0.3"
    several = read(file, [*RECOMPUTED, wider, "trainer.batch_tokens=500"])
    assert several.algorithm.clip_ratio_high == read(file, [*INTERPOLATED, wider]).algorithm.clip_ratio_high
    assert "clip_ratio_high = 0.3" in several.to_toml()
    assert "clip_ratio" not in read(file, RECOMPUTED).to_toml()


def test_pairs_may_be_as_stale_as_they_are(file: Path) -> None:
    assert read(file, [*PAIRS, "orchestrator.max_staleness=9"]).streams


def test_a_critic_needs_no_group_and_its_settings_are_kept(file: Path) -> None:
    changes = [GAE, "sampling.group_size=1", "algorithm.lam=0.95", "critic.ppo_epochs=2", "critic.lr=1e-3"]
    config = read(file, [*changes, "critic.cliprange_value=0.2"])
    assert (config.algorithm.lam, config.critic.lr, config.critic.cliprange_value) == (0.95, 1e-3, 0.2)
    assert "[critic]" in config.to_toml()
    assert "[critic]" not in read(file).to_toml()
    by_itself = read(file, [GAE, "critic.cliprange_value=0.2", "trainer.batch_tokens=500"])
    assert by_itself.critic.cliprange_value == 0.2  # a step may have several updates


def test_what_a_trainer_needs_may_be_computed_beside_it(file: Path) -> None:
    reference = "algorithm.kl_loss_coef=0.1", "trainer.stations=['reference']"
    assert read(file, reference).streams
    assert read(file, [*PAIRS, reference[1]]).trainer.stations == ["reference"]
    stations = "trainer.stations=['proximal', 'critic']"
    both = read(file, [*RECOMPUTED, GAE, stations, "trainer.station_device=cpu"])
    assert 'stations = ["proximal", "critic"]' in both.to_toml()
    assert "stations" in read(file).to_toml()


def test_a_group_of_one_can_be_compared_with_the_batch(file: Path) -> None:
    alone = "sampling.group_size=1", "algorithm.adv_estimator=reinforce_plus_plus"
    assert read(file, alone).sampling.group_size == 1
    assert "every group would be left out" in refusal(file, *alone, "algorithm.filter_groups=true")
    assert "= 0 in a group of one" in refusal(file, "sampling.group_size=1", "algorithm.adv_estimator=rloo")


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algorithm.adv_estimator=reinforce_plus_plus", "its advantages need the whole batch"),
        (GAE, "its advantages need the whole batch"),
        ("trainer.batch_tokens=500", "how a batch is divided depends on all its lengths"),
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


def combinations() -> list[str]:
    """What docs/algorithms.md offers as TOML."""
    page = Path(__file__).parent.parent / "docs" / "algorithms.md"
    return re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("tables", combinations())
def test_the_combinations_that_are_documented_can_be_had(file: Path, tables: str) -> None:
    given = tomllib.loads(tables)
    overrides = [f"{name}.{key}={value}" for name, keys in given.items() for key, value in keys.items()]
    config = read(file, [text.replace("=True", "=true") for text in overrides])
    for name, keys in given.items():
        assert {key: getattr(getattr(config, name), key) for key in keys} == keys


def test_dapo_is_one_of_them() -> None:
    (dapo,) = (tomllib.loads(found)["algorithm"] for found in combinations() if "filter_groups" in found)
    assert dapo["filter_groups"]
    assert dapo["overlong_buffer_tokens"] > 0
    assert dapo["clip_ratio_high"] > dapo["clip_ratio_low"]
    assert (dapo["policy_loss"], dapo["loss_agg_mode"]) == ("ppo_clip", "token-mean")
