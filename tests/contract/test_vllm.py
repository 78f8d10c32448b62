"""The vLLM backend is lost if its server fails, and its errors name the reason.

`real_servers.py` runs the contract.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from tests.contract.fake_server import MAX_STEPS, attached_engines, engine_at, recorded_events, run
from tests.contract.fake_vllm_server import RECORDED, FakeVllmServer
from tests.contract.plugins import PLUGINS
from tests.runtime.running import wait_until_gone
from torch import Tensor

from dora.core.types import Chunk, RequestId
from dora.engine.backends import http_engine, run_until_eof
from dora.engine.backends.server import start_server
from dora.engine.backends.server_plugins.dora_version_turns import VersionTurns
from dora.engine.backends.server_plugins.dora_vllm import TOKEN_VARIABLE, TokenMiddleware, WorkerExtension
from dora.engine.backends.vllm import VLLM, Vllm
from dora.engine.decode_batch import PartialOutput
from dora.engine.messages import ImportFinished, TurnFinished
from dora.engine.request import Completion, EngineError, Request
from dora.errors import ConfigError, RunError
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import WeightLayout, parameter_shapes, weight_digest
from dora.runtime.process.messages import LoadRejected, WeightsLoaded
from dora.runtime.rollout.engine_worker import WeightLoader
from dora.testing import CONFIG, make_request, reference_logprobs, version_weights
from dora.testing.engine_contract import CHARACTERS, MAX_ROWS, MigrationDriver
from dora.weights.store import WeightStore
from dora.weights.version_file import write_version

Make = Callable[..., tuple[Vllm, FakeVllmServer]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes an engine and its server, with faults."""
    with attached_engines(Vllm, FakeVllmServer, tmp_path) as make:
        yield make


def test_a_file_of_another_model_is_rejected(make: Make, tmp_path: Path) -> None:
    engine, server = make()
    store = WeightStore(tmp_path, shapes={"a": (3,)})
    store.publish(0, torch.zeros(3))
    with pytest.raises(EngineError, match="has 3 weights of 1 tensors in float32, which are not those of"):
        engine.start_load(0, store.path(0))
    assert (server.loaded_files, dict(engine.versions)) == ([], {})


# lost engines


