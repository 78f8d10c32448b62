"""How the KV of SGLang's requests reaches another server: in files, or over NIXL.

Both have the same methods. Each worker writes its part of the KV into the folder of a halted request, and the
first worker finishes the folder. Each worker of the other server reads its own part there.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

import dora_kv_files as kv_files  # type: ignore[import-not-found]
import torch
from torch import Tensor

LEASE_S = 60.0  # of KV that no server has read
READ_TIMEOUT_S = 10.0
_POLL_S = 2e-4  # while KV may be read
_BACKEND = "UCX"


class KVInFiles:
    """For servers of one machine: the folder has a file of each worker."""

    layout_prefix: tuple[str, ...] = ()

    def __init__(self, layers: Sequence[Tensor], rank: int, num_workers: int) -> None:
        """`layers` are this worker's: the KV of each layer [slots, ...]."""
        self.layers, self._rank, self._num_workers = layers, rank, num_workers

    def write(self, folder: Path, origin: Any, slots: Sequence[int], num_tokens: int) -> None:
        """Write this worker's KV of `num_tokens` tokens, whose pages are at `slots`. Raises OSError."""
        path = kv_files.worker_file(folder, self._rank)
        kv_files.write_blocks(path, origin, self.layers, slots, num_tokens)

    def finish(self, folder: Path, origin: Any, num_tokens: int, parts: Sequence[None]) -> None:
        """Nothing is left to do, once all workers have written their `parts`."""

    def num_slots(self, folder: Path) -> int:
        """How many slots of KV a folder has. Raises KVFileError."""
        headers = kv_files.read_headers(folder, self._num_workers)
        return int(min(header.num_blocks for header in headers))

    def read(self, folder: Path, origin: Any, slots: Sequence[int], first: int) -> None:
        """Copy this worker's KV, without that of the `first` slots, to `slots`.

        Raises KVFileError if it is of something else than `origin`, or is damaged.
        """
        path = kv_files.worker_file(folder, self._rank)
        kv_files.read_blocks(path, origin, self.layers, slots, first)

    def remove(self, folder: Path) -> None:
        """This server does not read a folder any more."""
        kv_files.worker_file(folder, self._rank).unlink(missing_ok=True)


class KVPart(NamedTuple):
    """Where a worker has its part of a request's KV for others, and what its bytes must be."""

    key: str
    metadata: str  # of the worker's NIXL agent and of this memory, in base64
    memory: str  # "DRAM" or "VRAM"
    address: int
    num_bytes: int
    device: int
    checksum: int


class _Source(NamedTuple):
    """The KV that a ticket is of: a part of each worker, with `num_slots` slots."""

    origin: Any
    num_slots: int
    parts: list[KVPart]


class _Exported(NamedTuple):
    """KV in memory that other servers read."""

    content: Tensor  # [layers, slots, ...]
    registration: Any
    expires_s: float


