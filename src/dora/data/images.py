"""Images of prompts: where the rows of a dataset have them, and pixels of the size that a model reads.

Pillow decodes and resizes them, as in transformers' image processor of Qwen-VL.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dora.errors import DataError

IMAGE = "<image>"  # in the text of a prompt: where an image of the row belongs
MAX_ASPECT_RATIO = 200
ImageSource = Path | bytes  # a file, or its content


def find_images(value: object, folder: Path) -> list[ImageSource]:
    """The images in a row's column: None, one image, or a list of them.

    An image is a path relative to `folder`, or a mapping with "bytes" or "path", as `datasets` stores images.
    Raises DataError for any other value.
    """
    if value is None:
        return []
    found: list[ImageSource] = []
    for image in value if isinstance(value, list) else [value]:
        content = image.get("bytes") if isinstance(image, dict) else None
        path = image.get("path") if isinstance(image, dict) else image
        if isinstance(content, bytes):
            found.append(content)
        elif isinstance(path, str):
            found.append(folder / path)
        else:
            raise DataError(
                f'an image is a {type(image).__name__}, must be a path, or {{"bytes": ...}} as datasets '
                "stores it; name the column of images with data.image_key"
            )
    return found


@dataclass(frozen=True)
class ImageReader:
    """Reads images for one model, whose prompts have the text `placeholder` for an image.

    The one token `token_id` in it is repeated for each square of `token_side` pixels. Images are resized to
    `min_pixels` to `max_pixels`.
    """

    placeholder: str
    token_id: int
    token_side: int
    min_pixels: int
    max_pixels: int

    def num_tokens(self, image: ImageSource) -> int:
        """Tokens of an image; only its header is read. Raises DataError for an unreadable image."""
        with _opened(image) as opened:
            height, width = self._resized(opened.height, opened.width)
        return height * width // self.token_side**2

    def pixels(self, image: ImageSource) -> NDArray[np.uint8]:
        """The resized image, RGB [height, width, 3]. Raises DataError for an unreadable image."""
        from PIL import ImageOps
        from PIL.Image import Resampling

        with _opened(image) as opened:
            upright = ImageOps.exif_transpose(opened).convert("RGB")
            height, width = self._resized(upright.height, upright.width)
            return np.array(upright.resize((width, height), Resampling.BICUBIC))

    def _resized(self, height: int, width: int) -> tuple[int, int]:
        """Sides that are multiples of `token_side`, at nearly the same ratio: `smart_resize` of Qwen-VL."""
        side = self.token_side
        if max(height, width) > MAX_ASPECT_RATIO * min(height, width):
            raise DataError(
                f"an image has {width} x {height} pixels; one side must be at most {MAX_ASPECT_RATIO} times "
                "the other: cut it"
            )
        rows, columns = round(height / side), round(width / side)
        if rows * columns * side**2 > self.max_pixels:
            scale = math.sqrt(height * width / self.max_pixels)
            rows, columns = (max(1, math.floor(x / scale / side)) for x in (height, width))
        elif rows * columns * side**2 < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (height * width))
            rows, columns = (math.ceil(x * scale / side) for x in (height, width))
        return rows * side, columns * side


@contextmanager
def _opened(image: ImageSource) -> Iterator[Any]:
    """An image that Pillow has opened. Raises DataError if it cannot be read, also inside the block."""
    name = str(image) if isinstance(image, Path) else f"an image of {len(image)} bytes"
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError("reading images needs Pillow; run pip install 'dora-rl[data]'") from error
    try:
        with Image.open(image if isinstance(image, Path) else io.BytesIO(image)) as opened:
            yield opened
    except FileNotFoundError as error:
        raise DataError(f"{name} does not exist; correct the path, relative to the dataset") from error
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{name} cannot be read: {error}; save it again as PNG or JPEG") from error
