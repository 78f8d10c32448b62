"""A configuration is complete, frozen and refused for a reason a user can act on."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from pydantic import ValidationError

from dora.config import Config
from dora.errors import ConfigError
from dora.settings import defaults_toml, keys, read

MINIMAL = """
[run]
steps = 10
[model]
path = "model"
[data]
path = "prompts.jsonl"
[sampling]
max_response_length = 64
[reward]
function = "reward.py:reward"
[trainer]
batch_size = 4
lr = 1e-3
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "a"}\n')
    (tmp_path / "reward.py").write_text("def reward(prompt, completion): return 1.0\n")
    (tmp_path / "run.toml").write_text(MINIMAL)
    return tmp_path / "run.toml"


def refusal(file: Path, *overrides: str) -> str:
    with pytest.raises(ConfigError) as error:
        read(file, overrides)
    return str(error.value)


def test_a_minimal_file_gets_every_default(file: Path) -> None:
    config = read(file)
    assert (config.run.steps, config.sampling.group_size, config.orchestrator.max_staleness) == (10, 8, 2)


def test_paths_are_relative_to_the_file(file: Path) -> None:
    config = read(file)
    assert config.model.path == str(file.parent.resolve() / "model")
    assert config.data.path == str(file.parent.resolve() / "prompts.jsonl")
    assert config.reward.function == str(file.parent.resolve() / "reward.py") + ":reward"


