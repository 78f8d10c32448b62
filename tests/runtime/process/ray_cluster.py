"""Two nodes of a Ray cluster on this machine, one cluster for all tests; what they start is all they stop."""

from __future__ import annotations

import atexit
from functools import cache
from typing import Any

from ray.cluster_utils import Cluster

MEMORY_BYTES = 100 * 2**20  # of each node's objects
SOON = {  # a raylet that was killed is noticed within seconds
    "worker_niceness": 0,
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
}


@cache
def two_nodes() -> Any:
    """Its head, where drivers are, and another one, of 4 CPUs each."""
    head = {"num_cpus": 4, "object_store_memory": MEMORY_BYTES}
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**head, "include_dashboard": False, "_system_config": SOON},
        shutdown_at_exit=False,
    )
    atexit.register(cluster.shutdown)
    add_node(cluster, 4)
    return cluster


def add_node(cluster: Any, num_cpus: int) -> Any:
    """One more, which `cluster.remove_node` ends."""
    return cluster.add_node(num_cpus=num_cpus, object_store_memory=MEMORY_BYTES)
