"""How new versions come to the engines: what stands still for one, and how many the demo needs.

First an engine that decodes takes a version, for models of several sizes: `eager` from the store, with its
digest; `deferred` from host memory, digested by a thread. `stop_ms` is how long its rows stand still,
`held_ms` until the version can be used, `copy_ms` is a plain copy between two warm buffers of that size.
Then the demo is run with loads of each kind, and with versions left out that are near those that engines
hold (by KL). `demo` is as it is: its trainer is the slower half, so the bound asks for every version; `paced`
has slower engines. `loads` is what they loaded, `left_out` what they did without.
--quick runs smaller models, and a few steps of two modes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable

import torch
from demo import SEEDS, run_demo
from models import DEMO, SIXTY_MILLION, TEN_MILLION, THIRTY_MILLION
from report import Row, parse_options, publish
from torch import Tensor

from dora.core.records import GroupId, RequestId
from dora.engine.engine import Engine
from dora.engine.sequence import Request, Sampling
from dora.model.config import ModelConfig
from dora.model.weights import Layout, initial_weights
from dora.runtime.taking import Taking
from dora.weights.staging import Staging
from dora.weights.store import WeightStore, make_store_folder

MODELS = {"0.5M": DEMO, "10M": TEN_MILLION, "30M": THIRTY_MILLION, "60M": SIXTY_MILLION}
LOADS = ("eager", "deferred")
NUM_ROWS, CONTEXT = 4, 2048
SKIP, MAX_STALENESS = 2e-4, 4  # nats per token, versions
MODES: dict[str, tuple[str, ...]] = {
    "eager": (),
    "deferred": ("weights.load=deferred",),
    "skip": (f"weights.skip_below_kl={SKIP}",),
    "deferred_skip": ("weights.load=deferred", f"weights.skip_below_kl={SKIP}"),
}
QUICK_MODES = ("eager", "deferred_skip")
WORKLOADS = {"demo": (), "paced": ("engine.pace=8ms",)}
NUM_STEPS = {"demo": 60, "paced": 24}
QUICK = ("--steps", "6", "--set", "eval.num_prompts=0")
COLUMNS = {
    "loads": "weight_loads",
    "left_out": "weight_loads_left_out",
    "load_s": "weight_load_s",
    "stop_s": "weight_load_stop_s",
    "wall_s": "wall_s",
    "cpu_s": "cpu_s",
    "tokens_per_s": "tokens_per_s",
    "staleness_mean": "staleness_mean",
    "staleness_max": "staleness_max",
    "stall_s": "stall_s",
}


def decoding_engine(model: ModelConfig, first: Tensor) -> Engine:
    """All rows have long answers of version 0 before them."""
    engine = Engine(model, max_rows=NUM_ROWS, max_context=CONTEXT, version_slots=2)
    engine.load(0, first)
    sampling = Sampling(temperature=1.0, max_tokens=CONTEXT - 8)
    engine.submit(
        [
            Request(RequestId(0, row, 0), GroupId(0, row), (1, 2, 3), version=0, seed=row, sampling=sampling)
            for row in range(NUM_ROWS)
        ]
    )
    while engine.num_waiting:
        engine.step()
    return engine


def take_versions(model: ModelConfig, load: str, num_versions: int) -> list[tuple[float, float]]:
    """Seconds for which rows stood still, and until the version was held; for each of so many."""
    flat = initial_weights(model, seed=0)
    folder = make_store_folder(2 * flat.nbytes)
    store, found = WeightStore(folder), []
    try:
        engine = decoding_engine(model, flat)
        taking = Taking(engine, store, Staging(store, is_pinned=False) if load == "deferred" else None)
        for version in range(1, num_versions + 1):
            flat[0] = version
            store.publish(version, flat)
            taking.stage(version)
            for _ in range(20):  # meanwhile it is brought near
                engine.step()
            taking.load(version)
            began_s = time.perf_counter()
            while not (told := taking.poll()):
                engine.step()
            found.append((told[0].stop_s, told[0].stop_s + time.perf_counter() - began_s))  # type: ignore[attr-defined]
            taking.drop(version)
            store.drop(version)
    finally:
        store.close()
    return found


def copy_s(num_parameters: int) -> float:
    """A plain copy of as many numbers, once both buffers are warm; the median of several."""
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
    numel = Layout(model).numel
    stops_s, helds_s = zip(*take_versions(model, load, num_versions), strict=True)
    return {
        "model": size,
        "mb": 4 * numel / 1e6,
        "load": load,
        "stop_ms": 1e3 * statistics.median(stops_s),
        "held_ms": 1e3 * statistics.median(helds_s),
        "copy_ms": 1e3 * copy_s(numel),
    }


def demo_row(workload: str, mode: str, seed: int, quick: bool) -> Row:
    """One run of the demo, and by its reward what it learnt."""
    changes = (f"orchestrator.max_staleness={MAX_STALENESS}", *WORKLOADS[workload], *MODES[mode])
    summary, lines = run_demo(seed, changes, *(QUICK if quick else ("--steps", str(NUM_STEPS[workload]))))
    rewards = [line["reward/mean"] for line in lines if "reward/mean" in line]
    last = rewards[-max(1, len(rewards) // 4) :]
    found = {name: summary[key] for name, key in COLUMNS.items()}
    return {"workload": workload, "mode": mode, "seed": seed, **found, "reward": statistics.fmean(last)}


def ratios_of(loads: Iterable[Row], runs: Iterable[Row]) -> dict[str, float]:
    """Of the largest model, and of the demo."""
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
    options = parse_options(__doc__ or "")
    sizes, num_versions = (("0.5M", "10M"), 5) if options.quick else (tuple(MODELS), 9)
    loads = [load_row(size, load, num_versions) for size in sizes for load in LOADS]
    seeds, workloads, modes = SEEDS, tuple(WORKLOADS), tuple(MODES)
    if options.quick:
        seeds, workloads, modes = SEEDS[:1], ("paced",), QUICK_MODES
    runs = [
        demo_row(work, mode, seed, options.quick) for seed in seeds for work in workloads for mode in modes
    ]
    publish(options, [*loads, *runs], ratios_of(loads, runs))


if __name__ == "__main__":
    main()