def test_a_server_that_stops_during_a_load_ends_its_engine(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A load itself may take minutes."""
    monkeypatch.setattr(http_engine, "LOAD_CHECK_S", 0.02)
    engine, server = make(silence_s=0.2, num_slots=2, holds_loads=True)
    store = WeightStore(tmp_path, shapes=parameter_shapes(CONFIG))
    store.publish(0, version_weights(0))
    loading = engine.start_load(0, store.path(0))
    with pytest.raises(TimeoutError):
        loading.result(0.5)
    server.faults["is_stopped"] = True
    with pytest.raises(RunError, match=r"the vLLM server at .* does not answer"):
        loading.result(10.0)
    server.faults.clear()


def test_an_unresponsive_server_ends_its_engine(make: Make) -> None:
    engine, _ = make(num_versions=1, silence_s=0.1, holds=True)
    engine.submit([make_request(0)])
    with pytest.raises(RunError, match="silence_s"):
        run(engine)


@pytest.mark.parametrize(
    "spans",
    [
        None,
        [{"version": "another", "start": 0, "end": 12}],
        [{"version": "LABEL", "start": 0, "end": 5}, {"version": "another", "start": 5, "end": 12}],
    ],
    ids=["nothing", "another version", "two versions"],
)
def test_an_answer_of_other_weights_than_its_versions_is_rejected(make: Make, spans: Any) -> None:
    """C1: the engine is lost, and its requests start again on another one."""
    engine, server = make(num_versions=1, weight_spans=spans)
    for span in spans or ():
        span["version"] = span["version"].replace("LABEL", server.label)
    engine.submit([make_request(0)])
    with pytest.raises(RunError, match="is of version 0"):
        run(engine)


def test_a_load_into_a_stopped_server_is_an_engine_loss(make: Make) -> None:
    engine, server = make()
    server.close()
    with pytest.raises(RunError, match="does not answer"):
        engine.load(0, version_weights(0))


# recorded answers


@pytest.mark.parametrize("name", ["length", "stop"])
def test_a_real_servers_answer_is_parsed(make: Make, name: str) -> None:
    """All of its tokens and log-probs, and its finish reason."""
    engine, _ = make(num_versions=1, replays=name)
    request = make_request(0, max_tokens=40)
    engine.submit([request])
    (answer,) = run(engine)
    choices = [choice for event in recorded_events(RECORDED, name) for choice in event["choices"]]
    assert answer.token_ids.tolist() == [token for choice in choices for token in choice["token_ids"]]
    recorded = [token["logprob"] for choice in choices for token in choice["logprobs"]["content"]]
    assert answer.logprobs.tolist() == np.array(recorded, np.float32).tolist()
    assert answer.finish_reason == name
    expected = reference_logprobs(0, request.prompt_ids, answer.token_ids.tolist())
    assert answer.logprobs == pytest.approx(expected, abs=1e-4), "the weights of version 0 generated it"


# stop strings; the fake server's answers begin with token 9


def text_of(answer: Completion | TurnFinished) -> str:
    return "".join(CHARACTERS[token] for token in answer.token_ids)


def with_stops(number: int, *stops: str) -> Request:
    return make_request(number, max_tokens=30, stop_strings=stops)


@pytest.mark.parametrize(
    ("stop", "num_tokens"), [("j", 1), ("lm", 4), ("r", 9), ("wxy", 16)], ids=["first", "two", "last", "next"]
)
def test_an_answer_ends_with_the_token_that_completes_a_stop_string(
    make: Make, stop: str, num_tokens: int
) -> None:
    """At each place in an event of the server. The server is told to end, and its last event proves C1."""
    engine, server = make(num_versions=1, holds_after=3)
    engine.submit([with_stops(0, "nothing", stop)])
    (answer,) = run(engine)
    assert text_of(answer) == CHARACTERS[9 : 9 + num_tokens]
    assert answer.finish_reason == "stop"
    assert {len(c) for c in (answer.logprobs, answer.unfiltered_logprobs, answer.raw_logprobs)} == {
        num_tokens
    }
    assert answer.chunks == (Chunk(0, engine.versions[0], num_tokens),)
    assert engine.num_decoded == num_tokens
    assert [*server.aborted] == [f"generate-tokens-{server.generate_calls[0]['request_id']}"]
    assert not engine.can_step


def test_an_answer_that_the_server_ended_stops_at_its_stop_string(make: Make) -> None:
    """The stop string is in the last event: there is nothing to abort."""
    engine, server = make(num_versions=1)
    engine.submit([make_request(0, max_tokens=12, stop_strings=("t",)), make_request(1, max_tokens=12)])
    answers: list[Completion] = []
    while engine.can_step:
        answers += engine.step()
    ends = {answer.id.sibling: (len(answer.token_ids), answer.finish_reason) for answer in answers}
    assert (ends, server.aborted) == ({0: (11, "stop"), 1: (12, "length")}, set())
    intervals = [call["sampling_params"]["stream_interval"] for call in server.generate_calls]
    assert sorted(intervals) == [8, 32], "the sooner it sends the string, the fewer tokens it wastes"


@pytest.mark.parametrize("end", [11, 31])
def test_discarded_tokens_of_other_weights_are_noticed(make: Make, end: int) -> None:
    """C1: the server's report must cover all tokens that it has generated, also those after the string."""
    engine, server = make(num_versions=1)
    server.faults["weight_spans"] = [{"version": server.label, "start": 0, "end": end}]
    engine.submit([make_request(0, max_tokens=12, stop_strings=("t",))])
    with pytest.raises(RunError, match="is of version 0"):
        run(engine)


def test_a_request_that_has_reached_its_stop_string_does_not_migrate(make: Make) -> None:
    engine, _ = make(num_versions=1, holds_after=2)
    request = with_stops(0, "l")
    engine.submit([request])
    while engine.progress().get(request.id) != 3:
        assert engine.step() == []
    assert engine.halt(request.id, carries_kv=True) is None
    (answer,) = run(engine)
    assert (len(answer.token_ids), answer.finish_reason) == (3, "stop")


# episodes


def next_turn(engine: Vllm) -> TurnFinished:
    """Step until a turn has finished."""
    for _ in range(MAX_STEPS):
        assert engine.step() == []
        if turns := engine.pop_finished_turns():
            return turns[0]
    raise AssertionError("no turn has finished")


def test_an_episode_continues_with_its_observation_and_ends_with_its_last_turn(make: Make) -> None:
    """Each turn is a request of its own at the server, and C1 is checked for each."""
    engine, server = make(num_versions=1, reported_prefill=3)
    request = make_request(0, max_tokens=9, max_turn_tokens=4)
    engine.submit([request])
    first = next_turn(engine)
    assert (len(first.token_ids), first.finish_reason, first.num_left) == (4, "turn_length", 5)
    assert first.logprobs == [-1.0] * 4
    assert not engine.can_step, "nothing happens until the observation comes"
    assert engine.progress() == {request.id: 4}
    for observation, error in (([], "has 0 tokens"), ([1] * 5, "from 1 to 4"), ([99], "outside 0..28")):
        with pytest.raises(EngineError, match=error):
            engine.continue_episode(request.id, observation)
    engine.continue_episode(request.id, [7, 8])
    with pytest.raises(EngineError, match="does not wait for an observation"):
        engine.end_episode(request.id)
    second = next_turn(engine)
    assert (len(second.token_ids), second.finish_reason, second.num_left) == (3, "length", 0)
    calls = server.generate_calls
    assert calls[1]["token_ids"] == [*request.prompt_ids, *first.token_ids, 7, 8]
    assert [call["sampling_params"]["max_tokens"] for call in calls] == [4, 3]
    assert calls[0]["cache_salt"] == calls[1]["cache_salt"]
    is_counted = [call["stream_options"]["include_usage"] for call in calls]
    assert is_counted == [False, True], "only after an observation it matters what the server prefills"
    engine.end_episode(request.id)
    (answer,) = run(engine)
    assert answer.token_ids.tolist() == [*first.token_ids, 7, 8, *second.token_ids]
    observed = [False] * 4 + [True] * 2 + [False] * 3
    assert np.isnan(answer.logprobs).tolist() == np.isnan(answer.raw_logprobs).tolist() == observed
    assert answer.chunks == (Chunk(0, engine.versions[0], 9),)
    assert answer.finish_reason == "length"
    assert engine.num_recomputed == 0, "the server prefilled two observation tokens and the last one before"
    assert (engine.progress(), engine.can_step) == ({}, False)


def test_an_episode_between_two_turns_leaves_its_row_to_others(make: Make) -> None:
    engine, _ = make(num_versions=1)
    waiting = [make_request(number, max_turn_tokens=4) for number in range(MAX_ROWS)]
    engine.submit(waiting)
    turns = 0
    while turns < MAX_ROWS:
        assert engine.step() == []
        turns += len(engine.pop_finished_turns())
    engine.submit([make_request(MAX_ROWS)])
    assert [answer.id.sibling for answer in run(engine)] == [MAX_ROWS]
    with pytest.raises(EngineError, match=f"{MAX_ROWS} unfinished requests"):
        engine.drop(0)
    assert engine.halt(waiting[0].id, carries_kv=False) is None, "it does not migrate now"
    assert engine.abort([waiting[0].id]) == {waiting[0].id: 4}
    engine.end_episode(waiting[1].id)
    assert [len(answer.token_ids) for answer in run(engine)] == [4]


def test_a_stop_string_is_found_in_the_current_turn_only(make: Make) -> None:
    """Tokens count on from the length of the prompt at the fake server: the second turn begins with "n"."""
    engine, _ = make(num_versions=1)
    request = make_request(0, max_tokens=30, max_turn_tokens=12, stop_strings=("kl", "mn", "no"))
    engine.submit([request])
    turn = next_turn(engine)
    assert (text_of(turn), turn.finish_reason) == ("jkl", "stop")
    engine.continue_episode(request.id, [CHARACTERS.index("m")])
    turn = next_turn(engine)
    assert (text_of(turn), turn.finish_reason) == ("no", "stop")


def test_an_episode_that_has_migrated_in_its_second_turn_ends_that_turn(make: Make, tmp_path: Path) -> None:
    """The destination finds the begin of the turn behind the last observation."""
    source, server = make(num_versions=1)
    request = make_request(0, max_tokens=20, max_turn_tokens=6)
    source.submit([request])
    first = next_turn(source)
    server.faults["holds"] = True
    source.continue_episode(request.id, [7, 8])
    driver, destination = MigrationDriver(tmp_path), make()[0]
    destination.load(0, version_weights(0))
    while source.progress()[request.id] < 9:
        source.step()
    replies = driver.migrate(request, source, destination)
    assert any(isinstance(reply, ImportFinished) for reply in replies)
    second = next_turn(destination)
    assert (len(second.token_ids), second.finish_reason, second.num_left) == (6, "turn_length", 6)
    destination.end_episode(request.id)
    (answer,) = run(destination)
    assert answer.token_ids.tolist() == [*first.token_ids, 7, 8, *second.token_ids]


# outputs of lost engines


def step_until(engine: Vllm, num_tokens: int) -> None:
    """Step until each request has so many tokens."""
    for _ in range(MAX_STEPS):
        if min(engine.progress().values()) >= num_tokens:
            return
        assert engine.step() == []
    raise AssertionError("the server has sent too few tokens")


def test_another_server_continues_the_outputs_of_a_crashed_one(make: Make) -> None:
    """It gets their tokens behind the prompt, and may generate what is left of max_tokens."""
    lost, server = make(num_versions=1, holds_after=2)
    requests = [make_request(number, max_tokens=30, temperature=0.5 + 0.5 * number) for number in range(2)]
    lost.submit(requests)
    step_until(lost, 9)
    server.crash()
    outputs = lost.partial_outputs()
    with pytest.raises(RunError, match="vLLM server ended the response early"):
        run(lost)
    engine, server = make(num_versions=1)
    engine.submit(requests, outputs)
    assert engine.progress() == {request.id: 9 for request in requests}
    assert engine.partial_outputs().keys() == outputs.keys(), "also before they have a row"
    answers: dict[RequestId, Completion] = {}
    while engine.can_step:
        answers |= {answer.id: answer for answer in engine.step()}
    for request, call in zip(requests, server.generate_calls, strict=True):
        answer, kept = answers[request.id], outputs[request.id]
        assert call["token_ids"] == [*request.prompt_ids, *kept.token_ids.tolist()]
        assert call["sampling_params"]["max_tokens"] == 21
        assert answer.token_ids[:9].tolist() == kept.token_ids.tolist()
        assert (len(answer.token_ids), answer.finish_reason) == (30, "length")
        assert answer.logprobs.tolist() == [-1.0] * 30
        assert np.isnan(answer.raw_logprobs).all() == (request.sampling.temperature == 0.5)
        assert answer.chunks == (Chunk(0, engine.versions[0], 30),)
    assert engine.num_decoded == 42


def test_an_output_of_other_weights_is_not_continued(make: Make) -> None:
    """A version that was trained again has the same number and another digest."""
    lost, _ = make(num_versions=1, holds=True)
    request = make_request(0)
    lost.submit([request])
    step_until(lost, 1)
    engine, server = make()
    engine.load(0, version_weights(1))
    engine.submit([request], lost.partial_outputs())
    assert engine.progress() == {request.id: 0}
    assert engine.partial_outputs() == {}
    run(engine)
    assert server.generate_calls[0]["token_ids"] == [*request.prompt_ids]


def test_an_output_whose_weights_the_server_has_not_listed_is_not_reported(make: Make) -> None:
    """As those of a server that lists them in the last event of a response only."""
    engine, _ = make(num_versions=1, replays="aborted", holds_after=1)
    engine.submit([make_request(0)])
    step_until(engine, 1)
    assert engine.partial_outputs() == {}


def test_other_weights_are_noticed_before_the_response_ends(make: Make) -> None:
    """C1: tokens of unknown weights are never reported as an output to continue."""
    engine, server = make(num_versions=1, holds_after=1)
    engine.submit([make_request(0, max_tokens=40)])
    step_until(engine, 1)
    server.label = "of another client"
    server.clear_faults()
    with pytest.raises(RunError, match=r"is of version 0 .* but its response was generated by .*another"):
        run(engine)


def test_an_output_that_ends_with_its_stop_string_is_not_reported(make: Make) -> None:
    """It is finished, though the server has not ended the response yet."""
    engine, _ = make(num_versions=1, holds_after=2, ignored_aborts=2)  # the first abort is of other clients
    engine.submit([with_stops(0, "l")])
    step_until(engine, 1)
    assert [len(output.token_ids) for output in engine.partial_outputs().values()] == [1]
    step_until(engine, 3)
    assert engine.partial_outputs() == {}


@pytest.mark.parametrize("policy", ["partial", "inflight"])
def test_requests_that_change_their_version_have_no_output_to_continue(make: Make, policy: str) -> None:
    engine, _ = make(num_versions=1, num_slots=2, holds=True, inflight_update=policy)
    request = make_request(0)
    output = PartialOutput(
        np.array([3], np.int64), np.full((1, 3), -1.0, np.float32), (Chunk(0, engine.versions[0], 1),)
    )
    engine.submit([request], {request.id: output})
    assert engine.progress() == {request.id: 0}
    step_until(engine, 1)
    assert engine.partial_outputs() == {}


def test_an_episode_continues_in_its_turn(make: Make) -> None:
    """A turn that was cut off gets its other tokens, and one that is whole waits for its observation."""
    lost, server = make(num_versions=1)
    request = make_request(0, max_tokens=30, max_turn_tokens=12, stop_strings=("kl", "no"))
    lost.submit([request])
    first, whole = next_turn(lost), lost.partial_outputs()[request.id]
    server.faults["holds"] = True
    lost.continue_episode(request.id, [CHARACTERS.index("h")])
    step_until(lost, 5)
    cut_off = lost.partial_outputs()[request.id]
    assert cut_off.token_ids.tolist() == [*first.token_ids, 7, 13]
    for output, num_tokens in ((whole, 3), (cut_off, 5)):
        engine, server = make(num_versions=1)
        engine.submit([request], {request.id: output})
        assert engine.progress() == {request.id: num_tokens}
        assert engine.can_step == (output is cut_off)
        if output is whole:
            engine.continue_episode(request.id, [CHARACTERS.index("h")])
        second = next_turn(engine)
        assert (text_of(second), second.finish_reason) == ("no", "stop")
        assert second.num_left == 24
        engine.end_episode(request.id)
        (answer,) = run(engine)
        assert answer.token_ids.tolist() == [*first.token_ids, 7, *second.token_ids]
        assert np.isnan(answer.logprobs).tolist() == [False] * 3 + [True] + [False] * 2
        assert answer.chunks == (Chunk(0, engine.versions[0], 6),)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_turn_tokens": 9, "stop_ids": (17,)}, "stop"),
        ({"max_turn_tokens": 9}, "turn_length"),
        ({"max_turn_tokens": 20, "max_tokens": 9}, "length"),
    ],
    ids=["stop id", "turn", "episode"],
)
def test_an_episode_that_continues_after_its_last_turn_ends_as_that_has(
    make: Make, options: dict[str, Any], reason: str
) -> None:
    engine, _ = make(num_versions=1)
    request = make_request(0, **{"max_tokens": 30, **options})
    output = PartialOutput(
        np.arange(9, 18), np.full((9, 3), -1.0, np.float32), (Chunk(0, engine.versions[0], 9),)
    )
    engine.submit([request], {request.id: output})
    engine.end_episode(request.id)
    (answer,) = run(engine)
    assert (answer.token_ids.tolist(), answer.finish_reason) == ([*range(9, 18)], reason)