def test_paths_of_overrides_are_relative_to_where_one_stands(
    file: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    (elsewhere / "own.jsonl").write_text('{"prompt": "b"}\n')
    monkeypatch.chdir(elsewhere)
    config = read(file, ["data.path=own.jsonl"])
    assert config.data.path == str(elsewhere.resolve() / "own.jsonl")
    assert config.model.path == str(file.parent.resolve() / "model")
    assert f"this path is relative to {elsewhere}" in refusal(file, "data.path=prompts.jsonl")


def test_built_in_names_and_modules_are_not_paths(file: Path) -> None:
    config = read(file, ["data.path=gcd", "eval.path=gcd", "reward.function=dora.rewards.gcd:reward"])
    assert (config.data.path, config.eval.path) == ("gcd", "gcd")
    assert config.reward.function == "dora.rewards.gcd:reward"


@pytest.mark.parametrize("name", ["model.path", "data.path", "eval.path"])
def test_a_path_that_does_not_exist_is_refused(file: Path, name: str) -> None:
    message = refusal(file, f"{name}=nowhere")
    assert f"{name} = 'nowhere'" in message
    assert "does not exist" in message


def test_overrides_are_toml_or_plain_strings(file: Path) -> None:
    config = read(
        file, ["trainer.lr=4e-4", "data.shuffle=false", "engine.kernels=eager", 'engine.pace="8ms"']
    )
    assert (config.trainer.lr, config.data.shuffle, config.engine.kernels) == (4e-4, False, "eager")
    assert config.engine.pace_s == 0.008


@pytest.mark.parametrize("override", ["steps=4", "run.steps", ".steps=4", "run.=4"])
def test_an_override_that_is_none_is_refused(file: Path, override: str) -> None:
    assert "must read section.key=value" in refusal(file, override)


def test_a_misspelt_key_is_answered_with_the_nearest_and_all_valid_ones(file: Path) -> None:
    message = refusal(file, "sampling.groupsize=4")
    assert "sampling.groupsize: unknown key; did you mean group_size?" in message
    assert "valid: group_size, temperature, top_k, top_p, min_p, max_response_length, stop" in message


def test_a_key_of_another_section_is_answered_with_that_section(file: Path) -> None:
    assert "trainer.group_size: unknown key; group_size is sampling.group_size here" in refusal(
        file, "trainer.group_size=4"
    )
    assert "max_response_length is sampling.max_response_length here" in refusal(
        file, "data.max_response_length=4"
    )
    assert "max_grad_norm is critic.max_grad_norm or trainer.max_grad_norm here" in refusal(
        file, "algorithm.max_grad_norm=4"
    )


def test_an_unknown_section_is_answered_with_the_nearest(file: Path) -> None:
    assert "engin: unknown section; did you mean engine?" in refusal(file, "engin.max_rows=4")


@pytest.mark.parametrize(
    ("override", "complaint"),
    [
        ("run.steps=0", "run.steps = 0: input should be greater than or equal to 1"),
        ("trainer.lr=0", "trainer.lr = 0: input should be greater than 0"),
        ("trainer.lr=nan", "trainer.lr = nan: input should be a finite number"),
        ("run.steps=true", "run.steps = True: input should be a valid integer"),
        ("engine.pace=fast", "engine.pace = 'fast'"),
        ("sampling.top_p=0", "sampling.top_p = 0: input should be greater than 0"),
        ("sampling.min_p=1.5", "sampling.min_p = 1.5: input should be less than or equal to 1"),
        ("sampling.top_k=-1", "sampling.top_k = -1: input should be greater than or equal to 0"),
        ("sampling.stop=END", "sampling.stop = 'END': input should be a valid list; change it in the file"),
        ('sampling.stop=["END", 3]', "sampling.stop = 3: input should be a valid string"),
        ('sampling.stop=[""]', "sampling.stop = '': string should have at least 1 character"),
        ("sampling.stop_token_ids=[1, -1]", "sampling.stop_token_ids = -1: input should be greater than"),
        ("algorithm.loss_agg_mode=mean", "input should be 'token-mean'"),
        ("orchestrator.update_policy=[]", "orchestrator.update_policy = []"),
        ("reward.function=reward.py", "must read file.py:name"),
        ("ray.address=ray://head:10001", "a running cluster (host:port, or"),
        ("ray.address=foo", "ray.address = 'foo': string should match pattern"),
    ],
)
def test_a_value_out_of_range_names_key_value_and_rule(file: Path, override: str, complaint: str) -> None:
    assert complaint in refusal(file, override)


def test_a_key_without_default_must_be_set(file: Path) -> None:
    file.write_text(MINIMAL.replace("lr = 1e-3", ""))
    assert "trainer.lr: not set, and it has no default; add `lr = ...` to [trainer]" in refusal(file)


def test_a_section_without_defaults_must_be_there(file: Path) -> None:
    file.write_text(MINIMAL.replace("[run]\nsteps = 10", ""))
    assert "[run]: section missing; it needs steps" in refusal(file)


def test_a_section_must_be_a_table(file: Path) -> None:
    file.write_text("orchestrator = 3\n" + MINIMAL)
    assert "write a table [orchestrator]" in refusal(file)


def test_all_mistakes_are_named_at_once(file: Path) -> None:
    message = refusal(file, "run.steps=0", "trainer.lr=-1")
    assert "run.steps" in message
    assert "trainer.lr" in message


def test_a_missing_or_broken_file_is_refused(tmp_path: Path) -> None:
    assert "does not exist" in refusal(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("[run\n")
    assert "is not valid TOML" in refusal(tmp_path / "broken.toml")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (
            ["data.system_prompt=Be brief."],
            "data.system_prompt has no effect without data.chat_template = true",
        ),
        (["data.path=gcd", "data.split=train"], "data.split has no effect with data.path = gcd"),
        (["data.path=gcd", "data.prompt_key=q"], "data.prompt_key has no effect with data.path = gcd"),
        (["eval.path=gcd", "eval.split=test"], "eval.split has no effect with eval.path = gcd"),
        (["eval.split=test"], "eval.split is set and eval.path is not"),
        (["eval.path=gcd", "eval.every=1000000"], "eval.every has no effect with run.steps = "),
        (["eval.path=gcd", "eval.greedy=false", "eval.num_samples=0"], "no prompt would be answered"),
    ],
)
def test_a_setting_of_data_without_effect_is_refused(file: Path, overrides: list[str], why: str) -> None:
    assert why in refusal(file, *overrides)


def test_replaying_routes_in_exact_mode_is_refused(file: Path) -> None:
    why = "trainer.routing_replay has no effect with engine.exact = true: equal bits are routed alike"
    assert why in refusal(file, "engine.exact=true", "trainer.routing_replay=true")


def test_a_group_of_one_teaches_nothing_and_is_refused(file: Path) -> None:
    assert "reward - mean(rewards of the group) = 0" in refusal(file, "sampling.group_size=1")


