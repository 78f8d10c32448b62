"""Serve the live report on this machine: the page, its data, and server-sent events that announce new data.

The address contains a token, so other users of the machine cannot open the page, and their connections cannot
keep its owner out. A slow browser occupies one thread, never the run: events carry no data, and the browser
fetches the data itself.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import SHUT_RDWR, socket
from typing import Any, NamedTuple
from urllib.parse import quote

from dora.auth_token import new_auth_token, read_auth_token
from dora.errors import InputError
from dora.journal.reader import SUMMARY_FILE
from dora.report.data import RunReader
from dora.report.page import render_page, render_payload

HOST = "127.0.0.1"
HOST_NAMES = ("127.0.0.1", "localhost", "[::1]")  # accepted in the Host header, with any port
MAX_CONNECTIONS = 64
IO_TIMEOUT_S = 10.0  # of one read or write
KEEPALIVE_S = 15.0  # time without an event; then a comment is sent to detect a closed connection
NICENESS = 5  # below the priority of the run
HEADERS = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}
POLL_S = 1.0  # minimum time between two reads of the files
MAX_CPU_FRACTION = 0.1  # of one core, for reading


def main(runs: Sequence[Path], port: int, token_file: Path | None = None) -> None:
    """Serve the page of these runs until Ctrl-C.

    Raises InputError for a missing run, an occupied port, or an invalid token file.
    """
    token = None if token_file is None else read_auth_token(token_file, "--token-file")
    watcher = RunWatcher(runs, report_error)
    with DashboardServer(watcher, port, token) as server:
        os.nice(NICENESS)
        print(f"serving {', '.join(map(str, runs))} until Ctrl-C: {server.url}", flush=True)
        threading.Thread(target=watcher.follow, name="watcher", daemon=True).start()
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            watcher.close()


def report_error(error: str) -> None:
    print(f"dora: {error}; the page keeps the data read before", file=sys.stderr, flush=True)


class DashboardServer(ThreadingHTTPServer):
    """Listens from its creation; `serve_forever` serves requests until `shutdown`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, watcher: RunWatcher, port: int, token: str | None = None) -> None:
        """Without `token` a new one is drawn. Raises InputError if the port is occupied."""
        self.watcher, self.token = watcher, quote(token or new_auth_token(), safe="")  # as in the address
        self._connections: dict[socket, bool] = {}  # -> whether it has shown the token; oldest first
        self._lock = threading.Lock()  # guards `_connections`
        try:
            super().__init__((HOST, port), DashboardHandler)
        except OSError as error:
            raise InputError(
                f"--port {port}: cannot listen there ({error.strerror}); "
                "give another port, or 0 for a free port"
            ) from error

    @property
    def url(self) -> str:
        """The address of the page; it contains the token."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """Beyond the maximum, close the oldest connection that has not shown the token, possibly this one."""
        with self._lock:
            self._connections[request] = False
            if len(self._connections) > MAX_CONNECTIONS:
                oldest = next(each for each, is_known in self._connections.items() if not is_known)
                del self._connections[oldest]
                with suppress(OSError):  # the client has closed it
                    oldest.shutdown(SHUT_RDWR)  # ends the read of its thread, which closes it
                if oldest is request:
                    self.shutdown_request(request)
                    return
        super().process_request(request, client_address)

    def keep(self, request: socket) -> bool:
        """The connection has shown the token. False: it was closed before."""
        with self._lock:
            if request in self._connections:
                self._connections[request] = True
            return request in self._connections

    def process_request_thread(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """Serve one connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._connections.pop(request, None)

    def handle_error(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """Print errors, except a connection that the browser closed."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class DashboardHandler(BaseHTTPRequestHandler):
    """One connection with one request."""

    server: DashboardServer
    timeout = IO_TIMEOUT_S

    def do_GET(self) -> None:
        """Send the page, its data, or the event stream."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in HOST_NAMES:  # DNS rebinding: a foreign page under a name that resolves to this machine
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine only")
            return
        token, _, path = self.path.partition("?")[0][1:].partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "open the address that `dora dash` has printed")
            return
        if not self.server.keep(self.connection):
            return
        try:
            if path == "":
                self._send("text/html; charset=utf-8", self.server.watcher.page())
            elif path == "data":
                self._send("application/json", self.server.watcher.payload())
            elif path == "events":
                self._stream_events()
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except InputError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))

    def log_message(self, format: str, *args: object) -> None:
        """Print no access log."""

    def _send(self, content_type: str, text: str) -> None:
        body = text.encode()
        self._send_headers(content_type, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _send_headers(self, content_type: str, headers: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in ({"Content-Type": content_type} | headers | HEADERS).items():
            self.send_header(name, value)
        self.end_headers()

    def _stream_events(self) -> None:
        """Send an event for each update, and one at once: the page may have missed an update."""
        self._send_headers("text/event-stream", {})
        watcher, number = self.server.watcher, -1
        with watcher.watching():
            while not watcher.is_closed:
                update = watcher.wait(number, KEEPALIVE_S)
                number = number if update is None else update.number
                self.wfile.write(b": keepalive\n\n" if update is None else _event(update))
                self.wfile.flush()


class RunUpdate(NamedTuple):
    """The number of updates so far, and whether all runs have finished."""

    number: int
    is_finished: bool


def _event(update: RunUpdate) -> bytes:
    end = f"event: end\ndata: {update.number}\n\n" if update.is_finished else ""
    return f"event: change\ndata: {update.number}\n\n{end}".encode()


class RunWatcher:
    """Reads the files of runs while a browser is connected, and announces updates.

    Reading takes a small fraction of one core however long the runs are: the more a read costs, the longer
    the pause after it. One watcher serves all browsers; its methods may be called from any thread.
    """

    def __init__(
        self, folders: Sequence[Path], on_error: Callable[[str], None], poll_s: float = POLL_S
    ) -> None:
        """Read the runs once; later errors go to `on_error`. Raises InputError for a missing run."""
        self._folders, self._on_error, self._poll_s = folders, on_error, poll_s
        self._readers = [RunReader(folder) for folder in folders]
        self._reading = threading.Lock()  # guards the readers and their data
        self._data: tuple[int, list[dict[str, Any]]] | None = None  # with the number of its update
        self._changed = threading.Condition()  # guards the rest
        self._update = RunUpdate(0, False)
        self._num_watching = 0
        self.is_closed = False
        self._cpu_s = 0.0  # since the last read
        self._error = ""
        self._refresh()
        self._cpu_s = 0.0  # the first read delays no other

    def page(self) -> str:
        """The page with current data."""
        self.poll()
        return render_page(self._runs(), live=True)

    def payload(self) -> str:
        """The data that the page fetches after an update."""
        return render_payload(self._runs())

    @contextmanager
    def watching(self) -> Iterator[None]:
        """The files are read while at least one such context is open."""
        self._change_num_watching(1)
        try:
            yield
        finally:
            self._change_num_watching(-1)

    def wait(self, number: int, timeout_s: float) -> RunUpdate | None:
        """The next update after `number`; None after the timeout or `close`."""
        with self._changed:
            self._changed.wait_for(lambda: self._update.number > number or self.is_closed, timeout_s)
            return self._update if self._update.number > number and not self.is_closed else None

    def follow(self) -> None:
        """Read the files again and again until `close`."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._num_watching > 0 or self.is_closed)
            if self.is_closed:
                return
            self.poll()
            with self._changed:
                pause_s, self._cpu_s = max(self._poll_s, self._cpu_s / MAX_CPU_FRACTION), 0.0
                self._changed.wait_for(lambda: self.is_closed, pause_s)

    def close(self) -> None:
        """End `follow` and all waits."""
        with self._changed:
            self.is_closed = True
            self._changed.notify_all()

    def poll(self) -> None:
        """Read the files once. If they cannot be read, the data stays as it was."""
        try:
            self._refresh()
            message = ""
        except (InputError, OSError) as error:
            message = str(error)
        if message and message != self._error:
            self._on_error(message)
        self._error = message

    def _refresh(self) -> None:
        with self._reading, self._measure_cpu():
            is_new = any([reader.refresh() for reader in self._readers])  # a list: refresh every reader
            is_finished = all((folder / SUMMARY_FILE).is_file() for folder in self._folders)
        with self._changed:
            if is_new or is_finished != self._update.is_finished:
                self._update = RunUpdate(self._update.number + 1, is_finished)
                self._changed.notify_all()

    def _runs(self) -> list[dict[str, Any]]:
        """The data of all runs, computed once for each update."""
        with self._reading:
            number = self._update.number
            if self._data is None or self._data[0] != number:
                with self._measure_cpu():
                    self._data = (number, [reader.data() for reader in self._readers])
            return self._data[1]

    def _change_num_watching(self, change: int) -> None:
        with self._changed:
            self._num_watching += change
            self._changed.notify_all()

    @contextmanager
    def _measure_cpu(self) -> Iterator[None]:
        started_s = time.thread_time()
        try:
            yield
        finally:
            with self._changed:
                self._cpu_s += time.thread_time() - started_s
