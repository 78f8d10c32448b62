"""The memory of each device, as a dry run shows it."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from tests.runtime.tiny import write_task

from dora.cli.main import app
from dora.config import load
from dora.errors import ConfigError
from dora.runtime.memory import bytes_by_device, check_gpu_memory, explain_slow_store, memory_by_device
from dora.runtime.run_setup import RunSetup
from dora.weights.store import MEMORY_FS, WeightStore, make_store_folder

GPUS: dict[str, Any] = {
    "engine.kernels": "auto",
    "engine.device": "cuda",
    "trainer.device": "cuda",
    "orchestrator.placement": "static",
}


@pytest.fixture
def task(tmp_path: Path) -> Path:
    return write_task(tmp_path)


def make_setup(task: Path, changes: dict[str, Any]) -> RunSetup:
    config = load.read_config(task, [f"{key}={value}" for key, value in changes.items()])
    return RunSetup.make(config, task.parent / "run")


def test_memory_depends_on_the_dtype_of_the_engines(task: Path) -> None:
    def memory(**changes: str) -> dict[str, str]:
        given = {key.replace("__", "."): value for key, value in changes.items()}
        return memory_by_device(make_setup(task, given))

    assert [*memory()] == ["cpu"]
    assert "3 x 0.0106 MB of weights + 0.0123 MB of KV" in memory()["cpu"]
    halved = memory(engine__dtype="bfloat16")["cpu"]
    assert "3 x 0.00528 MB of weights + 0.00614 MB of KV" in halved
    assert "0.0422 MB for the trainer" in halved  # fp32 as before: 16 bytes for each of 2,640 parameters
    ranks = memory(engine__dtype="bfloat16", trainer__num_ranks="2")["cpu"]
    assert "0.0581 MB for the trainer" in ranks  # 6 bytes more: gathered weights, in fp32 and as published
    if not torch.cuda.is_available():
        assert [*memory_by_device(make_setup(task, GPUS))] == ["cpu", "cuda:0-1", "cuda:2"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="the devices are those of a machine without GPUs")
def test_gpus_hold_more_than_weights_and_kv(task: Path) -> None:
    def memory(**changes: object) -> dict[str, str]:
        given = GPUS | {key.replace("__", "."): value for key, value in changes.items()}
        return memory_by_device(make_setup(task, given))

    engines, trainer = memory()["cuda:0-1"], memory()["cuda:2"]
    assert "1 x 600 MB for CUDA" in engines
    assert "1 x 600 MB for CUDA" in trainer
    assert "for decode steps and graphs" in engines
    assert "0.0106 MB to check an older version" in trainer  # 4 bytes a parameter
    bf16 = memory(engine__dtype="bfloat16", trainer__dtype="bfloat16")["cuda:2"]
    assert "0.0106 MB to check an older version" in bf16  # 2 as published, 2 to compute
    assert "older version" not in memory(orchestrator__max_staleness=0)["cuda:2"]
    shared = memory(orchestrator__placement="colocated")["cuda:0"]
    assert "3 x 600 MB for CUDA" in shared


@pytest.mark.skipif(not MEMORY_FS.exists(), reason="this system has no file system in memory")
def test_a_store_that_does_not_fit_into_memory_is_explained() -> None:
    too_many = shutil.disk_usage(MEMORY_FS).total + 10**9
    sentence = (
        rf"{MEMORY_FS} has .* free, and .* need .*; enlarge {MEMORY_FS} \(in a container with --shm-size\)"
    )
    for num_bytes, expected in ((1, ""), (too_many, sentence)):
        store = WeightStore(make_store_folder(num_bytes))
        assert re.fullmatch(expected, explain_slow_store(store.folder, num_bytes))
        store.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the devices are those of a machine without GPUs")
def test_a_gpu_that_is_far_too_small_is_refused_before_anything_starts(task: Path) -> None:
    setup = make_setup(task, GPUS)
    needed = {device: sum(parts.values()) for device, parts in bytes_by_device(setup).items()}
    check_gpu_memory(setup, lambda number: needed[f"cuda:{number}"])
    error = (
        "cuda:2 has 300 MB, and the run needs about [6-9].. MB there: .*; lower engine.max_num_seqs "
        r"\(or engine.num_kv_blocks\), engine.version_slots or trainer.micro_batch_tokens"
    )
    with pytest.raises(ConfigError, match=error):
        check_gpu_memory(setup, lambda number: 300_000_000 if number == 2 else 10**12)
    on_ray = make_setup(task, {**GPUS, "runtime.kind": "ray"})
    check_gpu_memory(on_ray, lambda number: 0)  # the GPUs are those of other machines


@pytest.mark.parametrize(
    ("changes", "prefill", "chunk"),
    [
        ({}, 512, 256),
        (GPUS, 4096, 2048),
        (GPUS | {"engine.max_prefill_tokens": 9000, "trainer.logits_chunk_tokens": 100}, 9000, 100),
    ],
)
def test_gpus_prefill_and_compute_logits_in_larger_parts(
    changes: dict[str, Any], prefill: int, chunk: int, task: Path
) -> None:
    setup = make_setup(task, changes)
    assert setup.engine_spec(task.parent, 0).prefill_budget == prefill
    assert setup.trainer_spec(task.parent, task.parent).settings.logits_chunk_tokens == chunk


def test_fp32_on_a_gpu_has_a_notice(task: Path) -> None:
    (notice,) = make_setup(task, GPUS).notices
    assert "trainer.dtype = float32" in notice
    assert "set trainer.dtype = bfloat16" in notice
    assert not make_setup(task, GPUS | {"trainer.dtype": "bfloat16"}).notices
    assert not make_setup(task, {}).notices


def test_shared_memory_includes_the_samples_of_a_whole_window(task: Path) -> None:
    short, long = (make_setup(task, {"sampling.max_response_length": length}) for length in (20, 21))
    num_rows = short.config.max_groups_in_flight * 2
    assert long.stream_bytes - short.stream_bytes == 9 * num_rows  # bytes of a token: id, log-prob, mask
    assert short.stored_bytes == short.weights_bytes + 2 * short.pool_bytes + short.stream_bytes


def test_aux_workers_have_memory_of_their_own(task: Path) -> None:
    def memory(*aux_workers: str, **changes: object) -> str:
        given = {"algorithm.kl_loss_coef": 0.1, "trainer.aux_workers": json.dumps(aux_workers)} | changes
        return memory_by_device(make_setup(task, given))["cpu"]

    assert "0.0528 MB for the trainer" in memory()  # 4 bytes more for each of 2,640 parameters
    assert "0.0422 MB for the trainer" in memory("reference")
    assert "0.0106 MB for auxiliary workers" in memory("reference")
    gae = memory("critic", **{"algorithm.adv_estimator": "gae"})
    assert "0.0528 MB for the trainer" in gae
    assert "MB for auxiliary workers" in gae
    assert "to roll back" not in gae


def test_a_dry_run_of_a_resume_is_refused_with_what_a_resume_checks(task: Path) -> None:
    with pytest.raises(typer.BadParameter, match=r"leave out --resume .* itself checks .* before it changes"):
        app(["train", "--resume", str(task.parent), "--dry-run"], standalone_mode=False)
