"""Any causal language model of transformers, computed on tensors that DORA-RL owns.

A model is built without memory for its weights and bound to views of a flat buffer, so training, publishing
and digests are those of the own decoder. All that differs between families is transformers' own code:
attention masks, sliding windows, linear attention, routers, and what follows the last norm (bias, scale or
cap of the logits). The families of Qwen-VL also read images, whose tokens have the ids of `images`.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from dora.core.types import FIRST_IMAGE_ID
from dora.errors import ModelError
from dora.model.config import LENGTH_DEPENDENT_ROPE, ModelConfig, TransformersConfig, VisionConfig
from dora.model.decoder import LayerRunner, run_layer_once
from dora.model.images import ImageFolder, Pixels, patch_grid, to_patches
from dora.model.weights import layer_of

_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_REASON_CHARACTERS = 200
_HEAD = "head"  # the group of the weights outside the backbone
STACKED_EXPERTS = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj")  # of a layer: [experts, ...]
_STACKED_DIMS = 3  # of the weight of all experts of a layer
_OTHER_INPUTS = ("vision_config", "audio_config")
VISION_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
BLANK = 0  # in place of the id of an image
_PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")


def check_exact(raw: Mapping[str, Any]) -> None:
    """Raise ModelError for a model whose keys depend on the sequence length, by its `config.json`.

    Trainer and engines would compute it differently.
    """
    text = raw.get("text_config") or raw
    rope = text.get("rope_scaling") or text.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    if kind in LENGTH_DEPENDENT_ROPE:
        raise ModelError(
            f"config.json: rope_type = {kind!r} is not supported: keys would depend on the sequence length; "
            "set 'default' if the original context is enough, or use another model"
        )


def read_config(folder: Path, raw: Mapping[str, Any]) -> TransformersConfig:
    """The shape of the model in a folder, whose parsed `config.json` is `raw`.

    Raises ModelError, with the remedy, for a model that transformers does not know, that is no causal
    language model, or that reads other inputs than text and the images of VISION_FAMILIES.
    """
    kind = raw.get("model_type")
    other = [key for key in _OTHER_INPUTS if raw.get(key)]
    if other and kind not in VISION_FAMILIES:
        raise ModelError(
            f"{folder}: model_type = {kind!r} has a {other[0]}, and only {', '.join(VISION_FAMILIES)} read "
            "more than text; save its language model alone (for Gemma 3 the class Gemma3ForCausalLM)"
        )
    source = json.dumps(raw, sort_keys=True)
    model, names = _skeleton(source)
    config = model.config.get_text_config()
    config.allow_global_per_layer_attribute_access = True  # head_dim of Gemma 4, whose layers differ
    if _value(config, "max_position_embeddings", 0) < 1:  # state-space models, for one
        raise ModelError(
            f"{folder}: model_type = {kind!r} is not supported: config.json has no max_position_embeddings, "
            "the context length; use a model with attention"
        )
    tensors, first_names = dict(_named_tensors(model)), [*dict.fromkeys(names.values())]
    heads = int(_value(config, "num_attention_heads", 1))
    return TransformersConfig(
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        intermediate_size=int(_value(config, "intermediate_size", 4 * config.hidden_size)),
        num_hidden_layers=int(config.num_hidden_layers),
        num_attention_heads=heads,
        num_key_value_heads=int(_value(config, "num_key_value_heads", heads)),
        head_dim=int(_value(config, "head_dim", config.hidden_size // heads)),
        max_position_embeddings=int(config.max_position_embeddings),
        tie_word_embeddings=bool(_value(model.config, "tie_word_embeddings", False)),
        model_type=str(kind),
        num_experts=next((int(n) for key in _NUM_EXPERTS if (n := _value(config, key, 0))), 0),
        num_experts_per_tok=int(_value(config, "num_experts_per_tok", 0)),
        source=source,
        shapes=tuple((name, tuple(tensors[name].shape)) for name in _by_layer(first_names)),
        shares_layers=any(layer_of(first) not in ("", layer_of(name)) for name, first in names.items()),
        linears=_linear_names(model),
        backbone=_backbone_name(model),
        vision=_read_vision(folder, model.config) if kind in VISION_FAMILIES else None,
    )


def _read_vision(folder: Path, config: Any) -> VisionConfig:
    """How a model reads images. Raises ModelError if its folder does not say it."""
    path = next((folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()), None)
    if path is None:
        raise ModelError(f"{folder} has no {_PROCESSOR_FILES[0]}; copy it from the published model")
    vision = config.vision_config
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        given = content.get("image_processor", content)
        limits = given.get("size") or {}
        return VisionConfig(
            image_token_id=int(config.image_token_id),
            start_token_id=int(config.vision_start_token_id),
            end_token_id=int(config.vision_end_token_id),
            patch_size=int(vision.patch_size),
            merge_size=int(vision.spatial_merge_size),
            temporal_patch_size=int(vision.temporal_patch_size),
            min_pixels=int(given["min_pixels"] if "min_pixels" in given else limits["shortest_edge"]),
            max_pixels=int(given["max_pixels"] if "max_pixels" in given else limits["longest_edge"]),
            mean=tuple(map(float, given["image_mean"])),
            std=tuple(map(float, given["image_std"])),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"{path}: {error!r}; it must have image_mean, image_std, min_pixels and max_pixels: copy it from "
            "the published model"
        ) from error


def layer_types(config: TransformersConfig) -> tuple[tuple[str, ...], int]:
    """The kind of each layer, such as "full_attention", and the tokens of a sliding window; 0: none."""
    text = _skeleton(config.source)[0].config.get_text_config()
    window = int(_value(text, "sliding_window", 0) or _value(text, "attention_chunk_size", 0))
    default = "sliding_attention" if window else "full_attention"  # Mistral has no list
    return tuple(_value(text, "layer_types", [default] * config.num_hidden_layers)), window


def _by_layer(names: Sequence[str]) -> list[str]:
    """The names in their order, but all of a layer together: its buffers come last."""
    begins: dict[str, int] = {}
    keys = [begins.setdefault(layer_of(name) or name, i) for i, name in enumerate(names)]
    return [name for _, name in sorted(zip(keys, names, strict=True), key=lambda pair: pair[0])]


def _backbone_name(model: nn.Module) -> str:
    """Where a model keeps all but its head."""
    return next(name for name, module in model.named_children() if hasattr(module, "base_model_prefix"))


def _backbone_arguments(model: nn.Module) -> set[str]:
    """What the forward pass of all but the head takes, by name."""
    return {*inspect.signature(getattr(model, _backbone_name(model)).forward).parameters}


def _linear_names(model: Any) -> tuple[str, ...]:
    """The last parts of the names of linear layers; routers, which may be subclasses, compute more."""
    head = model.get_output_embeddings()
    linears = (name for name, x in model.named_modules() if type(x) is nn.Linear and x is not head)
    return tuple(dict.fromkeys(name.rpartition(".")[2] for name in linears))


def _value(config: Any, key: str, default: Any) -> Any:
    """A value of a config of transformers, which may be missing or null."""
    value = getattr(config, key, None)
    return default if value is None else value


def load_weights(folder: Path, views: Mapping[str, Tensor]) -> None:
    """Copy a model folder's weights to `views`, as transformers loads them. Raises ModelError."""
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    kind = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("model_type")
    try:
        loaded: Any = _auto_model(kind).from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"{folder} cannot be loaded: {reason}; copy or save the model again") from error
    model, info = loaded
    if wrong := {key: sorted(map(str, names))[:3] for key, names in info.items() if names}:
        raise ModelError(f"{folder}: the checkpoint does not fit config.json: {wrong}; save the model again")
    tensors = dict(_named_tensors(model))
    for name, view in views.items():
        view.copy_(tensors[name].detach())
        if not view.sum().isfinite():
            raise ModelError(f"{folder}: {name} contains nan or inf; use another checkpoint")


