"""Combinations of losses, corrections and estimators that are unsafe or without effect are refused."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from tests.config.minimal import error_of

from dora.config.load import read_config
from dora.config.toml import to_toml

GAE = "algorithm.adv_estimator=gae"
RECOMPUTED = "correction.proximal=recomputed", "correction.token=tis"
INTERPOLATED = "correction.proximal=interpolated", "correction.token=tis"
PAIRS = "algorithm.policy_loss=online_dpo", "algorithm.loss_agg_mode=seq-mean-token-sum"


@pytest.mark.parametrize(
    "loss", ["ppo_clip", "dual_clip", "gspo", "cispo", "triplet_clip loss_agg_mode=seq-mean-token-sum-norm"]
)
def test_a_clipped_loss_may_train_stale_samples(file: Path, loss: str) -> None:
    config = read_config(file, [f"algorithm.{change}" for change in f"policy_loss={loss}".split()])
    assert config.algorithm.policy_loss == loss.split()[0]


def test_functions_of_ones_own_are_a_loss_and_an_estimator(file: Path) -> None:
    """Their files are beside the configuration's. All settings of losses reach the function."""
    (file.parent / "own.py").touch()
    functions = "policy_loss = 'own.py:loss'\nadv_estimator = 'own:advantages'"
    settings = "clip_ratio_c = 2.0\ndpo_beta = 0.2\npolicy_loss_options = {decay = 0.9}"
    file.write_text(f"{file.read_text()}\n[algorithm]\n{functions}\n{settings}\n")
    algorithm = read_config(file, ["sampling.group_size=1"]).algorithm
    assert algorithm.policy_loss == f"{file.parent.resolve()}/own.py:loss"
    assert algorithm.adv_estimator == "own:advantages"
    assert algorithm.policy_loss_options == {"decay": 0.9}
    assert "own.py does not exist" in error_of(file, "algorithm.policy_loss=nowhere/own.py:loss")
    assert 'or a function, "file.py:function"' in error_of(file, "algorithm.policy_loss=pp_clip")


