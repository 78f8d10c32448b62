"""The digest and the tensors of a version, for the process of a server that reads its file or receives it.

That process has no package `dora`, so the file `dora/model/digest.py` is loaded by its path.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

ADAPTER_FILE = "adapter_model.safetensors"  # PEFT's name
_DIGEST_FILE = Path(__file__).parents[3] / "model" / "digest.py"
_spec = importlib.util.spec_from_file_location("dora_digest_of_bytes", _DIGEST_FILE)
assert _spec is not None
assert _spec.loader is not None
_digest = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(_digest)
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
    """A load of a version's file in parts. A thread computes the digest of its data meanwhile.

    A part has whole layers, whose tensors loaders may fuse: as many as fit into `max_bytes`, or one.
    """

    def __init__(self, path: str, max_bytes: float) -> None:
        self.path, self._parts = path, _parts(path, max_bytes)
        self._num_read = 0
        thread = ThreadPoolExecutor(1)
        self._digest = thread.submit(safetensors_digest, path)
        thread.shutdown(wait=False)  # the thread ends once it has the digest

    @property
    def is_read(self) -> bool:
        """Whether all parts have been read."""
        return self._num_read == len(self._parts)

    def read_part(self, path: str, part: int) -> Iterator[tuple[str, Any]]:
        """The tensors of a part, with their names. Raises RuntimeError for another file or another order."""
        if (path, part) != (self.path, self._num_read) or self.is_read:
            raise RuntimeError(f"part {part} of {path}: expected part {self._num_read} of {self.path}")
        self._num_read += 1
        return _tensors(path, self._parts[part])

    def digest(self) -> str:
        return self._digest.result()


def _parts(path: str, max_bytes: float) -> list[list[str]]:
    """The names of the tensors in each part, in the order of the file."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    parts: list[list[str]] = []
    start = 0
    for _, layer in groupby(sorted(header, key=lambda name: header[name]["data_offsets"]), _layer_of):
        names = [*layer]
        if not parts or header[names[-1]]["data_offsets"][1] - start > max_bytes:
            parts.append([])
            start = header[names[0]]["data_offsets"][0]
        parts[-1] += names
    return parts


def _tensors(path: str, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    with safe_open(path, "pt") as stored:
        yield from ((name, stored.get_tensor(name)) for name in names)


def _layer_of(name: str) -> str:
    """A tensor's name up to the number of its layer; the whole name if it has none."""
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
