"""Any causal language model of transformers, computed on tensors that DORA-RL owns.

A model is built without memory for its weights and bound to views of a flat buffer, so training, publishing
and digests are those of the own decoder. All that differs between families is transformers' own code:
attention masks, sliding windows, linear attention, routers, and what follows the last norm (bias, scale or
cap of the logits).
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from dora.errors import ModelError
from dora.model.config import LENGTH_DEPENDENT_ROPE, ModelConfig, TransformersConfig
from dora.model.decoder import LayerRunner, run_layer_once
from dora.model.weights import layer_of

_NUM_EXPERTS = ("num_local_experts", "n_routed_experts", "num_experts")
_REASON_CHARACTERS = 200
_HEAD = "head"  # the group of the weights outside the backbone
_OTHER_INPUTS = ("vision_config", "audio_config")


def is_exact(raw: Mapping[str, Any]) -> bool:
    """Whether transformers would compute a model, with this `config.json`, equally in trainer and engines.

    Not if keys depend on the length of the sequence, or if weights are quantized.
    """
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type"))
    return kind not in LENGTH_DEPENDENT_ROPE and not raw.get("quantization_config")


def read_config(folder: Path, raw: Mapping[str, Any]) -> TransformersConfig:
    """The shape of the model in a folder, whose parsed `config.json` is `raw`.

    Raises ModelError, with the remedy, for a model that transformers does not know or that is no causal
    language model of text.
    """
    kind = raw.get("model_type")
    if other := [key for key in _OTHER_INPUTS if raw.get(key)]:
        raise ModelError(
            f"{folder}: model_type = {kind!r} has a {other[0]}, and only text is supported; save its "
            "language model alone (for Gemma 3 the class Gemma3ForCausalLM)"
        )
    source = json.dumps(raw, sort_keys=True)
    model, names = _skeleton(source)
    config = model.config
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
        tie_word_embeddings=bool(_value(config, "tie_word_embeddings", False)),
        model_type=str(kind),
        num_experts=next((int(n) for key in _NUM_EXPERTS if (n := _value(config, key, 0))), 0),
        num_experts_per_tok=int(_value(config, "num_experts_per_tok", 0)),
        source=source,
        shapes=tuple((name, tuple(tensors[name].shape)) for name in _by_layer(first_names)),
        shares_layers=any(layer_of(first) not in ("", layer_of(name)) for name, first in names.items()),
        linears=_linear_names(model),
        backbone=_backbone_name(model),
    )


def _by_layer(names: Sequence[str]) -> list[str]:
    """The names in their order, but all of a layer together: its buffers come last."""
    begins: dict[str, int] = {}
    keys = [begins.setdefault(layer_of(name) or name, i) for i, name in enumerate(names)]
    return [name for _, name in sorted(zip(keys, names, strict=True), key=lambda pair: pair[0])]


def _backbone_name(model: nn.Module) -> str:
    """Where a model keeps all but its head."""
    return next(name for name, module in model.named_children() if hasattr(module, "base_model_prefix"))


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
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            folder,
            dtype=torch.float32,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
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
    (folder / "config.json").write_text(json.dumps(config.to_dict(), indent=2) + "\n")


class TransformersModel:
    """A model that computes with given tensors, to which gradients flow.

    Modules have their weights only while they run: those of a layer may exist just then.
    """

    def __init__(
        self, config: ModelConfig, weights: Mapping[str, Tensor], device: torch.device, dtype: torch.dtype
    ) -> None:
        """`weights` have transformers' names. A forward pass converts those that are not of this `dtype`."""
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
            group: _Binding([(*_place(model, name), names[name]) for name in own], weights, dtype)
            for group, own in names_of.items()
        }
        self._layers: list[_Layer] = []
        for layer in (group for group in names_of if group not in ("", _HEAD)):
            self._layers.append(_Layer(len(self._layers), model.get_submodule(layer), self._bound[layer]))
            parent, _, key = layer.rpartition(".")
            setattr(model.get_submodule(parent), key, self._layers[-1])
        self._backbone: Any = getattr(model, place)
        setattr(model, place, _GivenHiddenStates())
        self._head = model
        has_cache = "cache" in inspect.signature(self._backbone.forward).parameters
        self._cache_argument = "cache" if has_cache else "past_key_values"  # before transformers 5.24

    def hidden_states(
        self, input_ids: Tensor, cache: Any = None, run_layer: LayerRunner = run_layer_once
    ) -> Tensor:
        """Final hidden states [B, L, hidden] of tokens [B, L], whose rows are whole sequences.

        Padding on the right changes nothing before it, because every family is causal. With a `cache` from
        `new_cache` the tokens follow those in it. `run_layer` calls each layer.
        """
        for layer in self._layers:
            layer.run_layer = run_layer
        given = {} if cache is None else {self._cache_argument: cache}
        with self._bound[""]:
            out = self._backbone(input_ids=input_ids, use_cache=cache is not None, **given)
        hidden: Tensor = out.last_hidden_state
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits [N, vocab] of final hidden states [N, hidden], with the family's bias, scale and cap."""
        with self._bound[_HEAD]:
            out: Tensor = self._head(inputs_embeds=hidden[None], use_cache=False).logits[0]
        return out

    def new_cache(self) -> Any:
        """An empty cache for `hidden_states`."""
        from transformers import DynamicCache

        return DynamicCache(config=self._head.config)


