"""The cost of a run on Ray relative to local processes, and the throughput of transfers between nodes.

First the demo runs locally and on Ray in turn. Then weights are published on Ray, with one engine and with
many. `held_ms` is the time of a publish, during which the trainer does nothing else. Many engines run at the
pace of the one, with many times its load on the cores, and at a slower pace with the same total load. Last,
transfer paths are measured between two nodes of a cluster on this machine, each with its own object store:
`object` is Ray's alone, `weights` ends in an engine's buffer, and `kv` in an engine's pool, in pieces of
4 MiB as in a migration. Every object and version is transferred for the first time. --quick leaves out the
demo and the slower engines, and has two engines, few steps and smaller buffers.

    python benchmarks/cluster.py [--quick] [--json FILE]
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import ray
import torch
from demo import run_demo
from finished_run import median_of
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dora.engine.kv_transfer.pool import (
    KVBlocks,
    MappedPool,
    PeerPool,
    create_pool,
    view_as_blocks,
)
from dora.runtime.process.remote_kv import RemoteKVPool, serve_kv
from dora.weights.store import RemoteVersionSource, WeightStore, make_store_folder
from report import Row, parse_options, publish

KINDS = ("local", "ray")
MANY, PACE_MS = 8, 50
BLOCK_BYTES, NUM_PER_POLL = 2**16, 64  # 4 MiB at once
PUBLISHING = (
    "runtime.kind=ray",
    "sampling.max_response_length=16",
    "trainer.batch_size=1",
    "engine.max_num_seqs=8",
    "ray.engine_cpus=0.1",
    "eval.num_prompts=0",
)


def demo_row(kind: str, repeat: int, steps: int) -> Row:
    """One run of the demo on a kind of runtime."""
    changes = [f"runtime.kind={kind}", "eval.num_prompts=0"]
    summary, _ = run_demo(repeat, changes, "--steps", str(steps))
    return {"run": "demo", "kind": kind, "repeat": repeat} | {
        name: summary[name] for name in ("tokens_per_s", "wall_s", "stall_s", "trainer_idle_ratio")
    }


def publish_row(num_engines: int, pace_ms: int, repeat: int, steps: int) -> Row:
    """Median time of a publish, without the first, which allocates the buffers."""
    changes = [*PUBLISHING, f"engine.num_engines={num_engines}", f"engine.min_step_time={pace_ms}ms"]
    _, lines = run_demo(repeat, changes, "--steps", str(steps))
    held_ms = [1e3 * line["timing_s/publish"] for line in lines[1:]]
    return {
        "run": "publish",
        "engines": num_engines,
        "pace_ms": pace_ms,
        "repeat": repeat,
        "publishes": len(held_ms),
        "held_ms": statistics.median(held_ms),
    }


class Paths:
    """Transfer paths between two nodes; each method returns the seconds for `num_bytes`."""

    def __init__(self, num_bytes: int, folder: Path) -> None:
        self.num_bytes, self._count = num_bytes, 0
        self._store = WeightStore(folder, shapes={"weight": (num_bytes // 4,)})
        self._slot = torch.empty(num_bytes // 4)
        nodes = [node["NodeID"] for node in ray.nodes()]
        own = ray.get_runtime_context().get_node_id()
        self._near, self._far = (
            Reader.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            for node in (own, next(node for node in nodes if node != own))
        )
        ray.get([self._near.read.remote(np.zeros(8)), self._far.read.remote(np.zeros(8))])

    def put(self) -> float:
        """From a view into the object store of this node."""
        content = self._published()
        began_s = time.perf_counter()
        self._object = ray.put(content)
        return time.perf_counter() - began_s

    def get_near(self) -> float:
        """From the object store to another process of this node."""
        self.put()
        return float(ray.get(self._near.read.remote(self._object)))

    def get_far(self) -> float:
        """To a process of the other node, whose object store pulls the object."""
        self.put()
        began_s = time.perf_counter()
        ray.get(self._far.read.remote(self._object))
        return time.perf_counter() - began_s

    def weights_near(self) -> float:
        """From the weight store into a buffer on the same node."""
        self._published()
        began_s = time.perf_counter()
        self._slot.copy_(self._store.fetch(self._count))
        return time.perf_counter() - began_s

    def weights_far(self) -> float:
        """From the weight store through both object stores into a buffer on the other node."""
        content = self._published()
        began_s = time.perf_counter()
        ray.get(self._far.load.remote(self._count, ray.put(content)))
        return time.perf_counter() - began_s

    def _published(self) -> Any:
        self._store.drop(self._count)
        self._count += 1
        self._slot.fill_(self._count)
        self._store.publish(self._count, self._slot)
        return self._store.file_bytes(self._count)


@ray.remote(num_cpus=0)
class Reader:
    """A process on one of the nodes."""

    def __init__(self) -> None:
        self._source = RemoteVersionSource()
        self._slot: torch.Tensor | None = None

    def read(self, content: Any) -> float:
        """Read all of it; returns the seconds."""
        began_s = time.perf_counter()
        content.max()
        return time.perf_counter() - began_s

    def load(self, version: int, content: Any) -> None:
        """Load a version as an engine of another node does."""
        self._source.receive(version, content, ())
        flat = self._source.fetch(version)
        if self._slot is None:
            self._slot = torch.empty_like(flat)
        self._slot.copy_(flat)


@contextmanager
def two_nodes() -> Iterator[None]:
    """A Ray cluster of two nodes on this machine; no other cluster is stopped at the end."""
    memory = {"object_store_memory": 2**30}
    head = {"num_cpus": 2, "include_dashboard": False, "_system_config": {"worker_niceness": 0}, **memory}
    cluster = Cluster(initialize_head=True, head_node_args=head, shutdown_at_exit=False)
    try:
        cluster.add_node(num_cpus=2, **memory)
        ray.init(address=cluster.address, log_to_driver=False, logging_level="ERROR")
        yield
    finally:
        ray.shutdown()
        cluster.shutdown()


def source_engine(connection: Connection, path: Path, num_blocks: int) -> None:
    """Serve a KV pool until the other end of `connection` sends a message."""
    pool = view_as_blocks(create_pool(path, num_blocks * BLOCK_BYTES), num_blocks)
    pool[:] = np.arange(num_blocks, dtype=np.uint64)[:, None]
    with closing(serve_kv("127.0.0.1", pool)) as server:
        connection.send(server.address)
        connection.recv()


def kv_s(peer: PeerPool, pool: KVBlocks) -> float:
    """Copy all blocks of a peer's pool in pieces; returns the seconds."""
    began_s = time.perf_counter()
    for start in range(0, len(pool), NUM_PER_POLL):
        some = range(start, min(start + NUM_PER_POLL, len(pool)))
        peer.copy(some, pool, some)
    return time.perf_counter() - began_s


