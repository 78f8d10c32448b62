"""The page over HTTP, on this machine only: the page, its data, and server-sent events that say when to ask.

Its address begins with a token, so that other users of the machine find nothing. A browser that is slow or
gone holds a thread for some seconds, and nothing else: of news only the newest is sent, and the data is
fetched by the browser itself.
"""

from __future__ import annotations

import os
import secrets
import sys
import threading
from collections.abc import Sequence
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import socket
from urllib.parse import quote

from dora.errors import InputError
from dora.observe.dash.watch import News, Watch
from dora.tokens import new_token, read_token

HOST = "127.0.0.1"
NAMES = ("127.0.0.1", "localhost", "[::1]")  # by which a browser may have come, whatever the port
MAX_CONNECTIONS = 64
IO_S = 10.0  # that one message may take, either way
KEEP_S = 15.0  # of silence, after which a comment shows whether the browser is still there
NICE = 5  # the run goes first
POLICY = {
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
}


class Dash(ThreadingHTTPServer):
    """Listens from its making on; `serve_forever` answers until `shutdown`."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, watch: Watch, port: int, token: str | None = None) -> None:
        """Without a `token` it makes one. Raises InputError where the port is taken."""
        self.watch, self.token = watch, quote(token or new_token(), safe="")  # as it is in the address
        self._seats = threading.BoundedSemaphore(MAX_CONNECTIONS)
        try:
            super().__init__((HOST, port), Answer)
        except OSError as error:
            raise InputError(
                f"--port {port}: cannot listen there ({error.strerror}); give another, or 0 for a free one"
            ) from error

    @property
    def url(self) -> str:
        """Where the page is; who knows it may look."""
        return f"http://{HOST}:{self.server_address[1]}/{self.token}/"

    def process_request(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """Connections beyond the most there may be are closed at once."""
        if self._seats.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """One thread for each connection."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._seats.release()

    def handle_error(self, request: socket, client_address: tuple[str, int]) -> None:  # type: ignore[override]
        """A browser that goes in the middle of an answer is no error; all else is shown in the terminal."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class Answer(BaseHTTPRequestHandler):
    """One connection, and one answer."""

    server: Dash
    timeout = IO_S

    def do_GET(self) -> None:
        """The page, its data, or the news; nothing here changes anything."""
        host = self.headers.get("Host", "").rpartition(":")[0] or self.headers.get("Host", "")
        if host not in NAMES:  # a page from elsewhere, whose name was made to lead here
            self.send_error(HTTPStatus.FORBIDDEN, "this page is for this machine only")
            return
        token, _, path = self.path.partition("?")[0][1:].partition("/")
        if not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self.send_error(HTTPStatus.FORBIDDEN, "open the address that `dora dash` has printed")
            return
        try:
            if path == "":
                self._send("text/html; charset=utf-8", self.server.watch.page())
            elif path == "data":
                self._send("application/json", self.server.watch.payload())
            elif path == "events":
                self._tell()
            else:
                self.send_error(HTTPStatus.NOT_FOUND)
        except InputError as error:
            self.send_error(HTTPStatus.SERVICE_UNAVAILABLE, explain=str(error))

    def log_message(self, format: str, *args: object) -> None:
        """The terminal is for what matters."""

    def _send(self, kind: str, text: str) -> None:
        body = text.encode()
        self._begin(kind, {"Content-Length": str(len(body))})
        self.wfile.write(body)

    def _begin(self, kind: str, headers: dict[str, str]) -> None:
        self.send_response(HTTPStatus.OK)
        for name, value in ({"Content-Type": kind} | headers | POLICY).items():
            self.send_header(name, value)
        self.end_headers()

    def _tell(self) -> None:
        """News as they come; what there is already is news for a page that may have missed it."""
        self._begin("text/event-stream", {})
        watch, number = self.server.watch, -1
        with watch.watching():
            while not watch.is_over:
                news = watch.wait(number, KEEP_S)
                number = number if news is None else news.number
                self.wfile.write(b": still here\n\n" if news is None else _message(news))
                self.wfile.flush()


def _message(news: News) -> bytes:
    ended = f"event: end\ndata: {news.number}\n\n" if news.has_ended else ""
    return f"event: change\ndata: {news.number}\n\n{ended}".encode()


def main(runs: Sequence[Path], port: int, token_file: Path | None = None) -> None:
    """Serve the page of these runs until Ctrl-C.

    Raises InputError for no run, a port that is taken, or a bad token.
    """
    token = None if token_file is None else read_token(token_file, "--token-file")
    watch = Watch(runs, complain)
    with Dash(watch, port, token) as dash:
        os.nice(NICE)
        print(f"{', '.join(map(str, runs))} can be looked at here, until Ctrl-C: {dash.url}", flush=True)
        threading.Thread(target=watch.follow, name="watch", daemon=True).start()
        try:
            dash.serve_forever()
        except KeyboardInterrupt:
            pass
        finally:
            watch.close()


def complain(trouble: str) -> None:
    """Tell who started this that files cannot be read for now."""
    print(f"dora: {trouble}; what was read before is shown", file=sys.stderr, flush=True)
