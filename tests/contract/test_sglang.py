"""The SGLang backend understands what a real server has sent, and rejects what it must.

test_http_backends.py tests what both backends have in common, as test_vllm.py does with vLLM alone.
`real_servers.py` runs the contract.
"""

from __future__ import annotations

import base64
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tests.contract.fake_server import MAX_STEPS, attached_engines, recorded_events, run
from tests.contract.fake_sglang_server import RECORDED, FakeSglangServer
from tests.runtime.running import wait_until

from dora.core.types import Chunk, RequestId
from dora.engine.backends.http_engine import StreamDelta
from dora.engine.backends.server_plugins.dora_sglang import (
    CONTINUE_WITH,
    DECODE_ONLY,
    KEEP,
    LOADED_KEY,
    PROTOCOL,
    TOKEN_VARIABLE,
    send_aborts_again,
    with_auth_token,
)
from dora.engine.backends.sglang import SPARE_TOKENS, Sglang
from dora.engine.decode_batch import PartialOutput
from dora.engine.kv_transfer.handoff import ExportedKV
from dora.engine.request import EngineError
from dora.errors import ConfigError, RunError
from dora.model.weights import weight_digest
from dora.testing import make_request, reference_logprobs, version_weights
from dora.testing.engine_contract import MAX_CONTEXT

