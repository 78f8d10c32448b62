"""A stream in another process, as its producers and consumers see it.

On the storage's own host blocks are written and read where they lie; from other hosts they travel with
the messages. A client is for one thread: every process and every thread makes its own.
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

from dora.core.records import GroupId
from dora.errors import NoRoomError, RunError, StreamError
from dora.stream import wire
from dora.stream.batch import Batch, Part, Waited
from dora.stream.connection import check_size
from dora.stream.fields import Given, Packing
from dora.stream.ledger import FOREVER
from dora.stream.lines import NewRow, Want
from dora.stream.links import Far, Link, Near
from dora.stream.segments import Arena, Place, Reader, is_full

_TRY_AGAIN_S = 0.02  # while a file system is full


class StreamClient:
    """Puts and gets rows; what is refused raises StreamError, and RunError says that nobody answers."""

    def __init__(self, endpoint: str, timeout_s: float = 30.0, token: str = "") -> None:
        """`timeout_s`: how long an answer may take, beyond what was to be waited for. Raises RunError.

        `token`: what the file `token` in the stream's folder says; needed at a TCP endpoint.
        """
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._link: Link = (Near if wire.is_local(endpoint) else Far)(endpoint, timeout_s)
        self._num_asked, self._is_closed = 0, False
        self._arena: Arena | None = None
        self._reader: Reader | None = None
        self.owner = secrets.token_hex(8)  # by which the storage knows it
        try:
            hello, _ = self._ask("hello", {"owner": self.owner, "token": token})
        except (RunError, StreamError):
            self._link.close()
            raise
        self.fields = {name: wire.field_from_json(name, *rest) for name, *rest in hello["fields"]}
        folders = [Path(folder) for folder in hello["folders"]]
        if folders and wire.shares_memory(hello["folders"][0], hello["token"], hello["host"]):
            self._arena, self._reader = Arena(folders[0], self.owner), Reader(*folders)

    @property
    def shares_memory(self) -> bool:
        """Whether blocks are read where they lie."""
        return self._reader is not None

    def declare(
        self,
        name: str,
        fields: Sequence[str],
        group_size: int = 0,
        by_version: bool = False,
        lease_s: float = FOREVER,
        held_out_size: int = 0,
    ) -> None:
        """A consumer, as `Ledger.declare`. Without `lease_s` it holds rows until it commits or dies."""
        rules = {"group_size": group_size, "by_version": by_version, "held_out_size": held_out_size}
        end = {"lease_s": None if lease_s == FOREVER else lease_s}
        self._ask("declare", {"name": name, "fields": [*fields], **rules, **end})

    def put(self, rows: Sequence[NewRow], columns: Given, wait_s: float = 60.0) -> range | Waited:
        """New rows with their first columns; their indices.

        While the stream is full it waits; after `wait_s` it says who is slow, and the rows are not there.
        """
        wait_s = wire.seconds(wait_s)
        packing = Packing(self.fields, columns, len(rows))
        numbers = np.array([(*row.id, row.version, row.num_tokens) for row in rows], np.int64)
        answer = self._write("put", packing, numbers, wait_s)
        if isinstance(answer, Waited):
            return answer
        return range(answer["first"], answer["first"] + len(rows))

    def fill(self, indices: Sequence[int], columns: Given) -> None:
        """Further columns of rows that are there; a full stream takes them too.

        Raises NoRoomError, which is no StreamError, if the file system is full: nothing was filled in.
        """
        packing = Packing(self.fields, columns, len(indices))
        if isinstance(full := self._write("fill", packing, np.asarray(indices, np.int64)), Waited):
            raise NoRoomError(full.why)

    def get(self, consumer: str, want: Want | None = None, wait_s: float = 60.0) -> Batch | Waited:
        """Rows on lease, or after `wait_s` (math.inf: never) whom they wait for."""
        wait_s = wire.seconds(wait_s)
        asked = {"consumer": consumer, "want": want or Want(), "inline": self._reader is None}
        header, buffers = self._ask("get", asked, wait_s=wait_s)
        if "waited" in header:
            return Waited(*header["waited"])
        try:
            return self._batch(header, buffers)
        except BaseException:  # nobody here will know of the lease
            self._send("give_back", {"lease": header["lease"]}, ())
            raise

    def look(self, consumer: str, indices: Sequence[int]) -> Batch:
        """Rows that another client has on lease for the consumer, as long as it does; nothing to commit."""
        asked = {"consumer": consumer, "inline": self._reader is None}
        return self._batch(*self._ask("look", asked, (np.asarray(indices, np.int64),)))

    def commit(self, batch: Batch) -> None:
        """The rows are consumed; their columns must not be looked at any more."""
        self._ask("commit", {"lease": batch.lease})

    def give_back(self, batch: Batch) -> None:
        """Somebody else may have the rows."""
        self._ask("give_back", {"lease": batch.lease})

    def renew(self, batch: Batch) -> None:
        """The lease lasts as long again, from now on."""
        self._ask("renew", {"lease": batch.lease})

    def clear(self, groups: Iterable[GroupId]) -> None:
        """Forget groups that nobody needs any more."""
        self._ask("clear", {"groups": [*groups]})

    def bury(self, owner: str) -> None:
        """The client of this name is dead. Who is far away may be so without a word, so say it for it."""
        self._ask("bury", {"owner": owner})

    def status(self) -> dict[str, Any]:
        """Rows and bytes there, rows ready by consumer, and who is furthest behind."""
        header, _ = self._ask("status", {})
        return {name: header[name] for name in ("num_rows", "num_bytes", "num_ready", "slowest")}

    def close(self) -> None:
        """Give back what is on lease. Rows that were put stay."""
        if not self._is_closed:
            self._is_closed = True
            with contextlib.suppress(RunError):  # the storage has ended before
                self._send("bye", {}, ())
            self._link.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _batch(self, header: dict[str, Any], buffers: Sequence[bytes]) -> Batch:
        num_parts, parts = len(header["parts"]), []
        rows, pairs, blocks = buffers[0], buffers[1 : 1 + num_parts], iter(buffers[1 + num_parts :])
        for (names, num_rows, place), found in zip(header["parts"], pairs, strict=True):
            block = next(blocks) if self._reader is None else self._reader.view(Place(*place))
            parts.append(Part(names, num_rows, block, wire.integers(found, np.int32, 2)))
        return Batch(header["lease"], wire.integers(rows, np.int64, 6), self.fields, parts)

    def _write(self, verb: str, packing: Packing, numbers: Any, wait_s: float = 0.0) -> Any:
        """Have a block written, and say so; the header of the answer, or Waited."""
        asked: dict[str, Any] = {"names": packing.names, "place": None}
        if self._arena is None:
            block = bytearray(packing.num_bytes)
            packing.write(block)
            header, _ = self._ask(verb, asked, (numbers, block), wait_s)
            return Waited(*header["waited"]) if "waited" in header else header
        reserved = self._reserved(self._arena, packing.num_bytes, wait_s)
        if isinstance(reserved, Waited):
            return reserved
        place, view = reserved
        packing.write(view)
        try:
            header, _ = self._ask(verb, asked | {"place": place}, (numbers,), wait_s)
        except (StreamError, NoRoomError):  # but without an answer it may have been taken
            self._arena.release(place.segment)
            raise
        if "waited" not in header:
            return header
        self._arena.release(place.segment)
        return Waited(*header["waited"])

    def _reserved(self, arena: Arena, num_bytes: int, wait_s: float) -> tuple[Place, memoryview] | Waited:
        """A place for a block; while the file system is full, it waits for blocks to go."""
        until_s = time.monotonic() + wait_s
        while True:
            try:
                return arena.reserve(num_bytes)
            except OSError as error:
                if not is_full(error):
                    raise
                slowest = self.status()["slowest"]  # whose answer also says what may be used again
                if time.monotonic() >= until_s:
                    return Waited(wait_s, f"there is no room for {num_bytes} bytes ({error}): {slowest}")
                time.sleep(_TRY_AGAIN_S)

    def _ask(
        self, verb: str, asked: dict[str, Any], buffers: Sequence[Any] = (), wait_s: float = 0.0
    ) -> tuple[dict[str, Any], list[bytes]]:
        number = self._send(verb, asked | {"wait_s": wait_s}, buffers)
        until_s = time.monotonic() + wait_s + self._timeout_s
        while (frames := self._link.receive(until_s)) is not None:
            header = wire.header_of(frames)
            for segment, num_blocks in header.get("released", {}).items():
                if self._arena is not None:
                    self._arena.release(segment, num_blocks)
            if header["n"] not in (number, wire.TO_ANY):  # of a request that was given up
                if header.get("lease"):
                    self._send("give_back", {"lease": header["lease"]}, ())
                continue
            if "error" in header:
                raise (NoRoomError if header.get("is_full") else StreamError)(header["error"])
            return header, frames[1:]
        raise RunError(
            f"the stream at {self._endpoint} has not answered {verb!r} for {self._timeout_s:g} s: "
            "is its process alive?"
        )

    def _send(self, verb: str, asked: dict[str, Any], buffers: Sequence[Any]) -> int:
        check_size(sum(memoryview(buffer).nbytes for buffer in buffers))
        self._num_asked += 1
        self._link.send(wire.frames_of({"n": self._num_asked, "do": verb} | asked, buffers))
        return self._num_asked
