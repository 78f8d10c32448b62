"""Serve a stream to other processes, on the same host and on others, and to other threads of this one.

One thread repeats: receive requests, execute them, free unused blocks, reply. A get stays pending
until it can be served or times out. Other threads call the stream directly, between two rounds of
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
from dora.curve import MAX_POLL_S
from dora.errors import RunError, StreamError
from dora.stream import transport
from dora.stream.metadata import BatchRequest, BlockLocation, SampleMeta, StreamLease
from dora.stream.schema import BlockPacker, ColumnData
from dora.stream.storage import (
    SampleStream,
    decode_samples,
    encode_lease,
    is_segment_name,
    new_owner,
    segment_size,
)
from dora.stream.transport import ClientConnection, Frames, Reply, ServerEndpoint

FRAME_BYTES = 64 << 20  # of a block for a remote client: less than MAX_FRAME_BYTES, also when encrypted
REFUSED = (StreamError, OSError)
MALFORMED = (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError, MemoryError)


@dataclass(eq=False)
class PendingGet:
    """A get that waits until groups are ready."""

    client: ClientConnection
    request_id: int
    consumer: str
    request: BatchRequest
    wait_s: float
    deadline_s: float


class StreamServer:
    """Serves a stream until it is stopped."""

    def __init__(self, stream: SampleStream, host: str | None = None) -> None:
        """Listens at once, for other machines at `host`; `run` replies. Raises OSError or zmq.ZMQError.

        `remote` is the address for clients on other machines, which cannot put or fill.
        """
        self._stream = stream
        self._endpoint = ServerEndpoint(stream.folder, host)
        self.remote = self._endpoint.remote
        self._gets: list[PendingGet] = []
        self._replies: list[tuple[ClientConnection, int, Reply]] = []
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
            can_serve = any(consumers[get.consumer].has_ready for get in self._gets)
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
        """Lease the groups of a get; None while they are not ready."""
        metadata, now_s = self._stream.metadata, time.monotonic()
        lease = metadata.lease(get.consumer, get.client.client_id, get.request, now_s)
        if lease is None:
            return None
        with contextlib.ExitStack() as on_error:  # the client would not know that it has the lease
            on_error.callback(metadata.release, lease.lease_id, get.client.client_id, now_s)
            reply = self._lease_reply(get.client, lease)
            on_error.pop_all()
        return reply

    def _disconnect(self, client: ClientConnection) -> None:
        """Release the leases of a client, drop its pending gets and close its connection."""
        if client.client_id:
            self._stream.metadata.release_client(client.client_id)
            self._stream.remove_owner(client.client_id)
        self._gets = [get for get in self._gets if get.client is not client]
        self._endpoint.disconnect(client)

    def _handle_connect(self, client: ClientConnection, _: dict[str, Any], __: Frames) -> Reply:
        """Draw the client's id."""
        client.client_id = client.client_id or new_owner()
        self._endpoint.register(client)
        return {"client_id": client.client_id, "fields": [*self._stream.fields.values()]}, ()

    def _handle_disconnect(self, client: ClientConnection, _: dict[str, Any], __: Frames) -> None:
        """The client closes its connection; there is no reply."""
        self._disconnect(client)

    def _handle_put(self, client: ClientConnection, header: dict[str, Any], buffers: Frames) -> Reply:
        samples = decode_samples(transport.decode_integers(buffers[0], np.int64, 5))
        location = self._client_block(client, header["location"])
        self._stream.put_block(samples, header["names"], int(header["num_rows"]), location)
        return {}, ()

    def _handle_fill(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        groups = transport.groups_from_json(header["groups"])
        location = self._client_block(client, header["location"])
        self._stream.fill_block(groups, header["names"], int(header["num_rows"]), location)
        return {}, ()

    def _handle_get(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> None:
        metadata, consumer = self._stream.metadata, header["consumer"]
        metadata.consumer(consumer)
        request, wait_s = transport.request_from_json(header["request"]), float(header["wait_s"])
        if header["commit"]:
            with contextlib.suppress(StreamError):  # the lease has ended
                metadata.commit(int(header["commit"]), client.client_id, time.monotonic())
        deadline_s = time.monotonic() + wait_s
        self._gets.append(PendingGet(client, int(header["id"]), consumer, request, wait_s, deadline_s))

    def _handle_read_leased(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        requests = transport.requests_from_json(header["requests"])
        return self._lease_reply(client, self._stream.metadata.leased_rows(header["consumer"], requests))

    def _handle_commit(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        self._stream.metadata.commit(int(header["lease"]), client.client_id, time.monotonic())
        return {}, ()

    def _handle_release(self, client: ClientConnection, header: dict[str, Any], _: Frames) -> Reply:
        self._stream.metadata.release(int(header["lease"]), client.client_id, time.monotonic())
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
        return {"num_rows": metadata.num_rows, "num_bytes": metadata.num_bytes}, ()

    def _client_block(self, client: ClientConnection, value: Sequence[Any]) -> BlockLocation:
        """The location of a block in a segment of the client. Raises StreamError for any other location."""
        location = transport.location_from_json(value)
        if not is_segment_name(location.segment) or not location.segment.startswith(f"{client.client_id}-"):
            raise StreamError(f"{location.segment!r} is not a segment of this client: write to your own")
        num_bytes = segment_size(self._stream.segments / location.segment)
        if location.offset < 0 or location.num_bytes < 0 or location.offset + location.num_bytes > num_bytes:
            raise StreamError(f"{location} is outside its segment, which has {num_bytes} bytes")
        return location

    def _lease_reply(self, client: ClientConnection, lease: StreamLease) -> Reply:
        """The locations of a lease's blocks; for a remote client, a block with the needed columns."""
        if client.remote is None:
            parts = [(block.names, block.num_rows, block.location) for block in lease.blocks]
            pairs = [np.array(found, np.int32) for found in lease.blocks.values()]
            return {"lease": lease.lease_id, "parts": parts}, [encode_lease(lease), *pairs]
        batch, names = self._stream.batch(lease), lease.consumer.fields
        packer = BlockPacker(self._stream.fields, {name: batch.rows(name) for name in names})
        packer.write(block := memoryview(bytearray(packer.num_bytes)))
        frames = [block[first : first + FRAME_BYTES] for first in range(0, len(block), FRAME_BYTES)]
        return {"lease": lease.lease_id, "names": names}, [encode_lease(lease), *frames]


class InProcessClient:
    """Calls the stream of a server that a thread of this process runs. Methods as those of `StreamClient`."""

    def __init__(self, server: StreamServer) -> None:
        self._server = server

    def put(self, samples: Sequence[SampleMeta], columns: ColumnData) -> None:
        with self._server.exclusive() as stream:
            stream.put(samples, columns)

    def fill(self, groups: Iterable[GroupId], columns: ColumnData) -> None:
        with self._server.exclusive() as stream:
            stream.fill(groups, columns)

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
    return {"error": str(error)}, ()


_METHODS: dict[str, Callable[[StreamServer, ClientConnection, dict[str, Any], Frames], Reply | None]] = {
    name.removeprefix("_handle_"): method
    for name, method in vars(StreamServer).items()
    if name.startswith("_handle_")
}
