"""CPUs and GPUs of a run's processes: reservations on a Ray cluster, and the device of each process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any

import torch

from dora.config.schema import Config
from dora.errors import ConfigError
from dora.model.attention import disable_cudnn_attention
from dora.runtime.process.messages import AuxWorkerSpec, EngineSpec, RewardWorkerSpec, TrainerSpec
from dora.stream.run_stream import StorageSpec

ROUNDING = 1e-6  # 0.3 / 0.1 is less than 3
_FOLLOWER = "trainer rank"  # one that may run on any node
_ROLES = {
    EngineSpec: "engine",
    RewardWorkerSpec: "reward worker",
    TrainerSpec: "trainer",
    AuxWorkerSpec: "auxiliary worker",
    StorageSpec: "storage",
}


@dataclass(frozen=True)
class ProcessResources:
    """What a process of a role reserves on a cluster."""

    role: str
    cpus: float
    gpus: float = 0.0
    on_driver_node: bool = False

    @property
    def ray_resources(self) -> dict[str, float]:
        """By Ray's names, without those that are zero."""
        amounts = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in amounts.items() if amount}

    @property
    def bundle(self) -> dict[str, float]:
        """A bundle of a placement group. It must not be empty, and every node has one byte of memory."""
        return self.ray_resources or {"memory": 1.0}


def run_resources(config: Config) -> list[ProcessResources]:
    """The resources of all processes that a run starts with.

    The trainer's rank 0 publishes versions into files that the engines of its node map, and shares blocks of
    memory with the storage: both run on the driver's node.
    """
    cluster, trainer = config.ray, config.trainer
    of_trainer = ProcessResources(
        "trainer", cluster.trainer_cpus, float(is_gpu(trainer.device)), on_driver_node=True
    )
    aux_gpus = float(is_gpu(trainer.aux_device or trainer.device))
    of_aux = replace(of_trainer, role="auxiliary worker", gpus=aux_gpus)
    followers: list[ProcessResources] = []
    if cluster.trainer_nodes == "any":
        followers = [replace(of_trainer, role=_FOLLOWER, on_driver_node=False)] * (trainer.num_ranks - 1)
    return [
        *[of_trainer] * (trainer.num_ranks - len(followers)),
        *followers,
        *[of_aux] * len(config.aux_workers),
        ProcessResources("storage", 0.0, on_driver_node=True),  # it only keeps an index
        *[ProcessResources("reward worker", cluster.reward_cpus)] * config.num_reward_workers,
        *[engine_resources(config)] * (config.num_engines + trainer.elastic),
    ]


def engine_resources(config: Config) -> ProcessResources:
    """The resources of one engine."""
    num_gpus = config.engine.gpus_per_engine if is_gpu(config.engine.device) else 0
    return ProcessResources("engine", config.ray.engine_cpus, float(num_gpus))


def total_resources(processes: list[ProcessResources]) -> dict[str, float]:
    """The sum over all processes, by Ray's names."""
    total: dict[str, float] = {}
    for process in processes:
        for name, amount in process.ray_resources.items():
            total[name] = total.get(name, 0.0) + amount
    return total


def count_places(process: ProcessResources, nodes: Iterable[Mapping[str, float]]) -> int:
    """How many such processes fit into what is free on the nodes; each process is on one node."""
    amounts = process.bundle.items()
    return sum(
        min(int(free.get(name, 0.0) / amount + ROUNDING) for name, amount in amounts) for free in nodes
    )


def describe_places(process: ProcessResources, nodes: Iterable[Mapping[str, float]]) -> str:
    """A message with the resources that a process needs and those that are free on each node."""
    needed = process.ray_resources

    def text(amounts: Mapping[str, float]) -> str:
        return " and ".join(f"{amounts.get(name, 0.0):g} {name}" for name in needed)

    free = ", ".join(map(text, nodes)) or "nothing"
    return f"each {process.role} needs {text(needed)} on one node, free by node: {free}"


def describe_shortage(processes: list[ProcessResources], cluster: Mapping[str, float]) -> str:
    """A message with the resources that the processes need and those of all nodes together."""
    needed = total_resources(processes)
    have = {name: cluster.get(name, 0.0) for name in needed}
    return f"the cluster has no room for the run, which needs {needed}: all nodes together have {have}"


