"""The KV of a request in files, through which it moves from one inference server to another on a machine.

The folder `NAME` has a file of each worker. Its life:

    NAME.part    made by the engine, as the order to halt the request and export it; workers write into it
    NAME         renamed by the server's scheduler once all workers have written
    removed      by the server that has imported it, or by an engine once it is over its lease

A file has a JSON header, which says what the KV is of, and the blocks of each layer. Where servers read each
other's KV themselves, the folder has one file in place of those: a ticket, JSON that says where the KV is.
Nothing in these files is executed. This module runs in servers, which have no package `dora`, and in
DORA-RL's engines.
"""

from __future__ import annotations

import json
import mmap
import os
import shutil
import time
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

FORMAT = 1
HEADER_BYTES = 4096
TICKET_FILE = "ticket.json"
BY_TICKET = "by ticket"  # the first item of a layout whose KV other servers read by its ticket


class KVFileError(Exception):
    """A file is missing, damaged, or has KV of something else."""


class KVOrigin(NamedTuple):
    """What must be equal on two servers so that one can use the KV of the other.

    `weight_digest` is that of the weights as the worker has read them. `layout` describes a block: the
    server's version and its number of workers, dtype, layers, and shape of a layer's block.
    """

    weight_digest: str
    layout: tuple[str, ...]


def layout_of(
    server: Sequence[str], layers: Sequence[Tensor], num_workers: int, block_size: int
) -> tuple[str, ...]:
    """The `layout` of a `KVOrigin`; empty if the layers' blocks are not of one shape."""
    kinds = {(str(layer.dtype), *map(str, layer.shape[1:])) for layer in layers}
    if len(kinds) != 1:
        return ()
    sizes = (num_workers, len(layers), block_size)
    return (*server, layers[0].device.type, *map(str, sizes), *kinds.pop())


class KVHeader(NamedTuple):
    """Header of a file. `num_tokens` tokens have KV in `num_blocks` blocks of each layer."""

    origin: KVOrigin
    num_tokens: int
    num_blocks: int
    num_bytes: int  # of the blocks
    checksum: int


class Ticket(NamedTuple):
    """KV of `num_tokens` tokens at a server; `source` says where, as vLLM's `kv_transfer_params`."""

    num_tokens: int
    num_bytes: int
    source: dict[str, Any]


def part_folder(folder: Path) -> Path:
    """Where the workers write."""
    return folder.with_name(folder.name + ".part")


def order_export(folder: Path) -> None:
    """Let the server halt a request and export its KV. Raises OSError."""
    part_folder(folder).mkdir(mode=0o700)


class ExportOrders:
    """The exports that engines order of a server's unfinished requests, each by `order_export`."""

    def __init__(self) -> None:
        self._pool: Path | None = None  # the parent of all folders
        self._exportable: dict[str, Any] = {}  # requests, by the names of their part folders

    def add(self, folder: Path, request: Any) -> None:
        """A new request, whose KV may be ordered into `folder`."""
        part = part_folder(folder)
        self._pool, self._exportable[part.name] = part.parent, request

    def remove(self, folder: Path) -> None:
        """The request has ended."""
        self._exportable.pop(part_folder(folder).name, None)

    def exportable(self) -> list[Any]:
        """The unfinished requests whose KV may be ordered."""
        return [*self._exportable.values()]

    def ordered(self) -> list[Any]:
        """The requests whose export is ordered."""
        if self._pool is None or not self._exportable:
            return []
        try:
            names = {*os.listdir(self._pool)}
        except FileNotFoundError:  # its engine has ended
            return []
        return [self._exportable[name] for name in self._exportable.keys() & names]


def remove(folder: Path) -> None:
    """Remove a folder, whether it is whole or not."""
    shutil.rmtree(folder, ignore_errors=True)
    shutil.rmtree(part_folder(folder), ignore_errors=True)


def remove_expired(parent: Path, lease_s: float) -> None:
    """Remove what was written more than `lease_s` ago and never imported."""
    for folder in parent.iterdir():
        try:
            age_s = time.time() - folder.stat().st_mtime
        except FileNotFoundError:  # a server has just imported it
            continue
        if age_s > lease_s:
            shutil.rmtree(folder, ignore_errors=True)


def worker_file(folder: Path, rank: int) -> Path:
    return folder / f"{rank}.kv"


def read_headers(folder: Path, num_workers: int) -> list[KVHeader]:
    """Headers of a whole folder. Raises KVFileError."""
    return [_read_header(worker_file(folder, rank)) for rank in range(num_workers)]


def write_ticket(folder: Path, ticket: Ticket) -> None:
    """Raises OSError."""
    (folder / TICKET_FILE).write_text(json.dumps([FORMAT, ticket]), encoding="utf-8")


def read_ticket(folder: Path) -> Ticket:
    """The ticket in a folder. Raises KVFileError."""
    try:
        return parse_ticket((folder / TICKET_FILE).read_bytes())
    except OSError as error:
        raise KVFileError(f"{folder} has no ticket: {error}") from error


def parse_ticket(content: bytes) -> Ticket:
    """Raises KVFileError for anything but a ticket."""
    try:
        number, (num_tokens, num_bytes, source) = json.loads(content)
        ticket = Ticket(int(num_tokens), int(num_bytes), dict(source))
    except (TypeError, ValueError) as error:
        raise KVFileError(f"it is no ticket of format {FORMAT}: {error}") from error
    if number != FORMAT:
        raise KVFileError(f"it is no ticket of format {FORMAT}")
    return ticket


