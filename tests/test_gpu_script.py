"""`benchmarks/gpu.sh` runs anywhere: at tiny sizes on the CPU, its kernels in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parent.parent
STAGES = [
    "doctor", "gradient", "demo", "arrivals", "kernels", "fsdp", "publish", "engine-0.6B", "engine-8B",
    "runs", "migrations", "faults", "profile", "probes",
]  # fmt: skip
NOT_ON_A_CPU = {
    "CUDA graphs need a GPU",
    "it does not run at tiny sizes",
    "varlen_attn needs a GPU",
}
TESTED_ELSEWHERE = {"demo", "kernels"}  # a run of the demo, and tests of this folder
MEASURED_ONLY = {"arrivals", "engine-0.6B", "engine-8B", "probes"}  # their bounds are of speed


def gpu_script(out: Path, *arguments: str) -> tuple[subprocess.CompletedProcess[str], list[dict[str, Any]]]:
    """Run the script; returns what it printed, and the results of its stages."""
    environment = os.environ | {"OUT": str(out), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    found: list[dict[str, Any]] = json.loads((out / "gpu.json").read_text())["stages"]
    return done, found


@pytest.mark.timeout(600)
def test_every_stage_runs_at_tiny_sizes_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    names = [name for name in STAGES if name not in TESTED_ELSEWHERE]
    done, stages = gpu_script(tmp_path, "--tiny", "--device", "cpu", "--only", *names)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [stage["stage"] for stage in stages] == names
    rows = {stage["stage"]: stage["rows"] for stage in stages}
    assert all(row.get("is_met", True) for own in rows.values() for row in own)
    checked = {name for name, own in rows.items() if any("is_met" in row for row in own)}
    assert checked == {*names} - MEASURED_ONLY
    unanswered = [row["value"] for row in rows["probes"] if row["what"].endswith("not answered")]
    assert set(unanswered) == NOT_ON_A_CPU


@pytest.mark.skipif(torch.cuda.is_available(), reason="stages fail because there is no GPU")
def test_a_stage_that_fails_stops_no_other_and_its_number_is_the_exit_code(tmp_path: Path) -> None:
    done, stages = gpu_script(tmp_path, "--tiny", "--only", "fsdp", "arrivals")
    assert [stage["exit_code"] for stage in stages] == [1, 1]
    assert done.returncode == 1 + STAGES.index("arrivals")
    assert "failed: fsdp, arrivals" in done.stdout
    assert all("Error: " in stage["log"][-1] for stage in stages)


def test_a_stage_is_stopped_at_its_time_limit(tmp_path: Path) -> None:
    done, stages = gpu_script(tmp_path, "--tiny", "--device", "cpu", "--only", "doctor", "--limit-s", "0.1")
    assert (done.returncode, stages[0]["exit_code"]) == (1, "stopped after 0.1 s")