# rejections


def test_a_version_that_workers_read_differently_is_not_loaded(make: Make) -> None:
    engine, _ = make(digests=["a", "b"])
    with pytest.raises(EngineError, match="different weights"):
        engine.load(0, version_weights(0))
    assert not engine.versions


def test_the_digest_is_of_the_bytes_that_the_server_has_read(make: Make) -> None:
    """The caller of `load` compares it with the published one."""
    engine, _ = make(digests=["not what was published"])
    assert engine.load(0, version_weights(0)) == "not what was published"


def test_a_dtype_that_is_not_the_servers_is_rejected(make: Make) -> None:
    engine, _ = make()
    with pytest.raises(EngineError, match="bfloat16"):
        engine.load(0, version_weights(0).bfloat16())


def test_a_server_with_a_shorter_context_is_rejected(make: Make, tmp_path: Path) -> None:
    _, server = make()
    with pytest.raises(EngineError, match="accepts 64 tokens"):
        engine_at(Vllm, server.url, tmp_path / "model", max_context=10**6)


@pytest.mark.parametrize("version", ["0.31.4", "0.320.0", "1.32.0", "dev"])
def test_a_server_of_an_untested_version_is_rejected(make: Make, version: str) -> None:
    with pytest.raises(ConfigError, match=rf"has vLLM {version}; .* 0\.32: install vllm==0\.32\.\*"):
        make(version=version)


