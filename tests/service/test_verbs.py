"""A run can be looked at and steered, and says why where it cannot."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.service.standing import StandingRun, disconnect_after, refusal

from dora.core.actions import RejectDrain
from dora.core.events import DrainRequested, Published
from dora.errors import ConfigError
from dora.runtime.control.requests import check_gateway
from dora.runtime.process import messages as m


@pytest.fixture
def run(tmp_path: Path) -> StandingRun:
    return StandingRun(tmp_path)


def test_the_status_says_where_the_run_stands(run: StandingRun) -> None:
    status = run.ask("GET", "/v1/status").json()
    assert (status["phase"], status["num_steps_trained"], status["num_steps"]) == ("training", 0, 4)
    assert (status["num_engines"], status["newest_version"]) == (2, None)


def test_who_waits_for_a_version_is_told_when_it_is_published(run: StandingRun) -> None:
    async def talk(http: Any) -> Any:
        call = asyncio.ensure_future(http.get("/v1/versions", params={"newer_than": -1, "wait_s": 60}))
        await http.get("/v1/status")  # meanwhile the first call waits
        assert not call.done()
        run.core.handle(Published(0, "ab" * 16), 1.0)
        run.calls.look()
        return await call

    found = run.converse(talk).json()
    assert found["newest"] == 0
    assert found["versions"] == [{"version": 0, "digest": "ab" * 16, "num_requests": 0, "engines": []}]


def test_a_version_that_does_not_come_is_no_error(run: StandingRun) -> None:
    assert run.ask("GET", "/v1/versions").json() == {"newest": None, "versions": []}
    for wrong in ({"wait_s": -1}, {"wait_s": 61}, {"wait_s": "nan"}, {"newer_than": "x"}):
        refusal(run.ask("GET", "/v1/versions", params=wrong), 422)


def test_engines_start_and_are_listed(run: StandingRun) -> None:
    started = run.ask("POST", "/v1/engines", json={"count": 2})
    assert started.status_code == 202
    assert [engine["state"] for engine in started.json()["engines"]] == ["starting"] * 2
    engines = run.ask("GET", "/v1/engines").json()["engines"]
    assert [engine["state"] for engine in engines] == ["working", "working", "starting", "starting"]


def carry_out(run: StandingRun) -> None:
    """The driver takes up a call, tells the core what came of it, and looks again."""
    run.calls.look()
    while run.hands.facts:
        fact = run.hands.facts.popleft()
        assert isinstance(fact, DrainRequested)
        for order in run.core.handle(fact, 1.0):
            if isinstance(order, RejectDrain):
                run.hands.refusals[order.engine] = order.reason
    run.calls.look()


def test_the_only_engine_stays(run: StandingRun) -> None:
    run.hands.nudge = lambda: carry_out(run)
    left = run.ask("POST", "/v1/engines/0/drain")
    assert (left.status_code, left.json()["state"]) == (202, "leaving")
    assert "it is the only engine that is not draining" in refusal(
        run.ask("POST", "/v1/engines/1/drain"), 409
    )


@pytest.mark.parametrize("engine", ["7", "-1", "x", "99999999999"])
def test_an_engine_that_is_not_there_cannot_leave(run: StandingRun, engine: str) -> None:
    response = run.ask("POST", f"/v1/engines/{engine}/drain")
    assert refusal(response, response.status_code)
    assert response.status_code in (404, 422)


def test_a_run_is_paused_and_goes_on(run: StandingRun) -> None:
    for _ in range(2):  # to ask twice changes nothing
        assert run.ask("POST", "/v1/pause").json() == {"is_paused": True}
        assert (run.hands.is_held, run.hands.fleet.rests) == (True, [0, 1])
    assert run.ask("GET", "/v1/status").json()["phase"] == "paused"
    for _ in range(2):
        assert run.ask("POST", "/v1/resume").json() == {"is_paused": False}
        assert run.hands.fleet.sent == [(0, m.ResumeDecoding()), (1, m.ResumeDecoding())]
    assert not run.hands.is_held


def test_a_run_that_does_not_train_is_only_looked_at(run: StandingRun) -> None:
    run.inside.is_training = False
    assert run.ask("GET", "/v1/status").json()["phase"] == "between"
    for path in ("/v1/pause", "/v1/engines", "/v1/engines/0/drain"):
        assert "ask again while it trains" in refusal(run.ask("POST", path, json={}), 409)


def test_prometheus_can_read_the_metrics(run: StandingRun) -> None:
    run.ask("GET", "/v1/status")
    run.ask("GET", "/v1/nothing")
    families = {
        family.name: family for family in text_string_to_metric_families(run.ask("GET", "/metrics").text)
    }
    assert families["dora_steps"].samples[0].value == 0
    rows = {(s.labels["engine"], s.labels["use"]): s.value for s in families["dora_engine_rows"].samples}
    assert rows == {("0", "used"): 0, ("0", "free"): 4, ("1", "used"): 0, ("1", "free"): 4}
    calls = {(s.labels["route"], s.labels["status"]) for s in families["dora_http_requests"].samples}
    assert {("/v1/status", "200"), ("none", "404")} <= calls


def test_nobody_waits_for_a_version_in_the_name_of_who_has_gone(run: StandingRun) -> None:
    assert disconnect_after(run, "GET", "/v1/versions", wait_s="60") == 200


def test_a_run_that_is_over_says_so_to_whoever_asks(run: StandingRun) -> None:
    async def talk(http: Any) -> Any:
        call = asyncio.ensure_future(http.get("/v1/versions", params={"wait_s": 60}))
        await http.get("/v1/status")
        run.calls.close()
        return await call

    assert run.converse(talk).status_code == 503
    assert run.ask("GET", "/v1/status").json()["error"]["message"] == "the run is over"


def test_what_a_call_raises_is_its_own_trouble(run: StandingRun) -> None:
    answer = run.calls.ask(lambda inside: 1 // 0)
    assert isinstance(answer.exception(0), ZeroDivisionError)
    waiting = run.calls.ask(lambda inside: None, wait_s=60)
    waiting.cancel()
    run.calls.look()
    assert run.calls.ask(lambda inside: inside.hands.now).result(0) == 12.0


def test_a_run_that_waits_for_somebody_outside_needs_a_door(run: StandingRun, tmp_path: Path) -> None:
    check_gateway(run.plan.config, None)
    served = StandingRun(tmp_path / "served", service__agents="true")
    with pytest.raises(
        ConfigError, match=r"service.agents = true: the run needs its service; start it with dora serve"
    ):
        check_gateway(served.plan.config, None)
