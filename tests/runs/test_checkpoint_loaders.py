"""A checkpoint in other projects, unmodified: `make test-loaders`, and `make test-vllm` for vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from tests.runs.conftest import StartRun
from tests.runs.other_families import FITTING, other_family_task
from tests.runtime.tiny import write_task
from transformers import AutoModelForCausalLM, AutoTokenizer

from dora.engine.backends.vllm import CPU_ENVIRONMENT, ENVIRONMENT

PYTHON = os.environ.get("LOADERS_PYTHON", sys.executable)  # that has lm-eval and PEFT
VLLM_PYTHON = os.environ.get("VLLM_PYTHON", sys.executable)  # that has vLLM
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


def load_elsewhere(python: str, program: str, run: Path, base: Path, changes: dict[str, str]) -> list[str]:
    """What a program of this folder prints about the base model and the last checkpoint of a run, by line."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= OFFLINE | changes
    command = [python, str(Path(__file__).with_name(program)), str(base), str(run / "checkpoints" / "step-3")]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.mark.loaders
@pytest.mark.parametrize("kind", ["own", "phi3"])
def test_lm_eval_and_peft_load_a_checkpoint(kind: str, tmp_path: Path, start_run: StartRun) -> None:
    task = write_task(tmp_path) if kind == "own" else other_family_task(tmp_path, kind)
    changes = {} if kind == "own" else FITTING
    run = start_run(task, run__steps=3, trainer__lora_rank=4, trainer__lr=0.05, **changes)
    run.succeed()
    changed = {"HF_HOME": str(tmp_path / "hf")}
    lines = load_elsewhere(PYTHON, "load_checkpoint.py", run.out, tmp_path / "start", changed)
    assert lines[-1] == "accuracy 0.5"


@pytest.mark.vllm
@pytest.mark.timeout(900)  # vLLM takes minutes to import on busy cores
@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_vllm_loads_a_checkpoint_and_its_adapter(kind: str, tmp_path: Path, start_run: StartRun) -> None:
    """Greedy responses are those of transformers. vLLM's attention on a CPU needs heads of 32."""
    task = other_family_task(tmp_path, kind, hidden_size=128, head_dim=32)
    run = start_run(task, run__steps=3, trainer__lora_rank=4, trainer__lr=0.05, **FITTING)
    run.succeed()
    changed = {**ENVIRONMENT, **CPU_ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    lines = load_elsewhere(VLLM_PYTHON, "load_checkpoint_vllm.py", run.out, tmp_path / "start", changed)
    logprobs, response = (torch.tensor([*map(float, line.split())]) for line in lines[-2:])
    checkpoint = run.out / "checkpoints" / "step-3"
    prompt = AutoTokenizer.from_pretrained(checkpoint).encode("12,30:")
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    logits = model(torch.tensor([[*prompt, *response.long().tolist()]])).logits[0, len(prompt) - 1 : -1]
    found = logits.log_softmax(-1).max(-1)
    assert found.indices.tolist() == response.tolist()
    torch.testing.assert_close(logprobs, found.values, rtol=0, atol=1e-3)
