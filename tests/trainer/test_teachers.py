"""Teachers on a server, and several of them."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
import torch
from tests.fake_openai import FakeOpenAI

from dora.errors import InputError, RunError
from dora.trainer.settings import Sample
from dora.trainer.teachers import ServerTeacher, mean_teacher

SAMPLES = [
    Sample([1, 2], [3, 4, 5], [-1.0] * 3, 0.0),
    Sample([7], [8, 9, 10, 11], [-1.0] * 2, 0.0, loss_mask=[1, 0, 0, 1]),
]


def scored(path: str, body: Any) -> Any:
    """As vLLM replies with `echo`, last prompt first; the log-prob of a token is -token / 10."""
    choices = [
        {"index": index, "logprobs": {"token_logprobs": [None, *(-t / 10 for t in ids[1:]), -9.0]}}
        for index, ids in enumerate(body["prompt"])
    ]
    return {"choices": choices[::-1]}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeOpenAI]:
    monkeypatch.setenv("OPENAI_API_KEY", "key")
    server = FakeOpenAI(scored)
    yield server
    server.stop()


def test_a_server_scores_the_tokens_of_the_loss(server: FakeOpenAI) -> None:
    found = ServerTeacher(server.url + "/", timeout_s=10.0)(SAMPLES)
    assert found[0].tolist() == pytest.approx([-0.3, -0.4, -0.5])
    assert found[1].tolist() == pytest.approx([-0.8, -1.1])
    ((path, body, key),) = server.requests
    assert (path, key) == ("/v1/completions", "Bearer key")
    assert (body["model"], body["echo"], body["temperature"]) == ("served", True, 1.0)
    assert body["prompt"] == [[1, 2, 3, 4, 5], [7, 8, 9, 10, 11]]


def test_a_server_that_fails_is_asked_again(server: FakeOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dora.openai_server._RETRY_INTERVAL_S", 0.01)
    teacher, server.num_failures = ServerTeacher(server.url, timeout_s=10.0), 2
    assert len(teacher(SAMPLES)) == 2
    server.num_failures = 10**6
    slow = ServerTeacher(server.url, timeout_s=0.2)
    with pytest.raises(RunError, match=r"gives no reply within 0\.2 s \(HTTP Error 503.*raise timeout_s"):
        slow(SAMPLES)


def test_a_server_without_logprobs_of_prompts_is_refused(server: FakeOpenAI) -> None:
    server.reply = lambda path, body: {"choices": [{"index": 0, "logprobs": None}] * 2}
    teacher = ServerTeacher(server.url, timeout_s=10.0)
    with pytest.raises(RunError, match="does not return log-probs of a prompt"):
        teacher(SAMPLES)
    with pytest.raises(InputError, match="use a server whose /completions has `echo`"):
        teacher.check(vocab_size=30)


def test_a_server_that_scores_too_slowly_is_refused_at_the_start(server: FakeOpenAI) -> None:
    teacher, answers = ServerTeacher(server.url, timeout_s=0.2), Event()
    teacher.check(vocab_size=30)
    server.reply = lambda path, body: answers.wait(10) and scored(path, body)
    with pytest.raises(InputError, match=r"no reply within 0\.2 s \(timed out\); .* raise timeout_s"):
        teacher.check(vocab_size=30)
    answers.set()


def test_a_server_with_a_smaller_vocabulary_is_refused_at_the_start(server: FakeOpenAI) -> None:
    server.refusal = "token id 29 is out of vocabulary"
    with pytest.raises(InputError) as raised:
        ServerTeacher(server.url, timeout_s=5.0).check(vocab_size=30)
    assert str(raised.value) == (
        f"distillation.teachers: {server.url}/completions refuses the request (HTTP Error 400: Bad Request; "
        "token id 29 is out of vocabulary); use a server that accepts it"
    )
    assert server.requests[-1][1]["prompt"] == [[0, 29]]


def test_a_server_that_does_not_answer_is_refused_at_the_start(server: FakeOpenAI) -> None:
    server.models = []
    with pytest.raises(InputError, match="/models names no model"):
        ServerTeacher(server.url, timeout_s=5.0)
    with pytest.raises(InputError, match=r"/models names no model within 5 s \(.*refused.*start the server"):
        ServerTeacher("http://127.0.0.1:9/v1", timeout_s=5.0)


def test_several_teachers_count_by_the_mean_of_their_logprobs() -> None:
    first, second = [torch.tensor([-1.0, -3.0])], [torch.tensor([-2.0, -1.0])]
    (mean,) = mean_teacher([lambda samples: first, lambda samples: second])(SAMPLES[:1])
    assert mean.tolist() == [-1.5, -2.0]
