"""Load and save a model folder in the Hugging Face format.

`config.json` and safetensors, sharded or not; weights become one flat fp32 buffer.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
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
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must hold one JSON object, not a {type(raw).__name__}")
    try:
        return ModelConfig.from_dict(raw)
    except KeyError as error:
        raise ModelError(f"{path} lacks the key {error}") from error
    except (TypeError, ValueError) as error:
        raise ModelError(f"{path} holds a value that is no number: {error}") from error


def load_folder(folder: Path) -> tuple[ModelConfig, Tensor]:
    """Read a model folder, sharded or not: its config and its flat fp32 weights [numel]."""
    config = load_config(folder)
    tensors: dict[str, Tensor] = {}
    for file in _tensor_files(folder):
        with _readable(file):
            tensors |= load_file(file)
    if config.tie_word_embeddings:
        tensors.pop("lm_head.weight", None)
    return config, Layout(config).pack(tensors)


def check_folder(folder: Path) -> int:
    """Compare the headers of the tensor files with config.json; returns the number of parameters.

    Raises ModelError for whatever `load_folder` would, without reading the weights.
    """
    config = load_config(folder)
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _tensor_files(folder):
        with _readable(file), safe_open(file, "pt") as tensors:
            shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118
    if config.tie_word_embeddings:
        shapes.pop("lm_head.weight", None)
    layout = Layout(config)
    layout.check(shapes)
    return layout.numel


def _tensor_files(folder: Path) -> list[Path]:
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ModelError(f"{folder} holds no *.safetensors file; save the model with safetensors")
    return files


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}; copy or save it again") from error


def save_folder(folder: Path, config: ModelConfig, flat: Tensor) -> None:
    """Write `config.json` and `model.safetensors` so that transformers can load the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")
    tensors = {name: view.contiguous() for name, view in Layout(config).views(flat).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
