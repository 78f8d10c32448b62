"""Load and save model folders in the Hugging Face format: `config.json` and safetensors, sharded or not."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from dora.errors import ModelError, download_hint
from dora.model import transformers_model
from dora.model.config import ModelConfig, TransformersConfig, UnsupportedModelError
from dora.model.weights import WeightLayout

_INDEX = "model.safetensors.index.json"
_VOCABULARY = ("embed_tokens.weight", "lm_head.weight")  # tensors with a row for each token
_DTYPES = ("F32", "F16", "BF16")


def load_config(folder: Path) -> ModelConfig:
    """Read `config.json` of a model folder.

    A family that the own decoder does not support is one of transformers. Raises ModelError.
    """
    path = folder / "config.json"
    if not path.is_file():
        remedy = "" if folder.exists() else download_hint(str(folder), folder)
        raise ModelError(f"{folder} is not a model folder: it has no config.json{remedy}")
    try:
        return _parse_config(folder, _read_object(path))
    except ModelError as error:
        if not str(error).startswith(path.name):
            raise
        raise type(error)(f"{folder}/{error}") from error  # a run has several models


def _parse_config(folder: Path, raw: dict[str, Any]) -> ModelConfig:
    """The config of a folder whose parsed `config.json` is `raw`. Raises ModelError."""
    path = folder / "config.json"
    try:
        return ModelConfig.from_dict(raw)
    except UnsupportedModelError:
        if raw.get("quantization_config"):  # which the error names
            raise
        transformers_model.check_exact(raw)
        return transformers_model.read_config(folder, raw)
    except KeyError as error:
        raise ModelError(f"{path}: the key {error} is missing; copy or save the model again") from error
    except (TypeError, ValueError, ZeroDivisionError) as error:
        raise ModelError(f"{path}: a value is invalid: {error}; copy or save the model again") from error


def load_pretrained(folder: Path) -> tuple[ModelConfig, Tensor]:
    """The config and the flat fp32 weights [numel] of a model folder. Raises ModelError."""
    config = load_config(folder)
    layout = _checked_layout(folder, config)
    flat = torch.empty(layout.numel)
    views = layout.views(flat)
    if isinstance(config, TransformersConfig):
        transformers_model.load_weights(folder, views)
        return config, flat
    for file in _tensor_files(folder):
        with _readable(file), safe_open(file, "pt") as stored:
            for stored_name in _tensors_to_load(stored, config):
                for name, tensor in _unstacked(stored_name, stored.get_tensor(stored_name)):
                    views[name].copy_(tensor)
                    if not views[name].sum().isfinite():
                        raise ModelError(f"{file}: {name} contains nan or inf; use another checkpoint")
    return config, flat


def check_pretrained(folder: Path) -> int:
    """Compare the headers of the tensor files with config.json; returns the number of parameters.

    Raises ModelError like `load_pretrained`, except for weights that are not finite, which it does not read.
    """
    return _checked_layout(folder, load_config(folder)).numel


def has_published_names(folder: Path, config: ModelConfig) -> bool:
    """Whether versions have the tensor names of the model folder, which servers expect."""
    names: set[str] = set()
    for file in _tensor_files(folder):
        with _readable(file), safe_open(file, "pt") as stored:
            names |= {*_tensors_to_load(stored, config)}
    return not isinstance(config, TransformersConfig) or names == {*WeightLayout(config).shapes}


def save_pretrained(
    folder: Path, config: ModelConfig, flat: Tensor, max_shard_bytes: int = 5 * 10**9
) -> None:
    """Write `config.json` and safetensors so that transformers can load the folder.

    Weights of more than `max_shard_bytes` are split into several files with an index.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("model*.safetensors*"):
        old.unlink()
    if isinstance(config, TransformersConfig):
        transformers_model.save_weights(folder, config, WeightLayout(config).views(flat))
        return
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")
    shards: list[dict[str, Tensor]] = [{}]
    num_bytes = 0  # of the last shard
    for name, view in WeightLayout(config).views(flat).items():
        if shards[-1] and num_bytes + view.nbytes > max_shard_bytes:
            shards.append({})
            num_bytes = 0
        shards[-1][name] = view
        num_bytes += view.nbytes
    if len(shards) == 1:
        save_file(shards[0], folder / "model.safetensors", metadata={"format": "pt"})
        return
    files: dict[str, str] = {}
    for i, shard in enumerate(shards, start=1):
        file = f"model-{i:05}-of-{len(shards):05}.safetensors"
        save_file(shard, folder / file, metadata={"format": "pt"})
        files |= dict.fromkeys(shard, file)
    index = {"metadata": {"total_size": flat.nbytes}, "weight_map": files}
    (folder / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _checked_layout(folder: Path, config: ModelConfig) -> WeightLayout:
    """The layout of a config, which the headers of the tensor files match."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _tensor_files(folder):
        with _readable(file), safe_open(file, "pt") as stored:
            for stored_name in _tensors_to_load(stored, config):
                entry = stored.get_slice(stored_name)
                dtype = entry.get_dtype()
                if dtype not in _DTYPES:
                    raise ModelError(f"{file}: {stored_name} is {dtype}, not one of {', '.join(_DTYPES)}")
                empty = torch.empty(entry.get_shape(), device="meta")
                shapes |= {name: tuple(tensor.shape) for name, tensor in _unstacked(stored_name, empty)}
    layout = WeightLayout(config)
    if isinstance(config, TransformersConfig):  # it renames and stacks other tensors when it loads them
        ends = {name: x for name, x in shapes.items() if name in layout.shapes and name.endswith(_VOCABULARY)}
        shapes = layout.shapes | ends
    try:
        layout.check(shapes)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}") from error
    return layout


def _tensor_files(folder: Path) -> list[Path]:
    """`model.safetensors`, or the files in the index, or all safetensors files."""
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if (folder / _INDEX).is_file():
        files = _read_object(folder / _INDEX).get("weight_map")
        if not isinstance(files, dict):
            raise ModelError(f"{folder / _INDEX} has no weight_map; copy or save the model again")
        return [folder / name for name in sorted(set(files.values()))]
    found = sorted(folder.glob("*.safetensors"))
    if not found:
        raise ModelError(f"{folder} has no *.safetensors file; save the model with safetensors")
    return found


def _tensors_to_load(stored: Any, config: ModelConfig) -> list[str]:
    """The tensors to load: without the copy of a tied embedding and the RoPE tables of old Llama files."""
    copies = ["lm_head.weight"] if config.tie_word_embeddings else []
    return [x for x in stored.keys() if x not in copies and not x.endswith("rotary_emb.inv_freq")]  # noqa: SIM118


def _unstacked(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A stored tensor by the names of WeightLayout, which has a tensor for each of the stacked experts."""
    stacked = transformers_model.STACKED_EXPERTS.fullmatch(name)
    if stacked is None:
        yield name, tensor
        return
    prefix, kinds = stacked[1], stacked[2].split("_")
    for i, matrix in enumerate(tensor):
        for kind, part in zip(kinds, matrix.chunk(len(kinds)), strict=True):
            yield f"{prefix}.{i}.{kind}_proj.weight", part


def _read_object(path: Path) -> dict[str, Any]:
    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_hook=_special_float)
    except (ValueError, TypeError) as error:  # also of bytes that are no text, and of a __float__
        raise ModelError(f"{path} is not valid JSON: {error}; copy or save the model again") from error
    if not isinstance(raw, dict):
        raise ModelError(f"{path} must contain a JSON object, not a {type(raw).__name__}")
    return raw


def _special_float(value: dict[str, Any]) -> Any:
    """transformers 5 writes an infinite number as {"__float__": "Infinity"}, for JSON has none."""
    return float(value["__float__"]) if value.keys() == {"__float__"} else value


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    try:
        yield
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file} cannot be read: {error}; copy or save the model again") from error
