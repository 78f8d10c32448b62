"""A fake vLLM server with a real one's HTTP API and made-up answers; a test can inject faults.

Its responses are those of a real server that were recorded, with other tokens in them. Weights are read from
the file, and their digest is computed, by the code that runs inside vLLM. `real_servers.py` tests a real
server.
"""

from __future__ import annotations

import copy
import json
import math
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import torch
from tests.contract.fake_server import AUTH_TOKEN, FakeServer, read_recorded, recorded_events

from dora.engine.backends.server_plugins import dora_kv_files as kv_files
from dora.engine.backends.server_plugins.dora_digest import safetensors_digest
from dora.engine.backends.server_plugins.dora_vllm import KEEP, PROTOCOL

KV_LAYOUT = ["of this version", "1"]
TICKET_SOURCE = {"remote_host": "here"}
KV = [torch.ones(1, 2)]  # of one layer and block
ORDER_INTERVAL_S = 0.002
INTERVAL = 8  # tokens of an event, after the first one
VOCAB_SIZE = 29
RECORDED = read_recorded("vllm")
LABEL = "dora-0"  # of the weights in the recorded answers
CALLS = {
    "/version": "GET /version",
    "/v1/models": "GET /v1/models",
    "/abort_requests": "abort all",
    "/pause?mode=keep&clear_cache=false": "pause",
    "/resume": "resume",
    "/update_weight_version": "update_weight_version",
}


def recorded_response(call: str) -> Any:
    """A real server's response to a call."""
    return json.loads(RECORDED["answers"][call]["text"])


