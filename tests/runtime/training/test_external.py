"""Weights that an external trainer uploads."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from tests.model.vision_models import save_tiny_vision

from dora.model.pretrained import load_pretrained
from dora.runtime.training.external import WEIGHTS, read_weights


def test_weights_of_a_model_that_reads_images_are_read(tmp_path: Path) -> None:
    """Their folder needs the file of the image processor, which is not uploaded."""
    model = save_tiny_vision("qwen2_vl", tmp_path / "model")
    uploaded = shutil.copyfile(model / WEIGHTS, tmp_path / "uploaded")
    assert torch.equal(read_weights(uploaded, model), load_pretrained(model)[1])
