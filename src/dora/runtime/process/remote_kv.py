"""Live migration between engines of different machines.

The files of a migration stay in a folder of the driver, where one rename decides which engine owns the
request; so the decision survives a crash of either engine. An engine on another machine sends each file
operation to the driver's broker. KV blocks go directly from the source's pool to the destination. Engines
wait for both between two decode steps, so every reply has a timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dora.curve import CurveAddress
from dora.engine.kv_transfer.handoff import MigrationFiles, TransferProgress
from dora.engine.kv_transfer.pool import Checksums, KVBlocks, PeerPool, bytes_per_block, checksum_blocks
from dora.engine.kv_transfer.transfer import KVTransport
from dora.runtime.process.rpc import RequestClient, RequestServer

BROKER_TIMEOUT_S = 30.0  # without a reply the engine exits: it cannot know which requests it owns
FRAME_BYTES = 2**18  # of KV: one frame is encrypted while the one before is sent
KV_TIMEOUT_S = 2.0  # for some blocks; after that the migration fails and the request stays at the source
STATUS_MAX_AGE_S = 0.002  # how old the last known status of a migration may be


class RemoteKVTransport(KVTransport):
    """The `KVTransport` of an engine whose run is on several machines."""

    def __init__(self, broker: CurveAddress | None) -> None:
        """`broker` is the driver's; None: this engine is on the driver's machine. Raises OSError."""
        super().__init__()
        self._broker = None if broker is None else RequestClient(broker, BROKER_TIMEOUT_S)
        self._remote_pools: dict[CurveAddress, RemoteKVPool] = {}

    def migration_files(self, folder: Path, migration_id: int) -> MigrationFiles:
        if self._broker is None:
            return super().migration_files(folder, migration_id)
        return RemoteMigrationFiles(self._broker, migration_id)

    def peer_pool(self, pool: Any, num_bytes: int) -> PeerPool:
        """As `KVTransport.peer_pool`. A connection that has failed is replaced by a new one."""
        if not isinstance(pool, CurveAddress):
            return super().peer_pool(pool, num_bytes)
        if pool in self._remote_pools and not self._remote_pools[pool].is_usable:
            self._remote_pools.pop(pool).close()
        if pool not in self._remote_pools:
            self._remote_pools[pool] = RemoteKVPool(pool, num_bytes)
        return self._remote_pools[pool]

    def close(self) -> None:
        """Close all connections."""
        if self._broker is not None:
            self._broker.close()
        for peer in self._remote_pools.values():
            peer.close()


class RemoteKVPool:
    """The KV pool of an engine on another machine; a `PeerPool`."""

    def __init__(self, address: CurveAddress, num_bytes: int) -> None:
        """Connect. Raises OSError if that fails, ValueError if the blocks there are not of `num_bytes`."""
        self._client = RequestClient(address, KV_TIMEOUT_S)
        self._num_blocks, found = self._client.call([])
        if found != num_bytes:
            self.close()
            raise ValueError(f"the source's KV blocks have {found} bytes, this engine's have {num_bytes}")

    @property
    def is_usable(self) -> bool:
        """False after a copy that has failed."""
        return self._client.is_usable

    def __len__(self) -> int:
        return int(self._num_blocks)

    def copy(self, sources: Sequence[int], pool: KVBlocks, targets: Sequence[int], /) -> Checksums:
        """As `PeerPool.copy`. Raises OSError; then the peer is not usable."""
        start = 0
        for blocks in self._client.call([*sources]) if sources else ():
            pool[[*targets[start : start + len(blocks)]]] = blocks
            start += len(blocks)
        return checksum_blocks(pool, targets)

    def close(self) -> None:
        self._client.close()


class KVPoolServer:
    """Serves this engine's KV to engines of other machines, which get its address from the driver."""

    def __init__(self, host: str, pool: KVBlocks) -> None:
        """Listen at a free port. Raises OSError."""
        self._pool, self._blocks_per_frame = pool, max(1, FRAME_BYTES // bytes_per_block(pool))
        self._server = RequestServer(host, self._read)
        self.address = self._server.address

    def close(self) -> None:
        """Disconnect all engines."""
        self._server.close()

    def _read(self, blocks: list[int]) -> Any:
        """The size of the pool, or some blocks: fancy indexing copies them."""
        if not blocks:
            return len(self._pool), bytes_per_block(self._pool)
        size = self._blocks_per_frame
        return [self._pool[blocks[start : start + size]] for start in range(0, len(blocks), size)]


class MigrationStatus(NamedTuple):
    """The state of a migration's files. `published` lists the blocks after those that the caller knew."""

    published: list[int]
    num_copied: int
    export: bytes | None
    is_imported: bool


class RemoteMigrationFiles(MigrationFiles):
    """The files of a migration, on the driver's machine."""

    def __init__(self, broker: RequestClient, migration_id: int) -> None:
        self._broker, self._migration_id = broker, migration_id
        self._status, self._status_s = MigrationStatus([], 0, None, False), 0.0
        self._has_progress = False

    def call(self, operation: str, *args: Any) -> Any:
        """Do one of the BROKER_OPERATIONS; the next `status` is a new one. Raises OSError."""
        self._status_s = 0.0
        return self._broker.call((self._migration_id, operation, args))

    def status(self) -> MigrationStatus:
        """The status, at most STATUS_MAX_AGE_S old; `published` lists all blocks."""
        if time.monotonic() - self._status_s > STATUS_MAX_AGE_S:
            known = self._status.published
            status = self.call("status", len(known), self._has_progress)
            self._status = status._replace(published=known + status.published)
            self._status_s = time.monotonic()
        return self._status

    def open_progress(self, num_blocks: int | None = None) -> TransferProgress:
        if num_blocks is not None:
            self.call("create_progress", num_blocks)
        self._has_progress = True
        return RemoteProgress(self)

    def write_export(self, content: bytes) -> None:
        self.call("write_export", content)

    def read_export(self) -> bytes | None:
        return self.status().export

    @property
    def is_imported(self) -> bool:
        return self.status().is_imported

    def commit_import(self) -> bool:
        return bool(self.call("commit_import"))

    def withdraw_export(self) -> bool:
        return bool(self.call("withdraw_export"))


class RemoteProgress(TransferProgress):
    """The progress file of a migration, on the driver's machine."""

    def __init__(self, files: RemoteMigrationFiles) -> None:
        self._files = files

    @property
    def num_copied(self) -> int:
        return self._files.status().num_copied

    @num_copied.setter
    def num_copied(self, num_blocks: int) -> None:
        self._files.call("set_num_copied", num_blocks)

    def publish(self, blocks: list[int]) -> None:
        self._files.call("publish", blocks)

    def published(self, start: int) -> list[int]:
        return self._files.status().published[start:]


def make_broker(host: str, folder: Path) -> RequestServer:
    """The driver's broker: does the engines' file operations in `folder`. Raises OSError."""

    def handle(request: tuple[int, str, tuple[Any, ...]]) -> object:
        migration_id, operation, args = request
        return BROKER_OPERATIONS[operation](MigrationFiles(folder, migration_id), *args)

    return RequestServer(host, handle)


def _status(files: MigrationFiles, num_known: int, has_progress: bool) -> MigrationStatus:
    progress = files.open_progress() if has_progress else None
    published = progress.published(num_known) if progress else []
    num_copied = progress.num_copied if progress else 0
    return MigrationStatus(published, num_copied, files.read_export(), files.is_imported)


def _create_progress(files: MigrationFiles, num_blocks: int) -> None:
    files.open_progress(num_blocks)


def _publish(files: MigrationFiles, blocks: list[int]) -> None:
    files.open_progress().publish(blocks)


def _set_num_copied(files: MigrationFiles, num_blocks: int) -> None:
    files.open_progress().num_copied = num_blocks


BROKER_OPERATIONS: dict[str, Callable[..., object]] = {
    "status": _status,
    "create_progress": _create_progress,
    "publish": _publish,
    "set_num_copied": _set_num_copied,
    "write_export": MigrationFiles.write_export,
    "commit_import": MigrationFiles.commit_import,
    "withdraw_export": MigrationFiles.withdraw_export,
}
