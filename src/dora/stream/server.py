"""A stream for other processes, of this host and of others.

One thread, one round after the other: hear what was asked, do it, make it durable, answer. A put that
finds no room and a get that finds too little are held until there is, or until their deadline.
"""

from __future__ import annotations

import contextlib
import platform
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from dora.errors import StreamError
from dora.stream import wire
from dora.stream.door import Client, Door, Frames
from dora.stream.fields import Field, Packing, unpack
from dora.stream.keeper import rows_of
from dora.stream.ledger import Lease
from dora.stream.segments import is_full, is_segment, num_bytes_of
from dora.stream.stream import Stream, numbers_of_lease
from dora.tokens import write_private

REFUSED = (StreamError, OSError)  # a request that cannot be, or no room in the storage's file system
MALFORMED = (KeyError, ValueError, TypeError, IndexError, AttributeError, OverflowError)


@dataclass(eq=False)
class Held:
    """A request that waits: `attempt` answers it, if it can be answered by now."""

    client: Client
    number: int
    attempt: Callable[[], wire.Answer | None]
    why: Callable[[], str]
    wait_s: float
    until_s: float


class Server:
    """Serves a stream until it is stopped."""

    def __init__(self, stream: Stream, endpoints: Sequence[str]) -> None:
        """Listens from now on; `run` answers. Raises OSError or zmq.ZMQError if an endpoint cannot be had."""
        self._stream = stream
        self._door = Door(endpoints)
        self.endpoints = self._door.endpoints
        self._puts: deque[Held] = deque()
        self._gets: dict[str, deque[Held]] = {}
        self._answers: list[tuple[Client, int, wire.Answer]] = []
        self._owners: set[str] = set()  # of segments, said by clients that are here
        self.token = secrets.token_hex(16)  # that clients of other hosts must show
        if stream.folder is not None:
            write_private(stream.folder / wire.TOKEN, self.token)
        self._is_stopped = False

    def start(self) -> threading.Thread:
        """`run` in a thread of this process."""
        thread = threading.Thread(target=self.run, name="stream", daemon=True)
        thread.start()
        return thread

    def stop(self) -> None:
        """End `run`, from any thread."""
        self._is_stopped = True
        self._door.ring()

    def run(self) -> None:
        """Round after round."""
        try:
            while not self._is_stopped:
                self._hear()
                self._stream.ledger.expire(time.monotonic())
                self._serve_held()
                self._stream.settle()
                self._send()
        finally:
            self._door.close()
            if self._stream.folder is not None:
                (self._stream.folder / wire.TOKEN).unlink(missing_ok=True)
            self._stream.close()

    def _timeout_ms(self) -> int | None:
        """Until the next lease or the next wait ends."""
        ends = [held.until_s for queue in (self._puts, *self._gets.values()) for held in queue]
        if (next_end_s := self._stream.ledger.next_end_s) is not None:
            ends.append(next_end_s)
        left_s = min(min(ends) - time.monotonic(), wire.LONGEST_WAIT_S) if ends else None
        return None if left_s is None else int(1e3 * max(0.0, left_s)) + 1

    def _hear(self) -> None:
        for client, frames in self._door.hear(self._timeout_ms()):
            if frames is None:
                self._leave(client)
            else:
                self._obey(client, frames)

    def _obey(self, client: Client, frames: Frames) -> None:
        """Do what is asked. A request that makes no sense changes nothing."""
        number = wire.TO_ANY
        try:
            header = wire.header_of(frames)
            number = int(header["n"])
            verb = _VERBS.get(header["do"])
            if verb is None:
                raise StreamError(f"the stream knows no {header['do']!r}; it knows {', '.join(_VERBS)}")
            if not client.owner and header["do"] != "hello":  # it may be the last word of somebody who died
                raise StreamError("the stream does not know this client, or took it for dead: connect anew")
            answer = verb(self, client, header, frames[1:])
        except (*REFUSED, *MALFORMED) as error:
            answer = _refusal(error)
        if answer is not None:
            self._answers.append((client, number, answer))

    def _send(self) -> None:
        """All answers, with what the owners of segments may use again."""
        for client, number, (header, buffers) in self._answers:
            header |= {"n": number}
            if client.owner and (released := self._stream.released(client.owner)):
                header["released"] = released
            self._door.send(client, wire.frames_of(header, buffers))
        self._answers.clear()

    def _serve_held(self) -> None:
        """Puts in order, for a large one must not wait for ever; gets of a consumer whoever can be served."""
        is_held_up = False
        for held in [*self._puts]:
            is_held_up |= not self._try(self._puts, held, is_held_up)
        for queue in self._gets.values():
            for held in [*queue]:
                self._try(queue, held)

    def _try(self, queue: deque[Held], held: Held, is_held_up: bool = False) -> bool:
        """Answer a held request, if it can be or must be; whether it is answered."""
        try:
            answer = None if is_held_up else held.attempt()
        except (*REFUSED, *MALFORMED) as error:
            answer = _refusal(error)
        if answer is None:
            if time.monotonic() < held.until_s:
                return False
            answer = {"waited": [held.wait_s, held.why()]}, ()
        queue.remove(held)
        self._answers.append((held.client, held.number, answer))
        return True

    def _hold(
        self,
        queue: deque[Held],
        client: Client,
        header: dict[str, Any],
        attempt: Callable[[], wire.Answer | None],
        why: Callable[[], str],
    ) -> None:
        wait_s = wire.seconds(header["wait_s"])
        until_s = time.monotonic() + wait_s
        queue.append(Held(client, int(header["n"]), attempt, why, wait_s, until_s))

    def _leave(self, client: Client) -> None:
        """A client is gone: what it held is given back, what it waited for is forgotten."""
        self._stream.ledger.leave(client.name)
        if client.owner:
            self._owners.discard(client.owner)
            self._stream.let_go(client.owner)
        for queue in (self._puts, *self._gets.values()):
            for held in [held for held in queue if held.client is client]:
                queue.remove(held)
        self._door.forget(client)

    def _do_hello(self, client: Client, header: dict[str, Any], _: Frames) -> wire.Answer:
        """Who it is; from far away, with the token."""
        stream, owner = self._stream, str(header["owner"])
        if client.far is not None and not secrets.compare_digest(str(header.get("token")), self.token):
            raise StreamError("the token is missing or wrong: give StreamClient that of the stream's folder")
        if not is_segment(f"{owner}-0"):
            raise StreamError("owner must be 16 hexadecimal digits")
        is_other = bool(client.owner) or owner in self._owners or stream.knows(owner)
        if is_other and owner != client.owner:
            raise StreamError(f"owner {owner} is in use, or this client has another: draw one, and keep it")
        client.owner = owner
        self._owners.add(owner)
        self._door.welcome(client)
        return {
            "fields": [wire.field_to_json(f) for f in stream.fields.values()],
            "folders": [str(path.resolve()) for path in stream.folders],
            "token": self.token,
            "host": platform.node(),
        }, ()

    def _do_bye(self, client: Client, _: dict[str, Any], __: Frames) -> wire.Answer:
        self._leave(client)
        return {}, ()

    def _do_declare(self, _: Client, header: dict[str, Any], __: Frames) -> wire.Answer:
        lease_s = header["lease_s"]
        rules: dict[str, Any] = {} if lease_s is None else {"lease_s": float(lease_s)}
        rules |= {key: int(header[key]) for key in ("group_size", "held_out_size")}
        rules["by_version"] = bool(header["by_version"])
        self._stream.declare(str(header["name"]), header["fields"], **rules)
        return {}, ()

    def _do_put(self, client: Client, header: dict[str, Any], buffers: Frames) -> None:
        stream, rows = self._stream, rows_of(wire.integers(buffers[0], np.int64, 5))
        if (given := header["place"]) is not None:
            place, names = self._place(client, given), [*header["names"]]
            put = partial(stream.admit, rows, names, place)
        else:
            columns = unpack(stream.fields, self._names(header), len(rows), buffers[1])
            put = partial(stream.put, rows, columns)

        def attempt() -> wire.Answer | None:
            indices = put()
            return None if indices is None else ({"first": indices.start}, ())

        def why() -> str:
            return f"the stream is full: {stream.ledger.slowest()}"

        self._hold(self._puts, client, header, attempt, why)

    def _do_fill(self, client: Client, header: dict[str, Any], buffers: Frames) -> wire.Answer:
        indices = wire.integers(buffers[0], np.int64, 1)[:, 0].tolist()
        if header["place"] is not None:
            self._stream.extend(indices, [*header["names"]], self._place(client, header["place"]))
        else:
            names = self._names(header)
            self._stream.fill(indices, unpack(self._stream.fields, names, len(indices), buffers[1]))
        return {}, ()

    def _do_get(self, client: Client, header: dict[str, Any], _: Frames) -> None:
        stream, name, want = self._stream, header["consumer"], wire.want_from_json(header["want"])
        is_inline = bool(header["inline"])
        stream.ledger.consumer(name)

        def attempt() -> wire.Answer | None:
            now_s = time.monotonic()
            lease = stream.lease(name, client.name, want, now_s)
            if lease is None:
                return None
            with contextlib.ExitStack() as if_it_fails:  # nobody would know of the lease
                if_it_fails.callback(stream.ledger.give_back, lease.number, client.name, now_s)
                answer = self._handed(lease, is_inline)
                if_it_fails.pop_all()
            return answer

        self._hold(
            self._gets.setdefault(name, deque()),
            client,
            header,
            attempt,
            lambda: stream.ledger.waits_for(name, want),
        )

    def _do_look(self, _: Client, header: dict[str, Any], buffers: Frames) -> wire.Answer:
        indices = wire.integers(buffers[0], np.int64, 1)[:, 0].tolist()
        return self._handed(self._stream.ledger.look(header["consumer"], indices), bool(header["inline"]))

    def _do_commit(self, client: Client, header: dict[str, Any], _: Frames) -> wire.Answer:
        self._stream.commit(int(header["lease"]), client.name, time.monotonic())
        return {}, ()

    def _do_give_back(self, client: Client, header: dict[str, Any], _: Frames) -> wire.Answer:
        self._stream.ledger.give_back(int(header["lease"]), client.name, time.monotonic())
        return {}, ()

    def _do_renew(self, client: Client, header: dict[str, Any], _: Frames) -> wire.Answer:
        self._stream.ledger.renew(int(header["lease"]), client.name, time.monotonic())
        return {}, ()

    def _do_clear(self, _: Client, header: dict[str, Any], __: Frames) -> wire.Answer:
        self._stream.clear(wire.groups_from_json(header["groups"]))
        return {}, ()

    def _do_bury(self, client: Client, header: dict[str, Any], _: Frames) -> wire.Answer:
        if client.far is not None:
            raise StreamError("only a client of the storage's own machine may say that another is dead")
        for dead in self._door.find(str(header["owner"])):
            self._leave(dead)
        return {}, ()

    def _do_status(self, _: Client, __: dict[str, Any], ___: Frames) -> wire.Answer:
        ledger = self._stream.ledger
        ready = {name: consumer.line.num_rows for name, consumer in ledger.consumers.items()}
        return {
            "num_rows": len(ledger.rows),
            "num_bytes": ledger.num_bytes,
            "num_ready": ready,
            "slowest": ledger.slowest(),
        }, ()

    def _names(self, header: dict[str, Any]) -> list[str]:
        names = [*header["names"]]
        self._stream.ledger.mask(names)
        return names

    def _place(self, client: Client, given: Sequence[Any]) -> Any:
        """Where a client says it has written a block. Raises StreamError if it may not have."""
        place = wire.place_from_json(given)
        if (
            not is_segment(place.segment)
            or not client.owner
            or not place.segment.startswith(f"{client.owner}-")
        ):
            raise StreamError(
                f"{place.segment!r} is no segment of this client: say hello, and write to your own"
            )
        folder = self._stream.folder
        num_bytes = 0 if folder is None else num_bytes_of(folder / place.segment)
        if place.offset < 0 or place.num_bytes < 0 or place.offset + place.num_bytes > num_bytes:
            raise StreamError(f"{place} lies outside of its segment, which has {num_bytes} bytes")
        return place

    def _handed(self, lease: Lease, is_inline: bool) -> wire.Answer:
        """A lease as an answer: where its blocks are, or for other hosts the blocks themselves."""
        parts, pairs, blocks = [], [], []
        for block, found in lease.blocks.items():
            names, place, num_rows = block.names, block.place, block.num_rows
            positions = np.array(found, np.int32).reshape(-1, 2)
            if is_inline:
                fields: dict[str, Field] = self._stream.fields
                columns = unpack(fields, names, num_rows, self._stream.view(block))
                names = self._stream.ledger.needed(lease.consumer, names)
                packing = Packing(fields, {n: columns[n].part(positions[:, 1]) for n in names}, len(found))
                blocks.append(bytearray(packing.num_bytes))
                packing.write(blocks[-1])
                positions[:, 1] = np.arange(len(found))
                place, num_rows = None, len(found)
            parts.append([names, num_rows, place])
            pairs.append(positions)
        header = {"lease": lease.number, "parts": parts}
        return header, [numbers_of_lease(lease), *pairs, *blocks]


def _refusal(error: Exception) -> wire.Answer:
    """As a client is told."""
    if isinstance(error, MALFORMED):
        return {"error": f"a malformed request: {type(error).__name__}: {error}"}, ()
    return {"error": str(error), "is_full": isinstance(error, OSError) and is_full(error)}, ()


_VERBS: dict[str, Callable[[Server, Client, dict[str, Any], Frames], wire.Answer | None]] = {
    name.removeprefix("_do_"): verb for name, verb in vars(Server).items() if name.startswith("_do_")
}
