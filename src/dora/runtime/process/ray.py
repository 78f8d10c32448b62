"""A run on a Ray cluster: its workers are actors in placement groups. The only file that imports Ray.

Ray finds places for processes, starts and ends them, and takes weights to other nodes. What processes and
the driver say to one another goes over lines of our own (`sealed`, `far`), and who lives is told by that: to
Ray, an actor that hangs is alive.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from numpy.typing import NDArray
from ray._private import ray_constants
from ray._private import state as gcs
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dora import __version__
from dora.config.schema import Config
from dora.errors import RunError
from dora.runtime.process import remote_kv, rpc
from dora.runtime.process.launcher import (
    RayHead,
    check_reachable,
    join_with_timeout,
    preserve_signals,
    run_with_timeout,
    wait_with_notice,
)
from dora.runtime.process.messages import EngineSpec, LoadWeights, PrefetchWeights
from dora.runtime.process.resources import (
    ProcessResources,
    describe_shortage,
    engine_resources,
    role_of,
    run_resources,
    total_resources,
    with_reserved_gpu,
)
from dora.runtime.process.stream_workers import ConsumerSpec
from dora.runtime.process.worker_process import WORKER_ENV, ForkedProcess, ProcessHandle, Target, run_target
from dora.weights.store import RemoteVersionSource, WeightStore, make_store_folder

NODE = "ray.io/node-id"  # a label of each node
END_S = 1.0  # that Ray may take to say that an actor has ended, and how
GONE_S = 30.0  # ... and to end: it would try for a minute to reach a head that has gone, and then abort
LOOK_S = 1.0  # between two looks at which nodes there are


@dataclass(frozen=True)
class ReservedBundle:
    """A bundle of a placement group."""

    group: PlacementGroup
    index: int
    need: ProcessResources


@dataclass(frozen=True)
class DriverNode:
    """What an actor has to know of the driver's node; a run that `spans` several has a line to its desk."""

    node: str
    spans: bool
    pool_bytes: int  # of an engine's KV
    desk: rpc.ChannelAddress | None = None
    version: str = __version__  # the driver's


