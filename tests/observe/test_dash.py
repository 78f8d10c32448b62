"""The page that follows a run: it hears of what is new, only reads, and no browser can hold it up."""

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
from tests.observe.following import WAIT_S, append, half_of, journal, rest_of, served
from tests.observe.recording import record_run, world_config

from dora.core.records import RequestId
from dora.errors import InputError
from dora.observe.dash import server
from dora.observe.dash.server import HOST, Dash
from dora.observe.dash.watch import Watch
from dora.stream.samples import SampleStore, Trajectory


class Browser:
    """What a browser does, without its page."""

    def __init__(self, dash: Dash) -> None:
        self._port, self._token = dash.server_address[1], dash.token

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
        """Gives the name of the next event, whenever it comes."""
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
    with served(*runs) as dash:
        yield Browser(dash)


@pytest.fixture
def run(good_run: Path, tmp_path: Path) -> Path:
    """A run that can be changed; half of its journal is written."""
    return half_of(good_run, tmp_path / "run")


def test_the_page_needs_nothing_from_elsewhere_and_is_not_kept(run: Path) -> None:
    with opened(run) as browser:
        status, headers, body = browser.get("/")
    assert status == 200
    assert headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store"
    assert headers["X-Frame-Options"] == "DENY"
    assert b"EventSource" in body
    assert b'src="http' not in body


def test_news_are_told_and_can_be_fetched(good_run: Path, run: Path) -> None:
    with opened(run) as browser, browser.events() as next_event:
        assert next_event() == "change"
        [before] = browser.data()
        append(run, rest_of(good_run, run))
        assert next_event() == "change"
        [after] = browser.data()
    assert after["to_s"] > before["to_s"]


def test_a_torn_last_line_is_waited_for(good_run: Path, run: Path) -> None:
    rest = rest_of(good_run, run)
    with opened(run) as browser, browser.events() as next_event:
        next_event()
        [before] = browser.data()
        append(run, rest[:10])
        assert next_event() == "change"
        assert browser.data()[0]["to_s"] == before["to_s"]
        append(run, rest[10:])
        assert next_event() == "change"
        assert browser.data()[0]["to_s"] > before["to_s"]


def test_the_end_is_told_and_taken_back_when_the_run_goes_on(good_run: Path, run: Path) -> None:
    rest = rest_of(good_run, run)
    with opened(run) as browser, browser.events() as next_event:
        assert next_event() == "change"
        (run / "summary.json").write_text("{}")
        assert [next_event(), next_event()] == ["change", "end"]
        (run / "summary.json").unlink()
        assert next_event() == "change"
        append(run, rest)
        assert next_event() == "change"  # and no end in between


def test_a_browser_that_comes_later_hears_of_the_end(run: Path) -> None:
    (run / "summary.json").write_text("{}")
    with opened(run) as browser, browser.events() as next_event:
        assert [next_event(), next_event()] == ["change", "end"]


def test_several_runs_are_on_one_page(run: Path, early_run: Path) -> None:
    with opened(run, early_run) as browser:
        assert [each["name"] for each in browser.data()] == ["run", "early"]


def test_files_that_vanish_leave_what_was_read(run: Path) -> None:
    with opened(run) as browser, browser.events() as next_event:
        next_event()
        text = journal(run).read_text()
        journal(run).unlink()
        assert browser.get("/")[0] == 200
        journal(run).write_text(text[: text.index("\n", len(text) // 3) + 1])
        assert next_event() == "change"  # another journal: it is read from its beginning


def test_nothing_in_the_folder_changes(run: Path) -> None:
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    with opened(run) as browser:
        browser.get("/")
        browser.data()
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_a_store_that_is_being_written_is_read_and_never_held_up(tmp_path: Path) -> None:
    run = record_run(tmp_path / "run", world_config(), seed=1, max_facts=60)
    store = SampleStore(run / "samples.sqlite")
    with opened(run) as browser:
        for row in range(20):
            store.put(Trajectory(RequestId(9, row, 0), 0, "d", [1], [2, 3], [-0.5, -0.5]))
            browser.data()
    store.close()
    assert not (run / "samples.sqlite-wal").exists()


def test_files_are_read_only_while_somebody_looks(good_run: Path, run: Path) -> None:
    watch = Watch([run], complain=lambda trouble: None)
    follower = threading.Thread(target=watch.follow)
    follower.start()
    append(run, rest_of(good_run, run))
    first = watch.wait(0, 0.0)
    assert first is not None
    assert watch.wait(first.number, 0.3) is None
    with watch.watching():
        assert watch.wait(first.number, WAIT_S) is not None
    watch.close()
    follower.join(WAIT_S)
    assert not follower.is_alive()


def test_a_browser_that_does_not_read_holds_up_nobody(run: Path) -> None:
    with opened(run) as browser:
        idle = [browser.connect() for _ in range(5)]
        for connection in idle:
            connection.sendall(f"GET {browser.path('/data')} HTTP/1.1\r\nHost: {HOST}\r\n\r\n".encode())
        with browser.events() as next_event:
            assert next_event() == "change"
        assert browser.get("/")[0] == 200
        for connection in idle:
            connection.close()


def test_more_connections_than_there_may_be_are_closed_at_once(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 2)
    with opened(run) as browser:
        silent = [browser.connect(), browser.connect()]
        with browser.connect() as third:
            assert third.recv(1) == b""
        for connection in silent:
            connection.close()


@pytest.mark.parametrize("path", ["/journal.jsonl", "/../config.toml", "/data/", "/index.html"])
def test_there_is_nothing_else_to_get(run: Path, path: str) -> None:
    with opened(run) as browser:
        assert browser.get(path)[0] == 404


def test_pages_from_elsewhere_are_refused(run: Path) -> None:
    with opened(run) as browser:
        assert browser.get("/data", host="evil.example")[0] == 403
        assert browser.get("/data", host="localhost")[0] == 200


@pytest.mark.parametrize("path", ["/", "/data", "/events", "/another-token/data", "//data", "/%00/"])
def test_who_does_not_know_the_address_finds_nothing(run: Path, path: str) -> None:
    with opened(run) as browser, browser.connect() as connection:
        connection.sendall(f"GET {path} HTTP/1.0\r\nHost: {HOST}\r\n\r\n".encode())
        answer = connection.makefile("rb").read()
    assert answer.split()[1] == b"403"
    assert b"max_staleness" not in answer


def test_a_port_that_is_taken_is_named(run: Path) -> None:
    watch = Watch([run], complain=lambda trouble: None)
    with Dash(watch, 0) as dash:
        port = dash.server_address[1]
        with pytest.raises(InputError, match=f"--port {port}: cannot listen there"):
            Dash(watch, port)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is not the folder of a run"):
        Watch([tmp_path], complain=lambda trouble: None)


def test_the_command_says_where_the_page_is_and_ends_with_ctrl_c(run: Path) -> None:
    command = [sys.executable, "-m", "dora", "dash", str(run), "--port", "0"]

    def hear_ctrl_c() -> None:  # which a shell has its background jobs ignore
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, preexec_fn=hear_ctrl_c) as process:
        assert process.stdout is not None
        url = process.stdout.readline().split()[-1]
        with urllib.request.urlopen(url, timeout=WAIT_S) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(WAIT_S) == 0
