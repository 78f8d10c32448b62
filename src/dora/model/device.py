"""Copies to a device for which the host does not wait, and functions compiled for a device."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

_Function = TypeVar("_Function", bound=Callable[..., Any])


@cache
def compiled(function: _Function, recomputes: bool = False) -> _Function:
    """`torch.compile(function)`, which runs norms and chains of elementwise operations as one kernel each.

    If it `recomputes`, its backward pass computes it again and saves its arguments alone.
    """
    # Batches with and without shared prompts or gradients have code of their own. To reach the limit, which
    # is that of the process, would be an error.
    torch._dynamo.config.recompile_limit = 64
    fused: Any = torch.compile(_recomputed(function) if recomputes else function, fullgraph=True)
    return cast(_Function, fused)


def _recomputed(function: Callable[..., Any]) -> Callable[..., Any]:
    def compute(*arguments: Any) -> Any:
        return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)

    return compute


def uncompiled(function: _Function) -> _Function:
    """`function` itself, in the place of `compiled`."""
    return function


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on `device`.

    A GPU copies from pinned memory, which torch reuses only afterwards. A copy from other memory would make
    the host wait for all work that the stream has.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
