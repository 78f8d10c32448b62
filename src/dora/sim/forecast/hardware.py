"""Accelerators by their data sheets: what a roofline needs to know of one device.

Figures are of dense bf16. Links count one way. What software reaches of them is `Efficiency`'s.
"""

from __future__ import annotations

from dataclasses import dataclass

from dora.errors import InputError


@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator, or one worker process of a CPU engine."""

    name: str
    flops: float  # per second
    bytes_per_s: float  # of its memory
    memory_bytes: float
    link_bytes_per_s: float  # to devices of its node
    net_bytes_per_s: float  # to devices of other nodes
    host_bytes_per_s: float  # to the memory of its host
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


def device_of(name: str) -> Device:
    """Raises InputError for a name that is no preset."""
    if name not in DEVICES:
        raise InputError(f"device {name!r} is not known; the presets are {', '.join(DEVICES)}")
    return DEVICES[name]


def fleet_of(text: str) -> tuple[tuple[Device, int], ...]:
    """Devices of several kinds, as `H800:16,A100:32`. Raises InputError naming the part that is none."""
    found = []
    for part in filter(None, text.replace(" ", "").split(",")):
        name, _, num = part.partition(":")
        if not num.isdigit() or int(num) < 1:
            raise InputError(f"{part!r} in {text!r} is no kind of device with a number, such as A100:32")
        found.append((device_of(name), int(num)))
    return tuple(found)


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What a data sheet does not say: shares of its figures that are reached, and time beside them."""

    memory: float = 0.8  # of the memory's speed, while decoding
    flops: float = 0.5  # of the compute, while decoding and prefilling
    train: float = 0.35  # of the compute, while training (MFU)
    link: float = 0.7  # of links and networks
    step_s: float = 0.004  # of each decode step: host, launches, sampling
    train_s: float = 5.0  # of each training step, however many devices share it
    hop_s: float = 10e-6  # latency of one collective

    def __post_init__(self) -> None:
        for name in ("memory", "flops", "train", "link"):
            if not 0 < getattr(self, name) <= 1:
                raise InputError(f"efficiency {name} = {getattr(self, name)} must be above 0, at most 1")
        for name in ("step_s", "train_s", "hop_s"):
            if not getattr(self, name) >= 0:
                raise InputError(f"{name} = {getattr(self, name)} must be at least 0")
