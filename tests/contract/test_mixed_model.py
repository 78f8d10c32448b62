"""Steps of a vLLM server with several versions, on stand-ins for vLLM's layers.

`real_servers.py` runs them in vLLM.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tests.contract.plugins import imported_plugin
from torch import Tensor, nn

WIDTH, VOCABULARY = 8, 20


class Linear(nn.Module):
    """As vLLM's, it returns a bias that the caller may add. `pack`: as on a CPU, without its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.cpu_linear: Any = lambda x: x @ self.weight.T

    def pack(self) -> None:
        packed = self.weight.detach().clone()
        self.cpu_linear = lambda x: x @ packed.T
        self.weight = nn.Parameter(torch.empty(0))

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        return self.cpu_linear(x), None


class RMSNorm(nn.Module):
    """As vLLM's, it adds a residual in place."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        if residual is None:
            return nn.functional.rms_norm(x, (WIDTH,), self.weight)
        residual += x
        return nn.functional.rms_norm(residual, (WIDTH,), self.weight), residual


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(VOCABULARY, WIDTH))

    def forward(self, ids: Tensor) -> Tensor:
        return self.weight[ids]


class AttentionLayerBase:
    """What vLLM's attention layers have in common."""


class Attention(nn.Module, AttentionLayerBase):
    """Each row gets the mean of the values of its request so far.

    `sizes`: of the requests in the batch; `is_loading`: its slot gets another version meanwhile.
    """

    sizes: tuple[int, ...] = ()
    is_loading = False

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        assert not self.is_loading, "its tensors have no data"
        means = [
            each.cumsum(0) / torch.arange(1, len(each) + 1)[:, None] for each in value.split([*self.sizes])
        ]
        return query * torch.cat(means) + key


class Model(nn.Module):
    """A language model of one layer."""

    def __init__(self, attention: type[nn.Module] = Attention) -> None:
        super().__init__()
        self.embed, self.norm, self.qkv, self.attention = Embedding(), RMSNorm(), Linear(), attention()
        self.out, self.last_norm, self.head = Linear(), RMSNorm(), Linear()

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        residual = self.embed(input_ids) + positions[:, None]
        x, _ = self.qkv(self.norm(residual))
        x, _ = self.out(self.attention(x, x + 1, x * 2))
        hidden: Tensor = self.last_norm(x, residual)[0]
        return hidden

    def compute_logits(self, hidden: Tensor) -> Tensor | None:
        logits: Tensor = self.head(hidden)[0]
        return logits


class Worker:
    """vLLM's worker, without the forward pass between its two methods."""

    def execute_model(self, scheduler_output: Any) -> None:
        pass

    def sample_tokens(self, grammar_output: Any) -> SimpleNamespace:
        return SimpleNamespace()


