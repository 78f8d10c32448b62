"""Large arrays on authenticated channels arrive unchanged; nothing with a wrong MAC is unpickled."""

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
    """Stands in for a socket: what is sent is received from the beginning."""

    def __init__(self) -> None:
        self.content = bytearray()
        self._num_received = 0

    def setsockopt(self, *_: int) -> None:
        pass

    def sendall(self, content: Any) -> None:
        self.content += content

    def recv_into(self, buffer: memoryview) -> int:
        some = self.content[self._num_received : self._num_received + len(buffer)]
        buffer[: len(some)] = some
        self._num_received += len(some)
        return len(some)


def record(*messages: object) -> tuple[Tape, AuthenticatedChannel]:
    """A tape with these messages, and the channel that receives them."""
    tape = Tape()
    caller = AuthenticatedChannel(tape, KEY, is_listener=False)  # type: ignore[arg-type]
    for message in messages:
        caller.send(message)
    return tape, AuthenticatedChannel(tape, KEY, is_listener=True)  # type: ignore[arg-type]


def random_bytes(num_bytes: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.uint8]]:
    return np.random.default_rng(seed).integers(0, 256, num_bytes, np.uint8)


def reference_nh(block: bytes, key: Sequence[Sequence[int]]) -> list[int]:
    """NH of one block, as the paper defines it."""
    words = struct.unpack(f"<{BLOCK_BYTES // 4}I", block)
    num_pairs = len(words) // 2
    pairs = list(zip(words[:num_pairs], words[num_pairs:], strict=True))
    return [
        sum(
            ((x + key[0][i + 8 * r]) % 2**32) * ((y + key[1][i + 8 * r]) % 2**32)
            for i, (x, y) in enumerate(pairs)
        )
        % 2**64
        for r in range(4)
    ]


def test_arrays_arrive_unchanged() -> None:
    large = [
        random_bytes(num_bytes, seed)
        for seed, num_bytes in enumerate((OUT_OF_BAND_BYTES, 3 * OUT_OF_BAND_BYTES + 5))
    ]
    blocks = random_bytes(2 * OUT_OF_BAND_BYTES).view(np.uint64).reshape(8, -1)
    arrays: list[np.ndarray[Any, Any]] = [blocks, *large]
    for array in arrays:
        array.setflags(write=False)
    message: dict[str, Any] = {
        "small": np.arange(3),
        "large": large,
        "blocks": blocks,
        "transposed": blocks.T,
        "empty": random_bytes(0),
    }
    _, channel = record("before", message, "after")
    assert channel.recv() == "before"
    received = channel.recv()
    assert channel.recv() == "after"
    for name in ("small", "blocks", "transposed", "empty"):
        np.testing.assert_array_equal(received[name], message[name])
    assert [array.tobytes() for array in received["large"]] == [array.tobytes() for array in large]


def test_a_large_array_follows_the_message_and_a_small_one_is_pickled_in_it() -> None:
    tape, _ = record(random_bytes(OUT_OF_BAND_BYTES))
    num_bytes, _ = HEADER.unpack_from(tape.content)
    assert len(tape.content) == HEADER.size + num_bytes + OUT_OF_BAND_BYTES
    assert num_bytes < 300
    tape, _ = record(random_bytes(OUT_OF_BAND_BYTES - 1))
    num_bytes, _ = HEADER.unpack_from(tape.content)
    assert len(tape.content) == HEADER.size + num_bytes


@pytest.mark.parametrize("wrong", ["first bit", "last bit", "swapped", "replaced"])
def test_an_array_with_a_wrong_mac_is_never_unpickled(tmp_path: Path, wrong: str) -> None:
    trap, num_bytes = tmp_path / "sprung", OUT_OF_BAND_BYTES + 7
    arrays = [random_bytes(num_bytes, seed) for seed in range(2)]
    tape, channel = record([*arrays, Trap(trap)])
    first, second = (slice(-at * num_bytes, -(at - 1) * num_bytes or None) for at in (2, 1))
    if wrong == "first bit":
        tape.content[first.start] ^= 1
    elif wrong == "last bit":
        tape.content[-1] ^= 128
    elif wrong == "swapped":
        tape.content[first], tape.content[second] = tape.content[second], tape.content[first]
    else:
        tape.content[second] = random_bytes(num_bytes, 2).tobytes()
    with pytest.raises(OSError, match="an array has a wrong MAC"):
        channel.recv()
    assert not trap.exists()


def test_the_mac_depends_on_key_direction_and_position() -> None:
    content = random_bytes(OUT_OF_BAND_BYTES)
    codes = {
        mac.compute(content, direction, position)
        for mac in (BulkMac(KEY), BulkMac(bytes(32)))
        for direction in (b"caller bulk", b"listener bulk")
        for position in (bytes(16), b"\1" + bytes(15))
    }
    assert len(codes) == 8


def test_an_array_cut_short_counts_as_a_closed_channel() -> None:
    tape, channel = record(random_bytes(OUT_OF_BAND_BYTES))
    del tape.content[-1:]
    with pytest.raises(EOFError):
        channel.recv()


def test_the_sum_of_a_messages_arrays_is_limited() -> None:
    tape, channel = record([random_bytes(OUT_OF_BAND_BYTES), random_bytes(OUT_OF_BAND_BYTES)])
    with pytest.raises(
        OSError, match=f"a message of {2 * OUT_OF_BAND_BYTES} bytes: at most {OUT_OF_BAND_BYTES} are accepted"
    ):
        channel.recv(max_bytes=OUT_OF_BAND_BYTES)
    assert tape.recv_into(memoryview(bytearray(2 * OUT_OF_BAND_BYTES))) == 2 * OUT_OF_BAND_BYTES, (
        "no byte of the arrays was received"
    )


def test_hashes_are_those_of_the_formula() -> None:
    from dora.runtime.process.bulk_mac import _nh

    blocks = random_bytes(3 * BLOCK_BYTES)
    key = BulkMac(KEY)._nh_key
    hashes = np.empty((3, 4), np.uint64)
    _nh(blocks.view(np.uint32).reshape(3, -1), key, hashes)
    expected = [reference_nh(block.tobytes(), key.tolist()) for block in blocks.reshape(3, -1)]
    assert hashes.tolist() == expected


def test_the_mac_depends_on_every_bit_of_a_buffer() -> None:
    mac, content = BulkMac(KEY), random_bytes(2 * BLOCK_BYTES + 3)
    before = mac.compute(content, b"", bytes(16))
    for at in [*range(0, len(content), 61), *range(len(content) - 4, len(content))]:
        content[at] ^= 1 << at % 8
        assert mac.compute(content, b"", bytes(16)) != before
        content[at] ^= 1 << at % 8
    assert mac.compute(content, b"", bytes(16)) == before
