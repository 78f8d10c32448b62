"""The state of a run can be read at any time; it can be paused and its engines changed while it trains."""

from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.service.fake_run import RUN_END, FakeRun, disconnect_after, error_message

from dora.core.events import Published
from dora.runtime.executor import LiveRun, ProcessExecutor
from dora.runtime.process import messages as m

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path: Path) -> FakeRun:
    return FakeRun(tmp_path)


def test_the_status_shows_the_progress_of_the_run(run: FakeRun) -> None:
    status = run.call("GET", "/v1/status").json()
    assert (status["phase"], status["num_steps_trained"], status["num_steps"]) == ("training", 0, 4)
    assert (status["num_engines"], status["newest_version"]) == (2, None)


def test_a_request_that_waits_for_a_version_returns_when_it_is_published(run: FakeRun) -> None:
    async def requests(http: Any) -> Any:
        waiting = asyncio.ensure_future(http.get("/v1/versions", params={"newer_than": -1, "wait_s": 60}))
        await http.get("/v1/status")  # until the first request waits
        assert not waiting.done()
        run.orchestrator.handle(Published(0, "ab" * 16), 1.0)
        run.process()
        return await waiting

    found = run.call_many(requests).json()
    assert found["newest"] == 0
    assert found["versions"] == [{"version": 0, "digest": "ab" * 16, "num_requests": 0, "engines": []}]


def test_a_version_that_is_not_published_in_time_is_no_error(run: FakeRun) -> None:
    assert run.call("GET", "/v1/versions").json() == {"newest": None, "versions": []}
    for invalid in ({"wait_s": -1}, {"wait_s": 61}, {"wait_s": "nan"}, {"newer_than": "x"}):
        error_message(run.call("GET", "/v1/versions", params=invalid), 422)


def test_new_engines_are_listed_as_starting(run: FakeRun) -> None:
    response = run.call("POST", "/v1/engines", json={"count": 2})
    assert response.status_code == 202
    assert [engine["state"] for engine in response.json()["engines"]] == ["starting"] * 2
    engines = run.call("GET", "/v1/engines").json()["engines"]
    assert [engine["state"] for engine in engines] == ["running", "running", "starting", "starting"]


def test_the_last_engine_cannot_be_drained(run: FakeRun) -> None:
    response = run.call("POST", "/v1/engines/0/drain")
    assert (response.status_code, response.json()["state"]) == (202, "draining")
    message = error_message(run.call("POST", "/v1/engines/1/drain"), 409)
    assert "it is the only engine that is not draining" in message


@pytest.mark.parametrize("engine", ["7", "-1", "x", "99999999999"])
def test_an_unknown_engine_cannot_be_drained(run: FakeRun, engine: str) -> None:
    response = run.call("POST", f"/v1/engines/{engine}/drain")
    assert error_message(response, response.status_code)
    assert response.status_code in (404, 422)


def test_a_run_can_be_paused_and_resumed(run: FakeRun) -> None:
    for _ in range(2):  # a repeated request changes nothing
        assert run.call("POST", "/v1/pause").json() == {"is_paused": True}
        assert run.context.is_paused
    assert run.call("GET", "/v1/status").json()["phase"] == "paused"
    engines = run.call("GET", "/v1/engines").json()["engines"]
    assert [engine["state"] for engine in engines] == ["paused", "paused"]
    for _ in range(2):
        assert run.call("POST", "/v1/resume").json() == {"is_paused": False}
        assert not run.context.is_paused


class RecordingPool:
    """Records what the executor sends to its engines."""

    def __init__(self) -> None:
        self.paused: list[int] = []
        self.sent: list[tuple[int, object]] = []

    def pause_unreported(self, engine: int) -> None:
        self.paused.append(engine)

    def send(self, engine: int, message: object) -> None:
        self.sent.append((engine, message))


