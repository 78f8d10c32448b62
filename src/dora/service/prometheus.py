"""Metrics for Prometheus: of the run, as it is when they are collected, and of the service itself.

The run's are counted where it counts them anyway; only calls are counted here.
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from dora.service import state
from dora.service.context import RunContext

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)


class Traffic:
    """Counts and times the calls; only the service's own thread may use it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._calls = Counter(
            "dora_http_requests", "Calls answered.", ["method", "route", "status"], registry=self._registry
        )
        self._seconds = Histogram(
            "dora_http_seconds",
            "From a call's first byte to its answer's last.",
            ["route"],
            buckets=SECONDS,
            registry=self._registry,
        )

    def note(self, method: str, route: str, status: int, seconds: float) -> None:
        """A call of a route (its pattern, for paths are endless) has been answered."""
        self._calls.labels(method, route, status).inc()
        self._seconds.labels(route).observe(seconds)

    def exposition(self) -> bytes:
        """In the format that Prometheus reads."""
        return generate_latest(self._registry)


class _Run:
    """What a registry collects of a run."""

    def __init__(self, context: RunContext) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        now, meter = state.status(self._context), self._context.metrics
        groups = CounterMetricFamily("dora_groups", "Groups by what became of them.", labels=["state"])
        for name, count in now.groups.model_dump().items():
            groups.add_metric([name], count)
        yield groups
        yield CounterMetricFamily("dora_steps", "Training steps done.", now.num_steps_trained)
        yield CounterMetricFamily("dora_trained_tokens", "Answer tokens trained.", meter.trained_tokens)
        yield CounterMetricFamily("dora_engine_failures", "Engines lost.", meter.engine_failures)
        restarts = meter.engine_restarts
        yield CounterMetricFamily("dora_engine_restarts", "Engines in the place of lost ones.", restarts)
        yield CounterMetricFamily("dora_stall_seconds", "Time the trainer waited for answers.", now.stall_s)
        yield GaugeMetricFamily("dora_newest_version", "Newest version.", now.newest_version or 0)
        yield GaugeMetricFamily("dora_requests_unfinished", "Answers that are unfinished.", now.num_requests)
        yield GaugeMetricFamily("dora_requests_waiting", "Of them, those without an engine.", now.num_waiting)
        yield GaugeMetricFamily("dora_paused", "1 while the run stands still.", now.phase == "paused")
        if now.agents is not None:
            yield GaugeMetricFamily("dora_sessions", "Episodes that agents play.", now.agents.sessions)
            yield GaugeMetricFamily("dora_sessions_wanted", "Episodes without one.", now.agents.waiting)
        rows = GaugeMetricFamily("dora_engine_rows", "Rows of each engine, by use.", labels=["engine", "use"])
        for engine in state.engines(self._context).engines:
            if engine.num_rows:
                rows.add_metric([str(engine.engine), "used"], engine.num_rows_used)
                rows.add_metric([str(engine.engine), "free"], engine.num_rows - engine.num_rows_used)
        yield rows
        last = GaugeMetricFamily("dora_step", "The last step's line of metrics.jsonl.", labels=["metric"])
        for name, value in (meter.steps[-1].to_json() if meter.steps else {}).items():
            last.add_metric([name], value)
        yield last


def of_run(context: RunContext) -> bytes:
    """Everything that is measured of a run, in the format that Prometheus reads."""
    registry = CollectorRegistry()
    registry.register(_Run(context))
    return generate_latest(registry)
