"""The adapter of SGLang understands what a real server has said, and refuses what it must.

What it shares with vLLM's is tested there. That it keeps the contract is for `real_servers.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.sglang_stand_in import TOKEN, StandIn, said

from dora.backends.inside.dora_sglang import TOKEN_KEY, telling, with_token
from dora.backends.sglang import SPARE, Sglang
from dora.contract.asking import CONFIG, logprobs_of, request, weights
from dora.contract.inference import MAX_CONTEXT, MAX_ROWS
from dora.engine.sequence import Completion, EngineError
from dora.errors import ConfigError, RunError
from dora.model.folder import save_folder
from dora.model.weights import weight_digest

MADE: list[StandIn] = []
MAX_STEPS = 1000


@pytest.fixture(autouse=True)
def servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The token, and an end for all servers of a test."""
    monkeypatch.setenv(TOKEN_KEY, TOKEN)
    yield
    while MADE:
        MADE.pop().close()


Make = Callable[..., tuple[Sglang, StandIn]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """An engine, and its server."""

    def made(name: str = "length", max_context: int = MAX_CONTEXT, **faults: Any) -> tuple[Sglang, StandIn]:
        save_folder(tmp_path, CONFIG, weights(0))
        MADE.append(StandIn(name, **faults))
        engine = Sglang(
            model=str(tmp_path),
            max_rows=MAX_ROWS,
            max_context=max_context,
            version_slots=1,
            device="cpu",
            dtype="float32",
            url=MADE[-1].url,
        )
        return engine, MADE[-1]

    return made


def run(engine: Sglang) -> list[Completion]:
    """Step to the first answer."""
    for _ in range(MAX_STEPS):
        if answers := engine.step():
            return answers
    return []


@pytest.mark.parametrize("name", ["length", "stop"])
def test_the_words_of_a_real_server_are_understood(make: Make, name: str) -> None:
    """All of its tokens and log-probs, and how it ended."""
    engine, stand_in = make(name)
    assert engine.load(0, weights(0)) == weight_digest(weights(0))
    asked = request(0, max_tokens=40)
    engine.submit([asked])
    (answer,) = run(engine)
    assert answer.token_ids == [token for event in said(name) for token in event["output_ids"]]
    assert answer.finish_reason == name
    told = logprobs_of(0, asked.prompt_ids, answer.token_ids)
    assert answer.logprobs == pytest.approx(told, abs=1e-4), "it drew from the weights of version 0"
    (body,) = (body for path, body in stand_in.asked if path == "/generate")
    assert body["extra_key"] == stand_in.label, "KV of one version never serves another"


def test_a_real_answer_of_two_versions_is_none(make: Make) -> None:
    """C1: a real server that took weights in the middle of an answer says so."""
    engine, _ = make("two versions")
    engine.load(0, weights(0))
    engine.submit([request(0, max_tokens=50)])
    with pytest.raises(RunError, match="dora-1"):
        run(engine)


def test_a_request_that_is_halted_to_move_has_all_that_was_drawn(make: Make) -> None:
    engine, _ = make("aborted")
    engine.load(0, weights(0))
    asked = request(0, max_tokens=50)
    engine.submit([asked])
    for _ in range(MAX_STEPS):
        engine.step()
        if (draft := engine.halted(asked.id)) is not None:
            break
    assert draft is not None
    assert draft.token_ids.tolist() == [token for event in said("aborted") for token in event["output_ids"]]


def test_weights_that_are_refused_can_be_given_again(make: Make) -> None:
    engine, _ = make(refusals=1)
    with pytest.raises(EngineError, match="answers 400"):
        engine.load(0, weights(0))
    assert not engine.versions
    assert engine.load(0, weights(0)) == weight_digest(weights(0))


def test_a_server_that_does_not_tell_what_it_has_loaded_holds_nothing(make: Make) -> None:
    engine, _ = make(silent=True)
    with pytest.raises(EngineError, match="start it as dora_sglang"):
        engine.load(0, weights(0))
    assert not engine.versions


def test_it_stands_still_and_goes_on(make: Make) -> None:
    engine, stand_in = make()
    engine.pause()
    engine.resume()
    assert stand_in.asked[-2:] == [("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})]


def test_another_token_is_refused(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_KEY, "another")
    with pytest.raises(EngineError, match="Unauthorized"):
        make()


def test_a_server_with_a_shorter_context_is_refused(make: Make) -> None:
    with pytest.raises(EngineError, match=f"takes {MAX_CONTEXT + SPARE} tokens"):
        make(max_context=MAX_CONTEXT + 1)


def test_a_server_is_either_started_or_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="either python"):
        Sglang(model="", max_rows=1, max_context=1, version_slots=1, device="cpu", dtype="float32")


def test_the_token_comes_from_the_environment_or_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """Anybody can read the command line of a process."""
    assert with_token(["server", "--host", "here"]) == ["server", "--host", "here", "--api-key", TOKEN]
    monkeypatch.delenv(TOKEN_KEY)
    with pytest.raises(RuntimeError, match=TOKEN_KEY):
        with_token([])


def test_no_digest_is_told_of_weights_that_were_not_loaded() -> None:
    def refuse(self: object, folder: str) -> tuple[bool, str]:
        return False, "no such folder"

    def digest_of(path: str) -> str:
        raise AssertionError

    assert telling(refuse, digest_of)(None, "folder") == (False, "no such folder")