def role_of(spec: Any) -> str | None:
    """The role of a process, by its spec; None if it always runs beside the driver."""
    if isinstance(spec, TrainerSpec) and spec.rank_address and spec.rank:
        return _FOLLOWER
    return _ROLES.get(type(spec))


def with_reserved_gpu(spec: Any) -> Any:
    """The spec of an actor: Ray makes only the GPU visible that it has reserved for the actor."""
    if isinstance(spec, EngineSpec | TrainerSpec | AuxWorkerSpec) and is_gpu(spec.device):
        return replace(spec, device="cuda:0")
    return spec


def is_gpu(device: str) -> bool:
    """Whether a configured device is a GPU."""
    return device != "cpu"


@dataclass(frozen=True)
class DeviceAssignment:
    """Which process computes on which device, by torch's names, on a machine with `num_gpus` GPUs.

    A configured "cuda:N" is that GPU, and for trainer ranks the first of theirs. For "cuda" the ranks of the
    trainer get the last GPUs and engines get the others in turn, `gpus_per_engine` neighbours each; colocated
    engines share the trainer's.
    """

    engine: str
    trainer: str
    num_ranks: int
    num_gpus: int
    aux: str | None = None
    gpus_per_engine: int = 1

    @classmethod
    def of(cls, config: Config, num_gpus: int | None = None) -> DeviceAssignment:
        """`num_gpus`: by default those of this machine, or if it has none as many as the run needs."""
        engine, trainer = config.engine.device, config.trainer.device
        num_ranks = config.trainer.num_ranks
        num_engines = 0 if config.orchestrator.placement == "colocated" else config.num_engines
        found = torch.cuda.device_count() if num_gpus is None else num_gpus
        of_engines = num_engines * config.engine.gpus_per_engine
        needed = num_ranks * is_gpu(trainer) + of_engines * is_gpu(engine)
        several = config.trainer.aux_device, config.engine.gpus_per_engine
        return cls(engine, trainer, num_ranks, found or needed, *several)

    def trainer_device(self, rank: int = 0) -> str:
        """Where a rank of the trainer computes."""
        if self.trainer == "cuda":
            return f"cuda:{max(0, self.num_gpus - self.num_ranks) + rank}"
        kind, _, number = self.trainer.partition(":")
        return f"{kind}:{int(number) + rank}" if number else self.trainer

    def aux_device(self) -> str:
        """Where auxiliary workers compute; by default beside the trainer."""
        if self.aux is None or (self.aux == "cuda" and is_gpu(self.trainer)):
            return self.trainer_device()
        return "cuda:0" if self.aux == "cuda" else self.aux

    def engine_device(self, engine: int, *, is_colocated: bool) -> str:
        """Where an engine computes: the first of its GPUs. A colocated one shares the device of a rank."""
        if is_colocated:
            return self.trainer_device(engine % self.num_ranks)
        if self.engine != "cuda":
            return self.engine
        first_gpus = self.first_gpus or [0]
        return f"cuda:{first_gpus[engine % len(first_gpus)]}"

    @property
    def first_gpus(self) -> list[int]:
        """The first GPU of each place for an engine. Without GPUs beside the trainer's, those count, too."""
        free = [*range(self.num_gpus)]
        if self.trainer == "cuda":
            free = free[: -self.num_ranks] or free
        elif is_gpu(self.trainer):
            taken = {self.trainer_device(rank) for rank in range(self.num_ranks)}
            free = [gpu for gpu in free if f"cuda:{gpu}" not in taken] or free
        places: list[int] = []
        for gpu in free:
            is_taken = bool(places) and gpu < places[-1] + self.gpus_per_engine
            if not is_taken and {*range(gpu, gpu + self.gpus_per_engine)} <= {*free}:
                places.append(gpu)
        return places


