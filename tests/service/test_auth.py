"""Requests without the auth token are refused, and no body is read beyond its limit."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send
from tests.service.fake_run import AUTH_HEADER, MAX_BODY_BYTES, RUN_END, TOKEN, FakeRun, error_message

from dora.service.auth import MAX_REQUESTS, AuthMiddleware

JSON = {"content-type": "application/json"}


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> FakeRun:
    return FakeRun(tmp_path_factory.mktemp("auth"))


def send_raw(run: FakeRun, headers: dict[str, str], parts: list[bytes]) -> tuple[int, int]:
    """Status of POST /v1/engines with a body in parts, and how many of them were read."""
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
    "header", ["", "Bearer", "Bearer wrong", "Basic dXNlcg==", f"{AUTH_HEADER['Authorization']} "]
)
def test_a_wrong_token_is_refused_before_the_body_is_read(run: FakeRun, header: str) -> None:
    assert send_raw(run, {"authorization": header}, [b"{}"]) == (401, 0)
    message = error_message(
        run.call("GET", "/v1/status", headers={"Authorization": header.strip()[:-1]}), 401
    )
    assert "service.json" in message


def test_only_health_and_the_page_of_the_api_need_no_token(run: FakeRun) -> None:
    assert run.call("GET", "/health", headers={"Authorization": ""}).json() == {"status": "ok"}
    assert run.call("GET", "/docs", headers={"Authorization": ""}).status_code == 200
    paths = ("/metrics", "/openapi.json", "/v1/status", "/s/a/v1/models", "/docs/", "/docs/oauth2-redirect")
    for path in (*paths, "/nothing"):
        error_message(run.call("GET", path, headers={"Authorization": ""}), 401)


def test_a_body_with_an_oversized_content_length_is_not_read(run: FakeRun) -> None:
    assert send_raw(run, AUTH_HEADER | {"content-length": str(10**9)}, [b"x"]) == (413, 0)


def test_a_request_with_two_lengths_is_refused(run: FakeRun) -> None:
    two = {"content-length": "2", "transfer-encoding": "chunked"}
    assert send_raw(run, AUTH_HEADER | two, [b"{}"]) == (400, 0)


def test_a_chunked_body_is_read_up_to_the_limit(run: FakeRun) -> None:
    parts = [b"x" * 4000] * 250_000
    assert send_raw(run, AUTH_HEADER | JSON, parts) == (413, 3)


def test_a_body_of_the_maximum_size_is_read(run: FakeRun) -> None:
    body = json.dumps({"count": 65}).encode()
    assert send_raw(run, AUTH_HEADER | JSON, [body.ljust(MAX_BODY_BYTES)]) == (422, 1)


async def test_too_many_concurrent_requests_are_refused_with_429() -> None:
    release, statuses = asyncio.Event(), list[int]()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await release.wait()

    async def send(message: Message) -> None:
        statuses.append(message["status"]) if "status" in message else None

    middleware = AuthMiddleware(app, TOKEN, MAX_BODY_BYTES, {}, lambda *response: None)
    scope = {"type": "http", "method": "GET", "path": "/health", "headers": []}
    requests = [
        asyncio.ensure_future(middleware(scope, None, send))  # type: ignore[arg-type]
        for _ in range(MAX_REQUESTS + 1)
    ]
    await requests[-1]
    release.set()
    await asyncio.gather(*requests)
    assert statuses == [429]


@pytest.mark.parametrize(
    ("body", "reason"),
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
def test_an_invalid_body_is_refused_with_a_reason(run: FakeRun, body: bytes, reason: str) -> None:
    response = run.call("POST", "/v1/engines", content=body, headers=JSON)
    assert reason in error_message(response, response.status_code)
    assert response.status_code in (400, 422)


def test_a_body_of_another_media_type_is_refused(run: FakeRun) -> None:
    response = run.call("POST", "/v1/engines", content=b"count=1", headers={"content-type": "text/plain"})
    assert error_message(response, 422)


async def test_unknown_methods_are_counted_together() -> None:
    methods = list[str]()

    async def send(message: Message) -> None:
        pass

    def on_response(method: str, *others: object) -> None:
        methods.append(method)

    middleware = AuthMiddleware(lambda *_: None, TOKEN, MAX_BODY_BYTES, {}, on_response)  # type: ignore[arg-type]
    for method in ("GET", "M1", "M2"):
        scope: Scope = {"type": "http", "method": method, "path": "/x", "headers": []}
        await middleware(scope, None, send)  # type: ignore[arg-type]
    assert methods == ["GET", "other", "other"]


def test_every_request_is_refused_after_the_end_of_the_run(tmp_path: Path) -> None:
    run = FakeRun(tmp_path, service__agents="true")
    run.app.run_end = RUN_END
    gone = {"type": "error", "error": {"message": RUN_END.sentence, "type": "run_finished", "code": 410}}
    for method, path in (
        *(("GET", path) for path in ("/health", "/docs", "/metrics", "/v1/status", "/nothing")),
        *(("POST", path) for path in ("/v1/chat/completions", "/s/a/v1/chat/completions", "/s/a/reward")),
        ("PUT", "/v1/sessions/a"),
        ("PUT", "/v1/weights/3"),
    ):
        response = run.call(method, path)
        assert (response.status_code, response.json()) == (410, gone), path
    for path in ("/health", "/docs"):  # how it has ended is for clients with the token
        response = run.call("GET", path, headers={"Authorization": ""})
        assert error_message(response, 410) == "the run has ended"
    assert error_message(run.call("GET", "/v1/status", headers={"Authorization": ""}), 401)


def test_unknown_paths_and_methods_have_error_responses_too(run: FakeRun) -> None:
    assert error_message(run.call("GET", "/v1/nothing"), 404)
    assert error_message(run.call("DELETE", "/v1/status"), 405)
    response = run.call("DELETE", "/v1/engines")
    assert error_message(response, 405) == "the method is not supported here; use GET, POST"
    assert response.headers["allow"] == "GET, POST"
    assert error_message(run.call("GET", "/v1/../../etc/passwd"), 404)
    assert error_message(run.call("GET", "/v1/engines/%2e%2e%2fconfig.toml/drain"), 404)


def test_an_internal_error_is_raised_again_for_the_log(tmp_path: Path) -> None:
    run = FakeRun(tmp_path)
    run.context.state = lambda: 1 // 0  # type: ignore[assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        run.call("GET", "/v1/status")
