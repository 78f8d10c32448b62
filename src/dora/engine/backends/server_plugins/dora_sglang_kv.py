"""How the KV of SGLang's requests reaches another server: in files, or over NIXL.

Both have the same methods. Each worker writes its part of the KV into the folder of a halted request, and the
first worker finishes the folder. Each worker of the other server reads its own part there.
"""

from __future__ import annotations

import base64
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from threading import Event, Lock, Thread
from typing import Any, NamedTuple

import dora_kv_files as kv_files  # type: ignore[import-not-found]
import torch
from torch import Tensor

LEASE_S = 60.0  # of KV that no server has read
MAX_TICKET_AGE_S = 20.0  # since it has come to this machine; older ones are not used
READ_TIMEOUT_S = 5.0  # all requests wait for a read
MAX_BYTES = 8 * 2**30  # of a worker's KV that others read, and that it reads
_POLL_S = 2e-4  # while KV may be read
_ALIGNMENT = 64


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
    """Where others read a worker's part of a request's KV, and what its bytes must be."""

    key: str
    agent: str  # name of the worker's NIXL agent
    metadata: str  # of the agent, in base64
    address: int
    num_bytes: int
    checksum: int


class _Source(NamedTuple):
    """The KV that a ticket is of: a part of each worker, with `num_slots` slots."""

    origin: Any
    num_slots: int
    parts: list[KVPart]


class _Exported(NamedTuple):
    """KV in memory that other servers read."""

    content: Tensor  # bytes
    expires_s: float


