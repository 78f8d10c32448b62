"""Send the steps of a run as OpenTelemetry spans to an OTLP endpoint. Needs the extra `otel`.

OpenTelemetry's SDK reads the endpoint and its other settings from environment variables (OTEL_...). A
thread of the SDK sends the spans, so that a slow or unreachable collector does not delay training.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExportResult
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

CLOSE_TIMEOUT_S = 5.0  # for the last spans, at the end of the run
STEP_TIME = "timing_s/step"  # only lines of training steps have it
TRACEPARENT = "traceparent"


class SpanTracker:
    """One span for the run, and below it a span for each step and each evaluation.

    `id` is the run's span in W3C's format; a resumed run passes that of its first process as `parent`, and
    continues its trace.
    """

    def __init__(self, service: str, attributes: Mapping[str, str | int], parent: str | None) -> None:
        """`service` is the name of the service unless OTEL_SERVICE_NAME sets one."""
        resource = Resource.create({"service.name": service}).merge(OTELResourceDetector().detect())
        logging.getLogger(OTLPSpanExporter.__module__).addFilter(_OncePerMessage())
        self._exporter = _CountingExporter()
        # At the exit of the process the SDK would wait for 30 s: `close` has ended it before.
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._tracer = self._provider.get_tracer("dora")
        propagator = TraceContextTextMapPropagator()
        above = propagator.extract({TRACEPARENT: parent}) if parent else None
        self._run = self._tracer.start_span("run", above, attributes=dict(attributes))
        self._context = trace.set_span_in_context(self._run)
        carrier: dict[str, str] = {}
        propagator.inject(carrier, self._context)
        self.id = carrier.get(TRACEPARENT, "")  # none with OTEL_SDK_DISABLED
        self._clock_began_s: float | None = None  # Unix time at which the run's clock was 0

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Make the span of a training step from its line, or that of an evaluation, without a duration."""
        if STEP_TIME in metrics:
            if self._clock_began_s is None:  # the line is written as soon as the step has ended
                self._clock_began_s = time.time() - metrics["t_s"]
            end_s = self._clock_began_s + metrics["t_s"]
            self._add("step", metrics, end_s - metrics[STEP_TIME], end_s)
        else:
            now_s = time.time()
            self._add("evaluation", metrics, now_s, now_s)

    def close(self) -> None:
        """End the run's span, and wait for CLOSE_TIMEOUT_S at most until all spans are sent.

        Raises ConnectionError if spans were lost.
        """
        self._run.end()
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        closing.join(CLOSE_TIMEOUT_S)
        num_lost = self._exporter.num_lost
        if closing.is_alive() or num_lost:
            lost = f"{num_lost} or more" if closing.is_alive() else str(num_lost)
            raise ConnectionError(
                f"{lost} spans did not reach the collector; check it and OTEL_EXPORTER_OTLP_ENDPOINT"
            )

    def _add(self, name: str, attributes: Mapping[str, float], start_s: float, end_s: float) -> None:
        span = self._tracer.start_span(
            name, self._context, attributes=dict(attributes), start_time=round(start_s * 1e9)
        )
        span.end(round(end_s * 1e9))


class _CountingExporter(OTLPSpanExporter):
    """Counts the spans that could not be sent."""

    num_lost = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        result = super().export(spans)
        self.num_lost += len(spans) * (result is not SpanExportResult.SUCCESS)
        return result


class _OncePerMessage(logging.Filter):
    """Passes the first log record of each kind; the SDK logs every attempt to reach a collector."""

    def __init__(self) -> None:
        super().__init__()
        self._seen: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        is_new = record.msg not in self._seen
        self._seen.add(record.msg)
        return is_new
