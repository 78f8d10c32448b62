"""One server holds several versions of a LoRA run, each as an adapter.

`real_servers.py` checks what real servers compute with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.contract.fake_server import engine_at
from tests.contract.fake_sglang_server import FakeSglangServer
from tests.contract.fake_vllm_server import FakeVllmServer
from tests.contract.lora import CONFIG, RANK, lora_weights
from torch import Tensor

from dora.engine.backends.lora_versions import LoraVersions, lora_adapter
from dora.engine.backends.server_plugins.dora_digest import ADAPTER_FILE
from dora.engine.backends.sglang import SglangLora
from dora.engine.backends.vllm import VllmLora
from dora.engine.request import EngineError
from dora.errors import ConfigError
from dora.model.pretrained import save_pretrained
from dora.model.weights import WeightLayout, initial_weights, weight_digest
from dora.testing import make_request

Server = FakeVllmServer | FakeSglangServer
LORA_INFO: dict[str, Any] = {  # of an SGLang server
    "enable_lora": True,
    "max_loaded_loras": None,
    "max_loras_per_batch": 2,
    "device": "cpu",
    "tp_size": 1,
}


@pytest.fixture(params=[FakeVllmServer, FakeSglangServer])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Server]:
    kind: type[Server] = request.param
    info = {"model_path": str(tmp_path)} | LORA_INFO if kind is FakeSglangServer else {}
    with closing(kind(info=info)) as server:
        yield server


@pytest.fixture
def engine(server: Server, tmp_path: Path) -> Iterator[LoraVersions]:
    """With slots for two versions."""
    save_pretrained(tmp_path, CONFIG, lora_weights(0))
    kind = VllmLora if isinstance(server, FakeVllmServer) else SglangLora
    with closing(engine_at(kind, server.url, tmp_path, version_slots=2, rank=RANK)) as engine:
        yield engine


def adapters_of_requests(server: Server) -> tuple[list[str], set[str]]:
    """The adapters that requests have named, in order, and the names under which they share KV."""
    if isinstance(server, FakeVllmServer):
        calls, keys = server.generate_calls, ("model", "cache_salt")
    else:
        calls, keys = [body for path, body in server.calls if path == "/generate"], ("lora_path", "extra_key")
    adapter, salt = keys
    return [body[adapter] for body in calls], {body[salt] for body in calls}


@pytest.mark.parametrize("version", [0, 1, 2])
def test_base_and_adapter_add_up_to_the_published_weights(version: int) -> None:
    layout, flat = WeightLayout(CONFIG), lora_weights(0)
    adapter, views = lora_adapter(CONFIG, flat, lora_weights(version), RANK), layout.views(flat.clone())
    for name in (name for name in adapter if name.endswith("lora_A.weight")):
        a, b = adapter[name], adapter[name.replace("lora_A", "lora_B")]
        assert a.shape[0] == b.shape[1] == RANK
        views[name.removeprefix("base_model.model.").replace(".lora_A", "")] += b @ a
    published = layout.views(lora_weights(version))
    assert all(torch.allclose(view, published[name], atol=1e-5) for name, view in views.items())


def with_change(name: str) -> Tensor:
    """Weights of version 1 with one more parameter changed."""
    flat = lora_weights(1)
    WeightLayout(CONFIG).views(flat)[name].add_(1.0)
    return flat


@pytest.mark.parametrize(
    ("flat", "reason"),
    [
        (initial_weights(CONFIG, seed=1), "a LoRA adapter cannot represent"),
        (with_change("model.norm.weight"), "model.norm.weight has changed"),
        (lora_weights(1, rank=RANK + 1), f"rank is above {RANK}"),
    ],
    ids=["another model", "a norm", "a higher rank"],
)
def test_weights_beyond_an_adapter_are_rejected(engine: LoraVersions, flat: Tensor, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        engine.load(1, flat)
    assert not engine.versions


def test_each_answer_is_generated_with_its_versions_adapter(engine: LoraVersions, server: Server) -> None:
    """C1: another version is loaded while requests of the first one run."""
    engine.load(0, lora_weights(0))
    engine.submit([make_request(0, max_tokens=40)])
    engine.step()
    assert engine.load(1, lora_weights(1)) == weight_digest(lora_weights(1))
    engine.submit([make_request(1, version=1, max_tokens=40)])
    with pytest.raises(EngineError, match="no free slot"):
        engine.load(2, lora_weights(2))
    answers = [answer for _ in range(100) for answer in engine.step()]
    assert {answer.id.sibling: answer.version for answer in answers} == {0: 0, 1: 1}
    adapters, salts = adapters_of_requests(server)
    assert adapters == list(server.adapters)
    assert len(salts) == 2


def test_an_adapter_stays_until_its_version_is_dropped(engine: LoraVersions, server: Server) -> None:
    engine.load(0, lora_weights(0))
    engine.load(1, lora_weights(1))
    first, second = server.adapters.values()
    assert load_file(first / ADAPTER_FILE).keys() == load_file(second / ADAPTER_FILE).keys()
    engine.drop(0)
    assert list(server.adapters.values()) == [second]
    assert not first.exists()
    engine.load(2, lora_weights(2))
    assert list(engine.versions) == [1, 2]


def test_a_version_can_be_dropped_while_another_one_has_requests(engine: LoraVersions) -> None:
    engine.load(0, lora_weights(0))
    engine.load(1, lora_weights(1))
    engine.submit([make_request(0, version=1, max_tokens=40)])
    engine.drop(0)
    with pytest.raises(EngineError, match="unfinished"):
        engine.drop(1)


def test_an_adapter_is_unloaded_once_its_aborted_requests_have_ended(
    engine: LoraVersions, server: Server
) -> None:
    server.faults |= {"replays": "aborted"} if isinstance(server, FakeSglangServer) else {"holds": True}
    engine.load(0, lora_weights(0))
    request = make_request(0, max_tokens=40)
    engine.submit([request])
    while not engine.progress()[request.id]:
        engine.step()
    server.faults["ignored_aborts"] = 1
    engine.abort([request.id])
    engine.drop(0)
    assert not server.adapters


def test_an_adapter_of_other_bytes_is_unloaded(engine: LoraVersions, server: Server) -> None:
    server.faults["adapter_digest"] = "0" * 32
    with pytest.raises(EngineError, match="has read another adapter"):
        engine.load(0, lora_weights(0))
    assert not server.adapters
    assert not engine.versions


@pytest.mark.parametrize(
    ("info", "remedy"),
    [
        ({"enable_lora": False}, "--enable-lora"),
        ({"tp_size": 4}, "intermediate_size = 64: .* multiple of 128"),
        ({"model_path": "/another/model"}, "--model-path"),
        ({"max_loaded_loras": 1}, "--max-loaded-loras 2"),
        ({"max_loras_per_batch": 1}, "--max-loras-per-batch 2"),
    ],
)
def test_an_sglang_server_that_does_not_fit_is_rejected(
    info: dict[str, Any], remedy: str, tmp_path: Path
) -> None:
    save_pretrained(tmp_path, CONFIG, lora_weights(0))
    reported = {"model_path": str(tmp_path)} | LORA_INFO | info
    rejected = pytest.raises((ConfigError, EngineError), match=remedy)
    with closing(FakeSglangServer(info=reported)) as server, rejected:
        engine_at(SglangLora, server.url, tmp_path, version_slots=2, rank=RANK)


@pytest.mark.parametrize(("server", "kind"), [(FakeVllmServer, VllmLora), (FakeSglangServer, SglangLora)])
def test_a_server_with_slots_for_full_weights_is_rejected(
    server: type[Server], kind: type[LoraVersions], tmp_path: Path
) -> None:
    save_pretrained(tmp_path, CONFIG, lora_weights(0))
    rejected = pytest.raises(EngineError, match="slots for full weights")
    with closing(server(version_slots=2)) as running, rejected:
        engine_at(kind, running.url, tmp_path, version_slots=2, rank=RANK)


@pytest.mark.parametrize(("engine", "rank"), [(VllmLora, 0), (VllmLora, 513), (SglangLora, 0)])
def test_a_rank_that_a_server_does_not_serve_is_rejected(engine: type[VllmLora], rank: int) -> None:
    with pytest.raises(ConfigError, match="rank"):
        engine.check_options(url="http://127.0.0.1:1", rank=rank)


@pytest.mark.parametrize("engine", [VllmLora, SglangLora])
def test_an_option_that_is_for_full_weights_is_rejected(engine: type[VllmLora]) -> None:
    with pytest.raises(ConfigError, match="kv_connector has no effect"):
        engine.check_options(url="http://127.0.0.1:1", rank=RANK, kv_connector="files")
