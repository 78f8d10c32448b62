"""The digest of a safetensors file, by the process of a server that reads it.

That process has no package `dora`, so the file `dora/model/digest.py` is loaded by its path.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import numpy as np

_DIGEST_FILE = Path(__file__).parents[3] / "model" / "digest.py"


def _load_digest_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dora_digest_of_bytes", _DIGEST_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_digest = _load_digest_module()


def safetensors_digest(path: str) -> str:
    """Digest (32 hex digits) of the data of a safetensors file.

    If its tensors lie in the order of the flat buffer, it equals `dora.model.weights.weight_digest` of the
    buffer.
    """
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    digest: str = _digest.bytes_digest(content[begin:])
    return digest