class RayLauncher:
    """A ground: where Ray has room."""

    def __init__(self, config: Config, pool_bytes: int, notice: Callable[[str], None]) -> None:
        """Join the cluster, or start one, and reserve what the run begins with: an engine's KV has
        `pool_bytes`. Raises RunError.
        """
        self._config, self._notice = config.ray, notice
        self.patience_s = config.runtime.start_timeout_s
        self._is_own = not ray.is_initialized()
        needs = run_resources(config)
        if self._is_own:
            self._join(total_resources(needs)["CPU"])
        self.head = RayHead(ray.get_runtime_context().gcs_address)
        self._spans = self._config.address is not None
        self.host = ray.util.get_node_ip_address() if self._spans else None
        self._listener = rpc.Listener(self.host or "127.0.0.1")
        self.home = DriverNode(ray.get_runtime_context().get_node_id(), self._spans, pool_bytes)
        self._needs = {need.role: need for need in needs}
        self._groups: list[PlacementGroup] = []
        self._free: list[ReservedBundle] = []
        self._versions: dict[int, ray.ObjectRef] = {}  # in Ray's memory
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self.unmet: set[RayProcess] = set()  # those of whom nothing is known yet
        self._leaving: frozenset[str] = frozenset()
        self._num_free = 0
        with _asking():
            self._reserve(needs)
            for _ in range((self._config.max_engines or 0) - sum(need.role == "engine" for need in needs)):
                self._group([engine_resources(config)])  # which a cluster that scales itself sees waiting
        if self._spans:
            threading.Thread(target=self._watch, name="watches nodes", daemon=True).start()

    @property
    def draining_nodes(self) -> frozenset[str]:
        """Nodes that are being drained."""
        return self._leaving

    @property
    def num_free_slots(self) -> int:
        """Places in which an engine could start now."""
        return self._num_free

    def start(self, name: str, target: Target, spec: Any) -> ProcessHandle:
        """Environments stay with the driver; they have ways of their own to other machines."""
        kind = role_of(spec)
        if kind is None:
            return ForkedProcess(name, target, spec)
        home = self.home
        if self._spans and isinstance(spec, EngineSpec):
            folder = spec.weights
            home = replace(home, desk=self.expect(lambda line, _: remote_kv.serve_broker(line, folder)))
        with _asking():
            return RayProcess(self, self._take(kind), target, spec, home)

    def expect(self, met: rpc.OnConnect) -> rpc.ChannelAddress:
        """As `Listener.expect`."""
        return self._listener.expect(met)

    def give_back(self, place: ReservedBundle) -> None:
        """Nobody is there any more; who takes it waits there until Ray, too, knows that."""
        with self._lock:
            self._free.append(place)

    def shipped(self, store: WeightStore, version: int) -> ray.ObjectRef:
        """A version in Ray's memory, where it is put once; those that have been retired leave it.

        Raises FileNotFoundError if this one is.
        """
        with self._lock:
            stored = store.versions()
            self._versions = {known: ref for known, ref in self._versions.items() if known in stored}
            if version not in self._versions:
                self._versions[version] = ray.put(store.raw_bytes(version))
            return self._versions[version]

    def close(self) -> None:
        self._is_closed.set()
        self._listener.close()
        if not self.head.is_reachable:
            return run_with_timeout(GONE_S, ray.shutdown)
        with contextlib.suppress(RayError):
            for group in self._groups:
                remove_placement_group(group)
        self._versions.clear()
        if self._is_own:
            ray.shutdown()

    def _join(self, num_cpus: float) -> None:
        """Start Ray, or join it. Raises RunError, with what Ray says."""
        address = self._config.address
        ray_constants.ENABLE_RAY_CLUSTER = address is not None  # else Ray stays on loopback, as on macOS
        own: dict[str, Any] = {
            "include_dashboard": False,
            "num_cpus": max(os.cpu_count() or 1, round(num_cpus + 0.5)),
            "_system_config": {"worker_niceness": 0},  # else other programs come before the run
        }
        init = partial(
            ray.init,
            namespace=f"dora-{secrets.token_hex(8)}",
            log_to_driver=False,
            logging_level="ERROR",
            runtime_env={"env_vars": WORKER_ENV},
        )
        try:
            with preserve_signals():
                if address is None:
                    init(address="local", **own)  # else it joins any that runs here
                else:
                    found = canonicalize_bootstrap_address_or_die(address)
                    check_reachable(address, found)
                    join_with_timeout(partial(init, address=found), address, self.patience_s)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            where = f"ray.address = {address!r} cannot be joined" if address else "Ray cannot be started here"
            raise RunError(f"{where}: {error}") from error

    def _reserve(self, needs: list[ProcessResources]) -> None:
        """All at once: a run begins with everything, or not at all. Raises RunError."""
        group, resources = self._group(needs), ray.cluster_resources
        if not wait_with_notice(
            group.wait, self.patience_s, lambda: self._notice(describe_shortage(needs, resources()))
        ):
            remove_placement_group(group)
            raise RunError(
                f"no room within runtime.start_timeout_s = {self.patience_s:g} s: "
                f"{describe_shortage(needs, resources())}; lower engine.num_engines or ray.*_cpus, or add nodes"
            )

    def _group(self, needs: list[ProcessResources]) -> PlacementGroup:
        """A new group, whose places are free."""
        group = placement_group(
            [need.bundle for need in needs],
            strategy="SPREAD" if self._config.spread else "PACK",
            bundle_label_selector=[{NODE: self.home.node} if need.on_driver_node else {} for need in needs],
        )
        with self._lock:
            self._groups.append(group)
            self._free += [ReservedBundle(group, index, need) for index, need in enumerate(needs)]
        return group

    def _take(self, kind: str) -> ReservedBundle:
        """One that is free, on a node that stays if there is one; or a new one."""
        while True:
            with self._lock:
                free = [place for place in self._free if place.need.role == kind]
            if free:
                place = next(filter(self._is_well, free), free[0]) if len(free) > 1 else free[0]
                with self._lock:
                    self._free.remove(place)
                return place
            self._group([self._needs[kind]])

    def _is_well(self, place: ReservedBundle) -> bool:
        """Whether it has a node, which stays."""
        nodes = placement_group_table(place.group).get("bundles_to_node_id", {})
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return nodes.get(place.index) in alive - self._leaving

    def _watch(self) -> None:
        """See nodes come and go, until the run ends."""
        while not self._is_closed.wait(LOOK_S):
            with contextlib.suppress(RayError, RuntimeError):
                self._leaving = frozenset(gcs.state.get_draining_nodes())
                with self._lock:
                    free = [place for place in self._free if place.need.role == "engine"]
                self._num_free = sum(map(self._is_well, free))
                for actor in [*self.unmet]:
                    actor.waiting_for = "" if self._is_well(actor.place) else "the cluster"


