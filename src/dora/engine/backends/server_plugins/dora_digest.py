"""The digest and the tensors of a version, for the process of a server that reads its file or receives it.

That process has no package `dora`, so the file `dora/model/digest.py` is loaded by its path.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_DIGEST_FILE = Path(__file__).parents[3] / "model" / "digest.py"


def _load_digest_module() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dora_digest_of_bytes", _DIGEST_FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


_digest = _load_digest_module()
_BUFFER_BYTES = 2**26  # whole leaves


def safetensors_digest(path: str) -> str:
    """Digest (32 hex digits) of the data of a safetensors file.

    If its tensors lie in the order of the flat buffer, it equals `dora.model.weights.weight_digest` of the
    buffer.
    """
    content = np.asarray(np.memmap(path, np.uint8, "r"))
    begin = 8 + int.from_bytes(content[:8].tobytes(), "little")
    digest: str = _digest.bytes_digest(content[begin:])
    return digest


class FileLoad:
    """A load of a version's file in parts. A thread computes the digest of its data meanwhile."""

    def __init__(self, path: str) -> None:
        self.path, self._next_part = path, 0
        thread = ThreadPoolExecutor(1)
        self._digest = thread.submit(safetensors_digest, path)
        thread.shutdown(wait=False)  # it ends after this

    def read_part(self, path: str, part: int, num_parts: int) -> Iterator[tuple[str, Any]]:
        """The tensors of a part, with their names. A part has whole layers, whose tensors loaders may fuse.

        Raises RuntimeError for a part of another file, or out of order.
        """
        from safetensors import safe_open

        if (path, part) != (self.path, self._next_part):
            raise RuntimeError(f"part {part} of {path}: expected part {self._next_part} of {self.path}")
        with safe_open(path, "pt") as stored:
            layers = [[*names] for _, names in groupby(stored.offset_keys(), _layer_of)]
            for names in layers[len(layers) * part // num_parts : len(layers) * (part + 1) // num_parts]:
                yield from ((name, stored.get_tensor(name)) for name in names)
        self._next_part += 1

    def digest(self) -> str:
        return self._digest.result()


def _layer_of(name: str) -> str:
    """The first part of a tensor's name, which ends with the number of its layer; a name without: itself."""
    match = re.match(r".*?\.\d+\.", name)
    return match[0] if match else name


class StreamDigest:
    """The digest of bytes that arrive in parts. Threads compute it while more arrive."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(_digest.num_threads())
        self._sums: list[Future[Any]] = []
        self._buffer, self._num_buffered, self._num_bytes = self._new_buffer(), 0, 0

    def add(self, part: NDArray[np.uint8]) -> None:
        """Add the next bytes, which are copied."""
        self._num_bytes += len(part)
        while len(part):
            taken = min(len(part), _BUFFER_BYTES - self._num_buffered)
            self._buffer[self._num_buffered : self._num_buffered + taken] = part[:taken]
            self._num_buffered += taken
            part = part[taken:]
            if self._num_buffered == _BUFFER_BYTES:
                self._flush()

    def digest(self) -> str:
        """The digest (32 hex digits) of all bytes. Nothing can be added any more."""
        if self._num_buffered:
            self._flush()
        with self._threads:
            digest: str = _digest.combine((sums.result() for sums in self._sums), self._num_bytes)
        return digest

    def _flush(self) -> None:
        self._sums.append(self._threads.submit(_digest.leaf_sums, self._buffer[: self._num_buffered]))
        self._buffer, self._num_buffered = self._new_buffer(), 0

    @staticmethod
    def _new_buffer() -> NDArray[np.uint8]:
        return np.empty(_BUFFER_BYTES, np.uint8)
