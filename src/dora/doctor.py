"""`dora doctor`: what an installation can do on this machine, and which kernels engines will run.

Everything is tried, nothing is guessed: a kernel is listed if it can be imported now.
"""

from __future__ import annotations

import os
import platform
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import torch

import dora

_PACKAGES = ("torch", "numpy", "numba", "triton", "tokenizers", "safetensors", "transformers")


def report() -> str:
    """A table of names and findings."""
    findings = {
        "dora": dora.__version__,
        "python": f"{platform.python_version()} on {platform.platform()}",
        **{package: _version(package) for package in _PACKAGES},
        "kernels": _kernels(),
        "torch threads": f"{torch.get_num_threads()} of {os.cpu_count()} cores, "
        f"OMP_NUM_THREADS={os.environ.get('OMP_NUM_THREADS', 'unset')}; workers of a run use one each",
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "GPU": _gpus(),
    }
    return "\n".join(f"{name:<15}{finding}" for name, finding in findings.items())


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"


def _kernels() -> str:
    """What `kernels = "auto"` gives an engine, and why."""
    try:
        import_module("dora.engine.kernels.fused")
    except (ImportError, RuntimeError) as error:
        return f'eager, because numba cannot be used: {error}; repair it with "pip install numba"'
    return "numba"


def _gpus() -> str:
    """Names, and what engines with `device = "cuda"` run there."""
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    if not names:
        return "none"
    try:
        import_module("dora.engine.kernels.triton_kernels")
    except ImportError as error:
        return (
            f'{", ".join(names)}: of no use, because Triton cannot be imported: {error}; "pip install triton"'
        )
    return f'{", ".join(names)}: engines with device = "cuda" run the Triton kernels and CUDA graphs there'
