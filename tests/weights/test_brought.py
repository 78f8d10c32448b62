"""Versions that are on another machine than their store."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dora.model.weights import weight_digest
from dora.weights.brought import Brought
from dora.weights.store import WeightStore


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_was_brought_is_what_was_published_and_no_copy_of_it(dtype: str, tmp_path: Path) -> None:
    store, brought = WeightStore(tmp_path, dtype), Brought(dtype)
    digest = store.publish(3, torch.arange(64) / 7)
    there = store.raw(3)
    there.flags.writeable = False  # as what Ray has is
    brought.bring(3, there, [3])
    assert weight_digest(brought.fetch(3)) == digest
    assert brought.fetch(3).data_ptr() == there.ctypes.data


def test_versions_that_the_store_has_no_more_are_forgotten(tmp_path: Path) -> None:
    store, brought = WeightStore(tmp_path), Brought("float32")
    for version in range(3):
        store.publish(version, torch.full((8,), float(version)))
    brought.bring(0, store.raw(0), [0, 1])
    brought.bring(1, store.raw(1), [0, 1])
    assert brought.fetch(0).equal(torch.zeros(8))
    brought.bring(2, store.raw(2), [1, 2])
    assert brought.fetch(1).equal(torch.ones(8))
    with pytest.raises(FileNotFoundError, match="version 0 has not been brought"):
        brought.fetch(0)