def test_a_patch_release_of_a_tested_version_is_accepted(make: Make) -> None:
    engine, _ = make(version="0.32.7+cpu")
    assert engine.kernels == "vLLM 0.32.7+cpu on cpu"


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"weight_transfer": "rdma"}, "must be one of reload, file, ipc, nccl"),
        ({"weight_transfer": "file", "url": "http://127.0.0.1:1"}, "name it in python"),
        ({"weight_transfer": "nccl", "python": "python3"}, "set both or neither"),
        ({"sender_device": "cuda:1", "url": "http://127.0.0.1:1"}, "set both or neither"),
    ],
)
def test_a_weight_transfer_that_cannot_be_is_refused(options: Any, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        Vllm.check_options(**options)


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"weight_transfer": "ipc", "device": "cpu"}, "needs GPUs; set weight_transfer = 'file' or 'reload'"),
        ({"weight_transfer": "ipc", "device": "cuda:0", "num_gpus": 2}, "the server has 2; set it to 'nccl'"),
    ],
)
def test_a_weight_transfer_needs_its_gpus(options: Any, error: str, tmp_path: Path) -> None:
    save_pretrained(tmp_path / "model", CONFIG, version_weights(0))
    with pytest.raises(EngineError, match=error):
        engine_at(Vllm, None, tmp_path / "model", python=sys.executable, **options)


