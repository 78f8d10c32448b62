import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.test_decoder import TINY

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.folder import load_config, load_folder, save_folder
from dora.model.weights import Layout, initial_weights, weight_digest


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_folder(tmp_path, TINY, initial_weights(TINY, seed=0))
    return tmp_path


def change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def change_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type = 'gpt2' is not supported; supported: qwen3"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"attention_bias": True}, "attention_bias = True"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type = 'yarn'"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
    ],
)
def test_a_config_this_decoder_does_not_compute_is_refused(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        load_config(folder)


def test_a_missing_key_a_missing_file_and_broken_json_are_named(folder: Path, tmp_path: Path) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    del raw["hidden_size"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="lacks the key 'hidden_size'"):
        load_config(folder)
    path.write_text("{")
    with pytest.raises(ModelError, match="not valid JSON"):
        load_config(folder)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path / "elsewhere")


def test_missing_extra_and_misshapen_tensors_are_named(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(2, 2)}))
    with pytest.raises(ModelError, match=rf"{name} has shape \(2, 2\), config.json asks for \(40, 24\)"):
        load_folder(folder)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=rf"missing \['{name}'\] \(1\), extra none"):
        load_folder(folder)
    change_tensors(
        folder, lambda tensors: tensors.update({name: torch.zeros(40, 24), "stray": torch.ones(1)})
    )
    with pytest.raises(ModelError, match=r"missing none \(0\), extra \['stray'\]"):
        load_folder(folder)


def test_a_folder_without_readable_weights_is_named(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_folder(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load_folder(folder)


def test_a_checkpoint_in_several_files_loads_as_one(folder: Path) -> None:
    expected = load_folder(folder)[1]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[:7], names[7:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{i}.safetensors")
    assert torch.equal(load_folder(folder)[1], expected)


def test_neighbours_in_the_flat_buffer_are_one_matrix() -> None:
    layout, flat = Layout(TINY), initial_weights(TINY, seed=0)
    views = layout.views(flat)
    attn = "model.layers.2.self_attn."
    qkv = layout.span(flat, attn + "q_proj.weight", attn + "v_proj.weight")
    parts = [views[f"{attn}{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(qkv, torch.cat(parts))
    assert qkv.data_ptr() == parts[0].data_ptr()


def test_a_digest_changes_with_any_weight() -> None:
    flat = initial_weights(TINY, seed=0)
    before = weight_digest(flat)
    assert before == weight_digest(flat.clone())
    flat[-1] += 1e-6
    assert weight_digest(flat) != before


def test_a_config_survives_the_round_trip_through_hugging_face_names() -> None:
    assert ModelConfig.from_dict(TINY.to_dict()) == TINY
