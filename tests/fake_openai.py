"""An OpenAI-compatible server of a test, which replies by a function."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class FakeOpenAI(ThreadingHTTPServer):
    """Replies `reply(path, body)` to each POST, or status 400 with `refusal`.

    The next `num_failures` requests get the status `failure`.
    """

    def __init__(self, reply: Callable[[str, Any], Any]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.reply = reply
        self.requests: list[tuple[str, Any, str | None]] = []  # path, body and authorization
        self.num_failures, self.failure = 0, 503
        self.refusal: str | None = None
        self.models: list[dict[str, str]] = [{"id": "served"}]
        self.url = f"http://127.0.0.1:{self.server_port}/v1"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class _Handler(BaseHTTPRequestHandler):
    server: FakeOpenAI

    def do_GET(self) -> None:
        self._send({"data": self.server.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers["Authorization"]))
        if self.server.num_failures:
            self.server.num_failures -= 1
            self.send_error(self.server.failure)
            return
        if self.server.refusal is not None:
            self.send_response(400)
            self.end_headers()
            self.wfile.write(self.server.refusal.encode())
            return
        self._send(self.server.reply(self.path, body))

    def _send(self, content: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *arguments: Any) -> None:
        """Print nothing."""
