"""The example for GSM8K trains a model made by `dora init-model`, on similar rows."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, journal, summary

EXAMPLES = Path(__file__).parents[2] / "examples"
SMALL = {
    "run__steps": 3,
    "sampling__group_size": 4,
    "sampling__max_response_length": 24,
    "trainer__batch_size": 2,
    "trainer__micro_batch_tokens": 1024,
    "engine__kernels": "eager",
}
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva")
# A reward function with TRL's signature, which fails for one question of five.
TRL_REWARD = """
def reward_func(prompts, completions, completion_ids, answer, **kwargs):
    assert len(prompts) == len(completions) == len(completion_ids) == len(answer)
    if "Dan" in prompts[0]:
        raise ValueError("no Dan")
    return [len(set(ids)) / 10 for ids in completion_ids]
"""


@pytest.fixture
def model_and_data(tmp_path: Path) -> dict[str, Path]:
    """Data, and a tiny random model with a tokenizer made from it."""
    rows = [
        {
            "question": f"{name} has {n} apples and buys twice as many. How many apples has {name} now?",
            "answer": f"{name} buys 2*{n}=<<2*{n}={2 * n}>>{2 * n} apples.\n#### {3 * n:,}",
        }
        for n, name in enumerate(NAMES, start=333)
    ]
    data, model = tmp_path / "train.jsonl", tmp_path / "model"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = dora(
        "init-model", model, "--tokenizer-from", data, "--hidden-size", "16", "--num-hidden-layers", "1"
    )
    assert made.code == 0, made
    return {"model__path": model, "data__path": data}


def test_the_example_trains_with_the_strict_verifier(
    start_run: StartRun, model_and_data: dict[str, Path]
) -> None:
    run = start_run(EXAMPLES / "gsm8k.toml", **SMALL, **model_and_data)
    run.succeed()
    s = summary(run.out)
    assert (s["trained_groups"], s["failed_groups"]) == (6, 0)
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    assert (run.out / "checkpoints" / "step-3" / "tokenizer_config.json").is_file()


def test_only_the_groups_for_which_a_trl_reward_fails_are_failed(
    start_run: StartRun, model_and_data: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "trl_reward.py").write_text(TRL_REWARD)
    changes = {
        "reward__function": f"{tmp_path / 'trl_reward.py'}:reward_func",
        "reward__max_failed_fraction": 1.0,
    }
    run = start_run(EXAMPLES / "gsm8k.toml", **SMALL, **model_and_data, **changes)
    result = run.succeed()
    s = summary(run.out)
    assert s["trained_groups"] == 6
    assert s["failed_groups"] == len([line for line in journal(run.out) if line["kind"] == "fail"]) >= 1
    assert "failed: reward raised ValueError" in result.out


@pytest.mark.parametrize("name", ["qwen3-0.6b-1gpu.toml", "qwen3-0.6b-8gpu.toml"])
def test_the_configurations_for_gpus_pass_a_dry_run(
    name: str, model_and_data: dict[str, Path], tmp_path: Path
) -> None:
    sets = [f"model.path={model_and_data['model__path']}", f"data.path={model_and_data['data__path']}"]
    done = dora("train", EXAMPLES / name, "--dry-run", "--set", sets[0], "--set", sets[1])
    assert done.code == 0, done
    assert "0 for an empty response to the first prompt" in done.out
