"""Nobody passes without the token, and nothing that is too long is ever read."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.service.standing import BEARER, MAX_BYTES, TOKEN, StandingRun, refusal

from dora.service.auth import MAX_CALLS, AuthMiddleware

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> StandingRun:
    return StandingRun(tmp_path_factory.mktemp("gate"))


def send_raw(run: StandingRun, headers: dict[str, str], parts: list[bytes]) -> tuple[int, int]:
    """Status of POST /v1/engines with a body in parts, and how many of them were taken."""
    sent: list[Message] = []
    left = list(parts)

    async def receive() -> Message:
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: dict[str, Any] = {
        "type": "http",
        "http_version": "1.1",
        "method": "POST",
        "path": "/v1/engines",
        "query_string": b"",
        "headers": [(name.lower().encode(), value.encode()) for name, value in headers.items()],
    }
    asyncio.run(run.app(scope, receive, send))
    return sent[0]["status"], len(parts) - len(left)


@pytest.mark.parametrize(
    "given", ["", "Bearer", "Bearer wrong", "Basic dXNlcg==", f"{BEARER['Authorization']} "]
)
def test_a_wrong_token_is_refused_before_the_body_is_read(run: StandingRun, given: str) -> None:
    assert send_raw(run, {"authorization": given}, [b"{}"]) == (401, 0)
    message = refusal(run.ask("GET", "/v1/status", headers={"Authorization": given.strip()[:-1]}), 401)
    assert "service.json" in message


def test_only_health_needs_no_token(run: StandingRun) -> None:
    assert run.ask("GET", "/health", headers={"Authorization": ""}).json() == {"status": "ok"}
    for path in ("/metrics", "/openapi.json", "/v1/status", "/nothing"):
        refusal(run.ask("GET", path, headers={"Authorization": ""}), 401)


def test_a_gigabyte_that_is_announced_is_refused_unread(run: StandingRun) -> None:
    assert send_raw(run, BEARER | {"content-length": str(10**9)}, [b"x"]) == (413, 0)


def test_a_gigabyte_that_is_not_announced_is_read_as_far_as_the_limit(run: StandingRun) -> None:
    parts = [b"x" * 4000] * 250_000
    assert send_raw(run, BEARER | JSON, parts) == (413, 3)


def test_a_body_as_long_as_the_limit_is_read(run: StandingRun) -> None:
    body = json.dumps({"count": 65}).encode()
    assert send_raw(run, BEARER | JSON, [body.ljust(MAX_BYTES)]) == (422, 1)


def test_too_many_calls_at_once_are_told_to_come_again() -> None:
    release, statuses = asyncio.Event(), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()

    async def send(message: Message) -> None:
        statuses.append(message["status"]) if "status" in message else None

    async def crowd() -> None:
        gate = AuthMiddleware(app, TOKEN, MAX_BYTES, {}, lambda *noted: None)
        scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
        calls = [asyncio.ensure_future(gate(scope, None, send)) for _ in range(MAX_CALLS + 1)]  # type: ignore[arg-type]
        await calls[-1]
        release.set()
        await asyncio.gather(*calls)

    asyncio.run(crowd())
    assert statuses == [429]


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"{", "JSON"),
        (b"", "required"),
        (b"[]", "dict"),
        (b"[" * 5000, ""),
        (b'{"count": NaN}', "integer"),
        (b'{"count": 1e400}', "integer"),
        (b'{"count": "1"}', "integer"),
        (b'{"count": true}', "integer"),
        (b'{"count": 0}', "greater"),
        (b'{"count": 1, "cou\\ud800nt": 2}', "unicode"),
        (b"\xff\xfe", ""),
        (b'{"count": ' + b"9" * 5000 + b"}", ""),
    ],
)
def test_a_body_that_is_not_what_it_must_be_is_refused_in_words(
    run: StandingRun, body: bytes, why: str
) -> None:
    response = run.ask("POST", "/v1/engines", content=body, headers=JSON)
    assert why in refusal(response, response.status_code)
    assert response.status_code in (400, 422)


def test_a_body_of_another_kind_is_refused(run: StandingRun) -> None:
    response = run.ask("POST", "/v1/engines", content=b"count=1", headers={"content-type": "text/plain"})
    assert refusal(response, 422)


def test_methods_that_nobody_has_are_one_to_whoever_reads_the_metrics() -> None:
    methods = list[str]()

    async def send(message: Message) -> None:
        pass

    gate = AuthMiddleware(lambda *_: None, TOKEN, MAX_BYTES, {}, lambda *noted: methods.append(noted[0]))  # type: ignore[arg-type]
    for method in ("GET", "M1", "M2"):
        scope: Scope = {"type": "http", "method": method, "path": "/x", "headers": []}
        asyncio.run(gate(scope, None, send))  # type: ignore[arg-type]
    assert methods == ["GET", "other", "other"]


def test_what_is_not_there_is_said_in_the_same_form(run: StandingRun) -> None:
    assert refusal(run.ask("GET", "/v1/nothing"), 404)
    assert refusal(run.ask("DELETE", "/v1/status"), 405)
    response = run.ask("DELETE", "/v1/engines")
    assert (refusal(response, 405), response.headers["allow"]) == ("not with this method", "GET, POST")
    assert refusal(run.ask("GET", "/v1/../../etc/passwd"), 404)
    assert refusal(run.ask("GET", "/v1/engines/%2e%2e%2fconfig.toml/drain"), 404)


def test_a_mistake_of_our_own_is_told_to_the_console(tmp_path: Path) -> None:
    run = StandingRun(tmp_path)
    run.inside.state = lambda: 1 // 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        run.ask("GET", "/v1/status")
