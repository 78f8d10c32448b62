"""Clients in this process, a real server behind loopback, and what may go wrong between the two."""

from __future__ import annotations

import asyncio
import hashlib
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from tests.service.fake_run import TOKEN, FakeRun

from dora.config.schema import ServiceSection
from dora.core.types import RequestId
from dora.errors import ConfigError, InputError, ServiceError
from dora.runtime.rollout.episodes import EpisodeEnded, EpisodeId, PolicyTurn
from dora.service.client import Address, ApiCall, AsyncClient, Client, _RetryLoop
from dora.service.server import WebGateway

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"
BUSY = b"HTTP/1.1 429 Too Many Requests\r\ncontent-length: 0\r\n\r\n"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[FakeRun]:
    """A run behind a real server; its folder is `run.setup.out`."""
    run = FakeRun(tmp_path, service__agents="true")
    run.setup.out.mkdir()
    door = WebGateway(ServiceSection(), run.setup.out)
    door.open(run.requests, lambda sentence: None)
    yield run
    run.requests.close()
    door.close()
    assert not (run.setup.out / "service.json").exists()


def test_a_client_finds_the_service_of_a_run(served: FakeRun) -> None:
    file = served.plan.out / "service.json"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    with Client(Address.of_run(served.plan.out)) as run:
        assert run.status()["phase"] == "training"
        assert run.add_engines(2)["engines"][1]["engine"] == 3
        assert len(run.engines()["engines"]) == 4
        assert run.pause() == {"is_paused": True}
        assert run.resume() == {"is_paused": False}
        assert run.versions(newer_than=3)["newest"] is None
        with pytest.raises(ServiceError, match="the run has no engine 9") as error:
            run.drain_engine(9)
        assert error.value.status == 404


def test_a_folder_without_a_served_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no run that is served"):
        Address.of_run(tmp_path)


def test_a_wrong_token_is_not_tried_again(served: FakeRun) -> None:
    address = Address.of_run(served.plan.out)
    with Client(Address(address.url, "wrong")) as run, pytest.raises(ServiceError, match="Bearer") as error:
        run.status()
    assert error.value.status == 401


def test_an_asynchronous_client_plays_an_episode(served: FakeRun) -> None:
    episode = EpisodeId(RequestId(0, 0, 0), 0)

    async def play() -> float:
        async with AsyncClient(Address.of_run(served.plan.out)) as run:
            waiting = asyncio.ensure_future(run.open_session())
            served.agents.start(episode, version=1)
            served.hands.nudge()
            session = (await waiting)["session"]
            asked = asyncio.ensure_future(
                run.complete(session, [{"role": "user", "content": "1"}], max_tokens=4)
            )
            while served.told.empty():
                await asyncio.wait([asked], timeout=0.001)
            served.agents.on_turn(PolicyTurn(episode, 0, [7], "stop", 9))
            served.hands.nudge()
            answer = (await asked)["choices"][0]["message"]["content"]
            assert (await run.get_session(session))["num_turns"] == 1
            await run.post_reward(session, float(answer))
            async for status in run.progress(interval_s=0.0):
                assert status["num_steps"] == 4
                served.core.snapshot().num_trained += served.plan.limits.batch_size
            assert status["num_steps_trained"] == 4
            return float(answer)

    assert asyncio.run(play()) == 7.0
    assert served.words()[-1] == EpisodeEnded(episode, 0, 7.0)


def test_who_is_told_to_come_again_comes_again_for_a_while(served: FakeRun) -> None:
    address = Address.of_run(served.plan.out)
    with Client(Address(address.url, address.token, retry_timeout_s=0.3)) as run:
        with pytest.raises(ServiceError, match="no episode waits for an agent"):
            run.open_session(wait_s=0.0)
        with pytest.raises(ServiceError, match="no session of this name"):
            run.abandon_session("nobody")


def test_progress_ends_with_the_summary_of_a_run_that_is_complete(tmp_path: Path) -> None:
    status = b'{"num_steps_trained": 1, "num_steps": 2}'
    head = b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(status)
    with socket.create_server(("127.0.0.1", 0)) as server:
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        thread = threading.Thread(target=answer_each, args=(server, [head + status]))
        thread.start()
        with Client(Address(url, TOKEN, retry_timeout_s=0.3, run=tmp_path)) as run:
            progress = run.progress(interval_s=0.0)
            assert next(progress)["num_steps_trained"] == 1
            thread.join()
            server.close()
            (tmp_path / "summary.json").write_text('{"steps": 2}')
            assert [one["num_steps_trained"] for one in progress] == [2]
            (tmp_path / "summary.json").unlink()
            with pytest.raises(ServiceError, match="has not answered for"):
                next(run.progress())


