"""Images of prompts: read from rows, resized and cut as by transformers' processor, stored by content."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from tests.model.vision_models import PREPROCESSOR, random_image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from dora.core.types import FIRST_IMAGE_ID
from dora.data.dataset import Dataset
from dora.data.images import ImageReader, find_images
from dora.errors import DataError, ModelError
from dora.model.config import VisionConfig
from dora.model.images import ImageFolder, patch_grid, to_patches

READER = ImageReader("(image)", 7, token_side=8, min_pixels=256, max_pixels=64 * 40)
VISION = VisionConfig(0, 1, 2, 4, 2, 2, 256, 64 * 40, (0.5, 0.4, 0.3), (0.2, 0.3, 0.4))


def encoded(height: int, width: int, mode: str = "RGB") -> bytes:
    """A PNG of noise."""
    pixels = np.random.default_rng(height + width).integers(0, 256, (height, width, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "PNG")
    return file.getvalue()


@pytest.mark.parametrize(
    ("height", "width"), [(16, 16), (5, 9), (33, 60), (200, 90), (28, 20), (12, 300), (31, 31)]
)
def test_patches_are_those_of_the_processor_of_transformers(height: int, width: int) -> None:
    """The sizes are kept, enlarged and reduced."""
    given = {
        k: v for k, v in PREPROCESSOR.items() if k not in ("image_processor_type", "min_pixels", "max_pixels")
    }
    processor: Any = Qwen2VLImageProcessorPil
    processor = processor(size={"shortest_edge": 256, "longest_edge": READER.max_pixels}, **given)
    for mode in ("RGB", "L", "RGBA"):
        image = encoded(height, width, mode)
        expected = processor(Image.open(io.BytesIO(image)), return_tensors="pt")
        pixels = READER.pixels(image)
        assert [patch_grid(pixels, VISION)] == [*map(tuple, expected["image_grid_thw"].tolist())]
        assert torch.allclose(to_patches(pixels, VISION), expected["pixel_values"], atol=1e-5)
        assert READER.num_tokens(image) == len(expected["pixel_values"]) // 4


def test_a_row_has_paths_or_encoded_images(tmp_path: Path) -> None:
    found = find_images(["a.png", {"bytes": b"x", "path": None}, {"bytes": None, "path": "/b.png"}], tmp_path)
    assert found == [tmp_path / "a.png", b"x", Path("/b.png")]
    assert find_images("a.png", tmp_path) == [tmp_path / "a.png"]
    assert find_images(None, tmp_path) == []
    with pytest.raises(DataError, match="an image is a int, must be a path"):
        find_images([3], tmp_path)


def test_a_folder_of_datasets_has_its_images_encoded(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"prompt": ["a"], "images": [[{"bytes": encoded(16, 16), "path": None}]]}
    features = datasets.Features(
        {"prompt": datasets.Value("string"), "images": datasets.List(datasets.Image())}
    )
    datasets.Dataset.from_dict(rows, features=features).save_to_disk(tmp_path / "saved")
    dataset = Dataset.from_path(tmp_path / "saved")
    assert dataset.images(0) == [encoded(16, 16)]
    assert dataset.has_images


def test_images_of_a_file_are_relative_to_it_and_no_columns_of_rewards(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"prompt": "<image>", "pictures": "a.png", "answer": 3}) + "\n")
    dataset = Dataset.from_path(path, image_key="pictures")
    assert dataset.images(0) == [tmp_path / "a.png"]
    assert dataset.fields(0) == {"answer": 3}
    assert not Dataset.from_path(path).has_images


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "a.png does not exist; correct the path"),
        (b"no image", "a.png cannot be read: .* save it again"),
        (encoded(40, 40)[:200], "a.png cannot be read: .* save it again"),
        (encoded(1, 300), "300 x 1 pixels; one side must be at most 200 times the other"),
    ],
)
def test_an_image_that_cannot_be_used_is_named(content: bytes | None, message: str, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "a.png").write_bytes(content)
    with pytest.raises(DataError, match=message) as raised:
        READER.pixels(tmp_path / "a.png")
    assert "\n" not in str(raised.value)


def test_missing_pillow_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r"needs Pillow; run pip install 'dora-rl\[data\]'"):
        READER.num_tokens(b"")


def test_equal_images_have_one_id_and_one_file(tmp_path: Path) -> None:
    store = ImageFolder(tmp_path / "images")
    first, again, other = (store.add(random_image(2, 2, seed)) for seed in (0, 0, 1))
    assert first == again
    assert first != other
    assert all(FIRST_IMAGE_ID <= id < 2**31 for id in (first, other))
    assert len([*store.path.iterdir()]) == 2
    assert np.array_equal(store.read(first), random_image(2, 2, 0))
    assert first in store


def test_images_with_the_same_digest_have_different_ids(tmp_path: Path) -> None:
    store = ImageFolder(tmp_path)
    id = store.add(random_image(1, 1, 0))
    (tmp_path / f"{id:08x}.npy").unlink()
    np.save(tmp_path / f"{id:08x}.npy", random_image(1, 1, 5))  # as if it had this digest
    assert store.add(random_image(1, 1, 0)) == store.add(random_image(1, 1, 0)) == id + 1


def test_a_damaged_file_is_named(tmp_path: Path) -> None:
    store = ImageFolder(tmp_path)
    id = store.add(random_image(1, 1, 0))
    (tmp_path / f"{id:08x}.npy").write_bytes(b"")
    with pytest.raises(ModelError, match=r"cannot be read: .* restore the file"):
        store.read(id)
