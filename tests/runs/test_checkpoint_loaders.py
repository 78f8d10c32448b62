"""A checkpoint in lm-eval, PEFT and transformers, unmodified: `make test-loaders`."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runs.other_families import FITTING, other_family_task
from tests.runtime.tiny import write_task

PROGRAM = Path(__file__).with_name("load_checkpoint.py")
PYTHON = os.environ.get("LOADERS_PYTHON", sys.executable)  # that has lm-eval and PEFT


@pytest.mark.loaders
@pytest.mark.parametrize("kind", ["own", "phi3"])
def test_lm_eval_and_peft_load_a_checkpoint(kind: str, tmp_path: Path, start_run: StartRun) -> None:
    task = write_task(tmp_path) if kind == "own" else other_family_task(tmp_path, kind)
    changes = {} if kind == "own" else FITTING
    run = start_run(task, run__steps=3, trainer__lora_rank=4, trainer__lr=0.05, **changes)
    assert run.end().code == 0, run.end()
    folders = [str(task.parent / "start"), str(run.out / "checkpoints" / "step-3")]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(task.parent / "hf")}
    done = subprocess.run(
        [PYTHON, str(PROGRAM), *folders], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "accuracy 0.5"
