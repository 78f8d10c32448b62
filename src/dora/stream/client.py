"""Client of a stream in another process.

On the server's host, blocks are written and read in shared memory. A client on another host does not put or
fill; it gets the columns with the replies. A client is not thread-safe: every process and thread makes its
own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from dora.core.types import GroupId, RequestId
from dora.curve import CurveAddress
from dora.errors import RunError, StreamError
from dora.full_disk import is_full
from dora.stream import transport
from dora.stream.metadata import BatchRequest, BlockLocation, SampleMeta
from dora.stream.schema import BatchPart, BlockPacker, ColumnData, Field, StreamBatch, TimedOut
from dora.stream.storage import SegmentReader, SegmentWriter, encode_samples, storage_full_error
from dora.stream.transport import RemoteTransport, UnixTransport


class StreamClient:
    """Puts and gets groups. StreamError: the request was refused. RunError: the server does not reply."""

    def __init__(self, stream: Path | CurveAddress, timeout_s: float = 30.0) -> None:
        """`timeout_s` limits the time of a reply, beyond the wait of the request itself. Raises RunError.

        `stream`: on the server's host the folder of the stream, elsewhere its `remote` address. A relative
        folder makes the path of the socket shorter; the process may change to another folder later.
        """
        self._stream, self._timeout_s = stream, timeout_s
        self._transport: UnixTransport | RemoteTransport
        if isinstance(stream, CurveAddress):
            self._transport = RemoteTransport(stream, timeout_s)
        else:
            self._transport = UnixTransport(transport.socket_path(stream), timeout_s)
        self._num_requests, self._is_closed = 0, False
        try:
            reply, _ = self._call("connect", {})
        except (RunError, StreamError):
            self._transport.close()
            raise
        self.client_id = str(reply["client_id"])  # also the owner of its segments
        if not isinstance(stream, CurveAddress):
            segments = stream.resolve()
            self._writer, self._reader = SegmentWriter(segments, self.client_id), SegmentReader(segments)
        self.fields = {field.name: field for field in (Field(*values) for values in reply["fields"])}

    def put(self, samples: Sequence[SampleMeta], columns: ColumnData) -> None:
        """Add whole groups, one after the other in sibling order, with their first columns.

        Raises StorageFullError (no StreamError) if the file system is full: nothing was put.
        """
        self._write("put", {}, columns, (encode_samples(samples),))

    def fill(self, groups: Iterable[GroupId], columns: ColumnData) -> None:
        """Add columns to existing groups, with a value for each row. Raises as `put`."""
        self._write("fill", {"groups": [*groups]}, columns)

    def get(
        self,
        consumer: str,
        request: BatchRequest | None = None,
        wait_s: float = 60.0,
        committed: StreamBatch | None = None,
    ) -> StreamBatch | TimedOut:
        """Lease groups; after `wait_s` (math.inf: unlimited), what is missing.

        `committed` is an earlier batch to commit first, unless its lease has ended.
        """
        arguments = {
            "consumer": consumer,
            "request": request or BatchRequest(),
            "commit": None if committed is None else committed.lease,
            "wait_s": wait_s,
        }
        header, buffers = self._call("get", arguments, wait_s=wait_s)
        if "timed_out" in header:
            return TimedOut(*header["timed_out"])
        try:
            return self._batch(header, buffers)
        except BaseException:  # the caller cannot release the lease
            self._send("release", {"lease": header["lease"]})
            raise

    def read_leased(self, consumer: str, requests: Iterable[RequestId]) -> StreamBatch:
        """Read rows that another client of the consumer has on lease; there is nothing to commit."""
        return self._batch(*self._call("read_leased", {"consumer": consumer, "requests": [*requests]}))

    def commit(self, batch: StreamBatch) -> None:
        """Mark the rows as consumed; do not read their columns any more."""
        self._call("commit", {"lease": batch.lease})

    def release(self, batch: StreamBatch) -> None:
        """Return the rows to the front of the consumer's queue."""
        self._call("release", {"lease": batch.lease})

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
                self._send("disconnect", {})
            self._transport.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batch(self, header: dict[str, Any], buffers: Sequence[bytes]) -> StreamBatch:
        rows = transport.decode_integers(buffers[0], np.int64, 4)
        if isinstance(self._stream, CurveAddress):
            pairs = np.arange(len(rows), dtype=np.int32).repeat(2).reshape(-1, 2)
            parts = [BatchPart(header["names"], len(rows), b"".join(buffers[1:]), pairs)]
        else:
            parts = [
                BatchPart(
                    names,
                    num_rows,
                    self._reader.view(BlockLocation(*location)),
                    transport.decode_integers(found, np.int32, 2),
                )
                for (names, num_rows, location), found in zip(header["parts"], buffers[1:], strict=True)
            ]
        return StreamBatch(header["lease"], rows, self.fields, parts)

    def _write(
        self, method: str, arguments: Mapping[str, Any], columns: ColumnData, buffers: Sequence[Any] = ()
    ) -> None:
        """Write a block and send its location."""
        if isinstance(self._stream, CurveAddress):
            raise StreamError(f"{method} from another host: only clients on the server's host can write")
        packer = BlockPacker(self.fields, columns)
        location, view = self._allocate(packer.num_bytes)
        packer.write(view)
        block = {"names": packer.names, "num_rows": packer.num_rows, "location": location}
        try:
            self._call(method, {**arguments, **block}, buffers)
        except StreamError:  # after a RunError the server may have accepted the block
            self._writer.free(location.segment)
            raise

    def _allocate(self, num_bytes: int) -> tuple[BlockLocation, memoryview]:
        """Allocate a block. Raises StorageFullError."""
        try:
            return self._writer.allocate(num_bytes)
        except OSError as error:
            if not is_full(error):
                raise
            raise storage_full_error(error, **self.status()) from error  # the reply frees reusable blocks

    def _call(
        self, method: str, arguments: Mapping[str, Any], buffers: Sequence[Any] = (), wait_s: float = 0.0
    ) -> tuple[dict[str, Any], list[bytes]]:
        """Send a request and wait for its reply; `wait_s` is what the server may wait before it replies."""
        request_id = self._send(method, arguments, buffers)
        deadline_s = time.monotonic() + wait_s + self._timeout_s
        while (frames := self._transport.receive(deadline_s)) is not None:
            header = transport.decode_header(frames)
            for segment, num_blocks in header.get("reusable", {}).items():
                self._writer.free(segment, num_blocks)
            if header["id"] not in (request_id, transport.UNMATCHED):  # of a request that timed out here
                if header.get("lease"):
                    self._send("release", {"lease": header["lease"]})
                continue
            if "error" in header:
                raise StreamError(header["error"])
            return header, frames[1:]
        raise RunError(
            f"the stream at {self._transport.name} has not replied to {method!r} for {self._timeout_s:g} s: "
            "is its process running?"
        )

    def _send(self, method: str, arguments: Mapping[str, Any], buffers: Sequence[Any] = ()) -> int:
        self._num_requests += 1
        header = {"id": self._num_requests, "method": method, **arguments}
        self._transport.send(transport.encode_message(header, buffers))
        return self._num_requests
