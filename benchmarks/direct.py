"""Whether Ray's direct transports (RDT) are suitable for weights: throughput, and effects of a lost receiver.

A tensor is sent from an actor to an actor on another node of a cluster on this machine, into an existing
buffer: through the object store, by gloo (a collective group of the two, which NCCL needs as well), and by
NIXL (one-sided, over UCX on TCP) if it is installed (pip install nixl). `idle_cpu_share` is the fraction of a
core that an idle receiver uses. Then receivers are killed during a transfer: `senders_lost` counts the kills
after which the sender was lost as well, and `served_another` those after which the same sender served a new
receiver. --quick sends less, and kills one receiver.

    python benchmarks/direct.py [--quick] [--json FILE]
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import ray
import torch
from cluster import two_nodes
from numpy.typing import NDArray
from ray.exceptions import RayError
from ray.experimental.collective import create_collective_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from report import Row, parse_options, publish

os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}  # as between machines, without shared memory
TIMEOUT_S = 60.0
IDLE_S, SETTLE_S = 2.0, 3.0  # until the effect of a kill on the sender is visible


@ray.remote(num_cpus=0, max_concurrency=2)
class Endpoint:
    """An actor with a tensor, or with a buffer for one."""

    def __init__(self, num_bytes: int) -> None:
        self._own = torch.ones(num_bytes // 4)

    def pid(self) -> int:
        """Its process id."""
        return os.getpid()

    def object(self) -> NDArray[np.float32]:
        """The tensor through the object store, which copies it."""
        array: NDArray[np.float32] = self._own.numpy()
        return array

    @ray.method(tensor_transport="gloo")
    def gloo(self) -> torch.Tensor:
        """The tensor by gloo; it is not copied before it is received."""
        return self._own

    @ray.method(tensor_transport="nixl")
    def nixl(self) -> torch.Tensor:
        """The tensor by NIXL, likewise."""
        return self._own

    def receive(self, sent: Any) -> None:
        """Copy a tensor into the buffer."""
        self._own.numpy()[:] = sent


class Pair:
    """A sender and a receiver on another node; `transport` is a method of `Endpoint`."""

    def __init__(self, transport: str, num_bytes: int) -> None:
        self._transport, self._num_bytes = transport, num_bytes
        own = ray.get_runtime_context().get_node_id()
        self._far = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != own)
        self._sender = self._endpoint(own)
        self.add_receiver()

    def add_receiver(self) -> None:
        """Start a new receiver. Raises RayError if the sender cannot be connected to it."""
        self._receiver = self._endpoint(self._far)
        self._process = psutil.Process(ray.get(self._receiver.pid.remote(), timeout=TIMEOUT_S))
        if self._transport == "gloo":
            create_collective_group([self._sender, self._receiver], backend="torch_gloo")

    def transfer_s(self) -> float:
        """Seconds of a transfer. Raises RayError if it fails."""
        began_s = time.perf_counter()
        ray.get(self._begin(), timeout=TIMEOUT_S)
        return time.perf_counter() - began_s

    def idle_share(self) -> float:
        """The fraction of a core that the idle receiver uses."""
        self._process.cpu_percent()
        return self._process.cpu_percent(IDLE_S) / 100

    def kill_receiver(self, after_s: float) -> None:
        """Kill the receiver `after_s` after the start of a transfer."""
        transfer = self._begin()
        time.sleep(after_s)
        self._process.kill()
        succeeds(lambda: ray.get(transfer, timeout=TIMEOUT_S))
        time.sleep(SETTLE_S)

    def is_sender_alive(self) -> bool:
        """Whether the sender replies."""
        return succeeds(lambda: ray.get(self._sender.pid.remote(), timeout=TIMEOUT_S))

    def serve_another(self) -> None:
        """Transfer to a new receiver. Raises RayError if that fails."""
        self.add_receiver()
        self.transfer_s()

    def _begin(self) -> Any:
        return self._receiver.receive.remote(getattr(self._sender, self._transport).remote())

    def _endpoint(self, node: str) -> Any:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        endpoint: Any = Endpoint
        return endpoint.options(scheduling_strategy=where).remote(self._num_bytes)


def succeeds(call: Callable[[], object]) -> bool:
    """Whether a call raises none of the errors of a broken transfer."""
    try:
        call()
    except (RayError, RuntimeError, TimeoutError, ValueError):
        return False
    return True


def transport_row(transport: str, num_bytes: int, num_repeats: int, num_kills: int) -> Row:
    """The median of repeats, after a warm-up; then the kills."""
    pair = Pair(transport, num_bytes)
    pair.transfer_s()
    seconds = statistics.median(pair.transfer_s() for _ in range(num_repeats))
    idle_share, num_lost, num_served = pair.idle_share(), 0, 0
    for _ in range(num_kills):
        pair.kill_receiver(seconds / 2)
        is_served = pair.is_sender_alive() and succeeds(pair.serve_another)
        num_served += is_served
        if not is_served:
            num_lost += not pair.is_sender_alive()
            pair = Pair(transport, num_bytes)
    return {
        "way": transport,
        "mb": num_bytes / 1e6,
        "ms": 1e3 * seconds,
        "gb_per_s": num_bytes / 1e9 / seconds,
        "idle_cpu_share": idle_share,
        "kills": num_kills,
        "senders_lost": num_lost,
        "served_another": num_served,
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    transports = ["object", "gloo"] + ["nixl"] * (importlib.util.find_spec("nixl") is not None)
    num_bytes, num_repeats, num_kills = (2**26, 3, 1) if options.quick else (2**28, 5, 3)
    with two_nodes():
        rows = [transport_row(transport, num_bytes, num_repeats, num_kills) for transport in transports]
    ratios = {f"{row['way']}, GB/s": float(row["gb_per_s"]) for row in rows}
    ratios |= {f"{row['way']}, senders lost": float(row["senders_lost"]) for row in rows}
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
