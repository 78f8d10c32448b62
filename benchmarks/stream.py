"""The sample stream, TransferQueue and a plain queue: latency and throughput from a producer to consumers.

Producer, server and consumers are three processes. In the stream each row is a group of its own, which a
consumer leases. The producer stays at most 250 MB ahead of the consumers of every system.
`memcpy_share` is the throughput of one consumer at 100 MB per batch, relative to one copy in one process.
Costs at 10^3 to 10^6 resident rows are CPU time of the server alone.

    python benchmarks/stream.py [--quick] [--json FILE] [--transferqueue-python PYTHON]
"""

from __future__ import annotations

import gc
import json
import multiprocessing
import queue
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from stream_traffic import (
    NUM_WARMUP,
    Array,
    Consumer,
    Load,
    Producer,
    RowLatency,
    make_columns,
    start_consumers,
)

from dora.core.types import RequestId
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest, ConsumerDeclaration, SampleMeta
from dora.stream.schema import Field, StreamBatch
from dora.stream.server import StreamServer
from dora.stream.storage import SampleStream

FIELDS = [Field("ids", "<i4", is_jagged=True), Field("logprobs", "<f4", is_jagged=True)]
TASK = "actor"
NUM_CONSUMERS = (1, 4, 16)
NUM_TOKENS = 512
LARGE = Load(8, 16, 781_250)  # 100 MB per batch
_MEMORY = Path("/dev/shm")
Row = dict[str, str | int | float]
Measured = tuple[dict[int, RowLatency], dict[tuple[Load, int], float]]  # by consumers; s by load, consumers


def make_samples(first: int, num_rows: int, num_tokens: int) -> list[SampleMeta]:
    return [SampleMeta(RequestId(0, first + k, 0), 0, num_tokens) for k in range(num_rows)]


class StreamProducer:
    """Puts rows, each a group of its own, with a client."""

    def __init__(self, client: StreamClient) -> None:
        self._client = client
        self._next = 0
        self._columns: dict[tuple[int, int], dict[str, list[Array]]] = {}

    def put(self, num_rows: int, num_values: int) -> None:
        shape = num_rows, num_values
        if shape not in self._columns:
            columns = map(list, make_columns(*shape))
            self._columns[shape] = dict(zip(("ids", "logprobs"), columns, strict=True))
        self._client.put(make_samples(self._next, num_rows, num_values), self._columns[shape])
        self._next += num_rows


class StreamConsumer:
    """Leases rows and commits them."""

    def __init__(self, folder: Path) -> None:
        self._client = StreamClient(folder)
        self._batch: StreamBatch | None = None

    def get(self, num_rows: int, deadline_s: float) -> list[Array] | None:
        found = self._client.get(TASK, BatchRequest(num_rows), max(0.0, deadline_s - time.monotonic()))
        if not isinstance(found, StreamBatch):
            return None
        self._batch = found
        return [*found.rows("ids"), *found.rows("logprobs")]

    def commit(self) -> None:
        assert self._batch is not None
        self._client.commit(self._batch)


