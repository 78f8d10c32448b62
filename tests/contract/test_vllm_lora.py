"""Versions that LoRA trains live side by side in one vLLM server, and nothing else can be one.

What real servers compute with them is for `real_servers.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.contract.vllm_stand_in import TOKEN, StandIn
from torch import Tensor

from dora.backends.inside.dora_vllm import TOKEN_KEY
from dora.backends.low_rank import FILE, adapter_of
from dora.backends.vllm_lora import VllmLora
from dora.contract.asking import CONFIG, request, weights
from dora.contract.inference import MAX_CONTEXT, MAX_ROWS
from dora.contract.lora import RANK, lora_weights
from dora.engine.sequence import EngineError
from dora.errors import ConfigError
from dora.model.folder import save_folder
from dora.model.weights import Layout, weight_digest


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[StandIn]:
    monkeypatch.setenv(TOKEN_KEY, TOKEN)
    server = StandIn()
    yield server
    server.close()


@pytest.fixture
def engine(stand_in: StandIn, tmp_path: Path) -> Iterator[VllmLora]:
    """With places for two versions."""
    engine = engine_at(stand_in.url, tmp_path)
    yield engine
    engine.close()


def engine_at(url: str, folder: Path, rank: int = RANK) -> VllmLora:
    save_folder(folder, CONFIG, weights(0))
    return VllmLora(
        model=str(folder),
        max_rows=MAX_ROWS,
        max_context=MAX_CONTEXT,
        version_slots=2,
        device="cpu",
        dtype="float32",
        url=url,
        rank=rank,
    )


@pytest.mark.parametrize("version", [0, 1, 2])
def test_an_adapter_adds_up_to_the_weights_that_were_published(version: int) -> None:
    layout, flat = Layout(CONFIG), weights(0)
    found, views = adapter_of(layout, flat, lora_weights(version), RANK), layout.views(flat.clone())
    for name in (name for name in found if name.endswith("lora_A.weight")):
        a, b = found[name], found[name.replace("lora_A", "lora_B")]
        assert a.shape[0] == b.shape[1] == RANK
        views[name.removeprefix("base_model.model.").replace(".lora_A", "")] += b @ a
    published = layout.views(lora_weights(version))
    assert all(torch.allclose(view, published[name], atol=1e-5) for name, view in views.items())


def changed(name: str) -> Tensor:
    flat = lora_weights(1)
    Layout(CONFIG).views(flat)[name].add_(1.0)
    return flat


@pytest.mark.parametrize(
    ("flat", "why"),
    [
        (weights(1), "no LoRA adapter changes it"),
        (changed("model.norm.weight"), "model.norm.weight has changed"),
        (lora_weights(1, rank=RANK + 1), f"rank is above {RANK}"),
    ],
    ids=["another model", "a norm", "a higher rank"],
)
def test_what_is_no_adapter_of_the_model_is_refused(engine: VllmLora, flat: Tensor, why: str) -> None:
    with pytest.raises(EngineError, match=why):
        engine.load(1, flat)
    assert not engine.versions


def test_each_answer_is_of_its_versions_adapter(engine: VllmLora, stand_in: StandIn) -> None:
    """C1: another version is loaded while requests of the first one run."""
    engine.load(0, lora_weights(0))
    engine.submit([request(0)])
    engine.step()
    assert engine.load(1, lora_weights(1)) == weight_digest(lora_weights(1))
    engine.submit([request(1, version=1)])
    with pytest.raises(EngineError, match="no place"):
        engine.load(2, lora_weights(2))
    answers = [answer for _ in range(100) for answer in engine.step()]
    assert {answer.id.sibling: answer.version for answer in answers} == {0: 0, 1: 1}
    assert [body["model"] for body in stand_in.asked] == list(stand_in.adapters)
    assert len({body["cache_salt"] for body in stand_in.asked}) == 2


def test_an_adapter_is_there_until_its_version_is_dropped(engine: VllmLora, stand_in: StandIn) -> None:
    engine.load(0, lora_weights(0))
    engine.load(1, lora_weights(1))
    first, second = stand_in.adapters.values()
    assert load_file(first / FILE).keys() == load_file(second / FILE).keys()
    engine.drop(0)
    assert list(stand_in.adapters.values()) == [second]
    assert not first.exists()
    engine.load(2, lora_weights(2))
    assert list(engine.versions) == [1, 2]


def test_a_version_is_dropped_while_another_one_has_requests(engine: VllmLora) -> None:
    engine.load(0, lora_weights(0))
    engine.load(1, lora_weights(1))
    engine.submit([request(0, version=1)])
    engine.drop(0)
    with pytest.raises(EngineError, match="unfinished"):
        engine.drop(1)


@pytest.mark.parametrize("rank", [0, 513])
def test_a_rank_that_vllm_has_no_room_for_is_refused(rank: int, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rank"):
        engine_at("http://127.0.0.1:1", tmp_path, rank)
