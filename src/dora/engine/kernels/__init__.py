"""The parts of a decode step that are no matrix product, over rows of all versions at once.

`eager` is plain torch: the reference, and the fallback where numba is missing. `fused` is
the fast one. Norm weights are per row: each row reads those of its own slot.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dora.engine.kernels.eager import EagerKernels
from dora.engine.sequence import EngineError
from dora.engine.workspace import Batch, Workspace

CHOICES = ("auto", "numba", "eager")


class Kernels(Protocol):
    """Operations on the buffers of a Workspace, for the first len(batch) of their rows."""

    name: str

    def add_norm(self, batch: Batch, offset: int) -> None:
        """x += delta; hidden = RMS norm of x, times the weights at `offset` of the row's slot."""

    def attend(self, batch: Batch, positions: NDArray[np.int64], layer: int) -> None:
        """qkv -> attended: q and k norm if any, RoPE, write k and v at `positions`, attend up to there."""

    def swiglu(self, batch: Batch) -> None:
        """gate_up -> gated: silu(gate) * up."""


def choose_kernels(name: str, workspace: Workspace) -> Kernels:
    """Kernels by name; "auto" takes numba's where numba can be imported."""
    if name not in CHOICES:
        raise EngineError(f"kernels = {name!r} must be one of {', '.join(CHOICES)}")
    if name == "eager":
        return EagerKernels(workspace)
    try:
        from dora.engine.kernels.fused import FusedKernels
    except ImportError as error:
        if name == "numba":
            raise EngineError('kernels = "numba" needs numba; install it or set "eager"') from error
        return EagerKernels(workspace)
    return FusedKernels(workspace)
