"""A run on a Ray cluster: its workers are actors in placement groups.

Ray reserves resources, starts and kills processes, and transfers weights to other nodes. Workers and the
driver exchange messages over their own channels (`rpc`), and the driver detects a worker that hangs by its
heartbeat: to Ray, such an actor is alive.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import secrets
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Set
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import psutil
import ray
from ray._private import ray_constants
from ray._private import state as gcs
from ray._private.services import canonicalize_bootstrap_address_or_die
from ray.exceptions import GetTimeoutError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import (
    PlacementGroup,
    placement_group,
    placement_group_table,
    remove_placement_group,
)
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from dora.config.schema import Config
from dora.curve import CurveAddress, CurveServer
from dora.errors import RunError
from dora.runtime.process.descendants import kill_with_descendants
from dora.runtime.process.messages import EngineSpec, LoadWeights, PrefetchWeights
from dora.runtime.process.ray_actor import DriverNode, WorkerActor
from dora.runtime.process.ray_connect import (
    RayHead,
    check_reachable,
    join_with_timeout,
    preserve_signals,
    run_with_timeout,
    token_source,
    wait_with_notice,
)
from dora.runtime.process.remote_kv import make_broker
from dora.runtime.process.resources import (
    ProcessResources,
    count_places,
    describe_places,
    describe_shortage,
    engine_resources,
    role_of,
    run_resources,
    total_resources,
    with_reserved_gpu,
)
from dora.runtime.process.rpc import ChannelAddress, CurveChannel, RequestServer
from dora.runtime.process.worker_process import WORKER_ENV, Launcher, ProcessHandle, Target
from dora.weights.store import WeightStore

NODE_LABEL = "ray.io/node-id"  # Ray gives each node this label
EXIT_TIMEOUT_S = 1.0  # for Ray to report that an actor has exited, and why
SHUTDOWN_TIMEOUT_S = 30.0  # for ray.shutdown()
LOST_HEAD_SHUTDOWN_S = 5.0  # the same without a head: a minute after its loss Ray aborts the process
NODE_POLL_S = 1.0

_ACTOR_CLASS: Any = ray.remote(max_restarts=0, max_task_retries=0)(WorkerActor)


@dataclass(frozen=True)
class ReservedBundle:
    """A bundle of a placement group, which holds one process at a time."""

    group: PlacementGroup
    index: int
    resources: ProcessResources


class RayLauncher(Launcher):
    """Starts workers as actors."""

    def __init__(self, config: Config, run_name: str, pool_bytes: int, notice: Callable[[str], None]) -> None:
        """Join or start a cluster, and reserve resources for all processes that the run starts with.

        `run_name` is part of the names of actors; `pool_bytes`: of an engine's KV pool. Raises RunError.
        """
        self._config, self._notice = config.ray, notice
        self.start_timeout_s = config.runtime.start_timeout_s
        self._owns_ray = not ray.is_initialized()
        processes = run_resources(config)
        if self._owns_ray:
            self._join(total_resources(processes)["CPU"])
        self.head = RayHead(ray.get_runtime_context().gcs_address)
        self._spans_nodes = self._config.address is not None
        self.host = ray.util.get_node_ip_address() if self._spans_nodes else None
        self._server, self._channels = CurveServer(), list[CurveChannel]()
        self._broker: RequestServer | None = None
        self.driver = DriverNode(ray.get_runtime_context().get_node_id(), self._spans_nodes, pool_bytes)
        self._run_name, self._num_started = run_name, Counter[str]()  # by the name of the process
        self._resources = {process.role: process for process in processes}
        self._groups: list[PlacementGroup] = []
        self._free: list[ReservedBundle] = []
        self._versions: dict[int, ray.ObjectRef] = {}  # in Ray's object store
        self._lock, self._is_closed = threading.Lock(), threading.Event()
        self.unconnected: set[RayProcess] = set()  # actors that have not called the driver yet
        num_engines = sum(process.role == "engine" for process in processes)
        with _run_errors():
            self._reserve(processes)
            for _ in range((self._config.max_engines or 0) - num_engines):
                self._add_group([engine_resources(config)])  # while it waits, an autoscaler adds a node
        threading.Thread(target=self._watch_nodes, name="ray-nodes", daemon=True).start()

    def start(self, name: str, target: Target, spec: Any) -> ProcessHandle:
        """See `Launcher`. Environment workers are forked: they reach other machines through `env.hosts`."""
        role = role_of(spec)
        if role is None:
            return super().start(name, target, spec)
        driver = self.driver
        if self._spans_nodes and isinstance(spec, EngineSpec):
            driver = replace(driver, broker=self._broker_address())

        def start() -> RayProcess:
            return RayProcess(self, self._actor_name(name), self._acquire(role), target, spec, driver)

        with _run_errors():
            return self.head.call(start)

    def _actor_name(self, name: str) -> str:
        """The unique name of an actor: Ray may still know the lost one that it replaces."""
        num_before = self._num_started[name]
        self._num_started[name] += 1
        restart = f"-restart-{num_before}" if num_before else ""
        return f"dora-{self._run_name}-{name}{restart}".replace(" ", "-")

    def find_shortage(self, num_engines: int) -> str:
        """See `Launcher`. On a cluster with an autoscaler, engines may wait for a new node."""
        if not self.head.is_reachable:
            return ""  # the run ends
        engine = self._resources["engine"]
        with self._lock:
            reserved = [bundle for bundle in self._free if bundle.resources.role == "engine"]
        with _run_errors():
            nodes = gcs.state.available_resources_per_node()
            free = [amounts for node, amounts in nodes.items() if node not in self.draining_nodes]
            num_places = sum(map(self._is_usable, reserved)) + count_places(engine, free)
            if num_places >= num_engines or (self._spans_nodes and not _is_fixed(nodes.keys())):
                return ""
        return (
            f"{describe_places(engine, free)}; drain another engine, add a node, or resume the run with a "
            f"smaller ray.engine_cpus or on a larger cluster (ray.address)"
        )

    def listen(self) -> tuple[CurveChannel, ChannelAddress]:
        """See `CurveChannel.listen`. Raises RunError."""
        host = self.host or "127.0.0.1"
        try:
            channel, address = CurveChannel.listen(self._server, host)
        except OSError as error:
            raise RunError(
                f"the driver cannot listen at {host} for another worker: {error}; raise its limit of open "
                "files (ulimit -n), and resume the run with dora train --resume"
            ) from error
        self._channels = [*(each for each in self._channels if not each.is_closed), channel]
        return channel, address

    def _broker_address(self) -> CurveAddress:
        """The broker of the run's migrations."""
        with self._lock:
            if self._broker is None:
                self._broker = make_broker(self.host or "127.0.0.1")
            return self._broker.address

    def release(self, bundle: ReservedBundle) -> None:
        """Free the bundle of an actor that has exited; the next actor in it waits until Ray has also detected
        the exit.
        """
        with self._lock:
            self._free.append(bundle)

    def put_version(self, store: WeightStore, version: int) -> ray.ObjectRef:
        """Put a version into Ray's object store, once, and remove retired versions from it.

        Raises FileNotFoundError if the version is retired.
        """
        with self._lock:
            stored = store.versions()
            self._versions = {known: ref for known, ref in self._versions.items() if known in stored}
            if version not in self._versions:
                self._versions[version] = ray.put(store.file_bytes(version))
            return self._versions[version]

    def close(self) -> None:
        self._is_closed.set()
        for channel in self._channels:
            channel.close()
        self._server.close()
        if self._broker is not None:
            self._broker.close()
        if self.head.is_reachable:
            with contextlib.suppress(RayError, RunError):
                for group in self._groups:
                    self.head.call(partial(remove_placement_group, group))
            self._versions.clear()
        if not self.head.is_reachable:
            run_with_timeout(LOST_HEAD_SHUTDOWN_S, ray.shutdown)
        elif self._owns_ray:
            run_with_timeout(SHUTDOWN_TIMEOUT_S, ray.shutdown)  # Ray 2.60 sometimes waits forever

    def _join(self, num_cpus: float) -> None:
        """Start Ray with at least `num_cpus`, or join a cluster. Raises RunError."""
        address = self._config.address
        ray_constants.ENABLE_RAY_CLUSTER = address is not None  # else Ray stays on loopback, as on macOS
        local: dict[str, Any] = {
            "include_dashboard": self._config.dashboard,
            "dashboard_host": "127.0.0.1",
            "num_cpus": max(os.cpu_count() or 1, math.ceil(num_cpus)),
            # By default workers have a lower priority, and Ray starts one for each CPU before any is needed;
            # as these lack `WORKER_ENV`, no actor would run in them.
            "_system_config": {"worker_niceness": 0, "prestart_worker_first_driver": False},
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
                    # Without "local" it joins any cluster of this machine.
                    self._report_start(init(address="local", **local))
                else:
                    resolved = canonicalize_bootstrap_address_or_die(address)
                    check_reachable(address, resolved)
                    join_with_timeout(partial(init, address=resolved), address, self.start_timeout_s)
        except (ConnectionError, RuntimeError, ValueError, RayError) as error:
            action = f"cannot join ray.address = {address!r}" if address else "cannot start Ray here"
            raise RunError(f"{action}: {error}") from error

    def _report_start(self, started: Any) -> None:
        """Log the addresses of Ray, and where its auth token is."""
        dashboard = f", its dashboard at http://{started.dashboard_url}" if self._config.dashboard else ""
        address = started.address_info["gcs_address"]
        self._notice(f"Ray runs at {address}{dashboard}; its auth token is in {token_source()}")

    def _reserve(self, processes: list[ProcessResources]) -> None:
        """Reserve for all processes together; raises RunError if not all fit."""
        group, resources = self._add_group(processes), ray.cluster_resources
        if not wait_with_notice(
            group.wait, self.start_timeout_s, lambda: self._notice(describe_shortage(processes, resources()))
        ):
            remove_placement_group(group)
            raise RunError(
                f"the run got no resources within runtime.start_timeout_s = {self.start_timeout_s:g} s: "
                f"{describe_shortage(processes, resources())}; lower engine.num_engines or ray.*_cpus, "
                "or add nodes"
            )

    def _add_group(self, processes: list[ProcessResources]) -> PlacementGroup:
        """Request a placement group with one bundle for each process."""
        on_driver_node = {NODE_LABEL: self.driver.node}
        group = placement_group(
            [process.bundle for process in processes],
            strategy="SPREAD" if self._config.spread else "PACK",
            bundle_label_selector=[on_driver_node if each.on_driver_node else {} for each in processes],
        )
        with self._lock:
            self._groups.append(group)
            self._free += [ReservedBundle(group, index, process) for index, process in enumerate(processes)]
        return group

    def _acquire(self, role: str) -> ReservedBundle:
        """A free bundle, if possible on a node that is not draining; or one of a new group."""
        while True:
            with self._lock:
                free = [bundle for bundle in self._free if bundle.resources.role == role]
            if free:
                bundle = next(filter(self._is_usable, free), free[0]) if len(free) > 1 else free[0]
                with self._lock:
                    self._free.remove(bundle)
                return bundle
            self._add_group([self._resources[role]])

    def _is_usable(self, bundle: ReservedBundle) -> bool:
        """Whether the bundle is on a node that is alive and not draining."""
        nodes = placement_group_table(bundle.group).get("bundles_to_node_id", {})
        alive = {node["NodeID"] for node in ray.nodes() if node["Alive"]}
        return nodes.get(bundle.index) in alive - self.draining_nodes

    def _watch_nodes(self) -> None:
        """Poll the state of the nodes until the run ends."""
        while not self._is_closed.wait(NODE_POLL_S):
            with contextlib.suppress(RayError, RuntimeError):
                self.draining_nodes = frozenset(gcs.state.get_draining_nodes())
                with self._lock:
                    free = [bundle for bundle in self._free if bundle.resources.role == "engine"]
                self.num_free_slots = sum(map(self._is_usable, free))
                for process in [*self.unconnected]:
                    process.waiting_for = "" if self._is_usable(process.bundle) else "the cluster"


class RayProcess:
    """A `ProcessHandle` of an actor, whose process connects to the driver when it starts."""

    def __init__(
        self,
        launcher: RayLauncher,
        name: str,
        bundle: ReservedBundle,
        target: Target,
        spec: Any,
        driver: DriverNode,
    ) -> None:
        self._launcher, self.bundle, self._driver_node = launcher, bundle, driver.node
        self._to_release = [bundle]
        self.waiting_for = ""
        launcher.unconnected.add(self)
        self._store = WeightStore(spec.weights, spec.dtype) if isinstance(spec, EngineSpec) else None
        self._channel, address = launcher.listen()
        self._is_connected, self._has_exited = threading.Event(), threading.Event()
        self.pid: int | None = None
        self._found: psutil.Process | None = None  # on the driver's node
        self._node = driver.node
        options = {"name": name, "num_cpus": bundle.resources.cpus, "num_gpus": bundle.resources.gpus}
        options["scheduling_strategy"] = PlacementGroupSchedulingStrategy(bundle.group, bundle.index)
        options["max_concurrency"] = 1 if self._store is None else 2  # `receive_version` beside `run`
        self._actor = _ACTOR_CLASS.options(**options).remote()
        run = self._actor.run.options(name=name)  # also the title of the process
        self._result = run.remote(address, target, with_reserved_gpu(spec), driver)
        self._result.future().add_done_callback(self._on_exit)

    def send(self, messages: Sequence[Any], /) -> None:
        """A version that the messages load is transferred to the worker's node first."""
        self._is_connected.wait()
        for message in messages:
            if isinstance(message, LoadWeights | PrefetchWeights) and self.node:
                self._transfer(message.version)
        self._channel.send(messages)

    def recv(self) -> Any:
        """The first message of a worker, which is not returned, names its process and node."""
        if not self._is_connected.is_set():
            try:
                pid, self._node = self._channel.recv()
                if not self.node:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        self._found = psutil.Process(pid)
                self.pid = pid
            finally:
                self._launcher.unconnected.discard(self)
                self.waiting_for = ""
                self._is_connected.set()
        return self._channel.recv()

    @property
    def node(self) -> str:
        return "" if self._node == self._driver_node else self._node

    @property
    def is_alive(self) -> bool:
        return not self._has_exited.is_set()

    @property
    def exit_reason(self) -> str:
        where = f"(pid {self.pid}, node {self._node[:8]}) " if self.pid else ""
        return f"{where}exited: {self._ray_exit_reason()}"

    def kill(self) -> None:
        """As in `ProcessHandle`, with all processes that it has started; waits for EXIT_TIMEOUT_S only, on
        another node once more.

        On this node by signal first: Ray takes seconds to kill a process that is stopped. On another one by
        closing the channel: a worker that does not hang then cleans up and exits.
        """
        if self.is_alive and self._found is not None:
            kill_with_descendants(self._found)
        elif self.is_alive and self.node:
            self._channel.close()
            self._has_exited.wait(EXIT_TIMEOUT_S)
        head = self._launcher.head
        if head.is_reachable:
            with contextlib.suppress(RayError, RunError):
                head.call(partial(ray.kill, self._actor))
        self._channel.close()
        self._has_exited.wait(EXIT_TIMEOUT_S)
        self._release()

    def _transfer(self, version: int) -> None:
        """Transfer a version to the worker's node. If that fails, the engine reports the missing version."""
        assert self._store is not None
        with contextlib.suppress(OSError, RayError):
            ref = self._launcher.put_version(self._store, version)
            received = self._actor.receive_version.remote(version, ref, self._store.versions())
            ray.get(received, timeout=self._launcher.start_timeout_s)

    def _on_exit(self, _: Future[Any]) -> None:
        self._has_exited.set()
        self._release()
        # Wait for its last messages. Closing the channel also ends a worker whose raylet has crashed.
        timer = threading.Timer(EXIT_TIMEOUT_S, self._channel.close)
        timer.daemon = True
        timer.start()

    def _release(self) -> None:
        """Release the bundle, once, from the thread that detects the exit first."""
        self._launcher.unconnected.discard(self)
        with contextlib.suppress(IndexError):
            self._launcher.release(self._to_release.pop())

    def _ray_exit_reason(self) -> str:
        self._has_exited.wait(EXIT_TIMEOUT_S)
        try:
            ray.get(self._result, timeout=0)
        except GetTimeoutError:
            return "its connection is lost"
        except RayError as error:
            lines = [line.strip() for line in str(error).splitlines() if line.strip()]
            return lines[-1].partition(" Worker exit detail: ")[2] or lines[-1]
        return "its work was done"


def _is_fixed(nodes: Set[str]) -> bool:
    """Whether no autoscaler adds nodes: without one, Ray reports each node as a type of its own."""
    status = internal_kv._internal_kv_get(ray_constants.DEBUG_AUTOSCALING_STATUS)
    report = json.loads(status)["autoscaler_report"] if status else {}
    types = report.get("node_type_mapping") or {}
    return bool(types) and all(types.get(node) == f"node_{node}" for node in nodes)


@contextlib.contextmanager
def _run_errors() -> Iterator[None]:
    """Ray's errors become a RunError: the run ends and can be resumed."""
    try:
        yield
    except RayError as error:
        raise RunError(
            f"Ray cannot reserve resources for a process of the run: {error}; check `ray status`, and resume "
            "with dora train --resume on a healthy cluster"
        ) from error
