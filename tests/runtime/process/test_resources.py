"""What is reserved for a process on a cluster."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runtime.tiny import write_task

from dora.cli.dry_run import memory_by_device
from dora.config import load
from dora.config.schema import Config
from dora.errors import ConfigError
from dora.runtime.process import resources
from dora.runtime.process.resources import DeviceAssignment, ProcessResources, check_devices, total_resources
from dora.runtime.run_setup import RunSetup


def test_a_process_that_asks_for_nothing_leaves_every_cpu_to_others() -> None:
    """Placement groups have no empty bundle; a thousandth of a CPU would keep an engine off a full node."""
    storage, engine = ProcessResources("storage", 0.0), ProcessResources("engine", 3.0)
    assert "CPU" not in storage.bundle
    assert storage.bundle
    assert total_resources([storage, engine]) == engine.bundle == {"CPU": 3.0}


# === tests.runtime.process.test_resources: Which process computes where, and what is refused, told by the number of GPUs alone.

GPUS = {"engine.kernels": "auto", "engine.device": "cuda", "trainer.device": "cuda"}
STATIC = {**GPUS, "orchestrator.placement": "static"}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path)


def read(task: Path, changes: dict[str, Any]) -> Config:
    return load.read_config(task, [f"{key}={value}" for key, value in changes.items()])


def places(config: Config, num_gpus: int) -> tuple[list[str], str]:
    """Where the engines are, and where the trainer is."""
    made = DeviceAssignment.of(config, num_gpus)
    is_shared = config.orchestrator.placement == "colocated"
    engines = range(config.engine.num_engines)
    return [made.engine_device(engine, is_colocated=is_shared) for engine in engines], made.trainer_device()


def test_without_a_word_everything_is_on_the_cpu(task: Path) -> None:
    assert places(read(task, {}), 8) == (["cpu", "cpu"], "cpu")


@pytest.mark.parametrize(
    ("num_gpus", "engines", "trainer"),
    [
        (8, ["cuda:0", "cuda:1", "cuda:2"], "cuda:7"),
        (3, ["cuda:0", "cuda:1", "cuda:0"], "cuda:2"),
        (0, ["cuda:0", "cuda:1", "cuda:2"], "cuda:3"),  # as on a machine that has what it takes
    ],
)
def test_engines_go_round_the_gpus_that_the_trainer_leaves(
    task: Path, num_gpus: int, engines: list[str], trainer: str
) -> None:
    assert places(read(task, {**STATIC, "engine.num_engines": 3}), num_gpus) == (engines, trainer)


def test_a_gpu_that_is_named_is_taken(task: Path) -> None:
    named = {**STATIC, "trainer.device": "cuda:0"}
    assert places(read(task, named), 3) == (["cuda:1", "cuda:2"], "cuda:0")
    assert places(read(task, {**named, "engine.device": "cuda:2"}), 3) == (["cuda:2", "cuda:2"], "cuda:0")


def test_each_rank_of_the_trainer_has_a_gpu_of_its_own(task: Path) -> None:
    ranks = {**STATIC, "trainer.num_ranks": 2}
    made = DeviceAssignment.of(read(task, ranks), 4)
    assert [made.trainer_device(rank) for rank in range(2)] == ["cuda:2", "cuda:3"]
    assert places(read(task, ranks), 4)[0] == ["cuda:0", "cuda:1"]
    named = DeviceAssignment.of(read(task, {**ranks, "trainer.device": "cuda:0"}), 4)
    assert [named.trainer_device(rank) for rank in range(2)] == ["cuda:0", "cuda:1"]
    assert named.engine_device(0, is_colocated=False) == "cuda:2"


def test_who_shares_the_trainers_device_is_there(task: Path) -> None:
    assert places(read(task, {**GPUS, "orchestrator.placement": "colocated"}), 1) == (
        ["cuda:0", "cuda:0"],
        "cuda:0",
    )
    lent = RunSetup.make(read(task, {**STATIC, "trainer.elastic": "true"}), task.parent / "run")
    assert lent.engine_spec(task.parent, 0).device == "cuda:0"
    assert lent.engine_spec(task.parent, 2).device == lent.trainer_spec(task.parent, task).device == "cuda:2"


@pytest.mark.parametrize(
    ("changes", "num_gpus", "words"),
    [
        (STATIC, 0, r"engine.device = 'cuda': that needs a GPU, and torch .*; set engine.device = cpu"),
        ({"trainer.device": "cuda"}, 0, "trainer.device = 'cuda': that needs a GPU"),
        ({**STATIC, "engine.device": "cuda:2"}, 2, "torch sees 2 GPUs here, cuda:0 to cuda:1; name one"),
        (STATIC, 1, "on cuda:0 while the trainer does; set both to 'cuda' and .*placement = colocated"),
        ({**STATIC, "trainer.device": "cuda:0"}, 1, "the 1 GPUs here, engines would compute on cuda:0"),
        ({**STATIC, "engine.device": "cuda:0"}, 1, "engines would compute on cuda:0"),
        ({**STATIC, "engine.device": "cuda:1"}, 2, "or name a GPU for each of the two"),
        ({**STATIC, "engine.device": "cuda:1", "trainer.num_ranks": 2}, 3, "would compute on cuda:1"),
        ({**STATIC, "trainer.elastic": "true"}, 1, "would compute on cuda:0 while the trainer does"),
        ({"trainer.device": "cuda", "trainer.num_ranks": 2}, 1, "trainer.num_ranks = 2 with .*; lower it"),
        ({"trainer.device": "cuda:1", "trainer.num_ranks": 2}, 2, "each rank takes a GPU of its own"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    task: Path, changes: dict[str, Any], num_gpus: int, words: str
) -> None:
    with pytest.raises(ConfigError, match=words):
        check_devices(read(task, changes), num_gpus)


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
def test_a_gpu_is_shared_where_that_is_said(
    task: Path, changes: dict[str, Any], num_gpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "find_spec", lambda name: name)  # as if Triton were installed
    check_devices(read(task, changes), num_gpus)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (GPUS, "placement = dynamic with engine.device = 'cuda': .* set placement = static"),
        ({**STATIC, "engine.exact_logprobs": "true"}, "true with .*: exact log-probs need the CPU"),
        ({**STATIC, "engine.kernels": "numba"}, "engine.kernels = numba with engine.device = 'cuda'"),
        ({"engine.kernels": "numba", "engine.dtype": "bfloat16"}, "these kernels compute in float32 only"),
        ({"orchestrator.placement": "colocated", "trainer.device": "cuda"}, "placement = colocated: an"),
        ({"trainer.elastic": "true", "trainer.device": "cuda"}, "trainer.elastic = true: an engine"),
        ({**STATIC, "engine.device": "gpu"}, "engine.device = 'gpu': string should match"),
        (
            {**GPUS, "orchestrator.placement": "colocated", "orchestrator.balance_running": "true"},
            "orchestrator.balance_running has no effect with engine.device = 'cuda'",
        ),
    ],
)
def test_what_devices_cannot_do_is_refused(task: Path, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        read(task, changes)


def test_engines_on_gpus_keep_their_requests(task: Path) -> None:
    colocated = read(task, {**GPUS, "orchestrator.placement": "colocated"})
    assert RunSetup.make(colocated, task.parent / "run").limits.is_static
    assert not RunSetup.make(read(task, {}), task.parent / "run").limits.is_static


def test_the_memory_of_each_device_is_told_in_the_dtype_of_the_engines(task: Path) -> None:
    def of(**changes: str) -> dict[str, str]:
        given = {key.replace("__", "."): value for key, value in changes.items()}
        return memory_by_device(RunSetup.make(read(task, given), task.parent / "run"))

    assert [*of()] == ["cpu"]
    assert "3 x 0.0106 MB of weights + 0.0123 MB of KV" in of()["cpu"]
    halved = of(engine__dtype="bfloat16")["cpu"]
    assert "3 x 0.00528 MB of weights + 0.00614 MB of KV" in halved
    assert "0.0422 MB for the trainer" in halved  # fp32 as before: 16 bytes for each of 2,640 parameters
    if not torch.cuda.is_available():
        gpus = of(**{key.replace(".", "__"): value for key, value in STATIC.items()})
        assert [*gpus] == ["cpu", "cuda:0-1", "cuda:2"]


def test_the_samples_of_a_whole_window_count_as_memory_that_is_shared(task: Path) -> None:
    def of(max_response_length: int) -> RunSetup:
        given = {"sampling.max_response_length": max_response_length}
        return RunSetup.make(read(task, given), task.parent / "run")

    short, long = of(20), of(21)
    num_rows = short.config.max_groups_in_flight * 2
    assert long.stream_bytes - short.stream_bytes == 9 * num_rows  # bytes of a token: id, log-prob, mask
    assert short.stored_bytes == short.weights_bytes + 2 * short.pool_bytes + short.stream_bytes


def test_stations_have_what_the_trainer_leaves_to_them_where_they_are_told_to_be(task: Path) -> None:
    def of(*stations: str, **changes: object) -> str:
        given = {"algorithm.kl_loss_coef": 0.1, "trainer.aux_workers": json.dumps(stations)} | changes
        return memory_by_device(RunSetup.make(read(task, given), task.parent / "run"))["cpu"]

    assert "0.0528 MB for the trainer" in of()  # 4 bytes more for each of 2,640 parameters
    assert "0.0422 MB for the trainer" in of("reference")
    assert "0.0106 MB for auxiliary workers" in of("reference")
    gae = of("critic", **{"algorithm.adv_estimator": "gae"})
    assert "0.0528 MB for the trainer" in gae
    assert "MB for auxiliary workers" in gae
    assert "to roll back" not in gae


@pytest.mark.parametrize(
    ("station", "trainer", "place"),
    [
        (None, "cpu", "cpu"),
        (None, "cuda", "cuda:7"),
        ("cuda", "cuda", "cuda:7"),
        ("cuda", "cpu", "cuda:0"),
        ("cuda:3", "cuda", "cuda:3"),
        ("cpu", "cuda", "cpu"),
    ],
)
def test_a_station_is_with_the_trainer_unless_it_has_a_place_of_its_own(
    station: str | None, trainer: str, place: str
) -> None:
    assert DeviceAssignment("cuda", trainer, 1, 8, station).aux_device() == place


def test_a_station_without_its_gpu_is_refused(task: Path) -> None:
    changes = {"algorithm.kl_loss_coef": 0.1, "trainer.aux_workers": '["reference"]'}
    with pytest.raises(ConfigError, match=r"trainer\.aux_device = 'cuda:9': .*"):
        check_devices(read(task, {**changes, "trainer.aux_device": "cuda:9"}), 2)