def test_the_error_for_a_missing_server_names_the_remedy(make: Make, tmp_path: Path) -> None:
    _, server = make()
    server.close()
    with pytest.raises(ConfigError, match=r"does not answer .*; start it, see docs/vllm\.md$"):
        engine_at(Vllm, server.url, tmp_path / "model")


@pytest.mark.skipif(find_spec("vllm") is not None, reason="the server would start")
def test_the_error_for_a_server_that_does_not_start_has_its_output() -> None:
    with pytest.raises(RunError, match="No module named"):
        start_server(VLLM, sys.executable, (), {})


@pytest.mark.parametrize(
    ("arguments", "binding", "is_in_process"),
    [
        ((), None, True),
        (("--max-logprobs", "1"), "nobind", True),
        (("--tensor-parallel-size", "2"), None, False),
        (("--pipeline_parallel_size=2",), None, False),
        (("-tp", "2"), None, False),
        ((), "0-3", False),
    ],
)
def test_the_worker_on_a_cpu_is_in_the_engines_process_if_there_is_only_one(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    binding: str | None,
    is_in_process: bool,
) -> None:
    """And if vLLM does not bind threads: only worker processes can. The interpreter prints its arguments."""
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    if binding is not None:
        monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", binding)
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o700)
    save_pretrained(tmp_path / "model", CONFIG, version_weights(0))
    with pytest.raises(RunError, match=r"did not start:\n-m vllm\.entrypoints") as error:
        engine_at(Vllm, None, tmp_path / "model", python=str(python), arguments=arguments)
    assert ("dora_vllm_executor.InProcessExecutor" in str(error.value)) == is_in_process


# aborts


