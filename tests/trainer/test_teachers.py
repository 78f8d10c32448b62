"""Teachers on a server, and several of them."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from dora.errors import ConfigError, RunError
from dora.trainer.settings import Sample
from dora.trainer.teachers import ServerTeacher, Teachers

SAMPLES = [
    Sample([1, 2], [3, 4, 5], [-1.0] * 3, 0.0),
    Sample([7], [8, 9, 10, 11], [-1.0] * 2, 0.0, loss_mask=[1, 0, 0, 1]),
]


class Server(ThreadingHTTPServer):
    """Scores a token by -token / 10, as vLLM's /completions does with `echo`; last prompt first."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[tuple[str, Any, str | None]] = []
        self.num_failures = 0  # of the next requests
        self.has_logprobs = True
        self.models: list[dict[str, str]] = [{"id": "teacher"}]
        threading.Thread(target=self.serve_forever, daemon=True).start()
        self.url = f"http://127.0.0.1:{self.server_port}/v1"

    def stop(self) -> None:
        self.shutdown()
        self.server_close()


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self._reply({"data": self.server.models})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.requests.append((self.path, body, self.headers["Authorization"]))
        if self.server.num_failures:
            self.server.num_failures -= 1
            self.send_error(503)
            return
        choices = [
            {"index": index, "logprobs": {"token_logprobs": [None, *(-t / 10 for t in ids[1:]), -9.0]}}
            for index, ids in enumerate(body["prompt"])
        ]
        if not self.server.has_logprobs:
            choices = [{**choice, "logprobs": None} for choice in choices]
        self._reply({"choices": choices[::-1]})

    def _reply(self, content: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps(content).encode())

    def log_message(self, *arguments: Any) -> None:
        """Nothing."""


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    server = Server()
    yield server
    server.stop()


def test_a_server_scores_the_tokens_of_the_loss(server: Server) -> None:
    scored = ServerTeacher(server.url + "/", timeout_s=10.0)(SAMPLES)
    assert [part.tolist() for part in scored] == [
        pytest.approx([-0.3, -0.4, -0.5]),
        pytest.approx([-0.8, -1.1]),
    ]
    ((path, body, key),) = server.requests
    assert (path, key) == ("/v1/completions", "Bearer key")
    assert (body["model"], body["echo"], body["temperature"]) == ("teacher", True, 1.0)
    assert body["prompt"] == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]


def test_a_server_that_fails_for_a_while_is_asked_again(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dora.trainer.teachers._RETRY_INTERVAL_S", 0.01)
    teacher, server.num_failures = ServerTeacher(server.url, timeout_s=10.0), 2
    assert len(teacher(SAMPLES)) == 2
    server.num_failures = 10**6
    slow = ServerTeacher(server.url, timeout_s=0.2)
    with pytest.raises(RunError, match=r"does not score responses within 0\.2 s \(HTTP Error 503.*raise"):
        slow(SAMPLES)


def test_a_server_without_logprobs_of_prompts_is_refused(server: Server) -> None:
    teacher, server.has_logprobs = ServerTeacher(server.url, timeout_s=10.0), False
    with pytest.raises(RunError, match="does not return log-probs of a prompt"):
        teacher(SAMPLES)


def test_a_server_that_does_not_answer_is_refused_at_the_start(server: Server) -> None:
    server.models = []
    with pytest.raises(ConfigError, match="/models names no model"):
        ServerTeacher(server.url, timeout_s=5.0)
    server.stop()
    with pytest.raises(ConfigError, match=r"/models names no model \(.*refused.*start the server"):
        ServerTeacher(server.url, timeout_s=5.0)


def test_several_teachers_count_by_the_mean_of_their_logprobs() -> None:
    first, second = [torch.tensor([-1.0, -3.0])], [torch.tensor([-2.0, -1.0])]
    (mean,) = Teachers([lambda samples: first, lambda samples: second])(SAMPLES[:1])
    assert mean.tolist() == [-1.5, -2.0]
