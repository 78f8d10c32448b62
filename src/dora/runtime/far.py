"""How engines of several machines hand requests over: by files that lie with the driver, and lines for KV.

Who owns a request is settled by a rename in the driver's folder, wherever the two sides are: so one place
knows, and it is the one that outlives both. Blocks go from the source's pool to the destination's over a
line between the two. What is asked here is asked between two steps, so every answer has a deadline.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from dora.handover.files import Handover, Table
from dora.handover.pool import Blocks, Peer, block_bytes
from dora.handover.ways import Ways
from dora.runtime.sealed import Address, Listener, SealedLine, call

DESK_S = 30.0  # that the driver may take to answer; an engine that does not know what it owns ends
KV_S = 2.0  # that a source may take for some blocks; after that the request stays where it is
LOOK_S = 0.002  # between two looks at what the other side has done


class News(NamedTuple):
    """What has become of a move by now. `published` are the blocks after those that were known."""

    published: list[int]
    num_copied: int
    offer: bytes | None
    is_taken: bool


def _tell(files: Handover, num_known: int, has_table: bool) -> News:
    table = files.open_table() if has_table else None
    published = table.published(num_known) if table else []
    return News(published, table.num_copied if table else 0, files.get_offer(), files.is_taken)


def _make_table(files: Handover, num_blocks: int) -> None:
    files.open_table(num_blocks)


def _publish(files: Handover, blocks: list[int]) -> None:
    files.open_table().publish(blocks)


def _note_copied(files: Handover, num_blocks: int) -> None:
    files.open_table().num_copied = num_blocks


DESK: dict[str, Callable[..., object]] = {
    "tell": _tell,
    "make_table": _make_table,
    "publish": _publish,
    "note_copied": _note_copied,
    "put_offer": Handover.put_offer,
    "take": Handover.take,
    "keep": Handover.keep,
}


def attend(line: SealedLine, folder: Path) -> None:
    """The driver's side, until the line ends: do in its files what an engine elsewhere asks."""
    with contextlib.closing(line), contextlib.suppress(EOFError, OSError):
        while True:
            move, verb, args = line.recv()
            try:
                answer = DESK[verb](Handover(folder, move), *args)
            except (OSError, ValueError) as error:
                answer = OSError(f"at the driver: {error}")
            line.send(answer)


class Desk:
    """The engine's side of that."""

    def __init__(self, address: Address) -> None:
        """Raises OSError if nobody is there."""
        self._line = call(address, None)
        self._line.wait_at_most(DESK_S)

    def ask(self, move: int, verb: str, *args: Any) -> Any:
        """Raises OSError for what cannot be done; a line that has ended is an EOFError."""
        self._line.send((move, verb, args))
        answer = self._line.recv()
        if isinstance(answer, OSError):
            raise answer
        return answer

    def close(self) -> None:
        """Nothing more is asked."""
        self._line.close()


class FarTable(Table):
    """A table that lies with the driver."""

    def __init__(self, files: FarHandover) -> None:
        self._files = files
        self._known: list[int] = []

    @property
    def num_copied(self) -> int:
        return self._files.look().num_copied

    @num_copied.setter
    def num_copied(self, num_blocks: int) -> None:
        self._files.ask("note_copied", num_blocks)

    def publish(self, blocks: list[int]) -> None:
        self._files.ask("publish", blocks)

    def published(self, start: int) -> list[int]:
        return self._files.look().published[start:]


class FarHandover(Handover):
    """A move whose files lie with the driver."""

    def __init__(self, desk: Desk, move: int) -> None:
        self._desk, self._move = desk, move
        self._news, self._looked_s = News([], 0, None, False), 0.0
        self._has_table = False

    def ask(self, verb: str, *args: Any) -> Any:
        """As `Desk.ask`. What is known of the other side is forgotten."""
        self._looked_s = 0.0
        return self._desk.ask(self._move, verb, *args)

    def look(self) -> News:
        """What the other side has done, as of LOOK_S ago at most; `published` has all blocks."""
        if time.monotonic() - self._looked_s > LOOK_S:
            known = self._news.published
            news = self.ask("tell", len(known), self._has_table)
            self._news, self._looked_s = news._replace(published=known + news.published), time.monotonic()
        return self._news

    def open_table(self, num_blocks: int | None = None) -> Table:
        if num_blocks is not None:
            self.ask("make_table", num_blocks)
        self._has_table = True
        return FarTable(self)

    def put_offer(self, content: bytes) -> None:
        self.ask("put_offer", content)

    def get_offer(self) -> bytes | None:
        return self.look().offer

    @property
    def is_taken(self) -> bool:
        return self.look().is_taken

    def take(self) -> bool:
        return bool(self.ask("take"))

    def keep(self) -> bool:
        return bool(self.ask("keep"))


class PoolDoor:
    """Where engines of other machines read this one's KV; who has its address may."""

    def __init__(self, host: str, pool: Blocks) -> None:
        """Raises OSError if nothing can listen there."""
        import dora.runtime.bulk  # noqa: F401  compiled now, not while a move waits

        self._pool, self._listener = pool, Listener(host)
        self.address = self._listener.expect(self._serve, once=False)

    def close(self) -> None:
        """Nobody new comes in."""
        self._listener.close()

    def _serve(self, line: SealedLine, _: Any) -> None:
        with contextlib.closing(line), contextlib.suppress(EOFError, OSError, IndexError):
            line.send((len(self._pool), block_bytes(self._pool)))
            while True:
                line.send(self._pool[line.recv()])  # a copy, which has left the pool before it may change


class FarPool:
    """A peer on another machine."""

    def __init__(self, address: Address, num_bytes: int) -> None:
        """Raises OSError if it does not answer, ValueError if its blocks are not of `num_bytes`."""
        self._line, self.is_well = call(address, None), True
        self._line.wait_at_most(KV_S)
        self._num_blocks, found = self._line.recv()
        if found != num_bytes:
            self.close()
            raise ValueError(f"its blocks have {found} bytes, here they have {num_bytes}")

    def __len__(self) -> int:
        return int(self._num_blocks)

    def close(self) -> None:
        """Nothing more is copied."""
        self._line.close()

    def copy(self, sources: Sequence[int], pool: Blocks, targets: Sequence[int], /) -> None:
        self.is_well, was_well = False, self.is_well  # a late answer would be taken for the next one
        if not was_well:
            raise ConnectionResetError("it has not answered before")
        try:
            self._line.send(list(sources))
            pool[list(targets)] = self._line.recv()
        except EOFError as error:
            raise ConnectionResetError("its engine is gone") from error
        self.is_well = True


class FarWays(Ways):
    """Those of an engine whose run is on several machines."""

    def __init__(self, desk: Address | None) -> None:
        """`desk`: the driver's; None: its folder is on this machine."""
        super().__init__()
        self._desk = None if desk is None else Desk(desk)
        self._far: dict[Address, FarPool] = {}

    def meet(self, folder: Path, move: int) -> Handover:
        return super().meet(folder, move) if self._desk is None else FarHandover(self._desk, move)

    def peer(self, pool: Any, num_bytes: int) -> Peer:
        """A line that failed once is not used again."""
        if not isinstance(pool, Address):
            return super().peer(pool, num_bytes)
        if pool in self._far and not self._far[pool].is_well:
            self._far.pop(pool).close()
        if pool not in self._far:
            self._far[pool] = FarPool(pool, num_bytes)
        return self._far[pool]

    def close(self) -> None:
        """Nobody is reached any more."""
        if self._desk is not None:
            self._desk.close()
        for peer in self._far.values():
            peer.close()
