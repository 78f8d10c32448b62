"""The SGLang backend understands what a real server has sent, and rejects what it must.

test_vllm.py tests what both backends have in common. `real_servers.py` runs the contract.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.contract.fake_sglang_server import AUTH_TOKEN, FakeSglangServer, recorded_events
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
    with_auth_token,
    with_digest,
)
from dora.engine.backends.sglang import SPARE_TOKENS, Sglang
from dora.engine.decode_batch import PartialOutput
from dora.engine.kv_transfer.handoff import ExportedKV
from dora.engine.request import Completion, EngineError
from dora.errors import ConfigError, RunError
from dora.model.pretrained import save_pretrained
from dora.model.weights import parameter_shapes, weight_digest
from dora.testing import CONFIG, make_request, reference_logprobs, version_weights
from dora.testing.engine_contract import MAX_CONTEXT, MAX_ROWS
from dora.weights.store import WeightStore

SERVERS: list[FakeSglangServer] = []
MAX_STEPS = 1000


@pytest.fixture(autouse=True)
def close_servers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(TOKEN_VARIABLE, AUTH_TOKEN)
    yield
    while SERVERS:
        SERVERS.pop().close()


Make = Callable[..., tuple[Sglang, FakeSglangServer]]
TWO_SLOTS = {"protocol": PROTOCOL, "version_slots": 2, "kv_layout": []}  # what its plugins report


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Makes an engine and its server."""

    def make(
        name: str = "length",
        max_context: int = MAX_CONTEXT,
        version_slots: int = 1,
        pool: Path | None = None,
        silence_s: float = 60.0,
        inflight_update: str | None = None,
        **faults: Any,
    ) -> tuple[Sglang, FakeSglangServer]:
        save_pretrained(tmp_path, CONFIG, version_weights(0))
        SERVERS.append(FakeSglangServer(name, **faults))
        engine = Sglang(
            model=str(tmp_path),
            max_rows=MAX_ROWS,
            max_context=max_context,
            version_slots=version_slots,
            device="cpu",
            dtype="float32",
            url=SERVERS[-1].url,
            pool=pool,
            silence_s=silence_s,
            inflight_update=inflight_update,
        )
        return engine, SERVERS[-1]

    return make


def run(engine: Sglang) -> list[Completion]:
    """Step until the first answers."""
    for _ in range(MAX_STEPS):
        if answers := engine.step():
            return answers
    return []


@pytest.mark.parametrize("name", ["length", "stop"])
def test_a_real_servers_answer_is_parsed(make: Make, name: str) -> None:
    """All of its tokens and log-probs, and its finish reason."""
    engine, server = make(name)
    assert engine.load(0, version_weights(0)) == weight_digest(version_weights(0))
    request = make_request(0, max_tokens=40)
    engine.submit([request])
    (answer,) = run(engine)
    events = recorded_events(name)
    assert answer.token_ids.tolist() == [token for event in events for token in event["output_ids"]]
    assert answer.finish_reason == name
    expected = reference_logprobs(0, request.prompt_ids, answer.token_ids.tolist())
    assert answer.logprobs == pytest.approx(expected, abs=1e-4), "the weights of version 0 generated it"
    (body,) = (body for path, body in server.calls if path == "/generate")
    assert body["extra_key"] == server.label, "KV of one version never serves another"


def test_an_answer_of_two_versions_is_rejected(make: Make) -> None:
    """C1: a real server reports that its weights changed during the answer."""
    engine, _ = make("two versions")
    engine.load(0, version_weights(0))
    engine.submit([make_request(0, max_tokens=50)])
    with pytest.raises(RunError, match="dora-1"):
        run(engine)


