"""A thread that copies versions into host memory and computes digests."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dora.model.weights import weight_digest
from dora.weights.store import Prefetcher, WeightStore


def weights(version: int) -> Tensor:
    return torch.arange(64, dtype=torch.float32) + version


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path, shapes={"w": (64,)})
    for version in (1, 2):
        store.publish(version, weights(version))
    return store


def prefetched(store: WeightStore, *versions: int) -> Prefetcher:
    prefetcher = Prefetcher(store, is_pinned=False)
    for version in versions:
        prefetcher.prefetch(version)
    assert prefetcher.digest(weights(0)).result() == weight_digest(weights(0))  # the thread works in order
    return prefetcher


def test_a_prefetched_version_does_not_need_its_file(store: WeightStore) -> None:
    prefetcher = prefetched(store, 1)
    store.drop(1)
    assert prefetcher.fetch(1).equal(weights(1))


def test_the_newest_version_replaces_the_previous_one(store: WeightStore) -> None:
    prefetcher = prefetched(store, 1, 2)
    assert prefetcher.fetch(2).equal(weights(2))
    assert prefetcher.fetch(1).equal(weights(1))  # from its file
    store.drop(1)
    with pytest.raises(FileNotFoundError):
        prefetcher.fetch(1)


def test_a_version_whose_prefetch_failed_is_fetched_from_the_store(store: WeightStore) -> None:
    prefetcher = prefetched(store, 3)
    with pytest.raises(FileNotFoundError):
        prefetcher.fetch(3)
    store.publish(3, weights(3))
    assert prefetcher.fetch(3).equal(weights(3))
