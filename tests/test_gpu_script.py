"""`benchmarks/gpu.sh` runs anywhere: at tiny sizes on the CPU, its kernels in Triton's interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.timeout(300)
def test_the_gpu_benchmarks_run_at_tiny_sizes_on_the_cpu(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    environment = os.environ | {"OUT": str(tmp_path), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "benchmarks" / "gpu.sh"), "--tiny", "--device", "cpu"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    probes, engine = (
        json.loads((tmp_path / name).read_text()) for name in ("gpu_probes.json", "gpu_engine.json")
    )
    assert {row["probe"] for row in probes["rows"]} == {f"P{i}" for i in range(1, 9)}
    notes = [row["note"] for row in probes["rows"] if row["what"] == "not answered"]
    assert sorted(notes) == [
        "CUDA graphs need a GPU",
        "it does not run at tiny sizes",
        "varlen_attn needs a GPU",
        "varlen_attn needs a GPU",
    ]
    assert [row["part"] for row in engine["rows"]] == [
        "load", "decode", "decode", "versions", "versions", "versions", "nano", "arrivals", "switch"
    ]  # fmt: skip