def save_weights(folder: Path, config: TransformersConfig, views: Mapping[str, Tensor]) -> None:
    """Write `config.json`, and safetensors under the names of the family's published checkpoints."""
    skeleton, names = _skeleton(config.source)
    model = deepcopy(skeleton)
    for name, first in names.items():
        tensors, key = _place(model, name)
        tensors[key] = views[first].detach()
    model.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n", encoding="utf-8")


class ImageFeatures(NamedTuple):
    """What the decoder reads of an image with this grid of patches: `layers` [1 + D, tokens, hidden].

    The first replace the embeddings of the tokens, the others are added after the first D layers.
    """

    grid: tuple[int, int, int]
    layers: Tensor


@dataclass
class ModelCache:
    """The tokens of one sequence. The next position is `shift` from their number, because of its images."""

    kv: Any
    shift: int = 0


class TransformersModel:
    """A model that computes with given tensors, to which gradients flow.

    Modules have their weights only while they run: those of a layer may exist just then.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: Mapping[str, Tensor],
        device: torch.device,
        dtype: torch.dtype,
        images: Path | None = None,
    ) -> None:
        """`weights` have transformers' names. A forward pass converts those that are not of this `dtype`.

        `images` is the run's `ImageFolder`.
        """
        self._vision = config.vision if isinstance(config, TransformersConfig) else None
        self._images = None if images is None else ImageFolder(images)
        source = config.source if isinstance(config, TransformersConfig) else json.dumps(config.to_dict())
        skeleton, names = _skeleton(source)
        model: Any = deepcopy(skeleton)
        _move_buffers(model, device)
        place = _backbone_name(model)
        names_of: dict[str, list[str]] = {"": [], _HEAD: []}
        for name in names:
            group = layer_of(name) or ("" if name.startswith(f"{place}.") else _HEAD)
            names_of.setdefault(group, []).append(name)
        self._bound = {
            group: _Binding([_weight(model, config, name, names[name]) for name in own], weights, dtype)
            for group, own in names_of.items()
        }
        self._layers: list[_Layer] = []
        for layer in (group for group in names_of if group not in ("", _HEAD)):
            self._layers.append(_Layer(len(self._layers), model.get_submodule(layer), self._bound[layer]))
            parent, _, key = layer.rpartition(".")
            setattr(model.get_submodule(parent), key, self._layers[-1])
        self._backbone: Any = getattr(model, place)
        arguments = _backbone_arguments(model)
        setattr(model, place, _GivenHiddenStates(self._backbone))
        self._head = model
        has_cache = "cache" in arguments
        self._cache_argument = "cache" if has_cache else "past_key_values"  # before transformers 5.24
        self._takes_positions = "position_ids" in arguments

    def hidden_states(
        self,
        input_ids: Tensor,
        cache: ModelCache | None = None,
        run_layer: LayerRunner = run_layer_once,
        images: Mapping[int, ImageFeatures] | None = None,
    ) -> Tensor:
        """Final hidden states [B, L, hidden] of tokens [B, L], whose rows are whole sequences.

        Padding on the right changes nothing before it, because every family is causal. With a `cache` from
        `new_cache` the tokens of one row follow those in it. `run_layer` calls each layer. `images` are those
        of `image_features`, which otherwise runs here.
        """
        for layer in self._layers:
            layer.run_layer = run_layer
        given: dict[str, Any] = {} if cache is None else {self._cache_argument: cache.kv}
        given["use_cache"] = cache is not None
        if self._vision is not None and images is None:
            images = self.image_features(input_ids, run_layer)
        with self._bound[""]:
            if self._vision is None:
                if cache is not None and self._takes_positions:  # Bamba would begin at 0 again
                    positions = torch.arange(input_ids.shape[1], device=input_ids.device)
                    given["position_ids"] = positions[None] + cache.kv.get_seq_length()
                out = self._backbone(input_ids=input_ids, **given)
            else:
                given |= self._inputs_with_images(input_ids, cache, images or {}, self._vision)
                out = self._backbone.language_model(**given)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def image_features(
        self, input_ids: Tensor, run_layer: LayerRunner = run_layer_once, *, is_sharded: bool = False
    ) -> dict[int, ImageFeatures]:
        """The features of each image among token ids, by its id; each image is computed once.

        If there is none, and other ranks hold shards of the vision tower, those of a black image, BLANK.
        Raises ModelError if the file of an image is missing.
        """
        if self._vision is None:
            return {}
        ids: list[int] = input_ids[input_ids >= FIRST_IMAGE_ID].unique().tolist()
        if not ids and not is_sharded:
            return {}
        for layer in self._layers:
            layer.run_layer = run_layer
        images = [self._read_image(id) for id in ids] or [
            np.zeros((self._vision.token_side, self._vision.token_side, 3), np.uint8)
        ]
        grids = [patch_grid(image, self._vision) for image in images]
        patches = torch.cat([to_patches(image, self._vision) for image in images]).to(input_ids.device)
        with self._bound[""]:
            grid = torch.tensor(grids, device=input_ids.device)
            out = self._backbone.get_image_features(patches, grid, return_dict=True)
        layers = [out.pooler_output, *(getattr(out, "deepstack_features", None) or ())]
        return {
            id: ImageFeatures(grids[i], torch.stack([layer[i] for layer in layers]))
            for i, id in enumerate(ids or [BLANK])
        }

    def _read_image(self, id: int) -> Pixels:
        assert self._images is not None, "a token of an image, and no folder of images"
        return self._images.read(id)

    def _inputs_with_images(
        self,
        input_ids: Tensor,
        cache: ModelCache | None,
        images: Mapping[int, ImageFeatures],
        vision: VisionConfig,
    ) -> dict[str, Any]:
        """Inputs of the decoder: embeddings, positions [3, B, L], and features to add in early layers.

        A placeholder of an image that the policy has sampled is text.
        """
        is_image = input_ids >= FIRST_IMAGE_ID
        embed = self._backbone.get_input_embeddings()
        embeddings = embed(input_ids.masked_fill(is_image, vision.image_token_id))
        start = 0 if cache is None else cache.kv.get_seq_length() + cache.shift
        num_rows, length = input_ids.shape
        positions = torch.arange(start, start + length, device=input_ids.device).expand(3, num_rows, -1)
        # neighbouring images have other tokens between them
        rows = input_ids.tolist() if images else []
        found = [images[id] for row in rows for id, _ in groupby(row) if id >= FIRST_IMAGE_ID]
        if not found:
            return {"inputs_embeds": embeddings, "position_ids": positions}
        grid = torch.tensor([image.grid for image in found], device=input_ids.device)
        positions, shift = self._backbone.get_rope_index(input_ids, is_image.int(), image_grid_thw=grid)
        if cache is not None:
            cache.shift = int(shift)
        layers = torch.cat([image.layers for image in found], 1).to(embeddings.dtype)
        embeddings = embeddings.masked_scatter(is_image[..., None], layers[0])
        given = {"inputs_embeds": embeddings, "position_ids": positions}
        if len(layers) > 1:
            given |= {"visual_pos_masks": is_image, "deepstack_visual_embeds": [*layers[1:]]}
        return given

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of final hidden states [N, hidden], with the family's bias, scale and cap."""
        with self._bound[_HEAD]:
            out: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return out

    def new_cache(self) -> ModelCache:
        """An empty cache for `hidden_states`."""
        from transformers import DynamicCache

        return ModelCache(DynamicCache(config=self._head.config))


