"""Two nodes of a Ray cluster on this machine, one of which a campaign of faults kills, and which come back.

The head has the driver, the trainer and some engines, and the other one the rest: together they have room for
a run and little more, so that what a killed node had needs the node that takes its place.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from fault_kinds import Strike, Wound, are_judges_ready, judges, killed

from dora.runtime.process.ray_connect import set_ray_environment
from dora.runtime.process.worker_process import Worker
from dora.service.context import RunContext

NUM_CPUS = 4  # of each node, which are reserved and nothing more
RAYLET_KILLED, STORAGE_KILLED = "raylet killed", "storage killed"
BACK_S = 1.0  # after which another node is there instead of a killed one
MEMORY_BYTES = 100 * 2**20  # of each node's objects
SOON = {  # a raylet that was killed is noticed by Ray within seconds
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}


class Nodes:
    """The head, and the other one of the day."""

    def __init__(self, cluster: Any) -> None:
        self._cluster = cluster
        self._add()

    @property
    def address(self) -> str:
        """Where a run joins."""
        return str(self._cluster.address)

    def kill(self) -> str:
        """Kill the other one's raylet, without which Ray has no node there; the node's id."""
        dead = self._other
        os.kill(dead.all_processes["raylet"][0].process.pid, signal.SIGKILL)
        threading.Timer(BACK_S, self._add).start()
        return str(dead.node_id)

    def _add(self) -> None:
        self._other = self._cluster.add_node(num_cpus=NUM_CPUS, object_store_memory=MEMORY_BYTES)


@contextmanager
def two_nodes() -> Iterator[Nodes]:
    """A cluster of this benchmark alone; nothing else is stopped in the end."""
    set_ray_environment()
    from ray.cluster_utils import Cluster

    head = {"num_cpus": NUM_CPUS, "object_store_memory": MEMORY_BYTES, "include_dashboard": False}
    cluster = Cluster(
        initialize_head=True, head_node_args={**head, "_system_config": SOON}, shutdown_at_exit=False
    )
    try:
        yield Nodes(cluster)
    finally:
        cluster.shutdown()


def kinds_on(nodes: Nodes) -> dict[str, Strike]:
    """What only a cluster can suffer."""
    return {RAYLET_KILLED: partial(raylet_killed, nodes), STORAGE_KILLED: storage_killed}


def raylet_killed(nodes: Nodes, inside: RunContext, turn: int) -> Wound:
    """Over once as many engines have joined as before, and all judges are ready."""
    fleet = inside.hands.engine_pool
    num_before = len(fleet.joined)
    node = nodes.kill()
    lost = [worker for worker in _workers(inside) if worker.node == node]
    assert lost, "nothing of the run was on the node that was killed"

    def is_noticed(inside: RunContext) -> bool:
        here = _workers(inside)
        return not any(worker in here for worker in lost)

    def is_over(inside: RunContext) -> bool:
        return len(inside.hands.engine_pool.joined) >= num_before and are_judges_ready(inside)

    return Wound("raylet", is_noticed, is_over)


def storage_killed(inside: RunContext, turn: int) -> Wound:
    """Over once another one is there, and has been told what the first one had."""
    storage = inside.hands.storage
    assert storage is not None, "local runs have it in a thread"
    worker = storage.pulse().worker
    killed(worker)

    def is_over(inside: RunContext) -> bool:
        return storage.is_there and storage.pulse().worker is not worker

    return Wound("storage", lambda inside: not storage.is_there, is_over)


def _workers(inside: RunContext) -> list[Worker]:
    """Those that may be on any node."""
    return [*inside.hands.engine_pool.workers.values(), *judges(inside)]
