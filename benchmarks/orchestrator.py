"""CPU time of the orchestrator, up to 10,000 engines with 1,000,000 requests in flight.

The production orchestrator handles simulated events in virtual time: answers of log-normal lengths finish,
groups are scored, engines report once a second, a trainer steps and publishes, engines of one slot change
versions, and requests migrate. Only `handle` is timed, without Python's cyclic garbage collector, which a
real run switches off as well. A rebalance that would migrate more than `max_migrations` requests continues at
the next events: `rebalance_ms` is its first decision, `whole_rebalance_ms` the sum of all.

python benchmarks/orchestrator.py [--quick] [--json FILE]
"""

from __future__ import annotations

import gc
import heapq
import math
import resource
import statistics
import time
from collections.abc import Iterable
from random import Random

from dora.core.actions import Action, FetchPrompts, Generate, Load, Migrate, Publish, Score, Train
from dora.core.events import (
    EngineJoined,
    Event,
    GroupScored,
    Loaded,
    Migrated,
    MigrationFailed,
    ProgressReported,
    PromptsFetched,
    Published,
    RequestFinished,
    Trained,
)
from dora.core.orchestrator import Orchestrator
from dora.core.types import Chunk, GroupId, Limits, RequestId
from dora.runtime.run import low_latency
from report import Row, parse_options, publish

ROWS, GROUP_SIZE, MAX_STALENESS = 100, 4, 8
TOKEN_S, LOAD_S, MIGRATION_S, REPORT_INTERVAL_S = 0.01, 0.5, 0.02, 1.0
MEDIAN_TOKENS, SIGMA = 600, 0.6  # of log-normal lengths
KV_BYTES_PER_TOKEN = 2**17


class SimulatedWorkers:
    """All workers of a run, reduced to the times of their events."""

    def __init__(self, num_engines: int) -> None:
        num_requests = num_engines * ROWS
        batch_size = math.ceil(num_requests / GROUP_SIZE / 4)  # the bound covers 2.25 times the rows
        self.orchestrator = Orchestrator(
            Limits(1000, batch_size, GROUP_SIZE, MAX_STALENESS, prioritize_stragglers=False)
        )
        self.now = 0.0
        self._rng = Random(0)
        self._heap: list[tuple[float, int, Event]] = []
        self._num_scheduled = 0
        self._dataset_index = 0
        self._requests: dict[RequestId, tuple[int, float, int]] = {}  # -> engine, end, tokens
        self._running: list[dict[RequestId, None]] = [{} for _ in range(num_engines)]
        self._execute(self.orchestrator.start(0.0))
        for engine in range(num_engines):
            self._schedule(0.0, EngineJoined(engine, ROWS, 1))
            self._schedule(self._rng.uniform(0.1, 1.1), ProgressReported(engine, ()))

    def step(self) -> tuple[Event, float]:
        """Handle the next event; returns it and the CPU seconds of `handle`."""
        while True:
            self.now, _, event = heapq.heappop(self._heap)
            if not self._is_outdated(event):
                break
        if isinstance(event, ProgressReported):
            event = self._report_progress(event.engine)
        started_s = time.process_time()
        actions = self.orchestrator.handle(event, self.now)
        cpu_s = time.process_time() - started_s
        self._execute(actions)
        return event, cpu_s

    def _schedule(self, delay_s: float, event: Event) -> None:
        self._num_scheduled += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._num_scheduled, event))

    def _is_outdated(self, event: Event) -> bool:
        """A request that has migrated finishes on its new engine. Follows the event otherwise."""
        if isinstance(event, RequestFinished):
            if self._requests.get(event.request, (-1,))[0] != event.engine:
                return True
            del self._requests[event.request], self._running[event.engine][event.request]
        elif isinstance(event, Migrated):
            engine, end_s, num_tokens = self._requests[event.request]
            del self._running[engine][event.request]
            self._run(event.request, event.destination, end_s, num_tokens)
        return False

    def _report_progress(self, engine: int) -> ProgressReported:
        self._schedule(REPORT_INTERVAL_S, ProgressReported(engine, ()))
        lengths = []
        for request in self._running[engine]:
            _, end_s, num_tokens = self._requests[request]
            lengths.append((request, max(0, num_tokens - int((end_s - self.now) / TOKEN_S))))
        return ProgressReported(engine, tuple(lengths), 1.0 / TOKEN_S)

    def _run(self, request: RequestId, engine: int, end_s: float, num_tokens: int) -> None:
        self._requests[request] = (engine, end_s, num_tokens)
        self._running[engine][request] = None
        version = self.orchestrator.snapshot().requests[request].version
        chunk = Chunk(version, f"v{version}", num_tokens)
        finished = RequestFinished(engine, request, version, num_tokens, (chunk,), "stop")
        self._schedule(end_s - self.now, finished)

    def _execute(self, actions: Iterable[Action]) -> None:
        for action in actions:
            match action:
                case FetchPrompts(count):
                    groups = tuple(GroupId(0, self._dataset_index + k) for k in range(count))
                    self._schedule(0.0, PromptsFetched(self._dataset_index, groups))
                    self._dataset_index += count
                case Generate(engine, _, requests):
                    for request in requests:
                        drawn = round(MEDIAN_TOKENS * self._rng.lognormvariate(0.0, SIGMA))
                        num_tokens = min(4 * MEDIAN_TOKENS, max(1, drawn))
                        self._run(request, engine, self.now + num_tokens * TOKEN_S, num_tokens)
                case Migrate():
                    self._schedule(MIGRATION_S, self._outcome(action))
                case Score(group):
                    rewards = tuple(float(k % 2) for k in range(GROUP_SIZE))
                    self._schedule(0.01, GroupScored(group, rewards))
                case Train(step):
                    self._schedule(2.0, Trained(step))
                case Publish(version):
                    self._schedule(0.1, Published(version, f"v{version}"))
                case Load(engine, version):
                    self._schedule(LOAD_S, Loaded(engine, version, f"v{version}"))
                case _:
                    pass

    def _outcome(self, action: Migrate) -> Migrated | MigrationFailed:
        """A request that finishes before its migration completes stays."""
        request, source, destination = action.request, action.source, action.destination
        if self._requests[request][1] <= self.now + MIGRATION_S:
            return MigrationFailed(request, source, destination, "the request has finished")
        num_tokens = self.orchestrator.snapshot().requests[request].num_tokens
        num_bytes = KV_BYTES_PER_TOKEN * num_tokens
        return Migrated(request, source, destination, num_tokens, num_bytes, 0.01, 0.01)