def kv_rows(folder: Path, num_blocks: int, num_repeats: int) -> list[Row]:
    """KV copies between processes: through shared memory and over a network connection."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = folder / "pool"
    source = context.Process(target=source_engine, args=(theirs, path, num_blocks))
    source.start()
    address = ours.recv()
    pool = view_as_blocks(create_pool(folder / "own", num_blocks * BLOCK_BYTES), num_blocks)
    far, near = RemoteKVPool(address, BLOCK_BYTES), MappedPool(path, BLOCK_BYTES)
    with closing(far):
        rows = [
            path_row(name, pool.nbytes, lambda peer=peer: kv_s(peer, pool), num_repeats)
            for name, peer in {"kv: same node": near, "kv: other node": far}.items()
        ]
    ours.send(None)
    source.join()
    assert (pool[:, 0] == np.arange(num_blocks)).all()
    return rows


def path_row(name: str, num_bytes: int, transfer: Callable[[], float], num_repeats: int) -> Row:
    """The median of repeats, after a warm-up."""
    transfer()
    seconds = statistics.median(transfer() for _ in range(num_repeats))
    return {"path": name, "mb": num_bytes / 1e6, "ms": 1e3 * seconds, "gb_per_s": num_bytes / 1e9 / seconds}


def path_rows(num_bytes: int, num_repeats: int) -> list[Row]:
    """The rows of all paths."""
    folder = make_store_folder(4 * num_bytes)
    try:
        with two_nodes():
            paths = Paths(num_bytes, folder)
            transfers = {
                "object: put": paths.put,
                "object: get, same node": paths.get_near,
                "object: get, other node": paths.get_far,
                "weights: same node": paths.weights_near,
                "weights: other node": paths.weights_far,
            }
            rows = [path_row(name, num_bytes, transfer, num_repeats) for name, transfer in transfers.items()]
        return rows + kv_rows(folder, num_bytes // BLOCK_BYTES, num_repeats)
    finally:
        WeightStore(folder).close()


def main() -> None:
    options = parse_options(__doc__ or "")
    is_quick = options.quick
    many, paces_ms = (2, [PACE_MS]) if is_quick else (MANY, [PACE_MS, MANY * PACE_MS])
    paths = path_rows(2**24 if is_quick else 2**27, 3 if is_quick else 9)
    demo = [demo_row(kind, repeat, 30) for repeat in range(0 if is_quick else 3) for kind in KINDS]
    held = [
        publish_row(number, pace_ms, repeat, 4 if is_quick else 30)
        for repeat in range(1 if is_quick else 5)
        for number, pace_ms in ((1, PACE_MS), *((many, pace_ms) for pace_ms in paces_ms))
    ]
    ratios = {}
    if demo:
        ray_per_s, local_per_s = (median_of(demo, "tokens_per_s", kind=kind) for kind in ("ray", "local"))
        ratios["ray_over_local_tokens_per_s"] = ray_per_s / local_per_s
    for pace_ms, load in zip(paces_ms, ("", "_of_the_same_load"), strict=False):
        held_ms = median_of(held, "held_ms", engines=many, pace_ms=pace_ms)
        ratios[f"publish_held_{many}_engines_over_1{load}"] = held_ms / median_of(held, "held_ms", engines=1)
    ratios |= {f"{row['path']}, GB/s": float(row["gb_per_s"]) for row in paths}
    publish(options, [*demo, *held, *paths], ratios)


if __name__ == "__main__":
    main()
