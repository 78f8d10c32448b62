"""Both clients against a real server, and against servers that fail in every way."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.service.fake_run import TOKEN, FakeRun, serve

from dora.auth_token import write_private_file
from dora.core.types import RequestId
from dora.envs.episode import EpisodeEnded, EpisodeId, PolicyTurn
from dora.errors import InputError, ServiceError
from dora.service.client import UNREACHABLE, Address, ApiCall, AsyncClient, Client, _RetryLoop

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FakeRun]:
    """A run with agents behind a real server."""
    run = FakeRun(tmp_path, service__agents="true")
    with serve(run):
        yield run
    assert not (run.setup.out / "service.json").exists()


def test_a_client_finds_the_service_of_a_run(served: FakeRun) -> None:
    file = served.setup.out / "service.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with Client(Address.of_run(served.setup.out)) as run:
        assert run.status()["phase"] == "training"
        assert run.add_engines(2)["engines"][1]["engine"] == 3
        assert len(run.engines()["engines"]) == 4
        assert run.pause() == {"is_paused": True}
        assert run.resume() == {"is_paused": False}
        assert run.versions(newer_than=3)["newest"] is None
        with pytest.raises(ServiceError, match="the run has no engine 9") as error:
            run.drain_engine(9)
        assert error.value.status == 404


def test_a_client_reads_a_whole_address_while_it_is_written(tmp_path: Path) -> None:
    text = json.dumps({"url": "http://127.0.0.1:1", "token": "x" * 10_000})

    def write() -> None:
        for _ in range(300):
            write_private_file(tmp_path / "service.json", text)

    write_private_file(tmp_path / "service.json", text)
    writer = threading.Thread(target=write)
    writer.start()
    while writer.is_alive():
        assert len(Address.of_run(tmp_path).token) == 10_000


def test_a_folder_without_a_served_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not the folder of a served run"):
        Address.of_run(tmp_path)


def test_a_wrong_token_is_not_retried(served: FakeRun) -> None:
    address = Address.of_run(served.setup.out)
    with Client(Address(address.url, "wrong")) as run, pytest.raises(ServiceError, match="Bearer") as error:
        run.status()
    assert error.value.status == 401


async def test_an_asynchronous_client_runs_an_episode(served: FakeRun) -> None:
    episode = EpisodeId(RequestId(0, 0, 0), 0)
    async with AsyncClient(Address.of_run(served.setup.out)) as run:
        waiting = asyncio.ensure_future(run.open_session())
        served.agents.start(episode, version=1)
        served.process()
        session = (await waiting)["session"]
        user = {"role": "user", "content": "1"}
        completing = asyncio.ensure_future(run.complete(session, [user], max_tokens=4))
        while served.messages.empty():
            await asyncio.wait([completing], timeout=0.001)
        served.agents.on_turn(PolicyTurn(episode, 0, [7], "stop", 9))
        served.process()
        answer = (await completing)["choices"][0]["message"]["content"]
        assert (await run.get_session(session))["num_turns"] == 1
        await run.post_reward(session, float(answer), [float(answer)])
        async for status in run.progress(interval_s=0.0):
            assert status["num_steps"] == 4
            served.orchestrator.snapshot().num_trained += served.setup.limits.batch_size
        assert (status["num_steps_trained"], float(answer)) == (4, 7.0)
    assert served.replies()[-1] == EpisodeEnded(episode, 0, 7.0, (7.0,))


def test_a_request_that_finds_nothing_is_retried_until_the_timeout(served: FakeRun) -> None:
    address = Address.of_run(served.setup.out)
    with Client(Address(address.url, address.token, retry_timeout_s=0.3)) as run:
        with pytest.raises(ServiceError, match="no episode is waiting for an agent"):
            run.open_session(wait_s=0.0)
        with pytest.raises(ServiceError, match="no session of this name"):
            run.abandon_session("unknown")


def test_progress_ends_with_the_summary_of_a_finished_run(tmp_path: Path) -> None:
    status = b'{"num_steps_trained": 1, "num_steps": 2}'
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(status)
    with responding(head + status) as (url, _):
        client = Client(Address(url, TOKEN, retry_timeout_s=0.3, run=tmp_path))
        progress = client.progress(interval_s=0.0)
        assert next(progress)["num_steps_trained"] == 1
    with client as run:
        (tmp_path / "summary.json").write_text('{"steps": 2}')
        assert [status["num_steps_trained"] for status in progress] == [2]
        (tmp_path / "summary.json").unlink()
        with pytest.raises(ServiceError, match="has not responded for"):
            next(run.progress())


def ended_response(kind: str) -> bytes:
    """The response of a service whose run has ended."""
    body = json.dumps({"error": {"message": "how it ended", "type": f"run_{kind}", "code": 410}}).encode()
    return b"HTTP/1.1 410 Gone\r\nconnection: close\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


@pytest.mark.parametrize("kind", ["finished", "stopped", "failed"])
def test_progress_ends_with_what_the_service_says_of_the_end(kind: str) -> None:
    first = json_lines({"num_steps_trained": 1, "num_steps": 2}).replace(
        b"OK\r\n", b"OK\r\nconnection: close\r\n"
    )
    with responding(first, ended_response(kind)) as (url, _), Client(Address(url, TOKEN)) as run:
        progress = run.progress(interval_s=0.0)
        assert next(progress)["num_steps_trained"] == 1
        if kind == "finished":
            assert [status["num_steps_trained"] for status in progress] == [2]
        else:
            with pytest.raises(ServiceError, match="how it ended") as error:
                next(progress)
            assert (error.value.status, error.value.kind) == (410, f"run_{kind}")


def test_a_request_after_the_end_of_the_run_is_not_retried() -> None:
    result, requests = call_with([ended_response("finished")], "status")
    assert (result, len(requests)) == (410, 1)


@contextmanager
def responding(*responses: bytes) -> Iterator[tuple[str, list[str]]]:
    """The URL of a server, and its request lines.

    It accepts a connection for each response, and closes one whose response is empty.
    """
    requests: list[str] = []

    def respond() -> None:
        with server:
            for response in responses:
                connection, _ = server.accept()
                with connection:
                    requests.append(connection.recv(10_000).partition(b"\r\n")[0].decode())
                    connection.sendall(response)

    server = socket.create_server(("127.0.0.1", 0))
    thread = threading.Thread(target=respond, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}", requests
    thread.join()


def call_with(responses: list[bytes], method: str, *arguments: object) -> tuple[object, list[str]]:
    """The result of a client's method at a server with these responses, and the request lines."""
    with responding(*responses) as (url, requests):
        try:
            with Client(Address(url, TOKEN, retry_timeout_s=10)) as run:
                result: object = getattr(run, method)(*arguments)
                result = list(result) if isinstance(result, Iterator) else result
        except ServiceError as error:
            result = error.status
    return result, requests


