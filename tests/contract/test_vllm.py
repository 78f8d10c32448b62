"""The adapter of vLLM is lost where its server goes wrong, and says what it refuses.

That it keeps the contract is for `real_servers.py`.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.contract.vllm_stand_in import TOKEN, StandIn, recorded_events
from tests.runtime.running import wait_until_gone

from dora.backends import keeping, server
from dora.backends.inside.dora_digest import digest_of
from dora.backends.inside.dora_vllm import TOKEN_KEY, Token
from dora.backends.vllm import PRODUCT, Vllm
from dora.backends.weights_file import write_safetensors
from dora.contract.asking import CONFIG, logprobs_of, request, weights
from dora.contract.inference import MAX_CONTEXT, MAX_ROWS
from dora.engine.sequence import Completion, EngineError
from dora.errors import ConfigError, RunError
from dora.model.config import ModelConfig
from dora.model.folder import save_folder
from dora.model.weights import Layout, weight_digest

MADE: list[StandIn] = []
MAX_STEPS = 1000


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The token, and an end for all servers of a test."""
    monkeypatch.setenv(TOKEN_KEY, TOKEN)
    yield
    while MADE:
        MADE.pop().close()


Make = Callable[..., tuple[Vllm, StandIn]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An engine that holds version 0, and its server, of which something is wrong."""

    def made(silence_s: float = 60.0, **faults: Any) -> tuple[Vllm, StandIn]:
        save_folder(tmp_path / "model", CONFIG, weights(0))
        stand_in = StandIn(**faults)
        MADE.append(stand_in)
        return engine_at(stand_in.url, tmp_path / "model", silence_s=silence_s), stand_in

    return made


def engine_at(url: str, model: Path, **more: Any) -> Vllm:
    return Vllm(
        model=str(model),
        max_rows=MAX_ROWS,
        version_slots=1,
        device="cpu",
        dtype="float32",
        url=url,
        **{"max_context": MAX_CONTEXT, **more},
    )


def run(engine: Vllm) -> list[Completion]:
    """Step to the first answer."""
    for _ in range(MAX_STEPS):
        if answers := engine.step():
            return answers
    return []


# what is lost


def test_a_server_that_dies_takes_the_engine_with_it(make: Make) -> None:
    engine, _ = make(dies=1)
    engine.load(0, weights(0))
    engine.submit([request(0)])
    with pytest.raises(RunError, match="vLLM server"):
        run(engine)


def test_a_server_that_falls_silent_is_lost(make: Make) -> None:
    engine, _ = make(silence_s=0.1, holds=True)
    engine.load(0, weights(0))
    engine.submit([request(0)])
    with pytest.raises(RunError, match="silence_s"):
        run(engine)


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [{"version": "somebody's", "start": 0, "end": 12}],
        [{"version": "LABEL", "start": 0, "end": 5}, {"version": "somebody's", "start": 5, "end": 12}],
    ],
    ids=["nothing", "another version", "two versions"],
)
def test_an_answer_of_other_weights_than_it_began_with_is_none(make: Make, spans: Any) -> None:
    """C1: the engine is lost, and its requests begin again elsewhere."""
    engine, stand_in = make(spans=spans)
    engine.load(0, weights(0))
    for span in spans or ():
        span["version"] = span["version"].replace("LABEL", stand_in.label)
    engine.submit([request(0)])
    with pytest.raises(RunError, match="is of version 0"):
        run(engine)


def test_a_server_that_is_gone_is_no_refusal_of_weights(make: Make) -> None:
    engine, stand_in = make()
    MADE.remove(stand_in)
    stand_in.close()
    with pytest.raises(RunError, match="does not answer"):
        engine.load(0, weights(0))


# what a real server has said


@pytest.mark.parametrize("name", ["length", "stop"])
def test_the_words_of_a_real_server_are_understood(make: Make, name: str) -> None:
    """All of its tokens and log-probs, and how it ended."""
    engine, _ = make(replays=name)
    engine.load(0, weights(0))
    asked = request(0, max_tokens=40)
    engine.submit([asked])
    (answer,) = run(engine)
    said = [choice for event in recorded_events(name) for choice in event["choices"]]
    assert answer.token_ids == [token for choice in said for token in choice["token_ids"]]
    assert answer.logprobs == [one["logprob"] for choice in said for one in choice["logprobs"]["content"]]
    assert answer.finish_reason == name
    told = logprobs_of(0, asked.prompt_ids, answer.token_ids)
    assert answer.logprobs == pytest.approx(told, abs=1e-4), "it drew from the weights of version 0"


def test_a_real_answer_of_two_versions_is_none(make: Make) -> None:
    """C1: a real server that took weights in the middle of an answer says so."""
    engine, _ = make(replays="two versions")
    engine.load(0, weights(0))
    engine.submit([request(0, max_tokens=50)])
    with pytest.raises(RunError, match="dora-1"):
        run(engine)


# what is refused


def test_weights_that_are_refused_can_be_given_again(make: Make) -> None:
    engine, _ = make(refusals=1)
    with pytest.raises(EngineError, match="answers 500"):
        engine.load(0, weights(0))
    assert not engine.versions
    assert engine.load(0, weights(0)) == weight_digest(weights(0))


def test_workers_that_read_different_bytes_have_no_version(make: Make) -> None:
    engine, _ = make(digests=["a", "b"])
    with pytest.raises(EngineError, match="different weights"):
        engine.load(0, weights(0))
    assert not engine.versions


def test_the_digest_is_of_the_bytes_that_the_server_read(make: Make) -> None:
    """Whoever ordered the load compares it with what was published."""
    engine, _ = make(digests=["not what was published"])
    assert engine.load(0, weights(0)) == "not what was published"


def test_a_dtype_that_is_not_the_servers_is_refused(make: Make) -> None:
    engine, _ = make()
    with pytest.raises(EngineError, match="bfloat16"):
        engine.load(0, weights(0).bfloat16())


def test_another_token_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_KEY, "another")
    with pytest.raises(EngineError, match=TOKEN_KEY):
        make()


def test_a_server_with_a_shorter_context_is_refused(make: Make, tmp_path: Path) -> None:
    _, stand_in = make()
    with pytest.raises(EngineError, match="takes 64 tokens"):
        engine_at(stand_in.url, tmp_path / "model", max_context=10**6)


@pytest.mark.parametrize("options", [{}, {"python": "python", "url": "http://127.0.0.1:1"}], ids=str)
def test_a_server_is_either_started_or_there(tmp_path: Path, options: Any) -> None:
    with pytest.raises(ConfigError, match="either python"):
        Vllm(model="", max_rows=1, max_context=1, version_slots=1, device="cpu", dtype="float32", **options)


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "http://127.0.0.1", "https://127.0.0.1:8000"])
def test_what_is_no_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="must read"):
        server.attach(PRODUCT, url, 1)


def test_who_finds_no_server_is_told_in_a_line_to_start_it(make: Make, tmp_path: Path) -> None:
    _, stand_in = make()
    MADE.remove(stand_in)
    stand_in.close()
    with pytest.raises(ConfigError, match=r"does not answer .*; start it, see docs/vllm\.md$"):
        engine_at(stand_in.url, tmp_path / "model")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="it would start")
def test_a_server_that_does_not_start_says_why() -> None:
    with pytest.raises(RunError, match="No module named"):
        server.start(PRODUCT, sys.executable, (), {})


# what is given up


@pytest.mark.parametrize("deaf", [0, 2], ids=["at once", "in the end"])
def test_weights_wait_until_the_server_works_on_nothing(make: Make, deaf: int) -> None:
    """A request may come to the server after it was given up; the stand-in refuses weights meanwhile."""
    engine, stand_in = make(holds=True, deaf=deaf + 1)  # it begins by giving up what there was
    engine.load(0, weights(0))
    engine.submit([request(number) for number in range(MAX_ROWS)])
    engine.step()
    assert len(engine.abort([request(number).id for number in range(MAX_ROWS)])) == MAX_ROWS
    engine.drop(0)
    engine.load(1, weights(1))
    assert stand_in.num_under_way == 0
    stand_in.mend()
    engine.submit([request(0, version=1)])
    assert [answer.version for answer in run(engine)] == [1]


# what it is made of


def test_the_digest_of_a_file_is_that_of_the_version(tmp_path: Path) -> None:
    """In one piece, and in several."""
    for config in (CONFIG, ModelConfig(2**19 + 1, 32, 48, 1, 1, 1, 32, 64)):
        layout, path = Layout(config), tmp_path / "weights.safetensors"
        for flat in (torch.arange(layout.numel).float(), torch.ones(layout.numel).bfloat16()):
            write_safetensors(path, layout, flat)
            assert digest_of(str(path)) == weight_digest(flat)
            stored = load_file(path)
            assert stored.keys() == layout.shapes.keys()
            assert all(torch.equal(stored[name], view) for name, view in layout.views(flat).items())


@pytest.mark.parametrize(
    ("kind", "header", "answer"),
    [
        ("http", b"Bearer of this server", "inside"),
        ("http", b"Bearer of another", 401),
        ("http", None, 401),
        ("websocket", None, "websocket.close"),
        ("lifespan", None, "inside"),
    ],
)
def test_no_call_is_answered_without_the_token(kind: str, header: bytes | None, answer: object) -> None:
    told: list[object] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        told.append("inside")

    async def send(message: Any) -> None:
        told.append(message.get("status", message["type"]))

    async def receive() -> Any:
        raise AssertionError

    headers = [] if header is None else [(b"authorization", header)]
    asyncio.run(Token(app)({"type": kind, "headers": headers}, receive, send))
    assert told[0] == answer


def test_a_server_is_not_started_without_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_KEY)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    with pytest.raises(RuntimeError, match=TOKEN_KEY):
        Token(app)


def test_all_that_a_kept_command_started_ends_when_its_starter_is_gone() -> None:
    """What does not hear, too."""
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    )
    body = (
        "import signal, subprocess, sys\n"
        f"below = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=subprocess.PIPE)\n"
        "below.stdout.readline()\n"
        "print(below.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, keeping.__file__, sys.executable, "-c", body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
    ) as kept:
        assert kept.stdout is not None
        assert kept.stdin is not None
        below = psutil.Process(int(kept.stdout.readline()))
        kept.stdin.close()
        kept.wait()
    assert wait_until_gone([below], timeout_s=10) == []