Make = Callable[..., tuple[Sglang, FakeSglangServer]]


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Makes an engine and its server, with faults."""
    with attached_engines(Sglang, FakeSglangServer, tmp_path) as make:
        yield make


@pytest.mark.parametrize("name", ["length", "stop"])
def test_a_real_servers_answer_is_parsed(make: Make, name: str) -> None:
    """All of its tokens and log-probs, and its finish reason."""
    engine, server = make(replays=name)
    assert engine.load(0, version_weights(0)) == weight_digest(version_weights(0))
    request = make_request(0, max_tokens=40)
    engine.submit([request])
    (answer,) = run(engine)
    events = recorded_events(RECORDED, name)
    assert answer.token_ids.tolist() == [token for event in events for token in event["output_ids"]]
    assert answer.finish_reason == name
    expected = reference_logprobs(0, request.prompt_ids, answer.token_ids.tolist())
    assert answer.logprobs == pytest.approx(expected, abs=1e-4), "the weights of version 0 generated it"
    (body,) = (body for path, body in server.calls if path == "/generate")
    assert body["extra_key"] == server.label, "KV of one version never serves another"


def routes_of(num_tokens: int) -> str:
    """The experts of tokens as SGLang sends them: of two layers, two of each token."""
    return base64.b64encode(np.arange(4 * num_tokens, dtype=np.int32).tobytes()).decode()


def make_with_routes(make: Make, **faults: object) -> Sglang:
    """An engine of a mixture of experts, whose first layer has none."""
    info = {"enable_return_routed_experts": True}
    engine, _ = make(1, replays="length", info=info, options={"returns_routes": True}, **faults)
    engine._config = replace(
        engine._config, model_type="qwen3_moe", num_experts=400, num_experts_per_tok=2, decoder_sparse_step=2
    )
    return engine


def test_a_response_has_the_experts_of_its_tokens(make: Make) -> None:
    """An unfinished output is not continued elsewhere: its tokens would have no experts."""
    request = make_request(0, max_tokens=40)
    num_tokens = len(request.prompt_ids) + 40 - 1
    engine = make_with_routes(make, routes=routes_of(num_tokens + 1))
    start = PartialOutput(
        np.ones(2, np.int64), np.zeros((2, 3), np.float32), (Chunk(0, engine.versions[0], 2),)
    )
    engine.submit([request], {request.id: start})
    (answer,) = run(engine)
    expected = [[[4 * token + 2, 4 * token + 3]] for token in range(num_tokens)]
    assert answer.routes is not None
    assert answer.routes.tolist() == expected
    assert answer.routes.dtype == np.int16
    assert engine.partial_outputs() == {}


@pytest.mark.parametrize("sent", [{}, {"routes": routes_of(47)}, {"routes": "AAAA"}])
def test_a_response_without_the_experts_of_all_tokens_is_refused(make: Make, sent: dict[str, str]) -> None:
    engine = make_with_routes(make, **sent)
    engine.submit([make_request(0, max_tokens=40)])
    why = "sent an unknown event" if sent.get("routes") == "AAAA" else "of 48 are needed; set trainer.routing"
    with pytest.raises(RunError, match=why):
        run(engine)


def test_a_server_that_does_not_return_experts_is_refused(make: Make) -> None:
    why = "must be started with --enable-return-routed-experts for trainer.routing_replay"
    with pytest.raises(EngineError, match=why):
        make(info={"enable_return_routed_experts": False}, options={"returns_routes": True})


def test_an_unfinished_output_is_reported_with_its_weights(make: Make) -> None:
    """The server lists them in each event. What it has after the last event, nobody knows."""
    engine, _ = make(replays="aborted")  # it continues after its first event once it is aborted
    digest = engine.load(0, version_weights(0))
    request = make_request(0, max_tokens=50)
    engine.submit([request])
    for _ in range(MAX_STEPS):
        engine.step()
        if outputs := engine.partial_outputs():
            break
    (output,), (event, *_) = outputs.values(), recorded_events(RECORDED, "aborted")
    assert output.token_ids.tolist() == event["output_ids"]
    assert output.logprobs[:, 1].tolist() == [
        pytest.approx(logprob) for logprob, *_ in event["meta_info"]["output_token_logprobs"]
    ]
    assert output.chunks == (Chunk(0, digest, 1),)


def test_a_request_that_is_halted_for_a_migration_has_all_its_tokens(make: Make) -> None:
    engine, _ = make(num_versions=1, replays="aborted")
    request = make_request(0, max_tokens=50)
    engine.submit([request])
    for _ in range(MAX_STEPS):
        engine.step()
        if (halted := engine.halt(request.id, carries_kv=False)) is not None:
            break
    assert halted is not None
    events = recorded_events(RECORDED, "aborted")
    assert halted.output.token_ids.tolist() == [token for event in events for token in event["output_ids"]]


def test_another_version_of_sglang_is_refused(make: Make) -> None:
    """It may have other classes than those that the plugins replace."""
    with pytest.raises(ConfigError, match=r"has SGLang 0\.6\.0; DORA-RL is tested with 0\.5\.23"):
        make(version="0.6.0")


def test_a_load_says_which_versions_stay(make: Make) -> None:
    """With one slot the load empties the cache; with several the KV of the others stays."""
    engine, server = make(num_slots=2)
    labels = []
    for version in range(3):
        engine.load(version, version_weights(version))
        labels.append(server.label)
        if version == 1:
            engine.drop(0)
    bodies = [body for path, body in server.calls if path == "/update_weights_from_disk"]
    assert [body["manifest"][LOADED_KEY] for body in bodies] == [[], [labels[0]], [labels[1]]]
    assert [body["flush_cache"] for body in bodies] == [False] * 3
    _, server = make(num_versions=1)
    assert server.calls[-1][1]["flush_cache"]


def states(server: FakeSglangServer) -> list[list[str]]:
    """The names in each call of DORA-RL's scheduler."""
    return [[*body["server_args"]] for path, body in server.calls if path == "/set_internal_state"]


def test_requests_near_their_deadline_are_named_to_the_server(make: Make) -> None:
    engine, server = make(num_versions=1, replays="aborted", num_slots=2)
    requests = [make_request(number, max_tokens=50) for number in range(2)]
    engine.submit(requests)
    while not engine.progress()[requests[1].id]:
        engine.step()
    server.calls.clear()
    engine.decode_only([requests[1].id])
    engine.step()
    assert states(server) == [[DECODE_ONLY, engine._running[requests[1].id].server_id]]
    engine.decode_only(())
    engine.step()
    assert states(server)[1:] == [[DECODE_ONLY]]