def test_an_unclipped_loss_on_stale_samples_is_refused_with_reason_and_remedy(file: Path) -> None:
    loss = "algorithm.policy_loss=reinforce"
    message = error_of(file, loss)
    assert "policy_loss = reinforce at max_staleness = 2" in message
    assert "choose a clipped loss" in message
    read_config(file, [loss, "orchestrator.update_policy=sync"])
    read_config(file, [loss, "correction.token=icepop"])
    read_config(file, [loss, "correction.proximal=recomputed", "correction.token=tis"])


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["algorithm.policy_loss=triplet_clip"], "set loss_agg_mode = seq-mean-token-sum-norm"),
        (["correction.token=tis"], "correction.token = tis with correction.proximal = behavior"),
        (["correction.proximal=recomputed"], "choose token = tis or icepop"),
        (["correction.mis_low=1.2"], "correction.mis_low = 1.2: input should be less than or equal to 1"),
        (["algorithm.policy_loss_options={decay = 0.9}"], "without a policy_loss of your own"),
        (["algorithm.clip_ratio_c=1.0"], "algorithm.clip_ratio_c = 1.0: input should be greater than 1"),
        (["algorithm.adv_estimator=ppo"], "algorithm.adv_estimator = 'ppo': input should be 'grpo'"),
        (["algorithm.adv_estimator=gigpo"], "gigpo without turns: a response of one turn has no steps"),
        ([GAE, "algorithm.filter_groups=true"], "gae compares rewards with values of the critic"),
        ([GAE, "critic.path=nowhere"], "critic.path = 'nowhere': "),
        (
            ["trainer.lora_rank=4", "trainer.offload_optimizer=true"],
            "trainer.offload_optimizer has no effect with trainer.lora_rank",
        ),
        (["trainer.lora_rank=4", "trainer.lora_targets=[]"], "trainer.lora_targets = []: list should have"),
        (
            [*RECOMPUTED, "trainer.aux_workers=['proximal']", "engine.dtype=bfloat16"],
            "trainer.aux_workers = proximal with engine.dtype = bfloat16 and trainer.dtype = float32",
        ),
        (["trainer.min_lr_ratio=1.1"], "trainer.min_lr_ratio = 1.1: input should be less than or equal to 1"),
        (["trainer.betas=[0.9, 1.0]"], "input should be less than 1"),
        (["trainer.betas=[0.9]"], "trainer.betas = [0.9]: list should have at least 2 items"),
        (["trainer.betas=[0.9, 0.99, 0.999]"], "list should have at most 2 items"),
        (["trainer.aux_workers=['actor']"], "input should be 'reference', 'proximal' or 'critic'"),
        (
            ["trainer.mini_batch_tokens=63"],
            "trainer.mini_batch_tokens = 63: an update has at least one response, up to",
        ),
        (
            ["trainer.mini_batch_tokens=2049"],
            "at most the 32 of a batch, 2048 tokens; choose a number between",
        ),
        (
            ["trainer.mini_batch_tokens=99", "algorithm.loss_agg_mode=seq-mean-token-sum"],
            "need loss_agg_mode = token-mean",
        ),
        (["algorithm.policy_loss=online_dpo"], "set loss_agg_mode = seq-mean-token-sum or choose another"),
        ([*PAIRS, "correction.token=icepop"], "a correction would do nothing"),
        (
            [*PAIRS, "algorithm.mask_truncated_responses=true"],
            "without one of its responses a pair has no loss",
        ),
        (
            [*PAIRS, "trainer.micro_batch_tokens=639"],
            "a micro-batch must fit a pair of responses, 2 * 320 = 640 tokens",
        ),
        (["algorithm.overlong_buffer_tokens=65"], "is the last part of sampling.max_response_length = 64"),
    ],
)
def test_objectives_that_conflict_are_refused(file: Path, overrides: list[str], why: str) -> None:
    assert why in error_of(file, *overrides)


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["eval.num_prompts=0"], "without held-out prompts: no version is evaluated; set eval.path"),
        ([], "with eval.every = 0 and run.steps = 20: no version is evaluated during training; set"),
        (["eval.every=20"], "with eval.every = 20 and run.steps = 20: no version is evaluated during"),
        (["eval.every=5", "trainer.save_freq=4"], "= 4: of the evaluated versions only the last one has a"),
        (["eval.every=5", "trainer.save_freq=0"], "set trainer.save_freq = 5, or to a divisor of it"),
    ],
)
def test_the_best_checkpoint_needs_an_evaluated_version_that_has_one(
    file: Path, overrides: list[str], why: str
) -> None:
    best = ["trainer.keep_best=true", "eval.path=gcd", "run.steps=20"]
    assert why in error_of(file, *best, *overrides)
    read_config(file, [*best, "eval.every=5", "trainer.save_freq=2"])  # version 10


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
        ([*PAIRS, "algorithm.kl_loss_coef=0.2"], "with policy_loss = online_dpo: it compares two responses"),
        (["algorithm.kl_loss_type=k2"], "with kl_loss_coef = 0"),
        (["algorithm.overlong_penalty=0.5"], "with overlong_buffer_tokens = 0"),
        (["correction.tis_cap=3.0"], "without correction.token = tis"),
        (["correction.icepop_low=0.4"], "without correction.token = icepop"),
        (["correction.mis_high=1.2"], "without correction.sequence = mis"),
        (["orchestrator.max_staleness=0", "correction.staleness_decay=0.9"], "with max_staleness = 0"),
        (["algorithm.lam=0.9"], "without adv_estimator = gae"),
        (["algorithm.gamma=0.9"], "without adv_estimator = gae or gigpo"),
        ([GAE, "algorithm.step_advantage_w=0.5"], "without adv_estimator = gigpo"),
        (["critic.lr=1e-4"], "without algorithm.adv_estimator = gae"),
        (["trainer.lr_decay=constant", "trainer.min_lr_ratio=0.1"], "with trainer.lr_decay = constant"),
        (["trainer.lora_alpha=8.0"], "without trainer.lora_rank"),
        ([GAE, "critic.cliprange_value=0.1"], "with critic.ppo_epochs = 1: in the only update of a step"),
        ([*PAIRS, GAE], "with policy_loss = online_dpo: it compares two responses"),
        (["trainer.aux_workers=['reference']"], "for reference, with kl_loss_coef = 0"),
        (["trainer.aux_workers=['proximal']"], "for proximal, with correction.proximal = behavior"),
        (["trainer.aux_workers=['critic']"], "for critic, with algorithm.adv_estimator = grpo"),
        (["trainer.aux_device=cuda:1"], "without trainer.aux_workers"),
    ],
)
def test_an_objective_key_without_effect_is_refused(file: Path, overrides: list[str], why: str) -> None:
    assert f"{overrides[-1].split('=')[0]} has no effect {why}" in error_of(file, *overrides)