def measure(num_engines: int, num_publications: int) -> dict[str, str | int | float]:
    """Time every event until so many versions are published, in a full fleet with several versions."""
    workers = SimulatedWorkers(num_engines)
    state = workers.orchestrator.snapshot()
    while len(state.stored_versions) < 3:
        workers.step()
    seconds: dict[str, list[float]] = {}  # by kind of event
    rebalances_s: list[float] = []  # of each publication, with the later decisions of its rebalance
    max_requests = 0
    while len(seconds.get("Published", ())) < num_publications or state.is_rebalance_due:
        is_rebalancing = state.is_rebalance_due
        event, cpu_s = workers.step()
        seconds.setdefault(type(event).__name__, []).append(cpu_s)
        if isinstance(event, Published):
            rebalances_s.append(cpu_s)
        elif rebalances_s and is_rebalancing:
            rebalances_s[-1] += cpu_s
        if isinstance(event, Trained):
            gc.collect(1)
        max_requests = max(max_requests, len(state.requests))
    published_s = seconds.pop("Published")
    others_s = sorted(s for times_s in seconds.values() for s in times_s)
    return {
        "engines": num_engines,
        "requests": max_requests,
        "events": len(others_s),
        "handle_p50_us": 1e6 * statistics.median(others_s),
        "handle_mean_us": 1e6 * statistics.fmean(others_s),
        "handle_p99_ms": 1e3 * others_s[int(0.99 * len(others_s))],
        "handle_max_ms": 1e3 * others_s[-1],
        "publications": len(published_s),
        "rebalance_ms": 1e3 * statistics.median(published_s),
        "rebalance_max_ms": 1e3 * max(published_s),
        "whole_rebalance_ms": 1e3 * statistics.median(rebalances_s),
        "versions": len(state.num_unfinished),
        "migrations": len(seconds.get("Migrated", [])),
        "memory_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def main() -> None:
    options = parse_options(str(__doc__))
    sizes = (100, 1000) if options.quick else (100, 1000, 10_000)
    with low_latency():
        rows: list[Row] = [measure(size, 2) for size in sizes]
    smallest, largest = rows[0], rows[-1]
    growth = float(largest["handle_mean_us"]) / float(smallest["handle_mean_us"])
    log_growth = math.log(float(largest["engines"])) / math.log(float(smallest["engines"]))
    ratios = {
        "handle_p99_ms": float(largest["handle_p99_ms"]),
        "rebalance_ms": float(largest["rebalance_ms"]),
        "whole_rebalance_ms": float(largest["whole_rebalance_ms"]),
        "memory_gb": float(largest["memory_gb"]),
        "growth_over_log_growth": growth / log_growth,
    }
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