class _Arena:
    """Host memory that NIXL has registered. It stays mapped.

    So a read that comes too late finds other bytes, and no address that would end the process. The checksum
    is then another one.
    """

    def __init__(self, num_bytes: int) -> None:
        self.content = torch.empty(num_bytes, dtype=torch.uint8)  # a page has memory once it is used
        self._taken: dict[int, int] = {}  # first and last byte

    def take(self, num_bytes: int) -> Tensor:
        """A part that is not in use. Raises KVFileError if there is none of this size."""
        start = 0
        for first, last in sorted(self._taken.items()):
            if first - start >= num_bytes:
                break
            start = -(-last // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > len(self.content):
            raise kv_files.KVFileError(f"no memory for {num_bytes} more bytes of KV between servers")
        self._taken[start] = start + num_bytes
        return self.content[start : start + num_bytes]

    def free(self, part: Tensor) -> None:
        del self._taken[part.data_ptr() - self.content.data_ptr()]


class KVOverNixl:
    """For servers of several machines, too: by a ticket in the folder, one reads the memory of the other.

    KV is copied into host memory of its own. SGLang may then use the slots of the request again, and empty
    its prefix cache.
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
        self._slot_bytes = sum(layer[0].nbytes for layer in layers)
        # NIXL's own thread would use a core, also when there is nothing to read.
        config = nixl_agent_config(backends=["UCX"], enable_prog_thread=False)
        self._name, self._lock = uuid.uuid4().hex, Lock()
        self._agent = nixl_agent(self._name, config)
        self._arena = _Arena(min(MAX_BYTES, sum(layer.nbytes for layer in layers)))
        if layers:
            self._agent.register_memory([self._arena.content])
        self._metadata = base64.b64encode(self._agent.get_agent_metadata()).decode()
        self._known: set[str] = set()  # agents of other servers
        self._silent: dict[str, float] = {}  # those that did not respond: until when they are not asked
        self._exported: dict[str, _Exported] = {}  # by key
        self._has_exported = Event()
        self._unfinished: list[tuple[Any, Tensor]] = []  # reads that may still write
        Thread(target=self._serve, daemon=True).start()

    def write(self, folder: Path, origin: Any, slots: Sequence[int], num_tokens: int) -> KVPart:
        """Offer this worker's KV. Raises KVFileError, OutOfMemoryError."""
        with self._lock:
            content = self._arena.take(len(slots) * self._slot_bytes)
            try:
                checksum = kv_files.copy_out(self.layers, slots, self._as_blocks(content))
            except torch.OutOfMemoryError:
                self._arena.free(content)
                raise
            key = uuid.uuid4().hex
            self._exported[key] = _Exported(content, time.monotonic() + LEASE_S)
            self._has_exported.set()
        return KVPart(key, self._name, self._metadata, content.data_ptr(), content.nbytes, checksum)

    def finish(self, folder: Path, origin: Any, num_tokens: int, parts: Sequence[KVPart]) -> None:
        """Write the ticket. Raises OSError."""
        num_bytes = sum(part.num_bytes for part in parts)
        source = _Source(origin, parts[0].num_bytes // self._slot_bytes, [*parts])
        kv_files.write_ticket(folder, kv_files.Ticket(num_tokens, num_bytes, source._asdict()))

    def num_slots(self, folder: Path) -> int:
        """How many slots of KV a ticket is of. Raises KVFileError."""
        return _source_in(folder).num_slots

    def read(self, folder: Path, origin: Any, slots: Sequence[int], first: int) -> None:
        """As `KVInFiles.read`. Raises OSError and OutOfMemoryError, too."""
        source = _source_in(folder)
        if source.origin != origin:
            raise kv_files.KVFileError(f"{folder} has KV of {source.origin}; this server has {origin}")
        part = source.parts[self._rank]
        has_all = first + len(slots) <= source.num_slots
        if not has_all or part.num_bytes != source.num_slots * self._slot_bytes:
            raise kv_files.KVFileError(f"{folder} has {part.num_bytes} bytes in {source.num_slots} slots")
        if (age_s := time.time() - (folder / kv_files.TICKET_FILE).stat().st_mtime) > MAX_TICKET_AGE_S:
            raise kv_files.KVFileError(f"its ticket has waited {age_s:.0f} s")
        with self._lock:
            own = self._exported.pop(part.key, None)  # the request stays here
            content = self._read_from(part) if own is None else own.content
            try:
                stored = self._as_blocks(content)
                kv_files.copy_in(stored, part.checksum, self.layers, slots, first)
            finally:
                self._arena.free(content)

    def remove(self, folder: Path) -> None:
        """The engine removes tickets."""

    def _as_blocks(self, content: Tensor) -> Tensor:
        """The bytes of some slots as [layers, slots, ...]."""
        sample = self.layers[0]
        return content.view(sample.dtype).view(len(self.layers), -1, *sample.shape[1:])

    def _serve(self) -> None:
        """In a thread: while there is exported KV, let others read it, and free what is read or too old."""
        while self._has_exported.wait():
            with self._lock:
                read, now_s = self._newly_read(), time.monotonic()
                for key, exported in [*self._exported.items()]:
                    if key in read or now_s > exported.expires_s:
                        del self._exported[key]
                        self._arena.free(exported.content)
                if not self._exported:
                    self._has_exported.clear()
            time.sleep(_POLL_S)

    def _newly_read(self) -> set[str]:
        """The keys of what other servers have read. The call also sends them what they are reading."""
        try:
            return {key.decode() for keys in self._agent.get_new_notifs().values() for key in keys}
        except Exception:  # NIXL's own errors have no common base
            return set()

    def _read_from(self, part: KVPart) -> Tensor:
        """The bytes that a worker of another server has. Raises KVFileError."""
        self._end_reads()
        now_s = time.monotonic()
        if now_s < self._silent.get(part.agent, 0.0):
            raise kv_files.KVFileError("its server did not respond to another read just now")
        content, handle, state = self._arena.take(part.num_bytes), None, ""
        try:
            if part.agent not in self._known:
                self._agent.add_remote_agent(base64.b64decode(part.metadata))
                self._known.add(part.agent)
            own = self._agent.get_xfer_descs([content])
            theirs = self._agent.get_xfer_descs([(part.address, part.num_bytes, 0)], "DRAM")
            handle = self._agent.initialize_xfer("READ", own, theirs, part.agent, part.key.encode())
            state = self._agent.transfer(handle)
            while state == "PROC" and time.monotonic() < now_s + READ_TIMEOUT_S:
                time.sleep(_POLL_S)
                state = self._agent.check_xfer_state(handle)
        except Exception as error:  # NIXL's own errors have no common base
            state = repr(error)
        if state == "PROC":
            self._unfinished.append((handle, content))
            self._silent[part.agent] = time.monotonic() + LEASE_S
            raise kv_files.KVFileError(f"its KV did not arrive within {READ_TIMEOUT_S:.0f} s")
        _release(handle)
        if state != "DONE":
            self._arena.free(content)
            self._known.discard(part.agent)
            with suppress(Exception):  # it is unknown
                self._agent.remove_remote_agent(part.agent)
            raise kv_files.KVFileError(f"NIXL cannot read its KV: {state}")
        return content

    def _end_reads(self) -> None:
        """Free the memory of reads that did not end in time, and have ended now."""
        unfinished, self._unfinished = self._unfinished, []
        for handle, content in unfinished:
            try:
                state = self._agent.check_xfer_state(handle)
            except Exception:  # as above
                state = "ERR"
            if state == "PROC":
                self._unfinished.append((handle, content))
            else:
                _release(handle)
                self._arena.free(content)


def _source_in(folder: Path) -> _Source:
    """What the ticket in a folder is of. Raises KVFileError."""
    source = kv_files.read_ticket(folder).source
    try:
        (digest, layout), num_slots = source["origin"], int(source["num_slots"])
        parts = [KVPart(*part) for part in source["parts"]]
    except (KeyError, TypeError, ValueError) as error:
        raise kv_files.KVFileError(f"{folder} has a ticket of another kind of server") from error
    return _Source(kv_files.KVOrigin(digest, tuple(layout)), num_slots, parts)


def _release(handle: Any) -> None:
    """Of a transfer that is over."""
    with suppress(Exception):  # there is none, or its server is lost
        handle.release()
