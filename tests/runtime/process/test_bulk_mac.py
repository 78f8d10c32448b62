"""Large arrays on sealed lines: they arrive as they were, and nothing is read of what nobody sealed."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.runtime.process.test_rpc import Trap

from dora.runtime.process.bulk_mac import BLOCK_BYTES, BulkMac
from dora.runtime.process.rpc import OUT_OF_BAND_BYTES, AuthenticatedChannel

KEY = bytes(range(32))
HEADER = struct.Struct("<Q16s")


class Tape:
    """In the place of a socket: what is sent is written down, and heard from its beginning."""

    def __init__(self) -> None:
        self.written = bytearray()
        self._num_heard = 0

    def setsockopt(self, *_: int) -> None:
        """There is nothing to set."""

    def sendall(self, content: Any) -> None:
        self.written += content

    def recv_into(self, place: memoryview) -> int:
        some = self.written[self._num_heard : self._num_heard + len(place)]
        place[: len(some)] = some
        self._num_heard += len(some)
        return len(some)


def said(*messages: object) -> tuple[Tape, AuthenticatedChannel]:
    """The tape with these messages, and who hears it."""
    tape = Tape()
    caller = AuthenticatedChannel(tape, KEY, is_listener=False)  # type: ignore[arg-type]
    for message in messages:
        caller.send(message)
    return tape, AuthenticatedChannel(tape, KEY, is_listener=True)  # type: ignore[arg-type]


def drawn(num_bytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def formula(content: bytes, words: Sequence[Sequence[int]]) -> list[int]:
    """NH of one piece, as the paper writes it."""
    both = struct.unpack(f"<{BLOCK_BYTES // 4}I", content)
    num = len(both) // 2
    pairs = list(zip(both[:num], both[num:], strict=True))
    return [
        sum(
            ((x + words[0][i + 8 * r]) % 2**32) * ((y + words[1][i + 8 * r]) % 2**32)
            for i, (x, y) in enumerate(pairs)
        )
        % 2**64
        for r in range(4)
    ]


def test_arrays_arrive_as_they_were_sent_in_their_places() -> None:
    large = [
        drawn(num_bytes, seed)
        for seed, num_bytes in enumerate((OUT_OF_BAND_BYTES, 3 * OUT_OF_BAND_BYTES + 5))
    ]
    blocks = drawn(2 * OUT_OF_BAND_BYTES).view(np.uint64).reshape(8, -1)
    arrays: list[np.ndarray[Any, Any]] = [blocks, *large]
    for own in arrays:
        own.setflags(write=False)
    message: dict[str, Any] = {
        "few": np.arange(3),
        "large": large,
        "blocks": blocks,
        "turned": blocks.T,
        "none": drawn(0),
    }
    _, line = said("before", message, "after")
    assert line.recv() == "before"
    heard = line.recv()
    assert line.recv() == "after"
    for name in ("few", "blocks", "turned", "none"):
        np.testing.assert_array_equal(heard[name], message[name])
    assert [own.tobytes() for own in heard["large"]] == [own.tobytes() for own in large]


def test_a_large_array_goes_as_it_lies_in_memory_and_a_small_one_in_the_message() -> None:
    tape, _ = said(drawn(OUT_OF_BAND_BYTES))
    num_bytes, _ = HEADER.unpack_from(tape.written)
    assert len(tape.written) == HEADER.size + num_bytes + OUT_OF_BAND_BYTES
    assert num_bytes < 300
    tape, _ = said(drawn(OUT_OF_BAND_BYTES - 1))
    num_bytes, _ = HEADER.unpack_from(tape.written)
    assert len(tape.written) == HEADER.size + num_bytes


@pytest.mark.parametrize("wrong", ["first bit", "last bit", "two changed places", "another one"])
def test_what_is_not_the_array_that_was_sealed_is_never_unpickled(tmp_path: Path, wrong: str) -> None:
    trap, num_bytes = tmp_path / "sprung", OUT_OF_BAND_BYTES + 7
    arrays = [drawn(num_bytes, seed) for seed in range(2)]
    tape, line = said([*arrays, Trap(trap)])
    first, second = (slice(-at * num_bytes, -(at - 1) * num_bytes or None) for at in (2, 1))
    if wrong == "first bit":
        tape.written[first.start] ^= 1
    elif wrong == "last bit":
        tape.written[-1] ^= 128
    elif wrong == "two changed places":
        tape.written[first], tape.written[second] = tape.written[second], tape.written[first]
    else:
        tape.written[second] = drawn(num_bytes, 2).tobytes()
    with pytest.raises(OSError, match="an array that the other end has not sealed"):
        line.recv()
    assert not trap.exists()


def test_an_array_at_another_place_has_another_seal() -> None:
    sealer, content = BulkMac(KEY), drawn(OUT_OF_BAND_BYTES)
    seals = {
        seal
        for other in (sealer, BulkMac(bytes(32)))
        for direction in (b"caller bulk", b"listener bulk")
        for place in (bytes(16), b"\1" + bytes(15))
        for seal in [other.compute(content, direction, place)]
    }
    assert len(seals) == 8


def test_an_array_that_ends_too_soon_is_an_end() -> None:
    tape, line = said(drawn(OUT_OF_BAND_BYTES))
    del tape.written[-1:]
    with pytest.raises(EOFError):
        line.recv()


def test_nobody_is_told_to_keep_more_than_the_most() -> None:
    tape, line = said([drawn(OUT_OF_BAND_BYTES), drawn(OUT_OF_BAND_BYTES)])
    with pytest.raises(
        OSError, match=f"a message of {2 * OUT_OF_BAND_BYTES} bytes, and {OUT_OF_BAND_BYTES} are the most"
    ):
        line.recv(max_bytes=OUT_OF_BAND_BYTES)
    assert tape.recv_into(memoryview(bytearray(2 * OUT_OF_BAND_BYTES))) == 2 * OUT_OF_BAND_BYTES, (
        "nothing of it was read"
    )


def test_sums_are_those_of_the_formula() -> None:
    from dora.runtime.process.bulk_mac import _nh

    pieces = drawn(3 * BLOCK_BYTES)
    words = BulkMac(KEY)._words
    sums = np.empty((3, 4), np.uint64)
    _nh(pieces.view(np.uint32).reshape(3, -1), words, sums)
    key = words.tolist()
    assert sums.tolist() == [formula(piece.tobytes(), key) for piece in pieces.reshape(3, -1)]


def test_every_bit_of_a_buffer_is_sealed() -> None:
    sealer, content = BulkMac(KEY), drawn(2 * BLOCK_BYTES + 3)
    before = sealer.compute(content, b"", bytes(16))
    for at in [*range(0, len(content), 61), *range(len(content) - 4, len(content))]:
        content[at] ^= 1 << at % 8
        assert sealer.compute(content, b"", bytes(16)) != before
        content[at] ^= 1 << at % 8
    assert sealer.compute(content, b"", bytes(16)) == before
