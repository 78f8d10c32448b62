"""The file of a version: safetensors, with Hugging Face names, so that a server's own loader can read it.

The tensors lie in the order of the flat buffer without gaps, so the data of the file are the buffer. The
header's `__metadata__` has the version, the digest of the data, and the number of this format.
"""

from __future__ import annotations

import json
import math
import os
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.errors import ModelError
from dora.model.digest import PIECE_BYTES, Sums, digest_pieces, leaf_sums
from dora.model.weights import Shapes, as_bytes, device_leaf_sums

FORMAT = "2"  # 2: safetensors; the first format had raw numbers and no header
SUFFIX = ".safetensors"
OLD_SUFFIXES = (".f32", ".bf16")  # of the first format
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_NAMES = {"float32": "F32", "bfloat16": "BF16"}  # safetensors' names
_ALIGNMENT = 4096  # of the data in the file, in bytes: a page
_DEVICE_PIECE_BYTES = 2**24  # of weights on a GPU; digesting takes three times that in each thread
_LENGTH_BYTES = 8  # of the header's length, with which a safetensors file begins


@dataclass(frozen=True)
class VersionHeader:
    """What the header of a version's file says. The data begin at byte `begin`."""

    version: int
    digest: str
    dtype: str
    shapes: Shapes  # by name, in the order of the data
    begin: int

    @property
    def numel(self) -> int:
        """Number of weights."""
        return sum(map(math.prod, self.shapes.values()))

    @property
    def num_bytes(self) -> int:
        """Size of the file."""
        return self.begin + self.numel * DTYPES[self.dtype].itemsize

    def encode(self) -> bytes:
        """The file up to the data, `begin` bytes."""
        metadata = {
            "format": "pt",
            "dora_format": FORMAT,
            "version": f"{self.version}",
            "digest": self.digest,
        }
        header: dict[str, object] = {"__metadata__": metadata}
        size, begin = DTYPES[self.dtype].itemsize, 0
        for name, shape in self.shapes.items():
            end = begin + math.prod(shape) * size
            header[name] = {"dtype": _NAMES[self.dtype], "shape": [*shape], "data_offsets": [begin, end]}
            begin = end
        text = json.dumps(header).encode()
        length = -(-(_LENGTH_BYTES + len(text)) // _ALIGNMENT) * _ALIGNMENT - _LENGTH_BYTES
        return length.to_bytes(_LENGTH_BYTES, "little") + text.ljust(length)


def write_version(path: Path, version: int, flat: Tensor, dtype: str, shapes: Shapes) -> str:
    """Write `flat` ([numel], on any device), rounded to `dtype`, to a new file. Returns the data's digest.

    Threads round, digest and write pieces. Weights on a GPU are rounded and digested there, and reach the
    host through pinned memory. Raises OSError.
    """
    flat, torch_dtype, is_on_device = flat.detach(), DTYPES[dtype], flat.device.type != "cpu"
    header = VersionHeader(version, "0" * 32, dtype, shapes, begin=0)
    if header.numel != flat.numel():
        raise ValueError(f"{flat.numel()} weights do not fit shapes of {header.numel}")
    data_begin = len(header.encode())

    def write_piece(begin: int, end: int) -> Sums:
        piece = flat[begin // torch_dtype.itemsize : end // torch_dtype.itemsize].to(torch_dtype)
        content = as_bytes(_to_pinned(piece) if is_on_device else piece)
        sums = device_leaf_sums(piece) if is_on_device else leaf_sums(content)
        _write(file, content.data, data_begin + begin)
        return sums

    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        piece_bytes = _DEVICE_PIECE_BYTES if is_on_device else PIECE_BYTES
        digest = digest_pieces(header.num_bytes, write_piece, piece_bytes)
        _write(file, replace(header, digest=digest).encode(), 0)
    finally:
        os.close(file)
    return digest


def read_header(path: Path) -> VersionHeader:
    """The header of a version's file. Raises FileNotFoundError, and ModelError for any other file."""
    with path.open("rb") as file:
        return _read_header(path, file)


def map_version(path: Path) -> tuple[VersionHeader, Tensor]:
    """Header and weights [numel] of a version's file, mapped to be read only. Raises as `read_header`.

    Both are of one file, also if the version is dropped or published again meanwhile.
    """
    with path.open("rb") as file:
        header = _read_header(path, file)
        content = torch.from_numpy(np.asarray(np.memmap(file, np.uint8, "c")))
    return header, content[header.begin :].view(DTYPES[header.dtype])


def parse_version(content: NDArray[np.uint8]) -> tuple[VersionHeader, Tensor]:
    """Header and weights [numel] of a version's file in memory, without a copy. Raises ModelError."""
    length = int.from_bytes(content[:_LENGTH_BYTES].tobytes(), "little")
    text = content[_LENGTH_BYTES : _LENGTH_BYTES + length].tobytes() if length <= len(content) else b""
    header = _parse_header("the received version", text, len(content))
    with warnings.catch_warnings(action="ignore"):  # torch warns that `content` may be read-only
        return header, torch.from_numpy(content[header.begin :]).view(DTYPES[header.dtype])


def _read_header(path: Path, file: BinaryIO) -> VersionHeader:
    length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
    size = os.fstat(file.fileno()).st_size
    text = file.read(length) if length <= size else b""
    return _parse_header(str(path), text, size)


def _parse_header(what: str, text: bytes, size: int) -> VersionHeader:
    """The header with this text of a file of `size` bytes, which must be whole."""
    remedy = "it is damaged, or another version of DORA-RL wrote it: use the version that wrote it"
    try:
        tensors = json.loads(text)
        metadata = tensors.pop("__metadata__")
        found = metadata["dora_format"]
        if found != FORMAT:
            raise ModelError(
                f"{what} has format {found!r} of versions; this DORA-RL reads {FORMAT!r}: {remedy}"
            )
        names = {name: dtype for dtype, name in _NAMES.items()}
        (dtype,) = {names[entry["dtype"]] for entry in tensors.values()}
        shapes = {name: tuple(entry["shape"]) for name, entry in tensors.items()}
        begin = _LENGTH_BYTES + len(text)
        header = VersionHeader(int(metadata["version"]), metadata["digest"], dtype, shapes, begin)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{what} is not the file of a version; {remedy}") from error
    if header.num_bytes != size:
        raise ModelError(f"{what} has {size:,} bytes instead of {header.num_bytes:,}; {remedy}")
    return header


def _to_pinned(piece: Tensor) -> Tensor:
    """A copy in pinned memory, to which a GPU copies several times as fast; torch reuses the memory."""
    return torch.empty_like(piece, device="cpu", pin_memory=True).copy_(piece)


def _write(file: int, content: memoryview | bytes, offset: int) -> None:
    view = memoryview(content)
    while len(view):
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written
