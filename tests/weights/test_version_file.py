"""A version's file is a safetensors file, and a damaged or foreign one is refused by name."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from dora.errors import ModelError
from dora.model.weights import WeightLayout, weight_digest
from dora.testing import CONFIG, version_weights
from dora.weights.store import WeightStore
from dora.weights.version_file import map_version, parse_version, read_header, write_version

LAYOUT = WeightLayout(CONFIG)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "3.safetensors"
    write_version(path, 3, version_weights(3), "float32", LAYOUT.shapes)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_reader_of_safetensors_finds_each_tensor_by_its_hugging_face_name(
    dtype: str, tmp_path: Path
) -> None:
    path, flat = tmp_path / "file", version_weights(3)
    digest = write_version(path, 3, flat, dtype, LAYOUT.shapes)
    views = LAYOUT.views(flat.to(getattr(torch, dtype)))
    with safe_open(path, "pt") as stored:
        assert {*stored.keys()} == views.keys()
        assert all(torch.equal(stored.get_tensor(name), view) for name, view in views.items())
        assert stored.metadata() == {"format": "pt", "dora_format": "2", "version": "3", "digest": digest}


def test_the_data_are_the_flat_buffer(path: Path) -> None:
    header, flat = map_version(path)
    assert torch.equal(flat, version_weights(3))
    assert header == read_header(path) == parse_version(np.fromfile(path, np.uint8))[0]
    assert (header.version, header.dtype, header.shapes) == (3, "float32", LAYOUT.shapes)
    assert header.digest == weight_digest(flat)


def test_files_of_several_pieces_are_written_whole(tmp_path: Path) -> None:
    flat = torch.randn(3 * 2**20 + 5)
    digest = write_version(tmp_path / "file", 0, flat, "bfloat16", {"weight": (flat.numel(),)})
    assert torch.equal(map_version(tmp_path / "file")[1], flat.bfloat16())
    assert digest == weight_digest(flat.bfloat16())


@pytest.mark.parametrize("num_bytes", [0, 7, 100, 4096, -1])
def test_a_truncated_file_is_refused(path: Path, num_bytes: int) -> None:
    content = path.read_bytes()
    path.write_bytes(content[:num_bytes])
    with pytest.raises(ModelError, match=r"3.safetensors .* use the version that wrote it"):
        map_version(path)
    with pytest.raises(ModelError, match="the received version"):
        parse_version(np.fromfile(path, np.uint8))


def test_a_safetensors_file_of_another_program_is_refused(tmp_path: Path) -> None:
    save_file(LAYOUT.views(version_weights(0)), tmp_path / "0.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"0.safetensors is not the file of a version"):
        WeightStore(tmp_path).fetch(0)


def test_another_format_is_refused(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"dora_format": "2"', b'"dora_format": "9"'))
    with pytest.raises(ModelError, match="has format '9' of versions; this DORA-RL reads '2'"):
        read_header(path)


@pytest.mark.parametrize("suffix", ["f32", "bf16"])
def test_a_version_of_an_older_release_is_refused_by_name(tmp_path: Path, suffix: str) -> None:
    (tmp_path / f"4.{suffix}").write_bytes(bytes(64))
    with pytest.raises(ModelError, match=rf"4.{suffix} has the format of an older DORA-RL"):
        WeightStore(tmp_path).fetch(4)


def test_a_file_of_another_version_or_dtype_is_refused(path: Path) -> None:
    path.rename(path.with_name("5.safetensors"))
    with pytest.raises(ModelError, match="has version 3 in float32, not version 5 in bfloat16"):
        WeightStore(path.parent, "bfloat16").fetch(5)


def test_weights_that_do_not_fit_the_shapes_are_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="8 weights do not fit shapes of 9"):
        write_version(tmp_path / "file", 0, torch.zeros(8), "float32", {"weight": (3, 3)})
    assert not (tmp_path / "file").exists()
