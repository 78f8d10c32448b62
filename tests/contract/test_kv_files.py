"""KV in files reaches another server as it was, and is refused if it is of something else or damaged."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from dora.engine.backends.server_plugins import dora_kv_files as kv_files
from dora.engine.backends.server_plugins.dora_kv_files import KVFileError, KVOrigin

ORIGIN = KVOrigin("digest", ("version", "1"))


def make_layers(seed: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    """Caches of two layers with 6 blocks."""
    source = torch.Generator().manual_seed(seed)
    return [torch.randn(6, 2, 3, generator=source).to(dtype) for _ in range(2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with the blocks 4, 1 and 5."""
    kv_files.write_blocks(tmp_path / "0.kv", ORIGIN, make_layers(0), [4, 1, 5], 20)
    return tmp_path / "0.kv"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
def test_blocks_arrive_as_they_were(tmp_path: Path, dtype: torch.dtype) -> None:
    """The destination has the first block in its cache."""
    source, target = make_layers(0, dtype), make_layers(1, dtype)
    before = [layer.clone() for layer in target]
    kv_files.write_blocks(tmp_path / "0.kv", ORIGIN, source, [4, 1, 5], 20)
    kv_files.read_blocks(tmp_path / "0.kv", ORIGIN, target, [2, 0], 1)
    for own, other, old in zip(source, target, before, strict=True):
        assert torch.equal(other[[2, 0]], own[[1, 5]])
        assert torch.equal(other[[1, 3, 4, 5]], old[[1, 3, 4, 5]])


def test_the_header_says_what_the_kv_is_of(path: Path) -> None:
    (header,) = kv_files.read_headers(path.parent, 1)
    assert (header.origin, header.num_tokens, header.num_blocks) == (ORIGIN, 20, 3)
    assert header.num_bytes == 2 * 3 * 6 * 4


@pytest.mark.parametrize(
    "origin", [ORIGIN._replace(weight_digest="other"), ORIGIN._replace(layout=("other", "1"))]
)
def test_kv_of_other_weights_or_another_layout_is_refused(path: Path, origin: KVOrigin) -> None:
    target = make_layers(1)
    with pytest.raises(KVFileError, match="this server has"):
        kv_files.read_blocks(path, origin, target, [0, 1, 2], 0)
    assert all(map(torch.equal, target, make_layers(1)))


@pytest.mark.parametrize("position", [0, kv_files.HEADER_BYTES, kv_files.HEADER_BYTES + 143])
def test_a_damaged_file_is_refused(path: Path, position: int) -> None:
    content = bytearray(path.read_bytes())
    content[position] ^= 4
    path.write_bytes(content)
    target = make_layers(1)
    with pytest.raises(KVFileError, match=r"damaged|no whole"):
        kv_files.read_blocks(path, ORIGIN, target, [0, 1, 2], 0)
    assert all(map(torch.equal, target, make_layers(1)))


def test_swapped_blocks_are_refused(path: Path) -> None:
    content = path.read_bytes()
    start = kv_files.HEADER_BYTES
    path.write_bytes(
        content[:start]
        + content[start + 24 : start + 48]
        + content[start : start + 24]
        + content[start + 48 :]
    )
    with pytest.raises(KVFileError, match="damaged"):
        kv_files.read_blocks(path, ORIGIN, make_layers(1), [0, 1, 2], 0)


@pytest.mark.parametrize("num_bytes", [0, 100, kv_files.HEADER_BYTES + 8])
def test_a_file_that_is_not_whole_is_refused(path: Path, num_bytes: int) -> None:
    os.truncate(path, num_bytes)
    with pytest.raises(KVFileError, match="no whole KV file"):
        kv_files.read_headers(path.parent, 1)


def test_a_folder_without_the_file_of_a_worker_is_refused(path: Path) -> None:
    with pytest.raises(KVFileError, match="cannot be read"):
        kv_files.read_headers(path.parent, 2)


def test_kv_that_no_server_has_imported_is_removed_after_its_lease(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    for folder in (old, new):
        kv_files.order_export(folder)
    os.utime(kv_files.part_folder(old), (0, 0))
    kv_files.remove_expired(tmp_path, 60.0)
    assert [folder.name for folder in tmp_path.iterdir()] == ["new.part"]
