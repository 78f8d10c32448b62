"""Serve a stream to other processes, on the same host and on others, and to other threads of this one.

One thread repeats: receive requests, execute them, free unused blocks, reply. A get without ready rows stays
pending until it can be served or times out. Other threads call the stream directly, between two rounds of
that thread.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from dora.core.types import GroupId
from dora.curve import MAX_POLL_S, CurveAddress
from dora.errors import RunError, StorageFullError, StreamError
from dora.stream import transport
from dora.stream.metadata import BatchRequest, BlockLocation, SampleMeta, StreamLease
from dora.stream.schema import BlockPacker, ColumnData, unpack
from dora.stream.storage import (
    SampleStream,
    decode_samples,
    encode_lease,
    is_segment_name,
    segment_size,
)
from dora.stream.transport import ClientConnection, Frames, Reply, ServerEndpoint

REFUSED = (StreamError, StorageFullError, OSError)
MALFORMED = (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError)


@dataclass(eq=False)
class PendingGet:
    """A get that waits for ready rows."""

    client: ClientConnection
    request_id: int
    consumer: str
    request: BatchRequest
    is_inline: bool
    wait_s: float
    deadline_s: float


class StreamServer:
    """Serves a stream until it is stopped."""

    def __init__(self, stream: SampleStream, endpoints: Sequence[str]) -> None:
        """Listens at once; `run` replies. Raises OSError or zmq.ZMQError if an endpoint is not available."""
        self._stream = stream
        self._endpoint = ServerEndpoint(endpoints)
        self.endpoints = self._endpoint.endpoints
        self._gets: list[PendingGet] = []
        self._replies: list[tuple[ClientConnection, int, Reply]] = []
        self._address_file = stream.folder / transport.ADDRESS_FILE
        for endpoint in self.endpoints:
            if isinstance(endpoint, CurveAddress):
                endpoint.write(self._address_file)
        self._is_stopped = False
        self._evicted: deque[str] = deque()  # clients that another thread has evicted
        self._lock = threading.Lock()  # held by the thread that uses the stream
        self.is_closed = False

    def start(self) -> threading.Thread:
        """Execute `run` in a thread of this process."""
        thread = threading.Thread(target=self.run, name="stream", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._is_stopped = True
        self._endpoint.wake()

    def run(self) -> None:
        """Serve until `stop`; then close the stream."""
        try:
            while not self._is_stopped:
                ready = self._endpoint.wait(self._timeout_ms())
                with self._lock:
                    self._serve(ready)
        finally:
            with self._lock:
                self.is_closed = True
                self._endpoint.close()
                self._address_file.unlink(missing_ok=True)
                self._stream.close()

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[SampleStream]:
        """The stream, for a call of another thread. Raises RunError once the stream is closed."""
        with self._lock:
            if self.is_closed:
                raise RunError("the sample stream is closed: its thread has ended")
            yield self._stream
            self._stream.free_unused()
            consumers = self._stream.metadata.consumers
            can_serve = any(consumers[get.consumer].ready.num_rows for get in self._gets)
        if can_serve:
            self._endpoint.wake()

    def evict(self, client_id: str) -> None:
        """Disconnect a client and release its leases soon, from any thread."""
        self._evicted.append(client_id)
        self._endpoint.wake()

    def _serve(self, ready: Sequence[int]) -> None:
        while self._evicted:
            for client in self._endpoint.find(self._evicted.popleft()):
                self._disconnect(client)
        self._receive(ready)
        self._stream.metadata.expire(time.monotonic())
        self._retry_gets()
        self._stream.free_unused()
        self._send_replies()

    def _receive(self, ready: Sequence[int]) -> None:
        for client, frames in self._endpoint.receive(ready):
            if frames is None:
                self._disconnect(client)
            else:
                self._execute(client, frames)

    def _timeout_ms(self) -> int | None:
        """Time to the first deadline of a lease or pending get."""
        deadlines = [get.deadline_s for get in self._gets]
        if (next_expiry_s := self._stream.metadata.next_expiry_s) is not None:
            deadlines.append(next_expiry_s)
        if not deadlines:
            return None
        remaining_s = min(min(deadlines) - time.monotonic(), MAX_POLL_S)
        return int(1e3 * max(0.0, remaining_s)) + 1

    def _execute(self, client: ClientConnection, frames: Frames) -> None:
        """Execute a request. An invalid one changes nothing and gets an error reply."""
        request_id = transport.UNMATCHED
        try:
            header = transport.decode_header(frames)
            request_id = int(header["id"])
            method = _METHODS.get(header["method"])
            if method is None:
                raise StreamError(
                    f"unknown method {header['method']!r}; the methods are {', '.join(_METHODS)}"
                )
            if not client.client_id and header["method"] != "connect":
                # The last request of a client that was evicted may arrive after its eviction.
                raise StreamError("this client is not connected, or was evicted: connect again")
            reply = method(self, client, header, frames[1:])
        except (*REFUSED, *MALFORMED) as error:
            reply = _error_reply(error)
        if reply is not None:
            self._replies.append((client, request_id, reply))

    def _send_replies(self) -> None:
        """Send all replies, with the blocks that each client may reuse."""
        for client, request_id, (header, buffers) in self._replies:
            header |= {"id": request_id}
            if client.client_id and (reusable := self._stream.take_reusable(client.client_id)):
                header["reusable"] = reusable
            self._endpoint.send(client, transport.encode_message(header, buffers))
        self._replies.clear()

    def _retry_gets(self) -> None:
        """Reply to pending gets that can be served or have timed out."""
        for get in [*self._gets]:
            try:
                reply = self._try_get(get)
            except (*REFUSED, *MALFORMED) as error:
                reply = _error_reply(error)
            if reply is None:
                if time.monotonic() < get.deadline_s:
                    continue
                reason = self._stream.metadata.describe_missing(get.consumer, get.request)
                reply = {"timed_out": [get.wait_s, reason]}, ()
            self._gets.remove(get)
            self._replies.append((get.client, get.request_id, reply))

    def _try_get(self, get: PendingGet) -> Reply | None:
        """Lease the rows of a get; None while they are not ready."""
        metadata, now_s = self._stream.metadata, time.monotonic()
        lease = metadata.lease(get.consumer, get.client.name, get.request, now_s)
        if lease is None:
            return None
        with contextlib.ExitStack() as on_error:  # the client would not know that it has the lease
            on_error.callback(metadata.release, lease.lease_id, get.client.name, now_s)
            reply = self._lease_reply(lease, get.is_inline)
            on_error.pop_all()
        return reply

    def _disconnect(self, client: ClientConnection) -> None:
        """Release the leases of a client, drop its pending gets and close its connection."""
        self._stream.metadata.release_client(client.name)
        if client.client_id:
            self._stream.remove_owner(client.client_id)
        self._gets = [get for get in self._gets if get.client is not client]
        self._endpoint.disconnect(client)

    def _handle_connect(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        """Register the client's id."""
        stream, client_id = self._stream, str(header["client_id"])
        if not is_segment_name(f"{client_id}-0"):
            raise StreamError(f"client_id = {client_id!r:.40}: must be 16 hexadecimal digits")
        is_in_use = bool(client.client_id) or bool(self._endpoint.find(client_id))
        if (is_in_use or stream.has_owner(client_id)) and client_id != client.client_id:
            raise StreamError(
                f"client_id {client_id} is in use, or this client has another id: draw one random id per "
                "client and keep it"
            )
        client.client_id = client_id
        self._endpoint.register(client)
        return {
            "fields": [(f.name, f.dtype, f.shape) for f in stream.fields.values()],
            "folder": str(stream.folder.resolve()),
        }, ()

    def _handle_disconnect(self, client: ClientConnection, _: dict[str, Any], __: Frames) -> Reply:
        self._disconnect(client)
        return {}, ()

    def _handle_register_consumer(self, _: ClientConnection, header: dict[str, Any], __: Frames) -> Reply:
        lease_s = header["lease_s"]
        rules: dict[str, Any] = {} if lease_s is None else {"lease_s": float(lease_s)}
        rules |= {key: int(header[key]) for key in ("group_size", "held_out_size")}
        rules["by_version"] = bool(header["by_version"])
        self._stream.metadata.register_consumer(str(header["name"]), header["fields"], **rules)
        return {}, ()

    def _handle_put(self, client: ClientConnection, header: dict[str, Any], buffers: Frames) -> Reply:
        stream = self._stream
        samples = decode_samples(transport.decode_integers(buffers[0], np.int64, 5))
        if header["location"] is not None:
            indices = stream.put_block(
                samples, header["names"], self._client_block(client, header["location"])
            )
        else:
            indices = stream.put(
                samples, unpack(stream.fields, self._names(header), len(samples), buffers[1])
            )
        return {"first": indices.start}, ()

    def _handle_fill(self, client: ClientConnection, header: dict[str, Any], buffers: Frames) -> Reply:
        indices = transport.decode_integers(buffers[0], np.int64, 1)[:, 0].tolist()
        if header["location"] is not None:
            location = self._client_block(client, header["location"])
            self._stream.fill_block(indices, [*header["names"]], location)
        else:
            names = self._names(header)
            self._stream.fill(indices, unpack(self._stream.fields, names, len(indices), buffers[1]))
        return {}, ()

    def _handle_get(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> None:
        stream, name = self._stream, header["consumer"]
        request, is_inline = transport.request_from_json(header["request"]), bool(header["inline"])
        stream.metadata.consumer(name)
        if header.get("commit"):
            with contextlib.suppress(StreamError):  # the lease has ended
                stream.metadata.commit(int(header["commit"]), client.name, time.monotonic())

        wait_s = transport.parse_wait(header["wait_s"])
        deadline_s = time.monotonic() + wait_s
        get = PendingGet(client, int(header["id"]), name, request, is_inline, wait_s, deadline_s)
        self._gets.append(get)

    def _handle_read_leased(self, _: ClientConnection, header: dict[str, Any], buffers: Frames) -> Reply:
        indices = transport.decode_integers(buffers[0], np.int64, 1)[:, 0].tolist()
        lease = self._stream.metadata.leased_rows(header["consumer"], indices)
        return self._lease_reply(lease, bool(header["inline"]))

    def _handle_commit(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        self._stream.metadata.commit(int(header["lease"]), client.name, time.monotonic())
        return {}, ()

    def _handle_release(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        self._stream.metadata.release(int(header["lease"]), client.name, time.monotonic())
        return {}, ()

    def _handle_renew(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        self._stream.metadata.renew(int(header["lease"]), client.name, time.monotonic())
        return {}, ()

    def _handle_clear(self, _: ClientConnection, header: dict[str, Any], __: Frames) -> Reply:
        self._stream.metadata.clear(transport.groups_from_json(header["groups"]))
        return {}, ()

    def _handle_evict(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        if client.remote is not None:
            raise StreamError("only a client on the server's own host may evict another client")
        for evicted in self._endpoint.find(str(header["client_id"])):
            self._disconnect(evicted)
        return {}, ()

    def _handle_status(self, _: ClientConnection, __: dict[str, Any], ___: Frames) -> Reply:
        metadata = self._stream.metadata
        return {"num_rows": len(metadata.rows), "num_bytes": metadata.num_bytes}, ()

    def _names(self, header: dict[str, Any]) -> list[str]:
        names = [*header["names"]]
        self._stream.metadata.field_mask(names)
        return names

    def _client_block(self, client: ClientConnection, value: Sequence[Any]) -> BlockLocation:
        """The location of a block in a segment of the client. Raises StreamError for any other location."""
        location = transport.location_from_json(value)
        if (
            not is_segment_name(location.segment)
            or not client.client_id
            or not location.segment.startswith(f"{client.client_id}-")
        ):
            raise StreamError(f"{location.segment!r} is not a segment of this client: write to your own")
        num_bytes = segment_size(self._stream.folder / location.segment)
        if location.offset < 0 or location.num_bytes < 0 or location.offset + location.num_bytes > num_bytes:
            raise StreamError(f"{location} is outside its segment, which has {num_bytes} bytes")
        return location

    def _lease_reply(self, lease: StreamLease, is_inline: bool) -> Reply:
        """The locations of a lease's blocks; with `is_inline`, the needed columns themselves."""
        parts, pairs, blocks = [], [], []
        for block, found in lease.blocks.items():
            names, num_rows = block.names, block.num_rows
            location: BlockLocation | None = block.location
            positions = np.array(found, np.int32).reshape(-1, 2)
            if is_inline:
                fields = self._stream.fields
                columns = unpack(fields, names, num_rows, self._stream.view(block))
                names = self._stream.metadata.needed_names(lease.consumer, names)
                rows = positions[:, 1]
                packer = BlockPacker(fields, {n: columns[n].select(rows) for n in names}, len(found))
                blocks.append(bytearray(packer.num_bytes))
                packer.write(blocks[-1])
                positions[:, 1] = np.arange(len(found))
                location, num_rows = None, len(found)
            parts.append([names, num_rows, location])
            pairs.append(positions)
        header = {"lease": lease.lease_id, "parts": parts}
        return header, [encode_lease(lease), *pairs, *blocks]


class InProcessClient:
    """Calls the stream of a server that a thread of this process runs. Methods as those of `StreamClient`."""

    def __init__(self, server: StreamServer) -> None:
        self._server = server

    def put(self, samples: Sequence[SampleMeta], columns: ColumnData) -> range:
        with self._server.exclusive() as stream:
            return stream.put(samples, columns)

    def fill(self, indices: Sequence[int], columns: ColumnData) -> None:
        with self._server.exclusive() as stream:
            stream.fill(indices, columns)

    def clear(self, groups: Iterable[GroupId]) -> None:
        with self._server.exclusive() as stream:
            stream.metadata.clear(groups)

    def evict(self, client_id: str) -> None:
        """As of `StreamClient`, soon."""
        self._server.evict(client_id)

    def close(self) -> None:
        """The client has no connection."""


def _error_reply(error: Exception) -> Reply:
    if isinstance(error, MALFORMED):
        return {"error": f"malformed request: {type(error).__name__}: {error}"}, ()
    return {"error": str(error), "is_full": isinstance(error, StorageFullError)}, ()


_METHODS: dict[str, Callable[[StreamServer, ClientConnection, dict[str, Any], Frames], Reply | None]] = {
    name.removeprefix("_handle_"): method
    for name, method in vars(StreamServer).items()
    if name.startswith("_handle_")
}
