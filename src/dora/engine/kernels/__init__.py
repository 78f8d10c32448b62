"""The parts of a decode step: products, one per version, and the rest, over rows of all versions at once.

`eager` is plain torch: the reference, and the fallback where numba is missing. `fused` is the
fast one on a CPU, `triton_kernels` the one for GPUs. Norm weights are per row: each row reads those
of its own slot.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.engine.kernels.eager import EagerKernels
from dora.engine.sequence import EngineError
from dora.engine.workspace import Batch, Workspace

CHOICES = ("auto", "numba", "eager", "triton")


class Product(Protocol):
    """x [N, K] times a matrix [M, K] transposed, plus its bias if it has one, into out [N, M]."""

    def __call__(self, x: Tensor, /, *, out: Tensor) -> object: ...


class Kernels(Protocol):
    """Operations on the buffers of a Workspace, for the first len(batch) of their rows."""

    name: str

    def add_norm(self, batch: Batch, offset: int) -> None:
        """x += delta; hidden = RMS norm of x, times the weights at `offset` of the row's slot."""

    def attend(self, batch: Batch, positions: NDArray[np.int64], layer: int) -> None:
        """qkv -> attended: q and k norm if any, RoPE, write k and v at `positions`, attend up to there."""

    def swiglu(self, batch: Batch) -> None:
        """gate_up -> gated: silu(gate) * up."""

    def product(self, weights: Tensor, bias: Tensor | None) -> Product:
        """The product with a matrix [M, K] of a slot, whose memory it reads when it is called."""


def choose_kernels(name: str, workspace: Workspace) -> Kernels:
    """Kernels by name; "auto" takes Triton's on a GPU, else numba's where they can run, else eager ones."""
    if name not in CHOICES:
        raise EngineError(f"kernels = {name!r} must be one of {', '.join(CHOICES)}")
    is_gpu, is_fp32 = workspace.device.type == "cuda", workspace.dtype == torch.float32
    if is_gpu or name == "triton":
        return _triton(name, workspace)
    if name == "eager" or (name == "auto" and not is_fp32):
        return EagerKernels(workspace)
    if not is_fp32:
        raise EngineError('kernels = "numba" compute in fp32 only; set "auto" or dtype = "float32"')
    try:
        from dora.engine.kernels.fused import FusedKernels
    except (ImportError, RuntimeError) as error:  # the latter where numba finds no place for a cache
        if name == "numba":
            raise EngineError(
                f'kernels = "numba" cannot run: {error}; install numba or set "eager"'
            ) from error
        return EagerKernels(workspace)
    return FusedKernels(workspace)


def _triton(name: str, workspace: Workspace) -> Kernels:
    if name not in ("auto", "triton"):
        raise EngineError(f'kernels = {name!r} run on a CPU only; set "auto" or device = "cpu"')
    try:
        from dora.engine.kernels.triton_kernels import IS_INTERPRETED, TritonKernels
    except ImportError as error:
        raise EngineError('device = "cuda" and kernels = "triton" need Triton: pip install triton') from error
    if workspace.device.type == "cpu" and not IS_INTERPRETED:
        raise EngineError('kernels = "triton" need device = "cuda"; to try them, set TRITON_INTERPRET=1')
    return TritonKernels(workspace)