@pytest.mark.parametrize("num_slots", [1, 2])
@pytest.mark.parametrize("num_ignored", [0, 2], ids=["at once", "in the end"])
def test_a_version_is_dropped_once_the_server_generates_nothing_for_it(
    make: Make, num_ignored: int, num_slots: int
) -> None:
    """An abort may overtake its request. The fake server fails if weights change during an answer."""
    faults = {"holds": True, "ignored_aborts": num_ignored + 1}  # the first abort is of other clients
    engine, server = make(num_versions=1, num_slots=num_slots, **faults)
    engine.submit([make_request(number) for number in range(MAX_ROWS)])
    engine.step()
    assert len(engine.abort([make_request(number).id for number in range(MAX_ROWS)])) == MAX_ROWS
    engine.drop(0)
    engine.load(1, version_weights(1))
    assert server.num_streams == 0
    server.clear_faults()
    engine.submit([make_request(0, version=1)])
    assert [answer.version for answer in run(engine)] == [1]


# several versions


def test_versions_generate_side_by_side_and_one_is_replaced_meanwhile(make: Make) -> None:
    """No request of another version ends for it. The fake server answers with the version of the request."""
    engine, server = make(num_slots=2, holds_after=2)
    for version in range(2):
        assert engine.load(version, version_weights(version)) == weight_digest(version_weights(version))
    engine.submit([make_request(number, version=number, max_tokens=40) for number in range(2)])
    while min(engine.progress().values()) <= 1:
        engine.step()
    with pytest.raises(EngineError, match="no free slot for version 2"):
        engine.load(2, version_weights(2))
    assert engine.abort([make_request(0).id]) == {make_request(0).id: 9}
    engine.drop(0)
    assert engine.load(2, version_weights(2)) == weight_digest(version_weights(2))
    assert (server.num_streams, len(server.digests)) == (1, 2), "only the request of version 1 goes on"
    server.clear_faults()
    engine.submit([make_request(2, version=2)])
    answers: list[Completion] = []
    while engine.can_step:
        answers += engine.step()
    assert {answer.id.sibling: answer.version for answer in answers} == {1: 1, 2: 2}


def test_an_engine_works_while_its_server_loads_a_version(make: Make, tmp_path: Path) -> None:
    """It completes and aborts requests; those of the new version wait for it, and a failed load is named."""
    engine, server = make(num_slots=2)
    store = WeightStore(tmp_path, shapes=parameter_shapes(CONFIG))
    for version in range(2):
        store.publish(version, version_weights(version))
    loader = WeightLoader(engine, store)
    loader.load(0)
    loader.wait_for({0})
    server.faults |= {"holds_loads": True, "rejected_loads": 1}
    loader.load(1)
    engine.submit([make_request(0), make_request(1)])
    assert engine.abort([make_request(1).id]) == {make_request(1).id: 0}
    (answer,) = run(engine)
    assert (answer.id, loader.is_busy, [*engine.versions]) == (make_request(0).id, True, [0])
    del server.faults["holds_loads"]
    loader.wait_for({1})
    loader.load(1)
    loader.wait_for({1})
    first, failed, loaded = loader.poll()
    assert isinstance(failed, LoadRejected)
    assert [first, loaded] == [WeightsLoaded(v, weight_digest(version_weights(v))) for v in range(2)]
    assert [*engine.versions] == [0, 1]


@pytest.mark.parametrize("policy", ["partial", "inflight"])
def test_requests_continue_with_a_newer_version_except_held_out_ones(make: Make, policy: str) -> None:
    """`inflight` keeps their KV; `partial` prefills their tokens again. A request that waits changes, too."""
    engine, server = make(num_slots=2, holds_after=2, inflight_update=policy)
    digests = [engine.load(0, version_weights(0))]
    training, waiting = (make_request(number, max_tokens=40) for number in (0, 1))
    held_out = replace(training, id=RequestId(-1, 0, 0))
    engine.submit([training, held_out])
    while min(engine.progress().values()) <= 1:
        engine.step()
    engine.submit([waiting])
    digests.append(engine.load(1, version_weights(1)))
    answers: dict[RequestId, Completion] = {}
    while policy == "partial" and len(server.generate_calls) < 4:
        engine.step()
    server.clear_faults()
    while engine.can_step:
        answers |= {answer.id: answer for answer in engine.step()}
    chunks = {id: answer.chunks for id, answer in answers.items()}
    assert chunks[training.id] == (Chunk(0, digests[0], 9), Chunk(1, digests[1], 31))
    assert chunks[held_out.id] == (Chunk(0, digests[0], 40),)
    assert chunks[waiting.id] == (Chunk(1, digests[1], 40),)
    assert {id.is_held_out: answer.version for id, answer in answers.items()} == {False: 1, True: 0}
    again = [body for body in server.generate_calls if len(body["token_ids"]) > len(training.prompt_ids)]
    assert len(again) == (policy == "partial")
    assert engine.num_recomputed == (len(training.prompt_ids) + 9) * (policy == "partial")
    engine.drop(0)


