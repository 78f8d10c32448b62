"""Migrations of KV between GPUs of a machine: an engine copies blocks from the memory of another one's GPU.

An engine writes a CUDA IPC handle of its KV to a file, which other engines open. Only the checksums pass
through host memory: each device computes those of its own blocks, so a handle of other memory fails the
migration. KV on the CPU lies in that file itself; so tests run this code without a GPU.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from dora.engine.kv_transfer.pool import Checksums, KVBlocks


class DeviceKV:
    """The KV of an engine, `kv` [blocks, ...], which other engines read on its device; see `EngineKV`."""

    blocks: KVBlocks | None = None

    def __init__(self, kv: Tensor, path: Path) -> None:
        """Write the handle to the file `path`; on the CPU `kv` lies in this file. Raises OSError."""
        self._words = _as_words(kv, len(kv))
        if kv.is_cuda:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with open(descriptor, "wb") as file:
                pickle.dump(reduce_tensor(kv), file)

    def __len__(self) -> int:
        return len(self._words)

    @property
    def num_bytes(self) -> int:
        return self._words.shape[1] * self._words.itemsize

    @property
    def num_free(self) -> int:
        return len(self)

    def open_peer(self, path: Path) -> PeerDevice:
        return PeerDevice(path, self._words)

    def publish(self, blocks: Sequence[int]) -> tuple[list[int], Checksums]:
        """The host waits for the checksums, and with them for the steps that compute the KV."""
        return [*blocks], _checksums(_read(self._words, blocks))

    def release(self, published: Sequence[int]) -> None:
        """Published blocks are those of the request, which keeps them."""

    def receive(self, peer: PeerDevice, sources: Sequence[int], targets: Sequence[int]) -> Checksums:
        """The host waits for the checksums, and with them for the copy."""
        own = torch.tensor(targets, dtype=torch.int64, device=self._words.device)
        self._words[own] = _read(peer.words, sources).to(self._words.device)
        return _checksums(self._words[own])


class PeerDevice:
    """The KV of another engine, where it lies: `words` [blocks, words of 64 bits]."""

    def __init__(self, path: Path, own: Tensor) -> None:
        """Open the handle in the file `path`, for an engine whose own blocks are `own`.

        Raises OSError if that fails, ValueError if the blocks have another size.
        """
        if own.is_cuda:
            try:
                rebuild, arguments = pickle.loads(path.read_bytes())
                kv = rebuild(*arguments)
            except RuntimeError as error:  # of CUDA
                raise OSError(f"CUDA IPC: {error}") from error
            self.words = _as_words(kv, len(kv))
        else:
            num_bytes, block_bytes = path.stat().st_size, own.shape[1] * own.itemsize
            if num_bytes == 0 or num_bytes % block_bytes:
                raise ValueError(f"{path} has {num_bytes} bytes, this engine's blocks {block_bytes}")
            words = torch.from_file(str(path), shared=False, size=num_bytes // 8, dtype=torch.int64)
            self.words = words.view(-1, own.shape[1])
        if self.words.shape[1] != own.shape[1]:
            raise ValueError(f"the source's blocks have {self.words.shape[1]} words, own ones {own.shape[1]}")

    def __len__(self) -> int:
        return len(self.words)


def _as_words(kv: Tensor, num_blocks: int) -> Tensor:
    return kv.view(torch.uint8).view(num_blocks, -1).view(torch.int64)


def _read(words: Tensor, blocks: Sequence[int]) -> Tensor:
    return words[torch.tensor(blocks, dtype=torch.int64, device=words.device)]


def _checksums(words: Tensor) -> Checksums:
    """As `checksum_blocks`: integer sums of the words of each block, modulo 2^64."""
    return words.sum(1).cpu().numpy().view(np.uint64)
