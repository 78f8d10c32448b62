"""What a vLLM server on the CPU costs: CPU time by executor, and the time to load a version.

`executors`: runs of the demo with one server, whose worker is in the engine's process (as DORA-RL starts it)
or in a process of its own (vLLM's default on a CPU). `loads`: an idle server loads versions of the weight
store, of models of several sizes; `copy_s_per_gb` is a plain copy between two warm buffers.

    python benchmarks/vllm_server.py --vllm-python PYTHON [--only executors|loads] [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from models import SIXTY_MILLION, TEN_MILLION, THIRTY_MILLION
from peers_async import on_vllm
from peers_runs import Peers, Task, run_dora

from dora.engine.backends.vllm import Vllm
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights, parameter_shapes
from dora.runtime.process.messages import WeightsLoaded
from dora.runtime.rollout.engine_worker import WeightLoader
from dora.weights.store import WeightStore, make_store_folder
from report import Row, make_parser, options_of, publish
from weights import copy_s

MODELS = {"10M": TEN_MILLION, "30M": THIRTY_MILLION, "60M": SIXTY_MILLION}
EXECUTORS = {"worker in the engine's process": None, "worker process": "mp"}
BOUND = 2
NUM_STEPS, QUICK_STEPS = 40, 8
NUM_LOADS, QUICK_LOADS = 9, 4


def executor_row(name: str, backend: str | None, num_steps: int, repeat: int, peers: Peers) -> Row:
    """One run of the demo, without the start of the server."""
    options = f'python = "{peers.python("vllm")}"'
    if backend is not None:
        options += f', arguments = ["--distributed-executor-backend", "{backend}"]'
    changes = [change for change in on_vllm(peers) if not change.startswith("engine.options")]
    task = Task(num_steps, 1000, 0)
    with tempfile.TemporaryDirectory() as folder:
        run = run_dora(task, Path(folder) / "run", BOUND, (*changes, f"engine.options={{{options}}}"))
    num_samples = num_steps * task.config.trainer.batch_size * task.config.sampling.group_size
    wall_s = run.ends[-1] - run.began
    return {
        "executor": name,
        "repeat": repeat,
        "steps": num_steps,
        "samples_per_s": num_samples / wall_s,
        "cpu_s": run.cpu_s,
        "samples_per_cpu_s": num_samples / run.cpu_s,
    }


def load_row(size: str, num_loads: int, python: str) -> Row:
    """Medians over loads of different versions; the first load is left out."""
    model = MODELS[size]
    with tempfile.TemporaryDirectory() as folder:
        times = load_times(model, num_loads + 1, python, Path(folder))
    num_gb = 4 * initial_weights(model, seed=0).numel() / 1e9
    return {
        "model": size,
        "gb": num_gb,
        "load_s": statistics.median(times[1:]),
        "load_s_per_gb": statistics.median(times[1:]) / num_gb,
        "copy_s_per_gb": copy_s(int(num_gb * 1e9 / 4)) / num_gb,
    }


def load_times(model: ModelConfig, num_loads: int, python: str, folder: Path) -> list[float]:
    """The seconds of each load, digest included."""
    flat, times = initial_weights(model, seed=0), []
    save_pretrained(folder, model, flat)
    store = WeightStore(make_store_folder(2 * flat.nbytes), shapes=parameter_shapes(model))
    engine = Vllm(
        model=str(folder),
        max_rows=4,
        max_context=256,
        version_slots=1,
        device="cpu",
        dtype="float32",
        python=python,
    )
    try:
        loader = WeightLoader(engine, store)
        for version in range(num_loads):
            flat[0] = version
            digest = store.publish(version, flat)
            began_s = time.perf_counter()
            loader.load(version)
            (reply,) = loader.poll()
            times.append(time.perf_counter() - began_s)
            assert isinstance(reply, WeightsLoaded), reply
            assert reply.digest == digest, "the server has read other bytes"
            loader.drop(version)
            store.drop(version)
    finally:
        engine.close()
        store.close()
    return times


def ratios_of(runs: Sequence[Row], loads: Sequence[Row]) -> dict[str, float]:
    """CPU time per sample, of both executors, and loads of the largest model over plain copies."""
    ratios = {}
    if runs:
        own, other = (
            statistics.median(float(run["samples_per_cpu_s"]) for run in runs if run["executor"] == name)
            for name in EXECUTORS
        )
        ratios["samples_per_cpu_s_in_process_over_worker_process"] = own / other
    if loads:
        largest = loads[-1]
        ratios[f"load_over_copy_{largest['model']}"] = float(largest["load_s_per_gb"]) / float(
            largest["copy_s_per_gb"]
        )
    return ratios


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--vllm-python", type=Path, required=True, metavar="PYTHON")
    parser.add_argument("--only", choices=("executors", "loads"))
    given = parser.parse_args()
    options, peers = options_of(given), Peers(None, given.vllm_python)
    runs: list[Row] = []
    loads: list[Row] = []
    if given.only != "executors":
        sizes, num_loads = (("10M",), QUICK_LOADS) if options.quick else (tuple(MODELS), NUM_LOADS)
        loads = [load_row(size, num_loads, str(given.vllm_python)) for size in sizes]
    if given.only != "loads":
        num_steps, repeats = (QUICK_STEPS, 1) if options.quick else (NUM_STEPS, 2)
        for repeat in range(repeats):  # in turn, so that other load on the cores meets both
            runs += [
                executor_row(name, backend, num_steps, repeat, peers) for name, backend in EXECUTORS.items()
            ]
    publish(options, [*loads, *runs], ratios_of(runs, loads))


if __name__ == "__main__":
    main()
