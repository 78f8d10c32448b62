"""What the backends of vLLM and SGLang have in common, with a fake server of each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.contract.fake_server import FakeServer, attached_engines, run
from tests.contract.fake_sglang_server import FakeSglangServer
from tests.contract.fake_vllm_server import FakeVllmServer

from dora.engine.backends import http_engine
from dora.engine.backends.http_engine import HttpEngine
from dora.engine.backends.server_plugins import dora_sglang, dora_vllm
from dora.engine.backends.sglang import Sglang
from dora.engine.backends.vllm import Vllm
from dora.engine.request import EngineError
from dora.errors import ConfigError, RunError
from dora.model.weights import parameter_shapes, weight_digest
from dora.runtime.process.messages import WeightsLoaded
from dora.runtime.rollout.engine_worker import WeightLoader
from dora.testing import CONFIG, make_request, version_weights
from dora.weights.store import Prefetcher, WeightStore

Make = Callable[..., tuple[HttpEngine, FakeServer]]


@pytest.fixture(params=[(Vllm, FakeVllmServer), (Sglang, FakeSglangServer)], ids=["vllm", "sglang"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Make]:
    """Makes an engine and its server, with faults."""
    engine, server = request.param
    with attached_engines(engine, server, tmp_path) as make:
        yield make


def test_the_server_reads_a_published_version_where_it_lies(make: Make, tmp_path: Path) -> None:
    """Without a copy, even with prefetching: a server cannot use the memory of this process."""
    engine, server = make()
    store = WeightStore(tmp_path, shapes=parameter_shapes(CONFIG))
    digest = store.publish(3, version_weights(3))
    loader = WeightLoader(engine, store, Prefetcher(store, is_pinned=False))
    loader.load(3)
    loader.wait_for({3})
    assert loader.poll() == [WeightsLoaded(3, digest, 0.0)]
    assert server.loaded_files == [str(store.path(3))]
    assert dict(engine.versions) == {3: digest}


def test_a_version_is_loaded_in_parts_between_steps(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its digest comes with the last part."""
    monkeypatch.setattr(http_engine, "LOAD_PART_BYTES", 2**13)
    engine, server = make(num_slots=2)
    assert engine.load(0, version_weights(0)) == weight_digest(version_weights(0))
    assert len(server.loaded_files) > 2


def test_a_rejected_load_can_be_repeated(make: Make) -> None:
    engine, _ = make(rejected_loads=1)
    with pytest.raises(EngineError, match=r"answers [45]00"):
        engine.load(0, version_weights(0))
    assert not engine.versions
    assert engine.load(0, version_weights(0)) == weight_digest(version_weights(0))


def test_an_answer_of_two_versions_is_rejected(make: Make) -> None:
    """C1: a real server reports that its weights changed during the answer."""
    engine, _ = make(num_versions=1, replays="two versions")
    engine.submit([make_request(0, max_tokens=50)])
    with pytest.raises(RunError, match="dora-1"):
        run(engine)


def test_another_auth_token_is_rejected(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    for plugin in (dora_sglang, dora_vllm):
        monkeypatch.setenv(plugin.TOKEN_VARIABLE, "another")
    with pytest.raises(EngineError, match=r"answers 401 .* the same DORA_(VLLM|SGLANG)_TOKEN"):
        make()


def test_a_server_with_fewer_slots_than_the_run_needs_is_rejected(make: Make) -> None:
    with pytest.raises(EngineError, match=r"has slots for 1 versions; .* see docs/(vllm|sglang)\.md"):
        make(num_slots=2, version_slots=1)


@pytest.mark.parametrize("kind", [Vllm, Sglang])
@pytest.mark.parametrize("options", [{}, {"python": "python", "url": "http://127.0.0.1:1"}], ids=str)
def test_options_need_either_an_interpreter_or_a_url(kind: Callable[..., HttpEngine], options: Any) -> None:
    with pytest.raises(ConfigError, match="either python"):
        kind(model="", max_rows=1, max_context=1, version_slots=1, device="cpu", dtype="float32", **options)