class _Binding:
    """Gives modules their weights, in a dtype that they compute in, while a `with` block runs."""

    def __init__(
        self,
        places: Sequence[tuple[dict[str, Any], str, str]],
        weights: Mapping[str, Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Of each weight: where a module keeps it, under which key, and its name in `weights`."""
        self._places, self._weights, self._dtype = places, weights, dtype

    def __enter__(self) -> None:
        for tensors, key, name in self._places:
            tensors[key] = self._weights[name].to(self._dtype)  # a copy carries the gradient back

    def __exit__(self, *_: object) -> None:
        for tensors, key, _name in self._places:
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

    def forward(self, *, inputs_embeds: Tensor, **_: Any) -> Any:
        from transformers.modeling_outputs import MoeModelOutputWithPast

        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


@lru_cache(maxsize=4)
def _skeleton(source: str) -> tuple[Any, Mapping[str, str]]:
    """The model of a `config.json`, whose weights have no memory, and the first name of each of its tensors.

    Tied tensors have several names. Raises ModelError.
    """
    raw = json.loads(source)
    kind = raw.get("model_type")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, __version__
        from transformers.initialization import no_init_weights
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        raise ModelError(
            f"config.json: model_type = {kind!r} needs transformers, which is not installed: "
            "pip install 'dora-rl[data]'"
        ) from error
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise ModelError(
            f"config.json: model_type = {kind!r} is no causal language model of transformers {__version__}, "
            "so neither trainer nor engine can compute it: upgrade transformers, or use another model"
        )
    try:
        config = AutoConfig.for_model(**raw)
        config.output_router_logits = False
        with no_init_weights(), _parameters_without_memory():
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    except Exception as error:  # the checks of a config raise errors of several libraries
        reason = " ".join(str(error).split())[:_REASON_CHARACTERS]
        raise ModelError(
            f"config.json: model_type = {kind!r} has an invalid value: {reason}; copy or save the model again"
        ) from error
    if not all(getattr(module, "is_causal", True) for module in model.modules()):
        raise ModelError(
            f"config.json: model_type = {kind!r} attends to later tokens, so it cannot generate; "
            "use a causal language model"
        )
    model.tie_weights()
    first_names: dict[int, str] = {}
    named = [*_named_tensors(model)]
    names = {name: first_names.setdefault(id(tensor), name) for name, tensor in named}
    for name, tensor in named:
        tensors, key = _place(model, name)
        tensors[key] = torch.empty_like(tensor, device="meta")
    return model, names


@contextmanager
def _parameters_without_memory() -> Iterator[None]:
    """Modules that are made here have parameters on the meta device, and buffers as always."""

    def without_memory(module: nn.Module, name: str, parameter: nn.Parameter) -> nn.Parameter:
        return parameter if parameter.is_meta else nn.Parameter(torch.empty_like(parameter, device="meta"))

    hook: Any = without_memory  # torch declares that it returns nothing
    handle = register_module_parameter_registration_hook(hook)
    try:
        yield
    finally:
        handle.remove()


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


def _move_buffers(model: nn.Module, device: torch.device) -> None:
    """Move the buffers that are no weights, as RoPE's frequencies."""
    for module in model.modules():
        for key, buffer in module._buffers.items():
            if buffer is not None and not buffer.is_meta:
                module._buffers[key] = buffer.to(device)
