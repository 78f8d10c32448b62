"""The stages of the first hour on a GPU. `gpu_hour.py` runs them, each in a process of its own.

    python benchmarks/gpu_stages.py STAGE [--tiny] [--device cpu] [--rows FILE]

A stage reports figures, one JSON line each. Some have a bound, and the exit code is 1 if any bound is missed.
Bounds of speed, memory and learning are checked at full size only, those of correctness always.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import multiprocessing
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from gpu_timing import QWEN3_06B, QWEN3_4B, QWEN3_8B, TINY, Bench, wait_for
from torch import Tensor
from torch.nn import functional as F

from dora.core.types import GroupId, RequestId
from dora.engine import cuda_graphs
from dora.engine.engine import Engine
from dora.engine.request import Request, SamplingParams
from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout, initial_weights, parameter_shapes
from dora.trainer.settings import Sample, TrainerSettings
from report import Options

ROOT = Path(__file__).parent.parent
GPU_TESTS = (
    "tests/gpu",
    "tests/engine/test_triton.py",
    "tests/engine/test_cuda_graphs.py",
    "tests/engine/test_device_sampler.py",
)
SMALL = replace(TINY, num_hidden_layers=3, hidden_size=128, intermediate_size=192, num_attention_heads=4,
                num_key_value_heads=2, head_dim=32)  # fmt: skip
INTERRUPTED = 130  # the exit code of a run that was stopped
COMMAND_TIMEOUT_S = 600.0  # the stage itself has a shorter one


class Stage:
    """The device and the sizes of a stage, and the report of what it finds."""

    def __init__(self, device: str, is_tiny: bool, rows: Path | None, folder: Path) -> None:
        self.device, self.is_tiny, self.folder = device, is_tiny, folder
        self.bench = Bench(Options(is_tiny, None), device, ())
        self.missed: list[str] = []
        self._rows = rows

    @property
    def is_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def dtype(self) -> str:
        """The dtype of engines: Triton's interpreter computes in fp32."""
        return "bfloat16" if self.is_gpu else "float32"

    def model(self, config: ModelConfig) -> ModelConfig:
        """The shapes to run: those of `config`, or tiny ones."""
        return TINY if self.is_tiny else config

    def report(
        self, what: str, value: object, unit: str = "", *, least: float | None = None,
        most: float | None = None, always: bool = False,
    ) -> None:  # fmt: skip
        """Record a figure, and check its bounds: at full size, or `always`."""
        row: dict[str, object] = {"what": what, "value": value, "unit": unit}
        has_bound = least is not None or most is not None
        if has_bound and (always or not self.is_tiny):
            assert isinstance(value, float | int)
            is_met = (least is None or value >= least) and (most is None or value <= most)  # nan misses both
            row |= {"bound": f">= {least:g}" if most is None else f"<= {most:g}", "is_met": is_met}
            if not is_met:
                self.missed.append(f"{what}: {value:g} {unit}, expected {row['bound']}".replace(" ,", ","))
        print(json.dumps(row), flush=True)
        if self._rows is not None:
            with self._rows.open("a") as file:
                file.write(json.dumps(row) + "\n")

    def check(self, what: str, is_true: bool) -> None:
        """Record whether something holds that must hold at any size."""
        self.report(what, int(is_true), "1 = yes", least=1, always=True)


def seconds(device: str, run: Callable[[], object]) -> float:
    """Wall time of a call and of its work on the device."""
    wait_for(device)
    started_s = time.perf_counter()
    run()
    wait_for(device)
    return time.perf_counter() - started_s


def relative_gap(found: Tensor, expected: Tensor) -> float:
    """Norm of the difference, relative to the norm of `expected`."""
    return float((found.cpu().double() - expected.cpu().double()).norm() / expected.cpu().double().norm())


def free_memory(device: str) -> None:
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


# The environment


def doctor(stage: Stage) -> None:
    """Versions, compiler, one kernel, shared memory, copies, and the time that a new shape of SDPA takes."""
    import gpu_probes
    import triton

    from dora.cli.tools import doctor as describe_machine

    for line in describe_machine().splitlines():
        stage.report(line[:16].rstrip(), line[16:])
    compiler = next(filter(None, map(shutil.which, ("cc", "gcc", "clang"))), None)
    stage.report("C compiler, for Triton", str(compiler))
    stage.check("there is a C compiler", compiler is not None)
    target, places = torch.zeros(64, dtype=torch.int16, device=stage.device), torch.arange(0, 64, 2)
    patch = torch.full((32,), 5, dtype=torch.int16, device=stage.device)
    gpu_probes._xor[(1,)](target, places.to(stage.device), patch, 32, 64)
    stage.check(f"a kernel of Triton {triton.__version__} runs", target.tolist() == [5, 0] * 32)
    stage.report("/dev/shm, free", shutil.disk_usage("/dev/shm").free / 1e9, "GB")
    stage.report("temporary files, free", shutil.disk_usage(tempfile.gettempdir()).free / 1e9, "GB")
    if stage.is_gpu:
        stage.report("cuDNN", torch.backends.cudnn.version())
        stage.report("device memory", torch.cuda.get_device_properties(0).total_memory / 1e9, "GB")
    for has_cudnn in (True, False):
        torch.backends.cuda.enable_cudnn_sdp(has_cudnn)
        name = f"SDPA with cuDNN {'on' if has_cudnn else 'off'}"
        first, again = sdpa_times(stage)
        stage.report(f"{name}: a new shape", first * 1e3, "ms")
        stage.report(f"{name}: a known shape", again * 1e3, "ms")
    for what, value, unit in gpu_probes.copies(stage.bench):
        stage.report(what, value, unit)


