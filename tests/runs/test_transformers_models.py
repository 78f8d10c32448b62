"""A run whose model transformers computes, in the trainer and in the engines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.runs.conftest import StartRun
from tests.runs.other_families import FITTING, other_family_task
from tests.runtime.running import Run, metrics
from tests.runtime.tiny import write_task
from transformers import AutoModelForCausalLM

from dora.config.load import read_config
from dora.errors import ConfigError
from dora.runtime.run_setup import RunSetup

VLLM_PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)  # that has vLLM


def test_the_guarantees_hold_for_another_family_when_an_engine_crashes(
    tmp_path: Path, start_run: StartRun
) -> None:
    """The trainer has two ranks and a critic."""
    run = start_run(
        other_family_task(tmp_path),
        run__steps=4,
        eval__path=tmp_path / "prompts.jsonl",
        eval__num_prompts=4,
        trainer__num_ranks=2,
        algorithm__adv_estimator="gae",
        algorithm__filter_groups="false",
        **FITTING,
    )
    run.wait_for_steps(2)
    run.workers()[0].kill()
    run.succeed()
    run.audit("--deep", "4")
    steps = metrics(run.out)
    assert len(steps) == 4
    assert max(step["mismatch/logprob_abs_diff_max"] for step in steps) < 1e-4
    saved = AutoModelForCausalLM.from_pretrained(run.out / "checkpoints" / "step-4")
    started = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    assert type(saved) is type(started)
    trained, initial = saved.state_dict(), started.state_dict()
    assert trained.keys() == initial.keys()
    assert not any(torch.equal(trained[name], initial[name]) for name in initial)


def test_transformers_trains_what_the_own_engines_generate(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run(write_task(tmp_path), trainer__model="transformers")
    run.succeed()
    run.audit("--deep", "4")
    steps = metrics(run.out)
    assert len(steps) == 4
    assert max(step["mismatch/logprob_abs_diff_max"] for step in steps) < 1e-5


def test_runs_of_both_implementations_have_the_same_rewards_and_losses(tmp_path: Path) -> None:
    """Without staleness and timing, a run depends on nothing but the gradients of its trainer."""
    task, curves = write_task(tmp_path), []
    for implementation in ("dora", "transformers"):
        run = Run(
            task,
            tmp_path / implementation,
            orchestrator__max_staleness=0,
            trainer__deterministic="true",
            trainer__model=implementation,
        )
        run.succeed()
        curves.append(metrics(run.out))
    own, foreign = curves
    assert [step["reward/mean"] for step in own] == [step["reward/mean"] for step in foreign]
    for key in ("actor/pg_loss", "actor/grad_norm", "actor/entropy"):
        found = [step[key] for step in foreign]
        assert [step[key] for step in own] == pytest.approx(found, rel=1e-3, abs=1e-5)
    assert len({step["reward/mean"] for step in own}) > 1


def test_a_refused_model_leaves_one_line(tmp_path: Path) -> None:
    """Also in a process of its own, which has imported triton for it."""
    task, out = str(other_family_task(tmp_path)), str(tmp_path / "run")
    command = [sys.executable, "-m", "dora", "train", task, "--out", out]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith("dora: engine.backend: DORA-RL's engine does not support")
    assert ended.stderr.count("\n") == 1


@pytest.mark.vllm
@pytest.mark.timeout(900)  # vLLM takes minutes to import on busy cores
@pytest.mark.parametrize("kind", ["gemma3_text", "mistral"])
def test_vllm_generates_for_a_model_that_transformers_trains(
    kind: str, tmp_path: Path, start_run: StartRun
) -> None:
    """vLLM's attention on a CPU needs heads of 32. Larger weights would leave Gemma 3 one likely token."""
    run = start_run(
        other_family_task(tmp_path, kind, hidden_size=128, head_dim=32, initializer_range=0.03),
        engine__backend="vllm",
        engine__options=f"{{python = {json.dumps(VLLM_PYTHON)}}}",
        engine__num_engines=1,
        eval__path=tmp_path / "prompts.jsonl",
        eval__num_prompts=4,
    )
    ended = run.succeed(timeout_s=800)
    assert " lost (" not in ended.out + ended.err
    run.audit("--deep", "8", timeout_s=200)
    steps = metrics(run.out)
    assert len(steps) == 4
    assert max(step["mismatch/logprob_abs_diff_max"] for step in steps) < 1e-3
    assert steps[0]["actor/entropy"] > 1.0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine.backend": None}, "engine.backend: DORA-RL's engine does not support .*gemma3_text"),
        ({"trainer.model": "dora"}, "trainer.model = dora: .* set trainer.model = auto"),
        (
            {"trainer.lora_rank": "2", "trainer.lora_targets": "['q_proj', 'qkv_proj']"},
            "trainer.lora_targets names qkv_proj: .* gemma3_text .* are q_proj, .*name some of these",
        ),
    ],
)
def test_what_another_family_cannot_be_combined_with_is_rejected_early(
    changes: dict[str, str | None], message: str, tmp_path: Path
) -> None:
    given = {"engine.backend": "transformers", "orchestrator.placement": "static"} | changes
    overrides = [f"{key}={value}" for key, value in given.items() if value is not None]
    with pytest.raises(ConfigError, match=message):
        RunSetup.make(read_config(other_family_task(tmp_path), overrides), tmp_path / "run")
