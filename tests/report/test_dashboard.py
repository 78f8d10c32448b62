"""The dashboard announces new data, only reads files, and is never blocked by a browser."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tests.journal.recorded_runs import record_run, world_config
from tests.report.live_runs import WAIT_S, append, half_of, journal, rest_of, served

from dora.core.types import RequestId
from dora.dashboard import server
from dora.dashboard.server import HOST, DashboardServer, RunWatcher
from dora.errors import InputError
from dora.stream.sample_db import SampleStore, Trajectory


class Browser:
    """The requests of a browser."""

    def __init__(self, server: DashboardServer) -> None:
        self._port, self._token = server.server_address[1], server.token

    def path(self, path: str) -> str:
        return f"/{self._token}{path}"

    def get(self, path: str, host: str = HOST) -> tuple[int, http.client.HTTPMessage, bytes]:
        connection = http.client.HTTPConnection(HOST, self._port, timeout=WAIT_S)
        connection.request("GET", self.path(path), headers={"Host": f"{host}:{self._port}"})
        response = connection.getresponse()
        return response.status, response.headers, response.read()

    def data(self) -> list[dict[str, Any]]:
        status, _, body = self.get("/data")
        assert status == 200
        runs: list[dict[str, Any]] = json.loads(body)
        return runs

    @contextmanager
    def events(self) -> Iterator[Callable[[], str]]:
        """Yields a function that waits for the next event and returns its name."""
        connection = http.client.HTTPConnection(HOST, self._port, timeout=WAIT_S)
        connection.request("GET", self.path("/events"))
        response = connection.getresponse()
        assert response.headers["Content-Type"] == "text/event-stream"

        def next_event() -> str:
            while line := response.readline().decode():
                if line.startswith("event: "):
                    return line.removeprefix("event: ").strip()
            return "closed"

        yield next_event
        response.close()
        connection.close()

    def connect(self) -> socket.socket:
        return socket.create_connection((HOST, self._port), timeout=WAIT_S)


@contextmanager
def opened(*runs: Path) -> Iterator[Browser]:
    with served(*runs) as dashboard:
        yield Browser(dashboard)


@pytest.fixture
def run(finished_run: Path, tmp_path: Path) -> Path:
    """A copy of a run; half of its journal is written."""
    return half_of(finished_run, tmp_path / "run")


def test_the_page_is_self_contained_and_not_cached(run: Path) -> None:
    with opened(run) as browser:
        status, headers, body = browser.get("/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert b"EventSource" in body
    assert b'src="http' not in body


def test_new_data_is_announced_and_can_be_fetched(finished_run: Path, run: Path) -> None:
    with opened(run) as browser, browser.events() as next_event:
        assert next_event() == "change"
        [before] = browser.data()
        append(run, rest_of(finished_run, run))
        assert next_event() == "change"
        [after] = browser.data()
    assert after["to_s"] > before["to_s"]


def test_a_torn_last_line_is_read_once_it_is_complete(finished_run: Path, run: Path) -> None:
    rest = rest_of(finished_run, run)
    with opened(run) as browser, browser.events() as next_event:
        next_event()
        [before] = browser.data()
        append(run, rest[:10])
        assert next_event() == "change"
        assert browser.data()[0]["to_s"] == before["to_s"]
        append(run, rest[10:])
        assert next_event() == "change"
        assert browser.data()[0]["to_s"] > before["to_s"]


def test_the_end_is_announced_and_revoked_by_a_resume(finished_run: Path, run: Path) -> None:
    rest = rest_of(finished_run, run)
    with opened(run) as browser, browser.events() as next_event:
        assert next_event() == "change"
        (run / "summary.json").write_text("{}")
        assert [next_event(), next_event()] == ["change", "end"]
        (run / "summary.json").unlink()
        assert next_event() == "change"
        append(run, rest)
        assert next_event() == "change"  # and no end in between


def test_a_browser_that_connects_later_gets_the_end(run: Path) -> None:
    (run / "summary.json").write_text("{}")
    with opened(run) as browser, browser.events() as next_event:
        assert [next_event(), next_event()] == ["change", "end"]


def test_one_page_can_have_several_runs(run: Path, stopped_run: Path) -> None:
    with opened(run, stopped_run) as browser:
        assert [each["name"] for each in browser.data()] == ["run", "stopped"]


def test_missing_files_leave_the_data_as_it_was(run: Path) -> None:
    with opened(run) as browser, browser.events() as next_event:
        next_event()
        text = journal(run).read_text()
        journal(run).unlink()
        assert browser.get("/")[0] == 200
        journal(run).write_text(text[: text.index("\n", len(text) // 3) + 1])
        assert next_event() == "change"  # another journal: it is read from its beginning


def test_the_run_folder_does_not_change(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with opened(run) as browser:
        browser.get("/")
        browser.data()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_sample_store_is_read_while_it_is_written(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", world_config(), seed=1, max_events=60)
    store = SampleStore(run / "samples.sqlite")
    with opened(run) as browser:
        for row in range(20):
            store.put(Trajectory(RequestId(9, row, 0), 0, "d", [1], [2, 3], [-0.5, -0.5]))
            browser.data()
    store.close()
    assert not (run / "samples.sqlite-wal").exists()


def test_files_are_read_only_while_a_browser_is_connected(finished_run: Path, run: Path) -> None:
    watcher = RunWatcher([run], on_error=lambda error: None)
    follower = threading.Thread(target=watcher.follow)
    follower.start()
    append(run, rest_of(finished_run, run))
    first = watcher.wait(0, 0.0)
    assert first is not None
    assert watcher.wait(first.number, 0.3) is None
    with watcher.watching():
        assert watcher.wait(first.number, WAIT_S) is not None
    watcher.close()
    follower.join(WAIT_S)
    assert not follower.is_alive()


def test_a_browser_that_does_not_read_blocks_no_other(run: Path) -> None:
    with opened(run) as browser:
        idle = [browser.connect() for _ in range(5)]
        for connection in idle:
            connection.sendall(f"GET {browser.path('/data')} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        with browser.events() as next_event:
            assert next_event() == "change"
        assert browser.get("/")[0] == 200
        for connection in idle:
            connection.close()


def test_connections_without_the_token_do_not_keep_the_owner_out(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with opened(run) as browser:
        idle = [browser.connect() for _ in range(8)]
        for connection in idle[:-2]:
            assert connection.recv(1) == b""
        assert browser.get("/")[0] == 200
        for connection in idle:
            connection.close()


def test_a_connection_beyond_the_maximum_of_the_owner_is_closed(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with opened(run) as browser, browser.events() as first, browser.events() as second:
        assert (first(), second()) == ("change", "change")
        with browser.connect() as third:
            assert third.recv(1) == b""


@pytest.mark.parametrize("path", ["/journal.jsonl", "/../config.toml", "/data/", "/index.html"])
def test_other_paths_are_not_found(run: Path, path: str) -> None:
    with opened(run) as browser:
        assert browser.get(path)[0] == 404


def test_pages_of_other_hosts_are_rejected(run: Path) -> None:
    with opened(run) as browser:
        assert browser.get("/data", host="evil.example")[0] == 403
        assert browser.get("/data", host="localhost")[0] == 200


@pytest.mark.parametrize("path", ["/", "/data", "/events", "/another-token/data", "//data", "/%00/"])
def test_a_request_without_the_token_is_rejected(run: Path, path: str) -> None:
    with opened(run) as browser, browser.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
        answer = connection.makefile("rb").read()
    assert answer.split()[1] == b"403"
    assert b"max_staleness" not in answer


def test_an_occupied_port_is_named(run: Path) -> None:
    watcher = RunWatcher([run], on_error=lambda error: None)
    with DashboardServer(watcher, 0) as dashboard:
        port = dashboard.server_address[1]
        with pytest.raises(InputError, match=f"--port {port}: cannot listen there"):
            DashboardServer(watcher, port)


def test_the_command_prints_the_address_and_ends_with_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "dora", "dash", str(run), "--port", "0"]

    def enable_ctrl_c() -> None:  # a shell disables it for background jobs
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=enable_ctrl_c) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