def test_a_request_without_a_response_is_retried() -> None:
    result, requests = call_with([b"", BUSY, OK], "status")
    assert (result, requests) == ({}, ["GET /v1/status HTTP/1.1"] * 3)


def json_lines(*lines: object) -> bytes:
    body = "".join(json.dumps(line) + "\n" for line in lines).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def test_a_batch_is_requested_until_it_is_complete() -> None:
    first, second = {"group": "0/1"}, {"group": "0/2"}
    responses = [
        json_lines(first, {"is_complete": False}),
        b"",
        json_lines({"is_complete": False}),
        json_lines(second, {"is_complete": True}),
    ]
    batch, requests = call_with(responses, "batch", 3, ["reward"])
    assert batch == [first, second]
    assert requests[0] == "GET /v1/batches/3?after=0&wait_s=1.0&fields=reward HTTP/1.1"
    assert [line.split("&")[0][-1] for line in requests] == ["0", "1", "1", "1"]


def test_a_batch_that_cannot_be_completed_raises() -> None:
    response = json_lines({"is_complete": False, "error": "the step is trained"})
    assert call_with([response], "batch", 3)[0] == 409


def test_weights_are_sent_with_their_digest() -> None:
    result, requests = call_with([OK], "put_weights", 4, b"tensors", {"loss": 0.5})
    digest = hashlib.sha256(b"tensors").hexdigest()
    assert requests == [f"PUT /v1/weights/4?sha256={digest}&metrics=%7B%22loss%22%3A+0.5%7D HTTP/1.1"]
    assert result == {}
    assert call_with([json_lines("x")], "get_weights", 4)[0] == b'"x"\n'


def test_a_request_that_is_not_idempotent_is_not_retried() -> None:
    assert call_with([b""], "add_engines") == (503, ["POST /v1/engines HTTP/1.1"])


def test_an_error_without_json_raises_too() -> None:
    assert call_with([b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"], "status")[0] == 404


def test_the_time_until_a_response_does_not_count_towards_the_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    retries = _RetryLoop(ApiCall("POST", "/"), timeout_s=2.0)

    def attempt() -> httpx.Response | None:
        nonlocal now_s
        assert retries.request["method"] == "POST"
        now_s += 300.0
        return retries.check_response(httpx.Response(429))

    for _ in range(3):
        assert attempt() is None
        now_s += 0.9  # the backoff
    with pytest.raises(ServiceError) as error:
        attempt()
    assert error.value.status == 429


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (httpx.ConnectError("refused"), UNREACHABLE),
        (httpx.ConnectTimeout("no answer"), "server_error"),
        (httpx.ReadTimeout("no response"), "server_error"),
    ],
)
def test_only_a_refused_connection_is_an_unreachable_service(error: httpx.TransportError, kind: str) -> None:
    """A machine that is busy accepts late, and its run goes on."""
    with pytest.raises(ServiceError) as raised:
        _RetryLoop(ApiCall("GET", "/"), timeout_s=0.0).check_loss(error)
    assert raised.value.kind == kind


def test_an_unreachable_service_raises_after_the_timeout(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    address = Address(f"http://127.0.0.1:{port}", TOKEN, retry_timeout_s=0.2)
    with Client(address) as run, pytest.raises(ServiceError, match="is the run over") as error:
        run.status()
    assert error.value.status == 503
