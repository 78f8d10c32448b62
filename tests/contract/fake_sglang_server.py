"""A fake SGLang server that replays a real server's recorded responses; a test can inject faults.

It reads weights with the code that runs inside SGLang. `real_servers.py` tests a real server.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dora.engine.backends.server_plugins.dora_digest import safetensors_digest
from dora.engine.backends.server_plugins.dora_sglang import PROTOCOL, WEIGHTS_FILE, with_digest

AUTH_TOKEN = "of this server"
RECORDED = json.loads((Path(__file__).parent / "recorded" / "sglang.json").read_text(encoding="utf-8"))
LABEL = "dora-0"  # of the weights in the recorded answers
CALLS = {
    "/v1/models": "GET /v1/models",
    "/server_info": "GET /server_info",
    "/pause_generation": "pause",
    "/continue_generation": "continue",
    "/flush_cache?timeout=30": "continue",
    "/set_internal_state": "set_internal_state",
}


def recorded_events(name: str) -> list[dict[str, Any]]:
    """The events of a real server's answer."""
    lines = RECORDED["streams"][name]
    assert lines[-1] == "data: [DONE]\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class FakeSglangServer(ThreadingHTTPServer):
    """Answers every request with the answer that was recorded under `name`.

    The answer "aborted" continues after its first event when the request is aborted. `faults` may have:

    no_digest: do not report the digest of loaded weights.
    rejected_loads: reject this many loads.
    holds_loads: a `threading.Event` that a load waits for.
    version: report this version of SGLang.
    plugins: report this of DORA-RL's plugins.
    """

    daemon_threads = True

    def __init__(self, name: str = "length", version_slots: int = 1, **faults: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.version_slots = version_slots
        self.name, self.faults, self.label = name, faults, "none"
        self.calls: list[tuple[str, dict[str, Any]]] = []  # path and body, in order
        self.loaded_files: list[Path] = []
        self.is_aborted = threading.Event()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def close(self) -> None:
        self.is_aborted.set()
        self.shutdown()
        self.server_close()
        self._thread.join()


class Handler(BaseHTTPRequestHandler):
    """One HTTP request."""

    server: FakeSglangServer

    def do_GET(self) -> None:
        if self.path not in CALLS:
            return self.send_error(404)
        recorded = RECORDED["answers"][CALLS[self.path]]
        if self.path != "/server_info":
            return self._send(recorded["status"], recorded["text"])
        own = {"protocol": PROTOCOL, "version_slots": self.server.version_slots, "kv_layout": []}
        own = self.server.faults.get("plugins", own)
        version = {key: self.server.faults[key] for key in self.server.faults.keys() & {"version"}}
        info = json.loads(recorded["text"]) | version | {"internal_states": [{"dora": own} if own else {}]}
        self._send(recorded["status"], json.dumps(info))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {AUTH_TOKEN}":
            return self._send_recorded("no token")
        self.server.calls.append((self.path, body))
        match self.path:
            case "/generate":
                self._stream()
            case "/abort_request":
                if body.get("rid"):
                    self.server.is_aborted.set()
                self._send_recorded("abort")
            case "/update_weights_from_disk":
                self._load(body)
            case _:
                self._send_recorded(CALLS[self.path])

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _send_recorded(self, call: str) -> None:
        recorded = RECORDED["answers"][call]
        self._send(recorded["status"], recorded["text"])

    def _send(self, status: int, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(text.encode())))
        self.end_headers()
        self.wfile.write(text.encode())

    def _load(self, body: dict[str, Any]) -> None:
        server = self.server
        if "holds_loads" in server.faults:
            server.faults["holds_loads"].wait()
        if server.faults.get("rejected_loads"):
            server.faults["rejected_loads"] -= 1
            return self._send_recorded("bad load")
        response = json.loads(RECORDED["answers"]["update_weights_from_disk"]["text"])
        begin, end = (
            response["message"].split(" DORA")[0],
            f"Weight version updated to {body['weight_version']}.",
        )
        update = with_digest(
            lambda self, folder: (Path(folder, WEIGHTS_FILE).is_file(), begin), safetensors_digest
        )
        server.loaded_files.append(Path(body["model_path"], WEIGHTS_FILE).resolve())
        is_done, message = update(None, body["model_path"])
        server.label = body["weight_version"]
        message = begin if "no_digest" in server.faults else message
        self._send(200, json.dumps({**response, "success": is_done, "message": f"{message} {end}"}))

    def _stream(self) -> None:
        server = self.server
        self.send_response(200)
        self.end_headers()
        for number, event in enumerate(recorded_events(server.name)):
            if number == 1 and server.name == "aborted":
                server.is_aborted.wait()
            # DORA-RL's plugins list the weights in each event. The recorded server listed them in the last.
            num_tokens = event["meta_info"]["completion_tokens"]
            span = {"version": LABEL, "start": 0, "end": num_tokens}
            event["meta_info"].setdefault("weight_versions", [span])
            text = json.dumps(event).replace(f'"{LABEL}"', f'"{server.label}"')
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()
        self.wfile.write(b"data: [DONE]\n\n")
