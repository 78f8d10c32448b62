"""Data sheets of accelerators and models, the input of the cost model.

Figures are of dense bf16. Links count one direction. `Efficiency` is the fraction of the figures that
software reaches.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.errors import InputError

BYTES_PER_VALUE = 2  # bf16: a weight, or a value in the KV cache
TRAINING_BYTES_PER_PARAMETER = 16  # weights, gradient and optimizer moments


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one worker process of a CPU engine. Bandwidths in bytes per second."""

    name: str
    flops_per_s: float
    memory_bandwidth: float
    memory_bytes: float
    link_bandwidth: float  # to devices of the same node
    network_bandwidth: float  # to devices of other nodes
    host_bandwidth: float  # to the memory of its host
    node_size: int = 8


DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        Device("H800", 989e12, 3.35e12, 80e9, 200e9, 50e9, 55e9),
        Device("H100", 989e12, 3.35e12, 80e9, 450e9, 50e9, 55e9),
        Device("H200", 989e12, 4.80e12, 141e9, 450e9, 50e9, 55e9),
        Device("A100", 312e12, 2.04e12, 80e9, 300e9, 25e9, 25e9),
        Device("910B", 376e12, 1.60e12, 64e9, 196e9, 25e9, 25e9, 16),
        Device("CPU", 60e9, 10e9, 8e9, 5e9, 1e9, 5e9, 1),
    )
}


def get_device(name: str) -> Device:
    """A preset by its name. Raises InputError if there is none."""
    if name not in DEVICES:
        raise InputError(f"unknown device {name!r}; presets: {', '.join(DEVICES)}")
    return DEVICES[name]


def parse_fleet(text: str) -> tuple[tuple[Device, int], ...]:
    """Devices of several kinds, as in `H800:16,A100:32`. Raises InputError naming the part that is wrong."""
    fleet = []
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, num = part.partition(":")
        if not num.isdecimal() or int(num) < 1:
            raise InputError(f"{part!r} in {text!r} must be a device and a number, such as A100:32")
        fleet.append((get_device(name), int(num)))
    return tuple(fleet)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """Fractions of the data sheet's figures that software reaches, and fixed overheads in seconds."""

    memory: float = 0.8  # of the memory bandwidth, in decoding
    flops: float = 0.5  # of the compute, in decoding and prefill
    train: float = 0.35  # of the compute, in training (MFU)
    link: float = 0.7  # of links and network
    decode_step_s: float = 0.004  # of each decode step: host, launches, sampling
    train_step_s: float = 5.0  # of each training step, on any number of devices
    collective_s: float = 10e-6  # latency of one collective

    def __post_init__(self) -> None:
        for name in ("memory", "flops", "train", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"efficiency {name} = {getattr(self, name)} must be above 0 and at most 1")
        for name in ("decode_step_s", "train_step_s", "collective_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"efficiency {name} = {getattr(self, name)} must be at least 0")


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a decoder. `num_parameters` includes those of all experts."""

    name: str
    num_parameters: float
    num_layers: int
    hidden_size: int
    kv_values: int  # per token and layer: 2 x KV heads x head size, or the size of a latent cache
    num_heads: int  # attention heads; a TP size divides them
    num_kv_heads: int  # more devices than these hold copies of the KV; 1 for a latent cache
    num_active: float = 0.0  # parameters that one token uses; 0: all
    num_expert_parameters: float = 0.0  # of all experts together
    num_experts: int = 0
    experts_per_token: int = 0
    head_size: int = 0  # of an attention head; 0: `hidden_size` / `num_heads`
    window: int = 0  # tokens that layers with a sliding window attend to, and whose KV they keep
    windowed: float = 0.0  # fraction of the attention layers that have the window
    max_context: int = 0  # tokens of prompt and response; 0: not known

    @property
    def active_parameters(self) -> float:
        return self.num_active or self.num_parameters

    @property
    def kv_bytes(self) -> float:
        """KV cache of one token."""
        return float(self.num_layers * self.kv_values * BYTES_PER_VALUE)

    @property
    def kv_growth(self) -> float:
        """Fraction of `kv_bytes` by which a row grows with each token, once it fills its windows."""
        return 1 - self.windowed

    def kv_tokens(self, context: float, final: float = 0.0) -> float:
        """KV of a row with `context` tokens, in tokens that every layer keeps.

        Layers with a window have room for that of the row's `final` length, so that the rest grows linearly.
        """
        if not self.windowed:
            return context
        return self.kv_growth * context + self.windowed * min(self.window, max(context, final))

    @property
    def weight_bytes(self) -> float:
        return self.num_parameters * BYTES_PER_VALUE

    @property
    def dense_bytes(self) -> float:
        """Weights that every token uses."""
        return (self.num_parameters - self.num_expert_parameters) * BYTES_PER_VALUE

    @property
    def expert_bytes(self) -> float:
        """Weights of one expert in all layers."""
        return self.num_expert_parameters * BYTES_PER_VALUE / self.num_experts if self.num_experts else 0.0

    def forward_flops(self, tokens: float, context: float) -> float:
        """Forward pass over consecutive tokens, the last of which attends to `context` tokens."""
        attended, size = context - tokens / 2, self.num_heads * self.head_size or self.hidden_size
        if self.windowed:
            first, rising = context - tokens, max(0.0, min(context, self.window) - (context - tokens))
            in_window = rising * (first + rising / 2) + (tokens - rising) * self.window
            attended += self.windowed * (in_window / max(tokens, 1e-9) - attended)
        return tokens * (2 * self.active_parameters + 4 * self.num_layers * size * attended)


MODELS: dict[str, ModelShape] = {
    model.name: model
    for model in (
        ModelShape("qwen2.5-0.5b", 0.49e9, 24, 896, 2 * 2 * 64, 14, 2),
        ModelShape("qwen2.5-7b", 7.6e9, 28, 3584, 2 * 4 * 128, 28, 4),
        ModelShape("qwen2.5-32b", 32.8e9, 64, 5120, 2 * 8 * 128, 40, 8),
        ModelShape("qwen2.5-72b", 72.7e9, 80, 8192, 2 * 8 * 128, 64, 8),
        ModelShape("qwen3-30b-a3b", 30.5e9, 48, 2048, 2 * 4 * 128, 32, 4, 3.3e9, 29.0e9, 128, 8, 128),
        ModelShape("longcat-flash", 560e9, 56, 6144, 576, 64, 1, 27e9, 540e9, 512, 8),
    )
}


def get_model(name: str) -> ModelShape:
    """A preset by its name. Raises InputError if there is none."""
    if name not in MODELS:
        raise InputError(
            f"unknown model {name!r}; presets: {', '.join(MODELS)}; or name a folder with a config.json"
        )
    return MODELS[name]