class KVOverNixl:
    """For servers of several machines, too: by a ticket in the folder, one reads the memory of the other.

    KV is copied into memory of its own, which is registered with NIXL until it has been read or its lease is
    over. SGLang may then use the slots of the request again, and empty its prefix cache.
    """

    layout_prefix = (kv_files.BY_TICKET,)

    def __init__(self, layers: Sequence[Tensor], rank: int) -> None:
        """`layers` are this worker's: the KV of each layer [slots, ...]. Raises RuntimeError without NIXL."""
        try:
            from nixl._api import nixl_agent, nixl_agent_config  # type: ignore[import-not-found]
        except ImportError as error:
            raise RuntimeError(
                "kv_connector = 'nixl' needs NIXL in the environment of SGLang: pip install --no-deps nixl "
                "nixl-cu12"
            ) from error

        self.layers, self._rank = layers, rank
        # NIXL's own thread would use a core, also when there is nothing to read.
        config = nixl_agent_config(backends=[_BACKEND], enable_prog_thread=False)
        self._agent, self._lock = nixl_agent(uuid.uuid4().hex, config), Lock()
        self._exported: dict[str, _Exported] = {}  # by key
        self._has_exported = Event()
        self._unfinished: list[Any] = []  # reads that did not end in time: their memory stays
        Thread(target=self._serve, daemon=True).start()

    def write(self, folder: Path, origin: Any, slots: Sequence[int], num_tokens: int) -> KVPart:
        """Offer this worker's KV. Raises KVFileError, OutOfMemoryError."""
        content = self._empty(len(slots))
        checksum = kv_files.copy_out(self.layers, slots, content)
        key, device = uuid.uuid4().hex, max(0, content.get_device())
        try:
            with self._lock:
                registration = self._agent.register_memory([content])
                metadata = self._agent.get_partial_agent_metadata(registration, True, [_BACKEND])
                self._exported[key] = _Exported(content, registration, time.monotonic() + LEASE_S)
                self._has_exported.set()
        except Exception as error:  # NIXL's own errors have no common base
            raise kv_files.KVFileError(f"NIXL cannot offer its KV: {error!r}") from error
        memory, encoded = _memory_of(content), base64.b64encode(metadata).decode()
        return KVPart(key, encoded, memory, content.data_ptr(), content.nbytes, device, checksum)

    def finish(self, folder: Path, origin: Any, num_tokens: int, parts: Sequence[KVPart]) -> None:
        """Write the ticket. Raises OSError."""
        num_bytes = sum(part.num_bytes for part in parts)
        source = _Source(origin, parts[0].num_bytes // self._slot_bytes, [*parts])
        kv_files.write_ticket(folder, kv_files.Ticket(num_tokens, num_bytes, source._asdict()))

    def num_slots(self, folder: Path) -> int:
        """How many slots of KV a ticket is of. Raises KVFileError."""
        return self._source_in(folder).num_slots

    def read(self, folder: Path, origin: Any, slots: Sequence[int], first: int) -> None:
        """As `KVInFiles.read`. Raises OutOfMemoryError, too."""
        source = self._source_in(folder)
        if source.origin != origin:
            raise kv_files.KVFileError(f"{folder} has KV of {source.origin}; this server has {origin}")
        part = source.parts[self._rank]
        has_all = first + len(slots) <= source.num_slots
        if not has_all or part.num_bytes != source.num_slots * self._slot_bytes:
            raise kv_files.KVFileError(f"{folder} has {part.num_bytes} bytes in {source.num_slots} slots")
        if (own := self._exported.get(part.key)) is not None:  # the request stays here
            content = own.content
        else:
            content = self._empty(source.num_slots)
            with self._lock:
                self._read_into(content, part)
        kv_files.copy_in(content, part.checksum, self.layers, slots, first)

    def remove(self, folder: Path) -> None:
        """The engine removes tickets."""

    def _serve(self) -> None:
        """In a thread: while there is exported KV, let others read it, and free what is read or too old."""
        while self._has_exported.wait():
            with self._lock:
                self._free(self._newly_read())
                if not self._exported:
                    self._has_exported.clear()
            time.sleep(_POLL_S)

    def _newly_read(self) -> set[str]:
        """The keys of what other servers have read. The call also sends them what they are reading."""
        try:
            return {key.decode() for keys in self._agent.get_new_notifs().values() for key in keys}
        except Exception:  # NIXL's own errors have no common base
            return set()

    def _free(self, read: set[str]) -> None:
        now_s = time.monotonic()
        for key, exported in [*self._exported.items()]:
            if key in read or now_s > exported.expires_s:
                del self._exported[key]
                self._agent.deregister_memory(exported.registration)

    def _read_into(self, content: Tensor, part: KVPart) -> None:
        """Read the memory of a worker of another server. Raises KVFileError."""
        registration = handle = None
        server = state = ""
        try:
            server = self._agent.add_remote_agent(base64.b64decode(part.metadata))
            registration = self._agent.register_memory([content])
            own = self._agent.get_xfer_descs([content])
            theirs = self._agent.get_xfer_descs([(part.address, part.num_bytes, part.device)], part.memory)
            handle = self._agent.initialize_xfer("READ", own, theirs, server, part.key.encode())
            state, deadline_s = self._agent.transfer(handle), time.monotonic() + READ_TIMEOUT_S
            while state == "PROC" and time.monotonic() < deadline_s:
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:  # NIXL's own errors have no common base
            raise kv_files.KVFileError(f"NIXL cannot read its KV: {error!r}") from error
        finally:
            if state == "PROC":
                self._unfinished.append((handle, content))
            else:
                self._forget(handle, registration, server)
        if state != "DONE":
            reason = f"it did not arrive within {READ_TIMEOUT_S:.0f} s" if state == "PROC" else state
            raise kv_files.KVFileError(f"NIXL cannot read its KV: {reason}")

    def _forget(self, handle: Any, registration: Any, server: str) -> None:
        """A read has ended. The server's next ticket is of other memory, perhaps at the same address."""
        if handle is not None:
            handle.release()
        if registration is not None:
            self._agent.deregister_memory(registration)
        if server:
            self._agent.remove_remote_agent(server)

    def _source_in(self, folder: Path) -> _Source:
        """Raises KVFileError."""
        source = kv_files.read_ticket(folder).source
        try:
            (digest, layout), num_slots = source["origin"], int(source["num_slots"])
            parts = [KVPart(*part) for part in source["parts"]]
        except (KeyError, TypeError, ValueError) as error:
            raise kv_files.KVFileError(f"{folder} has a ticket of another kind of server") from error
        return _Source(kv_files.KVOrigin(digest, tuple(layout)), num_slots, parts)

    def _empty(self, num_slots: int) -> Tensor:
        sample = self.layers[0]
        shape = (len(self.layers), num_slots, *sample.shape[1:])
        return torch.empty(shape, dtype=sample.dtype, device=sample.device)

    @property
    def _slot_bytes(self) -> int:
        return len(self.layers) * self.layers[0][0].nbytes


def _memory_of(content: Tensor) -> str:
    """NIXL's name of the memory that has a tensor."""
    return "DRAM" if content.device.type == "cpu" else "VRAM"