def sdpa_times(stage: Stage) -> tuple[float, float]:
    """Mean time of the first and of the second call for ten lengths."""
    first = again = 0.0
    for length in range(100, 110):
        q, k, v = (torch.randn(1, 4, length, 64, dtype=stage.bench.dtype, device=stage.device) for _ in "qkv")

        def attend(q: Tensor = q, k: Tensor = k, v: Tensor = v) -> Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        if length == 100:  # loads libraries
            attend()
        first += seconds(stage.device, attend) / 10
        again += seconds(stage.device, attend) / 10
    return first, again


# Kernels


def kernels(stage: Stage) -> None:
    """The tests that need a GPU, and kernels at offsets beyond 2^31 elements."""
    tests = GPU_TESTS[:1] if stage.is_tiny else GPU_TESTS
    options = ("-W", "default", "-p", "no:cacheprovider", "--timeout", "300")
    done = subprocess.run([sys.executable, "-m", "pytest", *options, *tests], cwd=ROOT, check=False)
    stage.check("tests of kernels and graphs pass", done.returncode == 0)
    attention_offsets(stage)
    norm_offsets(stage)


def attention_offsets(stage: Stage) -> None:
    """Rows whose KV is in the last blocks of a large pool, against the same KV in a small one."""
    import numpy as np

    from dora.engine.kernels.triton_kernels import TritonKernels
    from dora.engine.kernels.workspace import ForwardBatch, Workspace

    config = replace(stage.model(QWEN3_8B), num_hidden_layers=1, vocab_size=16)
    rows, context = (2, 40) if stage.is_tiny else (16, 4000)
    per_row, noise = -(-context // 16), torch.Generator().manual_seed(0)
    block_numel = 2 * 16 * config.num_key_value_heads * config.head_dim
    num_blocks = rows * per_row + (8 if stage.is_tiny else 2**31 // block_numel + 1)
    attended = []
    for total in (rows * per_row, num_blocks):
        work = Workspace(config, rows, context, 1, total, None, stage.device, stage.dtype, is_padded=True)
        noise.manual_seed(0)
        own = slice(total - rows * per_row, total)
        work.kv[own] = torch.randn(work.kv[own].shape, generator=noise).to(work.kv)
        work.qkv[:] = torch.randn(work.qkv.shape, generator=noise).to(work.qkv)
        work.block_tables[:rows] = torch.arange(own.start, own.stop).view(rows, per_row)
        work.positions[:rows], work.rows[:rows] = context - 1, torch.arange(rows)
        batch = ForwardBatch(np.arange(rows), np.zeros(rows, np.int64))
        TritonKernels(work).attend(batch, np.full(rows, context - 1), 0)
        wait_for(stage.device)
        attended.append(work.attended[:rows].cpu())
    stage.report("last element of the KV pool", num_blocks * block_numel, least=2**31)
    stage.check("attention at high offsets is equal bit for bit", torch.equal(*attended))


def norm_offsets(stage: Stage) -> None:
    """A norm with the weights of the second slot, beyond 2^31 elements, against the first slot."""
    import numpy as np

    from dora.engine.kernels.triton_kernels import TritonKernels
    from dora.engine.kernels.workspace import ForwardBatch, Workspace

    config = replace(stage.model(QWEN3_06B), num_hidden_layers=1)
    if not stage.is_tiny:
        config = replace(config, vocab_size=2**31 // config.hidden_size)
    work = Workspace(config, 1, 16, 2, 1, None, stage.device, stage.dtype, is_padded=True)
    numel, offset = work.layout.numel, work.layout.offsets["model.norm.weight"]
    own = slice(offset, offset + config.hidden_size)
    hidden = []
    for slot in (0, 1):
        work.weights[:, own] = 0.0
        work.weights[slot, own] = torch.linspace(0.5, 2.0, config.hidden_size).to(work.weights)
        work.x[0], work.delta[0] = torch.linspace(-1.0, 1.0, config.hidden_size).to(work.x), 0.0
        work.slots[0] = slot
        TritonKernels(work).add_norm(ForwardBatch(np.zeros(1, np.int64), np.full(1, slot)), offset)
        wait_for(stage.device)
        hidden.append(work.hidden[0].clone().cpu())
    stage.report("first element of the norm's weights", numel + offset, least=2**31)
    stage.check("a norm at high offsets is equal bit for bit", torch.equal(*hidden))


# The trainer


def batch_of(config: ModelConfig, num: int, prompt: int, response: int, group_size: int = 1) -> list[Sample]:
    """Responses of unequal lengths, `group_size` to each prompt."""
    noise, samples = torch.Generator().manual_seed(0), []
    for i in range(num):
        length = response - i * response // (2 * num)
        ids = torch.randint(config.vocab_size, (prompt + length,), generator=noise).tolist()
        logprobs = (-torch.rand(length, generator=noise)).tolist()
        prompt_ids = samples[-1].prompt_ids if i % group_size else ids[:prompt]
        samples.append(Sample(prompt_ids, ids[prompt:], logprobs, (-1.0, 0.5, 2.0)[i % 3]))
    return samples


def first_moment(trainer: Any) -> Tensor:
    """Adam's first moment; after one step the gradient times 1 - beta1."""
    moment: Tensor = trainer.state_dict()["optimizer"]["state"][0]["exp_avg"]
    return moment.detach().cpu().clone()


def gradient(stage: Stage) -> None:
    """The gradient against the CPU's, AdamW beyond 2^31 elements, and steps at the shapes of Qwen3-0.6B."""
    from dora.trainer.trainer import Trainer

    settings = TrainerSettings(lr=1e-3, num_steps=4, warmup_steps=0, max_grad_norm=1e9)
    flat, batch = initial_weights(SMALL, seed=0, std=0.1), batch_of(SMALL, 12, 20, 60, group_size=4)
    on_cpu = Trainer(SMALL, flat.clone(), settings)
    on_cpu.step(batch)
    for dtype, most in (("float32", 1e-4), ("bfloat16", 0.05)):
        for saves, compiles in ((False, False), (True, False), (False, True), (True, True)):
            if compiles and (not stage.is_gpu or dtype == "float32"):  # fp32 has no kernel to compile around
                continue
            own = replace(settings, dtype=dtype, activation_checkpointing=saves, torch_compile=compiles)
            trainer = Trainer(SMALL, flat.clone().to(stage.device), own)
            trainer.step(batch)
            gap = relative_gap(first_moment(trainer), first_moment(on_cpu))
            how = ", checkpointed" * saves + ", compiled" * compiles
            name = f"gradient in {dtype}{how}: distance from the CPU's in float32"
            stage.report(name, gap, most=most, always=True)
    adamw_offsets(stage)
    trainer_steps(stage)


def adamw_offsets(stage: Stage) -> None:
    """The last weights of a buffer of more than 2^31 elements after a step, against a small buffer."""
    from dora.trainer.optimizer import FlatAdamW

    free_memory(stage.device)
    small = replace(TINY, vocab_size=64)
    hidden = stage.model(QWEN3_06B).hidden_size
    large = small if stage.is_tiny else replace(small, hidden_size=hidden, vocab_size=2**31 // hidden)
    num, ends = 1000, []
    for config in (small, large):
        layout = WeightLayout(config)
        flat = torch.zeros(layout.numel, device=stage.device)
        optimizer = FlatAdamW(layout, flat, 0.1, (0.9, 0.999))
        flat[-num:] = torch.linspace(-1, 1, num)
        optimizer.gradient[-num:] = torch.linspace(2, -3, num)
        optimizer.step(1e-2, 1e9)
        ends.append(flat[-num:].cpu())
        del flat, optimizer
        free_memory(stage.device)
    stage.report("elements of the weights", WeightLayout(large).numel, least=2**31)
    stage.report(
        "largest difference of a weight", float((ends[0] - ends[1]).abs().max()), most=1e-6, always=True
    )


class StepCase(NamedTuple):
    """A training step at the shapes of Qwen3-0.6B, in bf16."""

    name: str
    torch_compile: bool
    checkpoints: bool = True
    chunk: int = 2048  # of logits, in tokens
    group_size: int = 1
    budget: int = 16384  # tokens of a micro-batch


STEP_CASES = (
    StepCase("compiled step", True),
    StepCase("compiled step, groups of 4", True, group_size=4),
    StepCase("compiled step, micro-batches of 32k tokens", True, budget=32768),
    StepCase("compiled step, no checkpointing", True, checkpoints=False),
    StepCase("step", False),
    StepCase("step, chunks of 256", False, chunk=256),
)


def trainer_steps(stage: Stage) -> None:
    """A step compiled and not, with and without checkpointing, shared prompts and larger micro-batches."""
    from dora.trainer.perf import activation_bytes, logits_bytes, peak_tflops
    from dora.trainer.trainer import Trainer

    config = stage.model(QWEN3_06B)
    prompt, response, num = (8, 24, 4) if stage.is_tiny else (256, 1024, 32)
    peak = peak_tflops(torch.device(stage.device), "bfloat16")
    numel = WeightLayout(config).numel
    for case in STEP_CASES:
        if case.torch_compile and not stage.is_gpu:
            continue
        free_memory(stage.device)
        budget = 64 if stage.is_tiny else case.budget
        settings = TrainerSettings(
            lr=1e-6, num_steps=9, warmup_steps=0, micro_batch_tokens=budget, logits_chunk_tokens=case.chunk,
            dtype="bfloat16", activation_checkpointing=case.checkpoints, torch_compile=case.torch_compile,
        )  # fmt: skip
        trainer = Trainer(config, initial_weights(config, 0).to(stage.device), settings)
        batch = batch_of(config, num, prompt, response, case.group_size)
        for what in (f"{case.name}: the first one", case.name):
            started_s = time.perf_counter()
            metrics = trainer.step(batch)
            wait_for(stage.device)
            wall_s = time.perf_counter() - started_s
            stage.report(what, wall_s, "s")
        if peak is not None:
            mfu = metrics["actor/tflop"] / wall_s / peak
            stage.report(f"{case.name}: MFU", mfu, least=0.25 if case is STEP_CASES[0] else None)
        if stage.is_gpu:
            used = torch.cuda.max_memory_allocated()
            activations = activation_bytes(config, budget, 2, case.checkpoints)
            estimate = 18 * numel + activations + logits_bytes(config, case.chunk, 2)
            stage.report(f"{case.name}: memory", used / 1e9, "GB")
            # Compiled operations save fewer activations than the estimate has.
            least = None if case.torch_compile else 0.75
            stage.report(f"{case.name}: memory over estimate", used / estimate, least=least)
            stage.report(f"{case.name}: memory over estimate", used / estimate, most=1.1)
        del trainer


def fsdp(stage: Stage) -> None:
    """FSDP2 with one rank, by NCCL on a GPU, against the learner of one process: gradient, checkpoint."""
    from dora.trainer.checkpoint import SHARDS_FOLDER, load_checkpoint, new_draft, save_checkpoint
    from dora.trainer.distributed import DistributedLearner, RankGroup
    from dora.trainer.trainer import Trainer

    started_s = time.perf_counter()
    device = torch.device("cuda:0" if stage.is_gpu else "cpu")
    group = RankGroup(stage.folder / "rendezvous", 0, 1, device, 60.0)
    stage.report("start of the process group", time.perf_counter() - started_s, "s")
    settings = TrainerSettings(lr=1e-3, num_steps=9, warmup_steps=0, max_grad_norm=1e9, dtype="float32")
    config, start = SMALL, initial_weights(SMALL, seed=0, std=0.1)
    batch = batch_of(config, 12, 20, 60)

    def sharded(flat: Tensor) -> Trainer:
        return Trainer(
            config, flat, settings, learner=DistributedLearner(group, config, flat, settings, None)
        )

    if stage.is_gpu:
        exact = settings
        settings = replace(exact, dtype="bfloat16", activation_checkpointing=True, torch_compile=True)
        alone, ranks = Trainer(config, start.clone().to(stage.device), settings), sharded(start.clone())
        for trainer in (alone, ranks):
            trainer.step(batch)
        gap = relative_gap(first_moment(ranks), first_moment(alone))
        stage.report("compiled gradient in bfloat16: distance from one process", gap, most=0.05, always=True)
        settings = exact

    alone, ranks = Trainer(config, start.clone().to(stage.device), settings), sharded(start.clone())
    for trainer in (alone, ranks):
        trainer.step(batch)
    gap = relative_gap(first_moment(ranks), first_moment(alone))
    stage.report("gradient: distance from one process", gap, most=1e-4, always=True)
    folder = stage.folder / "checkpoint"
    weights = ranks.flat.clone()
    saved, shards = ranks.save_state(new_draft(folder) / SHARDS_FOLDER)
    ranks.step(batch)  # while the moments are written
    save_checkpoint(folder, config, weights, saved, 1, ROOT / "examples" / "gcd-start", shards=shards)
    _, flat, state, _ = load_checkpoint(folder, reads_shards=False)
    resumed = sharded(flat)
    resumed.load_state_dict(state)
    resumed.step(batch)
    gap = relative_gap(resumed.flat - start, ranks.flat - start)
    stage.report("resumed step: distance from the uninterrupted one", gap, most=1e-4, always=True)
    if not stage.is_tiny:
        config, settings = QWEN3_06B, replace(settings, dtype="bfloat16")
        large = sharded(initial_weights(config, 0))
        large._learner._is_current = False  # type: ignore[attr-defined]  # as after a step
        took_s = seconds(stage.device, lambda: large.flat)
        stage.report("gather of the weights of Qwen3-0.6B", took_s / (4e-9 * large.flat.numel()), "s/GB")
    torch.distributed.destroy_process_group()


# Publishing and loading


def publish(stage: Stage) -> None:
    """One process publishes versions, another one loads them: at once, and while it decodes."""
    publish_model(stage, "0.6B", stage.model(QWEN3_06B))
    if stage.is_gpu and torch.cuda.get_device_properties(0).total_memory < 100e9:
        publish_model(stage, "4B", stage.model(QWEN3_4B))
    elif not stage.is_tiny:
        publish_model(stage, "8B", QWEN3_8B)


def publish_model(stage: Stage, name: str, config: ModelConfig) -> None:
    from dora.weights.store import WeightStore, make_store_folder

    free_memory(stage.device)
    numel = WeightLayout(config).numel
    folder = make_store_folder(3 * numel * 2)
    store, num_gb = WeightStore(folder, "bfloat16", parameter_shapes(config)), 2e-9 * numel
    flat = torch.zeros(numel, device=stage.device).uniform_(-0.02, 0.02)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    loader = context.Process(
        target=load_versions, args=(theirs, folder, config, stage.device, stage.is_tiny), daemon=True
    )
    loader.start()
    theirs.close()
    try:
        for version in (0, 1):
            started_s = time.perf_counter()
            digest = store.publish(version, flat)
            took_s = time.perf_counter() - started_s
            how = ("at once", "while 8 rows decode")[version]
            stage.report(f"{name}: publish version {version}", took_s / num_gb, "s/GB")
            ours.send(version)
            loaded = ours.recv()
            stage.check(f"{name}: version {version} has the published digest", loaded["digest"] == digest)
            stage.report(f"{name}: load {how}, digest included", loaded["wall_s"] / num_gb, "s/GB")
            if version:
                stage.report(f"{name}: decoding paused", loaded["stop_s"] / num_gb, "s/GB")
                stage.report(f"{name}: steps beside the load", loaded["steps"], least=1, always=True)
            flat += 1e-3
    finally:
        loader.kill()
        loader.join()
        store.close()


def load_versions(
    connection: Connection, folder: Path, config: ModelConfig, device: str, is_tiny: bool
) -> None:
    """The process of an engine: loads the versions that it is told to, with the loader of a run."""
    from dora.runtime.process import messages as m
    from dora.runtime.rollout.engine_worker import WeightLoader
    from dora.weights.store import Prefetcher, WeightStore

    rows, context = (2, 60) if is_tiny else (8, 1024)
    engine = Engine(
        config, max_rows=rows, max_context=context, version_slots=2, device=device, dtype="bfloat16",
        kernels="triton" if device == "cuda" else "eager",
    )  # fmt: skip
    loader = WeightLoader(
        engine, store := WeightStore(folder, "bfloat16"), Prefetcher(store, device == "cuda")
    )
    while True:
        version, num_steps = connection.recv(), engine.num_steps
        started_s, replies = time.perf_counter(), list[Any]()
        loader.prefetch(version)
        prefetched = loader._prefetcher._prefetched[1]  # type: ignore[union-attr, index]
        while not prefetched.done():
            step_or_wait(engine)
        loader.load(version)
        while not (replies := loader.poll()):
            step_or_wait(engine)
        assert isinstance(replies[0], m.WeightsLoaded), replies
        wall_s = time.perf_counter() - started_s
        connection.send(
            {"digest": replies[0].digest, "wall_s": wall_s, "stop_s": replies[0].stop_s,
             "steps": engine.num_steps - num_steps}
        )  # fmt: skip
        if version == 0:
            engine.submit([endless_request(row, context) for row in range(rows)])
            engine.step()


def step_or_wait(engine: Engine) -> None:
    """A decode step; without requests, leave the processor to the threads that load."""
    if engine.is_idle:
        time.sleep(1e-3)
    engine.step()


def endless_request(row: int, context: int) -> Request:
    """A request that decodes to the end of the context."""
    sampling = SamplingParams(1.0, context - 4)
    return Request(RequestId(0, row, 0), GroupId(0, row), (1, 2, 3), 0, row, sampling)


# The engine


def arrivals(stage: Stage) -> None:
    """Requests that arrive while others decode: how many steps are computed in vain."""
    engine_parts(stage, "0.6B", QWEN3_06B, ("load", "prefill", "arrivals"))


def engine_small(stage: Stage) -> None:
    """Qwen3-0.6B: cells of the roofline, unequal lengths, two versions, arrivals, switches."""
    engine_parts(stage, "0.6B", QWEN3_06B, ("load", "decode", "versions", "unequal", "nano", "switch"))


def engine_large(stage: Stage) -> None:
    """Qwen3-8B, as `engine_small`; at tiny sizes that stage and `arrivals` have run its other parts."""
    parts = ("load", "decode", "versions", "unequal", "prefill", "arrivals", "switch")
    engine_parts(stage, "8B", QWEN3_8B, parts[:1] if stage.is_tiny else parts)


def engine_parts(stage: Stage, name: str, config: ModelConfig, parts: tuple[str, ...]) -> None:
    import gpu_engine

    bounds: dict[str, dict[str, float]] = {
        "of_roofline": {"least": 0.6}, "discarded": {"most": 0.05}, "long_row": {"most": 1.3}
    }  # fmt: skip
    for row in gpu_engine.measure(stage.bench, name, stage.model(config), parts):
        cell = " ".join(str(row[key]) for key in ("part", "rows", "context") if key in row)
        for key, value in row.items():
            if key in ("part", "model", "rows", "context"):
                continue
            is_bounded = key != "of_roofline" or str(row["rows"]) == "64"
            stage.report(f"{name} {cell}: {key}", value, **(bounds.get(key, {}) if is_bounded else {}))


def probes(stage: Stage) -> None:
    """Properties of the device that the engine's design depends on; see `gpu_probes.py`."""
    import gpu_probes

    for name, probe in gpu_probes.PROBES.items():
        for row in gpu_probes.rows_of(stage.bench, name, probe):
            stage.report(f"{name} {row['what']}", row["note"] or row["value"], str(row["unit"]))


# Whole runs


def dora(stage: Stage, *arguments: str) -> int:
    """Run a command of DORA-RL to its end; returns its exit code."""
    command = [sys.executable, "-m", "dora", *arguments]
    return subprocess.run(command, cwd=stage.folder, check=False, timeout=COMMAND_TIMEOUT_S).returncode


def sets(**changes: object) -> list[str]:
    """`--set section.key=value` for each change."""
    return [part for key, value in changes.items() for part in ("--set", f"{key.replace('__', '.')}={value}")]


def on_device(stage: Stage) -> list[str]:
    """One engine that takes turns with the trainer."""
    own = {"engine__num_engines": 1, "orchestrator__placement": "colocated"}
    return sets(**own, engine__device=stage.device, trainer__device=stage.device)


def metrics_of(run: Path) -> list[dict[str, Any]]:
    """The complete lines of metrics.jsonl so far."""
    path = run / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.is_file() else []


def check_run(stage: Stage, run: Path, code: int, num_steps: int, *audit: str) -> dict[str, Any]:
    """The run has ended well, and its audit finds nothing; returns its summary."""
    stage.check(f"{run.name}: exit code 0", code == 0)
    stage.check(f"{run.name}: all {num_steps} steps trained", len(metrics_of(run)) == num_steps)
    stage.check(f"{run.name}: dora audit finds nothing", dora(stage, "audit", str(run), *audit) == 0)
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    for key in ("wall_s", "tokens_per_s", "logprob_mismatch_max", "trainer_idle_ratio"):
        stage.report(f"{run.name}: {key}", summary.get(key))
    return summary


def demo(stage: Stage) -> None:
    """The demo on the device: it learns, and the audit recomputes log-probs."""
    run, num_steps = stage.folder / "demo", 3 if stage.is_tiny else 150
    sizes = sets(eval__num_prompts=4, trainer__batch_size=2)
    if not stage.is_tiny:
        sizes = sets(engine__max_num_seqs=64)
    config = str(ROOT / "examples" / "gcd.toml")
    code = dora(
        stage, "train", config, "--out", str(run), "--steps", str(num_steps), *on_device(stage), *sizes
    )
    summary = check_run(stage, run, code, num_steps, "--deep", "8")
    gain = summary["eval_after"] - summary["eval_before"]
    stage.report("demo: gain of the held-out reward", gain, least=0.3)  # on a CPU it was 0.6


REWARD = """
def reward(prompt, completion, **row):
    return sum(map(ord, completion)) % 7 / 7
"""


def write_task(stage: Stage, config: ModelConfig) -> Path:
    """A run with random weights of these shapes, two engines and the trainer on one card."""
    from dora.data.gcd import ALPHABET
    from dora.data.tokenizer import save_character_tokenizer
    from dora.model.pretrained import save_pretrained

    save_pretrained(stage.folder / "model", config, initial_weights(config, 0))
    save_character_tokenizer(stage.folder / "model", ALPHABET)
    (stage.folder / "task.py").write_text(REWARD)
    prompt, response, rows, batch = (8, 12, 4, 2) if stage.is_tiny else (8, 512, 32, 8)
    device = "cuda:0" if stage.is_gpu else "cpu"
    path = stage.folder / "task.toml"
    path.write_text(
        f'[run]\nsteps = 5\n[model]\npath = "model"\n[data]\npath = "gcd"\nmax_prompt_length = {prompt}\n'
        f"[sampling]\ngroup_size = 4\nmax_response_length = {response}\n"
        f'[engine]\nnum_engines = 2\nmax_num_seqs = {rows}\ndevice = "{device}"\ndtype = "{stage.dtype}"\n'
        '[reward]\nfunction = "task.py:reward"\n'
        f'[trainer]\nbatch_size = {batch}\nlr = 1e-6\ndevice = "{device}"\n'
        f'dtype = "{"bfloat16" if stage.is_gpu else "float32"}"\nactivation_checkpointing = true\n'
        "[eval]\nnum_prompts = 0\n[runtime]\nstart_timeout_s = 300.0\nheartbeat_timeout_s = 60.0\n"
    )
    return path


def runs(stage: Stage) -> None:
    """Five steps at the shapes of Qwen3-0.6B: two engines and the trainer share the device."""
    run = stage.folder / "run"
    config = replace(stage.model(QWEN3_06B), max_position_embeddings=2048)
    code = dora(stage, "train", str(write_task(stage, config)), "--out", str(run))
    check_run(stage, run, code, 5)
    compared = [line["mismatch/kl"] for line in metrics_of(run) if "mismatch/kl" in line]
    stage.report(
        "mismatch/kl, largest of the steps", max(compared, default=float("nan")), most=0.015, always=True
    )
    for line in metrics_of(run):
        for key in ("perf/throughput", "perf/mfu/actor", "timing_s/step"):
            if key in line:
                stage.report(f"step {line['step']}: {key}", line[key])


def migrations(stage: Stage) -> None:
    """A running request of 1,000 tokens migrates between two engine processes on the device."""
    from migration import EnginePair, requests_of

    from dora.engine.interface import KVTransfer

    config = replace(stage.model(QWEN3_06B), max_position_embeddings=2048)
    num_tokens, repeats = (40, 2) if stage.is_tiny else (1000, 20)
    ways: tuple[KVTransfer, ...] = ("staged", "ipc")
    for kv_transfer in ways:
        pair = EnginePair(config, "cuda:0" if stage.is_gpu else "cpu", stage.dtype, kv_transfer)
        try:
            (request,) = requests_of(pair, 1, num_tokens)
            moved = [pair.migrate(request, number % 2) for number in range(repeats)]
        finally:
            pair.close()
        stage.report(f"{kv_transfer}: KV", moved[0].num_bytes / 1e6, "MB", least=1e-6, always=True)
        for name, seconds in (("copy", "copy_s"), ("stop time", "stop_s")):
            median_s = statistics.median(getattr(event, seconds) for event in moved)
            stage.report(f"{kv_transfer}: {name}", median_s * 1e3, "ms")
    for killed, side in enumerate(("source", "destination")):
        pair = EnginePair(config, "cuda:0" if stage.is_gpu else "cpu", stage.dtype, "ipc")
        try:
            (request,) = requests_of(pair, 1, num_tokens)
            for number in range(2):  # both have opened the other's memory
                pair.migrate(request, number)
            state = pair.kill_during_copy(request, killed)
        finally:
            pair.close()
        stage.report(f"ipc: the other engine decodes after SIGKILL of the {side} at", state.name)


# Faults


class Training:
    """A run of `dora train` in the background."""

    def __init__(self, stage: Stage, run: Path, *arguments: str) -> None:
        self.run = run
        command = [sys.executable, "-m", "dora", "train", *arguments]
        self._process = subprocess.Popen(command, cwd=stage.folder, start_new_session=True)

    def workers(self) -> list[psutil.Process]:
        """The worker processes in the order of their start: engines, trainer, reward worker."""
        children = psutil.Process(self._process.pid).children()  # the fork server is one of them
        found = [child for server in children for child in server.children()]
        return sorted(found, key=lambda child: (child.create_time(), child.pid))

    def wait_for_steps(self, num_steps: int, timeout_s: float = 200.0) -> None:
        """Wait until the run has trained so many steps. Raises RuntimeError if it ends before."""
        self.try_to_reach(num_steps, timeout_s)
        if len(metrics_of(self.run)) < num_steps:
            raise RuntimeError(f"{self.run.name} did not reach step {num_steps} in {timeout_s:g} s")

    def try_to_reach(self, num_steps: int, timeout_s: float) -> None:
        """Wait until the run has trained so many steps, or until it or the time is over."""
        deadline_s = time.monotonic() + timeout_s
        while len(metrics_of(self.run)) < num_steps and time.monotonic() < deadline_s:
            if self._process.poll() is not None:
                return
            time.sleep(0.05)

    def wait_for_event(self, kind: str, timeout_s: float = 60.0) -> None:
        """Wait until the journal has an event of this kind. Raises RuntimeError after `timeout_s`."""
        path, deadline_s = self.run / "journal.jsonl", time.monotonic() + timeout_s
        while f'"kind":"{kind}"' not in path.read_text().replace('": "', '":"'):
            if time.monotonic() > deadline_s:
                raise RuntimeError(f"{self.run.name} has no event {kind} after {timeout_s:g} s")
            time.sleep(0.05)

    def stop(self) -> int:
        """Ask the run to stop after a checkpoint; returns its exit code."""
        self._process.terminate()
        return self._process.wait(COMMAND_TIMEOUT_S)

    def kill_all(self) -> None:
        """Kill the driver and all workers at once, if the run has not ended."""
        if self._process.poll() is None:
            workers = self.workers()
            for process in (psutil.Process(self._process.pid), *workers):
                with contextlib.suppress(psutil.NoSuchProcess):  # workers exit with their driver
                    process.kill()
            psutil.wait_procs(workers, 30)
            self._process.wait()


def used_gb(stage: Stage) -> float:
    """Device memory that all processes use."""
    if not stage.is_gpu:
        return 0.0
    free, total = torch.cuda.mem_get_info()
    return (total - free) / 1e9


def faults(stage: Stage) -> None:
    """Kill an engine, then the trainer, take the device's memory away, kill the run and resume it."""
    run, used_before = stage.folder / "faults", used_gb(stage)
    changes = sets(run__steps=100_000, trainer__save_freq=2, runtime__max_restarts=20)  # it is stopped
    task = write_task(stage, SMALL)
    training = Training(stage, run, str(task), "--out", str(run), *changes)
    try:
        training.wait_for_steps(1)
        training.workers()[0].kill()
        training.wait_for_event("engine_lost")
        training.workers()[1].kill()  # the first is the other engine
        training.wait_for_event("trainer_lost")
        training.wait_for_steps(len(metrics_of(run)) + 3)
        with memory_taken(stage):
            training.try_to_reach(len(metrics_of(run)) + 3, timeout_s=20)
        training.wait_for_steps(len(metrics_of(run)) + 2)
    finally:
        training.kill_all()
    left = used_gb(stage) - used_before
    stage.report("device memory in use after SIGKILL", left, "GB", most=0.5, always=True)
    num_steps = len(metrics_of(run))
    training = Training(stage, run, "--resume", str(run))
    try:
        training.wait_for_steps(num_steps + 2)
        stage.check("the resumed run stops when it is asked to", training.stop() == INTERRUPTED)
    finally:
        training.kill_all()
    stage.check("dora audit finds nothing", dora(stage, "audit", str(run)) == 0)
    summary = json.loads((run / "summary.json").read_text())
    stage.report("engines lost", summary["engine_failures"], least=1, always=True)
    stage.report("trainers lost", summary["trainer_failures"], least=1, always=True)


@contextmanager
def memory_taken(stage: Stage) -> Iterator[None]:
    """Hold all but 0.2 GB of the device's free memory, so that the run's processes run out of memory."""
    if not stage.is_gpu:
        yield
        return
    free, _ = torch.cuda.mem_get_info()
    taken = torch.empty(max(0, free - 200_000_000), dtype=torch.uint8, device="cuda")
    stage.report("device memory taken", taken.nbytes / 1e9, "GB")
    yield
    del taken
    torch.cuda.empty_cache()


# Profile


def profile(stage: Stage) -> None:
    """Where 20 decode steps and one step of the trainer spend the device's time."""
    profile_engine(stage, stage.model(QWEN3_06B))
    free_memory(stage.device)
    profile_trainer(stage, stage.model(QWEN3_06B))


def profile_engine(stage: Stage, config: ModelConfig) -> None:
    import gpu_engine

    num_first, num_steps = (2, 2) if stage.is_tiny else (8, 20)
    rows, context = (2, 16) if stage.is_tiny else (64, 1024)
    engine = Engine(
        config, max_rows=rows, max_context=context, version_slots=1, device=stage.device, dtype=stage.dtype,
        kernels="triton",
    )  # fmt: skip
    engine.load(0, gpu_engine.random_weights(stage.bench, config))
    engine.submit([endless_request(row, context) for row in range(rows)])
    for _ in range(num_first):
        engine.step()
    profiled(stage, f"{num_steps} decode steps", lambda: [engine.step() for _ in range(num_steps)])
    engine.abort([RequestId(0, row, 0) for row in range(rows)])
    free = rows

    def arrive(_: int) -> None:
        """A step in which a request of 100 tokens arrives."""
        nonlocal free
        prompt = tuple(torch.randint(config.vocab_size, (min(100, context // 2),)).tolist())
        sampling = SamplingParams(1.0, 2 * num_steps + 4)
        engine.submit([Request(RequestId(0, free, 0), GroupId(0, free), prompt, 0, free, sampling)])
        free += 1
        engine.step()

    for number in range(num_steps):
        arrive(number)
    arriving = f"{num_steps} steps with an arrival of {min(100, context // 2)} tokens each"
    profiled(stage, arriving, lambda: list(map(arrive, range(num_steps))))


def profile_trainer(stage: Stage, config: ModelConfig) -> None:
    from dora.trainer.trainer import Trainer

    num, prompt, response, budget = (4, 8, 24, 64) if stage.is_tiny else (16, 256, 1024, 16384)
    settings = TrainerSettings(
        lr=1e-6, num_steps=9, warmup_steps=0, micro_batch_tokens=budget, dtype="bfloat16",
        activation_checkpointing=True, logits_chunk_tokens=2048, torch_compile=stage.is_gpu,
    )  # fmt: skip
    batch = batch_of(config, num, prompt, response)
    trainer = Trainer(config, initial_weights(config, 0).to(stage.device), settings)
    trainer.step(batch)
    profiled(stage, "a step of the trainer", lambda: trainer.step(batch))


def profiled(stage: Stage, name: str, run: Callable[[], object]) -> None:
    """The 12 kernels or operators that take most of the time, with their share of it."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    activities = [ProfilerActivity.CPU, *[ProfilerActivity.CUDA] * stage.is_gpu]
    with recorded(activities=activities) as found:
        took_s = seconds(stage.device, run)
    key = "self_device_time_total" if stage.is_gpu else "self_cpu_time_total"
    wanted = "CUDA" if stage.is_gpu else "CPU"  # an operator has the device time of its kernels, too
    events = [event for event in found.key_averages() if event.device_type.name == wanted]
    events.sort(key=lambda event: -getattr(event, key))
    total_us = sum(getattr(event, key) for event in events) or 1.0
    stage.report(f"{name}: wall time", took_s * 1e3, "ms")
    stage.report(f"{name}: time of kernels", total_us / 1e3, "ms", least=1e-6, always=True)
    stage.report(f"{name}: kernels", sum(event.count for event in events))
    for event in events[:12]:
        stage.report(f"{name}: {event.key[:200]} x {event.count}", getattr(event, key) / total_us)


class StageEntry(NamedTuple):
    """A stage and its time limit, at any size."""

    run: Callable[[Stage], None]
    limit_s: int


STAGES = {
    "doctor": StageEntry(doctor, 90),
    "gradient": StageEntry(gradient, 210),
    "demo": StageEntry(demo, 210),
    "arrivals": StageEntry(arrivals, 90),
    "kernels": StageEntry(kernels, 240),
    "fsdp": StageEntry(fsdp, 120),
    "publish": StageEntry(publish, 240),
    "engine-0.6B": StageEntry(engine_small, 300),
    "engine-8B": StageEntry(engine_large, 420),
    "runs": StageEntry(runs, 400),
    "migrations": StageEntry(migrations, 240),
    "faults": StageEntry(faults, 400),
    "profile": StageEntry(profile, 180),
    "probes": StageEntry(probes, 240),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes, to check that everything runs")
    parser.add_argument("--rows", type=Path, metavar="FILE", help="append each figure as a line of JSON")
    given = parser.parse_args()
    if given.device == "cpu":
        os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        cuda_graphs._BUCKET = 2  # rows; the interpreter takes 0.1 s for each, also for those of padding
    torch.set_num_threads(1)
    rows = None if given.rows is None else given.rows.absolute()
    with tempfile.TemporaryDirectory(prefix="dora-gpu-") as folder:
        stage = Stage(given.device, given.tiny, rows, Path(folder))
        STAGES[given.stage].run(stage)
    if stage.missed:
        sys.exit("\n".join(stage.missed))


if __name__ == "__main__":
    main()
