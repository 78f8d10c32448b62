"""How much the orchestrator itself costs, up to 10,000 engines with 1,000,000 requests in flight.

The production orchestrator is fed with facts in virtual time: answers of log-normal lengths
end, groups are scored, engines report once a second, a trainer steps and publishes, engines of
one slot change versions and requests migrate. Timed is `handle` alone, in CPU time, and without
Python's cyclic collector, which the driver switches off as well. A re-partition that would move
more than `max_moves` requests goes on at the next facts: `rebalance_ms` is its first decision,
`whole_rebalance_ms` all of them.

    python benchmarks/orchestrator.py [--quick] [--json FILE]
"""

from __future__ import annotations

import heapq
import math
import resource
import statistics
import time
from collections.abc import Iterable
from random import Random

from report import Row, parse_options, publish

from dora.core.actions import Action, Fetch, Generate, Load, Migrate, Publish, Score, Train
from dora.core.events import (
    EngineJoined,
    Event,
    GroupScored,
    Loaded,
    Migrated,
    MigrationFailed,
    Progressed,
    PromptsFetched,
    Published,
    RequestFinished,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.records import Chunk, GroupId, Limits, RequestId
from dora.runtime.garbage import collect_young, no_pauses

ROWS, GROUP_SIZE, MAX_STALENESS = 100, 4, 8
TOKEN_S, LOAD_S, MOVE_S, REPORT_S = 0.01, 0.5, 0.02, 1.0
MEDIAN_TOKENS, SPREAD = 600, 0.6  # of log-normal lengths


class Stations:
    """Everything an orchestrator commands, reduced to when its facts are due."""

    def __init__(self, num_engines: int) -> None:
        num_requests = num_engines * ROWS
        batch_size = math.ceil(num_requests / GROUP_SIZE / 4)  # the bound covers 2.25 times the rows
        self.core = Orchestrator(Limits(1000, batch_size, GROUP_SIZE, MAX_STALENESS, rush=False))
        self.now = 0.0
        self._random = Random(0)
        self._due: list[tuple[float, int, Event]] = []
        self._num_told = 0
        self._cursor = 0
        self._where: dict[RequestId, tuple[int, float, int]] = {}  # -> engine, end, tokens
        self._running: list[dict[RequestId, None]] = [{} for _ in range(num_engines)]
        self._obey(self.core.start(0.0))
        for engine in range(num_engines):
            self._tell(0.0, EngineJoined(engine, ROWS, 1))
            self._tell(self._random.uniform(0.1, 1.1), Progressed(engine, ()))

    def next(self) -> tuple[Event, float]:
        """The next fact, carried out, and the CPU seconds that `handle` took for it."""
        while True:
            self.now, _, event = heapq.heappop(self._due)
            if not self._is_outdated(event):
                break
        if isinstance(event, Progressed):
            event = self._report(event.engine)
        began_s = time.process_time()
        orders = self.core.handle(event, self.now)
        took_s = time.process_time() - began_s
        self._obey(orders)
        return event, took_s

    def _tell(self, delay_s: float, event: Event) -> None:
        self._num_told += 1
        heapq.heappush(self._due, (self.now + delay_s, self._num_told, event))

    def _is_outdated(self, event: Event) -> bool:
        """A request that has moved finishes elsewhere."""
        if isinstance(event, RequestFinished):
            if self._where.get(event.request, (-1,))[0] != event.engine:
                return True
            del self._where[event.request], self._running[event.engine][event.request]
        elif isinstance(event, Migrated):
            engine, end_s, num_tokens = self._where[event.request]
            del self._running[engine][event.request]
            self._run(event.request, event.destination, end_s, num_tokens)
        return False

    def _report(self, engine: int) -> Progressed:
        self._tell(REPORT_S, Progressed(engine, ()))
        lengths = []
        for request in self._running[engine]:
            _, end_s, num_tokens = self._where[request]
            lengths.append((request, max(0, num_tokens - int((end_s - self.now) / TOKEN_S))))
        return Progressed(engine, tuple(lengths), 1.0 / TOKEN_S)

    def _run(self, request: RequestId, engine: int, end_s: float, num_tokens: int) -> None:
        self._where[request] = (engine, end_s, num_tokens)
        self._running[engine][request] = None
        version = self.core.snapshot().requests[request].version
        chunk = Chunk(version, f"v{version}", num_tokens)
        fact = RequestFinished(engine, request, version, num_tokens, (chunk,), "stop")
        self._tell(end_s - self.now, fact)

    def _obey(self, orders: Iterable[Action]) -> None:
        for order in orders:
            match order:
                case Fetch(count):
                    groups = tuple(GroupId(0, self._cursor + k) for k in range(count))
                    self._tell(0.0, PromptsFetched(self._cursor, groups))
                    self._cursor += count
                case Generate(engine, _, requests):
                    for request in requests:
                        drawn = round(MEDIAN_TOKENS * self._random.lognormvariate(0.0, SPREAD))
                        num_tokens = min(4 * MEDIAN_TOKENS, max(1, drawn))
                        self._run(request, engine, self.now + num_tokens * TOKEN_S, num_tokens)
                case Migrate(request, source, destination):
                    num_tokens = self.core.snapshot().requests[request].num_tokens
                    end_s = self._where[request][1]
                    fact: Event = MigrationFailed(request, source, destination, "it has finished")
                    if end_s > self.now + MOVE_S:
                        size = 2**17 * num_tokens
                        fact = Migrated(request, source, destination, num_tokens, size, 0.01, 0.01)
                    self._tell(MOVE_S, fact)
                case Score(group):
                    rewards = tuple(float(k % 2) for k in range(GROUP_SIZE))
                    self._tell(0.01, GroupScored(group, rewards))
                case Train(step):
                    self._tell(2.0, Trained(step))
                case Publish(version):
                    self._tell(0.1, Published(version, f"v{version}"))
                case Load(engine, version):
                    self._tell(LOAD_S, Loaded(engine, version, f"v{version}"))
                case _:
                    pass


def measure(num_engines: int, num_publications: int) -> dict[str, str | int | float]:
    """Time every fact until so many versions are published, in a full fleet with several versions."""
    stations = Stations(num_engines)
    while len(stations.core.snapshot().store) < 3:
        stations.next()
    took: dict[str, list[float]] = {}
    whole: list[float] = []  # of each publication, the decisions after it included that go on with it
    most = 0
    while len(took.get("Published", ())) < num_publications or stations.core.snapshot().is_rebalance_due:
        event, took_s = stations.next()
        took.setdefault(type(event).__name__, []).append(took_s)
        if isinstance(event, Published):
            whole.append(took_s)
            is_under_way = True
        elif whole and is_under_way:
            whole[-1] += took_s
        is_under_way = stations.core.snapshot().is_rebalance_due
        if isinstance(event, Trained):
            collect_young()
        most = max(most, len(stations.core.snapshot().requests))
    published = took.pop("Published")
    every = sorted(t for times in took.values() for t in times)
    state = stations.core.snapshot()
    return {
        "engines": num_engines,
        "requests": most,
        "events": len(every),
        "handle_p50_us": 1e6 * statistics.median(every),
        "handle_mean_us": 1e6 * statistics.fmean(every),
        "handle_p99_ms": 1e3 * every[int(0.99 * len(every))],
        "handle_max_ms": 1e3 * every[-1],
        "publications": len(published),
        "rebalance_ms": 1e3 * statistics.median(published),
        "rebalance_max_ms": 1e3 * max(published),
        "whole_rebalance_ms": 1e3 * statistics.median(whole),
        "versions": len(state.unfinished),
        "migrations": len(took.get("Migrated", [])),
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    options = parse_options(str(__doc__))
    sizes = (100, 1000) if options.quick else (100, 1000, 10_000)
    with no_pauses():
        rows: list[Row] = [measure(size, 2) for size in sizes]
    least, most = rows[0], rows[-1]
    growth = float(most["handle_mean_us"]) / float(least["handle_mean_us"])
    log_growth = math.log(float(most["engines"])) / math.log(float(least["engines"]))
    ratios = {
        "handle_p99_ms": float(most["handle_p99_ms"]),
        "rebalance_ms": float(most["rebalance_ms"]),
        "whole_rebalance_ms": float(most["whole_rebalance_ms"]),
        "memory_gb": float(most["memory_gb"]),
        "growth_over_log_growth": growth / log_growth,
    }
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
