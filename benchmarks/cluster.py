"""What a run on Ray costs against one on local processes, and how fast bytes go between nodes.

First the demo, local and on Ray in turn. Then publishes on Ray, with one engine and with many: `held_ms` is
from the order to publish until the version is there, during which the trainer does nothing else. Many are
tried at the pace of the one, with so many times its work for the cores that the trainer needs, too, and so
much slower that all together have as much to do as the one. Last the paths, on two nodes of one cluster on
this machine, each with an object store of its own: `object` is Ray's alone, `weights` ends in an engine's
buffer, `kv` in its pool, in pieces of 4 MiB as a move has them. Every object and version has been seen by
nobody yet.
--quick leaves the demo out, and slower engines; two are many, steps are few, buffers smaller.

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
from ray.cluster_utils import Cluster
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from dora.engine.kv_transfer.pool import (
    KVBlocks,
    MappedPool,
    PeerPool,
    create_pool,
    open_pool,
    view_as_blocks,
)
from dora.runtime.process.remote_kv import KVPoolServer, RemoteKVPool
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
    """One run of the demo."""
    changes = [f"runtime.kind={kind}", "eval.num_prompts=0"]
    summary, _ = run_demo(repeat, changes, "--steps", str(steps))
    return {"run": "demo", "kind": kind, "repeat": repeat} | {
        name: summary[name] for name in ("tokens_per_s", "wall_s", "stall_s", "trainer_idle_ratio")
    }


def publish_row(num_engines: int, pace_ms: int, repeat: int, steps: int) -> Row:
    """How long publishes held the trainer, without the first, which makes the buffers."""
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
    """Ways between two nodes; each is timed, and returns seconds for `num_bytes`."""

    def __init__(self, num_bytes: int, folder: Path) -> None:
        self.num_bytes, self._count = num_bytes, 0
        self._store = WeightStore(folder)
        self._slot = torch.empty(num_bytes // 4)
        nodes = [node["NodeID"] for node in ray.nodes()]
        own = ray.get_runtime_context().get_node_id()
        self._near, self._far = (
            Reader.options(scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)).remote()
            for node in (own, next(node for node in nodes if node != own))
        )
        ray.get([self._near.see.remote(np.zeros(8)), self._far.see.remote(np.zeros(8))])

    def put(self) -> float:
        """Into the store of this node, from a view."""
        content = self._published()
        began_s = time.perf_counter()
        self._object = ray.put(content)
        return time.perf_counter() - began_s

    def get_near(self) -> float:
        """By another process of this node."""
        self.put()
        return float(ray.get(self._near.see.remote(self._object)))

    def get_far(self) -> float:
        """By one of the other node, whose store pulls it."""
        self.put()
        began_s = time.perf_counter()
        ray.get(self._far.see.remote(self._object))
        return time.perf_counter() - began_s

    def weights_near(self) -> float:
        """From the file where the trainer has published it."""
        self._published()
        began_s = time.perf_counter()
        self._slot.copy_(self._store.fetch(self._count))
        return time.perf_counter() - began_s

    def weights_far(self) -> float:
        """From there to the other node's store, and on into a buffer."""
        content = self._published()
        began_s = time.perf_counter()
        ray.get(self._far.take.remote(self._count, ray.put(content)))
        return time.perf_counter() - began_s

    def _published(self) -> Any:
        self._store.drop(self._count)
        self._count += 1
        self._slot.fill_(self._count)
        self._store.publish(self._count, self._slot)
        return self._store.raw_bytes(self._count)


@ray.remote(num_cpus=0)
class Reader:
    """A process somewhere."""

    def __init__(self) -> None:
        self._brought = RemoteVersionSource("float32")
        self._slot: torch.Tensor | None = None

    def see(self, content: Any) -> float:
        """Look at all of it; seconds."""
        began_s = time.perf_counter()
        content.max()
        return time.perf_counter() - began_s

    def take(self, version: int, content: Any) -> None:
        """As an engine of another node does, until it holds the version."""
        self._brought.receive(version, content, ())
        flat = self._brought.fetch(version)
        if self._slot is None:
            self._slot = torch.empty_like(flat)
        self._slot.copy_(flat)