def check_devices(config: Config, num_gpus: int | None = None) -> None:
    """Raises ConfigError if this machine, with `num_gpus` GPUs, cannot provide a configured device.

    On Ray the machine of the driver need not have one: Ray reserves GPUs on its nodes, or says what it lacks.
    """
    if config.runtime.kind == "ray":
        return
    num_gpus = torch.cuda.device_count() if num_gpus is None else num_gpus
    configured = {"engine.device": config.engine.device, "trainer.device": config.trainer.device}
    if config.trainer.aux_device is not None:
        configured["trainer.aux_device"] = config.trainer.aux_device
    for key, device in configured.items():
        if is_gpu(device):
            _check_exists(key, device, num_gpus)
    num_ranks, first = config.trainer.num_ranks, config.trainer.device.partition(":")[2] or "0"
    if is_gpu(config.trainer.device) and int(first) + num_ranks > num_gpus:
        raise ConfigError(
            f"trainer.num_ranks = {num_ranks} with trainer.device = {config.trainer.device!r}: each rank "
            f"needs a GPU of its own, and torch sees {num_gpus} here; lower trainer.num_ranks"
        )
    _check_several(config, num_gpus)
    _check_not_shared(config, num_gpus)
    if is_gpu(config.engine.device) and find_spec("triton") is None:
        raise ConfigError(
            f"engine.device = {config.engine.device!r}: engines on a GPU use Triton kernels, and Triton is "
            "not installed; run pip install triton"
        )


def _check_exists(key: str, device: str, num_gpus: int) -> None:
    if num_gpus == 0:
        raise ConfigError(
            f"{key} = {device!r}: this needs a GPU, and torch {torch.__version__} {_explain_no_gpu()}; "
            f"set {key} = cpu, or run on a machine where `dora doctor` lists a GPU"
        )
    if device != "cuda" and int(device.removeprefix("cuda:")) >= num_gpus:
        raise ConfigError(
            f"{key} = {device!r}: torch sees {num_gpus} GPUs here, cuda:0 to cuda:{num_gpus - 1}; name one "
            "of them, or 'cuda'"
        )


def _explain_no_gpu(init: Callable[[], object] = torch.cuda.init) -> str:
    """Why torch sees no GPU, such as a driver that is too old; `init` raises that error."""
    if not torch.version.cuda:
        return "is built for CPUs only"
    try:
        init()
    except RuntimeError as error:
        return f"sees none here ({str(error).partition('. ')[0].strip()})"
    return "sees none here"


def _check_several(config: Config, num_gpus: int) -> None:
    """Raises ConfigError if no engine has as many GPUs as it should divide its model among."""
    device, num = config.engine.device, config.engine.gpus_per_engine
    if num == 1 or not is_gpu(device):
        return
    first = device.partition(":")[2]
    if int(first) + num > num_gpus if first else not DeviceAssignment.of(config, num_gpus).first_gpus:
        raise ConfigError(
            f"engine.gpus_per_engine = {num} with engine.device = {device!r}, trainer.device = "
            f"{config.trainer.device!r}: torch sees {num_gpus} GPUs here, and no {num} neighbours are left "
            "for an engine; lower engine.gpus_per_engine"
        )


def _check_not_shared(config: Config, num_gpus: int) -> None:
    """Raises ConfigError if an engine would use a GPU of the trainer without being configured to share it."""
    engine, trainer = config.engine.device, config.trainer.device
    if config.orchestrator.placement == "colocated" or "cuda" not in (engine, trainer):
        return
    devices = DeviceAssignment.of(config, num_gpus)
    first_gpus = (devices.engine_device(number, is_colocated=False) for number in range(config.num_engines))
    of_engines = {
        f"cuda:{int(first.removeprefix('cuda:')) + index}"
        for first in first_gpus
        if is_gpu(first)
        for index in range(devices.gpus_per_engine)
    }
    shared = of_engines & {devices.trainer_device(rank) for rank in range(devices.num_ranks)}
    if shared:
        raise ConfigError(
            f"engine.device = {engine!r}, trainer.device = {trainer!r}: with the {num_gpus} GPUs here, "
            f"engines and the trainer would share {min(shared)} at the same time; set both to 'cuda' and "
            "orchestrator.placement = colocated, so that they take turns, or name different GPUs"
        )


def use_device(name: str) -> str:
    """Make this process compute on a device, by torch's name; returns its kind, "cpu" or "cuda"."""
    kind, _, number = name.partition(":")
    if kind == "cuda":
        disable_cudnn_attention()
    if number:
        torch.cuda.set_device(int(number))
    return kind