def test_an_unfinished_output_is_reported_with_its_weights(make: Make) -> None:
    """The server lists them in each event. What it has after the last event, nobody knows."""
    engine, _ = make("aborted")  # it continues after its first event once it is aborted
    digest = engine.load(0, version_weights(0))
    request = make_request(0, max_tokens=50)
    engine.submit([request])
    for _ in range(MAX_STEPS):
        engine.step()
        if outputs := engine.partial_outputs():
            break
    (output,), (event, *_) = outputs.values(), recorded_events("aborted")
    assert output.token_ids.tolist() == event["output_ids"]
    assert output.logprobs[:, 1].tolist() == [
        pytest.approx(logprob) for logprob, *_ in event["meta_info"]["output_token_logprobs"]
    ]
    assert output.chunks == (Chunk(0, digest, 1),)


def test_a_request_that_is_halted_for_a_migration_has_all_its_tokens(make: Make) -> None:
    engine, _ = make("aborted")
    engine.load(0, version_weights(0))
    request = make_request(0, max_tokens=50)
    engine.submit([request])
    for _ in range(MAX_STEPS):
        engine.step()
        if (halted := engine.halt(request.id, carries_kv=False)) is not None:
            break
    assert halted is not None
    events = recorded_events("aborted")
    assert halted.output.token_ids.tolist() == [token for event in events for token in event["output_ids"]]


def test_a_rejected_load_can_be_repeated(make: Make) -> None:
    engine, _ = make(rejected_loads=1)
    with pytest.raises(EngineError, match="answers 400"):
        engine.load(0, version_weights(0))
    assert not engine.versions
    assert engine.load(0, version_weights(0)) == weight_digest(version_weights(0))


def test_a_version_whose_digest_the_server_does_not_report_is_not_loaded(make: Make) -> None:
    engine, _ = make(no_digest=True)
    with pytest.raises(EngineError, match="start it as dora_sglang"):
        engine.load(0, version_weights(0))
    assert not engine.versions


@pytest.mark.parametrize("plugins", [{}, {"protocol": 0, "version_slots": 1, "kv_layout": []}])
def test_a_server_with_other_plugins_is_rejected(make: Make, plugins: dict[str, Any]) -> None:
    with pytest.raises(EngineError, match="the plugins of another version of DORA-RL"):
        make(plugins=plugins)


def test_another_version_of_sglang_is_refused(make: Make) -> None:
    """It may have other classes than those that the plugins replace."""
    with pytest.raises(ConfigError, match=r"has SGLang 0\.6\.0; DORA-RL is tested with 0\.5\.23"):
        make(version="0.6.0")


def test_a_server_with_fewer_version_slots_is_rejected(make: Make) -> None:
    with pytest.raises(EngineError, match=r"has slots for 1 versions; .*see docs/sglang.md"):
        make(version_slots=2)


def test_a_load_says_which_versions_stay(make: Make) -> None:
    """With one slot the load empties the cache; with several the KV of the others stays."""
    engine, server = make(version_slots=2, plugins=TWO_SLOTS)
    labels = []
    for version in range(3):
        engine.load(version, version_weights(version))
        labels.append(server.label)
        if version == 1:
            engine.drop(0)
    bodies = [body for path, body in server.calls if path == "/update_weights_from_disk"]
    assert [body["manifest"][LOADED_KEY] for body in bodies] == [[], [labels[0]], [labels[1]]]
    assert [body["flush_cache"] for body in bodies] == [False] * 3
    one_slot, server = make()
    one_slot.load(0, version_weights(0))
    assert server.calls[-1][1]["flush_cache"]


def test_a_server_is_not_lost_while_it_loads_and_generates_nothing(make: Make) -> None:
    """However long that takes; it is, once it has loaded and stays silent."""
    may_load = threading.Event()
    may_load.set()
    engine, _ = make("aborted", version_slots=2, plugins=TWO_SLOTS, silence_s=0.2, holds_loads=may_load)
    engine.load(0, version_weights(0))
    engine.submit([make_request(0, max_tokens=50)])
    engine.step()
    may_load.clear()
    loading = engine._start_load(1, lambda label: engine._send_weights(label, version_weights(1)))
    for _ in range(30):  # a step waits for 0.02 s
        assert engine.step() == []
    may_load.set()
    engine.activate(1, loading.result())
    with pytest.raises(RunError, match="has sent nothing"):
        run(engine)


