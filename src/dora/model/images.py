"""Images in prompts: their token ids, the run's files with their pixels, and the patches that a model reads.

All tokens of an image have one id, outside every vocabulary, which identifies the pixels. So whatever has the
token ids of a prompt has its images: requests, the sample stream, the sample store and the audit. Prompts
with equal ids have equal images.
"""

from __future__ import annotations

import io
from hashlib import blake2b
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from dora.atomic_file import write_bytes_atomically
from dora.core.types import FIRST_IMAGE_ID
from dora.errors import ModelError
from dora.model.config import VisionConfig

IMAGES_FOLDER = "images"  # in the run folder
Pixels = NDArray[np.uint8]  # RGB [height, width, 3]


class ImageFolder:
    """The resized images of a run, each in a file with the name of its id."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def add(self, pixels: Pixels) -> int:
        """Store an image, unless it is stored already; returns its id. It is durable when this returns."""
        buffer = io.BytesIO()
        np.save(buffer, pixels)
        content = buffer.getvalue()
        id = FIRST_IMAGE_ID + int.from_bytes(blake2b(content, digest_size=4).digest()) % FIRST_IMAGE_ID
        while (file := self._file(id)).exists():
            if file.read_bytes() == content:
                return id
            id = FIRST_IMAGE_ID + (id + 1) % FIRST_IMAGE_ID  # another image has the same digest
        self.path.mkdir(parents=True, exist_ok=True)
        write_bytes_atomically(file, content, fsync=True)
        return id

    def __contains__(self, id: int) -> bool:
        return self._file(id).is_file()

    def read(self, id: int) -> Pixels:
        """The pixels of an image. Raises ModelError if its file is missing or damaged."""
        try:
            pixels: Pixels = np.load(self._file(id), allow_pickle=False)
        except (OSError, EOFError, ValueError) as error:
            raise ModelError(f"{self._file(id)} cannot be read: {error}; restore the file") from error
        return pixels

    def _file(self, id: int) -> Path:
        return self.path / f"{id:08x}.npy"


def patch_grid(pixels: Pixels, vision: VisionConfig) -> tuple[int, int, int]:
    """Frames, rows and columns of an image's patches."""
    height, width, _ = pixels.shape
    return 1, height // vision.patch_size, width // vision.patch_size


def to_patches(pixels: Pixels, vision: VisionConfig) -> Tensor:
    """Patches [N, 3 * frames * side * side], fp32, normalised; those of a token are neighbours.

    The layout is that of transformers' Qwen2VLImageProcessor.
    """
    side, merge = vision.patch_size, vision.merge_size
    image = torch.from_numpy(pixels).permute(2, 0, 1).float() / 255.0
    mean, std = (torch.tensor(values)[:, None, None] for values in (vision.mean, vision.std))
    image = (image - mean) / std
    cut: Tensor = image.unflatten(2, (-1, merge, side)).unflatten(1, (-1, merge, side))
    patches = cut.permute(1, 4, 2, 5, 0, 3, 6)  # [rows, columns, merge, merge, channels, side, side]
    num_frames = vision.temporal_patch_size
    frames: Tensor = patches.unsqueeze(5).expand(*(-1,) * 5, num_frames, -1, -1)
    return frames.reshape(-1, 3 * num_frames * side * side)