@pytest.mark.parametrize("override", ["sampling.top_k=1", "sampling.min_p=1.0"])
def test_filters_that_leave_one_token_are_refused(file: Path, override: str) -> None:
    assert "leaves one token to draw, so all siblings of a group would be equal" in refusal(file, override)


def test_a_sample_must_fit_its_micro_batch(file: Path) -> None:
    message = refusal(file, "trainer.micro_batch_tokens=300")
    assert "max_prompt_length + max_response_length = 256 + 64 = 320" in message


def test_more_version_slots_than_live_versions_are_refused(file: Path) -> None:
    assert read(file, ["engine.version_slots=1"]).version_slots == 1
    assert "max_staleness + 1 = 2 + 1" in refusal(file, "engine.version_slots=4")


def test_a_version_that_is_evaluated_has_a_slot_of_its_own(file: Path) -> None:
    beside = ["eval.path=gcd", "eval.every=2"]
    assert read(file, beside).version_slots == read(file).version_slots + 1 == 4
    assert read(file, [*beside, "engine.version_slots=4"]).version_slots == 4
    assert read(file, ["eval.path=gcd"]).version_slots == 3


def test_a_context_longer_than_the_model_is_refused(file: Path) -> None:
    read(file).check_context(320)
    with pytest.raises(ConfigError, match=r"256 \+ 64 = 320 tokens.*max_position_embeddings = 319"):
        read(file).check_context(319)


def test_sync_is_on_policy(file: Path) -> None:
    assert read(file, ["orchestrator.update_policy=sync"]).orchestrator.max_staleness == 0
    with_staleness = ("orchestrator.update_policy=sync", "orchestrator.max_staleness=1")
    assert "update_policy = sync trains only on-policy samples" in refusal(file, *with_staleness)
    file.write_text(MINIMAL + '[orchestrator]\nupdate_policy = "sync"\nmax_staleness = 1\n')
    assert "update_policy = sync trains only on-policy samples" in refusal(file)


def test_another_policy_brings_its_own_default_staleness(file: Path) -> None:
    file.write_text(MINIMAL + "[orchestrator]\nmax_staleness = 4\n")
    assert read(file, ["orchestrator.update_policy=sync"]).orchestrator.max_staleness == 0
    assert read(file, ["orchestrator.update_policy=one_step"]).orchestrator.max_staleness == 1
    assert read(file, ["orchestrator.update_policy=dora"]).orchestrator.max_staleness == 4


@pytest.mark.parametrize(("policy", "staleness"), [("dora", 2), ("sync", 0), ("one_step", 1), ("drain", 1)])
def test_each_policy_has_its_own_default_staleness(file: Path, policy: str, staleness: int) -> None:
    config = read(file, [f"orchestrator.update_policy={policy}"])
    assert config.orchestrator.max_staleness == staleness


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (
            ["update_policy=one_step", "max_staleness=2"],
            "one_step trains each batch one step late",
        ),
        (["batches_per_version=2"], "batches_per_version has no effect without update_policy = drain"),
        (["update_policy=drain", "batches_per_version=3"], "at most max_staleness + 1 = 1 + 1 batches"),
        (["slack=9"], "at most max_staleness * batch_size = 2 * 4 = 8"),
        (["update_policy=sync", "slack=1"], "= 0 * 4 = 0"),
        (
            ["update_policy=drain", "load_interval=2"],
            "load_interval has no effect with update_policy = drain",
        ),
        (["load_interval=4"], "at most max_staleness + 1 = 2 + 1 steps"),
        (["kv_watermark=1.5"], "orchestrator.kv_watermark = 1.5: input should be less than or equal to 1"),
        (["rebalance_interval_s=0"], "orchestrator.rebalance_interval_s = 0"),
        (
            ["placement=static", "level_running=true"],
            "level_running has no effect with",
        ),
        (["placement=static", "kv_watermark=0.5"], "kv_watermark has no effect"),
        (["staleness=adaptive", "max_staleness=0"], "max_staleness = 0 leaves nothing to adapt"),
        (["staleness=adaptive", "update_policy=one_step"], "one_step leaves nothing to adapt"),
        (["max_kl=0.1"], "max_kl has no effect without orchestrator.staleness = adaptive"),
        (["staleness=adaptive", "min_ess=1"], "orchestrator.min_ess = 1: input should be less than 1"),
        (["placement=anywhere"], "input should be 'dynamic', 'static' or 'colocated'"),
    ],
)
def test_what_the_orchestrator_cannot_follow_is_refused(
    file: Path, overrides: list[str], complaint: str
) -> None:
    assert complaint in refusal(file, *(f"orchestrator.{override}" for override in overrides))


