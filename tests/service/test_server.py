"""The web server checks its address and auth token before the run starts, and warns of remote access."""

from __future__ import annotations

import json
import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from tests.service.fake_run import RUN_END, TOKEN, FakeRun

from dora.config.schema import ServiceSection
from dora.errors import ConfigError
from dora.service.server import WebGateway


def test_an_occupied_or_unknown_address_is_refused(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        with pytest.raises(ConfigError, match=f"service.port = {port}: cannot listen there"):
            WebGateway(ServiceSection(port=port), tmp_path)
    with pytest.raises(ConfigError, match=r"service\.host"):
        WebGateway(ServiceSection(host="256.0.0.1"), tmp_path)


def bind_as_nobody(tmp_path: Path, port: int) -> str:
    """The error of a service on this port, in a process without the rights of root."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.setuid(65534)
            WebGateway(ServiceSection(port=port), tmp_path)
        except ConfigError as error:
            os.write(writer, str(error).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with open(reader, encoding="utf-8") as file:
        message = file.read()
    os.waitpid(pid, 0)
    return message


@pytest.mark.skipif(os.getuid() != 0, reason="needs root, to give up its rights")
def test_a_port_that_needs_root_is_refused_with_a_remedy(tmp_path: Path) -> None:
    first_free = int(Path("/proc/sys/net/ipv4/ip_unprivileged_port_start").read_text())
    if first_free <= 80:
        pytest.skip("no port needs root here")
    tmp_path.chmod(0o777)
    assert bind_as_nobody(tmp_path, 80) == (
        "service.host = '127.0.0.1', service.port = 80: cannot listen there: ports below 1024 need the "
        "rights of root; choose a port from 1024 on, or remove service.port to use a free port"
    )


@pytest.mark.parametrize(
    "token", ["short", "two words of a token", "a token in\nseveral lines of it", "ü" * 20]
)
def test_an_invalid_token_is_refused(tmp_path: Path, token: str) -> None:
    (tmp_path / "token").write_text(token, encoding="utf-8")
    with pytest.raises(ConfigError, match=r"service\.token_file"):
        WebGateway(ServiceSection(token_file=str(tmp_path / "token")), tmp_path)


def test_a_service_that_other_machines_reach_logs_a_warning(tmp_path: Path) -> None:
    run, notices = FakeRun(tmp_path), list[str]()
    (tmp_path / "token").write_text(TOKEN + "\n")
    gateway = WebGateway(ServiceSection(host="0.0.0.0", token_file=str(tmp_path / "token")), tmp_path)
    gateway.open(run.requests, notices.append)
    try:
        assert json.loads((tmp_path / "service.json").read_text())["token"] == TOKEN
        assert "reachable from other machines" in notices[1]
    finally:
        gateway.close(lambda: True)


@contextmanager
def ended(tmp_path: Path, **settings: float) -> Iterator[tuple[WebGateway, str, list[str]]]:
    """A service with these settings whose run has ended, its URL and its notices."""
    run, notices = FakeRun(tmp_path), list[str]()
    gateway = WebGateway(ServiceSection.model_validate(settings), tmp_path)
    gateway.open(run.requests, notices.append)
    run.requests.close(RUN_END)
    gateway.end(RUN_END)
    try:
        yield gateway, gateway.url, notices
    finally:
        gateway.close(lambda: True)


def test_a_service_answers_for_a_while_how_its_run_has_ended(tmp_path: Path) -> None:
    with ended(tmp_path, linger_s=0.5) as (gateway, url, notices):
        closing = threading.Thread(target=gateway.close, args=(lambda: False,))
        closing.start()
        response = httpx.get(f"{url}/health")
        assert (response.status_code, response.json()["error"]["message"]) == (410, "the run has ended")
        assert not (tmp_path / "service.json").exists()
        closing.join(20)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
    assert "answers all requests with status 410" in notices[-1]


@pytest.mark.parametrize(("linger_s", "is_urgent"), [(0.0, False), (1000.0, True)])
def test_a_service_ends_with_its_run_if_it_should(tmp_path: Path, linger_s: float, is_urgent: bool) -> None:
    with ended(tmp_path, linger_s=linger_s) as (gateway, url, notices):
        gateway.close(lambda: is_urgent)
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")
        assert len(notices) == 1


def test_requests_in_progress_are_finished_before_the_run_takes_its_files_away(tmp_path: Path) -> None:
    run, started, release = FakeRun(tmp_path), threading.Event(), threading.Event()
    gateway = WebGateway(ServiceSection(), tmp_path)
    gateway.open(run.requests, lambda line: None)
    headers = {"Authorization": f"Bearer {json.loads((tmp_path / 'service.json').read_text())['token']}"}
    statuses = []

    def hold() -> Iterator[bytes]:
        yield b"{"
        started.set()
        release.wait(20)
        yield b"}"

    def post() -> None:
        url = f"{gateway.url}/v1/engines"
        kind = {"content-type": "application/json"}
        statuses.append(httpx.post(url, content=hold(), headers=headers | kind, timeout=20).status_code)

    client, ending = threading.Thread(target=post), threading.Thread(target=gateway.end, args=(RUN_END,))
    client.start()
    started.wait(20)
    while gateway.num_requests == 0:
        release.wait(0.01)
    ending.start()
    assert httpx.get(f"{gateway.url}/v1/status", headers=headers).status_code == 410
    assert ending.is_alive()
    release.set()
    ending.join(20)
    client.join(20)
    assert statuses == [202]
    gateway.close(lambda: True)


def test_agents_are_told_what_to_do_at_the_start(tmp_path: Path) -> None:
    run, notices = FakeRun(tmp_path, service__agents="true"), list[str]()
    gateway = WebGateway(ServiceSection(agents=True), tmp_path)
    address = gateway.open(run.requests, notices.append)
    try:
        assert address.token_file == tmp_path.absolute() / "service.json"
        assert notices[-1] == f"agents: {address.for_agents}"
        for part in (f"PUT {gateway.url}/v1/sessions/NAME", f"{gateway.url}/s/NAME/v1", "service.json"):
            assert part in notices[-1]
    finally:
        gateway.close(lambda: True)
