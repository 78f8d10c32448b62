"""Live migration between engines of different machines.

The state of a migration stays in memory of the driver's machine, where one compare-and-swap decides which
engine owns the request; so the decision survives a crash of either engine. An engine on another machine
sends each operation to the driver's broker. KV blocks go directly from the source's pool to the destination.
Engines wait for both between two decode steps, so every reply has a timeout.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from dora.curve import CurveAddress
from dora.engine.kv_transfer.handoff import Handoff, HandoffMemory, HandoffSlot, HandoffState, Reservation
from dora.engine.kv_transfer.pool import Checksums, EngineKV, KVBlocks, bytes_per_block, checksum_blocks
from dora.engine.kv_transfer.transfer import KVTransport
from dora.errors import RunError
from dora.runtime.process.rpc import RequestClient, RequestServer

BROKER_TIMEOUT_S = 30.0  # without a reply the engine exits: it cannot know which requests it owns
FRAME_BYTES = 2**18  # of KV: one frame is encrypted while the one before is sent
KV_TIMEOUT_S = 2.0  # for some blocks; after that the migration fails and the request stays at the source
STATUS_MAX_AGE_S = 0.002  # how old the last known status of a migration may be
_EPOCH_S = time.time() - time.monotonic()


def shared_clock() -> float:
    """The clock of migrations between machines (s): the wall clock as of the start of this process, without
    its later steps, which would let leases expire at once or never.
    """
    return _EPOCH_S + time.monotonic()


class RemoteKVTransport(KVTransport):
    """The `KVTransport` of an engine whose run is on several machines."""

    def __init__(self, broker: CurveAddress | None) -> None:
        """`broker` is the driver's; None: this engine is on the driver's machine. Raises OSError."""
        super().__init__()
        self._broker = None if broker is None else RequestClient(broker, BROKER_TIMEOUT_S)
        self._remote_pools: dict[CurveAddress, RemoteKVPool] = {}

    def open_handoff(self, migration_id: int, slot: HandoffSlot) -> Handoff:
        if self._broker is None:
            return super().open_handoff(migration_id, slot)
        return RemoteHandoff(self._broker, migration_id, slot)

    def peer_pool(self, pool: Any, kv: EngineKV[Any]) -> Any:
        """As `KVTransport.peer_pool`. A connection that has failed is replaced by a new one."""
        if not isinstance(pool, CurveAddress):
            return super().peer_pool(pool, kv)
        if pool in self._remote_pools and not self._remote_pools[pool].is_usable:
            self._remote_pools.pop(pool).close()
        if pool not in self._remote_pools:
            self._remote_pools[pool] = RemoteKVPool(pool, kv.num_bytes)
        return self._remote_pools[pool]

    def close(self) -> None:
        """Close all connections."""
        if self._broker is not None:
            self._broker.close()
        for peer in self._remote_pools.values():
            peer.close()


class RemoteKVPool(RequestClient):
    """The KV pool of an engine on another machine; a `PeerPool`. Not usable after a copy that failed."""

    def __init__(self, address: CurveAddress, num_bytes: int) -> None:
        """Connect. Raises OSError if that fails, ValueError if the blocks there are not of `num_bytes`."""
        super().__init__(address, KV_TIMEOUT_S)
        self._num_blocks, found = self.call([])
        if found != num_bytes:
            self.close()
            raise ValueError(f"the source's KV blocks have {found} bytes, this engine's have {num_bytes}")

    def __len__(self) -> int:
        return int(self._num_blocks)

    def copy(self, sources: Sequence[int], pool: KVBlocks, targets: Sequence[int], /) -> Checksums:
        """As `PeerPool.copy`. Raises OSError; then the peer is not usable."""
        start = 0
        for blocks in self.call([*sources]) if sources else ():
            pool[[*targets[start : start + len(blocks)]]] = blocks
            start += len(blocks)
        return checksum_blocks(pool, targets)


def serve_kv(host: str, pool: KVBlocks) -> RequestServer:
    """Serve this engine's KV to engines of other machines, at a free port. Raises OSError."""
    size = max(1, FRAME_BYTES // bytes_per_block(pool))  # blocks of a frame

    def read(blocks: list[int]) -> Any:
        """The size of the pool, or some blocks: fancy indexing copies them."""
        if not blocks:
            return len(pool), bytes_per_block(pool)
        return [pool[blocks[start : start + size]] for start in range(0, len(blocks), size)]

    return RequestServer(host, read)


class HandoffStatus(NamedTuple):
    """What an engine reads of a migration. `published` lists the blocks after those that the caller knew."""

    state: HandoffState
    reservation: Reservation | None
    published: list[int]
    num_copied: int
    export: bytes | None


class RemoteHandoff(Handoff):
    """The state of a migration, on the driver's machine."""

    def __init__(self, broker: RequestClient, migration_id: int, slot: HandoffSlot) -> None:
        self._broker, self._migration_id, self._slot = broker, migration_id, slot
        self._status, self._status_s = HandoffStatus(HandoffState.STARTED, None, [], 0, None), 0.0

    def call(self, operation: str, *args: Any) -> Any:
        """Do one of the BROKER_OPERATIONS; the next `status` is a new one.

        Raises OSError if the operation fails, and RunError without a reply: it may have been done, so this
        engine cannot keep the request as if an export had failed.
        """
        self._status_s = 0.0
        try:
            return self._broker.call((self._migration_id, self._slot, operation, args))
        except OSError as error:
            if self._broker.is_usable:
                raise
            raise RunError(
                f"the driver has not answered {operation!r} of migration {self._migration_id}: {error}"
            ) from error

    def status(self) -> HandoffStatus:
        """The status, at most STATUS_MAX_AGE_S old; `published` lists all blocks."""
        if time.monotonic() - self._status_s > STATUS_MAX_AGE_S:
            known = self._status.published
            status = self.call("status", len(known))
            self._status = status._replace(published=known + status.published)
            self._status_s = time.monotonic()
        return self._status

    @property
    def state(self) -> HandoffState:
        return self.status().state

    def reserve(self, reservation: Reservation) -> None:
        self.call("reserve", reservation)

    def reservation(self) -> Reservation | None:
        return self.status().reservation

    def publish(self, blocks: list[int]) -> None:
        self.call("publish", blocks)

    def published(self, start: int) -> list[int]:
        return self.status().published[start:]

    @property
    def num_copied(self) -> int:
        return self.status().num_copied

    def set_num_copied(self, num_blocks: int) -> None:
        self.call("set_num_copied", num_blocks)

    def write_export(self, content: bytes) -> None:
        self.call("write_export", content)

    def read_export(self) -> bytes | None:
        return self.status().export

    @property
    def is_imported(self) -> bool:
        return self.state is HandoffState.IMPORTED

    def commit_import(self) -> bool:
        return bool(self.call("commit_import"))

    def withdraw_export(self) -> bool:
        return bool(self.call("withdraw_export"))


def make_broker(host: str) -> RequestServer:
    """The driver's broker: reads and changes the states of migrations for engines. Raises OSError."""
    memory = HandoffMemory()

    def handle(request: tuple[int, HandoffSlot, str, tuple[Any, ...]]) -> object:
        migration_id, slot, operation, args = request
        return BROKER_OPERATIONS[operation](memory.open(migration_id, slot), *args)

    return RequestServer(host, handle)


def _status(handoff: Handoff, num_known: int) -> HandoffStatus:
    return HandoffStatus(
        handoff.state,
        handoff.reservation(),
        handoff.published(num_known),
        handoff.num_copied,
        handoff.read_export(),
    )


BROKER_OPERATIONS: dict[str, Callable[..., object]] = {
    "status": _status,
    "reserve": Handoff.reserve,
    "publish": Handoff.publish,
    "set_num_copied": Handoff.set_num_copied,
    "write_export": Handoff.write_export,
    "commit_import": Handoff.commit_import,
    "withdraw_export": Handoff.withdraw_export,
}
