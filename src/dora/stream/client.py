"""Client of a stream in another process.

On the server's host, blocks are written and read in shared memory; on other hosts they are sent with the
messages. A client is not thread-safe: every process and thread makes its own.
"""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from dora.core.types import GroupId
from dora.curve import CurveAddress
from dora.errors import RunError, StorageFullError, StreamError
from dora.full_disk import is_full
from dora.stream import transport
from dora.stream.metadata import NO_TIMEOUT, BatchRequest, BlockLocation, SampleMeta
from dora.stream.schema import BatchPart, BlockPacker, ColumnData, Field, StreamBatch, TimedOut
from dora.stream.storage import SegmentReader, SegmentWriter, storage_full_error
from dora.stream.transport import RemoteTransport, UnixTransport


class StreamClient:
    """Puts and gets rows. StreamError: the request was refused. RunError: the server does not reply."""

    def __init__(self, endpoint: str | CurveAddress, timeout_s: float = 30.0) -> None:
        """`timeout_s` limits the time of a reply, beyond the wait of the request itself. Raises RunError.

        `endpoint`: on the server's host its Unix socket, elsewhere the address in the file `remote.json` of
        the stream's folder.
        """
        self._timeout_s = timeout_s
        self._transport: UnixTransport | RemoteTransport
        if isinstance(endpoint, CurveAddress):
            self._endpoint, self._transport = endpoint.endpoint, RemoteTransport(endpoint, timeout_s)
        else:
            self._endpoint, self._transport = endpoint, UnixTransport(endpoint, timeout_s)
        self._num_requests, self._is_closed = 0, False
        self._writer: SegmentWriter | None = None
        self._reader: SegmentReader | None = None
        self.client_id = secrets.token_hex(8)  # also the owner of its segments
        try:
            reply, _ = self._call("connect", {"client_id": self.client_id})
        except (RunError, StreamError):
            self._transport.close()
            raise
        fields = [Field(name, dtype, tuple(shape)) for name, dtype, shape in reply["fields"]]
        self.fields = {field.name: field for field in fields}
        if not isinstance(endpoint, CurveAddress):
            folder = Path(reply["folder"])
            self._writer, self._reader = SegmentWriter(folder, self.client_id), SegmentReader(folder)

    @property
    def shares_memory(self) -> bool:
        """Whether blocks are written and read in shared memory."""
        return self._reader is not None

    def register_consumer(
        self,
        name: str,
        fields: Sequence[str],
        group_size: int = 0,
        by_version: bool = False,
        lease_s: float = NO_TIMEOUT,
        held_out_size: int = 0,
    ) -> None:
        """Register a consumer; see `MetadataController.register_consumer`.

        Without `lease_s`, a lease lasts until its client commits, releases it or exits.
        """
        rules = {"group_size": group_size, "by_version": by_version, "held_out_size": held_out_size}
        lease = {"lease_s": None if lease_s == NO_TIMEOUT else lease_s}
        self._call("register_consumer", {"name": name, "fields": [*fields], **rules, **lease})

    def put(self, samples: Sequence[SampleMeta], columns: ColumnData) -> range:
        """Add rows with their first columns; their indices.

        Raises StorageFullError (no StreamError) if the file system is full: nothing was put.
        """
        packer = BlockPacker(self.fields, columns, len(samples))
        numbers = np.array([(*s.request, s.version, s.num_tokens) for s in samples], np.int64)
        first = self._write("put", packer, numbers)["first"]
        return range(first, first + len(samples))

    def fill(self, indices: Sequence[int], columns: ColumnData) -> None:
        """Add columns to existing rows. Raises as `put`."""
        packer = BlockPacker(self.fields, columns, len(indices))
        self._write("fill", packer, np.asarray(indices, np.int64))

    def get(
        self,
        consumer: str,
        request: BatchRequest | None = None,
        wait_s: float = 60.0,
        committed: StreamBatch | None = None,
    ) -> StreamBatch | TimedOut:
        """Lease rows; after `wait_s` (math.inf: unlimited), what is missing.

        `committed` is an earlier batch to commit first, unless its lease has ended.
        """
        wait_s = transport.parse_wait(wait_s)
        arguments = {
            "consumer": consumer,
            "request": request or BatchRequest(),
            "inline": not self.shares_memory,
            "commit": None if committed is None else committed.lease,
        }
        header, buffers = self._call("get", arguments, wait_s=wait_s)
        if "timed_out" in header:
            return TimedOut(*header["timed_out"])
        try:
            return self._batch(header, buffers)
        except BaseException:  # the caller cannot release the lease
            self._send("release", {"lease": header["lease"]}, ())
            raise

    def read_leased(self, consumer: str, indices: Sequence[int]) -> StreamBatch:
        """Read rows that another client of the consumer has on lease; there is nothing to commit."""
        arguments = {"consumer": consumer, "inline": not self.shares_memory}
        return self._batch(*self._call("read_leased", arguments, (np.asarray(indices, np.int64),)))

    def commit(self, batch: StreamBatch) -> None:
        """Mark the rows as consumed; do not read their columns any more."""
        self._call("commit", {"lease": batch.lease})

    def release(self, batch: StreamBatch) -> None:
        """Return the rows to the front of the consumer's queue."""
        self._call("release", {"lease": batch.lease})

    def renew(self, batch: StreamBatch) -> None:
        """Restart the time of the lease."""
        self._call("renew", {"lease": batch.lease})

    def clear(self, groups: Iterable[GroupId]) -> None:
        """Remove groups, whatever their status."""
        self._call("clear", {"groups": [*groups]})

    def evict(self, client_id: str) -> None:
        """Disconnect another client, e.g. a crashed one on another host, and release its leases."""
        self._call("evict", {"client_id": client_id})

    def status(self) -> dict[str, Any]:
        """Number of rows and bytes."""
        header, _ = self._call("status", {})
        return {name: header[name] for name in ("num_rows", "num_bytes")}

    def close(self) -> None:
        """Release all leases and disconnect. Rows that were put stay."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(RunError):  # the server has exited
                self._send("disconnect", {}, ())
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batch(self, header: dict[str, Any], buffers: Sequence[bytes]) -> StreamBatch:
        num_parts, parts = len(header["parts"]), []
        rows, pairs, blocks = buffers[0], buffers[1 : 1 + num_parts], iter(buffers[1 + num_parts :])
        for (names, num_rows, location), found in zip(header["parts"], pairs, strict=True):
            block = next(blocks) if self._reader is None else self._reader.view(BlockLocation(*location))
            parts.append(BatchPart(names, num_rows, block, transport.decode_integers(found, np.int32, 2)))
        numbers = transport.decode_integers(rows, np.int64, 6)
        return StreamBatch(header["lease"], numbers, self.fields, parts)

    def _write(self, method: str, packer: BlockPacker, numbers: Any) -> dict[str, Any]:
        """Write a block and send its location, or send the block; the header of the reply."""
        arguments: dict[str, Any] = {"names": packer.names, "location": None}
        if self._writer is None:
            block = bytearray(packer.num_bytes)
            packer.write(block)
            return self._call(method, arguments, (numbers, block))[0]
        location, view = self._allocate(self._writer, packer.num_bytes)
        packer.write(view)
        try:
            return self._call(method, arguments | {"location": location}, (numbers,))[0]
        except StreamError:  # after a RunError the server may have accepted the block
            self._writer.free(location.segment)
            raise

    def _allocate(self, writer: SegmentWriter, num_bytes: int) -> tuple[BlockLocation, memoryview]:
        """Allocate a block. Raises StorageFullError."""
        try:
            return writer.allocate(num_bytes)
        except OSError as error:
            if not is_full(error):
                raise
            raise storage_full_error(error, **self.status()) from error  # the reply frees reusable blocks

    def _call(
        self, method: str, arguments: dict[str, Any], buffers: Sequence[Any] = (), wait_s: float = 0.0
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request and wait for its reply."""
        request_id = self._send(method, arguments | {"wait_s": wait_s}, buffers)
        deadline_s = time.monotonic() + wait_s + self._timeout_s
        while (frames := self._transport.receive(deadline_s)) is not None:
            header = transport.decode_header(frames)
            for segment, num_blocks in header.get("reusable", {}).items():
                if self._writer is not None:
                    self._writer.free(segment, num_blocks)
            if header["id"] not in (request_id, transport.UNMATCHED):  # of a request that timed out here
                if header.get("lease"):
                    self._send("release", {"lease": header["lease"]}, ())
                continue
            if "error" in header:
                raise (StorageFullError if header.get("is_full") else StreamError)(header["error"])
            return header, frames[1:]
        raise RunError(
            f"the stream at {self._endpoint} has not replied to {method!r} for {self._timeout_s:g} s: "
            "is its process running?"
        )

    def _send(self, method: str, arguments: dict[str, Any], buffers: Sequence[Any]) -> int:
        transport.check_size(sum(memoryview(buffer).nbytes for buffer in buffers))
        self._num_requests += 1
        header = {"id": self._num_requests, "method": method} | arguments
        self._transport.send(transport.encode_message(header, buffers))
        return self._num_requests
