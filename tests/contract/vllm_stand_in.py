"""A server with the words of a vLLM server, and answers that are made up; something may be wrong with them.

It is asked over HTTP, as the real one is, and its words are those of a real one that were recorded, with
other tokens in them. Weights are read from the file, and their digest is computed, by the code that runs
inside vLLM. `real_servers.py` holds the real one to the same words, and to true answers.
"""

from __future__ import annotations

import copy
import json
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from dora.backends.inside.dora_digest import digest_of

TOKEN = "of this server"
INTERVAL = 8  # tokens of an event, after the first one
VOCABULARY = 29  # tokens of the model that is asked for
RECORDED = json.loads((Path(__file__).parent / "recorded" / "vllm.json").read_text(encoding="utf-8"))
LABEL = "dora-0"  # what the weights were called when the answers were recorded
CALLS = {
    "/version": "GET /version",
    "/v1/models": "GET /v1/models",
    "/abort_requests": "abort all",
    "/pause?mode=keep": "pause",
    "/resume": "resume",
    "/update_weight_version": "update_weight_version",
}


def answer_to(call: str) -> Any:
    """What a real server answered."""
    return json.loads(RECORDED["answers"][call]["text"])


def recorded_events(name: str) -> list[Any]:
    """The events of an answer that a real server gave."""
    lines = RECORDED["streams"][name]
    assert lines[-1] == "data: [DONE]\n"
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def events_of(body: dict[str, Any], label: str) -> Iterator[dict[str, Any]]:
    """An answer as long as it may be: one token, then so many at a time; the last event names the weights."""
    num_tokens, num_before = body["sampling_params"]["max_tokens"], len(body["token_ids"])
    words = recorded_events("length")
    ends = [*range(1, num_tokens, INTERVAL), num_tokens]
    for begin, end in zip([0, *ends], ends, strict=False):
        event = copy.deepcopy(words[-1] if end == num_tokens else words[0])
        (choice,) = event["choices"]
        token = choice["logprobs"]["content"][0]
        choice["token_ids"] = [(num_before + i) % VOCABULARY for i in range(begin, end)]
        choice["logprobs"]["content"] = [
            token | {"token_id": i, "logprob": -1.0} for i in choice["token_ids"]
        ]
        if choice["weight_versions"]:
            choice["weight_versions"] = [{"version": label, "start": 0, "end": num_tokens}]
        yield event


def given_up(label: str, num_tokens: int) -> dict[str, Any]:
    """The last event of an answer that was given up."""
    event: dict[str, Any] = recorded_events("aborted")[-1]
    event["choices"][0]["weight_versions"] = [{"version": label, "start": 0, "end": num_tokens}]
    return event


class StandIn(ThreadingHTTPServer):
    """`faults` may have: "dies" after so many events of an answer, "holds" answers until they are given up,
    "deaf" to so many calls that give up, "spans" to tell, "digests" to tell, "refusals" of weights to come,
    "replays" the answer of this name as it was recorded, "paces" each event by so many seconds.
    """

    daemon_threads = True

    def __init__(self, **faults: Any) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.faults = faults
        self.label = "none"
        self.adapters: dict[str, Path] = {}
        self.asked: list[dict[str, Any]] = []  # for answers, in order
        self.given_up: set[str] = set()
        self.num_under_way = 0
        self.changed = threading.Condition()
        self._thread = threading.Thread(target=self.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def mend(self) -> None:
        """No faults any more; what is held goes on."""
        with self.changed:
            self.faults.clear()
            self.changed.notify_all()

    def close(self) -> None:
        self.mend()
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
        self._reply(200, answer_to(CALLS[self.path]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self._reply(401, RECORDED["answers"]["no token"]["text"])
        match self.path:
            case "/inference/v1/generate":
                self._stream(body)
            case "/collective_rpc" if body["method"] == "dora_load":
                self._load(body["args"][0])
            case "/collective_rpc" if body["method"] == "dora_digest":
                self._reply(200, {"results": [digest_of(body["args"][0])]})
            case "/collective_rpc":
                self._reply(200, answer_to("about"))
            case "/v1/load_lora_adapter":
                self.server.adapters[body["lora_name"]] = Path(body["lora_path"])
                self._say_that(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")
            case "/v1/unload_lora_adapter":
                del self.server.adapters[body["lora_name"]]
                self._say_that(f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")
            case "/abort_requests":
                self._give_up(body)
            case _:
                if self.path == "/update_weight_version":
                    self.server.label = body["new_version"]
                self._reply(200, answer_to(CALLS[self.path]))

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""

    def _reply(self, status: int, content: Any) -> None:
        self._say_that(json.dumps(content), status)

    def _say_that(self, words: str, status: int = 200) -> None:
        text = words.encode()
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
            return self._reply(500, answer_to("bad load"))
        self._reply(200, {"results": faults.get("digests", [digest_of(path)])})

    def _give_up(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.changed:
            if server.faults.get("deaf"):
                server.faults["deaf"] -= 1
            else:
                server.given_up |= set(body.get("request_ids", ()))
            server.changed.notify_all()
        self._reply(200, answer_to(CALLS["/abort_requests"]))

    def _stream(self, body: dict[str, Any]) -> None:
        server, name = self.server, f"generate-tokens-{body['request_id']}"
        with server.changed:
            server.num_under_way += 1
            server.asked.append(body)
            events = [*events_of(body, server.label)]
        if "replays" in server.faults:
            text = json.dumps(recorded_events(server.faults["replays"]))
            events = json.loads(text.replace(LABEL, server.label))
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
        server, faults, num_said = self.server, self.server.faults, 0
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, event in enumerate(events):
            if faults.get("holds") and number == 1:
                with server.changed:
                    server.changed.wait_for(lambda: name in server.given_up or "holds" not in faults)
            if "paces" in faults:
                with server.changed:
                    server.changed.wait_for(lambda: name in server.given_up, faults["paces"])
            if name in server.given_up:
                self._say(given_up(server.label, num_said))
                break
            if number == faults.get("dies"):
                self.connection.shutdown(socket.SHUT_RDWR)  # as of a process that dies
                return False
            (choice,) = event["choices"]
            if choice["finish_reason"] is not None:
                choice["weight_versions"] = faults.get("spans", choice["weight_versions"])
            self._say(event)
            num_said += len(choice["token_ids"])
        return True

    def _say(self, event: Any) -> None:
        self._chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _chunk(self, text: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text))
