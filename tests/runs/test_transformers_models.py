"""A run whose model transformers computes, in the trainer and in the engines."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runs.conftest import StartRun
from tests.runs.other_families import FITTING, other_family_task
from tests.runtime.running import Run, dora, metrics
from tests.runtime.tiny import write_task
from transformers import AutoModelForCausalLM

from dora.config.load import read_config
from dora.errors import ConfigError
from dora.runtime.run_setup import RunSetup


def test_the_guarantees_hold_for_another_family_when_an_engine_crashes(tmp_path: Path) -> None:
    """The trainer has two ranks and a critic."""
    out = tmp_path / "run"
    run = Run(
        other_family_task(tmp_path),
        out,
        run__steps=4,
        eval__path=tmp_path / "prompts.jsonl",
        eval__num_prompts=4,
        trainer__num_ranks=2,
        algorithm__adv_estimator="gae",
        algorithm__filter_groups="false",
        **FITTING,
    )
    try:
        run.wait_for_steps(2)
        run.workers()[0].kill()
        ended = run.end()
    finally:
        run.kill_all()
    assert ended.code == 0, ended.err
    audit = dora("audit", out, "--deep", "4")
    assert audit.code == 0, audit.out
    steps = metrics(out)
    assert len(steps) == 4
    assert max(step["mismatch/logprob_abs_diff_max"] for step in steps) < 1e-4
    saved = AutoModelForCausalLM.from_pretrained(out / "checkpoints" / "step-4")
    started = AutoModelForCausalLM.from_pretrained(tmp_path / "start")
    assert type(saved) is type(started)
    trained, initial = saved.state_dict(), started.state_dict()
    assert trained.keys() == initial.keys()
    assert not any(torch.equal(trained[name], initial[name]) for name in initial)


def test_transformers_trains_what_the_own_engines_generate(tmp_path: Path, start_run: StartRun) -> None:
    run = start_run(write_task(tmp_path), trainer__model="transformers")
    ended = run.end()
    assert ended.code == 0, ended.err
    assert dora("audit", run.out, "--deep", "4").code == 0
    steps = metrics(run.out)
    assert len(steps) == 4
    assert max(step["mismatch/logprob_abs_diff_max"] for step in steps) < 1e-5


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