def states(server: FakeSglangServer) -> list[list[str]]:
    """The names in each call of DORA-RL's scheduler."""
    return [[*body["server_args"]] for path, body in server.calls if path == "/set_internal_state"]


def test_requests_near_their_deadline_are_named_to_the_server(make: Make) -> None:
    """But not while it loads a version: it would answer at the end of the load."""
    may_load = threading.Event()
    may_load.set()
    engine, server = make("aborted", version_slots=2, plugins=TWO_SLOTS, holds_loads=may_load)
    engine.load(0, version_weights(0))
    requests = [make_request(number, max_tokens=50) for number in range(2)]
    engine.submit(requests)
    while not engine.progress()[requests[1].id]:
        engine.step()
    server.calls.clear()
    may_load.clear()
    loading = engine._start_load(1, lambda label: engine._send_weights(label, version_weights(1)))
    engine.decode_only([requests[1].id])
    engine.step()
    assert states(server) == []
    may_load.set()
    loading.result()
    engine.step()
    assert states(server) == [[DECODE_ONLY, engine._running[requests[1].id].server_id]]
    engine.decode_only(())
    engine.step()
    assert states(server)[1:] == [[DECODE_ONLY]]


def test_requests_continue_with_a_newer_version_except_held_out_ones(make: Make) -> None:
    engine, server = make("aborted", version_slots=2, plugins=TWO_SLOTS, inflight_update="inflight")
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
    engine, server = make("aborted", version_slots=2, plugins=TWO_SLOTS, inflight_update="partial")
    engine.load(0, version_weights(0))
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
    engine, server = make(pool=tmp_path / "pool", plugins=plugins)
    engine.load(0, version_weights(0))
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
    info = recorded_events("length")[0]["meta_info"]
    assert engine.num_recomputed == info["prompt_tokens"] - info["cached_tokens"] - 1
    assert [*(tmp_path / "pool").iterdir()] == []


def test_it_pauses_and_resumes(make: Make) -> None:
    engine, server = make()
    engine.pause()
    engine.resume()
    assert server.calls[-2:] == [("/pause_generation", {"mode": "in_place"}), ("/continue_generation", {})]


def test_another_auth_token_is_rejected(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TOKEN_VARIABLE, "another")
    with pytest.raises(EngineError, match="Unauthorized"):
        make()


def test_a_server_with_a_shorter_context_is_rejected(make: Make) -> None:
    with pytest.raises(EngineError, match=f"accepts {MAX_CONTEXT + SPARE_TOKENS} tokens"):
        make(max_context=MAX_CONTEXT + 1)


def test_options_need_an_interpreter_or_a_url() -> None:
    with pytest.raises(ConfigError, match="either python"):
        Sglang(model="", max_rows=1, max_context=1, version_slots=1, device="cpu", dtype="float32")


def test_the_server_requires_an_auth_token_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is not on the command line, which other users can read. It may begin with a dash."""
    monkeypatch.setenv(TOKEN_VARIABLE, "-token")
    assert with_auth_token(["server", "--host", "here"]) == ["server", "--host", "here", "--api-key=-token"]
    monkeypatch.delenv(TOKEN_VARIABLE)
    with pytest.raises(RuntimeError, match=TOKEN_VARIABLE):
        with_auth_token([])


def test_no_digest_is_reported_for_a_failed_load() -> None:
    def fail(self: object, folder: str) -> tuple[bool, str]:
        return False, "no such folder"

    def file_digest(path: str) -> str:
        raise AssertionError

    assert with_digest(fail, file_digest)(None, "folder") == (False, "no such folder")


def test_the_server_reads_a_published_version_where_it_lies(make: Make, tmp_path: Path) -> None:
    engine, server = make()
    store = WeightStore(tmp_path, shapes=parameter_shapes(CONFIG))
    digest = store.publish(3, version_weights(3))
    assert engine.start_load(3, store.path(3)).result() == digest
    assert server.loaded_files == [store.path(3)]