def answer_each(server: socket.socket, answers: list[bytes]) -> list[str]:
    """Take up one connection for each answer; the empty one hangs up. Returns the first lines heard."""
    heard = []
    for answer in answers:
        connection, _ = server.accept()
        with connection:
            heard.append(connection.recv(10_000).partition(b"\r\n")[0].decode())
            connection.sendall(answer)
    return heard


def through(answers: list[bytes], call: str, *arguments: object) -> tuple[object, list[str]]:
    """What a client's call comes to at a server that answers so, and what that one heard."""
    heard: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=lambda: heard.extend(answer_each(server, answers)))
        thread.start()
        url = f"http://127.0.0.1:{server.getsockname()[1]}"
        try:
            with Client(Address(url, TOKEN, retry_timeout_s=10)) as run:
                found: object = getattr(run, call)(*arguments)
                found = list(found) if isinstance(found, Iterator) else found
        except ServiceError as error:
            found = error.status
        thread.join()
    return found, heard


def test_a_call_whose_answer_is_lost_is_repeated() -> None:
    found, heard = through([b"", BUSY, OK], "status")
    assert (found, heard) == ({}, ["GET /v1/status HTTP/1.1"] * 3)


def lines(*found: object) -> bytes:
    body = "".join(json.dumps(line) + "\n" for line in found).encode()
    return b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(body), body)


def test_a_batch_is_asked_for_until_it_is_whole() -> None:
    one, two = {"group": "0/1"}, {"group": "0/2"}
    answers = [
        lines(one, {"is_whole": False}),
        b"",
        lines({"is_whole": False}),
        lines(two, {"is_whole": True}),
    ]
    batch, heard = through(answers, "batch", 3, ["reward"])
    assert batch == [one, two]
    assert heard[0] == "GET /v1/batches/3?after=0&wait_s=1.0&fields=reward HTTP/1.1"
    assert [line.split("&")[0][-1] for line in heard] == ["0", "1", "1", "1"]


def test_a_batch_that_nobody_can_have_any_more_is_refused() -> None:
    assert through([lines({"is_whole": False, "why": "it is trained"})], "batch", 3)[0] == 409


def test_weights_are_sent_with_their_digest() -> None:
    found, heard = through([OK], "put_weights", 4, b"tensors", {"loss": 0.5})
    digest = hashlib.sha256(b"tensors").hexdigest()
    assert heard == [f"PUT /v1/weights/4?sha256={digest}&metrics=%7B%22loss%22%3A+0.5%7D HTTP/1.1"]
    assert found == {}
    assert through([lines("x")], "get_weights", 4)[0] == b'"x"\n'


def test_a_call_that_would_do_twice_what_it_does_is_not_repeated() -> None:
    assert through([b""], "add_engines") == (503, ["POST /v1/engines HTTP/1.1"])


def test_a_refusal_in_another_form_is_told_as_well() -> None:
    assert through([b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n"], "status")[0] == 404


def test_time_that_the_service_takes_to_answer_is_no_time_without_it(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    tries = _RetryLoop(ApiCall("POST", "/"), patience_s=2.0)

    def ask() -> httpx.Response | None:
        nonlocal now_s
        assert tries.request["method"] == "POST"
        now_s += 300.0
        return tries.answer(httpx.Response(429))

    for _ in range(3):
        assert ask() is None
        now_s += 0.9  # a pause
    with pytest.raises(ServiceError):
        ask()


def test_a_service_that_is_not_there_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    gone = Address(f"http://127.0.0.1:{port}", TOKEN, retry_timeout_s=0.2)
    with Client(gone) as run, pytest.raises(ServiceError, match="is the run over") as error:
        run.status()
    assert error.value.status == 503


def test_an_address_in_use_is_found_before_anything_starts(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"service.port = {port}: cannot listen there"):
            WebGateway(ServiceSection(port=port), tmp_path)
    with pytest.raises(ConfigError, match=r"service\.host"):
        WebGateway(ServiceSection(host="256.0.0.1"), tmp_path)


@pytest.mark.parametrize(
    "token", ["short", "two words of a token", "a token in\nseveral lines of it", "ü" * 20]
)
def test_a_token_that_cannot_be_one_is_refused(tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"service\.token_file"):
        WebGateway(ServiceSection(token_file=str(tmp_path / "token")), tmp_path)


def test_a_service_that_others_can_reach_says_so(tmp_path: Path) -> None:
    run, notices = FakeRun(tmp_path), list[str]()
    (tmp_path / "token").write_text(TOKEN + "\n")
    door = WebGateway(ServiceSection(host="0.0.0.0", token_file=str(tmp_path / "token")), tmp_path)
    door.open(run.requests, notices.append)
    try:
        assert json.loads((tmp_path / "service.json").read_text())["token"] == TOKEN
        assert "other machines can reach the service" in notices[1]
    finally:
        door.close()
