"""The engine's own code for GPUs, on a device without values: devices, dtypes, and where the host waits."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.fake_cuda import SMALL, FakeCuda, HiddenSync, fake_cuda
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from dora.core.types import GroupId, RequestId
from dora.engine import cuda_graphs
from dora.engine.engine import Engine
from dora.engine.kernels.device_sampler import sample_on_device
from dora.engine.kv_transfer import device_kv
from dora.engine.request import Request, SamplingParams
from dora.model.weights import WeightLayout, initial_weights
from dora.weights.store import WeightStore

triton_kernels = pytest.importorskip("dora.engine.kernels.triton_kernels")

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="tests/gpu uses the GPU")

SAMPLING = {
    "unmodified": SamplingParams(1.0, 40),
    "greedy": SamplingParams(0.0, 40),
    "filtered": SamplingParams(0.7, 40, top_k=20, top_p=0.9, min_p=0.01),
}
# Of all weights; then the digest's keys, and its sums, which are computed on the device.
ONE_COPY = ["copy_ between host and device", "a copy to the device", "a copy to the host"]
KERNELS = ("_add_norm", "_swiglu", "_rope_store_kv", "_attend", "_combine")
INT64 = {"slots", "rows", "positions", "tables", "owners", "ends"}
FP32 = {"cos", "sin", "partial", "masses"}


class CheckedLaunch:
    """In place of a kernel: a launch checks the device and the dtype of each tensor."""

    def __init__(self, kernel: Any, dtype: torch.dtype) -> None:
        self._names, self._dtype = kernel.arg_names, dtype

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        assert all(isinstance(num, int) for num in grid)
        return self._launch

    def _launch(self, *args: Any, **options: int) -> None:
        for name, value in zip(self._names, args, strict=True):
            if isinstance(value, Tensor):
                expected = torch.int64 if name in INT64 else torch.float32 if name in FP32 else self._dtype
                assert isinstance(value, FakeTensor), f"{name} is on the host"
                assert value.dtype == expected, f"{name} is {value.dtype}"


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    with fake_cuda(monkeypatch) as device:
        yield device


@pytest.fixture
def make_engine(cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Engine]:
    def make(dtype: str = "bfloat16", **settings: Any) -> Engine:
        for name in KERNELS:
            kernel = getattr(triton_kernels, name)
            monkeypatch.setattr(triton_kernels, name, CheckedLaunch(kernel, getattr(torch, dtype)))
        given = {"max_rows": 16, "max_context": 128, "version_slots": 2} | settings
        engine = Engine(SMALL, device="cuda", dtype=dtype, **given)
        for version in (0, 1):
            engine.load(version, initial_weights(SMALL, seed=version))
        return engine

    return make


def submit(engine: Engine, sampling: SamplingParams, num: int = 12) -> None:
    """Requests of two versions; half of the groups share a prompt that is longer than a block."""
    engine.submit(
        [
            Request(
                RequestId(0, i // 2, i % 2),
                GroupId(0, i // 2),
                tuple(range(14 + i // 2)),
                version=i // 2 % 2,
                seed=i,
                sampling=sampling,
            )
            for i in range(num)
        ]
    )


@pytest.mark.parametrize("name", SAMPLING)
def test_steps_never_make_the_host_wait(
    name: str, cuda: FakeCuda, make_engine: Callable[..., Engine]
) -> None:
    """From the first prefill to the last token: all but the event behind the sampled tokens."""
    engine = make_engine()
    cuda.fp64_shapes.clear()
    submit(engine, SAMPLING[name])
    num_completions = 0
    with cuda.forbid_syncs():
        while not engine.is_idle:
            num_completions += len(engine.step())
    engine.check()
    assert num_completions == 12
    assert engine.num_decoded == 12 * 40
    assert cuda.matmul_dtypes == {torch.bfloat16}
    is_whole = [shape for shape in cuda.fp64_shapes if shape[-1] == SMALL.vocab_size]
    assert bool(is_whole) == (name == "filtered"), "logits are in fp64 where rows are sorted, and only there"


def test_requests_that_are_swapped_and_share_blocks_stay_on_the_device(
    cuda: FakeCuda, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(num_blocks=30, prefill_budget=16)
    submit(engine, SAMPLING["unmodified"], num=16)
    while not engine.is_idle:
        engine.step()
    engine.check()
    assert engine.num_swapped
    assert {*cuda.syncs[-engine.num_swapped :]} == {"copy_ between host and device"}  # KV to the host


def test_a_version_is_replaced_between_steps(cuda: FakeCuda, make_engine: Callable[..., Engine]) -> None:
    engine = make_engine(inflight_update="inflight")
    submit(engine, SAMPLING["unmodified"])
    engine.step()
    cuda.syncs.clear()
    engine.drop(0)
    engine.activate(2, "digest") if 2 in engine._copied else engine.load(2, initial_weights(SMALL, seed=2))
    assert cuda.syncs == ONE_COPY
    while not engine.is_idle:
        engine.step()
    engine.check()


def test_a_published_version_is_copied_to_the_host_once(cuda: FakeCuda, tmp_path: Path) -> None:
    layout = WeightLayout(SMALL)
    store, flat = WeightStore(tmp_path, "bfloat16", layout.shapes), torch.zeros(layout.numel, device="cuda")
    for version in (0, 1):
        cuda.syncs.clear()
        store.publish(version, flat)
        assert cuda.syncs == ONE_COPY
    assert store.fetch(1).shape == (layout.numel,)
    assert store.fetch(1).dtype == torch.bfloat16


FAULTS: dict[str, Callable[[Tensor], object]] = {
    "item": lambda logits: logits.max().item(),
    "float": lambda logits: float(logits.max()),
    "tolist": lambda logits: logits.argmax(1).tolist(),
    "a branch": lambda logits: 1 if (logits > 0).any() else 0,
    "cpu": lambda logits: logits.cpu(),
    "numpy": lambda logits: logits.cpu().numpy(),
    "nonzero": lambda logits: logits.nonzero(),
    "a mask": lambda logits: logits[logits > 0],
    "unique": lambda logits: logits.unique(),
    "a copy from the host": lambda logits: torch.ones(512).to(logits.device),
    "a tensor of the host": lambda logits: logits + torch.ones(512),
    "an index of the host": lambda logits: logits[torch.tensor([0])],
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_decode_step_is_found(
    fault: str, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(logits: Tensor, *args: Any, **settings: Any) -> Any:
        FAULTS[fault](logits)
        return sample_on_device(logits, *args, **settings)

    monkeypatch.setattr(cuda_graphs, "sample_on_device", sample)
    engine = make_engine()
    submit(engine, SAMPLING["greedy"])
    with pytest.raises((HiddenSync, RuntimeError), match=r"makes the host wait|on the same device"):
        engine.step()


@pytest.mark.parametrize(
    ("buffer", "change"),
    [("cos", Tensor.double), ("positions", Tensor.int), ("qkv", Tensor.float), ("slots", Tensor.cpu)],
)
def test_a_kernel_with_a_wrong_buffer_is_found(
    buffer: str, change: Callable[[Tensor], Tensor], make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine()
    submit(engine, SAMPLING["greedy"])
    work = engine._workspace
    setattr(work, buffer, change(getattr(work, buffer)))
    with pytest.raises((AssertionError, RuntimeError), match=f"{buffer} is|dtype|same device|float != "):
        engine.step()


def test_fp64_logits_are_found(
    cuda: FakeCuda, make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sample(logits: Tensor, *args: Any, **settings: Any) -> Any:
        return sample_on_device(logits.double(), *args, **settings)

    monkeypatch.setattr(cuda_graphs, "sample_on_device", sample)
    engine = make_engine()
    submit(engine, SAMPLING["greedy"])
    engine.step()
    assert any(shape[-1] == SMALL.vocab_size for shape in cuda.fp64_shapes)


def test_the_kv_of_an_engine_stays_on_the_device_when_others_read_it_there(
    make_engine: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(device_kv, "reduce_tensor", lambda kv: str(kv.device))
    engine = make_engine(pool=tmp_path / "pool.kv", kv_transfer="ipc")
    assert engine._workspace.kv.is_cuda
    assert pickle.loads((tmp_path / "pool.kv").read_bytes()) == "cuda:0"
