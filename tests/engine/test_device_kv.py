"""KV that another engine reads where it lies: on a GPU by its handle, here in a file."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from dora.engine.kv_transfer.device_kv import DeviceKV
from dora.engine.kv_transfer.pool import SharedKV, checksum_blocks, create_pool, view_as_blocks

NUM_BLOCKS, SHAPE = 6, (2, 3, 4)  # of a block, float32


def make_kv(path: Path, seed: int = 0, shape: tuple[int, ...] = SHAPE) -> Tensor:
    """Random KV in a file."""
    blocks = create_pool(path, NUM_BLOCKS * int(np.prod(shape)) * 4)
    kv = torch.from_numpy(blocks).view(torch.float32).view(NUM_BLOCKS, *shape)
    return kv.copy_(torch.randn(kv.shape, generator=torch.Generator().manual_seed(seed)))


def test_a_destination_has_the_blocks_of_the_source_and_their_checksums(tmp_path: Path) -> None:
    source, destination = make_kv(tmp_path / "a"), make_kv(tmp_path / "b", seed=1)
    expected = destination.clone()
    expected[[5, 0, 2]] = source[[1, 4, 3]]
    own, other = DeviceKV(destination, tmp_path / "b"), DeviceKV(source, tmp_path / "a")
    published, checksums = other.publish([1, 4, 3])
    received = own.receive(own.open_peer(tmp_path / "a"), published, [5, 0, 2])
    assert torch.equal(destination, expected)
    assert received.tolist() == checksums.tolist()
    as_shared = view_as_blocks(source.view(torch.uint8).flatten().numpy(), NUM_BLOCKS)
    assert checksums.tolist() == checksum_blocks(as_shared, [1, 4, 3]).tolist()
    assert own.num_bytes == SharedKV(as_shared).num_bytes
    assert own.receive(own.open_peer(tmp_path / "a"), [], []).tolist() == []


def test_a_peer_sees_what_the_source_writes_later_and_cannot_change_it(tmp_path: Path) -> None:
    source = make_kv(tmp_path / "a")
    peer = DeviceKV(make_kv(tmp_path / "b"), tmp_path / "b").open_peer(tmp_path / "a")
    source[2] = 7.0
    assert (peer.words[2].view(torch.float32) == 7.0).all()
    peer.words[2] = 0
    assert (source[2] == 7.0).all()


def test_memory_of_another_shape_is_refused(tmp_path: Path) -> None:
    own = DeviceKV(make_kv(tmp_path / "own"), tmp_path / "own")
    make_kv(tmp_path / "larger", shape=(2, 3, 5))
    (tmp_path / "empty").touch()
    with pytest.raises(FileNotFoundError):
        own.open_peer(tmp_path / "missing")
    for name, num_bytes in (("empty", 0), ("larger", 6 * 120)):
        with pytest.raises(ValueError, match=f"{name} has {num_bytes} bytes, this engine's blocks 96"):
            own.open_peer(tmp_path / name)
