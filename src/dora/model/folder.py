"""Load and save a model folder in the Hugging Face format.

`config.json` and safetensors, sharded or not; weights become one flat fp32 buffer.
"""

from __future__ import annotations

import json
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.weights import Layout


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a model folder."""
    path = folder / "config.json"
    if not path.is_file():
        raise ModelError(f"{folder} is not a model folder: it has no config.json")
    try:
        raw = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ModelError(f"{path} is not valid JSON: {error}") from error
    try:
        return ModelConfig.from_dict(raw)
    except KeyError as error:
        raise ModelError(f"{path} lacks the key {error}") from error


def load_folder(folder: Path) -> tuple[ModelConfig, Tensor]:
    """Read a model folder, sharded or not: its config and its flat fp32 weights [numel]."""
    config = load_config(folder)
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors file; save the model with safetensors")
    tensors: dict[str, Tensor] = {}
    for file in files:
        try:
            tensors |= load_file(file)
        except (SafetensorError, OSError) as error:
            raise ModelError(f"{file} cannot be read: {error}; copy or save it again") from error
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return config, Layout(config).pack(tensors)


def save_folder(folder: Path, config: ModelConfig, flat: Tensor) -> None:
    """Write `config.json` and `model.safetensors` so that transformers can load the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    tensors = {name: view.contiguous() for name, view in Layout(config).views(flat).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