@contextmanager
def two_nodes() -> Iterator[None]:
    """On this machine; only they are stopped."""
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
    """A process with a pool, until it is told to end."""
    pool = view_as_blocks(create_pool(path, num_blocks * BLOCK_BYTES), num_blocks)
    pool[:] = np.arange(num_blocks, dtype=np.uint64)[:, None]
    with closing(KVPoolServer("127.0.0.1", pool)) as door:
        connection.send(door.address)
        connection.recv()


def kv_s(peer: PeerPool, pool: KVBlocks) -> float:
    """All blocks of a peer's pool, in pieces; seconds."""
    began_s = time.perf_counter()
    for start in range(0, len(pool), NUM_PER_POLL):
        some = range(start, min(start + NUM_PER_POLL, len(pool)))
        peer.copy(some, pool, some)
    return time.perf_counter() - began_s


def kv_rows(folder: Path, num_blocks: int, num_repeats: int) -> list[Row]:
    """From one process to another, on a machine and over a line."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    path = folder / "pool"
    source = context.Process(target=source_engine, args=(theirs, path, num_blocks))
    source.start()
    address = ours.recv()
    pool = view_as_blocks(create_pool(folder / "own", num_blocks * BLOCK_BYTES), num_blocks)
    far, near = RemoteKVPool(address, BLOCK_BYTES), MappedPool(open_pool(path, BLOCK_BYTES))
    with closing(far):
        rows = [
            path_row(name, pool.nbytes, lambda peer=peer: kv_s(peer, pool), num_repeats)
            for name, peer in {"kv: same node": near, "kv: other node": far}.items()
        ]
    ours.send(None)
    source.join()
    assert (pool[:, 0] == np.arange(num_blocks)).all()
    return rows


def path_row(name: str, num_bytes: int, way: Callable[[], float], num_repeats: int) -> Row:
    """The median of repeats, after one that does not count."""
    way()
    seconds = statistics.median(way() for _ in range(num_repeats))
    return {"path": name, "mb": num_bytes / 1e6, "ms": 1e3 * seconds, "gb_per_s": num_bytes / 1e9 / seconds}


def path_rows(num_bytes: int, num_repeats: int) -> list[Row]:
    """Every path."""
    folder = make_store_folder(4 * num_bytes)
    try:
        with two_nodes():
            paths = Paths(num_bytes, folder)
            ways = {
                "object: put": paths.put,
                "object: get, same node": paths.get_near,
                "object: get, other node": paths.get_far,
                "weights: same node": paths.weights_near,
                "weights: other node": paths.weights_far,
            }
            rows = [path_row(name, num_bytes, way, num_repeats) for name, way in ways.items()]
        return rows + kv_rows(folder, num_bytes // BLOCK_BYTES, num_repeats)
    finally:
        WeightStore(folder).close()


def median(rows: list[Row], key: str, **chosen: object) -> float:
    return statistics.median(
        float(row[key]) for row in rows if all(row.get(name) == value for name, value in chosen.items())
    )


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
        ray_per_s, local_per_s = (median(demo, "tokens_per_s", kind=kind) for kind in ("ray", "local"))
        ratios["ray_over_local_tokens_per_s"] = ray_per_s / local_per_s
    for pace_ms, load in zip(paces_ms, ("", "_of_the_same_load"), strict=False):
        held_ms = median(held, "held_ms", engines=many, pace_ms=pace_ms)
        ratios[f"publish_held_{many}_engines_over_1{load}"] = held_ms / median(held, "held_ms", engines=1)
    ratios |= {f"{row['path']}, GB/s": float(row["gb_per_s"]) for row in paths}
    publish(options, [*demo, *held, *paths], ratios)


if __name__ == "__main__":
    main()
