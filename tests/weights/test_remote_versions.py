"""Versions of a store on another machine."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora.model.weights import weight_digest
from dora.weights.store import RemoteVersionSource, WeightStore


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_received_version_is_the_published_one_without_a_copy(dtype: str, tmp_path: Path) -> None:
    store, remote = WeightStore(tmp_path, dtype, {"w": (64,)}), RemoteVersionSource()
    digest = store.publish(3, torch.arange(64) / 7)
    content = store.file_bytes(3)
    content.flags.writeable = False  # as arrays from Ray's object store are
    remote.receive(3, content, [3])
    assert weight_digest(remote.fetch(3)) == digest
    num_bytes = remote.fetch(3).nbytes
    assert remote.fetch(3).data_ptr() == content.ctypes.data + len(content) - num_bytes


def test_versions_that_the_store_has_dropped_are_dropped(tmp_path: Path) -> None:
    store, remote = WeightStore(tmp_path, shapes={"w": (8,)}), RemoteVersionSource()
    for version in range(3):
        store.publish(version, torch.full((8,), float(version)))
    remote.receive(0, store.file_bytes(0), [0, 1])
    remote.receive(1, store.file_bytes(1), [0, 1])
    assert remote.fetch(0).equal(torch.zeros(8))
    remote.receive(2, store.file_bytes(2), [1, 2])
    assert remote.fetch(1).equal(torch.ones(8))
    with pytest.raises(FileNotFoundError, match="version 0 has not been sent"):
        remote.fetch(0)
