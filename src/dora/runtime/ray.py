"""A run on a Ray cluster: its workers are actors in placement groups. The only file that imports Ray.

Ray finds places for processes, starts and ends them. What they and the driver say to one another goes
over lines of our own (`sealed`), and who lives is told by that: to Ray, an actor that hangs is alive.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dora.errors import RunError
from dora.runtime import sealed
from dora.runtime.consumer import ConsumerSpec
from dora.runtime.devices import is_gpu
from dora.runtime.messages import EngineSpec, StationSpec, TrainerSpec
from dora.runtime.plan import Plan
from dora.runtime.process import WORKER_ENVIRONMENT, Body, Carrier, Forked, live
from dora.runtime.rewarding import reward_tasks

NODE = "ray.io/node-id"  # a label of each node
END_S = 5.0  # that Ray may take to say that an actor has ended


@dataclass(frozen=True)
class Need:
    """What an actor of a kind takes."""

    kind: str
    cpus: float
    gpus: float = 0.0
    node: str | None = None  # where it must be

    @property
    def bundle(self) -> dict[str, float]:
        """As placement groups have it, which know no empty one."""
        wanted = {"CPU": self.cpus, "GPU": self.gpus}
        return {name: amount for name, amount in wanted.items() if amount} or {"CPU": 0.001}


@dataclass(frozen=True)
class Place:
    """A bundle of a placement group."""

    group: PlacementGroup
    index: int
    need: Need


class Cluster:
    """A ground: where Ray has room."""

    def __init__(self, plan: Plan, notice: Callable[[str], None]) -> None:
        """Join the cluster, or start one, and reserve what the run begins with. Raises RunError."""
        self._config, self._notice = plan.config.ray, notice
        self._start_timeout_s = plan.config.runtime.start_timeout_s
        self._is_own = not ray.is_initialized()
        needs = _needs(plan, None)
        if self._is_own:
            self._join(sum(need.bundle["CPU"] for need in needs))
        self.home: str = ray.get_runtime_context().get_node_id()
        self._needs = {need.kind: need for need in _needs(plan, self.home)}
        host = "127.0.0.1" if self._config.address is None else ray.util.get_node_ip_address()
        self._listener = sealed.Listener(host)
        self._groups: list[PlacementGroup] = []
        self._free: list[Place] = []
        self._lock = threading.Lock()
        self._reserve(_needs(plan, self.home))

    def start(self, name: str, body: Body, spec: Any) -> Carrier:
        """Environments stay with the driver; they have ways of their own to other machines."""
        kind = _kind_of(spec)
        return Forked(name, body, spec) if kind is None else Actor(self, self._take(kind), body, spec)

    def expect(self, met: sealed.Met) -> sealed.Address:
        """As `Listener.expect`."""
        return self._listener.expect(met)

    def give_back(self, place: Place) -> None:
        """Nobody is there any more."""
        with self._lock:
            self._free.append(place)

    def close(self) -> None:
        self._listener.close()
        with contextlib.suppress(RayError):
            for group in self._groups:
                remove_placement_group(group)
        if self._is_own:
            ray.shutdown()

    def _join(self, num_cpus: float) -> None:
        """Start Ray, or join it. Raises RunError, with what Ray says."""
        address = self._config.address
        own: dict[str, Any] = {
            "include_dashboard": False,
            "num_cpus": max(os.cpu_count() or 1, round(num_cpus + 0.5)),
            "_system_config": {"worker_niceness": 0},  # else other programs come before the run
        }
        try:
            with _own_signals():
                ray.init(
                    address=address or "local",  # else it would join one that somebody else has started
                    namespace=f"dora-{secrets.token_hex(8)}",
                    log_to_driver=False,
                    logging_level="ERROR",
                    runtime_env={"env_vars": WORKER_ENVIRONMENT},
                    **(own if address is None else {}),
                )
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            where = f"ray.address = {address!r} cannot be joined" if address else "Ray cannot be started here"
            raise RunError(f"{where}: {error}") from error

    def _reserve(self, needs: list[Need]) -> None:
        """All at once: a run begins with everything, or not at all. Raises RunError."""
        group = self._group(needs)
        try:
            ray.get(group.ready(), timeout=self._start_timeout_s)
        except GetTimeoutError as error:
            asked: dict[str, float] = {}
            for need in needs:
                for name, amount in need.bundle.items():
                    asked[name] = asked.get(name, 0.0) + amount
            have = {name: ray.cluster_resources().get(name, 0.0) for name in asked}
            raise RunError(
                f"the cluster had no room for the run within runtime.start_timeout_s = "
                f"{self._start_timeout_s:g} s: it asks for {asked}, and all nodes together have {have}; "
                "lower engine.num_engines or ray.*_cpus, or add nodes"
            ) from error

    def _group(self, needs: list[Need]) -> PlacementGroup:
        """A new group, whose places are free."""
        group = placement_group(
            [need.bundle for need in needs],
            strategy="SPREAD" if self._config.spread else "PACK",
            bundle_label_selector=[{} if need.node is None else {NODE: need.node} for need in needs],
        )
        with self._lock:
            self._groups.append(group)
            self._free += [Place(group, index, need) for index, need in enumerate(needs)]
        return group

    def _take(self, kind: str) -> Place:
        """One that is free, or a new one, for which a cluster that scales itself finds a node."""
        while True:
            with self._lock:
                found = next((place for place in self._free if place.need.kind == kind), None)
                if found is not None:
                    self._free.remove(found)
                    return found
            self._group([self._needs[kind]])


class Actor:
    """A carrier: an actor, whose process calls the driver as soon as it has a place."""

    def __init__(self, cluster: Cluster, place: Place, body: Body, spec: Any) -> None:
        self._cluster, self._place = cluster, place
        self._line: Future[sealed.SealedLine] = Future()
        self._ended = threading.Event()
        self._pid: int | None = None
        self._node = ""
        self._address = cluster.expect(self._met)
        where = PlacementGroupSchedulingStrategy(place.group, place.index)
        station: Any = Station
        options = {"num_cpus": place.need.cpus, "num_gpus": place.need.gpus, "scheduling_strategy": where}
        self._actor = station.options(**options).remote()
        self._end = self._actor.live.remote(self._address, body, _on_its_own_gpu(spec))
        self._end.future().add_done_callback(self._has_ended)

    def send(self, messages: Any, /) -> None:
        self._line.result().send(messages)

    def recv(self) -> Any:
        return self._line.result().recv()

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def how_it_ended(self) -> str:
        where = f"(pid {self._pid}, node {self._node[:8]}) " if self._node else ""
        return f"{where}has ended: {self._why()}"

    def kill(self) -> None:
        """Ray kills one that is stopped, too, but after seconds; nobody waits for that."""
        with contextlib.suppress(RayError):
            ray.kill(self._actor)
        if self._line.done() and self._line.exception() is None:
            self._line.result().close()
        self._ended.wait(END_S)

    def _met(self, line: sealed.SealedLine, hello: Any) -> None:
        self._pid, self._node = hello
        if self._line.set_running_or_notify_cancel():
            self._line.set_result(line)

    def _has_ended(self, _: Future[Any]) -> None:
        if not self._ended.is_set():
            self._ended.set()
            self._cluster.give_back(self._place)
        if not self._line.done():
            self._line.set_exception(EOFError("it has ended before it could say anything"))

    def _why(self) -> str:
        self._ended.wait(END_S)
        try:
            ray.get(self._end, timeout=0)
        except GetTimeoutError:
            return "its line is cut"
        except RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return lines[-1].partition(" Worker exit detail: ")[2] or lines[-1]
        return "it had nothing more to do"


@ray.remote(max_restarts=0, max_task_retries=0)
class Station:
    """A process of the run on some node."""

    def live(self, address: sealed.Address, body: Body, spec: Any) -> None:
        """As `process.live`, in the main thread."""
        line = sealed.call(address, (os.getpid(), ray.get_runtime_context().get_node_id()))
        try:
            live(line, body, spec)
        finally:
            line.close()


def _needs(plan: Plan, home: str | None) -> list[Need]:
    """Of all actors that a run begins with; the trainer's processes have to be at `home`."""
    config = plan.config
    cluster, trainer = config.ray, config.trainer
    num_trainers = plan.config.trainer.num_ranks + len(plan.columns)
    num_judges = sum(task.num_workers for task in reward_tasks(config) if not task.is_outside)
    return [
        *[Need("trainer", cluster.trainer_cpus, float(is_gpu(trainer.device)), home)] * num_trainers,
        *[Need("reward", cluster.reward_cpus)] * num_judges,
        *[Need("engine", cluster.engine_cpus, float(is_gpu(config.engine.device)))] * plan.num_engines,
    ]


def _kind_of(spec: Any) -> str | None:
    """What an actor is for; None: it is none."""
    kinds = {EngineSpec: "engine", ConsumerSpec: "reward", TrainerSpec: "trainer", StationSpec: "trainer"}
    return kinds.get(type(spec))


def _on_its_own_gpu(spec: Any) -> Any:
    """Ray shows an actor the GPU that it has reserved, and no other."""
    if isinstance(spec, EngineSpec | TrainerSpec | StationSpec) and is_gpu(spec.device):
        return replace(spec, device="cuda:0")
    return spec


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """What Ray makes of signals is undone: they are the run's business."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
