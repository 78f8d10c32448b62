"""A Ray cluster of two nodes on this machine, shared by all tests of a session."""

from __future__ import annotations

import atexit
from functools import cache
from typing import Any

from ray.cluster_utils import Cluster

OBJECT_STORE_BYTES = 100 * 2**20  # of each node
SETTINGS = {
    "worker_niceness": 0,  # this and the next as `RayLauncher` sets them
    "prestart_worker_first_driver": False,
    # The head notices a killed raylet within seconds.
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}


@cache
def two_nodes() -> Any:
    """A cluster with a head, where drivers run, and a second node; both have 4 CPUs."""
    head = {"num_cpus": 4, "object_store_memory": OBJECT_STORE_BYTES}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**head, "include_dashboard": False, "_system_config": SETTINGS},
        shutdown_at_exit=False,
    )
    atexit.register(cluster.shutdown)
    add_node(cluster, 4)
    return cluster


def add_node(cluster: Any, num_cpus: int) -> Any:
    """Add a node; `cluster.remove_node` removes it."""
    return cluster.add_node(num_cpus=num_cpus, object_store_memory=OBJECT_STORE_BYTES)
