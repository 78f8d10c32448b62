"""Copies to a device for which the host does not wait."""

from __future__ import annotations

import torch
from torch import Tensor


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """`values` of the host on `device`.

    A GPU copies from pinned memory, which torch reuses only afterwards. A copy from other memory would make
    the host wait for all work that the stream has.
    """
    if device.type != "cuda":
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)
