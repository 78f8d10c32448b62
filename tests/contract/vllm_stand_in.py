"""A server that says again what a real vLLM server said, recorded by `real_vllm.py`.

It is asked over HTTP, as the real one is. Weights are read from the file, and their digest is computed, by
the code that runs inside vLLM; which tokens they draw was recorded. What goes wrong is chosen by `faults`.
"""

from __future__ import annotations

import json
import socket
import threading
from collections import Counter
from collections.abc import Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dora.backends.inside.dora_vllm import digest_of

RECORDED = Path(__file__).with_name("vllm-0.32.json")
TOKEN = "of this server"
LABEL = "LABEL"  # stands for the name of the weights in what was recorded


def key_of(dtype: str, label: str, body: Mapping[str, Any]) -> str:
    """What decides how a request may be answered; the second word of a label is the version."""
    version = int(label.split("-")[1])
    return json.dumps([dtype, version, body["token_ids"], body["sampling_params"]], sort_keys=True)


class StandIn(ThreadingHTTPServer):
    """`faults` may have: "dies" after so many events of an answer, "holds" answers until they are given up,
    "deaf" to so many calls that give up, "spans" to tell, "digests" to tell, "refusals" of weights to come.
    """

    daemon_threads = True

    def __init__(self, dtype: str = "float32", **faults: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
        self.dtype, self.faults = dtype, faults
        self.calls: dict[str, Any] = recorded["calls"]
        self.answers: dict[str, list[list[Any]]] = recorded["answers"]
        self.label = "none-0"
        self.given_up: set[str] = set()
        self.num_answered: Counter[str] = Counter()
        self.num_under_way = 0
        self.changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        with self.changed:
            self.faults.clear()
            self.changed.notify_all()
        self.shutdown()
        self.server_close()
        self._thread.join()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that are gone are no error."""


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: StandIn

    def do_GET(self) -> None:
        self._reply(200, self.server.calls[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._reply(401, "show the DORA_VLLM_TOKEN")
        match self.path:
            case "/inference/v1/generate":
                self._stream(body)
            case "/collective_rpc" if body["method"] == "dora_load":
                self._load(body["args"][0])
            case "/collective_rpc":
                about = {**self.server.calls["dora_about"], "dtype": self.server.dtype}
                self._reply(200, {"results": [about]})
            case "/abort_requests":
                self._give_up(body)
            case _:
                if self.path == "/update_weight_version":
                    self.server.label = body["new_version"]
                self._reply(200, self.server.calls[self.path])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _reply(self, status: int, content: Any) -> None:
        text = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(text)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(text)

    def _load(self, path: str) -> None:
        faults = self.server.faults
        assert not self.server.num_under_way, "weights are changed under a request"
        if faults.get("refusals"):
            faults["refusals"] -= 1
            return self._reply(500, {"error": {"message": "no weights now"}})
        self._reply(200, {"results": faults.get("digests", [digest_of(path)])})

    def _give_up(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.changed:
            if server.faults.get("deaf"):
                server.faults["deaf"] -= 1
            else:
                server.given_up |= set(body.get("request_ids", ()))
            server.changed.notify_all()
        self._reply(200, server.calls["/abort_requests"])

    def _stream(self, body: dict[str, Any]) -> None:
        server, name = self.server, f"generate-tokens-{body['request_id']}"
        with server.changed:
            server.num_under_way += 1
            key = key_of(server.dtype, body["cache_salt"], body)
            known = server.answers[key]
            events = known[server.num_answered[key] % len(known)]
            server.num_answered[key] += 1
        try:
            is_whole = self._say_all(name, events)
        finally:
            with server.changed:
                server.num_under_way -= 1
        if is_whole:
            self._chunk(b"data: [DONE]\n\n")
            self._chunk(b"")

    def _say_all(self, name: str, events: list[Any]) -> bool:
        """Whether there is nothing wrong with the end."""
        server, faults = self.server, self.server.faults
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, event in enumerate(events):
            if faults.get("holds") and number == 1:
                with server.changed:
                    server.changed.wait_for(lambda: name in server.given_up or "holds" not in faults)
            if name in server.given_up:
                choice = {"index": 0, "token_ids": [], "finish_reason": "abort", "logprobs": {"content": []}}
                self._say({"choices": [choice]})
                break
            if number == faults.get("dies"):
                self.connection.shutdown(socket.SHUT_RDWR)  # as of a process that dies
                return False
            (choice,) = event["choices"]
            if choice["weight_versions"] is not None:
                spans = json.loads(json.dumps(choice["weight_versions"]).replace(LABEL, server.label))
                choice = {**choice, "weight_versions": faults.get("spans", spans)}
            self._say({**event, "choices": [choice]})
        return True

    def _say(self, event: Any) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, text: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
