"""What the processes of a run need of a cluster: how many CPUs and GPUs each, and where they may be.

The trainer's are beside the driver, for they write versions to where the engines of that node map them; so
is the storage of the sample stream, from whose blocks they read.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from dora.runtime.consumer import ConsumerSpec
from dora.runtime.devices import is_gpu
from dora.runtime.messages import EngineSpec, StationSpec, TrainerSpec
from dora.runtime.plan import Plan
from dora.runtime.rewarding import reward_tasks
from dora.stream.storage import StorageSpec

_KINDS = {
    EngineSpec: "engine",
    ConsumerSpec: "rewarder",
    TrainerSpec: "trainer",
    StationSpec: "trainer",
    StorageSpec: "storage",
}


@dataclass(frozen=True)
class Need:
    """What a process of a kind takes."""

    kind: str
    cpus: float
    gpus: float = 0.0
    is_home: bool = False  # it must be on the driver's node

    @property
    def resources(self) -> dict[str, float]:
        """In Ray's words."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in wanted.items() if amount}

    @property
    def bundle(self) -> dict[str, float]:
        """As placement groups have it, which know no empty one: a byte is room that every node has."""
        return self.resources or {"memory": 1.0}


def needs_of(plan: Plan) -> list[Need]:
    """Of all processes that a run begins with; those of the trainer and the storage have to be at home."""
    config = plan.config
    cluster, trainer = config.ray, config.trainer
    num_trainers = trainer.num_ranks + len(plan.columns)
    num_judges = sum(task.num_workers for task in reward_tasks(config) if not task.is_outside)
    return [
        *[Need("trainer", cluster.trainer_cpus, float(is_gpu(trainer.device)), is_home=True)] * num_trainers,
        Need("storage", 0.0, is_home=True),  # it says where things are, and mostly waits
        *[Need("rewarder", cluster.reward_cpus)] * num_judges,
        *[engine_need(plan)] * plan.num_engines,
    ]


def engine_need(plan: Plan) -> Need:
    """Of each engine."""
    return Need("engine", plan.config.ray.engine_cpus, float(is_gpu(plan.config.engine.device)))


def sum_of(needs: list[Need]) -> dict[str, float]:
    """All of them together."""
    asked: dict[str, float] = {}
    for need in needs:
        for name, amount in need.resources.items():
            asked[name] = asked.get(name, 0.0) + amount
    return asked


def lack(needs: list[Need], resources: Mapping[str, float]) -> str:
    """What is said while they have no place."""
    asked = sum_of(needs)
    have = {name: resources.get(name, 0.0) for name in asked}
    return f"the cluster has no room for the run: it asks for {asked}, and all nodes together have {have}"


def kind_of(spec: Any) -> str | None:
    """What a process is for; None: it stays with the driver."""
    return _KINDS.get(type(spec))


def on_its_own_gpu(spec: Any) -> Any:
    """Ray shows an actor the GPU that it has reserved, and no other."""
    if isinstance(spec, EngineSpec | TrainerSpec | StationSpec) and is_gpu(spec.device):
        return replace(spec, device="cuda:0")
    return spec
