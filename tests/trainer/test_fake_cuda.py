"""The trainer's own code for GPUs, on a device without values: devices, dtypes, and where the host waits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from tests.fake_cuda import QWEN3_8B, SMALL, FakeCuda, HiddenSync, fake_cuda
from tests.trainer.batches import at_the_end, samples, stale
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dora.model.weights import WeightLayout
from dora.trainer import corrections, learner
from dora.trainer.critic import Critic, CriticSettings, value_layout
from dora.trainer.distributed import RankGroup, ShardedRank
from dora.trainer.lora import LoraSettings
from dora.trainer.loss import POLICY_LOSSES
from dora.trainer.perf import activation_bytes, logits_bytes, sharded_micro_batch_bytes
from dora.trainer.recipe import Correction
from dora.trainer.trainer import Sample, Trainer, TrainerSettings

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu uses the GPU")

SETTINGS = TrainerSettings(lr=1e-2, num_steps=4, warmup_steps=0, max_grad_norm=1.0, dtype="bfloat16")
BATCH = stale(samples())
RECIPES: dict[str, dict[str, Any]] = {
    "reference and entropy": {"kl_loss_coef": 0.1, "entropy_coeff": 0.01},
    "checkpointing": {"activation_checkpointing": True},
    "lora": {"lora": LoraSettings(4, 8.0, ("q_proj", "down_proj"))},
    "tis": {"correction": Correction("recomputed", "tis", "mis")},
    "icepop": {"correction": Correction(token="icepop", proximal="interpolated", staleness_decay=0.5)},
}
RECIPES |= {name: {"policy_loss": name} for name in POLICY_LOSSES}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as device:
        yield device


def make_trainer(**settings: Any) -> Trainer:
    flat = torch.zeros(WeightLayout(SMALL).numel, device="cuda")
    return Trainer(SMALL, flat, replace(SETTINGS, **settings))


@pytest.mark.parametrize("recipe", RECIPES)
def test_micro_batches_never_make_the_host_wait(recipe: str, cuda: FakeCuda) -> None:
    trainer = make_trainer(micro_batch_tokens=64, **RECIPES[recipe])
    cuda.matmul_dtypes.clear()
    with cuda.forbid_syncs():
        trainer.add_samples(BATCH)
        assert trainer.can_accumulate
        while trainer.can_accumulate:
            trainer.accumulate()
    assert cuda.matmul_dtypes == {torch.bfloat16}
    trainer.finish_step()
    assert cuda.syncs[-2:] == ["item", "tolist"]  # the norm of the gradient, and all metrics at once
    assert not {"item", "tolist"} & {*cuda.syncs[:-2]}
    assert all(len(shape) <= 1 for shape in cuda.fp64_shapes), "fp64 is for sums of metrics"


def test_an_update_of_the_critic_waits_for_its_metrics_only(cuda: FakeCuda) -> None:
    flat = torch.zeros(value_layout(SMALL).numel, device="cuda")
    critic = Critic(
        SMALL, flat, CriticSettings(lr=1e-2, num_steps=4, dtype="bfloat16", micro_batch_tokens=64)
    )
    critic.compute_advantages(*at_the_end(BATCH, [1.0] * len(BATCH)))
    cuda.syncs.clear()
    critic.update(0)
    assert cuda.syncs == ["item", "tolist"]


def test_a_float32_trainer_computes_in_float32(cuda: FakeCuda) -> None:
    trainer = make_trainer(dtype="float32")
    trainer.step(BATCH)
    assert cuda.matmul_dtypes == {torch.float32}
    assert trainer.flat.device.type == "cuda"


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    """8 ranks, of which this process is the first; collectives do nothing."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    yield init_device_mesh("cuda", (8,))
    dist.destroy_process_group()


