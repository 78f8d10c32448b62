"""What a vLLM or SGLang server on the CPU costs: CPU time by executor, loads, several versions in one server.

`executors`: runs of the demo with one server, whose worker is in the engine's process (as DORA-RL starts it)
or in a process of its own (vLLM's default on a CPU). `loads`: an idle server loads versions of the weight
store, of models of several sizes; `copy_s_per_gb` is a plain copy between two warm buffers. `versions`: a
server with one slot, which has the server's own scheduler, and one with three, which has DORA-RL's, decode
the same number of requests of one to three versions; then the latter loads a fourth version while two
generate. `slots`: runs of the demo with one server, by number of slots. `policies_vllm.py` compares policies.
With --sglang-python only `loads` and `versions` are measured.

    python benchmarks/vllm_server.py --vllm-python PYTHON [--only PART] [--quick] [--json FILE]
    python benchmarks/vllm_server.py --sglang-python PYTHON [--only PART] [--quick] [--json FILE]
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
from models import SIXTY_MILLION, TEN_MILLION, THIRTY_MILLION
from peers_async import on_vllm
from peers_runs import Peers, Task, run_dora
from torch import Tensor

from dora.core.types import RequestId
from dora.engine.backends.http_engine import HttpEngine
from dora.engine.backends.sglang import Sglang
from dora.engine.backends.vllm import Vllm
from dora.engine.request import Request, SamplingParams
from dora.model.config import ModelConfig
from dora.model.pretrained import load_pretrained, save_pretrained
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
NUM_SLOTS, NUM_REPEATS = 3, 5
NUM_REQUESTS, NUM_TOKENS = 24, 200
DEMO_MODEL = Path(__file__).parent.parent / "examples" / "gcd-start"
PARTS = ("executors", "loads", "versions", "slots")
OF_SGLANG = ("loads", "versions")
Server = type[Vllm] | type[Sglang]


def executor_row(name: str, backend: str | None, num_steps: int, repeat: int, peers: Peers) -> Row:
    options = f'python = "{peers.python("vllm")}"'
    if backend is not None:
        options += f', arguments = ["--distributed-executor-backend", "{backend}"]'
    changes = [change for change in on_vllm(peers, 1) if not change.startswith("engine.options")]
    return {
        "executor": name,
        "repeat": repeat,
        **demo_row((*changes, f"engine.options={{{options}}}"), num_steps, BOUND),
    }


def slots_row(num_slots: int, num_steps: int, repeat: int, peers: Peers) -> Row:
    return {
        "demo_slots": num_slots,
        "repeat": repeat,
        **demo_row(on_vllm(peers, num_slots), num_steps, BOUND),
    }


def demo_row(changes: Sequence[str], num_steps: int, bound: int) -> Row:
    """One run of the demo, without the start of the server."""
    task = Task(num_steps, 1000, 0)
    with tempfile.TemporaryDirectory() as folder:
        run = run_dora(task, Path(folder) / "run", bound, changes)
    num_samples = num_steps * task.config.trainer.batch_size * task.config.sampling.group_size
    wall_s = run.ends[-1] - run.began
    return {
        "steps": num_steps,
        "samples_per_s": num_samples / wall_s,
        "cpu_s": run.cpu_s,
        "samples_per_cpu_s": num_samples / run.cpu_s,
    }


def load_row(size: str, num_loads: int, server: Server, python: str) -> Row:
    """Medians over loads of different versions; the first load is left out."""
    model = MODELS[size]
    with tempfile.TemporaryDirectory() as folder:
        times = load_times(model, num_loads + 1, server, python, Path(folder))
    num_gb = 4 * initial_weights(model, seed=0).numel() / 1e9
    return {
        "model": size,
        "gb": num_gb,
        "load_s": statistics.median(times[1:]),
        "load_s_per_gb": statistics.median(times[1:]) / num_gb,
        "copy_s_per_gb": copy_s(int(num_gb * 1e9 / 4)) / num_gb,
    }


def load_times(model: ModelConfig, num_loads: int, server: Server, python: str, folder: Path) -> list[float]:
    """The seconds of each load, digest included."""
    flat, times = initial_weights(model, seed=0), []
    save_pretrained(folder, model, flat)
    store = WeightStore(make_store_folder(2 * flat.nbytes), shapes=parameter_shapes(model))
    engine = server(
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
            loader.wait_for({version})
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


def versions_rows(size: str, num_repeats: int, server: Server, python: str) -> Iterator[Row]:
    """Tokens per second by slots and versions that generate, the servers' memory, and the last load."""
    with tempfile.TemporaryDirectory() as folder:
        path = DEMO_MODEL
        if size != "demo":
            path = Path(folder)
            save_pretrained(path, MODELS[size], initial_weights(MODELS[size], seed=0))
        for num_slots in (1, NUM_SLOTS):
            for row in rows_of_slots(path, num_slots, num_repeats, server, python):
                yield {"model": size, **row}


