"""Joining a Ray cluster that does not reply fails in time, with a remedy. Needs no Ray."""

from __future__ import annotations

import socket
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dora.errors import RunError
from dora.runtime.process import ray_connect
from dora.runtime.process.ray_connect import (
    RayHead,
    check_reachable,
    join_with_timeout,
    make_private_token,
    token_source,
)


@pytest.fixture
def server() -> Iterator[socket.socket]:
    """A bound socket that does not listen."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        yield made


def test_an_address_where_nothing_listens_is_rejected_at_once(server: socket.socket) -> None:
    address = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(RunError, match=f"ray.address = '{address}' is not reachable .*ray start --head"):
        check_reachable(address)
    server.listen()
    check_reachable(address)


def test_a_lost_head_is_not_contacted_again_for_a_while(server: socket.socket) -> None:
    server.listen()
    head = RayHead(f"127.0.0.1:{server.getsockname()[1]}")
    assert head.is_reachable
    server.close()
    assert not head.is_reachable
    host, _, port = head.address.rpartition(":")
    with socket.create_server((host, int(port))):
        assert not head.is_reachable
        assert RayHead(head.address).is_reachable


def time_out() -> None:
    raise TimeoutError("of the call")


def test_a_call_of_ray_ends_once_the_head_is_lost(
    server: socket.socket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The call waits for a reply that never comes."""
    monkeypatch.setattr(ray_connect, "HEAD_POLL_S", 0.02)
    server.listen()
    head = RayHead(f"127.0.0.1:{server.getsockname()[1]}")
    assert head.call(lambda: 7) == 7
    with pytest.raises(TimeoutError, match="of the call"):
        head.call(time_out)
    has_ended = threading.Event()
    threading.Timer(0.1, server.close).start()
    with pytest.raises(RunError, match=f"the head of the Ray cluster at {head.address} is lost; check"):
        head.call(has_ended.wait)
    has_ended.set()


@pytest.mark.parametrize(("needed_s", "timeout_s", "succeeds", "num_notices"), [
    (0.0, 60.0, True, 0), (9.0, 60.0, True, 1), (99.0, 60.0, False, 1), (9.0, 2.0, False, 0)
])  # fmt: skip
def test_a_long_wait_for_resources_is_reported_once(
    needed_s: float, timeout_s: float, succeeds: bool, num_notices: int
) -> None:
    waited_s, notices = [0.0], list[str]()

    def wait(seconds: float) -> bool:
        waited_s[0] += seconds
        return waited_s[0] >= needed_s

    assert ray_connect.wait_with_notice(wait, timeout_s, lambda: notices.append("no room")) == succeeds
    assert len(notices) == num_notices


@pytest.mark.parametrize("address", ["127.0.0.1:99999", "no..name:6379"])
def test_an_invalid_address_is_rejected(address: str) -> None:
    with pytest.raises(RunError, match="is not reachable"):
        check_reachable(address)


def test_the_error_names_the_address_that_auto_stands_for(server: socket.socket) -> None:
    resolved = f"127.0.0.1:{server.getsockname()[1]}"
    with pytest.raises(RunError, match=f"ray.address = 'auto', which is {resolved}, is not reachable"):
        check_reachable("auto", resolved)


def test_joining_a_cluster_that_hangs_times_out(server: socket.socket) -> None:
    """The join waits for a reply that never comes."""
    server.listen()
    connection = socket.create_connection(server.getsockname())
    with (
        connection,
        pytest.raises(RunError, match=r"ray.address = 'auto' .* runtime.start_timeout_s = 0.05 s; check"),
    ):
        join_with_timeout(lambda: connection.recv(1), "auto", 0.05)


def test_the_error_of_a_failed_join_is_raised() -> None:
    def fail() -> None:
        raise ConnectionError("versions differ")

    with pytest.raises(ConnectionError, match="versions differ"):
        join_with_timeout(fail, "auto", 10.0)
    join_with_timeout(lambda: None, "auto", 10.0)


def test_only_the_owner_can_read_the_auth_token_that_ray_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.delenv("RAY_AUTH_TOKEN_PATH", raising=False)
    file = Path(token_source())
    assert file == tmp_path / ".ray" / "auth_token"
    make_private_token()
    token = file.read_text()
    assert len(token) >= 32
    file.chmod(0o644)  # as Ray makes it
    make_private_token()
    assert (file.read_text(), stat.S_IMODE(file.stat().st_mode)) == (token, 0o600)
    assert [*file.parent.iterdir()] == [file]


def test_a_token_of_your_own_is_left_alone_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = tmp_path / "token"
    own.touch(0o644)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("RAY_AUTH_TOKEN", raising=False)
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", str(own))
    make_private_token()
    assert token_source() == str(own)
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    make_private_token()
    assert token_source() == "the environment variable RAY_AUTH_TOKEN"
    assert stat.S_IMODE(own.stat().st_mode) == 0o644
    assert [*tmp_path.iterdir()] == [own]
