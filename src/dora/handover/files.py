"""The files through which a request changes hands, and the one name that says whose it is.

The source writes a snapshot and names it `.offered`. From then on the first rename decides, for
it is atomic: to `.taken` by the destination or to `.kept` by the source. So there is exactly one
owner at any instant, whatever dies when. Neither side removes these files; the driver does.
"""

from __future__ import annotations

import contextlib
import hashlib
import mmap
import os
import pickle
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dora.engine.rows import NUM_LOGPROBS, Draft
from dora.engine.sequence import Request

FORMAT = 3
_DIGEST_BYTES = 16
_NUM_PUBLISHED, _NUM_COPIED, _FIRST = 0, 1, 2  # places in a table


class TransferError(Exception):
    """A request cannot be taken over as it was offered; the source keeps it."""


class KVFormat(NamedTuple):
    """What two engines must have in common for the KV of one to be of use to the other."""

    number: int
    model_digest: str
    weight_digest: str
    dtype: str
    block_shape: tuple[int, ...]

    def check_same(self, own: KVFormat) -> None:
        """Raises TransferError naming what differs from `own`."""
        for name in self._fields:
            theirs, ours = getattr(self, name), getattr(own, name)
            if theirs != ours:
                raise TransferError(f"its {name} is {theirs}, here it is {ours}")

    def without_kv(self) -> KVFormat:
        """What two engines must have in common where no KV moves: the weights."""
        return self._replace(block_shape=())


class Snapshot(NamedTuple):
    """A request at rest. Its KV is in `blocks` of the source's pool, whose words add up to `sums`.

    Both begin behind the blocks that the destination had from the start, and are empty where no KV moves.
    `num_computed` tokens have KV. The source's last step ended at `stopped_s`.
    """

    format: KVFormat
    request: Request
    draft: Draft
    num_computed: int
    blocks: NDArray[np.int64]
    sums: NDArray[np.uint64]
    stopped_s: float

    def check(self, form: KVFormat, request: Request) -> None:
        """Raises TransferError if it is not this unfinished `request`, of the same weights, whole."""
        self.format.check_same(form)
        if self.request != request:
            raise TransferError("it is another request than was announced")
        draft, num_stamped = self.draft, sum(chunk.num_tokens for chunk in self.draft.chunks)
        length = len(request.prompt_ids) + len(draft.token_ids)
        if not (
            self.num_computed == length - 1 < request.max_length - 1
            and len(draft.token_ids) == num_stamped
            and draft.logprobs.shape == (num_stamped, NUM_LOGPROBS)
            and len(self.blocks) == len(self.sums)
        ):
            raise TransferError("its snapshot contradicts itself")


class Table:
    """The source says which blocks are full, the destination how many of them it has copied.

    A mapped file of int64: both counts, then the numbers of the blocks.
    """

    def __init__(self, path: str, num_blocks: int | None = None) -> None:
        """Make a table for `num_blocks`, or open the one that is there; raises OSError."""
        flags = os.O_RDWR if num_blocks is None else os.O_RDWR | os.O_CREAT
        descriptor = os.open(path, flags, 0o600)
        try:
            if num_blocks is not None:
                os.write(descriptor, bytes(8 * (_FIRST + num_blocks)))
            self._words = memoryview(mmap.mmap(descriptor, 0)).cast("q")
        finally:
            os.close(descriptor)

    @property
    def num_copied(self) -> int:
        return self._words[_NUM_COPIED]

    @num_copied.setter
    def num_copied(self, num_blocks: int) -> None:
        self._words[_NUM_COPIED] = num_blocks

    def publish(self, blocks: list[int]) -> None:
        """Add blocks that will not change any more."""
        num_published = self._words[_NUM_PUBLISHED]
        start = _FIRST + num_published
        self._words[start : start + len(blocks)] = array("q", blocks)
        self._words[_NUM_PUBLISHED] = num_published + len(blocks)

    def published(self, start: int) -> list[int]:
        """The blocks published, without the first `start`."""
        return self._words[_FIRST + start : _FIRST + self._words[_NUM_PUBLISHED]].tolist()


class Handover:
    """The files of one move in `folder`."""

    def __init__(self, folder: Path, move: int) -> None:
        stem = f"{folder}/move-{move}."
        self.table, self._draft, self._offered, self._taken, self._kept = (
            stem + name for name in ("table", "draft", "offered", "taken", "kept")
        )

    def open_table(self, num_blocks: int | None = None) -> Table:
        """Make the table of the move for `num_blocks`, or open the one that is there. Raises OSError."""
        return Table(self.table, num_blocks)

    def offer(self, snapshot: Snapshot) -> None:
        """Whoever is first may have the request now. Raises OSError, for instance on a full disk."""
        content = pickle.dumps(snapshot, protocol=pickle.HIGHEST_PROTOCOL)
        self.put_offer(_digest(content) + content)

    def put_offer(self, content: bytes) -> None:
        """Have these bytes under the name that the other side looks for."""
        with open(self._draft, "wb", buffering=0) as file:
            file.write(content)
        os.rename(self._draft, self._offered)

    def get_offer(self) -> bytes | None:
        """The bytes under that name, if there are any."""
        try:
            with open(self._offered, "rb", buffering=0) as file:
                return file.read()
        except FileNotFoundError:
            return None

    def offered(self) -> Snapshot | None:
        """What the source offers, if it does. Raises TransferError if it is damaged."""
        found = self.get_offer()
        if found is None:
            return None
        digest, content = found[:_DIGEST_BYTES], found[_DIGEST_BYTES:]
        if _digest(content) != digest:
            raise TransferError("its snapshot is damaged: the checksum differs")
        snapshot = pickle.loads(content)
        assert isinstance(snapshot, Snapshot)
        return snapshot

    @property
    def is_taken(self) -> bool:
        return os.path.exists(self._taken)

    def take(self) -> bool:
        """The destination wants the request; False if the source was first."""
        return _rename(self._offered, self._taken)

    def keep(self) -> bool:
        """The source wants it back; False if the destination was first."""
        return _rename(self._offered, self._kept)

    def remove(self) -> None:
        """Clear up, once neither side looks at the files any more."""
        for path in (self.table, self._draft, self._offered, self._taken, self._kept):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path)


def _rename(old: str, new: str) -> bool:
    try:
        os.rename(old, new)
    except FileNotFoundError:
        return False
    return True


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=_DIGEST_BYTES).digest()