def test_requests_continue_with_a_newer_version_except_held_out_ones(make: Make) -> None:
    engine, server = make(replays="aborted", num_slots=2, inflight_update="inflight")
    assert states(server) == [[CONTINUE_WITH], [DECODE_ONLY]], "what the last engine has set ends"
    engine.load(0, version_weights(0))
    training = make_request(0, max_tokens=50)
    held_out = replace(training, id=RequestId(-1, 0, 0))
    engine.submit([training, held_out])
    labels = [server.label]
    while not all(engine.progress().values()):
        engine.step()
    keys = [body["extra_key"] for path, body in server.calls if path == "/generate"]
    assert sorted(keys) == [labels[0], labels[0] + KEEP]
    engine.load(1, version_weights(1))
    labels.append(server.label)
    assert states(server)[2:] == [[CONTINUE_WITH, label] for label in labels]


def test_a_request_that_is_updated_before_its_first_token_continues(make: Make) -> None:
    """SGLang lists weights of its own for such a request, and for no tokens."""
    engine, server = make(num_versions=1, replays="aborted", num_slots=2, inflight_update="partial")
    engine.submit([make_request(0, max_tokens=50)])
    engine._start_waiting()
    (running,) = engine._running.values()
    running.is_renewing = True
    span = {"version": "default", "start": 0, "end": 0}
    engine._finish(running, StreamDelta([], [], "abort", [span]))
    wait_until(lambda: sum(path == "/generate" for path, _ in server.calls) == 2)


def test_a_request_names_the_folders_of_its_kv(make: Make, tmp_path: Path) -> None:
    """The one that it may be exported to, and the one that it is imported from, which then goes."""
    plugins = {"protocol": PROTOCOL, "version_slots": 1, "kv_layout": ["of this version"], "kv_workers": 1}
    engine, server = make(num_versions=1, pool=tmp_path / "pool", plugins=plugins)
    request, imported = make_request(0, max_tokens=40), tmp_path / "pool" / "x"
    imported.mkdir()
    output = PartialOutput(np.array([3]), np.zeros((1, 3), np.float32), ())
    engine.resume_imported(request, output, ExportedKV(imported, 0))
    run(engine)
    (body,) = (body for path, body in server.calls if path == "/generate")
    assert body["sampling_params"]["custom_params"] == {
        "dora_export": str(tmp_path / "pool" / body["rid"]),
        "dora_import": str(tmp_path / "pool" / "x.in"),
    }
    info = recorded_events(RECORDED, "length")[0]["meta_info"]
    assert engine.num_recomputed == info["prompt_tokens"] - info["cached_tokens"] - 1
    assert [*(tmp_path / "pool").iterdir()] == []


def test_it_pauses_and_resumes(make: Make) -> None:
    engine, server = make()
    engine.pause()
    engine.resume()
    assert server.calls[-2:] == [("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})]


def test_a_server_with_a_shorter_context_is_rejected(make: Make) -> None:
    with pytest.raises(EngineError, match=f"accepts {MAX_CONTEXT + SPARE_TOKENS} tokens"):
        make(max_context=MAX_CONTEXT + 1)


def test_the_server_requires_an_auth_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is not on the command line, which other users can read. It may begin with a dash."""
    monkeypatch.setenv(TOKEN_VARIABLE, "-token")
    assert with_auth_token(["server", "--host", "here"]) == ["server", "--host", "here", "--api-key=-token"]
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(RuntimeError, match=TOKEN_VARIABLE):
        with_auth_token([])


def test_an_abort_that_overtook_its_request_is_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class TokenizerManager:
        """Of SGLang: it aborts a request once."""

        def __init__(self) -> None:
            self.rid_to_state = {"a": SimpleNamespace(abort_sent=False)}
            self.sent: list[str] = []

        def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
            if abort_all or not self.rid_to_state[rid].abort_sent:
                self.rid_to_state["a"].abort_sent = True
                self.sent.append(rid)

    name = "sglang.srt.managers.tokenizer_manager"
    monkeypatch.setitem(sys.modules, name, SimpleNamespace(TokenizerManager=TokenizerManager))
    send_aborts_again()
    manager = TokenizerManager()
    manager.abort_request("a")
    manager.abort_request("a")
    manager.abort_request(abort_all=True)
    assert manager.sent == ["a", "a", ""]
