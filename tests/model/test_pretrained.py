import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.model.families import CONFIGS, random_tokens, random_weights, transformers_model
from tests.model.test_decoder import check_logits
from transformers import AutoModelForCausalLM

from dora.errors import ModelError
from dora.model.config import ModelConfig
from dora.model.pretrained import check_pretrained, load_config, load_pretrained, save_pretrained
from dora.model.weights import WeightLayout, initial_weights

TINY = CONFIGS["qwen3"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_pretrained(tmp_path, TINY, initial_weights(TINY, seed=0))
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
        ({"model_type": "gpt2"}, "'gpt2' is not supported: DORA-RL's decoder computes llama, qwen2, qwen3"),
        ({"model_type": "mistral"}, "'mistral' with sliding_window = 4096 is not supported: every layer"),
        ({"model_type": "mistral", "sliding_window": 512}, "sliding_window = 512 is not supported: every"),
        ({"model_type": "mistral3"}, "'mistral3' is not supported: DORA-RL's decoder computes llama"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"use_sliding_window": True}, "use_sliding_window = True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types = .* the whole context"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config = .* bf16"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 4.0}}, "rope_type = 'dynamic'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0\.5"),
        ({"num_key_value_heads": 3}, "num_attention_heads = 4 is not a multiple"),
        ({"head_dim": 7}, "head_dim = 7 is odd"),
        (
            {
                "model_type": "qwen3_moe",
                "num_experts": 2,
                "num_experts_per_tok": 3,
                "moe_intermediate_size": 8,
            },
            "num_experts_per_tok = 3 must be from 1 to num_experts = 2",
        ),
    ],
)
def test_the_own_decoder_rejects_an_unsupported_config(
    folder: Path, changes: dict[str, Any], message: str
) -> None:
    change_config(folder, **changes)
    with pytest.raises(ModelError, match=message):
        ModelConfig.from_dict(json.loads((folder / "config.json").read_text()))


def test_errors_name_a_missing_key_a_missing_file_and_invalid_json(folder: Path, tmp_path: Path) -> None:
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    del raw["hidden_size"]
    path.write_text(json.dumps(raw))
    with pytest.raises(ModelError, match="the key 'hidden_size' is missing"):
        load_config(folder)
    for content in (b"{", b'{"a": "\xff"}', b'{"a": {"__float__": "one"}}', b'{"a": {"__float__": null}}'):
        path.write_bytes(content)
        with pytest.raises(ModelError, match="not valid JSON"):
            load_config(folder)
    with pytest.raises(ModelError, match=r"has no config\.json"):
        load_config(tmp_path / "elsewhere")


