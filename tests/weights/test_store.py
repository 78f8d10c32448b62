"""Versions are published atomically, fetched without a copy, and leave nothing in memory."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from dora.model.weights import weight_digest
from dora.weights.store import RecentVersions, WeightStore, make_store_folder

SHAPES = {"model.embed_tokens.weight": (30, 30), "model.norm.weight": (100,)}
MAKE = "from dora.weights.store import make_store_folder; print(make_store_folder(num_bytes=1))"


@pytest.fixture
def store() -> Iterator[WeightStore]:
    store = WeightStore(make_store_folder(num_bytes=1), shapes=SHAPES)
    yield store
    store.close()


def weights(version: int) -> torch.Tensor:
    return torch.arange(1000, dtype=torch.float32) + version


def test_a_fetched_version_is_the_published_one(store: WeightStore) -> None:
    digest = store.publish(0, weights(0))
    assert torch.equal(store.fetch(0), weights(0))
    assert digest == weight_digest(weights(0))


def test_versions_are_stored_side_by_side_until_they_are_dropped(store: WeightStore) -> None:
    digests = {store.publish(version, weights(version)) for version in (0, 2, 10)}
    assert len(digests) == 3
    assert store.versions() == [0, 2, 10]
    store.drop(2)
    store.drop(2)
    assert store.versions() == [0, 10]
    with pytest.raises(FileNotFoundError):
        store.fetch(2)


def test_a_mapped_version_stays_when_it_is_dropped_or_published_again(store: WeightStore) -> None:
    store.publish(0, weights(0))
    store.publish(1, weights(1))
    mapped = store.fetch(0), store.fetch(1)
    store.drop(0)
    store.publish(1, weights(7))
    assert torch.equal(mapped[0], weights(0))
    assert torch.equal(mapped[1], weights(1))
    assert torch.equal(store.fetch(1), weights(7))


def test_a_version_that_is_dropped_while_it_is_fetched_is_whole_or_missing(store: WeightStore) -> None:
    def replace() -> None:
        for number in range(4000):
            store.publish(1, weights(number))
            store.drop(1)

    replacing = threading.Thread(target=replace)
    replacing.start()
    while replacing.is_alive():
        found = store.fetch_if_stored(1)
        assert found is None or found[999] == found[0] + 999
    replacing.join()


def test_a_write_into_a_fetched_version_does_not_change_the_file(store: WeightStore) -> None:
    digest = store.publish(0, weights(0))
    store.fetch(0).zero_()
    assert weight_digest(store.fetch(0)) == digest


def test_weights_that_need_a_gradient_can_be_published(store: WeightStore) -> None:
    store.publish(0, weights(0).requires_grad_())
    assert torch.equal(store.fetch(0), weights(0))


def test_a_partly_written_version_is_not_listed(store: WeightStore) -> None:
    (store.folder / "3.draft").write_bytes(b"a part of it")
    assert store.versions() == []


def test_closing_removes_everything(store: WeightStore) -> None:
    store.publish(0, weights(0))
    store.close()
    assert not store.folder.exists()


def test_folders_of_exited_processes_are_removed_and_those_of_running_ones_kept(store: WeightStore) -> None:
    made = subprocess.run([sys.executable, "-c", MAKE], capture_output=True, text=True, check=True)
    left_behind = Path(made.stdout.strip())
    assert left_behind.is_dir()
    WeightStore(make_store_folder(num_bytes=1)).close()
    assert not left_behind.exists()
    assert store.folder.is_dir()


def test_a_linked_version_outlives_its_drop(store: WeightStore) -> None:
    digests = {version: store.publish(version, weights(version)) for version in (0, 1)}
    linked = store.link_versions([0], "linked")
    store.drop(0)
    assert [path.name for path in linked.iterdir()] == ["0.safetensors"]
    assert store.versions() == [1]
    assert store.publish_file(0, linked / "0.safetensors") == digests[0]
    assert torch.equal(store.fetch(0), weights(0))


def test_a_recent_version_is_returned_as_it_was_published(store: WeightStore) -> None:
    rounded = WeightStore(store.folder, "bfloat16", SHAPES)
    recent = RecentVersions(rounded, num=1)
    recent.publish(0, weights(0))
    rounded.drop(0)
    found, again = recent.get(0), recent.get(0)
    assert found is not None
    assert found is again
    assert torch.equal(found, weights(0).bfloat16())
    assert recent.get(1) is None


def test_a_replayed_version_stays_in_its_store_until_the_next_one_is_published(
    store: WeightStore,
) -> None:
    (folder := store.folder / "replayed").mkdir()
    replay_store = WeightStore(folder, shapes=SHAPES)
    recent = RecentVersions(store, num=9, replay_store=replay_store)
    recent.publish(1, weights(1))
    for version in (0, 1):
        recent.keep_replayed(version, weights(version + 7))
        assert replay_store.versions() == [version]
        assert torch.equal(replay_store.fetch(version), weights(version + 7))
    assert torch.equal(store.fetch(1), weights(1))
    recent.publish(2, weights(2))
    assert replay_store.versions() == []


def test_the_digest_of_a_recent_version_is_that_of_its_newest_bytes(store: WeightStore) -> None:
    """After a resume, older versions are only in the store, and one that is published again may differ."""
    recent = RecentVersions(store, num=2)
    store.publish(0, weights(0))
    assert recent.digest(0) == weight_digest(weights(0))
    for version, shift in ((0, 7), (1, 0), (2, 0)):
        recent.publish(version, weights(version + shift))
        assert recent.digest(version) == weight_digest(weights(version + shift))
    store.drop(0)
    assert recent.digest(0) is None
