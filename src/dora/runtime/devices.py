"""Which process of a run computes where: on the CPU, or on GPUs of this machine.

`"cuda"` leaves the choice to us: the ranks of the trainer take the last GPUs, engines go round the
others; those that share the trainer's device take its own. `"cuda:N"` is one of them, by torch's number,
and for ranks the first of theirs.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from dora.config import Config
from dora.errors import ConfigError
from dora.fleets import num_engines


def is_gpu(device: str) -> bool:
    """Whether a configured device is a GPU."""
    return device != "cpu"


@dataclass(frozen=True)
class Devices:
    """The devices of a run, by torch's names, as configured and with so many GPUs."""

    engine: str
    trainer: str
    num_trainers: int
    num_gpus: int
    station: str | None = None

    @classmethod
    def of(cls, config: Config, num_gpus: int | None = None) -> Devices:
        """Without a number: with the GPUs that are here, or where there is none, as many as it takes."""
        engine, trainer = config.engine.device, config.trainer.device
        num_trainers = config.trainer.num_ranks
        alone = 0 if config.orchestrator.placement == "colocated" else num_engines(config)
        found = torch.cuda.device_count() if num_gpus is None else num_gpus
        wanted = num_trainers * is_gpu(trainer) + alone * is_gpu(engine)
        return cls(engine, trainer, num_trainers, found or wanted, config.trainer.station_device)

    def of_trainer(self, rank: int = 0) -> str:
        """Where a trainer process computes."""
        if self.trainer != "cuda":
            return _later(self.trainer, rank)
        return f"cuda:{max(0, self.num_gpus - self.num_trainers) + rank}"

    def of_station(self) -> str:
        """Where stations beside the trainer compute; unless it is said, where the trainer does."""
        if self.station is None or (self.station == "cuda" and is_gpu(self.trainer)):
            return self.of_trainer()
        return "cuda:0" if self.station == "cuda" else self.station

    def of_engine(self, engine: int, *, is_colocated: bool) -> str:
        """Where an engine computes, by its number; one that `is_colocated` shares a trainer's device."""
        if is_colocated:
            return self.of_trainer(engine % self.num_trainers)
        if self.engine != "cuda":
            return self.engine
        own = [*range(self.num_gpus)]
        if self.trainer == "cuda":
            own = own[: -self.num_trainers] or own
        elif is_gpu(self.trainer):
            taken = {self.of_trainer(rank) for rank in range(self.num_trainers)}
            own = [gpu for gpu in own if f"cuda:{gpu}" not in taken] or own
        return f"cuda:{own[engine % len(own)]}"


def check(config: Config, num_gpus: int | None = None) -> None:
    """Raises ConfigError where a device that is configured is not to be had on this machine."""
    num_gpus = torch.cuda.device_count() if num_gpus is None else num_gpus
    wanted = {"engine.device": config.engine.device, "trainer.device": config.trainer.device}
    if config.trainer.station_device is not None:
        wanted["trainer.station_device"] = config.trainer.station_device
    for key, device in wanted.items():
        if is_gpu(device):
            _check_here(key, device, num_gpus)
    num_ranks, first = config.trainer.num_ranks, config.trainer.device.partition(":")[2] or "0"
    if is_gpu(config.trainer.device) and int(first) + num_ranks > num_gpus:
        raise ConfigError(
            f"trainer.num_ranks = {num_ranks} with trainer.device = {config.trainer.device!r}: each rank "
            f"takes a GPU of its own, and torch sees {num_gpus} here; lower it"
        )
    _check_apart(config, num_gpus)
    if is_gpu(config.engine.device) and find_spec("triton") is None:
        raise ConfigError(
            f"engine.device = {config.engine.device!r}: engines compute with Triton's kernels there, and "
            "Triton is not installed; pip install triton"
        )


def _check_apart(config: Config, num_gpus: int) -> None:
    """Raises ConfigError where an engine would compute beside the trainer on its GPU, and nobody said so."""
    engine, trainer = config.engine.device, config.trainer.device
    if config.orchestrator.placement == "colocated" or "cuda" not in (engine, trainer):
        return
    devices = Devices.of(config, num_gpus)
    own = {devices.of_engine(number, is_colocated=False) for number in range(num_engines(config))}
    shared = own & {devices.of_trainer(rank) for rank in range(devices.num_trainers)}
    if shared:
        raise ConfigError(
            f"engine.device = {engine!r}, trainer.device = {trainer!r}: with the {num_gpus} GPUs here, "
            f"engines would compute on {min(shared)} while the trainer does; set both to 'cuda' and "
            "orchestrator.placement = colocated, and they take turns, or name a GPU for each of the two"
        )


def _check_here(key: str, device: str, num_gpus: int) -> None:
    if num_gpus == 0:
        why = "sees none here" if torch.version.cuda else "is built for CPUs only"
        raise ConfigError(
            f"{key} = {device!r}: that needs a GPU, and torch {torch.__version__} {why}; "
            f"set {key} = cpu, or run where `dora doctor` names one"
        )
    if device != "cuda" and int(device.removeprefix("cuda:")) >= num_gpus:
        raise ConfigError(
            f"{key} = {device!r}: torch sees {num_gpus} GPUs here, cuda:0 to cuda:{num_gpus - 1}; name one "
            "of them, or 'cuda'"
        )


def use_device(name: str) -> str:
    """Have this process compute on a device, by torch's name; returns its kind, "cpu" or "cuda"."""
    kind, _, number = name.partition(":")
    if number:
        torch.cuda.set_device(int(number))
    return kind


def _later(device: str, rank: int) -> str:
    """The device `rank` places after a GPU; the CPU is the same for all."""
    kind, _, number = device.partition(":")
    return f"{kind}:{int(number) + rank}" if number else device
