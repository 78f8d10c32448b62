"""Several full-weight versions in one step of a vLLM server.

A `MixedModel` computes the rows of all requests at once, but each layer with weights computes the rows of
each version with the weights of that version. What has no weights is the same for all versions, above all
attention: the KV of a request is its own.
"""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from vllm.model_executor.layers import layernorm, linear  # type: ignore[import-not-found]
from vllm.model_executor.layers.attention import Attention  # type: ignore[import-not-found]
from vllm.model_executor.layers.attention_layer_base import (  # type: ignore[import-not-found]
    AttentionLayerBase,
)
from vllm.model_executor.layers.vocab_parallel_embedding import (  # type: ignore[import-not-found]
    ParallelLMHead,
    VocabParallelEmbedding,
)

# Layers that compute each row of their input by itself, with weights of their own.
ROW_WISE = (
    *(linear.QKVParallelLinear, linear.MergedColumnParallelLinear, linear.ColumnParallelLinear),
    *(linear.RowParallelLinear, linear.ReplicatedLinear),
    *(VocabParallelEmbedding, ParallelLMHead),
    *(layernorm.RMSNorm, layernorm.GemmaRMSNorm, layernorm.LayerNorm, torch.nn.LayerNorm),
)
# Of each request, in the order of the batch: name, slot, number of rows.
Batch = Sequence[tuple[str, int, int]]


class CannotMixError(Exception):
    """The models, or the settings of their server, are not known to allow steps with several versions."""


class Rows:
    """The rows of a step. For layers with weights, those of the first slot come first, and so on."""

    def __init__(self) -> None:
        self.num_rows = 0
        self.slots: list[int] = []  # that have rows
        self.sizes: list[int] = []  # numbers of their rows
        # From the order of the batch to that of the layers, and back; None: they are the same.
        self.order: torch.Tensor | None = None
        self.inverse: torch.Tensor | None = None

    def set(self, batch: Batch, num_rows: int, device: torch.device) -> None:
        """Padding, after the rows of the batch, goes to the slot of the last request."""
        by_row = [slot for _, slot, size in batch for _ in range(size)]
        by_row += by_row[-1:] * (num_rows - len(by_row))
        counts = Counter(by_row)
        self.num_rows, self.slots = num_rows, sorted(counts)
        self.sizes = [counts[slot] for slot in self.slots]
        self.order = self.inverse = None
        if by_row != sorted(by_row):
            order = torch.tensor(by_row, device=device).argsort(stable=True)
            self.order, self.inverse = order, order.argsort()


class RowWise(torch.nn.Module):
    """A layer of all slots. Code that reads its `weight` fails, and does not get that of one slot."""

    def __init__(self, layers: Sequence[Any], rows: Rows) -> None:
        super().__init__()
        # PyTorch's hooks and vLLM's choice of a method would cost more time than a small layer.
        self._calls = [getattr(layer, "_forward_method", layer.forward) for layer in layers]
        self._rows = rows

    def forward(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
        rows, calls = self._rows, self._calls
        if x.shape[0] != rows.num_rows:
            raise CannotMixError(f"a layer gets {x.shape[0]} rows in a step of {rows.num_rows}")
        parts = zip(rows.slots, x.split_with_sizes(rows.sizes), strict=True)
        if residual is None:
            outputs = [calls[slot](part) for slot, part in parts]
        else:
            pairs = zip(parts, residual.split_with_sizes(rows.sizes), strict=True)
            outputs = [calls[slot](part, other) for (slot, part), other in pairs]
        if isinstance(outputs[0], torch.Tensor):
            return torch.cat(outputs)
        return tuple(None if each[0] is None else torch.cat(each) for each in zip(*outputs, strict=True))

    __call__ = forward


class InBatchOrder(torch.nn.Module):
    """An attention layer, whose metadata and KV have the order of the batch."""

    def __init__(self, attention: Any, rows: Rows) -> None:
        super().__init__()
        self._attention = attention
        self._rows = rows

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        order, inverse = self._rows.order, self._rows.inverse
        if order is not None:
            inputs = tuple(each[inverse] for each in inputs)
        output: torch.Tensor = self._attention(*inputs)
        return output if order is None else output[order]


class MixedModel(torch.nn.Module):
    """In place of vLLM's model in a step with several versions.

    Modules without weights are those of the first slot that has rows: a slot without rows may be loaded
    meanwhile, and its tensors then have no data.
    """

    def __init__(self, models: Sequence[Any], read_batch: Callable[[], Batch]) -> None:
        """`read_batch` is called in each forward pass. Raises CannotMixError."""
        super().__init__()
        self._models = tuple(models)
        self._read_batch = read_batch
        self._batch: Batch = ()
        self._rows = Rows()
        self._bodies = tuple(_merge(models, slot, self._rows) for slot in range(len(models)))
        self.computed: dict[str, int] = {}  # slot whose weights computed a request in the last step

    def forward(self, input_ids: torch.Tensor, positions: torch.Tensor, **others: Any) -> torch.Tensor:
        if any(value is not None for value in others.values()):
            raise CannotMixError(f"the model gets {', '.join(others)}, which have an order, too")
        self._batch, rows, self.computed = self._read_batch(), self._rows, {}
        rows.set(self._batch, len(input_ids), input_ids.device)
        if rows.order is not None:
            input_ids, positions = input_ids[rows.order], positions[rows.order]
        body = self._bodies[rows.slots[0]]
        hidden: torch.Tensor = body(input_ids=input_ids, positions=positions, **others)
        return hidden if rows.order is None else hidden[rows.inverse]

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor | None:
        """Of a row of each request. None on a worker that does not sample, as from vLLM's models."""
        if len(hidden) != len(self._batch):
            raise CannotMixError(f"{len(hidden)} rows of logits for {len(self._batch)} requests")
        indices = {
            slot: [k for k, each in enumerate(self._batch) if each[1] == slot] for slot in self._rows.slots
        }
        parts = [self._models[slot].compute_logits(hidden[own]) for slot, own in indices.items()]
        if parts[0] is None:
            return None
        logits: torch.Tensor = parts[0].new_empty(len(hidden), parts[0].shape[1])
        for (slot, own), part in zip(indices.items(), parts, strict=True):
            logits[own] = part
            self.computed |= {self._batch[k][0]: slot for k in own}
        return logits


def _merge(twins: Sequence[Any], slot: int, rows: Rows) -> Any:
    """A module of all slots: a copy of this slot's, with `RowWise` layers in it.

    Raises CannotMixError for a module that is not known to be right.
    """
    base = twins[slot]
    if type(base) is Attention:
        return InBatchOrder(base, rows)
    if type(base) in ROW_WISE and not getattr(base, "skip_bias_add", False):
        return RowWise(twins, rows)
    if isinstance(base, AttentionLayerBase) or _has_weights(base):
        raise CannotMixError(f"{type(base).__name__} is not known to compute each row by itself")
    if not any(isinstance(part, AttentionLayerBase) or _has_weights(part) for part in base.modules()):
        return base
    if {"forward", "_forward_method"} & vars(base).keys():  # they would call the layers of this slot
        raise CannotMixError(f"{type(base).__name__} has a method of its own")
    merged = copy.copy(base)
    merged._modules = {
        name: None if child is None else _merge([twin._modules[name] for twin in twins], slot, rows)
        for name, child in base._modules.items()
    }
    return merged


def _has_weights(module: Any) -> bool:
    """Whether a checkpoint may have tensors of the module itself."""
    return bool({*module._parameters, *module._buffers} - module._non_persistent_buffers_set)
