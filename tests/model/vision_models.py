"""Tiny random models of the families that read images."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tests.model.transformers_families import SHAPE
from transformers import AutoConfig, AutoModelForImageTextToText

from dora.model.images import Pixels

IMAGE_TOKEN, START_TOKEN, END_TOKEN = 37, 38, 39  # of the tests' vocabulary of 40
SIDE = 8  # pixels of the side of a token
_TEXT = {
    **{key: value for key, value in SHAPE.items() if key not in ("bos_token_id", "eos_token_id")},
    "bos_token_id": None,
    "eos_token_id": None,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0, "mrope_section": [1, 1, 2]},
}
_VISION = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
VISION: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"embed_dim": 16, "hidden_size": 32, "mlp_ratio": 2},
    "qwen2_5_vl": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "window_size": 16,  # of two tokens a side
        "fullatt_block_indexes": [1],
    },
    "qwen3_vl": {
        "hidden_size": 16,
        "intermediate_size": 32,
        "out_hidden_size": 32,
        "num_position_embeddings": 16,
        "deepstack_visual_indexes": [0],
    },
}
PREPROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": SIDE**2,
    "max_pixels": 64 * SIDE**2,
    "patch_size": 4,
    "merge_size": 2,
    "temporal_patch_size": 2,
    "image_mean": [0.5, 0.4, 0.3],
    "image_std": [0.2, 0.3, 0.4],
}


def save_tiny_vision(kind: str, folder: Path, vocab_size: int = 40, **tokens: int) -> Path:
    """A folder with a random model of this model_type. `tokens` are ids of special tokens."""
    torch.manual_seed(0)
    special = {
        "image_token_id": IMAGE_TOKEN,
        "video_token_id": IMAGE_TOKEN,
        "vision_start_token_id": START_TOKEN,
        "vision_end_token_id": END_TOKEN,
    }
    config = AutoConfig.for_model(
        kind,
        text_config={**_TEXT, "vocab_size": vocab_size},
        vision_config={**_VISION, **VISION[kind], "initializer_range": 0.3},
        **{**special, **tokens},
    )
    AutoModelForImageTextToText.from_config(config).float().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def random_image(rows: int, columns: int, seed: int) -> Pixels:
    """Noise of this many tokens."""
    source = np.random.default_rng(seed)
    return source.integers(0, 256, (rows * SIDE, columns * SIDE, 3), np.uint8)
