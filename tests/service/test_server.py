"""The web server checks its address and auth token before the run starts, and warns of remote access."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import pytest
from tests.service.fake_run import TOKEN, FakeRun

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
        gateway.close()