def rows_of_slots(
    model: Path, num_slots: int, num_repeats: int, server: Server, python: str
) -> Iterator[Row]:
    _, flat = load_pretrained(model)
    engine = server(
        model=str(model),
        max_rows=NUM_REQUESTS,
        max_context=NUM_TOKENS + 16,
        version_slots=num_slots,
        device="cpu",
        dtype="float32",
        python=python,
    )
    try:
        for version in range(num_slots):
            engine.load(version, flat + version / 1000)
        decode(engine, 1)
        for num_versions in range(1, num_slots + 1):
            rates = [decode(engine, num_versions) for _ in range(num_repeats)]
            yield {
                "slots": num_slots,
                "versions": num_versions,
                "tokens_per_s": statistics.median(rates),
                "server_mb": sum(
                    child.memory_full_info().uss for child in psutil.Process().children(recursive=True)
                )
                / 1e6,
            }
        if num_slots > 1:
            yield {"slots": num_slots, "load_under_generation_s": load_under_generation_s(engine, flat)}
    finally:
        engine.close()


def decode(engine: HttpEngine, num_versions: int) -> float:
    """Tokens per second of NUM_REQUESTS requests, dealt to the versions in turn."""
    began_s = time.perf_counter()
    engine.submit([request_of(number, number % num_versions) for number in range(NUM_REQUESTS)])
    while engine.can_step:
        engine.step()
    return NUM_REQUESTS * NUM_TOKENS / (time.perf_counter() - began_s)


def request_of(number: int, version: int) -> Request:
    """A request that generates NUM_TOKENS tokens."""
    name, prompt_ids = RequestId(0, number, 0), (1, 2, 3, 4, 5, 6, 7)
    return Request(name, name.group, prompt_ids, version, number, SamplingParams(1.0, NUM_TOKENS))


def load_under_generation_s(engine: HttpEngine, flat: Tensor) -> float:
    """Seconds to load a version in place of the last one while the others generate."""
    engine.submit([request_of(number, number % (NUM_SLOTS - 1)) for number in range(NUM_REQUESTS)])
    while min(engine.progress().values()) < NUM_TOKENS // 4:
        engine.step()
    engine.drop(NUM_SLOTS - 1)
    began_s = time.perf_counter()
    engine.load(NUM_SLOTS, flat)
    load_s = time.perf_counter() - began_s
    assert len(engine.progress()) == NUM_REQUESTS, "no request has finished before the end of the load"
    while engine.can_step:
        engine.step()
    return load_s


def ratios_of(rows: Sequence[Row]) -> dict[str, float]:
    """CPU time per sample of both executors, loads over copies, versions, and runs by their slots."""
    ratios = {}
    runs = [row for row in rows if "executor" in row]
    loads = [row for row in rows if "load_s" in row]
    rates = {
        (row["model"], row["slots"], row["versions"]): float(row["tokens_per_s"])
        for row in rows
        if "versions" in row
    }
    for (model, num_slots, num_versions), rate in rates.items():
        name = f"tokens_per_s_{model}_{num_slots}_slots_{num_versions}_versions_over_one_slot"
        ratios[name] = rate / rates[model, 1, 1]
    samples = {
        num_slots: statistics.median(
            float(row["samples_per_s"]) for row in rows if row.get("demo_slots") == num_slots
        )
        for num_slots in {row["demo_slots"] for row in rows if "demo_slots" in row}
    }
    for num_slots in samples.keys() - {1}:
        ratios[f"samples_per_s_{num_slots}_slots_over_1"] = samples[num_slots] / samples[1]
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
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--vllm-python", type=Path, metavar="PYTHON")
    which.add_argument("--sglang-python", type=Path, metavar="PYTHON")
    parser.add_argument("--only", choices=PARTS)
    given = parser.parse_args()
    options, peers = options_of(given), Peers(None, given.vllm_python)
    server: Server = Vllm if given.vllm_python else Sglang
    python, possible = str(given.vllm_python or given.sglang_python), PARTS if server is Vllm else OF_SGLANG
    parts = [part for part in possible if given.only in (None, part)]
    rows: list[Row] = []
    if "loads" in parts:
        sizes, num_loads = (("10M",), QUICK_LOADS) if options.quick else (tuple(MODELS), NUM_LOADS)
        rows += [load_row(size, num_loads, server, python) for size in sizes]
    if "versions" in parts:
        for model in ("demo",) if options.quick else ("demo", "30M"):
            rows += versions_rows(model, 1 if options.quick else NUM_REPEATS, server, python)
    num_steps, repeats = (QUICK_STEPS, 1) if options.quick else (NUM_STEPS, 2)
    for repeat in range(repeats):  # in turn, so that other load on the cores meets all
        if "executors" in parts:
            rows += [executor_row(*each, num_steps, repeat, peers) for each in EXECUTORS.items()]
        if "slots" in parts:
            rows += [slots_row(num_slots, num_steps, repeat, peers) for num_slots in range(1, NUM_SLOTS + 1)]
    publish(options, rows, ratios_of(rows))


if __name__ == "__main__":
    main()