def test_a_clip_range_around_the_proximal_policy_is_kept_where_it_has_an_effect(file: Path) -> None:
    wider = "algorithm.clip_ratio_high=0.3"
    several = read_config(file, [*RECOMPUTED, wider, "trainer.mini_batch_tokens=500"])
    assert (
        several.algorithm.clip_ratio_high
        == read_config(file, [*INTERPOLATED, wider]).algorithm.clip_ratio_high
    )
    assert "clip_ratio_high = 0.3" in to_toml(several)
    assert "clip_ratio" not in to_toml(read_config(file, RECOMPUTED))


def test_pairs_may_have_any_staleness(file: Path) -> None:
    assert read_config(file, [*PAIRS, "orchestrator.max_staleness=9"]).streams_gradients


def test_a_critic_needs_no_group_and_keeps_its_settings(file: Path) -> None:
    changes = [GAE, "sampling.group_size=1", "algorithm.lam=0.95", "critic.ppo_epochs=2", "critic.lr=1e-3"]
    config = read_config(file, [*changes, "critic.cliprange_value=0.2"])
    assert (config.algorithm.lam, config.critic.lr, config.critic.cliprange_value) == (0.95, 1e-3, 0.2)
    assert "[critic]" in to_toml(config)
    assert "[critic]" not in to_toml(read_config(file))
    by_itself = read_config(file, [GAE, "critic.cliprange_value=0.2", "trainer.mini_batch_tokens=500"])
    assert by_itself.critic.cliprange_value == 0.2  # a step may have several updates


def test_auxiliary_workers_compute_what_the_objective_needs(file: Path) -> None:
    reference = "algorithm.kl_loss_coef=0.1", "trainer.aux_workers=['reference']"
    assert read_config(file, reference).streams_gradients
    assert read_config(file, [*PAIRS, reference[1]]).trainer.aux_workers == ["reference"]
    workers = "trainer.aux_workers=['proximal', 'critic']"
    both = read_config(file, [*RECOMPUTED, GAE, workers, "trainer.aux_device=cpu"])
    assert 'aux_workers = ["proximal", "critic"]' in to_toml(both)
    assert "aux_workers" in to_toml(read_config(file))


def test_a_group_of_one_works_with_an_estimator_over_the_batch(file: Path) -> None:
    alone = "sampling.group_size=1", "algorithm.adv_estimator=reinforce_plus_plus"
    assert read_config(file, alone).sampling.group_size == 1
    assert "every group would be filtered" in error_of(file, *alone, "algorithm.filter_groups=true")
    assert "every advantage from rewards would be reward - mean(rewards of the group) = 0" in error_of(
        file, "sampling.group_size=1", "algorithm.adv_estimator=rloo"
    )