@pytest.mark.parametrize(
    ("overrides", "complaint"),
    [
        (["weights.load=lazy"], "weights.load = 'lazy': input should be 'eager' or 'deferred'"),
        (["weights.skip_below_kl=0"], "weights.skip_below_kl = 0: input should be greater than 0"),
        (["weights.skip_below_kl=1", "orchestrator.update_policy=drain"], "with update_policy = drain: one"),
        (["weights.skip_below_kl=0.1", "orchestrator.max_staleness=0"], "effect with max_staleness = 0"),
        (["weights.skip_below_kl=0.1", "service.trainer=external"], "nobody measures"),
    ],
)
def test_loads_that_cannot_be_had_are_refused(file: Path, overrides: list[str], complaint: str) -> None:
    assert complaint in refusal(file, *overrides)


def test_tails_are_not_put_off_where_the_bound_adapts(file: Path) -> None:
    message = refusal(file, "orchestrator.staleness=adaptive", "engine.tail_interval=2")
    assert "tail_interval has no effect with max_staleness < 2 or staleness = adaptive" in message


def test_a_drained_version_may_serve_as_many_batches_as_the_bound_allows(file: Path) -> None:
    drain = ["update_policy=drain", "max_staleness=3", "batches_per_version=4", "slack=12"]
    config = read(file, [f"orchestrator.{override}" for override in drain])
    assert config.orchestrator.batches_per_version == 4
    assert config.window == (3 + 1) * 4 - 12


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (["engine.exact=true"], "trainer.num_ranks = 65 with engine.exact = true: its log-probs need"),
        (["algorithm.adv_estimator=gae"], "with algorithm.adv_estimator = gae: the critic is not shared"),
        ([], "trainer.num_ranks = 65: a step has batch_size * group_size = 32 samples; lower it"),
    ],
)
def test_what_several_ranks_cannot_do_is_refused(file: Path, overrides: list[str], why: str) -> None:
    assert why in refusal(file, "trainer.num_ranks=65", *overrides)


def test_an_elastic_trainer_is_one_engine_more_and_not_for_colocated_runs(file: Path) -> None:
    assert read(file, ["trainer.elastic=true"]).total_rows == (2 + 1) * 32
    message = refusal(file, "trainer.elastic=true", "orchestrator.placement=colocated")
    assert "every engine already shares the trainer's device" in message


def test_nothing_moves_with_static_placement(file: Path) -> None:
    message = refusal(file, "runtime.move_timeout_s=1", "orchestrator.placement=static")
    assert "runtime.move_timeout_s has no effect with orchestrator.placement = static" in message


def test_derived_values_follow_their_formulas(file: Path) -> None:
    config = read(file, ["orchestrator.max_staleness=3"])
    assert (config.window, config.samples_per_step, config.total_rows) == ((3 + 1) * 4, 4 * 8, 2 * 32)
    assert (config.version_slots, config.context) == (3 + 1, 256 + 64)


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
    config = read(file, [override])
    copy = tmp_path / "elsewhere" / 'with "quotes" é.toml'
    copy.parent.mkdir()
    copy.write_text(config.to_toml(), encoding="utf-8")
    assert read(copy) == config
    assert read(copy).digest() == config.digest()


def test_the_digest_tells_different_runs_apart(file: Path) -> None:
    assert read(file).digest() != read(file, ["run.seed=1"]).digest()


def test_a_configuration_cannot_be_changed(file: Path) -> None:
    with pytest.raises(ValidationError, match="frozen"):
        read(file).run.steps = 3


def test_the_printed_defaults_are_toml_and_describe_every_key() -> None:
    text = defaults_toml()
    assert set(tomllib.loads(text)) | {"task", "fleet"} == set(Config.model_fields)
    assert "\n# [[task]]\n" in text
    for _, key, field in keys():
        assert field.description
        assert f"\n{key} = " in text or f"\n# {key} = " in text
