"""A version as a safetensors file whose data are the flat buffer, byte for byte.

So the digest of the data is that of the version, whoever computes it from the file.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from torch import Tensor

from dora.model.weights import Layout

_NAMES = {torch.float32: "F32", torch.bfloat16: "BF16"}


def write_safetensors(path: Path, layout: Layout, flat: Tensor) -> None:
    """Write `flat` ([numel], fp32 or bf16, on the CPU) under Hugging Face names, in the layout's order."""
    size, header = flat.element_size(), {}
    for name, shape in layout.shapes.items():
        begin = layout.offsets[name] * size
        offsets = [begin, begin + math.prod(shape) * size]
        header[name] = {"dtype": _NAMES[flat.dtype], "shape": shape, "data_offsets": offsets}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.write(flat.contiguous().view(torch.uint8).numpy().data)
