"""A configuration is complete and immutable; an error names the key, the value, the rule and the remedy."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError
from tests.config.minimal import MINIMAL, error_of

from dora.config.load import read_config
from dora.config.schema import LIST_SECTIONS, Config, iter_keys
from dora.config.toml import config_digest, defaults_toml, to_toml
from dora.config.validate import check_context
from dora.errors import ConfigError


def test_a_minimal_file_gets_every_default(file: Path) -> None:
    config = read_config(file)
    assert (config.run.steps, config.sampling.group_size, config.orchestrator.max_staleness) == (10, 8, 2)


def test_paths_are_relative_to_the_file(file: Path) -> None:
    config = read_config(file)
    assert config.model.path == str(file.parent.resolve() / "model")
    assert config.data.path == str(file.parent.resolve() / "prompts.jsonl")
    assert config.reward.function == str(file.parent.resolve() / "reward.py") + ":reward"


def test_paths_of_overrides_are_relative_to_the_working_directory(
    file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "own.jsonl").write_text('{"prompt": "b"}\n')
    monkeypatch.chdir(elsewhere)
    config = read_config(file, ["data.path=own.jsonl"])
    assert config.data.path == str(elsewhere.resolve() / "own.jsonl")
    assert config.model.path == str(file.parent.resolve() / "model")
    assert f"this path is relative to {elsewhere}" in error_of(file, "data.path=prompts.jsonl")


def test_an_override_may_change_one_key_of_a_table(file: Path) -> None:
    """A path in the table stays relative to the file, unless the override names it."""
    file.write_text(
        f'{file.read_text()}\n[engine.options]\npython = "bin/python"\narguments = ["--seed", "7"]\n'
    )
    vllm = "engine.backend=vllm"
    config = read_config(file, [vllm, "engine.options.min_step_s=0.5"])
    python = str(file.parent.resolve() / "bin/python")
    assert config.engine.options == {"python": python, "arguments": ["--seed", "7"], "min_step_s": 0.5}
    config = read_config(file, [vllm, "engine.options.python=own/python"])
    assert config.engine.options == {"python": f"{Path.cwd()}/own/python", "arguments": ["--seed", "7"]}
    problem = "trainer.lr = {'x': 1}: input should be a valid number"
    assert problem in error_of(file, "trainer.lr.x=1")


def test_built_in_names_and_modules_are_not_paths(file: Path) -> None:
    config = read_config(file, ["data.path=gcd", "eval.path=gcd", "reward.function=dora.rewards.gcd:reward"])
    assert (config.data.path, config.eval.path) == ("gcd", "gcd")
    assert config.reward.function == "dora.rewards.gcd:reward"


@pytest.mark.parametrize("name", ["model.path", "data.path", "eval.path"])
def test_a_path_that_does_not_exist_is_refused(file: Path, name: str) -> None:
    message = error_of(file, f"{name}=nowhere")
    assert f"{name} = 'nowhere'" in message
    assert "does not exist" in message


def test_a_folder_in_place_of_a_file_is_named(file: Path) -> None:
    assert error_of(file.parent) == f"config file {file.parent} is a folder; name a .toml file in it"


def test_a_byte_order_mark_is_ignored(file: Path) -> None:
    plain = read_config(file)
    file.write_bytes(b"\xef\xbb\xbf" + file.read_bytes())
    assert read_config(file) == plain


def test_a_file_that_is_not_utf8_is_refused_with_its_line(file: Path) -> None:
    file.write_bytes(b"# first\n# caf\xe9\n" + file.read_bytes())
    error = error_of(file)
    assert error.startswith(
        f"config file {file}, line 2: is not UTF-8 (byte 0xe9 in column 6); convert the file"
    )


def test_a_single_tracker_and_all_linear_modules_need_no_list(file: Path) -> None:
    changes = ['metrics.report_to="wandb"', "trainer.lora_rank=4", "trainer.lora_targets=all-linear"]
    config, plain = read_config(file, changes), read_config(file)
    assert config.metrics.report_to == ["wandb"]
    assert config.trainer.lora_targets == plain.trainer.lora_targets == ["all-linear"]


def test_overrides_are_toml_or_plain_strings(file: Path) -> None:
    config = read_config(
        file, ["trainer.lr=4e-4", "data.shuffle=false", "engine.kernels=eager", 'engine.min_step_time="8ms"']
    )
    assert (config.trainer.lr, config.data.shuffle, config.engine.kernels) == (4e-4, False, "eager")
    assert config.engine.min_step_time_s == 0.008


@pytest.mark.parametrize("override", ["steps=4", "run.steps", ".steps=4", "run.=4"])
def test_a_malformed_override_is_refused(file: Path, override: str) -> None:
    assert "must be section.key=value" in error_of(file, override)


def test_the_error_for_a_misspelt_key_names_the_nearest_and_all_valid_ones(file: Path) -> None:
    message = error_of(file, "sampling.groupsize=4")
    assert "sampling.groupsize: unknown key; did you mean group_size?" in message
    assert (
        "valid: group_size, max_response_length, max_turn_length, temperature, top_k, top_p, min_p, stop"
        in message
    )


def test_the_error_for_a_key_of_another_section_names_that_section(file: Path) -> None:
    assert "trainer.group_size: unknown key; group_size is sampling.group_size here" in error_of(
        file, "trainer.group_size=4"
    )
    assert "max_response_length is sampling.max_response_length here" in error_of(
        file, "data.max_response_length=4"
    )
    assert "max_grad_norm is critic.max_grad_norm or trainer.max_grad_norm here" in error_of(
        file, "algorithm.max_grad_norm=4"
    )


def test_the_error_for_an_unknown_section_names_the_nearest(file: Path) -> None:
    assert "engin: unknown section; did you mean engine?" in error_of(file, "engin.max_num_seqs=4")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("run.steps=-1", "run.steps = -1: input should be greater than or equal to 0"),
        ("trainer.lr=0", "trainer.lr = 0: input should be greater than 0"),
        ("trainer.lr=nan", "trainer.lr = nan: input should be a finite number"),
        ("run.steps=true", "run.steps = True: input should be a valid integer"),
        ("engine.min_step_time=fast", "engine.min_step_time = 'fast'"),
        ("sampling.temperature=0", "training needs samples that differ, and eval.greedy = true evaluates"),
        (
            "eval.temperature=0",
            "should be greater than 0; change it in the file or with --set eval.temperature",
        ),
        ("eval.temperature=0.0", "; eval.greedy = true evaluates greedily, and eval.num_samples = 0 samples"),
        ("sampling.top_p=0", "sampling.top_p = 0: input should be greater than 0"),
        ("sampling.min_p=1.5", "sampling.min_p = 1.5: input should be less than or equal to 1"),
        ("sampling.top_k=-1", "sampling.top_k = -1: input should be greater than or equal to 0"),
        ("sampling.stop=END", "sampling.stop = 'END': input should be a valid list; change it in the file"),
        ('sampling.stop=["END", 3]', "sampling.stop = 3: input should be a valid string"),
        ('sampling.stop=[""]', "sampling.stop = '': string should have at least 1 character"),
        ("sampling.stop_token_ids=[1, -1]", "sampling.stop_token_ids = -1: input should be greater than"),
        ("algorithm.loss_agg_mode=mean", "input should be 'token-mean'"),
        ("orchestrator.update_policy=[]", "orchestrator.update_policy = []"),
        ("reward.function=reward.py", "must be service, or have the form file.py:name or module:name"),
        ("engine.backend=vlm", "must be vllm or vllm-lora or sglang or sglang-lora or transformers, or have"),
        ("trainer.backend=mine", "trainer.backend = 'mine': must have the form file.py:name"),
        ("ray.address=ray://head:10001", "Running cluster, host:port, or"),
        ("ray.address=foo", "ray.address = 'foo': string should match pattern"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_rule(file: Path, override: str, message: str) -> None:
    assert message in error_of(file, override)


def test_a_key_without_default_must_be_set(file: Path) -> None:
    file.write_text(MINIMAL.replace("lr = 1e-3", ""))
    assert "trainer.lr: not set, and it has no default; add `lr = ...` to [trainer]" in error_of(file)


def test_a_section_without_defaults_must_be_there(file: Path) -> None:
    file.write_text(MINIMAL.replace("[run]\nsteps = 10", ""))
    assert "[run]: section missing; it needs steps" in error_of(file)


def test_a_section_must_be_a_table(file: Path) -> None:
    file.write_text("orchestrator = 3\n" + MINIMAL)
    assert "write a table [orchestrator]" in error_of(file)


def test_all_mistakes_are_named_at_once(file: Path) -> None:
    message = error_of(file, "run.steps=-1", "trainer.lr=-1")
    assert "run.steps" in message
    assert "trainer.lr" in message


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in error_of(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    assert "is not valid TOML" in error_of(tmp_path / "broken.toml")
    (tmp_path / "twice.toml").write_text("[algorithm]\n[run]\n[algorithm]\n")
    assert "line 3, column 11); merge the two tables into one" in error_of(tmp_path / "twice.toml")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["data.system_prompt=Be brief."],
            "data.system_prompt has no effect without data.chat_template = true",
        ),
        (
            ["data.chat_template_kwargs.enable_thinking=false"],
            "data.chat_template_kwargs has no effect without data.chat_template = true",
        ),
        (["data.path=gcd", "data.split=train"], "data.split has no effect with data.path = gcd"),
        (["data.path=gcd", "data.prompt_key=q"], "data.prompt_key has no effect with data.path = gcd"),
        (["eval.path=gcd", "eval.split=test"], "eval.split has no effect with eval.path = gcd"),
        (["eval.split=test"], "eval.split is set without eval.path"),
        (["eval.path=gcd", "eval.every=1000000"], "eval.every has no effect with run.steps = "),
        (
            ["eval.path=gcd", "eval.greedy=false", "eval.num_samples=0"],
            "an evaluation would generate no response",
        ),
    ],
)
def test_a_data_key_without_effect_is_refused(file: Path, overrides: list[str], why: str) -> None:
    assert why in error_of(file, *overrides)


def test_routing_replay_with_exact_logprobs_is_refused(file: Path) -> None:
    why = "trainer.routing_replay has no effect with engine.exact_logprobs = true: both route tokens"
    assert why in error_of(file, "engine.exact_logprobs=true", "trainer.routing_replay=true")


def test_a_group_of_one_has_no_advantage_and_is_refused(file: Path) -> None:
    assert "reward - mean(rewards of the group) = 0" in error_of(file, "sampling.group_size=1")


@pytest.mark.parametrize("override", ["sampling.top_k=1", "sampling.min_p=1.0"])
def test_filters_that_leave_one_token_are_refused(file: Path, override: str) -> None:
    assert "leaves one token to sample, so all responses of a group would be equal" in error_of(
        file, override
    )


def test_a_sample_must_fit_its_micro_batch(file: Path) -> None:
    message = error_of(file, "trainer.micro_batch_tokens=300")
    assert "max_prompt_length + max_response_length = 256 + 64 = 320" in message


OTHER_BACKEND = "engine.backend=transformers"


@pytest.mark.parametrize(
    ("changes", "num_slots", "is_prioritized"),
    [
        ([], 3, True),
        (["orchestrator.prioritize_stragglers=false"], 3, False),
        ([OTHER_BACKEND], 1, False),
        ([OTHER_BACKEND, "engine.version_slots=2", "orchestrator.prioritize_stragglers=true"], 2, True),
        ([OTHER_BACKEND, "orchestrator.update_policy=inflight"], 2, False),
    ],
)
def test_defaults_of_other_backends(
    file: Path, changes: list[str], num_slots: int, is_prioritized: bool
) -> None:
    config = read_config(file, changes)
    assert (config.version_slots, config.prioritizes_stragglers) == (num_slots, is_prioritized)


def test_more_version_slots_than_live_versions_are_refused(file: Path) -> None:
    assert read_config(file, ["engine.version_slots=1"]).version_slots == 1
    assert "max_staleness + 1 = 2 + 1" in error_of(file, "engine.version_slots=4")


def test_an_evaluated_version_has_a_slot_of_its_own(file: Path) -> None:
    beside = ["eval.path=gcd", "eval.every=2"]
    assert read_config(file, beside).version_slots == read_config(file).version_slots + 1 == 4
    assert read_config(file, [*beside, "engine.version_slots=4"]).version_slots == 4
    assert read_config(file, ["eval.path=gcd"]).version_slots == 3


def test_a_context_longer_than_the_model_is_refused(file: Path) -> None:
    check_context(read_config(file), 320)
    with pytest.raises(
        ConfigError, match=r"256 \+ 64 = 320 tokens.*max_position_embeddings = 319.*rope_scaling"
    ):
        check_context(read_config(file), 319)


def test_sync_is_on_policy(file: Path) -> None:
    assert read_config(file, ["orchestrator.update_policy=sync"]).orchestrator.max_staleness == 0
    with_staleness = ("orchestrator.update_policy=sync", "orchestrator.max_staleness=1")
    assert "update_policy = sync: this policy always has max_staleness = 0" in error_of(file, *with_staleness)
    file.write_text(MINIMAL + '[orchestrator]\nupdate_policy = "sync"\nmax_staleness = 1\n')
    assert "update_policy = sync: this policy always has max_staleness = 0" in error_of(file)


def test_an_overridden_policy_has_its_own_default_staleness(file: Path) -> None:
    file.write_text(MINIMAL + "[orchestrator]\nmax_staleness = 4\n")
    assert read_config(file, ["orchestrator.update_policy=sync"]).orchestrator.max_staleness == 0
    assert read_config(file, ["orchestrator.update_policy=one_step"]).orchestrator.max_staleness == 1
    assert read_config(file, ["orchestrator.update_policy=dora"]).orchestrator.max_staleness == 4


@pytest.mark.parametrize(("policy", "staleness"), [("dora", 2), ("sync", 0), ("one_step", 1), ("drain", 1)])
def test_each_policy_has_its_own_default_staleness(file: Path, policy: str, staleness: int) -> None:
    config = read_config(file, [f"orchestrator.update_policy={policy}"])
    assert config.orchestrator.max_staleness == staleness


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["update_policy=one_step", "max_staleness=2"],
            "this policy always has max_staleness = 1",
        ),
        (["batches_per_version=2"], "batches_per_version has no effect without update_policy = drain"),
        (["update_policy=drain", "batches_per_version=3"], "at most max_staleness + 1 = 1 + 1 batches"),
        (["slack=9"], "at most max_staleness * batch_size = 2 * 4 = 8"),
        (["update_policy=sync", "slack=1"], "= 0 * 4 = 0"),
        (
            ["update_policy=drain", "weight_sync_interval=2"],
            "weight_sync_interval has no effect with update_policy = drain",
        ),
        (["weight_sync_interval=4"], "at most max_staleness + 1 = 2 + 1 steps"),
        (["kv_watermark=1.5"], "orchestrator.kv_watermark = 1.5: input should be less than or equal to 1"),
        (["rebalance_interval_s=0"], "orchestrator.rebalance_interval_s = 0"),
        (
            ["placement=static", "balance_running=true"],
            "balance_running has no effect with",
        ),
        (["placement=static", "kv_watermark=0.5"], "kv_watermark has no effect"),
        (
            ["staleness_mode=adaptive", "max_staleness=0"],
            "with max_staleness = 0: the staleness bound cannot vary",
        ),
        (
            ["staleness_mode=adaptive", "update_policy=one_step"],
            "update_policy = one_step: the staleness bound cannot vary",
        ),
        (["max_kl=0.1"], "max_kl has no effect without orchestrator.staleness_mode = adaptive"),
        (["staleness_mode=adaptive", "min_ess=1"], "orchestrator.min_ess = 1: input should be less than 1"),
        (["placement=anywhere"], "input should be 'dynamic', 'static' or 'colocated'"),
    ],
)
def test_orchestrator_settings_that_conflict_are_refused(
    file: Path, overrides: list[str], message: str
) -> None:
    assert message in error_of(file, *(f"orchestrator.{override}" for override in overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["weights.load=lazy"], "weights.load = 'lazy': input should be 'eager' or 'deferred'"),
        (["weights.skip_below_kl=0"], "weights.skip_below_kl = 0: input should be greater than 0"),
        (["weights.skip_below_kl=1", "orchestrator.update_policy=drain"], "with update_policy = drain: one"),
        (["weights.skip_below_kl=0.1", "orchestrator.max_staleness=0"], "effect with max_staleness = 0"),
        (["weights.skip_below_kl=0.1", "service.trainer=external"], "it reports no KL"),
    ],
)
def test_weight_loading_settings_that_conflict_are_refused(
    file: Path, overrides: list[str], message: str
) -> None:
    assert message in error_of(file, *overrides)


def test_a_version_fills_as_many_batches_as_the_bound_allows(file: Path) -> None:
    drain = ["update_policy=drain", "max_staleness=3", "batches_per_version=4", "slack=12"]
    config = read_config(file, [f"orchestrator.{override}" for override in drain])
    assert config.orchestrator.batches_per_version == 4
    assert config.max_groups_in_flight == (3 + 1) * 4 - 12


def test_the_kv_of_a_gpu_is_not_shared(file: Path) -> None:
    with pytest.raises(ConfigError, match=r"kv_transfer = shared with engine\.device = 'cuda'.*= staged"):
        read_config(file, ["engine.device=cuda", "engine.kv_transfer=shared"])
    with pytest.raises(ConfigError, match=r"kv_transfer = ipc with runtime\.kind = ray: .*= staged"):
        read_config(file, ["engine.device=cuda", "engine.kv_transfer=ipc", "runtime.kind=ray"])


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["engine.exact_logprobs=true"],
            "trainer.num_ranks = 65 with engine.exact_logprobs = true: exact log-probs need",
        ),
        (
            [],
            "trainer.num_ranks = 65: a step has batch_size * group_size = 32 samples, and every rank needs",
        ),
    ],
)
def test_settings_that_several_ranks_do_not_support_are_refused(
    file: Path, overrides: list[str], why: str
) -> None:
    assert why in error_of(file, "trainer.num_ranks=65", *overrides)


def test_an_elastic_trainer_is_one_more_engine_and_not_for_colocated_runs(file: Path) -> None:
    assert read_config(file, ["trainer.elastic=true"]).max_concurrent_requests == (2 + 1) * 32
    message = error_of(file, "trainer.elastic=true", "orchestrator.placement=colocated")
    assert "every engine already shares the trainer's device" in message


def test_requests_migrate_between_engines_on_gpus(file: Path) -> None:
    config = read_config(file, ["engine.device=cuda", "trainer.device=cuda"])
    assert (config.orchestrator.placement, config.has_static_placement) == ("dynamic", False)


def test_requests_do_not_migrate_with_static_placement(file: Path) -> None:
    message = error_of(file, "runtime.migration_timeout_s=1", "orchestrator.placement=static")
    assert "runtime.migration_timeout_s has no effect with orchestrator.placement = static" in message


def test_derived_values_follow_their_formulas(file: Path) -> None:
    config = read_config(file, ["orchestrator.max_staleness=3"])
    assert (config.max_groups_in_flight, config.samples_per_step, config.max_concurrent_requests) == (
        (3 + 1) * 4,
        4 * 8,
        2 * 32,
    )
    assert (config.version_slots, config.max_sequence_length) == (3 + 1, 256 + 64)


@pytest.mark.parametrize(
    "override",
    [
        "trainer.lr=1e-5",
        "orchestrator.placement=static",
        "orchestrator.update_policy=drain",
        r'sampling.stop=["\n\n", "é\"]"]',
    ],
)
def test_the_resolved_configuration_reads_back_equal_from_anywhere(
    file: Path, tmp_path: Path, override: str
) -> None:
    config = read_config(file, [override])
    copy = tmp_path / "elsewhere" / 'with "quotes" é.toml'
    copy.parent.mkdir()
    copy.write_text(to_toml(config), encoding="utf-8")
    assert read_config(copy) == config
    assert config_digest(read_config(copy)) == config_digest(config)


def test_the_digests_of_different_configurations_differ(file: Path) -> None:
    assert config_digest(read_config(file)) != config_digest(read_config(file, ["run.seed=1"]))


def test_a_configuration_cannot_be_changed(file: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read_config(file).run.steps = 3


def test_the_printed_defaults_are_toml_and_describe_every_key() -> None:
    text = defaults_toml()
    assert set(tomllib.loads(text)) | set(LIST_SECTIONS) == set(Config.model_fields)
    assert "\n# [[reward_task]]\n" in text
    for _, key, field in iter_keys():
        assert field.description
        assert f"\n{key} = " in text or f"\n# {key} = " in text


def test_an_evaluation_needs_no_settings_of_a_trainer(file: Path) -> None:
    trainer = "num_ranks = 2\nmicro_batch_tokens = 9\n"
    text = file.read_text().replace("[trainer]\n", f"[trainer]\n{trainer}")
    file.write_text(text + '[algorithm]\nkl_loss_coef = 0.1\n[eval]\npath = "gcd"\nevery = 5\n')
    assert "micro_batch_tokens = 9" in error_of(file)
    config = read_config(file, ["eval.num_samples=4", "run.steps=0"])
    assert (config.run.steps, config.trainer.device, config.trainer.num_ranks) == (0, "cpu", 1)
    assert (config.eval.num_samples, config.algorithm.kl_loss_coef) == (4, 0.0)
    without = text.partition("[trainer]")[0].replace("[run]\nsteps = 10\n", "")
    file.write_text(without + '[eval]\npath = "gcd"\n')
    assert read_config(file, ["run.steps=0"]).trainer.num_ranks == 1


def test_an_evaluation_uses_nothing_of_a_trainer_in_other_sections(file: Path) -> None:
    held_out = ["eval.path=gcd", "run.steps=0"]
    slack = read_config(file, ["orchestrator.slack=4", *held_out])
    assert (slack.orchestrator.slack, slack.orchestrator.placement) == (0, "dynamic")
    colocated = read_config(file, ["orchestrator.placement=colocated", *held_out])
    assert colocated.orchestrator.placement == "dynamic"
    static = read_config(file, ["orchestrator.placement=static", *held_out])
    assert static.orchestrator.placement == "static"
    served = read_config(file, ["service.trainer=external", "service.idle_timeout_s=9", *held_out])
    assert (served.service.trainer, served.external_source) == ("internal", None)
    assert read_config(file, ["sampling.top_k=1", *held_out]).sampling.top_k == 1
    unused = error_of(file, *held_out, "eval.num_samples=0", "eval.temperature=0.5")
    assert "eval.temperature has no effect" in unused
    checkpoint = "trainer.continue_from=model"
    assert read_config(file, [checkpoint, f"model.path={file.parent / 'model'}", *held_out]).run.steps == 0
    assert "name the model to evaluate, such as this checkpoint, in model.path" in error_of(
        file, checkpoint, *held_out
    )


def test_the_minimum_of_the_learning_rate_is_kept_if_the_last_override_lets_it_fall(
    file: Path,
) -> None:
    given = ["trainer.min_lr_ratio=0.25"]
    file.write_text(file.read_text().replace("lr = 1e-3", "lr = 1e-3\nmin_lr_ratio = 0.25"))
    constant, linear = "trainer.lr_decay=constant", "trainer.lr_decay=linear"
    assert read_config(file, [constant]).trainer.min_lr_ratio == 0.0
    assert read_config(file, [constant, linear]).trainer.min_lr_ratio == 0.25
    assert "trainer.min_lr_ratio has no effect" in error_of(file, constant, *given)


def test_the_revision_of_a_file_is_not_that_of_a_path_in_an_override(file: Path) -> None:
    file.write_text(file.read_text().replace('path = "model"', f'path = "model"\nrevision = "{"0" * 40}"'))
    assert "model.path" in error_of(file)
    assert read_config(file, [f"model.path={file.parent / 'model'}"]).model.revision is None
    source = f'[[eval_source]]\nname = "a"\npath = "prompts.jsonl"\nrevision = "{"0" * 40}"\n'
    file.write_text(file.read_text().replace("revision", "# revision") + source)
    assert "eval_source.a.path" in error_of(file)
    read_config(file, [f"eval_source.a.path={file.parent / 'prompts.jsonl'}"])


def test_a_run_without_steps_needs_held_out_prompts(file: Path) -> None:
    assert "run.steps = 0: the run only evaluates" in error_of(file, "run.steps=0")
    assert "run.steps = 0" in error_of(file, "run.steps=0", "eval.path=gcd", "eval.num_prompts=0")


def test_evaluations_may_sample_in_another_way(file: Path) -> None:
    config = read_config(file, ["eval.path=gcd", "eval.top_p=0.9", "sampling.temperature=0.8"])
    assert (config.eval_sampling.top_p, config.sampling.top_p) == (0.9, 1.0)
    assert config.eval_sampling.temperature == 0.8
    overrides = ("eval.path=gcd", "eval.num_samples=0", "eval.top_p=0.9")
    assert "eval.top_p has no effect with eval.num_samples = 0" in error_of(file, *overrides)