@pytest.mark.parametrize(
    ("num_layers", "num_tokens", "kl_loss_coef"), [(12, 16384, 0.0), (4, 1024, 0.0), (4, 8192, 0.1)]
)
def test_the_memory_of_one_of_8_ranks_is_estimated(
    num_layers: int, num_tokens: int, kl_loss_coef: float, cuda: FakeCuda, mesh: DeviceMesh
) -> None:
    config = replace(QWEN3_8B, num_hidden_layers=num_layers)
    settings = replace(
        SETTINGS,
        micro_batch_tokens=num_tokens,
        logits_chunk_tokens=2048,
        activation_checkpointing=True,
        kl_loss_coef=kl_loss_coef,
    )
    with cuda.meta():
        rank = ShardedRank(cast(RankGroup, _Group(mesh)), config, settings)
    cuda.collectives.clear()
    before = cuda.peak_bytes = cuda.num_bytes
    response = range(num_tokens // 4 - 10)
    rank.accumulate([Sample(range(10), response, [-1.0] * len(response), 1.0)] * 4, 0)
    num_gathers = 1 + 2 * num_layers  # a layer is gathered in each pass, the rest once
    num_gathers += (1 + num_layers) * bool(kl_loss_coef)
    assert cuda.collectives["c10d._allgather_base_"] == num_gathers
    assert cuda.collectives["c10d._reduce_scatter_base_"] == 1 + num_layers
    estimate = sharded_micro_batch_bytes(config, num_tokens, 2048, 2, True, bool(kl_loss_coef))
    fuses_norms = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 14)
    at_least = 0.8 if fuses_norms else 0.95
    assert at_least * estimate < cuda.peak_bytes - before < 1.05 * estimate

    rank.optimizer.step(1.0, 1e-3, 1.0)
    assert cuda.collectives["c10d.allreduce_"] == 1
    num_bytes = 16 + 4 * bool(kl_loss_coef)  # a parameter, its gradient and moments; and the reference's
    assert cuda.num_bytes == pytest.approx(num_bytes * WeightLayout(config).numel / 8, rel=0.02)


@pytest.mark.parametrize("activation_checkpointing", [False, True])
def test_the_memory_of_a_single_rank_is_estimated(activation_checkpointing: bool, cuda: FakeCuda) -> None:
    config, num_tokens = replace(QWEN3_8B, num_hidden_layers=2, tie_word_embeddings=True), 8192
    settings = replace(
        SETTINGS,
        micro_batch_tokens=num_tokens,
        logits_chunk_tokens=2048,
        activation_checkpointing=activation_checkpointing,
    )
    numel = WeightLayout(config).numel
    trainer = Trainer(config, torch.zeros(numel, device="cuda"), settings)
    assert cuda.num_bytes == pytest.approx((16 + 2) * numel, rel=0.01)
    before = cuda.peak_bytes = cuda.num_bytes
    response = range(num_tokens // 4 - 10)
    trainer.add_samples([Sample(range(10), response, [-1.0] * len(response), 1.0)] * 4, is_whole_batch=True)
    trainer.accumulate()
    activations = activation_bytes(config, num_tokens, 2, activation_checkpointing)
    estimate = activations + logits_bytes(config, 2048, 2)
    assert 0.8 * estimate < cuda.peak_bytes - before < 1.02 * estimate


class _Group(NamedTuple):
    """What a rank needs of its group."""

    mesh: DeviceMesh


FAULTS: dict[str, Callable[[Tensor], Tensor]] = {
    "item": lambda logprobs: logprobs * logprobs.detach().max().item(),
    "a mask": lambda logprobs: logprobs[logprobs < 0],
    "a tensor of the host": lambda logprobs: logprobs + torch.zeros(len(logprobs)),
    "a copy from the host": lambda logprobs: logprobs + torch.zeros(len(logprobs)).to(logprobs.device),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_micro_batch_is_found(
    fault: str, cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def faulty(correction: Correction, logprobs: Tensor, *args: Any) -> Any:
        return corrections.apply_correction(correction, FAULTS[fault](logprobs), *args)

    monkeypatch.setattr(learner, "apply_correction", faulty)
    trainer = make_trainer(micro_batch_tokens=64)
    trainer.add_samples(BATCH)
    with (
        pytest.raises((HiddenSync, RuntimeError), match=r"makes the host wait|on the same device"),
        cuda.forbid_syncs(),
    ):
        trainer.accumulate()


def test_fp64_in_the_model_is_found(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = make_trainer()
    policy = trainer._learner._policy  # type: ignore[union-attr]
    monkeypatch.setattr(policy, "_cos", policy._cos.double())
    monkeypatch.setattr(policy, "_sin", policy._sin.double())
    trainer.step(BATCH)
    assert any(len(shape) > 1 for shape in cuda.fp64_shapes)
