"""One vLLM server holds several versions of a LoRA run, each as an adapter.

`real_servers.py` checks what real servers compute with them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.contract.fake_server import engine_at
from tests.contract.fake_vllm_server import FakeVllmServer
from tests.contract.lora import RANK, lora_weights
from torch import Tensor

from dora.engine.backends.vllm import ADAPTER_FILE, VllmLora, lora_adapter
from dora.engine.request import EngineError
from dora.errors import ConfigError
from dora.model.pretrained import save_pretrained
from dora.model.weights import WeightLayout, weight_digest
from dora.testing import CONFIG, make_request, version_weights


@pytest.fixture
def server() -> Iterator[FakeVllmServer]:
    with closing(FakeVllmServer()) as server:
        yield server


@pytest.fixture
def engine(server: FakeVllmServer, tmp_path: Path) -> Iterator[VllmLora]:
    """With slots for two versions."""
    save_pretrained(tmp_path, CONFIG, version_weights(0))
    with closing(engine_at(VllmLora, server.url, tmp_path, version_slots=2, rank=RANK)) as engine:
        yield engine


@pytest.mark.parametrize("version", [0, 1, 2])
def test_base_and_adapter_add_up_to_the_published_weights(version: int) -> None:
    layout, flat = WeightLayout(CONFIG), version_weights(0)
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
        (version_weights(1), "a LoRA adapter cannot represent"),
        (with_change("model.norm.weight"), "model.norm.weight has changed"),
        (lora_weights(1, rank=RANK + 1), f"rank is above {RANK}"),
    ],
    ids=["another model", "a norm", "a higher rank"],
)
def test_weights_beyond_an_adapter_are_rejected(engine: VllmLora, flat: Tensor, reason: str) -> None:
    with pytest.raises(EngineError, match=reason):
        engine.load(1, flat)
    assert not engine.versions


def test_each_answer_is_generated_with_its_versions_adapter(engine: VllmLora, server: FakeVllmServer) -> None:
    """C1: another version is loaded while requests of the first one run."""
    engine.load(0, lora_weights(0))
    engine.submit([make_request(0)])
    engine.step()
    assert engine.load(1, lora_weights(1)) == weight_digest(lora_weights(1))
    engine.submit([make_request(1, version=1)])
    with pytest.raises(EngineError, match="no free slot"):
        engine.load(2, lora_weights(2))
    answers = [answer for _ in range(100) for answer in engine.step()]
    assert {answer.id.sibling: answer.version for answer in answers} == {0: 0, 1: 1}
    assert [body["model"] for body in server.generate_calls] == list(server.adapters)
    assert len({body["cache_salt"] for body in server.generate_calls}) == 2


def test_an_adapter_stays_until_its_version_is_dropped(engine: VllmLora, server: FakeVllmServer) -> None:
    engine.load(0, lora_weights(0))
    engine.load(1, lora_weights(1))
    first, second = server.adapters.values()
    assert load_file(first / ADAPTER_FILE).keys() == load_file(second / ADAPTER_FILE).keys()
    engine.drop(0)
    assert list(server.adapters.values()) == [second]
    assert not first.exists()
    engine.load(2, lora_weights(2))
    assert list(engine.versions) == [1, 2]


def test_a_version_can_be_dropped_while_another_one_has_requests(engine: VllmLora) -> None:
    engine.load(0, lora_weights(0))
    engine.load(1, lora_weights(1))
    engine.submit([make_request(0, version=1)])
    engine.drop(0)
    with pytest.raises(EngineError, match="unfinished"):
        engine.drop(1)


@pytest.mark.parametrize("rank", [0, 513])
def test_a_rank_that_vllm_does_not_serve_is_rejected(rank: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank"):
        engine_at(VllmLora, "http://127.0.0.1:1", tmp_path, rank=rank)