class RayProcess:
    """A carrier: an actor, whose process calls the driver as soon as it has a place."""

    def __init__(
        self, cluster: RayLauncher, place: ReservedBundle, body: Target, spec: Any, home: DriverNode
    ) -> None:
        self._cluster, self.place, self._places, self._home = cluster, place, [place], home.node
        self.waiting_for = ""
        cluster.unmet.add(self)
        self._store = WeightStore(spec.weights, spec.dtype) if isinstance(spec, EngineSpec) else None
        self._line: Future[rpc.AuthenticatedChannel] = Future()
        self._ended = threading.Event()
        self._pid: int | None = None
        self._node = home.node
        address = cluster.expect(self._met)
        where = PlacementGroupSchedulingStrategy(place.group, place.index)
        station: Any = WorkerActor
        options = {"num_cpus": place.need.cpus, "num_gpus": place.need.gpus, "scheduling_strategy": where}
        options |= {"max_concurrency": 1 if self._store is None else 2}
        self._actor = station.options(**options).remote()
        self._end = self._actor.live.remote(address, body, with_reserved_gpu(spec), home)
        self._end.future().add_done_callback(self._has_ended)

    def send(self, messages: Sequence[Any], /) -> None:
        """What is to be loaded is there when the order to load it is."""
        line = self._line.result()
        for message in messages:
            if isinstance(message, LoadWeights | PrefetchWeights) and self.node:
                self._bring(message.version)
        line.send(messages)

    def recv(self) -> Any:
        return self._line.result().recv()

    @property
    def pid(self) -> int | None:
        return self._pid

    @property
    def node(self) -> str:
        return "" if self._node == self._home else self._node

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    @property
    def exit_reason(self) -> str:
        where = f"(pid {self._pid}, node {self._node[:8]}) " if self._pid else ""
        return f"{where}has ended: {self._why()}"

    def kill(self) -> None:
        """Ray kills one that is stopped, too, but after seconds; nobody waits for that."""
        if self._cluster.head.is_reachable:
            with contextlib.suppress(RayError):
                ray.kill(self._actor)
        if self._line.done():
            self._hang_up()
        self._ended.wait(END_S)
        self._leave()

    def _met(self, line: rpc.AuthenticatedChannel, hello: Any) -> None:
        self._pid, self._node = hello
        self._cluster.unmet.discard(self)
        self.waiting_for = ""
        if self._line.set_running_or_notify_cancel():
            self._line.set_result(line)

    def _bring(self, version: int) -> None:
        """To its node; what has gone wrong is said by the engine, which does not find it."""
        assert self._store is not None
        with contextlib.suppress(FileNotFoundError, RayError):
            ref = self._cluster.shipped(self._store, version)
            brought = self._actor.bring.remote(version, ref, self._store.versions())
            ray.get(brought, timeout=self._cluster.patience_s)

    def _has_ended(self, _: Future[Any]) -> None:
        self._ended.set()
        self._leave()
        if not self._line.done():
            self._line.set_exception(EOFError("it has ended before it could say anything"))
            return
        last_words = threading.Timer(END_S, self._hang_up)
        last_words.daemon = True
        last_words.start()

    def _hang_up(self) -> None:
        """A process may outlive its raylet, on a node that Ray has given up; without a line it ends."""
        if self._line.exception() is None:
            self._line.result().close()

    def _leave(self) -> None:
        """Once, by whoever knows first that it has ended."""
        self._cluster.unmet.discard(self)
        with contextlib.suppress(IndexError):
            self._cluster.give_back(self._places.pop())

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
class WorkerActor:
    """A process of the run on some node."""

    def __init__(self) -> None:
        self._folder: Path | None = None  # of its own, where it is not on the driver's node
        self._brought: RemoteVersionSource | None = None

    def live(self, address: rpc.ChannelAddress, body: Target, spec: Any, home: DriverNode) -> None:
        """As `process.live`."""
        node = ray.get_runtime_context().get_node_id()
        if home.version != __version__:
            raise RunError(f"DORA {__version__} is on node {node}, and {home.version} is the driver's")
        spec = self._made_for(spec, home, node == home.node)
        line = rpc.connect(address, (os.getpid(), node))
        try:
            run_target(line, body, spec)
        finally:
            line.close()
            if self._folder is not None:
                shutil.rmtree(self._folder, ignore_errors=True)

    def bring(self, version: int, content: NDArray[np.uint8], stored: list[int]) -> None:
        """A version is on this node, in Ray's memory."""
        assert self._brought is not None
        self._brought.receive(version, content, stored)

    def _made_for(self, spec: Any, home: DriverNode, is_home: bool) -> Any:
        """A worker's specification, with the places of this node."""
        if isinstance(spec, ConsumerSpec):
            return replace(spec, far=None) if is_home else spec
        if not isinstance(spec, EngineSpec) or not home.spans:
            return spec
        spec = replace(spec, host=ray.util.get_node_ip_address())
        if is_home:
            return spec
        self._folder = make_store_folder(home.pool_bytes)
        self._brought = RemoteVersionSource(spec.dtype)
        return replace(spec, brought=self._brought, pool=self._folder / spec.pool.name, desk=home.desk)


@contextlib.contextmanager
def _asking() -> Iterator[None]:
    """For a place: without an answer the run ends, and can be resumed. Raises RunError."""
    try:
        yield
    except RayError as error:
        raise RunError(
            f"Ray finds no place for a process of the run: {error}; ask `ray status`, and go on with "
            "dora train --resume where a cluster is well"
        ) from error
