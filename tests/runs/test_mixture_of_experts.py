"""A run with a mixture of experts: sampling filters, stop strings, and routes replayed by the trainer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from tests.model.families import CONFIGS
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, metrics, settings, summary
from tests.runtime.tiny import MODEL, write_task

from dora.config.load import read_config
from dora.data.tokenizer import Tokenizer
from dora.errors import ConfigError
from dora.journal.reader import read_responses, read_samples
from dora.model.pretrained import save_pretrained
from dora.model.weights import WeightLayout, initial_weights
from dora.runtime.run_setup import RunSetup
from dora.trainer.lora import LoraSettings

MIXTURE = replace(
    MODEL,
    model_type="qwen3_moe",
    num_experts=4,
    num_experts_per_tok=2,
    moe_intermediate_size=8,
    norm_topk_prob=True,
)


@pytest.fixture
def mixture_task(tmp_path: Path) -> Path:
    """The tiny task with a mixture of experts."""
    config = write_task(tmp_path)
    save_pretrained(tmp_path / "start", MIXTURE, initial_weights(MIXTURE, seed=0, std=0.3))
    return config


def test_a_run_uses_sampling_filters_stop_strings_and_routes(mixture_task: Path, start_run: StartRun) -> None:
    run = start_run(
        mixture_task,
        orchestrator__update_policy="sync",  # on-policy: log-probs of engine and trainer must agree
        trainer__routing_replay="true",
        sampling__temperature=0.8,
        sampling__top_p=0.9,
        sampling__stop='["7", "xy"]',
        sampling__stop_token_ids="[3, 4]",
    )
    run.succeed()
    assert summary(run.out)["trained_groups"] == 8
    steps = metrics(run.out)
    assert all(1 <= step["moe/load_imbalance"] <= MIXTURE.num_experts for step in steps)
    assert max(step["mismatch/logprob_abs_diff_max"] for step in steps) < 1e-5
    tokenizer = Tokenizer(mixture_task.parent / "start")
    samples = [s for s in read_responses(run.out, read_samples(run.out).values()) if s is not None]
    assert len(samples) == 16
    for sample in samples:
        num_tokens = len(sample.prompt_ids) + len(sample.token_ids)
        assert len(sample.routes) == (num_tokens - 1) * 2
        text = tokenizer.decode([*sample.token_ids])
        assert not any(stop in text[:-1] for stop in ("7", "xy"))
        assert not {3, 4, *tokenizer.stop_ids}.intersection(sample.token_ids[:-1])
    assert any(tokenizer.decode([*sample.token_ids]).endswith("7") for sample in samples)


def test_experts_cannot_have_adapters(mixture_task: Path) -> None:
    def setup(targets: str) -> RunSetup:
        changes = ["trainer.lora_rank=2", f"trainer.lora_targets={targets}"]
        return RunSetup.make(read_config(mixture_task, changes), mixture_task.parent / "run")

    with pytest.raises(ConfigError, match=r"names up_proj: .* adapters are q_proj, k_proj, v_proj, o_proj; "):
        setup("['q_proj', 'up_proj']")
    assert setup("['q_proj']").lora == LoraSettings(2, 32.0, ("q_proj",))
    assert setup("all-linear").lora == LoraSettings(2, 32.0, ("q_proj", "k_proj", "v_proj", "o_proj"))


def test_transformers_replays_no_routes(mixture_task: Path) -> None:
    config = read_config(mixture_task, ["trainer.model=transformers", "trainer.routing_replay=true"])
    with pytest.raises(ConfigError, match=r"routes tokens by itself; set trainer\.model = auto"):
        RunSetup.make(config, mixture_task.parent / "run")


def test_all_linear_includes_the_dense_layers_beside_a_mixture() -> None:
    config = CONFIGS["qwen3_moe-mixed"]
    shapes = LoraSettings(2, 32.0, config.linear_names).target_shapes(WeightLayout(config))
    assert sorted(name for name in shapes if ".mlp." in name) == [
        f"model.layers.1.mlp.{name}_proj.weight" for name in ("down", "gate", "up")
    ]
    assert sum("self_attn" in name for name in shapes) == 4 * config.num_hidden_layers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"trainer.routing_replay": "true"},
            "trainer.routing_replay = true: no layer of this qwen3 model is a mixture of experts, so there "
            "are no routes to replay; remove it",
        ),
        (
            {"sampling.stop_token_ids": "[1, 99]"},
            "sampling.stop_token_ids = [1, 99]: 99 is not a token id, as the model's vocab_size is",
        ),
        ({"sampling.stop_token_ids": "[1, 2, 3, 4, 5, 6, 7, 8]"}, "they are 9; engines support at most 8"),
        ({"engine.num_kv_blocks": 2}, "the longest sequence, 32 tokens, needs 3"),
    ],
)
def test_settings_that_do_not_fit_the_model_are_refused(
    task: Path, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    result = dora("train", task, "--out", tmp_path / "run", "--dry-run", *settings(changes))
    assert (result.code, result.out) == (2, "")
    assert message in result.err
