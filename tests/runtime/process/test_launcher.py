"""Before Ray is asked: what it would wait for in vain, or open to everybody, is refused. Needs no Ray."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.runtime.tiny import write_task

from dora.config import load
from dora.errors import ConfigError, RunError
from dora.runtime.process import launcher


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """Bound; it listens if it is told to."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def test_an_address_where_nobody_listens_is_refused_at_once(server: socket.socket) -> None:
    address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(RunError, match=f"ray.address = '{address}': nobody answers there .*ray start --head"):
        launcher.check_reachable(address)
    server.listen()
    launcher.check_reachable(address)


def test_a_head_that_has_gone_is_left_alone_for_a_while(server: socket.socket) -> None:
    server.listen()
    head = launcher.RayHead(f"127.0.0.1:{server.getsockname()[1]}")
    assert head.is_reachable
    server.close()
    assert not head.is_reachable
    with socket.create_server(server_address(head)):
        assert not head.is_reachable
        assert launcher.RayHead(head.address).is_reachable


def server_address(head: launcher.RayHead) -> tuple[str, int]:
    """Where it was."""
    host, _, port = head.address.rpartition(":")
    return host, int(port)


@pytest.mark.parametrize(("took_s", "limit_s", "is_there", "num_told"), [
    (0.0, 60.0, True, 0), (9.0, 60.0, True, 1), (99.0, 60.0, False, 1), (9.0, 2.0, False, 0)
])  # fmt: skip
def test_a_wait_for_room_is_told_of_once_it_takes_a_while(
    took_s: float, limit_s: float, is_there: bool, num_told: int
) -> None:
    waited_s, told = [0.0], list[str]()

    def wait(seconds: float) -> bool:
        waited_s[0] += seconds
        return waited_s[0] >= took_s

    assert launcher.wait_with_notice(wait, limit_s, lambda: told.append("no room")) == is_there
    assert len(told) == num_told


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no..name:6379"])
def test_an_address_that_cannot_be_is_refused(address: str) -> None:
    with pytest.raises(RunError, match="nobody answers there"):
        launcher.check_reachable(address)


def test_where_auto_leads_is_told_if_nobody_answers_there(server: socket.socket) -> None:
    found = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(RunError, match=f"ray.address = 'auto': nobody answers at {found}, where it leads"):
        launcher.check_reachable("auto", found)


def test_a_cluster_that_answers_and_lets_nobody_in_is_given_up(server: socket.socket) -> None:
    """It hangs, as the server does that is never read from."""
    server.listen()
    own = socket.create_connection(server.getsockname())
    with (
        own,
        pytest.raises(RunError, match=r"ray.address = 'auto': .* runtime.start_timeout_s = 0.05 s; ask"),
    ):
        launcher.join_with_timeout(lambda: own.recv(1), "auto", 0.05)


def test_who_joins_hears_why_it_cannot() -> None:
    def refuse() -> None:
        raise ConnectionError("versions differ")

    with pytest.raises(ConnectionError, match="versions differ"):
        launcher.join_with_timeout(refuse, "auto", 10.0)
    launcher.join_with_timeout(lambda: None, "auto", 10.0)


def test_ray_is_not_started_for_whoever_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "find_spec", lambda name: name)  # as if Ray were installed
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    config = load.read_config(write_task(tmp_path), ["runtime.kind=ray"])
    with pytest.raises(ConfigError, match=r"RAY_AUTH_MODE = 'disabled'.*unset it, or start Ray yourself"):
        launcher.check_ray_config(config)
    launcher.check_ray_config(
        load.read_config(tmp_path / "task.toml", ["runtime.kind=ray", "ray.address=auto"])
    )
