"""A server that says what a real SGLang server has said, and was recorded; `real_servers.py` asks a real one.

It reads weights as the code does that runs inside SGLang. Something may be wrong with it.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dora.backends.inside.dora_digest import digest_of
from dora.backends.inside.dora_sglang import FILE, telling

TOKEN = "of this server"
RECORDED = json.loads((Path(__file__).parent / "recorded" / "sglang.json").read_text(encoding="utf-8"))
LABEL = "dora-0"  # what the weights were called when the answers were recorded
CALLS = {
    "/v1/models": "GET /v1/models",
    "/server_info": "GET /server_info",
    "/pause_generation": "pause",
    "/continue_generation": "continue",
}


def said(name: str) -> list[dict[str, Any]]:
    """The events of an answer that was recorded."""
    lines = RECORDED["streams"][name]
    assert lines[-1] == "data: [DONE]\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class StandIn(ThreadingHTTPServer):
    """Answers as the one that was recorded under `name`; `faults` may have "silent" about digests, "refusals"
    of weights to come. An answer that was given up goes on from its first event when it is.
    """

    daemon_threads = True

    def __init__(self, name: str = "length", **faults: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.name, self.faults, self.label = name, faults, "none"
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.given_up = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.given_up.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class Handler(BaseHTTPRequestHandler):
    """One request."""

    server: StandIn

    def do_GET(self) -> None:
        self._tell(CALLS[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._tell("no token")
        self.server.asked.append((self.path, body))
        match self.path:
            case "/generate":
                self._stream()
            case "/abort_request":
                if body.get("rid"):
                    self.server.given_up.set()
                self._tell("abort")
            case "/update_weights_from_disk":
                self._load(body)
            case _:
                self._tell(CALLS[self.path])

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _tell(self, call: str) -> None:
        recorded = RECORDED["answers"][call]
        self._reply(recorded["status"], recorded["text"])

    def _reply(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _load(self, body: dict[str, Any]) -> None:
        server = self.server
        if server.faults.get("refusals"):
            server.faults["refusals"] -= 1
            return self._tell("bad load")
        answer = json.loads(RECORDED["answers"]["update_weights_from_disk"]["text"])
        before, after = (
            answer["message"].split(" DORA")[0],
            f"Weight version updated to {body['weight_version']}.",
        )
        tell = telling(lambda self, folder: (Path(folder, FILE).is_file(), before), digest_of)
        is_done, message = tell(None, body["model_path"])
        server.label = body["weight_version"]
        told = before if "silent" in server.faults else message
        self._reply(200, json.dumps({**answer, "success": is_done, "message": f"{told} {after}"}))

    def _stream(self) -> None:
        server = self.server
        self.send_response(200)
        self.end_headers()
        for number, event in enumerate(said(server.name)):
            if number == 1 and server.name == "aborted":
                server.given_up.wait()
            text = json.dumps(event).replace(f'"{LABEL}"', f'"{server.label}"')
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