def test_a_pause_is_sent_to_each_engine_once(run: FakeRun) -> None:
    pool, executor = RecordingPool(), ProcessExecutor.__new__(ProcessExecutor)
    folders = {"stream_folder": Path(), "weights": SimpleNamespace(folder=Path())}
    others = {"prompts": None, "episode_runner": None, "rewards": SimpleNamespace(external={})}
    vars(executor).update(engine_pool=pool, is_paused=False, **folders, **others)
    live = LiveRun(run.setup, executor, run.orchestrator.snapshot, run.context.metrics, is_training=True)
    for _ in range(2):
        live.pause()
        assert (live.is_paused, pool.paused) == (True, [0, 1])
    for _ in range(2):
        live.resume()
        assert pool.sent == [(0, m.ResumeDecoding()), (1, m.ResumeDecoding())]
    assert not live.is_paused


def test_a_run_that_does_not_train_cannot_be_changed(run: FakeRun) -> None:
    run.context.is_training = False
    assert run.call("GET", "/v1/status").json()["phase"] == "not_training"
    for path in ("/v1/pause", "/v1/engines", "/v1/engines/0/drain"):
        assert "try again while it trains" in error_message(run.call("POST", path, json={}), 409)


def test_grafanas_dashboard_asks_for_metrics_that_exist(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, service__agents="true", data__chat_template="false")
    run.call("GET", "/v1/status")
    exposed = {
        sample.name
        for family in text_string_to_metric_families(run.call("GET", "/metrics").text)
        for sample in family.samples
    }
    dashboard = json.loads((ROOT / "examples" / "grafana.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for query in queries for name in re.findall(r"dora_\w+", query)}
    assert asked - {"dora_step"} <= exposed  # a run without steps has none
    documented = (ROOT / "docs" / "metrics.md").read_text()
    in_steps = {name for query in queries for name in re.findall(r'metric="([^"]+)"', query)}
    assert in_steps
    assert all(f"`{name}`" in documented for name in in_steps)
    places = [tuple(panel["gridPos"].values()) for panel in dashboard["panels"]]
    assert len(set(places)) == len({panel["id"] for panel in dashboard["panels"]}) == len(places)


def test_prometheus_can_parse_the_metrics(run: FakeRun) -> None:
    run.call("GET", "/v1/status")
    run.call("GET", "/v1/nothing")
    families = {
        family.name: family for family in text_string_to_metric_families(run.call("GET", "/metrics").text)
    }
    assert families["dora_steps"].samples[0].value == 0
    rows = {(s.labels["engine"], s.labels["use"]): s.value for s in families["dora_engine_rows"].samples}
    assert rows == {("0", "used"): 0, ("0", "free"): 4, ("1", "used"): 0, ("1", "free"): 4}
    requests = {(s.labels["route"], s.labels["status"]) for s in families["dora_http_requests"].samples}
    assert {("/v1/status", "200"), ("none", "404")} <= requests


def test_a_request_stops_waiting_when_its_client_disconnects(run: FakeRun) -> None:
    assert disconnect_after(run.app, "GET", "/v1/versions", wait_s="60") == 200


def test_requests_fail_once_the_run_is_over(run: FakeRun) -> None:
    async def requests(http: Any) -> Any:
        waiting = asyncio.ensure_future(http.get("/v1/versions", params={"wait_s": 60}))
        await http.get("/v1/status")
        run.requests.close(RUN_END)
        return await waiting

    for response in (run.call_many(requests), run.call("GET", "/v1/status")):
        error = {"message": RUN_END.sentence, "type": "run_finished", "code": 410}
        assert (response.status_code, response.json()) == (410, {"type": "error", "error": error})


def test_an_exception_of_a_request_does_not_reach_the_driver(run: FakeRun) -> None:
    answer = run.requests.submit(lambda context: 1 // 0)
    assert isinstance(answer.exception(0), ZeroDivisionError)
    waiting = run.requests.submit(lambda context: None, wait_s=60)
    waiting.cancel()
    run.process()
    assert run.requests.submit(lambda context: context.now_s).result(0) == 12.0