@pytest.mark.parametrize("policy", ["partial", "inflight"])
def test_a_request_that_is_late_for_its_version_starts_with_the_newest_one(make: Make, policy: str) -> None:
    """The driver sends it before it knows that the newer version is loaded, and drops the older one."""
    engine, _ = make(num_versions=2, num_slots=2, inflight_update=policy)
    engine.submit([make_request(0, version=0)])
    engine.drop(0)
    assert [answer.version for answer in run(engine)] == [1]


def test_an_engine_that_attaches_ends_what_the_last_one_has_set(make: Make, tmp_path: Path) -> None:
    _, server = make(num_slots=2)
    server.newest, server.decode_only = "of the last engine", [["of the last engine"]]
    engine_at(Vllm, server.url, tmp_path / "model", version_slots=2)
    assert (server.newest, server.decode_only[-1]) == ("", [])


def test_a_server_with_plugins_of_another_version_is_rejected(make: Make) -> None:
    with pytest.raises(EngineError, match="has the plugins of another version of DORA-RL: start it again"):
        make(info={"protocol": 1})


def test_the_weights_of_a_version_that_the_engine_does_not_know_end_it(make: Make) -> None:
    engine, server = make(num_versions=1, num_slots=2, inflight_update="inflight")
    server.newest = "of another client"
    engine.submit([make_request(0)])
    with pytest.raises(RunError, match=r"generated by \[\{'version': 'of another client'"):
        run(engine)


def test_requests_near_their_deadline_are_named_to_the_server(make: Make) -> None:
    """By their ids there, also of those that start later."""
    engine, server = make(num_versions=1, num_slots=2, holds=True)
    server.decode_only.clear()  # what an attached engine resets
    requests = [make_request(number, prompt_ids=(1 + number,)) for number in range(MAX_ROWS + 1)]
    engine.submit(requests)
    engine.step()
    engine.decode_only([requests[0].id, requests[MAX_ROWS].id])
    engine.step()
    started = server.generate_calls_when(MAX_ROWS)
    first = next(body["request_id"] for body in started if body["token_ids"] == [*requests[0].prompt_ids])
    assert server.decode_only == [[f"generate-tokens-{first}"]]
    engine.abort([requests[1].id])
    engine.step()
    last = server.generate_calls_when(MAX_ROWS + 1)[-1]["request_id"]
    assert server.decode_only[1:] == [[f"generate-tokens-{first}", f"generate-tokens-{last}"]]
    engine.decode_only(())
    engine.step()
    assert server.decode_only[2:] == [[]]


def test_a_server_with_one_slot_cannot_decode_some_requests_only(make: Make) -> None:
    engine, server = make(num_versions=1)
    engine.decode_only(())
    with pytest.raises(EngineError, match=r"orchestrator\.prioritize_stragglers = false"):
        engine.decode_only([make_request(0).id])
    assert server.decode_only == []


def test_a_weight_transfer_of_vllm_has_one_version(tmp_path: Path) -> None:
    save_pretrained(tmp_path / "model", CONFIG, version_weights(0))
    options: Any = {"version_slots": 2, "weight_transfer": "file", "python": sys.executable}
    with pytest.raises(EngineError, match="'reload', or set version_slots = 1"):
        engine_at(Vllm, None, tmp_path / "model", **options)


def test_a_version_waits_for_at_most_one_turn_of_each_other() -> None:
    """Turns are as long as a version has requests. Versions come, go and come back."""
    turns = VersionTurns(turn_steps=4)
    requests = {"a": 8, "b": 2, "c": 1}
    assert "".join(turns.next(requests) for _ in range(12)) == "aaaabcaaaabc"
    assert "".join(turns.next({"b": 2, "c": 2}) for _ in range(9)) == "bbbbccccb"
    turns.end()
    assert "".join(turns.next({"b": 2, "c": 2, "d": 2}) for _ in range(9)) == "ddddccccb"
    assert turns.next({}) == ""


# parts


class PackedOnce:
    """vLLM's quantization method of an LM head or a mixture of experts, whose weights a load replaces."""

    def __init__(self, packed: list[str]) -> None:
        self.packed, self.moe_kernel = packed, SimpleNamespace(fused_experts=self)

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        self.packed.append(str(layer.name))


class FakeRunner:
    """The part of vLLM's model runner that loads weights into a model on the CPU."""

    dtype = torch.float32

    def __init__(self) -> None:
        self.loaded: dict[str, Tensor] = {}
        self.packed: list[str] = []  # layers, since the last load
        self._model = torch.nn.Sequential(torch.nn.Linear(1, 1), self._layer("experts"))
        self._model.lm_head = head = self._layer("head")
        del head.quant_method.moe_kernel

    def get_model(self) -> torch.nn.Module:
        return self._model

    def reload_weights(self, weights_iterator: Iterator[tuple[str, Tensor]]) -> None:
        self.packed.clear()
        self.loaded = {name: weight.clone() for name, weight in weights_iterator}

    def _layer(self, name: str) -> Any:
        layer: Any = torch.nn.Linear(1, 1)
        layer.name, layer.quant_method = name, PackedOnce(self.packed)
        return layer