def write_blocks(
    path: Path, origin: KVOrigin, layers: Sequence[Tensor], blocks: Sequence[int], num_tokens: int
) -> None:
    """Write blocks of all layers; layers are [blocks, ...], of one shape and dtype. Raises OSError."""
    sample = layers[0]
    num_bytes = len(layers) * len(blocks) * sample[0].numel() * sample.element_size()
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        # A write to the mapping of a full memory file system would end the server with SIGBUS.
        os.posix_fallocate(descriptor, 0, HEADER_BYTES + num_bytes)
        with mmap.mmap(descriptor, HEADER_BYTES + num_bytes) as memory:
            checksum = _copy_to_file(memory, layers, blocks)
            header = KVHeader(origin, num_tokens, len(blocks), num_bytes, checksum)
            memory[:HEADER_BYTES] = json.dumps([FORMAT, header]).encode().ljust(HEADER_BYTES)
    finally:
        os.close(descriptor)


def read_blocks(
    path: Path, origin: KVOrigin, layers: Sequence[Tensor], blocks: Sequence[int], first: int
) -> None:
    """Copy the blocks of a file, without its `first` ones, into `blocks` of all layers.

    Raises KVFileError if the file is of other weights or another layout than `origin`, or is damaged.
    """
    header, block_bytes = _read_header(path), len(layers) * layers[0][0].numel() * layers[0].element_size()
    if header.origin != origin:
        raise KVFileError(f"{path} has KV of {header.origin}; this server has {origin}")
    if header.num_bytes != header.num_blocks * block_bytes:
        raise KVFileError(f"{path} has {header.num_bytes} bytes in {header.num_blocks} blocks")
    if first + len(blocks) > header.num_blocks:
        raise KVFileError(f"{path} has {header.num_blocks} blocks; {first + len(blocks)} are needed")
    # Copied: a mapping cannot be closed while a tensor uses it. In memory, a copy costs little.
    content = torch.frombuffer(bytearray(path.read_bytes()), dtype=torch.uint8)[HEADER_BYTES:]
    stored = content.view(layers[0].dtype).view(len(layers), header.num_blocks, *layers[0].shape[1:])
    copy_in(stored, header.checksum, layers, blocks, first)


def copy_out(layers: Sequence[Tensor], blocks: Sequence[int], target: Tensor) -> int:
    """Copy blocks of all layers to `target` [layers, blocks, ...] in host memory. Returns their checksum."""
    device = layers[0].device
    index = torch.tensor(blocks, device=device)
    for layer, copy in zip(layers, target, strict=True):
        if device.type == "cpu":
            torch.index_select(layer, 0, index, out=copy)
        else:
            copy.copy_(layer.index_select(0, index))
    return _checksum(target)


def copy_in(
    stored: Tensor, checksum: int, layers: Sequence[Tensor], blocks: Sequence[int], first: int
) -> None:
    """Copy what `copy_out` has stored, without its `first` blocks, into `blocks` of all layers.

    Raises KVFileError if the checksum of `stored` is another one.
    """
    if _checksum(stored) != checksum:
        raise KVFileError("the KV is damaged: its checksum differs")
    index = torch.tensor(blocks, device=layers[0].device)
    for layer, source in zip(layers, stored, strict=True):
        layer.index_copy_(0, index, source[first : first + len(blocks)].to(layer.device))


def _copy_to_file(memory: mmap.mmap, layers: Sequence[Tensor], blocks: Sequence[int]) -> int:
    """Copy blocks behind the header. Returns their checksum. No tensor may use the mapping afterwards."""
    content = torch.frombuffer(memory, dtype=torch.uint8, offset=HEADER_BYTES)
    stored = content.view(layers[0].dtype).view(len(layers), len(blocks), *layers[0].shape[1:])
    return copy_out(layers, blocks, stored)


def _checksum(stored: Tensor) -> int:
    """CRC of the sum of each block's bytes as 64-bit words; `stored` is [layers, blocks, ...]."""
    rows = stored.reshape(stored.shape[0] * stored.shape[1], -1)
    words = rows.view(torch.int64) if rows.shape[1] * rows.element_size() % 8 == 0 else rows.view(torch.uint8)
    return zlib.crc32(words.sum(1, dtype=torch.int64).numpy().tobytes())


def _read_header(path: Path) -> KVHeader:
    try:
        with path.open("rb") as file:
            content = file.read(HEADER_BYTES)
            size = os.fstat(file.fileno()).st_size
    except OSError as error:
        raise KVFileError(f"{path} cannot be read: {error}") from error
    header = _parse_header(content)
    if header is None or size != HEADER_BYTES + header.num_bytes:
        raise KVFileError(f"{path} is no whole KV file of format {FORMAT}")
    return header


def _parse_header(content: bytes) -> KVHeader | None:
    try:
        number, ((digest, layout), *numbers) = json.loads(content)
        fields: list[Any] = [int(value) for value in numbers]
        header = KVHeader(KVOrigin(str(digest), tuple(map(str, layout))), *fields)
    except (TypeError, ValueError):  # UnicodeDecodeError and JSONDecodeError among them
        return None
    return header if number == FORMAT else None
