"""The operations of a decode step: linear layers, one per version, and the rest, over rows of all versions at
once.

`eager` is plain torch: the reference, and the fallback without numba. `numba_kernels` is the fast one on a
CPU, `triton_kernels` the one for GPUs. Each row reads the norm weights of its own version slot.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.engine.kernels.eager import EagerKernels
from dora.engine.kernels.workspace import ForwardBatch, Workspace
from dora.engine.request import EngineError

CHOICES = ("auto", "numba", "eager", "triton")


class Linear(Protocol):
    """out [N, M] = x [N, K] times weights [M, K] transposed, plus the bias if there is one."""

    def __call__(self, x: Tensor, /, *, out: Tensor) -> object: ...


class Kernels(Protocol):
    """Operations on the first len(batch) rows of the buffers of a Workspace."""

    name: str

    def add_norm(self, batch: ForwardBatch, offset: int) -> None:
        """x += delta; hidden = RMS norm of x, with the weights at `offset` of each row's slot."""

    def attend(self, batch: ForwardBatch, positions: NDArray[np.int64], layer: int) -> None:
        """qkv -> attended: norm q and k (if the model does), apply RoPE, write k and v at `positions`,
        attend.
        """

    def swiglu(self, batch: ForwardBatch) -> None:
        """gate_up -> gated: silu(gate) * up."""

    def linear(self, weights: Tensor, bias: Tensor | None) -> Linear:
        """A linear layer with weights [M, K] in a slot; each call reads the slot's current memory."""


def choose_kernels(name: str, workspace: Workspace) -> Kernels:
    """Kernels by name; "auto": Triton's on a GPU, else numba's if they can run, else eager ones."""
    if name not in CHOICES:
        raise EngineError(f"kernels = {name!r} must be one of {', '.join(CHOICES)}")
    is_gpu, is_fp32 = workspace.device.type == "cuda", workspace.dtype == torch.float32
    if is_gpu or name == "triton":
        return _triton(name, workspace)
    if name == "eager" or (name == "auto" and not is_fp32):
        return EagerKernels(workspace)
    if not is_fp32:
        raise EngineError('kernels = "numba" supports dtype = "float32" only; set kernels = "auto"')
    try:
        from dora.engine.kernels.numba_kernels import NumbaKernels
    except (ImportError, RuntimeError) as error:  # RuntimeError: numba cannot write its cache
        if name == "numba":
            raise EngineError(
                f'kernels = "numba" cannot be loaded: {error}; install numba or set kernels = "eager"'
            ) from error
        return EagerKernels(workspace)
    return NumbaKernels(workspace)


def _triton(name: str, workspace: Workspace) -> Kernels:
    if name not in ("auto", "triton"):
        raise EngineError(f'kernels = {name!r} runs on a CPU only; set kernels = "auto" or device = "cpu"')
    try:
        from dora.engine.kernels.triton_kernels import IS_INTERPRETED, TritonKernels
    except ImportError as error:
        raise EngineError('device = "cuda" and kernels = "triton" need Triton; pip install triton') from error
    if workspace.device.type == "cpu" and not IS_INTERPRETED:
        raise EngineError('kernels = "triton" needs device = "cuda", or TRITON_INTERPRET=1 to test on a CPU')
    return TritonKernels(workspace)
