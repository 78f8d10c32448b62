"""Whether Ray's direct transports (RDT) may carry weights: how fast, and what the death of a receiver does.

A tensor goes from an actor to one on another node of a cluster on this machine, into a buffer that is there:
by the object store, by gloo (a collective group of the two, as NCCL needs it, too), and by NIXL (one-sided,
over UCX on TCP) where `pip install nixl` has been done. `idle_cpu_share` is of a core, of a receiver that has
nothing to do. Then receivers are killed in the middle of a transfer: `senders_lost` of so many `kills` took
the sender with them, and after `served_another` of them a new receiver had the tensor from the same sender.
--quick sends less, and kills one.

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

os.environ |= {"UCX_TLS": "tcp", "UCX_NET_DEVICES": "lo"}  # as between machines: no memory is shared
PATIENCE_S = 60.0
IDLE_S, SETTLE_S = 2.0, 3.0  # what a death does to a sender may show a little later


@ray.remote(num_cpus=0, max_concurrency=2)
class Party:
    """Has a tensor, or a buffer for it."""

    def __init__(self, num_bytes: int) -> None:
        self._own = torch.ones(num_bytes // 4)

    def pid(self) -> int:
        """It is there."""
        return os.getpid()

    def object(self) -> NDArray[np.float32]:
        """Through the object store, which takes a copy."""
        array: NDArray[np.float32] = self._own.numpy()
        return array

    @ray.method(tensor_transport="gloo")
    def gloo(self) -> torch.Tensor:
        """It stays where it is until somebody takes it."""
        return self._own

    @ray.method(tensor_transport="nixl")
    def nixl(self) -> torch.Tensor:
        """The same."""
        return self._own

    def take(self, sent: Any) -> None:
        """Into the buffer."""
        self._own.numpy()[:] = sent


class Pair:
    """A sender, and a receiver on another node."""

    def __init__(self, way: str, num_bytes: int) -> None:
        self._way, self._num_bytes = way, num_bytes
        own = ray.get_runtime_context().get_node_id()
        self._far = next(node["NodeID"] for node in ray.nodes() if node["NodeID"] != own)
        self._sender = self._party(own)
        self.meet()

    def meet(self) -> None:
        """A new receiver. Raises RayError if the sender cannot serve it."""
        self._receiver = self._party(self._far)
        self._process = psutil.Process(ray.get(self._receiver.pid.remote(), timeout=PATIENCE_S))
        if self._way == "gloo":
            create_collective_group([self._sender, self._receiver], backend="torch_gloo")

    def transfer_s(self) -> float:
        """How long one takes. Raises RayError if it breaks."""
        began_s = time.perf_counter()
        ray.get(self._begin(), timeout=PATIENCE_S)
        return time.perf_counter() - began_s

    def idle_share(self) -> float:
        """Of a core."""
        self._process.cpu_percent()
        return self._process.cpu_percent(IDLE_S) / 100

    def kill_receiver(self, after_s: float) -> None:
        """So long after a transfer has begun."""
        transfer = self._begin()
        time.sleep(after_s)
        self._process.kill()
        is_done(lambda: ray.get(transfer, timeout=PATIENCE_S))
        time.sleep(SETTLE_S)

    def sender_lives(self) -> bool:
        """It answers."""
        return is_done(lambda: ray.get(self._sender.pid.remote(), timeout=PATIENCE_S))

    def serve_another(self) -> None:
        """A transfer to a new receiver. Raises RayError if there is none."""
        self.meet()
        self.transfer_s()

    def _begin(self) -> Any:
        return self._receiver.take.remote(getattr(self._sender, self._way).remote())

    def _party(self, node: str) -> Any:
        where = NodeAffinitySchedulingStrategy(node, soft=False)
        party: Any = Party
        return party.options(scheduling_strategy=where).remote(self._num_bytes)


def is_done(act: Callable[[], object]) -> bool:
    """Whether nothing broke."""
    try:
        act()
    except (RayError, RuntimeError, TimeoutError, ValueError):
        return False
    return True


def way_row(way: str, num_bytes: int, num_repeats: int, num_kills: int) -> Row:
    """The median of repeats, after one that does not count; then the deaths."""
    pair = Pair(way, num_bytes)
    pair.transfer_s()
    seconds = statistics.median(pair.transfer_s() for _ in range(num_repeats))
    idle_share, num_lost, num_served = pair.idle_share(), 0, 0
    for _ in range(num_kills):
        pair.kill_receiver(seconds / 2)
        is_served = pair.sender_lives() and is_done(pair.serve_another)
        num_served += is_served
        if not is_served:
            num_lost += not pair.sender_lives()
            pair = Pair(way, num_bytes)
    return {
        "way": way,
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
    ways = ["object", "gloo"] + ["nixl"] * (importlib.util.find_spec("nixl") is not None)
    num_bytes, num_repeats, num_kills = (2**26, 3, 1) if options.quick else (2**28, 5, 3)
    with two_nodes():
        rows = [way_row(way, num_bytes, num_repeats, num_kills) for way in ways]
    ratios = {f"{row['way']}, GB/s": float(row["gb_per_s"]) for row in rows}
    ratios |= {f"{row['way']}, senders lost": float(row["senders_lost"]) for row in rows}
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
