"""Weights in bf16 to compute with, beside the fp32 ones that are stepped.

A step of AdamW changes most weights by less than bf16 can tell, and gradients of many micro-batches sum
up to more than it can hold; so both stay in fp32 (mixed precision training, arXiv 1710.03740). bf16 has
the range of fp32: no loss scale is needed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from dora.model.weights import Layout

_SUMMED_OVER_TOKENS = ("model.embed_tokens.weight", "lm_head.weight")


class Bf16Weights:
    """Copies of `flat` ([numel], fp32), by name; what autograd finds for them goes into `leaves`' gradients.

    Embedding and head are the fp32 leaves themselves: theirs is a sum over tokens, or over chunks of them,
    one by one. A decoder converts what it takes from them.
    """

    def __init__(self, layout: Layout, flat: Tensor, leaves: Mapping[str, Tensor]) -> None:
        """`leaves` are the fp32 parameters, views of `flat`, whose gradients exist."""
        self._flat, self._copy = flat, flat.detach().to(torch.bfloat16)
        views = layout.views(self._copy)
        self.weights = {
            name: leaf if name in _SUMMED_OVER_TOKENS else _copy_of(leaf, views[name])
            for name, leaf in leaves.items()
        }

    def refresh(self) -> None:
        """`flat` has changed."""
        self._copy.copy_(self._flat)


def _copy_of(leaf: Tensor, view: Tensor) -> Tensor:
    copy = view.detach().requires_grad_(leaf.requires_grad)
    if not leaf.requires_grad:
        return copy

    def pass_on(found: Tensor) -> None:
        assert found.grad is not None
        assert leaf.grad is not None
        leaf.grad += found.grad
        found.grad = None

    copy.register_post_accumulate_grad_hook(pass_on)
    return copy
