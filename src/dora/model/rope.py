"""Rotary positions (arXiv 2104.09864) and the ways in which checkpoints stretch them to longer contexts.

All of them turn each pair of dimensions at a frequency between the original one and the one
divided by `factor`; they differ in the share of the original that a pair keeps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from dora.errors import ModelError

_BOTH = ("factor", "original_max_position_embeddings")
_KEYS = {
    "linear": ("factor",),
    "llama3": (*_BOTH, "low_freq_factor", "high_freq_factor"),
    "yarn": (*_BOTH, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
}
_LENGTH_DEPENDENT = ("dynamic", "longrope")


@dataclass(frozen=True)
class RopeScaling:
    """How RoPE is stretched; every field has the name it has in `config.json`."""

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0
    attention_factor: float | None = None  # yarn, from here on
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True

    @classmethod
    def from_dict(cls, rope: Mapping[str, Any], max_positions: int) -> RopeScaling | None:
        """Read `rope_parameters` or `rope_scaling`; None where nothing is stretched.

        Raises ModelError for a kind of RoPE that this decoder does not compute.
        """
        kind, part = rope.get("rope_type", rope.get("type", "default")), rope.get("partial_rotary_factor")
        if part not in (None, 1.0):
            raise ModelError(
                f"config.json: partial_rotary_factor = {part} is not supported: this decoder rotates whole "
                "heads; take a model that does"
            )
        if kind == "default":
            return None
        if kind not in _KEYS:
            reason = "its frequencies change with a sequence's length, so cached keys would turn wrong"
            raise ModelError(
                f"config.json: rope_type = {kind!r} is not supported: "
                f"{reason if kind in _LENGTH_DEPENDENT else 'it is unknown here'}. Set 'yarn', or 'default' "
                f"where the original context is enough; supported: default, {', '.join(_KEYS)}"
            )
        given = {key: rope[key] for key in _KEYS[kind] if rope.get(key) is not None}
        original = int(given.get("original_max_position_embeddings", max_positions))
        if kind == "yarn":
            given.setdefault("factor", max_positions / original)
        given |= {"factor": float(given["factor"]), "original_max_position_embeddings": original}
        return cls(kind, **given)

    def to_dict(self) -> dict[str, Any]:
        """What `from_dict` reads: the keys that this kind of scaling has."""
        values = {key: getattr(self, key) for key in _KEYS[self.rope_type]}
        return {"rope_type": self.rope_type} | {k: v for k, v in values.items() if v is not None}

    @property
    def cos_sin_factor(self) -> float:
        """What cos and sin are multiplied by (YaRN, arXiv 2309.00071, section 3.4; else 1)."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        if self.mscale and self.mscale_all_dim:
            return self._mscale(self.mscale) / self._mscale(self.mscale_all_dim)
        return self._mscale(1.0)

    def shares_kept(self, dim: int, theta: float) -> Tensor:
        """How much of its original frequency each pair of dimensions keeps, 0 to 1: [dim / 2]."""
        if self.rope_type == "linear":
            return torch.zeros(dim // 2)
        if self.rope_type == "llama3":
            turns = self.original_max_position_embeddings / (2 * math.pi * periods(dim, theta))
            low, high = self.low_freq_factor, self.high_freq_factor
            return ((turns - low) / (high - low)).clamp(0, 1)
        first, last = self._pair(self.beta_fast, dim, theta), self._pair(self.beta_slow, dim, theta)
        if self.truncate:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, dim - 1)
        return 1 - ((torch.arange(dim // 2) - first) / max(last - first, 0.001)).clamp(0, 1)

    def _pair(self, turns: float, dim: int, theta: float) -> float:
        """The pair, as a fraction, that turns so often within the original context (arXiv 2309.00071)."""
        positions = self.original_max_position_embeddings
        return dim * math.log(positions / (turns * 2 * math.pi)) / (2 * math.log(theta))

    def _mscale(self, scale: float) -> float:
        return 0.1 * scale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0


def periods(dim: int, theta: float) -> Tensor:
    """Positions per radian of every pair of dimensions [dim / 2], unstretched."""
    return theta ** (torch.arange(0, dim, 2).float() / dim)


def frequencies(dim: int, theta: float, scaling: RopeScaling | None) -> Tensor:
    """Radians per position of every pair of dimensions [dim / 2]."""
    original = 1.0 / periods(dim, theta)
    if scaling is None:
        return original
    kept = scaling.shares_kept(dim, theta)
    return kept * original + (1 - kept) * original / scaling.factor
