"""Rows from a producer through a store to consumers in another process, timed the same for every store.

Needs numpy alone, for it also runs in the environment of a store that has another. A row has token ids
and log-probs; a consumer looks at every page of what it gets.
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

NUM_WARM = 4  # batches that go before, until all memory is there
NUM_LOOKED_AT = 1024  # every so many values: one of each page of 4 KiB
Array = np.ndarray[Any, np.dtype[Any]]


class Producer(Protocol):
    """Puts rows with two columns of `num_values` 4-byte values each."""

    def put(self, num_rows: int, num_values: int) -> None: ...


class Consumer(Protocol):
    """Gets rows; `done` says that they are consumed. One that stops is told with an exception or None."""

    def get(self, num_rows: int, until_s: float) -> list[Array] | None: ...
    def done(self) -> None: ...


class Load(NamedTuple):
    """Batches of rows, taken apart by the consumers."""

    num_batches: int
    num_rows: int
    num_values: int

    @property
    def num_bytes(self) -> int:
        return self.num_batches * self.num_rows * self.num_values * 8


class Timed(NamedTuple):
    """Median seconds of a put and of the get after it, for one row at a time."""

    put_s: float
    get_s: float


def values(num_rows: int, num_values: int) -> tuple[Array, Array]:
    """Columns of rows of one length."""
    ids = np.arange(num_rows * num_values, dtype=np.int32).reshape(num_rows, num_values)
    return ids, ids.astype(np.float32)


class Peer:
    """Consumers in a process of their own."""

    def __init__(self, make: Callable[[Any], Consumer], address: Any, num_consumers: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connection, theirs = context.Pipe()
        self._process = context.Process(
            target=_consume, args=(theirs, make, address, num_consumers), daemon=True
        )
        self._process.start()
        theirs.close()
        self._connection.recv()

    def one_by_one(self, producer: Producer, num: int, num_values: int) -> Timed:
        """Each row is got when it has been put."""
        self._connection.send(("one", num))
        put_s, get_s = [], []
        for _ in range(num):
            began_s = time.perf_counter()
            producer.put(1, num_values)
            put_s.append(time.perf_counter() - began_s)
            self._connection.send(None)
            get_s.append(self._connection.recv())
        return Timed(statistics.median(put_s), statistics.median(get_s))

    def all_at_once(self, producer: Producer, load: Load, num_each: int) -> float:
        """Seconds from the first put to the last row consumed, while consumers take `num_each` at a time."""
        self._connection.send(("many", num_each, load.num_batches * load.num_rows))
        began_s = time.monotonic()
        for _ in range(load.num_batches):
            producer.put(load.num_rows, load.num_values)
        ended_s: float = self._connection.recv()
        return ended_s - began_s

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._connection.close()


@contextmanager
def peer(make: Callable[[Any], Consumer], address: Any, num_consumers: int) -> Iterator[Peer]:
    made = Peer(make, address, num_consumers)
    try:
        yield made
    finally:
        made.close()


def _look(rows: list[Array]) -> float:
    return sum(float(row.reshape(-1)[::NUM_LOOKED_AT].sum()) for row in rows)


def _consume(
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
            case ("many", num_each, num):
                counter = _Counter(num)
                threads = [threading.Thread(target=_drain, args=(c, num_each, counter)) for c in consumers]
                for thread in threads:
                    thread.start()
                for thread in threads:  # all of them, else one would get rows of the next load
                    thread.join()
                connection.send(counter.ended_s)


def _timed_get(consumer: Consumer) -> float:
    began_s = time.perf_counter()
    rows = consumer.get(1, time.monotonic() + 30)
    assert rows, "a row did not come"
    _look(rows)
    get_s = time.perf_counter() - began_s
    consumer.done()
    return get_s


class _Counter:
    """Rows that are still to come, for all consumers together."""

    def __init__(self, num: int) -> None:
        self.done, self.ended_s = threading.Event(), 0.0
        self._num, self._lock = num, threading.Lock()

    def count(self, num: int) -> None:
        with self._lock:
            self._num -= num
            if self._num == 0:
                self.ended_s = time.monotonic()
                self.done.set()


def _drain(consumer: Consumer, num_each: int, counter: _Counter) -> None:
    while not counter.done.is_set():
        if (rows := consumer.get(num_each, time.monotonic() + 0.2)) is not None:
            _look(rows)
            consumer.done()
            counter.count(len(rows) // 2)  # two columns