class QueueProducer:
    """Puts each row by itself."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def put(self, num_rows: int, num_values: int) -> None:
        for pair in zip(*make_columns(num_rows, num_values), strict=True):
            self._pipe.put(pair)


class QueueConsumer:
    """Gets row by row, at most what is ready."""

    def __init__(self, pipe: Any) -> None:
        self._pipe = pipe

    def get(self, num_rows: int, deadline_s: float) -> list[Array] | None:
        found: list[Array] = []
        try:
            while len(found) < 2 * num_rows:
                found += self._pipe.get(timeout=0.0 if found else max(0.0, deadline_s - time.monotonic()))
        except queue.Empty:
            pass
        return found or None

    def commit(self) -> None:
        """A queue has no leases."""


def serve(folder: Path) -> None:
    """The process of the server."""
    gc.freeze()
    consumer = ConsumerDeclaration(TASK, ["ids", "logprobs"], lease_s=60.0)
    StreamServer(SampleStream(FIELDS, [consumer], folder)).run()


def measure(
    producer: Producer, make: Callable[[Any], Consumer], address: Any, loads: Sequence[Load], num_ones: int
) -> Measured:
    """Latency of one row, and seconds of each load, by number of consumers."""
    ones, many = {}, {}
    for num in NUM_CONSUMERS:
        with start_consumers(make, address, num) as consumers:
            consumers.one_by_one(producer, 20, NUM_TOKENS)
            ones[num] = consumers.one_by_one(producer, num_ones, NUM_TOKENS)
            for load in loads:
                consumers.all_at_once(producer, load._replace(num_batches=NUM_WARMUP), load.num_rows // num)
                many[load, num] = consumers.all_at_once(producer, load, load.num_rows // num)
    return ones, many


def measure_stream(loads: Sequence[Load], num_ones: int) -> Measured:
    folder = Path(tempfile.mkdtemp(prefix="dora-", dir=_MEMORY if _MEMORY.is_dir() else None))
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(folder,), daemon=True)
    server.start()
    client = StreamClient(folder, timeout_s=60.0)
    try:
        return measure(StreamProducer(client), StreamConsumer, folder, loads, num_ones)
    finally:
        server.kill()
        server.join()
        shutil.rmtree(folder)


def measure_queue(loads: Sequence[Load], num_ones: int) -> Measured:
    pipe: Any = multiprocessing.get_context("spawn").Queue()
    return measure(QueueProducer(pipe), QueueConsumer, pipe, loads, num_ones)


def measure_transferqueue(python: Path, loads: Sequence[Load], num_ones: int) -> Measured:
    script = Path(__file__).with_name("transferqueue_child.py")
    request = {"num_consumers": NUM_CONSUMERS, "num_ones": num_ones, "loads": loads}
    done = subprocess.run(
        [python, script], input=json.dumps(request) + "\n", stdout=subprocess.PIPE, text=True, check=True
    )
    found = json.loads(done.stdout)
    print(f"TransferQueue {found['version']}", file=sys.stderr)
    ones = {num: RowLatency(*times) for num, times in found["ones"]}
    return ones, {(Load(*sizes), num): s for sizes, num, s in found["many"]}


def memcpy_gb_per_s() -> float:
    """One copy of 100 MB within one process, between allocated pages."""
    source = np.ones(100_000_000, np.uint8)  # zeros would share one page
    target = np.ones_like(source)
    times = []
    for _ in range(9):
        start_s = time.perf_counter()
        np.copyto(target, source)
        times.append(time.perf_counter() - start_s)
    return 0.1 / statistics.median(times)


def resident_costs(sizes: Sequence[int]) -> list[Row]:
    """CPU time per row of a put, a get and a commit of 256 rows, by number of resident rows."""
    found: list[Row] = []
    with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as name:
        fields = [*FIELDS, Field("reward", "<f8")]
        consumers = [ConsumerDeclaration(TASK, ["ids"]), ConsumerDeclaration("idle", ["reward"])]
        stream = SampleStream(fields, consumers, Path(name))
        ids, logprobs = map(list, make_columns(256, 8))
        num_put = 0

        def cycle() -> float:
            nonlocal num_put
            start_s = time.process_time()
            stream.put(make_samples(num_put, 256, 8), {"ids": ids, "logprobs": logprobs})
            stream.free_unused()
            lease = stream.metadata.lease(TASK, "me", BatchRequest(256), 0.0)
            assert lease is not None
            stream.batch(lease)
            stream.metadata.commit(lease.lease_id, "me", 0.0)
            stream.free_unused()
            num_put += 256
            return (time.process_time() - start_s) / 256

        gc.disable()  # an occasional collection would be charged to one size
        for size in sizes:
            while num_put < size:
                cycle()
            per_row_s = statistics.median(cycle() for _ in range(40))
            found.append({"resident_rows": size, "cycle_us_per_row": per_row_s * 1e6})
        gc.enable()
        stream.close()
    return found


def main() -> None:
    from report import make_parser, options_of, publish  # here, because only this process needs its torch

    parser = make_parser(__doc__ or "")
    parser.add_argument(
        "--transferqueue-python",
        type=Path,
        metavar="PYTHON",
        help="a Python that has TransferQueue installed",
    )
    given = parser.parse_args()
    options = options_of(given)
    num_ones = 100 if options.quick else 500
    loads = (
        Load(8 if options.quick else 40, 256, NUM_TOKENS),
        LARGE._replace(num_batches=3 if options.quick else 8),
    )
    systems = {"stream": measure_stream(loads, num_ones), "queue": measure_queue(loads, num_ones)}
    if given.transferqueue_python is None:
        print("TransferQueue is skipped: no --transferqueue-python was given")
    else:
        systems["transferqueue"] = measure_transferqueue(given.transferqueue_python, loads, num_ones)
    memcpy = memcpy_gb_per_s()
    table: list[Row] = [
        {
            "system": name,
            "consumers": num,
            "put_us": one.put_s * 1e6,
            "get_us": one.get_s * 1e6,
            "put_get_us": sum(one) * 1e6,
        }
        for name, (ones, _) in systems.items()
        for num, one in ones.items()
    ]
    table += [
        {
            "system": name,
            "batch_rows": load.num_rows,
            "consumers": num,
            "rows_per_s": load.num_batches * load.num_rows / s,
            "gb_per_s": load.num_bytes / s / 1e9,
        }
        for name, (_, many) in systems.items()
        for (load, num), s in many.items()
    ]
    table.append({"memcpy_gb_per_s": memcpy})
    costs = resident_costs((1_000, 10_000, 100_000) if options.quick else (1_000, 10_000, 100_000, 1_000_000))
    ones, many = systems["stream"]
    ratios = {
        "memcpy_share": loads[1].num_bytes / many[loads[1], 1] / 1e9 / memcpy,
        "cost_at_most_resident_rows": float(costs[-1]["cycle_us_per_row"])
        / float(costs[0]["cycle_us_per_row"]),
    }
    for name, (other, others) in systems.items():
        if name != "stream":
            ratios[f"latency_vs_{name}"] = sum(other[1]) / sum(ones[1])
            ratios[f"throughput_vs_{name}"] = others[loads[0], 1] / many[loads[0], 1]
    publish(options, [*table, *costs], ratios)


if __name__ == "__main__":
    main()