def test_errors_name_missing_extra_and_misshapen_tensors(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors.update({name: torch.zeros(2, 2)}))
    message = rf"{name} has shape \(2, 2\), config.json requires \(40, 24\); copy or save"
    with pytest.raises(ModelError, match=message):
        load_pretrained(folder)
    change_tensors(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(ModelError, match=rf"missing \['{name}'\] \(1\), extra none"):
        load_pretrained(folder)
    change_tensors(
        folder, lambda tensors: tensors.update({name: torch.zeros(40, 24), "stray": torch.ones(1)})
    )
    with pytest.raises(ModelError, match=r"missing none \(0\), extra \['stray'\]"):
        load_pretrained(folder)


def test_errors_name_weights_that_are_not_finite(folder: Path) -> None:
    name = "model.layers.0.mlp.up_proj.weight"
    change_tensors(folder, lambda tensors: tensors[name].view(-1)[7:8].fill_(float("nan")))
    with pytest.raises(ModelError, match=rf"model\.safetensors: {name} contains nan or inf; use another"):
        load_pretrained(folder)


def test_errors_name_a_truncated_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    for read in (check_pretrained, load_pretrained):
        with pytest.raises(
            ModelError, match=r"model\.safetensors cannot be read: .*; copy or save the model again"
        ):
            read(folder)


def test_errors_name_a_folder_without_readable_weights(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"broken")
    with pytest.raises(ModelError, match=r"model\.safetensors cannot be read"):
        load_pretrained(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no \*\.safetensors file"):
        load_pretrained(folder)


def test_a_checkpoint_in_several_files_loads_as_one(folder: Path) -> None:
    expected = load_pretrained(folder)[1]
    path = folder / "model.safetensors"
    tensors = load_file(path)
    path.unlink()
    names = sorted(tensors)
    for i, part in enumerate((names[:7], names[7:])):
        save_file({name: tensors[name] for name in part}, folder / f"model-{i}.safetensors")
    assert torch.equal(load_pretrained(folder)[1], expected)


def test_a_large_model_is_saved_in_shards_that_transformers_reads(tmp_path: Path) -> None:
    flat = random_weights(TINY)
    save_pretrained(tmp_path, TINY, flat, max_shard_bytes=12_000)
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    assert all(path.stat().st_size < 15_000 for path in shards)
    assert torch.equal(load_pretrained(tmp_path)[1], flat)
    check_logits(AutoModelForCausalLM.from_pretrained(tmp_path), TINY, flat, random_tokens(1, 9))
    shards[1].unlink()
    with pytest.raises(ModelError, match=rf"{shards[1].name} cannot be read"):
        load_pretrained(tmp_path)
    save_pretrained(tmp_path, TINY, flat)
    assert [path.name for path in tmp_path.glob("model*")] == ["model.safetensors"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shards_of_transformers_load_as_fp32_from_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    model = transformers_model("qwen3_moe").to(dtype)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    model.save_pretrained(tmp_path / "stacked", save_original_format=False)  # all experts in one tensor
    assert (tmp_path / "shards" / "model.safetensors.index.json").is_file()
    config, flat = load_pretrained(tmp_path / "shards")
    assert torch.equal(load_pretrained(tmp_path / "stacked")[1], flat)
    assert check_pretrained(tmp_path / "stacked") == flat.numel()
    own = WeightLayout(config).views(flat)["model.layers.2.mlp.experts.3.up_proj.weight"]
    expected = model.model.layers[2].mlp.experts.gate_up_proj[3, config.moe_intermediate_size :]
    assert torch.equal(own, expected.float())


def test_integer_weights_are_rejected_and_old_rope_tables_ignored(folder: Path) -> None:
    stray = "model.layers.0.self_attn.rotary_emb.inv_freq"
    change_tensors(folder, lambda tensors: tensors.update({stray: torch.zeros(4)}))
    load_pretrained(folder)
    change_tensors(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(24).int()}))
    with pytest.raises(ModelError, match=r"model\.norm\.weight is I32, not one of F32, F16, BF16"):
        check_pretrained(folder)


def test_the_experts_of_a_layer_are_adjacent_in_the_flat_buffer() -> None:
    config = CONFIGS["qwen3_moe"]
    layout, flat = WeightLayout(config), random_weights(config)
    views, experts = layout.views(flat), "model.layers.1.mlp.experts."
    whole = layout.span(flat, experts + "0.gate_proj.weight", experts + "4.up_proj.weight").view(5, 2, 12, 24)
    assert torch.equal(whole[3, 1], views[experts + "3.up_proj.weight"])
    downs = layout.span(flat, experts + "0.down_proj.weight", experts + "4.down_proj.weight").view(5, 24, 12)
    assert torch.equal(downs[2], views[experts + "2.down_proj.weight"])


def test_q_k_and_v_are_adjacent_in_the_flat_buffer() -> None:
    layout, flat = WeightLayout(TINY), initial_weights(TINY, seed=0)
    views = layout.views(flat)
    attn = "model.layers.2.self_attn."
    qkv = layout.span(flat, attn + "q_proj.weight", attn + "v_proj.weight")
    parts = [views[f"{attn}{part}_proj.weight"] for part in "qkv"]
    assert torch.equal(qkv, torch.cat(parts))
    assert qkv.data_ptr() == parts[0].data_ptr()
