"""Models by their sizes.

What decoding, training and moving one costs depends on nothing else.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.errors import InputError

BYTES = 2  # of a weight and of a number in the KV cache, in bf16
TRAINED_BYTES = 16  # of a parameter in training: weights, gradient and moments


@dataclass(frozen=True, slots=True)
class Shape:
    """A decoder. Parameters are counted whole; those of experts also apart."""

    name: str
    parameters: float
    num_layers: int
    hidden_size: int
    kv_numbers: int  # per token and layer: 2 x KV heads x head size, or what a latent cache keeps
    active: float = 0.0  # parameters that one token uses; 0: all
    expert_parameters: float = 0.0  # of all experts together
    num_experts: int = 0
    experts_per_token: int = 0

    @property
    def active_parameters(self) -> float:
        return self.active or self.parameters

    @property
    def kv_bytes(self) -> float:
        """Of one token."""
        return float(self.num_layers * self.kv_numbers * BYTES)

    @property
    def weight_bytes(self) -> float:
        return self.parameters * BYTES

    @property
    def dense_bytes(self) -> float:
        """Weights that every token uses."""
        return (self.parameters - self.expert_parameters) * BYTES

    @property
    def expert_bytes(self) -> float:
        """Of one expert in all layers."""
        return self.expert_parameters * BYTES / self.num_experts if self.num_experts else 0.0

    def forward_flops(self, tokens: float, context: float) -> float:
        """Of so many tokens in a row, the last of which sees `context`: weights, and attention beside."""
        seen = context - tokens / 2
        return tokens * (2 * self.active_parameters + 4 * self.num_layers * self.hidden_size * seen)


SHAPES: dict[str, Shape] = {
    shape.name: shape
    for shape in (
        Shape("qwen2.5-0.5b", 0.49e9, 24, 896, 2 * 2 * 64),
        Shape("qwen2.5-7b", 7.6e9, 28, 3584, 2 * 4 * 128),
        Shape("qwen2.5-32b", 32.8e9, 64, 5120, 2 * 8 * 128),
        Shape("qwen2.5-72b", 72.7e9, 80, 8192, 2 * 8 * 128),
        Shape("qwen3-30b-a3b", 30.5e9, 48, 2048, 2 * 4 * 128, 3.3e9, 29.0e9, 128, 8),
        Shape("longcat-flash", 560e9, 56, 6144, 576, 27e9, 540e9, 512, 8),
    )
}


def shape_of(name: str) -> Shape:
    """Raises InputError for a name that is no preset."""
    if name not in SHAPES:
        raise InputError(f"model {name!r} is not known; the presets are {', '.join(SHAPES)}")
    return SHAPES[name]
