"""`dora doctor`: what an installation can do on this machine, and which kernels engines will run.

Everything is tried, nothing is guessed: a kernel is listed if it can be imported now.
"""

from __future__ import annotations

import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist

import dora
from dora.errors import RewardError
from dora.rewards.sandbox.cell import Cells

_PACKAGES = ("torch", "numpy", "numba", "triton", "tokenizers", "safetensors", "transformers")


def report() -> str:
    """A table of names and findings."""
    findings = {
        "dora": dora.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{package: _version(package) for package in _PACKAGES},
        "engines, cpu": _on_cpu(),
        "engines, cuda": _on_gpus(),
        "trainer": _trainer(),
        "code rewards": _cells(),
        "torch threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}; workers of a run use one each",
        "instructions": torch.backends.cpu.get_cpu_capability(),
    }
    return "\n".join(f"{name:<15}{finding}" for name, finding in findings.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _on_cpu() -> str:
    """What engines with `device = "cpu"` run by `kernels = "auto"`, in each dtype, and why."""
    try:
        import_module("dora.engine.kernels.fused")
    except (ImportError, RuntimeError) as error:
        return (
            f"eager kernels in float32 and bfloat16, because numba cannot be used: {error}; repair it with "
            '"pip install numba"'
        )
    return "numba kernels in float32, eager ones in bfloat16"


def _on_gpus() -> str:
    """What engines with `device = "cuda"` run, and where."""
    if not (names := _gpus()):
        why = "sees no GPU" if torch.version.cuda else "is built for CPUs only"
        return f"none: torch {torch.__version__} {why}"
    try:
        import_module("dora.engine.kernels.triton_kernels")
    except ImportError as error:
        return f'none: Triton cannot be imported on {", ".join(names)}: {error}; "pip install triton"'
    return f"Triton kernels and CUDA graphs in float32 and bfloat16, on {', '.join(names)}"


def _trainer() -> str:
    """Where a trainer can compute, and how several ranks of it would talk."""
    places, found = ["cpu", *_gpus()], torch.distributed.is_available()
    here = {"gloo": found and dist.is_gloo_available(), "NCCL": found and dist.is_nccl_available()}
    ranks = " and ".join(name for name, is_here in here.items() if is_here)
    return f"torch in float32 and bfloat16, on {', '.join(places)}; several ranks by {ranks or 'nothing'}"


def _cells() -> str:
    """Whether programs of answers can be run."""
    try:
        Cells()
    except RewardError as error:
        return str(error)
    return "programs of answers run confined by Landlock and seccomp"


def _gpus() -> list[str]:
    """Number, name and memory of each."""
    found = []
    for i in range(torch.cuda.device_count()):
        size = torch.cuda.get_device_properties(i).total_memory / 1e9
        found.append(f"cuda:{i} ({torch.cuda.get_device_name(i)}, {size:.0f} GB)")
    return found
