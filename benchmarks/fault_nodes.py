"""A Ray cluster of two nodes on this machine, one of which a campaign of faults kills and replaces.

The head node has the driver, the trainer and some engines; the other node has the remaining workers. Together
they have resources for little more than one run, so the workers of a killed node need its replacement.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fault_kinds import Fault, Inject, are_reward_workers_ready, kill, reward_workers

from dora.runtime.executor import LiveRun
from dora.runtime.process.ray_connect import set_ray_environment
from dora.runtime.process.worker_process import Worker

NUM_CPUS = 4  # of each node; they are only reserved
RAYLET_KILLED, STORAGE_KILLED = "raylet killed", "storage killed"
REPLACEMENT_S = 1.0  # until a new node replaces a killed one
MEMORY_BYTES = 100 * 2**20  # of each node's object store
SYSTEM_CONFIG = {  # with which Ray detects a killed raylet within seconds
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}


class Nodes:
    """The head node and the current other node."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._add()

    @property
    def address(self) -> str:
        """The cluster's address, for `ray.address`."""
        return str(self._cluster.address)

    def kill(self) -> str:
        """Kill the raylet of the other node, which ends that node for Ray. Returns the node's id."""
        killed = self._other
        os.kill(killed.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        threading.Timer(REPLACEMENT_S, self._add).start()
        return str(killed.node_id)

    def _add(self) -> None:
        self._other = self._cluster.add_node(num_cpus=NUM_CPUS, object_store_memory=MEMORY_BYTES)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """A cluster for this benchmark only; no other cluster is stopped at the end."""
    set_ray_environment()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": NUM_CPUS, "object_store_memory": MEMORY_BYTES, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={**head, "_system_config": SYSTEM_CONFIG}, shutdown_at_exit=False
    )
    try:
        yield Nodes(cluster)
    finally:
        cluster.shutdown()


def kinds_on(nodes: Nodes) -> dict[str, Inject]:
    """The faults that only a cluster can have."""
    return {RAYLET_KILLED: partial(kill_raylet, nodes), STORAGE_KILLED: kill_storage}


def kill_raylet(nodes: Nodes, run: LiveRun, number: int) -> Fault:
    """Has recovered once as many engines have joined as before and all reward workers are ready."""
    num_before = len(run.executor.engine_pool.joined)
    node = nodes.kill()
    lost = [worker for worker in _workers(run) if worker.process.node == node]
    assert lost, "no worker of the run was on the killed node"

    def is_detected(run: LiveRun) -> bool:
        current = _workers(run)
        return not any(worker in current for worker in lost)

    def has_recovered(run: LiveRun) -> bool:
        has_engines = len(run.executor.engine_pool.joined) >= num_before
        return has_engines and are_reward_workers_ready(run)

    return Fault("raylet", is_detected, has_recovered)


def kill_storage(run: LiveRun, number: int) -> Fault:
    """Has recovered once another storage process is available."""
    storage = run.executor.storage
    assert storage is not None, "local runs have the storage in a thread"
    worker = storage.states()[0].worker
    kill(worker)

    def has_recovered(run: LiveRun) -> bool:
        return storage.is_available and storage.states()[0].worker is not worker

    return Fault("storage", lambda run: not storage.is_available, has_recovered)


def _workers(run: LiveRun) -> list[Worker]:
    """The workers that may be on any node."""
    return [*run.executor.engine_pool.workers.values(), *reward_workers(run)]