def test_the_server_reads_each_parameter_of_a_versions_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Returns the digest, for files of one piece and of several, and packs on a CPU what vLLM packs once."""
    monkeypatch.syspath_prepend(PLUGINS)
    for config in (CONFIG, ModelConfig(2**19 + 1, 32, 48, 1, 1, 1, 32, 64)):
        layout, path = WeightLayout(config), tmp_path / "weights"
        for flat in (torch.arange(layout.numel).float(), torch.ones(layout.numel).bfloat16()):
            dtype = str(flat.dtype).removeprefix("torch.")
            write_version(path, 0, flat, dtype, layout.shapes)
            extension = WorkerExtension()
            extension.model_runner, extension.device = FakeRunner(), torch.device("cpu")
            digest = extension.dora_load_weights("a label", str(path))
            assert digest == weight_digest(flat)
            assert extension.model_runner.packed == ["head", "experts"]
            loaded, views = extension.model_runner.loaded, layout.views(flat)
            assert loaded.keys() == views.keys()
            assert all(torch.equal(loaded[name], view) for name, view in views.items())


class RequestState:
    """vLLM's, as far as the plugin uses it."""

    def _new_completion_output(self, num_tokens: int) -> SimpleNamespace:
        return SimpleNamespace(num_tokens=num_tokens, weight_versions=None)

    def _weight_version_spans(self) -> list[str]:
        return ["dora-0"]


@pytest.fixture
def output_processor(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module in place of vLLM's, which the plugin imports."""
    stand_in: Any = ModuleType("vllm.v1.engine.output_processor")
    stand_in.RequestState = type("RequestState", (RequestState,), {})
    monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
    return stand_in


def test_each_output_has_the_weights_of_its_tokens(output_processor: Any) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    TokenMiddleware(app)
    output = output_processor.RequestState()._new_completion_output(7)
    assert (output.num_tokens, output.weight_versions) == (7, ["dora-0"])


@pytest.mark.usefixtures("output_processor")
@pytest.mark.parametrize(
    ("kind", "header", "response"),
    [
        ("http", b"Bearer of this server", "the app's"),
        ("http", b"Bearer of another", 401),
        ("http", None, 401),
        ("websocket", None, "websocket.close"),
        ("lifespan", None, "the app's"),
    ],
)
def test_no_call_is_answered_without_the_auth_token(
    kind: str, header: bytes | None, response: object
) -> None:
    responses: list[object] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        responses.append("the app's")

    async def send(message: Any) -> None:
        responses.append(message.get("status", message["type"]))

    async def receive() -> Any:
        raise AssertionError

    headers = [] if header is None else [(b"authorization", header)]
    asyncio.run(TokenMiddleware(app)({"type": kind, "headers": headers}, receive, send))
    assert responses[0] == response


def test_the_server_requires_an_auth_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(TOKEN_VARIABLE)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    with pytest.raises(RuntimeError, match=TOKEN_VARIABLE):
        TokenMiddleware(app)


@pytest.mark.parametrize("plugin", ["dora_digest", "dora_sglang", "dora_vllm"])
def test_server_plugins_import_without_dora(plugin: str) -> None:
    """A server's Python environment has the plugins' folder on its path, and no package `dora`."""
    code = (
        "import sys\n"
        "sys.modules['dora'] = None\n"
        f"sys.path.insert(0, {str(PLUGINS)!r})\n"
        f"import {plugin}, dora_digest\n"
        "source = open(sys.modules[sys.argv[1]].__file__).read()\n"
        "assert 'import dora.' not in source and 'from dora.' not in source\n"
    )
    subprocess.run([sys.executable, "-I", "-c", code, plugin], check=True)


def test_run_until_eof_ends_the_whole_process_group(tmp_path: Path) -> None:
    """Including a process that ignores SIGTERM, and removes the temporary files."""
    stubborn = (
        "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print(flush=True); signal.pause()"
    )
    body = (
        "import signal, subprocess, sys, tempfile\n"
        "tempfile.mkstemp()\n"
        f"child = subprocess.Popen([sys.executable, '-c', {stubborn!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline()\n"
        "print(child.pid, flush=True)\n"
        "signal.pause()\n"
    )
    with subprocess.Popen(
        [sys.executable, run_until_eof.__file__, sys.executable, "-c", body],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env=os.environ | {"TMPDIR": str(tmp_path)},
    ) as runner:
        assert runner.stdout is not None
        assert runner.stdin is not None
        child = psutil.Process(int(runner.stdout.readline()))
        assert len([*tmp_path.glob("*/*")]) == 1
        runner.stdin.close()
        runner.wait()
    assert wait_until_gone([child]) == []
    assert not any(tmp_path.iterdir())
