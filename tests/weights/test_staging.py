"""A thread that brings versions near and digests them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from dora.model.weights import weight_digest
from dora.weights.staging import Staging
from dora.weights.store import WeightStore


def weights(version: int) -> Tensor:
    return torch.arange(64, dtype=torch.float32) + version


@pytest.fixture
def store(tmp_path: Path) -> WeightStore:
    store = WeightStore(tmp_path)
    for version in (1, 2):
        store.publish(version, weights(version))
    return store


def staged(store: WeightStore, *versions: int) -> Staging:
    staging = Staging(store, is_pinned=False)
    for version in versions:
        staging.stage(version)
    assert staging.digest(weights(0)).result() == weight_digest(weights(0))  # after all that was asked before
    return staging


def test_a_staged_version_needs_its_file_no_more(store: WeightStore) -> None:
    staging = staged(store, 1)
    store.drop(1)
    assert staging.take(1).equal(weights(1))


def test_the_newest_takes_the_place_of_the_one_before(store: WeightStore) -> None:
    staging = staged(store, 1, 2)
    assert staging.take(2).equal(weights(2))
    assert staging.take(1).equal(weights(1))  # from its file
    store.drop(1)
    with pytest.raises(FileNotFoundError):
        staging.take(1)


def test_what_could_not_be_staged_is_asked_of_the_store_again(store: WeightStore) -> None:
    staging = staged(store, 3)
    with pytest.raises(FileNotFoundError):
        staging.take(3)
    store.publish(3, weights(3))
    assert staging.take(3).equal(weights(3))
