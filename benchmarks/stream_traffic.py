"""Rows from a producer to consumers in another process, with the same timing for every system.

Needs only numpy, because it also runs in the Python environments of other systems. A row has token ids and
log-probs; a consumer reads every memory page of what it gets.
"""

from __future__ import annotations

import multiprocessing
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import numpy as np

NUM_WARMUP = 4  # batches, until all memory is allocated
MAX_BYTES = 250_000_000  # not consumed: a producer waits, as the staleness bound has it do in a run
PAGE_VALUES = 1024  # 4-byte values per memory page
Array = np.ndarray[Any, np.dtype[Any]]


class Producer(Protocol):
    """Puts rows with two columns of `num_values` 4-byte values each."""

    def put(self, num_rows: int, num_values: int) -> None: ...


class Consumer(Protocol):
    """Gets rows, or None after the deadline; `commit` marks them as consumed."""

    def get(self, num_rows: int, deadline_s: float) -> list[Array] | None: ...
    def commit(self) -> None: ...


class Load(NamedTuple):
    """Batches of rows, which consumers may split."""

    num_batches: int
    num_rows: int
    num_values: int

    @property
    def batch_bytes(self) -> int:
        return self.num_rows * self.num_values * 8

    @property
    def num_bytes(self) -> int:
        return self.num_batches * self.batch_bytes


class RowLatency(NamedTuple):
    """Median time (s) of a put of one row and of the get after it."""

    put_s: float
    get_s: float


def make_columns(num_rows: int, num_values: int) -> tuple[Array, Array]:
    """Two columns of rows of equal length."""
    ids = np.arange(num_rows * num_values, dtype=np.int32).reshape(num_rows, num_values)
    return ids, ids.astype(np.float32)


class ConsumerProcess:
    """Consumers in their own process."""

    def __init__(self, make: Callable[[Any], Consumer], address: Any, num_consumers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, child_end = context.Pipe()
        self._process = context.Process(
            target=_run_consumers, args=(child_end, make, address, num_consumers), daemon=True
        )
        self._process.start()
        child_end.close()
        self._connection.recv()

    def one_by_one(self, producer: Producer, num: int, num_values: int) -> RowLatency:
        """Get each row after its put."""
        self._connection.send(("one", num))
        put_s, get_s = [], []
        for _ in range(num):
            start_s = time.perf_counter()
            producer.put(1, num_values)
            put_s.append(time.perf_counter() - start_s)
            self._connection.send(None)
            get_s.append(self._connection.recv())
        return RowLatency(statistics.median(put_s), statistics.median(get_s))

    def all_at_once(self, producer: Producer, load: Load, rows_per_get: int) -> float:
        """Seconds from the first put to the last commit; consumers get `rows_per_get` rows at a time.

        The producer keeps at most MAX_BYTES ahead of them.
        """
        self._connection.send(("many", rows_per_get, load))
        max_ahead = min(load.num_batches, MAX_BYTES // load.batch_bytes)  # batches that are not consumed
        start_s = time.monotonic()
        for number in range(load.num_batches):
            if number >= max_ahead:
                self._connection.recv()
            producer.put(load.num_rows, load.num_values)
        for _ in range(max_ahead - 1):
            self._connection.recv()
        end_s: float = self._connection.recv()
        return end_s - start_s

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


@contextmanager
def start_consumers(
    make: Callable[[Any], Consumer], address: Any, num_consumers: int
) -> Iterator[ConsumerProcess]:
    made = ConsumerProcess(make, address, num_consumers)
    try:
        yield made
    finally:
        made.close()


def _read_pages(rows: list[Array]) -> float:
    return sum(float(row.reshape(-1)[::PAGE_VALUES].sum()) for row in rows)


def _run_consumers(
    connection: Connection, make: Callable[[Any], Consumer], address: Any, num_consumers: int
) -> None:
    consumers = [make(address) for _ in range(num_consumers)]
    connection.send("ready")
    while True:
        match connection.recv():
            case ("one", num):
                for _ in range(num):
                    connection.recv()
                    connection.send(_timed_get(consumers[0]))
            case ("many", rows_per_get, load):
                remaining = _RemainingRows(load, connection)
                threads = [
                    threading.Thread(target=_drain, args=(c, rows_per_get, remaining)) for c in consumers
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:  # all of them: a late one would get rows of the next load
                    thread.join()
                connection.send(remaining.end_s)  # of the last batch


def _timed_get(consumer: Consumer) -> float:
    start_s = time.perf_counter()
    rows = consumer.get(1, time.monotonic() + 30)
    assert rows, "no row within 30 s"
    _read_pages(rows)
    get_s = time.perf_counter() - start_s
    consumer.commit()
    return get_s


class _RemainingRows:
    """The rows that all consumers together still have to consume; reports each batch but the last."""

    def __init__(self, load: Load, connection: Connection) -> None:
        self.is_done, self.end_s = threading.Event(), 0.0
        self._load, self._connection, self._lock = load, connection, threading.Lock()
        self._num_rows = self._num_reported = 0

    def count(self, num: int) -> None:
        with self._lock:
            self._num_rows += num
            num_batches = self._num_rows // self._load.num_rows
            while self._num_reported < min(num_batches, self._load.num_batches - 1):
                self._num_reported += 1
                self._connection.send(None)
            if num_batches == self._load.num_batches:
                self.end_s = time.monotonic()
                self.is_done.set()


def _drain(consumer: Consumer, rows_per_get: int, remaining: _RemainingRows) -> None:
    while not remaining.is_done.is_set():
        if (rows := consumer.get(rows_per_get, time.monotonic() + 0.2)) is not None:
            _read_pages(rows)
            consumer.commit()
            remaining.count(len(rows) // 2)  # two columns
