"""A fake SGLang server that replays a real server's recorded responses; a test can inject faults.

It reads weights with the code that runs inside SGLang. `real_servers.py` tests a real server.
"""

from __future__ import annotations

import json
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

from tests.contract.fake_server import AUTH_TOKEN, FakeServer, read_recorded, recorded_events

from dora.engine.backends.server_plugins.dora_digest import ADAPTER_FILE, safetensors_digest
from dora.engine.backends.server_plugins.dora_sglang import DIGEST_PREFIX, PART_KEY, PROTOCOL

RECORDED = read_recorded("sglang")
LABEL = "dora-0"  # of the weights in the recorded answers
CALLS = {
    "/v1/models": "GET /v1/models",
    "/server_info": "GET /server_info",
    "/pause_generation": "pause",
    "/continue_generation": "continue",
    "/flush_cache?timeout=30": "continue",
    "/set_internal_state": "set_internal_state",
}


class FakeSglangServer(FakeServer):
    """Answers every request with a recorded answer. `faults` may have:

    replays: the name of the answer; "aborted" continues after its first event when the request is aborted.
    rejected_loads: reject this many loads.
    version: report this version of SGLang.
    plugins: report this of DORA-RL's plugins.
    info: report this of the server.
    routes: report this of the experts of each token, in the last event of a response.
    adapter_digest: report this digest of an adapter.
    ignored_aborts: ignore this many calls that abort a request.
    """

    def __init__(self, version_slots: int = 1, **faults: Any) -> None:
        super().__init__(Handler, version_slots, faults)
        self.label = "none"
        self.adapters: dict[str, Path] = {}
        self.calls: list[tuple[str, dict[str, Any]]] = []  # path and body, in order
        self.is_aborted = threading.Event()
        self.unfinished: Counter[str] = Counter()  # streams of each label
        self.lock = threading.Lock()  # of this

    def close(self) -> None:
        self.is_aborted.set()
        super().close()


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
        version |= self.server.faults.get("info", {})
        info = json.loads(recorded["text"]) | version | {"internal_states": [{"dora": own} if own else {}]}
        self._send(recorded["status"], json.dumps(info))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {AUTH_TOKEN}":
            return self._send_recorded("no token")
        self.server.calls.append((self.path, body))
        match self.path:
            case "/generate":
                self._stream(body.get("lora_path", self.server.label))
            case "/abort_request":
                if body.get("rid") and self.server.faults.get("ignored_aborts"):
                    self.server.faults["ignored_aborts"] -= 1
                elif body.get("rid"):
                    self.server.is_aborted.set()
                self._send_recorded("abort")
            case "/update_weights_from_disk":
                self._load(body)
            case "/load_lora_adapter":
                folder = self.server.adapters[body["lora_name"]] = Path(body["lora_path"])
                digest = safetensors_digest(str(folder / ADAPTER_FILE))
                digest = self.server.faults.get("adapter_digest", digest)
                self._send(200, json.dumps({"success": True, "error_message": digest}))
            case "/unload_lora_adapter":
                assert not self.server.unfinished[body["lora_name"]], "requests of an unloaded adapter"
                del self.server.adapters[body["lora_name"]]
                self._send(200, json.dumps({"success": True}))
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
        if server.faults.get("rejected_loads"):
            server.faults["rejected_loads"] -= 1
            return self._send_recorded("bad load")
        response = json.loads(RECORDED["answers"]["update_weights_from_disk"]["text"])
        path, (part, max_bytes) = body["model_path"], body["manifest"][PART_KEY]
        server.loaded_files.append(path)
        message = f"Weight version updated to {body['weight_version']}."
        if (part + 1) * max_bytes >= Path(path).stat().st_size:
            server.label = body["weight_version"]
            message = f"{DIGEST_PREFIX}{safetensors_digest(path)}. {message}"
        self._send(200, json.dumps({**response, "message": message}))

    def _stream(self, label: str) -> None:
        with self.server.lock:
            self.server.unfinished[label] += 1
        try:
            self._send_events(label)
        finally:
            with self.server.lock:
                self.server.unfinished[label] -= 1
        self.wfile.write(b"data: [DONE]\n\n")

    def _send_events(self, label: str) -> None:
        server = self.server
        name = server.faults.get("replays", "length")
        self.send_response(200)
        self.end_headers()
        for number, event in enumerate(recorded_events(RECORDED, name)):
            if number == 1 and name == "aborted":
                server.is_aborted.wait()
            # DORA-RL's plugins list the weights in each event. The recorded server listed them in the last.
            num_tokens = event["meta_info"]["completion_tokens"]
            span = {"version": LABEL, "start": 0, "end": num_tokens}
            event["meta_info"].setdefault("weight_versions", [span])
            if event["meta_info"]["finish_reason"] and "routes" in server.faults:
                event["meta_info"]["routed_experts"] = server.faults["routes"]
            text = json.dumps(event).replace(f'"{LABEL}"', f'"{label}"')
            self.wfile.write(f"data: {text}\n\n".encode())
            self.wfile.flush()