@pytest.mark.parametrize(
    ("override", "why"),
    [
        ("algorithm.adv_estimator=reinforce_plus_plus", "its advantages need the whole batch"),
        (GAE, "its advantages need the whole batch"),
        ("trainer.mini_batch_tokens=500", "the split into updates needs all response lengths"),
        ("trainer.deterministic=true", "the first group in order may finish last"),
        ("trainer.elastic=true", "it runs only when the batch is complete"),
        ("orchestrator.placement=colocated", "it runs only when the batch is complete"),
    ],
)
def test_gradients_are_streamed_unless_a_setting_rules_it_out(file: Path, override: str, why: str) -> None:
    assert read_config(file).streams_gradients
    assert not read_config(file, ["trainer.streaming=false"]).streams_gradients
    waiting = read_config(file, [override])
    assert not waiting.streams_gradients
    assert why in str(waiting.why_not_streaming)
    message = error_of(file, override, "trainer.streaming=true")
    assert message.startswith("trainer.streaming = true with ")
    assert why in message


def combinations() -> list[str]:
    """The TOML blocks of docs/algorithms.md."""
    page = Path(__file__).parents[2] / "docs" / "algorithms.md"
    return re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), flags=re.DOTALL)


@pytest.mark.parametrize("tables", combinations())
def test_the_documented_combinations_are_valid(file: Path, tables: str) -> None:
    given = tomllib.loads(tables)
    overrides = [f"{name}.{key}={value}" for name, keys in given.items() for key, value in keys.items()]
    config = read_config(file, [text.replace("=True", "=true") for text in overrides])
    for name, keys in given.items():
        assert {key: getattr(getattr(config, name), key) for key in keys} == keys


def test_dapo_is_one_of_them() -> None:
    (dapo,) = (tomllib.loads(found)["algorithm"] for found in combinations() if "filter_groups" in found)
    assert dapo["filter_groups"]
    assert dapo["overlong_buffer_tokens"] > 0
    assert dapo["clip_ratio_high"] > dapo["clip_ratio_low"]
    assert (dapo["policy_loss"], dapo["loss_agg_mode"]) == ("ppo_clip", "token-mean")


TEACHER = "distillation.teachers=['model']"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["distillation.coef=2.0"], "distillation.coef has no effect without distillation.teachers"),
        ([TEACHER, "distillation.timeout_s=9"], "has no effect without a teacher on a server"),
        ([TEACHER, "algorithm.adv_estimator=rloo"], "has no effect with distillation.reward_coef = 0"),
        ([TEACHER, "algorithm.overlong_buffer_tokens=8"], "has no effect with distillation.reward_coef = 0"),
        ([TEACHER, "algorithm.kl_loss_coef=0.1"], "they take the place of the initial policy"),
        ([TEACHER, *PAIRS], "it compares whole responses"),
        ([TEACHER, GAE], "the critic predicts rewards"),
        ([TEACHER, "algorithm.filter_groups=true"], "groups of equal rewards train as well"),
        (["distillation.teachers=['http://h/v1']", "sampling.temperature=0.9"], "score with temperature 1"),
        (["distillation.teachers=['nowhere']"], "distillation.teachers = 'nowhere': "),
    ],
)
def test_teachers_that_cannot_count_are_refused(file: Path, overrides: list[str], why: str) -> None:
    assert why in error_of(file, *overrides)


def test_teachers_need_no_aux_worker_in_the_configuration(file: Path) -> None:
    folder = file.parent / "model"
    teachers = f"distillation.teachers=['{folder}', 'http://h/v1']"
    config = read_config(file, [teachers, "trainer.aux_device=cpu"])
    assert config.aux_workers == {"reference"}
    assert config.distillation.servers == ["http://h/v1"]
    assert config.distillation.folders == [str(folder.resolve())]
    settings = config.advantage_settings
    assert (settings.teacher_coef, settings.reward_coef) == (1.0, 0.0)
    assert read_config(file).advantage_settings.reward_coef == 1.0


def test_teachers_alone_need_no_other_responses_of_a_group(file: Path) -> None:
    alone = [f"distillation.teachers=['{file.parent / 'model'}']", "sampling.group_size=1"]
    assert read_config(file, alone).sampling.group_size == 1
    why = "every advantage from rewards would be reward - mean(rewards of the group) = 0"
    assert why in error_of(file, *alone, "distillation.reward_coef=0.5")
