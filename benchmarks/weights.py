"""How fast versions reach engines, how long decoding pauses for a load, and how many loads the demo needs.

First versions of 0.5, 2 and 4 GB are published and loaded, without other work: seconds per GB of `publish`
and `load`, digests included, with the `cpu` time of both, and of their parts, each alone: `round` to the
engines' dtype by one thread, `write` into the store by one thread, `digest`, and `copy` from the store into
the engine by one thread. Medians without the first version. The largest one needs 12 GB of memory.

Then an engine that decodes loads versions, for models of several sizes. `eager` loads from the store and
computes the digest at once. `deferred` loads from prefetched host memory, and a thread computes the digest.
`stop_ms` is how long decoding pauses, `held_ms` the time until the version can be used, and `copy_ms` a plain
copy between two warm buffers of that size. Then the demo runs with loads of each kind, and with versions
skipped whose KL to the loaded one is small. In `demo` the trainer is the bottleneck, so the bound requires
every version. `paced` has slower engines. `loads` is the number of loaded versions, `left_out` that of
skipped ones. --quick runs smaller models, and a few steps of two modes. --transfer stops after the first
part.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

import torch
from demo import SEEDS, run_demo
from models import DEMO, SIXTY_MILLION, TEN_MILLION, THIRTY_MILLION
from torch import Tensor

from dora.core.types import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.request import Request, SamplingParams
from dora.model.config import ModelConfig
from dora.model.weights import WeightLayout, as_bytes, initial_weights, parameter_shapes, weight_digest
from dora.runtime.process.messages import WeightsLoaded
from dora.runtime.rollout.engine_worker import WeightLoader
from dora.weights.store import Prefetcher, WeightStore, make_store_folder
from report import Row, make_parser, options_of, publish

Result = TypeVar("Result")
MODELS = {"0.5M": DEMO, "10M": TEN_MILLION, "30M": THIRTY_MILLION, "60M": SIXTY_MILLION}
LOADS = ("eager", "deferred")
TRANSFERS = ((0.5, "float32"), (2.0, "float32"), (4.0, "float32"), (0.5, "bfloat16"), (2.0, "bfloat16"))
QUICK_TRANSFERS = TRANSFERS[:1]
NUM_TRANSFERS = 4  # versions, the first of which is left out
NUM_ROWS, CONTEXT = 4, 2048
SKIP, MAX_STALENESS = 2e-4, 4  # nats per token, versions
MODES: dict[str, tuple[str, ...]] = {
    "eager": (),
    "deferred": ("weights.load=deferred",),
    "skip": (f"weights.skip_below_kl={SKIP}",),
    "deferred_skip": ("weights.load=deferred", f"weights.skip_below_kl={SKIP}"),
}
QUICK_MODES = ("eager", "deferred_skip")
WORKLOADS = {"demo": (), "paced": ("engine.min_step_time=8ms",)}
NUM_STEPS = {"demo": 60, "paced": 24}
QUICK = ("--steps", "6", "--set", "eval.num_prompts=0")
COLUMNS = {
    "loads": "weight_loads",
    "left_out": "weight_loads_skipped",
    "load_s": "weight_load_s",
    "stop_s": "weight_load_pause_s",
    "wall_s": "wall_s",
    "cpu_s": "cpu_s",
    "tokens_per_s": "tokens_per_s",
    "staleness_mean": "staleness_mean",
    "staleness_max": "staleness_max",
    "stall_s": "stall_s",
}


def transfer_model(num_gb: float, dtype: torch.dtype) -> ModelConfig:
    """A model of this size: layers of a 0.6B model, and a vocabulary that fills the rest."""
    wide = replace(THIRTY_MILLION, hidden_size=1024, intermediate_size=3072, num_hidden_layers=6)
    small, larger = (WeightLayout(replace(wide, vocab_size=size)).numel for size in (1000, 2000))
    missing = num_gb * 1e9 / dtype.itemsize - small
    return replace(wide, vocab_size=1000 + int(1000 * missing / (larger - small)))


def transfer_row(num_gb: float, dtype: str, num_versions: int) -> Row:
    """Medians of seconds per GB."""
    model = transfer_model(num_gb, getattr(torch, dtype))
    flat = torch.empty(WeightLayout(model).numel).uniform_(-0.02, 0.02)
    engine = Engine(model, max_rows=1, max_context=16, version_slots=1, dtype=dtype)
    num_bytes = flat.numel() * getattr(torch, dtype).itemsize
    store = WeightStore(make_store_folder(2 * num_bytes), dtype, parameter_shapes(model))
    try:
        times = [transfer(engine, store, version, flat) for version in range(num_versions)][1:]
    finally:
        store.close()
    medians = {
        f"{part}_s_per_gb": statistics.median(found[part] for found in times) / (num_bytes / 1e9)
        for part in times[0]
    }
    total = medians["publish_s_per_gb"] + medians["load_s_per_gb"]
    return {"gb": num_bytes / 1e9, "dtype": dtype, **medians, "publish_and_load_s_per_gb": total}


def transfer(engine: Engine, store: WeightStore, version: int, flat: Tensor) -> dict[str, float]:
    """Publish and load one version: the seconds of both and of their parts."""
    flat[0] = version
    began_cpu_s = time.process_time()
    digest, publish_s = timed(lambda: store.publish(version, flat))
    found, load_s = timed(lambda: engine.load(version, store.fetch(version)))
    cpu_s = time.process_time() - began_cpu_s
    assert found == digest, "the engine has loaded other bytes"
    engine.drop(version)
    _, copy_s = timed(lambda: engine.copy_to_slot(version, store.fetch(version)))
    engine.activate(version, digest)
    engine.drop(version)
    _, digest_s = timed(lambda: weight_digest(store.fetch(version)))
    _, round_s = timed(lambda: store.rounded(flat) if store.fetch(version).dtype != flat.dtype else None)
    content = as_bytes(flat)[: store.fetch(version).nbytes].data
    store.drop(version)
    _, write_s = timed(lambda: store.path(version).write_bytes(content))
    store.drop(version)
    return {
        "publish": publish_s,
        "load": load_s,
        "cpu": cpu_s,
        "round": round_s,
        "write": write_s,
        "digest": digest_s,
        "copy": copy_s,
    }


def timed(work: Callable[[], Result]) -> tuple[Result, float]:
    """The result, and the seconds that it took."""
    began_s = time.perf_counter()
    result = work()
    return result, time.perf_counter() - began_s


def decoding_engine(model: ModelConfig, first: Tensor) -> Engine:
    """An engine in which every row has begun a long answer of version 0."""
    engine = Engine(model, max_rows=NUM_ROWS, max_context=CONTEXT, version_slots=2)
    engine.load(0, first)
    sampling = SamplingParams(temperature=1.0, max_tokens=CONTEXT - 8)
    engine.submit(
        [
            Request(RequestId(0, row, 0), GroupId(0, row), (1, 2, 3), version=0, seed=row, sampling=sampling)
            for row in range(NUM_ROWS)
        ]
    )
    while engine.num_waiting:
        engine.step()
    return engine


def load_versions(model: ModelConfig, load: str, num_versions: int) -> list[tuple[float, float]]:
    """For each version: the seconds that decoding paused, and until the version could be used."""
    flat = initial_weights(model, seed=0)
    folder = make_store_folder(2 * flat.nbytes)
    store, found = WeightStore(folder, shapes=parameter_shapes(model)), []
    try:
        engine = decoding_engine(model, flat)
        prefetcher = Prefetcher(store, is_pinned=False) if load == "deferred" else None
        loader = WeightLoader(engine, store, prefetcher)
        for version in range(1, num_versions + 1):
            flat[0] = version
            store.publish(version, flat)
            loader.prefetch(version)
            for _ in range(20):  # during the prefetch
                engine.step()
            loader.load(version)
            began_s = time.perf_counter()
            while not (replies := loader.poll()):
                engine.step()
            (loaded,) = replies
            assert isinstance(loaded, WeightsLoaded), loaded
            found.append((loaded.stop_s, loaded.stop_s + time.perf_counter() - began_s))
            loader.drop(version)
            store.drop(version)
    finally:
        store.close()
    return found


def copy_s(num_parameters: int) -> float:
    """Median seconds of a plain copy of as many numbers between warm buffers."""
    source, target = torch.ones(num_parameters), torch.ones(num_parameters)
    times = []
    for _ in range(7):
        began_s = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began_s)
    return statistics.median(times)


def load_row(size: str, load: str, num_versions: int) -> Row:
    """Medians over versions."""
    model = MODELS[size]
    numel = WeightLayout(model).numel
    stop_s, held_s = zip(*load_versions(model, load, num_versions), strict=True)
    return {
        "model": size,
        "mb": 4 * numel / 1e6,
        "load": load,
        "stop_ms": 1e3 * statistics.median(stop_s),
        "held_ms": 1e3 * statistics.median(held_s),
        "copy_ms": 1e3 * copy_s(numel),
    }


def demo_row(workload: str, mode: str, seed: int, quick: bool) -> Row:
    """One run of the demo, with its final reward."""
    changes = (f"orchestrator.max_staleness={MAX_STALENESS}", *WORKLOADS[workload], *MODES[mode])
    summary, lines = run_demo(seed, changes, *(QUICK if quick else ("--steps", str(NUM_STEPS[workload]))))
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    last = rewards[-max(1, len(rewards) // 4) :]
    found = {name: summary[key] for name, key in COLUMNS.items()}
    return {"workload": workload, "mode": mode, "seed": seed, **found, "reward": statistics.fmean(last)}


def transfer_ratios(transfers: Iterable[Row]) -> dict[str, float]:
    """Seconds per GB of a publication and a load."""
    return {
        f"publish_and_load_s_per_gb_{float(row['gb']):.1f}GB_{row['dtype']}": float(
            row["publish_and_load_s_per_gb"]
        )
        for row in transfers
    }


def ratios_of(loads: Iterable[Row], runs: Iterable[Row]) -> dict[str, float]:
    """Ratios of the largest model and of the demo."""
    largest = {str(row["load"]): row for row in loads}
    eager, deferred = largest["eager"], largest["deferred"]
    ratios = {
        f"eager_over_deferred_stop_{eager['model']}": float(eager["stop_ms"]) / float(deferred["stop_ms"]),
        f"deferred_stop_over_copy_{eager['model']}": float(deferred["stop_ms"]) / float(deferred["copy_ms"]),
    }
    found: dict[tuple[str, str], list[Row]] = {}
    for row in runs:
        found.setdefault((str(row["workload"]), str(row["mode"])), []).append(row)

    def mean(workload: str, mode: str, column: str) -> float:
        return statistics.fmean(float(row[column]) for row in found[workload, mode])

    for workload, mode in [key for key in found if key[1] != "eager"]:
        loads, wall_s = (mean(workload, "eager", x) / mean(workload, mode, x) for x in ("loads", "wall_s"))
        ratios[f"{mode}_loads_saved_{workload}"] = 1 - 1 / loads
        ratios[f"eager_over_{mode}_wall_s_{workload}"] = wall_s
    return ratios


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--transfer", action="store_true", help="only publish and load large versions")
    given = parser.parse_args()
    options = options_of(given)
    transfers = [
        transfer_row(num_gb, dtype, NUM_TRANSFERS)
        for num_gb, dtype in (QUICK_TRANSFERS if options.quick else TRANSFERS)
    ]
    if given.transfer:
        return publish(options, transfers, transfer_ratios(transfers))
    sizes, num_versions = (("0.5M", "10M"), 5) if options.quick else (tuple(MODELS), 9)
    loads = [load_row(size, load, num_versions) for size in sizes for load in LOADS]
    seeds, workloads, modes = SEEDS, tuple(WORKLOADS), tuple(MODES)
    if options.quick:
        seeds, workloads, modes = SEEDS[:1], ("paced",), QUICK_MODES
    runs = [
        demo_row(work, mode, seed, options.quick) for seed in seeds for work in workloads for mode in modes
    ]
    publish(options, [*transfers, *loads, *runs], transfer_ratios(transfers) | ratios_of(loads, runs))


if __name__ == "__main__":
    main()
