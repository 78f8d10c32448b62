"""What a process reserves on a cluster, which device it uses, and which device settings are rejected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.tiny import drop_engine_settings, write_task

from dora.config import load
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.runtime.process import resources
from dora.runtime.process.resources import DeviceAssignment, ProcessResources, check_devices, total_resources
from dora.runtime.run_setup import RunSetup


def test_a_process_without_cpus_reserves_none() -> None:
    """Its bundle must not be empty; a thousandth of a CPU would keep an engine off a full node."""
    storage, engine = ProcessResources("storage", 0.0), ProcessResources("engine", 3.0)
    assert "CPU" not in storage.bundle
    assert storage.bundle
    assert total_resources([storage, engine]) == engine.bundle == {"CPU": 3.0}


def test_a_process_has_a_place_only_where_one_node_has_all_that_it_needs() -> None:
    cpu, gpu = ProcessResources("engine", 0.1), ProcessResources("engine", 2.0, 1.0)
    assert resources.count_places(cpu, [{"CPU": 0.3}, {}]) == 3
    assert resources.count_places(gpu, [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 1.0, "GPU": 1.0}]) == 0
    assert resources.count_places(gpu, [{"CPU": 5.0, "GPU": 1.0}, {"CPU": 4.0, "GPU": 8.0}]) == 3
    assert resources.describe_places(gpu, [{"CPU": 1.0, "GPU": 1.0}, {"CPU": 0.5}]) == (
        "each engine needs 2 CPU and 1 GPU on one node, free by node: 1 CPU and 1 GPU, 0.5 CPU and 0 GPU"
    )


GPUS = {"engine.kernels": "auto", "engine.device": "cuda", "trainer.device": "cuda"}
STATIC = {**GPUS, "orchestrator.placement": "static"}
SERVED = {"engine.backend": "vllm", "engine.device": "cuda", "trainer.device": "cuda"}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path)


def read(task: Path, changes: dict[str, Any]) -> Config:
    if "engine.backend" in changes:
        drop_engine_settings(task)  # they have no effect then
    return load.read_config(task, [f"{key}={value}" for key, value in changes.items()])


def assign(config: Config, num_gpus: int) -> tuple[list[str], str]:
    """The devices of the engines, and of the trainer."""
    devices = DeviceAssignment.of(config, num_gpus)
    is_colocated = config.orchestrator.placement == "colocated"
    engines = range(config.engine.num_engines)
    of_engines = [devices.engine_device(engine, is_colocated=is_colocated) for engine in engines]
    return of_engines, devices.trainer_device()


def test_the_default_device_is_the_cpu(task: Path) -> None:
    assert assign(read(task, {}), 8) == (["cpu", "cpu"], "cpu")


@pytest.mark.parametrize(
    ("num_gpus", "engines", "trainer"),
    [
        (8, ["cuda:0", "cuda:1", "cuda:2"], "cuda:7"),
        (3, ["cuda:0", "cuda:1", "cuda:0"], "cuda:2"),
        (0, ["cuda:0", "cuda:1", "cuda:2"], "cuda:3"),  # the run is checked for another machine
    ],
)
def test_engines_share_the_gpus_that_the_trainer_does_not_use(
    task: Path, num_gpus: int, engines: list[str], trainer: str
) -> None:
    assert assign(read(task, {**STATIC, "engine.num_engines": 3}), num_gpus) == (engines, trainer)


def test_a_configured_gpu_is_used(task: Path) -> None:
    named = {**STATIC, "trainer.device": "cuda:0"}
    assert assign(read(task, named), 3) == (["cuda:1", "cuda:2"], "cuda:0")
    assert assign(read(task, {**named, "engine.device": "cuda:2"}), 3) == (["cuda:2", "cuda:2"], "cuda:0")


def test_each_trainer_rank_has_a_gpu_of_its_own(task: Path) -> None:
    ranks = {**STATIC, "trainer.num_ranks": 2}
    devices = DeviceAssignment.of(read(task, ranks), 4)
    assert [devices.trainer_device(rank) for rank in range(2)] == ["cuda:2", "cuda:3"]
    assert assign(read(task, ranks), 4)[0] == ["cuda:0", "cuda:1"]
    named = DeviceAssignment.of(read(task, {**ranks, "trainer.device": "cuda:0"}), 4)
    assert [named.trainer_device(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert named.engine_device(0, is_colocated=False) == "cuda:2"


def test_an_engine_gets_neighbouring_gpus_to_divide_its_model_among(task: Path) -> None:
    served = {**SERVED, "engine.num_engines": 4, "engine.gpus_per_engine": 2}
    config = read(task, served)
    assert assign(config, 9) == (["cuda:0", "cuda:2", "cuda:4", "cuda:6"], "cuda:8")
    assert assign(config, 0) == assign(config, 9)  # as many as the run needs
    in_between = read(task, {**served, "trainer.device": "cuda:3"})
    assert assign(in_between, 8) == (["cuda:0", "cuda:4", "cuda:6", "cuda:0"], "cuda:3")
    spec = RunSetup.make(config, task.parent / "run").engine_spec(task.parent, 3)
    assert (spec.device, spec.num_gpus) == ("cuda:6", 2)


def test_ray_reserves_the_gpus_of_each_engine_whatever_the_driver_has(task: Path) -> None:
    served = {**SERVED, "engine.num_engines": 4, "engine.gpus_per_engine": 2}
    config = read(task, {**served, "runtime.kind": "ray"})
    engines = [each for each in resources.run_resources(config) if each.role == "engine"]
    assert [engine.ray_resources for engine in engines] == [{"CPU": config.ray.engine_cpus, "GPU": 2.0}] * 4
    check_devices(config, 0)


@pytest.mark.parametrize(
    ("trainer", "aux", "num_gpus"),
    [("cuda", None, 1.0), ("cuda", "cpu", 0.0), ("cpu", "cuda", 1.0), ("cpu", None, 0.0)],
)
def test_ray_reserves_the_gpu_of_an_auxiliary_worker_by_its_own_device(
    trainer: str, aux: str | None, num_gpus: float, task: Path
) -> None:
    changes: dict[str, object] = {
        "trainer.device": trainer,
        "trainer.aux_workers": "['reference']",
        "algorithm.kl_loss_coef": 0.1,
        "runtime.kind": "ray",
    }
    config = read(task, changes if aux is None else {**changes, "trainer.aux_device": aux})
    processes = resources.run_resources(config)
    assert [each.gpus for each in processes if each.role == "auxiliary worker"] == [num_gpus]
    assert [each.gpus for each in processes if each.role == "trainer"] == [float(trainer == "cuda")]


def test_colocated_engines_use_the_trainers_device(task: Path) -> None:
    assert assign(read(task, {**GPUS, "orchestrator.placement": "colocated"}), 1) == (
        ["cuda:0", "cuda:0"],
        "cuda:0",
    )
    elastic = RunSetup.make(read(task, {**STATIC, "trainer.elastic": "true"}), task.parent / "run")
    folder, trainer_device = task.parent, elastic.trainer_spec(task.parent, task).device
    assert elastic.engine_spec(folder, 0).device == "cuda:0"
    assert elastic.engine_spec(folder, 2).device == trainer_device == "cuda:2"


@pytest.mark.parametrize(
    ("changes", "num_gpus", "error"),
    [
        (STATIC, 0, r"engine.device = 'cuda': this needs a GPU, and torch .*; set engine.device = cpu"),
        ({"trainer.device": "cuda"}, 0, "trainer.device = 'cuda': this needs a GPU"),
        ({**STATIC, "engine.device": "cuda:2"}, 2, "torch sees 2 GPUs here, cuda:0 to cuda:1; name one"),
        (STATIC, 1, "would share cuda:0 at the same time; set both to 'cuda' and .*placement = colocated"),
        ({**STATIC, "trainer.device": "cuda:0"}, 1, "the 1 GPUs here, engines and the trainer .* cuda:0"),
        ({**STATIC, "engine.device": "cuda:0"}, 1, "would share cuda:0"),
        ({**STATIC, "engine.device": "cuda:1"}, 2, "or name different GPUs"),
        ({**STATIC, "engine.device": "cuda:1", "trainer.num_ranks": 2}, 3, "would share cuda:1"),
        ({**STATIC, "trainer.elastic": "true"}, 1, "would share cuda:0 at the same time"),
        ({"trainer.device": "cuda", "trainer.num_ranks": 2}, 1, "num_ranks = 2 with .*; lower trainer.num_"),
        ({"trainer.device": "cuda:1", "trainer.num_ranks": 2}, 2, "each rank needs a GPU of its own"),
        ({**SERVED, "engine.gpus_per_engine": 2}, 2, "no 2 neighbours are left .*; lower engine.gpus_per_"),
        ({**SERVED, "engine.gpus_per_engine": 2, "engine.device": "cuda:2"}, 3, "no 2 neighbours are left"),
        ({**SERVED, "engine.gpus_per_engine": 2, "engine.device": "cuda:1"}, 3, "would share cuda:2"),
    ],
)
def test_a_missing_or_doubly_used_device_is_rejected(
    task: Path, changes: dict[str, Any], num_gpus: int, error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        check_devices(read(task, changes), num_gpus)


def test_the_reason_why_torch_sees_no_gpu_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    def init() -> None:
        raise RuntimeError("The NVIDIA driver on your system is too old (found version 11040). Please update")

    monkeypatch.setattr(torch.version, "cuda", None)
    assert resources._explain_no_gpu(init) == "is built for CPUs only"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    assert resources._explain_no_gpu(init) == (
        "sees none here (The NVIDIA driver on your system is too old (found version 11040))"
    )


@pytest.mark.parametrize(
    ("changes", "num_gpus"),
    [
        (STATIC, 2),
        ({**STATIC, "trainer.elastic": "true"}, 2),
        ({**GPUS, "orchestrator.placement": "colocated"}, 1),
        ({**STATIC, "engine.device": "cuda:0", "trainer.device": "cuda:0"}, 1),
        ({**STATIC, "engine.device": "cuda:0"}, 2),
    ],
)
def test_devices_that_suffice_are_accepted(
    task: Path, changes: dict[str, Any], num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "find_spec", lambda name: name)  # as if Triton were installed
    check_devices(read(task, changes), num_gpus)


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({**STATIC, "engine.exact_logprobs": "true"}, "true with .*: exact log-probs need the CPU"),
        ({**STATIC, "engine.kernels": "numba"}, "engine.kernels = numba with engine.device = 'cuda'"),
        ({"engine.kernels": "numba", "engine.dtype": "bfloat16"}, "these kernels compute in float32 only"),
        ({"orchestrator.placement": "colocated", "trainer.device": "cuda"}, "placement = colocated: an"),
        ({"trainer.elastic": "true", "trainer.device": "cuda"}, "trainer.elastic = true: an engine"),
        ({**STATIC, "engine.device": "gpu"}, "engine.device = 'gpu': string should match"),
    ],
)
def test_settings_that_a_device_does_not_support_are_rejected(
    task: Path, changes: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        read(task, changes)


@pytest.mark.parametrize("changes", [GPUS, {**GPUS, "orchestrator.placement": "colocated"}])
def test_requests_migrate_between_engines_on_gpus_through_a_small_staging_area(
    task: Path, changes: dict[str, Any]
) -> None:
    setup = RunSetup.make(read(task, changes), task.parent / "run")
    assert not setup.limits.is_static
    assert 0 < setup.pool_bytes <= min(setup.kv_bytes, 64 * 2**20)


@pytest.mark.parametrize(
    ("aux", "trainer", "expected"),
    [
        (None, "cpu", "cpu"),
        (None, "cuda", "cuda:7"),
        ("cuda", "cuda", "cuda:7"),
        ("cuda", "cpu", "cuda:0"),
        ("cuda:3", "cuda", "cuda:3"),
        ("cpu", "cuda", "cpu"),
    ],
)
def test_aux_workers_use_the_trainers_device_unless_configured_otherwise(
    aux: str | None, trainer: str, expected: str
) -> None:
    assert DeviceAssignment("cuda", trainer, 1, 8, aux).aux_device() == expected


def test_aux_workers_without_their_gpu_are_rejected(task: Path) -> None:
    changes = {"algorithm.kl_loss_coef": 0.1, "trainer.aux_workers": '["reference"]'}
    with pytest.raises(ConfigError, match=r"trainer\.aux_device = 'cuda:9': .*"):
        check_devices(read(task, {**changes, "trainer.aux_device": "cuda:9"}), 2)
