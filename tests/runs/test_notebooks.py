"""The notebook and the sweep of `examples`, scaled down: `make test-notebooks`."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import dora

EXAMPLES = Path(__file__).parents[2] / "examples"
PROGRAM = Path(__file__).with_name("run_notebook.py")
PYTHON = os.environ.get("NOTEBOOKS_PYTHON", sys.executable)  # with DORA-RL, Optuna, nbclient and ipykernel

pytestmark = [pytest.mark.notebooks, pytest.mark.timeout(600)]


def run_program(*command: str | Path) -> str:
    done = subprocess.run([PYTHON, *map(str, command)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_cell_of_the_notebook_runs(tmp_path: Path) -> None:
    shutil.copy(EXAMPLES / "gcd.toml", tmp_path)
    shutil.copytree(EXAMPLES / "gcd-start", tmp_path / "gcd-start")
    text = (EXAMPLES / "notebook.ipynb").read_text()
    assert '"steps = 20\\n"' in text
    notebook = tmp_path / "notebook.ipynb"
    notebook.write_text(text.replace('"steps = 20\\n"', '"steps = 3\\n"'))
    output = run_program(PROGRAM, notebook)
    assert "metrics <table><tr><th>step</th>" in output
    assert "samples <table>" in output
    run = dora.load(tmp_path / "runs" / "notebook")
    assert (run.status.state, len(run.metrics())) == ("finished", 3)
    assert (run.folder / "report.html").is_file()


def test_a_sweep_names_its_best_trial(tmp_path: Path) -> None:
    output = run_program(EXAMPLES / "sweep.py", "--trials", "2", "--steps", "2", "--out", tmp_path)
    assert output.startswith("best: trial ")
    runs = [dora.load(tmp_path / f"trial-{number}") for number in range(2)]
    assert [len(run.metrics()) for run in runs] == [2, 2]
    assert len({run.config["trainer"]["lr"] for run in runs}) == 2


def test_a_slow_learner_is_pruned_and_stopped(tmp_path: Path) -> None:
    """A pruner that prunes at once stands for a run that is worse than others."""
    program = (
        "import optuna, sys, pathlib; sys.path.insert(0, sys.argv[1]); import sweep\n"
        "prune = optuna.pruners.ThresholdPruner(lower=1e9)\n"
        "study = optuna.create_study(pruner=prune)\n"
        "study.optimize(lambda t: sweep.objective(t, 1000, pathlib.Path(sys.argv[2])), n_trials=1)\n"
        "print(study.trials[0].state.name)\n"
    )
    assert run_program("-c", program, EXAMPLES, tmp_path) == "PRUNED\n"
    run = dora.load(tmp_path / "trial-0")
    assert run.status.state == "stopped"
    assert 0 < len(run.metrics()) < 1000
