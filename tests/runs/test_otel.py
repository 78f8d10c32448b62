"""OpenTelemetry spans, sent by its SDK to a collector on this machine; no collector can delay a run."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import metrics

from dora.errors import InputError
from dora.metrics import writer
from dora.metrics.writer import TRACKER_IDS_FILE, Notice, Trackers

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="needs the extra otel")
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from dora.metrics import otel

CONFIG = {
    "run": {"steps": 4},
    "model": {"path": "start"},
    "orchestrator": {"update_policy": "dora"},
}


class Collector(ThreadingHTTPServer):
    """Receives spans at `POST /v1/traces`; answers once `answers` is set."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.spans: list[Any] = []
        self.services: set[str] = set()
        self.answers = threading.Event()
        self.answers.set()

    def named(self, name: str) -> list[Any]:
        return sorted((s for s in self.spans if s.name == name), key=lambda s: s.end_time_unix_nano)


class Handler(BaseHTTPRequestHandler):
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.answers.wait(30)
        assert self.path == "/v1/traces"
        for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
            self.server.services.add(attributes(resource.resource)["service.name"])
            self.server.spans += [span for scope in resource.scope_spans for span in scope.spans]
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def attributes(of: Any) -> dict[str, Any]:
    return {a.key: getattr(a.value, a.value.WhichOneof("value")) for a in of.attributes}


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    with Collector() as server:
        serving = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        serving.start()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        yield server
        server.answers.set()
        server.shutdown()
        serving.join()


@pytest.mark.timeout(200)
def test_a_run_is_a_span_with_a_span_for_each_step(
    task: Path, start_run: StartRun, collector: Collector
) -> None:
    started_s = time.time()
    run = start_run(metrics__report_to=["otel"], metrics__project="kites")
    run.succeed()
    (parent,), steps = collector.named("run"), collector.named("step")
    assert collector.services == {"kites"}
    assert attributes(parent) == {
        "run.name": "run",
        "run.steps": 4,
        "model.path": str(task.parent / "start"),
        "orchestrator.update_policy": "dora",
    }
    assert {(span.trace_id, span.parent_span_id) for span in steps} == {(parent.trace_id, parent.span_id)}
    lines = [line for line in metrics(run.out) if "timing_s/step" in line]
    assert [attributes(span) for span in steps] == lines
    for span, line in zip(steps, lines, strict=True):
        seconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e9
        assert seconds == pytest.approx(line["timing_s/step"], abs=1e-5)
    for earlier, later in pairwise(steps):  # times in the file are rounded to 1 ms
        assert later.start_time_unix_nano == pytest.approx(earlier.end_time_unix_nano, abs=2e6)
    assert started_s * 1e9 < parent.start_time_unix_nano < steps[0].start_time_unix_nano
    assert steps[-1].end_time_unix_nano < parent.end_time_unix_nano < time.time() * 1e9


def start(out: Path, from_step: int | None = None, notice: Notice = pytest.fail) -> Trackers:
    return Trackers(["otel"], out, "dora", CONFIG, notice, from_step)


def test_a_resumed_run_continues_its_trace(tmp_path: Path, collector: Collector) -> None:
    for from_step in (None, 1):
        trackers = start(tmp_path, from_step)
        trackers.log({"step": from_step or 0, "t_s": 1.0, "timing_s/step": 0.5}, from_step or 0)
        trackers.close()
    first, resumed = collector.named("run")
    assert resumed.trace_id == first.trace_id
    assert resumed.parent_span_id == first.span_id
    assert [span.parent_span_id for span in collector.named("step")] == [first.span_id, resumed.span_id]
    assert json.loads((tmp_path / TRACKER_IDS_FILE).read_text())["otel"].split("-")[2] == first.span_id.hex()


def test_an_evaluation_is_a_span_without_a_duration(tmp_path: Path, collector: Collector) -> None:
    """On resume a missing evaluation is sent before the run's clock continues; steps are not affected."""
    trackers = start(tmp_path)
    trackers.log({"step": 0, "t_s": 1000.0, "val/version": 0}, 0)
    trackers.log({"step": 0, "t_s": 2.0, "timing_s/step": 1.5}, 0)
    trackers.close()
    (evaluation,), (step,) = collector.named("evaluation"), collector.named("step")
    assert attributes(evaluation) == {"step": 0, "t_s": 1000.0, "val/version": 0}
    assert evaluation.start_time_unix_nano == evaluation.end_time_unix_nano
    assert step.end_time_unix_nano - step.start_time_unix_nano == pytest.approx(1.5e9, abs=1e3)
    assert abs(step.end_time_unix_nano / 1e9 - time.time()) < 60


def test_service_and_attributes_of_the_environment_win(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "fleet")
    start(tmp_path).close()
    assert collector.services == {"fleet"}


@pytest.mark.parametrize("is_slow", [False, True], ids=["refuses", "does not answer"])
def test_an_unreachable_collector_delays_the_end_only_briefly(
    is_slow: bool, tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_slow:
        collector.answers.clear()
    else:  # this port was free a moment ago
        unused = ThreadingHTTPServer(("127.0.0.1", 0), BaseHTTPRequestHandler)
        unused.server_close()
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{unused.server_port}")
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setattr(otel, "CLOSE_TIMEOUT_S", 0.5)
    notices: list[str] = []
    trackers = start(tmp_path, notice=notices.append)
    started_s = time.monotonic()
    for step in range(100):
        trackers.log({"step": step, "t_s": step, "timing_s/step": 1.0}, step)
    assert time.monotonic() - started_s < 5
    assert notices == []
    trackers.close()
    assert time.monotonic() - started_s < 10
    (notice,) = notices
    assert "spans did not reach the collector; check it and OTEL_EXPORTER_OTLP_ENDPOINT" in notice


def test_the_disabled_sdk_sends_nothing(
    tmp_path: Path, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    for from_step in (None, 1):
        start(tmp_path, from_step).close()
    assert collector.spans == []


def test_a_missing_package_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(writer.LIBRARIES, "otel", "opentelemetry.exporter.otlp.proto.nowhere")
    with pytest.raises(InputError, match=r'otel needs opentelemetry.*; .* pip install "dora-rl\[otel\]"'):
        writer.check_trackers(["otel"])