class _Weight(NamedTuple):
    """Where a module keeps a weight, under which key, and the tensors of the flat buffer that it stacks.

    A buffer of the module has no gradient, as the scale of a layer of Gemma 4.
    """

    tensors: dict[str, Any]
    key: str
    names: Sequence[str]
    shape: torch.Size
    is_buffer: bool


class _Binding:
    """Gives modules their weights, in a dtype that they compute in, while a `with` block runs."""

    def __init__(self, bound: Sequence[_Weight], weights: Mapping[str, Tensor], dtype: torch.dtype) -> None:
        self._bound, self._weights, self._dtype = bound, weights, dtype

    def __enter__(self) -> None:
        for tensors, key, names, shape, is_buffer in self._bound:
            parts = [self._weights[name].to(self._dtype) for name in names]  # copies carry the gradient back
            weight = parts[0] if len(parts) == 1 else torch.cat(parts).view(shape)
            tensors[key] = weight.detach() if is_buffer else weight

    def __exit__(self, *_: object) -> None:
        for tensors, key, *_rest in self._bound:
            tensors[key] = None


class _Layer(nn.Module):
    """In place of a layer, whose attributes it has: runs it with its weights."""

    def __init__(self, number: int, layer: nn.Module, bound: _Binding) -> None:
        super().__init__()
        self.number, self.layer, self.run_layer = number, layer, run_layer_once
        self._bound = bound

    def __getattr__(self, name: str) -> Any:
        return getattr(super().__getattr__("layer"), name) if name != "layer" else super().__getattr__(name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.run_layer(self.number, self._compute, *args, **kwargs)

    def _compute(self, *args: Any, **kwargs: Any) -> Any:
        with self._bound:
            return self.layer(*args, **kwargs)


class _GivenHiddenStates(nn.Module):
    """In place of a model's layers: the hidden states are the input."""

    def __init__(self, layers: nn.Module) -> None:
        """Heads find attributes of the `layers`, as the multiplier of Falcon-H1."""
        super().__init__()
        self._others = [layers]  # in a list, so that they are no module of this one

    @property
    def decoder(self) -> nn.Module:
        """What heads of OPT call."""
        return self

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_others"][0], name)

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _HiddenStates:
        return _HiddenStates((inputs_embeds,))


class _HiddenStates(tuple[Tensor]):
    """The output of a model's layers. What else a head returns, such as caches, is None."""

    @property
    def last_hidden_state(self) -> Tensor:
        return self[0]

    def __getattr__(self, name: str) -> None:
        return None


@lru_cache(maxsize=4)
def _skeleton(source: str) -> tuple[Any, Mapping[str, str]]:
    """The model of a `config.json`, whose weights have no memory, and the first name of each of its tensors.

    Tied tensors have several names. Raises ModelError.
    """
    raw = json.loads(source)
    kind = raw.get("model_type")
    try:
        from transformers import AutoConfig, __version__
        from transformers.initialization import no_init_weights
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        from transformers.utils.logging import set_verbosity_error
    except ImportError as error:
        raise ModelError(
            f"config.json: model_type = {kind!r} needs transformers, which is not installed: "
            "pip install 'dora-rl[data]'"
        ) from error
    set_verbosity_error()  # what is wrong with a model is in the errors here and of `load_weights`
    if kind is None:
        raise ModelError("config.json: the key 'model_type' is missing; copy or save the model again")
    if kind not in (*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VISION_FAMILIES):
        raise ModelError(
            f"config.json: model_type = {kind!r} is no causal language model of transformers {__version__}, "
            "so neither trainer nor engine can compute it: upgrade transformers, or use another model"
        )
    try:
        config = AutoConfig.for_model(**raw)
        config.output_router_logits = False
        with no_init_weights(), _parameters_without_memory():
            model = _auto_model(kind).from_config(config, dtype=torch.float32).eval()
    except Exception as error:  # the checks of a config raise errors of several libraries
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        raise ModelError(
            f"config.json: model_type = {kind!r} has an invalid value: {reason}; copy or save the model again"
        ) from error
    decoder = model.model.language_model if kind in VISION_FAMILIES else model
    has_encoder = hasattr(getattr(model, _backbone_name(model)), "encoder")
    is_encoder = has_encoder and not _value(config, "is_decoder", False)
    if is_encoder or not all(getattr(module, "is_causal", True) for module in decoder.modules()):
        raise ModelError(
            f"config.json: model_type = {kind!r} attends to later tokens, so it cannot generate; "
            "use a causal language model"
        )
    if not {"cache", "past_key_values"} & _backbone_arguments(model):
        raise ModelError(
            f"config.json: model_type = {kind!r} takes no cache of transformers, so it cannot continue a "
            "sequence; use another model"
        )
    model.tie_weights()
    first_names: dict[int, str] = {}
    named = [*_named_tensors(model)]
    names = {name: first_names.setdefault(id(tensor), name) for name, tensor in named}
    for name, tensor in named:
        tensors, key = _place(model, name)
        tensors[key] = torch.empty_like(tensor, device="meta")
    return model, names


def _auto_model(kind: object) -> Any:
    """The class of transformers that makes a model of this model_type."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    return AutoModelForImageTextToText if kind in VISION_FAMILIES else AutoModelForCausalLM


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules that are made here have parameters on the meta device, and buffers as always."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if parameter.is_meta else nn.Parameter(torch.empty_like(parameter, device="meta"))

    hook: Any = without_memory  # torch declares that it returns nothing
    handle = register_module_parameter_registration_hook(hook)
    try:
        with _UninitializedOnMeta():
            yield
    finally:
        handle.remove()


class _UninitializedOnMeta(TorchFunctionMode):
    """Tensors without values, which weights are before they are registered, are made on the meta device.

    So are zeros of three or more dimensions, the stacked experts of Llama 4. Other tensors may be buffers.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in (torch.empty, torch.zeros) and kwargs.get("device") is None:
            made = func(*args, **kwargs | {"device": "meta"})
            if func is torch.empty or made.dim() >= _STACKED_DIMS:
                return made
        return func(*args, **kwargs)


def _named_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, and the buffers of real numbers that a checkpoint has, by all their names."""
    yield from model.named_parameters(remove_duplicate=False)
    saved = model.state_dict(keep_vars=True)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in saved and buffer.is_floating_point():
            yield name, buffer


def _place(model: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """Where a module keeps a parameter or buffer: there, unlike by assignment, it may be any tensor."""
    path, _, key = name.rpartition(".")
    module = model.get_submodule(path)
    tensors: Any = module._parameters if key in module._parameters else module._buffers
    return tensors, key


def _weight(model: nn.Module, config: ModelConfig, name: str, first: str) -> _Weight:
    """A weight of a model by its name and the first of its names.

    A family of the own decoder has a tensor for each expert in the flat buffer, in this order.
    """
    tensors, key = _place(model, name)
    names, stacked = [first], STACKED_EXPERTS.fullmatch(name)
    if stacked is not None and not isinstance(config, TransformersConfig):
        experts, kinds = range(config.num_experts), stacked[2].split("_")
        names = [f"{stacked[1]}.{i}.{kind}_proj.weight" for i in experts for kind in kinds]
    is_buffer = tensors is model.get_submodule(name.rpartition(".")[0])._buffers
    return _Weight(tensors, key, names, tensors[key].shape, is_buffer)


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers that are no weights, as RoPE's frequencies."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
