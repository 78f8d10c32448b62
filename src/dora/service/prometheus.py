"""Metrics for Prometheus: of the run, read when they are collected, and of the service's own requests."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter, Request, Response
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from dora.runtime.control.engines import EngineStatus, list_engines
from dora.service.context import Run, RunContext
from dora.service.control import ProgressStatus, progress_status

router = APIRouter(tags=["run"])
DURATION_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
)


@router.get("/metrics", responses={200: {"content": {"text/plain": {}}}})
async def get_metrics(run: Run, request: Request) -> Response:
    """All metrics in the text format of Prometheus."""
    http: HttpMetrics = request.app.state.http_metrics
    return Response(await run(expose_run) + http.expose(), media_type=CONTENT_TYPE_LATEST)


class HttpMetrics:
    """Counts and times HTTP requests. Only the service's own thread uses it."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "dora_http_requests", "HTTP requests.", ["method", "route", "status"], registry=self._registry
        )
        self._durations = Histogram(
            "dora_http_request_duration_seconds",
            "Time from the head of a request to the end of its response.",
            ["route"],
            buckets=DURATION_BUCKETS_S,
            registry=self._registry,
        )

    def on_response(self, method: str, route: str, status: int, seconds: float) -> None:
        """A response is complete. `route` is the pattern of the path, as there is no limit to paths."""
        self._requests.labels(method, route, status).inc()
        self._durations.labels(route).observe(seconds)

    def expose(self) -> bytes:
        """The metrics in the text format of Prometheus."""
        return generate_latest(self._registry)


def expose_run(context: RunContext) -> bytes:
    """The metrics of a run in the text format of Prometheus."""
    return generate_latest(_RunCollector(context))


class _RunCollector(Collector):
    def __init__(self, context: RunContext) -> None:
        self._context = context

    def collect(self) -> Iterator[Metric]:
        context = self._context
        status, metrics = progress_status(context), context.metrics
        yield from _counters(context, status)
        yield from _gauges(status)
        yield _engine_rows(list_engines(context))
        last_step = GaugeMetricFamily("dora_step", "The last line of metrics.jsonl.", labels=["metric"])
        for name, value in (metrics.steps[-1].to_json() if metrics.steps else {}).items():
            last_step.add_metric([name], value)
        yield last_step


def _counters(context: RunContext, status: ProgressStatus) -> Iterator[Metric]:
    metrics = context.metrics
    groups = CounterMetricFamily("dora_groups", "Groups by state.", labels=["state"])
    for name, count in status.groups.model_dump().items():
        groups.add_metric([name], count)
    yield groups
    yield CounterMetricFamily("dora_steps", "Training steps finished.", status.num_steps_trained)
    yield CounterMetricFamily("dora_trained_tokens", "Response tokens trained.", metrics.trained_tokens)
    yield CounterMetricFamily("dora_engine_failures", "Engines lost.", metrics.engine_failures)
    yield CounterMetricFamily(
        "dora_engine_restarts", "Engines started to replace lost ones.", metrics.engine_restarts
    )
    yield CounterMetricFamily(
        "dora_stall_seconds", "Time the trainer waited for unfinished groups.", status.stall_s
    )


def _gauges(status: ProgressStatus) -> Iterator[Metric]:
    yield GaugeMetricFamily("dora_newest_version", "Newest published version.", status.newest_version or 0)
    yield GaugeMetricFamily("dora_requests_unfinished", "Unfinished requests.", status.num_requests)
    yield GaugeMetricFamily("dora_requests_waiting", "Requests that no engine has.", status.num_waiting)
    yield GaugeMetricFamily("dora_paused", "1 while the run is paused.", status.phase == "paused")
    if status.agents is not None:
        yield GaugeMetricFamily("dora_sessions", "Open sessions of agents.", status.agents.sessions)
        yield GaugeMetricFamily(
            "dora_episodes_waiting", "Episodes that no agent has opened yet.", status.agents.waiting
        )
        yield CounterMetricFamily(
            "dora_branches", "Continuations of earlier tokens of an episode.", status.agents.branches
        )
        yield CounterMetricFamily(
            "dora_retokenized_turns", "Turns whose text was tokenized again.", status.agents.retokenized
        )


def _engine_rows(engines: list[EngineStatus]) -> Metric:
    rows = GaugeMetricFamily("dora_engine_rows", "Rows of each engine, by use.", labels=["engine", "use"])
    for engine in engines:
        if engine.num_rows:
            rows.add_metric([str(engine.engine), "used"], engine.num_rows_used)
            rows.add_metric([str(engine.engine), "free"], engine.num_rows - engine.num_rows_used)
    return rows