def made_up_events(body: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The longest possible answer: an event with one token, then with INTERVAL tokens each."""
    num_tokens, num_before = body["sampling_params"]["max_tokens"], len(body["token_ids"])
    templates = recorded_events(RECORDED, "length")
    ends = [*range(1, num_tokens, INTERVAL), num_tokens]
    for begin, end in zip([0, *ends], ends, strict=False):
        event = copy.deepcopy(templates[-1] if end == num_tokens else templates[0])
        (choice,) = event["choices"]
        token = choice["logprobs"]["content"][0]
        choice["token_ids"] = [(num_before + i) % VOCAB_SIZE for i in range(begin, end)]
        choice["logprobs"]["content"] = [
            token | {"token_id": i, "logprob": -1.0} for i in choice["token_ids"]
        ]
        yield event


def aborted_event(label: str, num_tokens: int) -> dict[str, Any]:
    """The last event of an aborted answer."""
    event: dict[str, Any] = recorded_events(RECORDED, "aborted")[-1]
    event["choices"][0]["weight_versions"] = [{"version": label, "start": 0, "end": num_tokens}]
    return event


class FakeVllmServer(FakeServer):
    """With several `version_slots` it is like one with DORA-RL's worker class. `faults` may have:

    holds: hold back all events of an answer but the first one until it is aborted.
    holds_after: hold back an answer after this many events until it is aborted.
    ignored_aborts: ignore this many calls that abort requests.
    weight_spans: report these weights for every answer.
    info: report this of the worker.
    digests: report these digests of loaded weights.
    adapter_digest: report this digest of an adapter.
    rejected_loads: reject this many loads.
    holds_loads: load nothing while this fault is there.
    is_stopped: respond to nothing while this fault is there.
    version: report this version of vLLM.
    replays: answer every request with the recorded answer of this name.
    event_interval_s: time between events.
    reported_prefill: report this many prefilled tokens at the end of an answer.
    kv: export KV and import it, as with DORA-RL's connector; "lost": fail to write it; "never": do not try.
    """

    def __init__(self, version_slots: int = 1, **faults: Any) -> None:
        super().__init__(Handler, version_slots, faults)
        self.label = "none"  # of the only version
        self.digests: dict[str, str] = {}  # of loaded versions, by label
        self.decode_only: list[list[str]] = []  # ids of requests, of each call
        self.newest = ""  # label of the weights with which requests continue, unless they keep theirs
        self.adapters: dict[str, Path] = {}
        self.generate_calls: list[dict[str, Any]] = []  # bodies, in order
        self.aborted: set[str] = set()
        self.num_streams = 0
        self.unfinished: Counter[str] = Counter()  # streams of each label
        self.changed = threading.Condition()

    def label_of(self, body: dict[str, Any]) -> str:
        """Of the weights that generate for a request."""
        if self.version_slots == 1:
            return self.label
        salt = str(body["cache_salt"])
        return salt.removesuffix(KEEP) if salt.endswith(KEEP) else self.newest or salt

    def generate_calls_when(self, count: int) -> list[dict[str, Any]]:
        """The bodies of the calls, once there are this many."""
        with self.changed:
            self.changed.wait_for(lambda: len(self.generate_calls) >= count)
            return [*self.generate_calls]

    def crash(self) -> int:
        """Close the connections of all answers, as when the process crashes. Returns how many there were.

        The server can be used again.
        """
        with self.changed:
            num_streams, self.faults["crashes"] = self.num_streams, True
            self.changed.wait_for(lambda: not self.num_streams)
            del self.faults["crashes"]
        return num_streams

    def clear_faults(self) -> None:
        """End all faults. Answers that were held back continue."""
        with self.changed:
            self.faults.clear()
            self.changed.notify_all()

    def close(self) -> None:
        self.clear_faults()
        super().close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore clients that have disconnected."""


class Handler(BaseHTTPRequestHandler):
    """One HTTP request."""

    protocol_version = "HTTP/1.1"
    server: FakeVllmServer

    def do_GET(self) -> None:
        self._wait(lambda: not self.server.faults.get("is_stopped"))
        if self.path not in CALLS:
            return self.send_error(404)
        if self.path == "/version" and "version" in self.server.faults:
            return self._send_json(200, {"version": self.server.faults["version"]})
        self._send_json(200, recorded_response(CALLS[self.path]))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if self.headers["Authorization"] != f"Bearer {AUTH_TOKEN}":
            return self._send_json(401, RECORDED["answers"]["no token"]["text"])
        match self.path:
            case "/inference/v1/generate":
                self._stream(body)
            case "/collective_rpc" if body["method"] in ("dora_load_weights", "dora_load_part"):
                self._load(*body["args"])
            case "/collective_rpc" if body["method"] == "dora_drop_version":
                self.server.digests.pop(body["args"][0], None)
                assert not self.server.unfinished[body["args"][0]], "requests of a dropped version"
                self._send_json(200, {"results": [None]})
            case "/collective_rpc" if body["method"] == "dora_drop_all_versions":
                self.server.digests.clear()
                self._send_json(200, {"results": [None]})
            case "/collective_rpc" if body["method"] == "dora_digest":
                digest = self.server.faults.get("adapter_digest") or safetensors_digest(body["args"][0])
                self._send_json(200, {"results": [digest]})
            case "/collective_rpc" if body["method"] == "dora_info":
                (info,) = recorded_response("dora_info")["results"]
                by_ticket = [kv_files.BY_TICKET] if self.server.faults.get("by_ticket") else []
                info |= {"kv_layout": [*by_ticket, *KV_LAYOUT]} if "kv" in self.server.faults else {}
                info |= {"version_slots": self.server.version_slots, "protocol": PROTOCOL}
                self._send_json(200, {"results": [info | self.server.faults.get("info", {})]})
            case "/dora/decode_only":
                self.server.decode_only += body["arguments"]
                self._send_json(200, {})
            case "/dora/continue_with":
                (self.server.newest,) = body["arguments"]
                self._send_json(200, {})
            case "/collective_rpc":
                self._send_json(200, recorded_response(body["method"]))
            case "/v1/load_lora_adapter":
                self.server.adapters[body["lora_name"]] = Path(body["lora_path"])
                self._send_text(f"Success: LoRA adapter '{body['lora_name']}' added successfully.")
            case "/v1/unload_lora_adapter":
                assert not self.server.unfinished[body["lora_name"]], "requests of an unloaded adapter"
                del self.server.adapters[body["lora_name"]]
                self._send_text(f"Success: LoRA adapter '{body['lora_name']}' removed successfully.")
            case "/abort_requests":
                self._abort(body)
            case _:
                if self.path == "/update_weight_version":
                    self.server.label = body["new_version"]
                self._send_json(200, recorded_response(CALLS[self.path]))

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _send_json(self, status: int, content: Any) -> None:
        self._send_text(json.dumps(content), status)

    def _send_text(self, text: str, status: int = 200) -> None:
        content = text.encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(content)))
        self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def _load(self, label: str, path: str, part: int = 0, max_bytes: int = 2**63) -> None:
        faults, server = self.server.faults, self.server
        if server.version_slots > 1:
            assert len(server.digests) < server.version_slots, "no free slot"
        else:
            assert not server.num_streams, "weights change during an answer"
        server.loaded_files.append(path)
        self._wait(lambda: not faults.get("holds_loads"))
        if faults.get("rejected_loads"):
            faults["rejected_loads"] -= 1
            return self._send_json(500, recorded_response("bad load"))
        digests = faults.get("digests", [safetensors_digest(path)])
        is_last = (part + 1) * max_bytes >= Path(path).stat().st_size
        if is_last:
            server.digests[label] = digests[0]
        self._send_json(200, {"results": digests if is_last else [""]})

    def _abort(self, body: dict[str, Any]) -> None:
        server = self.server
        with server.changed:
            if server.faults.get("ignored_aborts"):
                server.faults["ignored_aborts"] -= 1
            else:
                server.aborted |= set(body.get("request_ids", ()))
            server.changed.notify_all()
        self._send_json(200, recorded_response(CALLS["/abort_requests"]))

    def _is_export_ordered(self, body: dict[str, Any]) -> bool:
        folder = body.get("kv_transfer_params", {}).get("dora_export")
        is_able = self.server.faults.get("kv") not in (None, "never")
        return is_able and folder is not None and kv_files.part_folder(Path(folder)).is_dir()

    def _halt(self, body: dict[str, Any], event: dict[str, Any], num_sent: int) -> None:
        """End an answer with its next token, and then write the KV of the others."""
        (choice,) = event["choices"]
        choice["token_ids"], choice["finish_reason"] = choice["token_ids"][:1], "length"
        choice["logprobs"]["content"] = choice["logprobs"]["content"][:1]
        choice["weight_versions"] = [{"version": self.server.label_of(body), "start": 0, "end": num_sent + 1}]
        self._send_event(event)
        folder, num_tokens = (
            Path(body["kv_transfer_params"]["dora_export"]),
            len(body["token_ids"]) + num_sent,
        )
        part = kv_files.part_folder(folder)
        if self.server.faults.get("by_ticket"):
            kv_files.write_ticket(part, kv_files.Ticket(num_tokens, 1000, TICKET_SOURCE))
        elif self.server.faults["kv"] != "lost":
            origin = kv_files.KVOrigin(self.server.digests[body["cache_salt"]], tuple(KV_LAYOUT))
            kv_files.write_blocks(kv_files.worker_file(part, 0), origin, KV, [0], num_tokens)
        part.rename(folder)

    def _wait(self, is_over: Callable[[], bool], timeout_s: float | None = None) -> None:
        """Wait for a call, or for an order in the file system, of which nothing notifies the server."""
        deadline_s = math.inf if timeout_s is None else time.monotonic() + timeout_s
        with self.server.changed:
            while not is_over() and time.monotonic() < deadline_s:
                self.server.changed.wait(min(ORDER_INTERVAL_S, deadline_s - time.monotonic()))

    def _stream(self, body: dict[str, Any]) -> None:
        server, name = self.server, f"generate-tokens-{body['request_id']}"
        with server.changed:
            server.num_streams += 1
            server.unfinished[body["cache_salt"]] += 1
            server.generate_calls.append(body)
            server.changed.notify_all()
            events = [*made_up_events(body)]
        if "replays" in server.faults:
            text = json.dumps(recorded_events(RECORDED, server.faults["replays"]))
            events = json.loads(text.replace(LABEL, server.label))
        try:
            is_complete = self._send_events(name, body, events)
        finally:
            with server.changed:
                server.num_streams -= 1
                server.unfinished[body["cache_salt"]] -= 1
                server.changed.notify_all()
        if is_complete:
            if "reported_prefill" in server.faults:
                num_tokens = len(body["token_ids"])
                cached = {"cached_tokens": num_tokens - server.faults["reported_prefill"]}
                usage = {"prompt_tokens": num_tokens, "prompt_tokens_details": cached}
                self._send_event({"choices": [], "usage": usage})
            self._send_chunk(b"data: [DONE]\n\n")
            self._send_chunk(b"")

    def _is_released(self, name: str, body: dict[str, Any]) -> bool:
        """Whether an answer that was held back continues or ends."""
        faults = self.server.faults
        is_ended = name in self.server.aborted or "crashes" in faults
        return is_ended or not faults or self._is_export_ordered(body)

    def _send_events(self, name: str, body: dict[str, Any], events: list[Any]) -> bool:
        """Send the events of an answer. False if the connection is closed before the end."""
        server, faults, num_sent = self.server, self.server.faults, 0
        spans: list[dict[str, Any]] = []  # of the weights, if they may change
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.send_header("Connection", "close")
        self.end_headers()
        for number, event in enumerate(events):
            if number == (1 if faults.get("holds") else faults.get("holds_after")):
                self._wait(lambda: self._is_released(name, body))
            if "event_interval_s" in faults:
                self._wait(lambda: name in server.aborted, faults["event_interval_s"])
            label = server.label_of(body)
            if name in server.aborted:
                self._send_event(aborted_event(label, num_sent))
                break
            if self._is_export_ordered(body):
                self._halt(body, event, num_sent)
                break
            if "crashes" in faults:
                self.connection.shutdown(socket.SHUT_RDWR)  # as when the process crashes
                return False
            (choice,) = event["choices"]
            if not spans or spans[-1]["version"] != label:
                spans.append({"version": label, "start": num_sent})
            num_sent += len(choice["token_ids"])
            spans[-1]["end"] = num_sent
            if "replays" not in faults:
                choice["weight_versions"] = spans
            if choice["finish_reason"] is not None and "weight_spans" in faults:
                choice["weight_versions"] = faults["weight_spans"]
            self._send_event(event)
        return True

    def _send_event(self, event: Any) -> None:
        self._send_chunk(f"data: {json.dumps(event)}\n\n".encode())

    def _send_chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