@pytest.fixture
def versions(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The plugin `dora_vllm_versions`."""
    linear = ["QKVParallelLinear", "MergedColumnParallelLinear", "ColumnParallelLinear"]
    linear += ["RowParallelLinear", "ReplicatedLinear"]
    norms = dict.fromkeys(("RMSNorm", "GemmaRMSNorm", "LayerNorm"), RMSNorm)
    layers = "vllm.model_executor.layers"
    loader = "vllm.model_executor.model_loader"
    stand_ins: dict[str, dict[str, Any]] = {
        "vllm.config": {"set_current_vllm_config": None},
        "vllm.distributed.parallel_state": {"get_tp_group": lambda: SimpleNamespace(world_size=1)},
        "vllm.forward_context": {"set_forward_context": lambda *args, **kwargs: nullcontext()},
        "vllm.logger": {"init_logger": logging.getLogger},
        layers: {
            "layernorm": SimpleNamespace(**norms),
            "linear": SimpleNamespace(**dict.fromkeys(linear, Linear)),
            "rotary_embedding": None,
        },
        f"{layers}.attention": {"Attention": Attention},
        f"{layers}.attention_layer_base": {"AttentionLayerBase": AttentionLayerBase},
        f"{layers}.vocab_parallel_embedding": dict.fromkeys(
            ("VocabParallelEmbedding", "ParallelLMHead"), Embedding
        ),
        loader: {"get_model": None},
        f"{loader}.reload": {"finalize_layerwise_reload": None, "initialize_layerwise_reload": None},
        "vllm.platforms": {"current_platform": SimpleNamespace(is_cpu=lambda: True)},
        "vllm.v1.core.sched.scheduler": {"Scheduler": object},
        "vllm.v1.engine": {"EngineCoreOutputs": None},
        "vllm.v1.engine.core": {"EngineCore": SimpleNamespace()},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": Worker},
    }
    with imported_plugin(monkeypatch, "dora_vllm_versions", stand_ins) as module:
        yield module


def worker_with(versions: Any, models: list[nn.Module]) -> Any:
    """A worker that has loaded a version into the slot of each model."""
    worker: Any = versions.VersionsWorker()
    worker._slots = [versions.Slot(model, {}, f"v{number}") for number, model in enumerate(models)]
    worker.use_v2_model_runner, worker.device = False, torch.device("cpu")
    worker.model_config = SimpleNamespace(get_vocab_size=lambda: VOCABULARY)
    worker.model_runner = SimpleNamespace(
        supports_mm_inputs=False, enable_prompt_embeds=False, uses_mrope=False
    )
    worker.vllm_config = SimpleNamespace(
        model_config=SimpleNamespace(enforce_eager=True),
        quant_config=None,
        cache_config=SimpleNamespace(cache_dtype="auto", kv_sharing_fast_prefill=False),
        parallel_config=SimpleNamespace(pipeline_parallel_size=1),
        lora_config=None,
        compilation_config=SimpleNamespace(static_forward_context={}),
    )
    return worker


def equal_models(count: int, **options: Any) -> list[nn.Module]:
    models: list[nn.Module] = [Model(**options) for _ in range(count)]
    for model in models[1:]:
        model.load_state_dict(models[0].state_dict())
    return models


def run_step(
    worker: Any, slots: tuple[int, ...], sizes: tuple[int, ...], ids: Tensor, positions: Tensor
) -> Tensor:
    """The logits of a step, one row for each request."""
    names = [f"request-{number}" for number in range(len(slots))]
    worker.model_runner.input_batch = SimpleNamespace(req_ids=names)
    step = SimpleNamespace(
        total_num_scheduled_tokens=sum(sizes),
        dora_versions={name: f"v{slot}" for name, slot in zip(names, slots, strict=True)},
        num_scheduled_tokens=dict(zip(names, sizes, strict=True)),
    )
    worker.execute_model(step)
    model = worker.model_runner.model
    hidden = model(input_ids=ids, positions=positions)
    logits = model.compute_logits(hidden[torch.tensor(sizes).cumsum(0) - 1])
    output = worker.sample_tokens(None)
    assert (output.dora_versions, output.dora_mixes) == (step.dora_versions, True)
    logits_of_requests: Tensor = logits
    return logits_of_requests


@torch.inference_mode()
@pytest.mark.parametrize("slots", [(0, 0, 1, 2), (2, 0, 1, 0), (1, 0, 1, 0), (2, 1, 2, 1), (1, 1, 1, 1)])
@pytest.mark.parametrize("num_padded", [0, 3])
def test_each_request_of_a_step_gets_the_logits_of_its_version(
    slots: tuple[int, ...], num_padded: int, versions: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In any order of the batch, and while other slots are loaded.

    A request has one row when it decodes, and more for its prompt.
    """
    worker = worker_with(versions, equal_models(3))
    worker._mixed = worker._mix()
    for number, slot in enumerate(worker._slots):  # the loads that follow write into the same tensors
        for parameter in slot.model.parameters():
            parameter.copy_(torch.randn_like(parameter))
        slot.model.attention.is_loading = number not in slots
    sizes = (1, 4, 2, 1)
    num_rows = sum(sizes) + num_padded
    ids, positions = torch.randint(VOCABULARY, (num_rows,)), torch.arange(num_rows)
    monkeypatch.setattr(Attention, "sizes", (*sizes, *[num_padded] * (num_padded > 0)))
    logits = run_step(worker, slots, sizes, ids, positions)
    end = 0
    for number, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
        own, end = slice(end, end + size), end + size
        monkeypatch.setattr(Attention, "sizes", (size,))
        model = worker._slots[slot].model
        expected = model.compute_logits(model(ids[own], positions[own])[-1:])[0]
        torch.testing.assert_close(logits[number], expected)


@torch.inference_mode()
def test_a_worker_that_does_not_sample_has_no_logits(versions: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Model, "compute_logits", lambda self, hidden: None)
    models = equal_models(2)
    mixed = versions.MixedModel(models, lambda: [("a", 0, 1), ("b", 1, 1)])
    monkeypatch.setattr(Attention, "sizes", (1, 1))
    hidden = mixed(input_ids=torch.tensor([1, 2]), positions=torch.tensor([0, 0]))
    assert mixed.compute_logits(hidden) is None


class WindowAttention(Attention):
    """An attention layer that is not vLLM's usual one."""


class WithSinks(nn.Module):
    """Attention with weights of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.sinks = nn.Parameter(torch.zeros(WIDTH))
        self.attention = Attention()

    def forward(self, *inputs: Tensor) -> Tensor:
        output: Tensor = self.attention(*inputs)
        return output + self.sinks


class ReadsWeight(nn.Module):
    """It does not call the layer that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.out = Linear()

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query @ self.out.weight.T


class HidesLayers(nn.Module):
    """It calls a layer that is not among its children."""

    def __init__(self) -> None:
        super().__init__()
        self.out = Linear()
        self.hidden = (self.out,)

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        output: Tensor = self.hidden[0](query)[0]
        return output


class Offloaded(nn.Module):
    """Its `forward` is replaced, and calls its own children."""

    def __init__(self) -> None:
        super().__init__()
        self.out = Linear()
        self.forward = lambda query, key, value: self.out(query)[0]


class MixesRows(nn.Module):
    """Rows depend on others outside attention."""

    def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return query.cumsum(0)


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (WindowAttention, "WindowAttention"),
        (WithSinks, "WithSinks"),
        (ReadsWeight, "no attribute 'weight'"),
        (HidesLayers, "hidden states differ by up to"),
        (Offloaded, "Offloaded has a method of its own"),
        (MixesRows, "hidden states differ by up to"),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_models_that_cannot_be_mixed_are_recognized(
    is_packed: bool, attention: type[nn.Module], message: str, versions: Any
) -> None:
    """Afterwards they compute what they have computed before."""
    models = equal_models(2, attention=attention)
    layers = [layer for model in models for layer in model.modules() if isinstance(layer, Linear)]
    for layer in layers:
        if is_packed and attention is not ReadsWeight:
            layer.pack()
    ids, positions = torch.arange(4), torch.arange(4)
    before = [model(ids, positions) for model in models] if attention is HidesLayers else []
    worker = worker_with(versions, models)
    with pytest.raises((versions.CannotMixError, AttributeError), match=message):
        worker._mix()
    for model, expected in zip(models, before, strict=False):
        assert torch.equal(model(ids, positions), expected)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("model_config.enforce_eager", "a compiled model"),
        ("quant_config", "quantization"),
        ("cache_config.cache_dtype", "a dtype of its own for KV"),
        ("cache_config.kv_sharing_fast_prefill", "fast prefill"),
        ("parallel_config.pipeline_parallel_size", "pipeline parallelism"),
        ("lora_config", "adapters"),
    ],
)
def test_servers_whose_steps_differ_take_turns(setting: str, message: str, versions: Any) -> None:
    worker = worker_with(versions, equal_models(2))
    *folder, name = setting.split(".")
    config = getattr(worker.vllm_config, folder[0]) if folder else worker.vllm_config
    setattr(config, name, 0 if name == "enforce_eager" else 2)
    with pytest.raises(versions.CannotMixError, match=message):
        worker._mix()


def test_a_model_with_other_inputs_than_text_takes_turns(versions: Any) -> None:
    worker = worker_with(versions, equal_models(2))
    worker.model_runner.uses_mrope = True
    with pytest.raises(versions.CannotMixError, match="inputs other than text"):
        worker._mix()
