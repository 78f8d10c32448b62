"""Migrations of private KV, such as a GPU's: blocks pass through host memory that other engines map.

The source copies blocks from its device to a staging area in a file, and the destination copies them from
there into a landing area of its own and on to its device. Both areas are pinned on a GPU. The checksums of
both sides are of what lies in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from dora.engine.block_manager import num_staging_blocks
from dora.engine.kv_transfer.pool import (
    Checksums,
    KVBlocks,
    PeerPool,
    SharedKV,
    checksum_blocks,
    create_pool,
    view_as_blocks,
)

_LANDING_BYTES = 4 * 2**20


class StagedKV(SharedKV):
    """The KV of an engine, `kv` [blocks, ...] on its device: what other engines map is a staging area."""

    def __init__(self, kv: Tensor, path: Path) -> None:
        """Create the staging area in the file `path`. Raises EngineError if there is no space for it."""
        self._kv = kv.view(torch.uint8).view(len(kv), -1)
        num_bytes = self._kv.shape[1]
        num_staged = num_staging_blocks(num_bytes, len(kv))
        super().__init__(view_as_blocks(create_pool(path, num_staged * num_bytes), num_staged))
        self._staging = torch.from_numpy(self.blocks.view(np.uint8))
        num_landing = min(num_staged, max(1, _LANDING_BYTES // num_bytes))
        self._landing = torch.empty(num_landing, num_bytes, dtype=torch.uint8, pin_memory=kv.is_cuda)
        self._landing_blocks: KVBlocks = self._landing.numpy().view(np.uint64)
        if kv.is_cuda:  # so that it copies to the area directly; it is slower where that fails
            torch.cuda.cudart().cudaHostRegister(self._staging.data_ptr(), self._staging.numel(), 0)
        self._free = list(range(num_staged - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def publish(self, blocks: Sequence[int]) -> tuple[list[int], Checksums]:
        staged = [self._free.pop() for _ in blocks]
        for place, block in zip(staged, blocks, strict=True):
            self._staging[place].copy_(self._kv[block], non_blocking=True)
        self._wait_for_copies()
        return staged, checksum_blocks(self.blocks, staged)

    def release(self, published: Sequence[int]) -> None:
        self._free += published

    def receive(self, peer: PeerPool, sources: Sequence[int], targets: Sequence[int]) -> Checksums:
        parts, size = [np.empty(0, np.uint64)], len(self._landing)
        for start in range(0, len(sources), size):
            own = targets[start : start + size]
            parts.append(peer.copy(sources[start : start + size], self._landing_blocks, range(len(own))))
            for place, block in enumerate(own):
                self._kv[block].copy_(self._landing[place], non_blocking=True)
            self._wait_for_copies()  # the next part lands in the same place
        return np.concatenate(parts)

    def _wait_for_copies(self) -> None:
        """Copies are made in the order of the steps that compute and read the KV."""
        if self._kv.is_cuda:
            torch.cuda.current_stream(self._kv.device).synchronize()
