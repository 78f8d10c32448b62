"""DORA and TRL on the demo's task: the same model, tokenizer, prompts, reward, groups, batches and schedule.

TRL trains with GRPOTrainer, generating with transformers or with a vLLM server, and with AsyncGRPOTrainer on
such a server. Each process has one thread, as in DORA; `--trials` measures other settings. Rates leave out
starts and the first steps; CPU time and memory leave out starts. The models saved during training are
evaluated afterwards, all with the same engine: `to_accuracy_s` is the training time until the accuracy,
interpolated between models, reaches the target. `discarded` counts answers that were generated and never
trained. With discarded answers, the mean lengths of trained and generated answers (tokens) may differ.
Results are published only if every trainer improves the model. The row of a peer that is missing or fails
has the reason.

    python benchmarks/peers.py [--quick] [--json FILE] [--trl-python PYTHON] [--vllm-python PYTHON]
                               [--rows FILE] [--seeds N] [--trials]

With --rows, finished runs are kept in a file, and the next call reuses them. --quick has fewer steps and one
seed; with both peers it takes eight minutes.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from peers_runs import NotMeasured, Peers, Run, Task, run_dora, run_trl, vllm_server

from dora.core.types import GroupId, RequestId
from dora.data import gcd
from dora.data.tokenizer import Tokenizer
from dora.engine.engine import Engine
from dora.engine.request import Request, SamplingParams
from dora.model.pretrained import load_pretrained
from dora.rewards.gcd import reward
from report import Row, make_parser, options_of, publish

SEEDS = (0, 1, 2)
NUM_STEPS, SAVE_EVERY, TARGET = 100, 10, 0.75
QUICK_STEPS, QUICK_SAVE_EVERY, QUICK_TARGET = 30, 5, 0.45
WARM_UP = 5  # first steps, which rates leave out
BEST: Mapping[str, Mapping[str, Any]] = {  # of those in TRIALS
    "sync": {"threads": 1, "micro_batch": 32},
    "sync_vllm": {"threads": 1, "micro_batch": 32},
    "async": {"threads": 1, "micro_batch": 64},
}
TRIALS: Mapping[str, tuple[Mapping[str, Any], ...]] = {
    "sync": (
        {"threads": 1, "micro_batch": 16},
        {"threads": 1, "micro_batch": 32},
        {"threads": 1, "micro_batch": 64},
        {"threads": 2, "micro_batch": 32},
        {"threads": 1, "micro_batch": 32, "trl": {"cache_implementation": "static"}},
        {"threads": 1, "micro_batch": 32, "trl": {"use_transformers_continuous_batching": True}},
    ),
    "sync_vllm": (
        {"threads": 1, "micro_batch": 32},
        {"threads": 2, "micro_batch": 32},
        {"threads": 2, "micro_batch": 32, "server_threads": 2},
    ),
    "async": (
        {"threads": 1, "micro_batch": 16},
        {"threads": 1, "micro_batch": 64},
        {"threads": 2, "micro_batch": 64, "server_threads": 2},
    ),
}


@dataclass(frozen=True)
class System:
    """A trainer with its settings and its staleness bound (versions)."""

    name: str
    kind: str  # "dora", or a KIND of peers_child.py
    bound: int
    settings: Mapping[str, Any]

    @property
    def server_threads(self) -> int:
        """Threads of the vLLM server that it needs; 0 if it needs none."""
        return self.settings.get("server_threads", 1) if self.kind in ("sync_vllm", "async") else 0

    def run(self, task: Task, out: Path, peers: Peers) -> Run:
        if self.kind == "dora":
            return run_dora(task, out, self.bound)
        return run_trl(task, out, peers, self.kind, {**self.settings, "max_staleness": self.bound})


@dataclass(frozen=True)
class Scale:
    """The size of a comparison."""

    num_steps: int
    save_every: int
    target: float
    num_answers: int  # per held-out prompt
    seeds: tuple[int, ...]
    bounds: tuple[int, ...]


QUICK = Scale(QUICK_STEPS, QUICK_SAVE_EVERY, QUICK_TARGET, 1, SEEDS[:1], (2,))
FULL = Scale(NUM_STEPS, SAVE_EVERY, TARGET, 2, SEEDS, (2,))


def main() -> None:
    parser = make_parser(__doc__ or "")
    Peers.add_options(parser)
    parser.add_argument(
        "--rows", type=Path, metavar="FILE", help="keep finished runs in this file, and reuse them"
    )
    parser.add_argument(
        "--seeds", type=int, choices=range(1, len(SEEDS) + 1), default=len(SEEDS), help="number of seeds"
    )
    parser.add_argument("--trials", action="store_true", help="measure settings of TRL instead")
    given = parser.parse_args()
    options, peers = options_of(given), Peers(given.trl_python, given.vllm_python)
    with tempfile.TemporaryDirectory() as folder:
        if given.trials:
            publish(options, [*trials(peers, Path(folder))], {})
            return
        scale = QUICK if options.quick else replace(FULL, seeds=SEEDS[: given.seeds])
        rows = [*compare(peers, scale, Path(folder), given.rows)]
    check_learning(rows)
    publish(options, rows, ratios_of(rows) | {"target_accuracy": scale.target})


def systems(bounds: Iterable[int]) -> Iterator[System]:
    """All systems in the order of their runs: those without a server first."""
    for bound in (0, *bounds):
        yield System("dora", "dora", bound, {})
    yield System("trl sync", "sync", 0, BEST["sync"])
    yield System("trl sync, vLLM", "sync_vllm", 0, BEST["sync_vllm"])
    for bound in bounds:
        yield System("trl async, vLLM", "async", bound, BEST["async"])


def compare(peers: Peers, scale: Scale, folder: Path, kept: Path | None) -> Iterator[Row]:
    """The rows of all systems, seed by seed. Rows in the file `kept` are not measured again."""
    evaluator = Evaluator(scale.num_answers)
    known = {name_of(row): row for row in rows_of(kept)}
    for seed in scale.seeds:
        task = Task(scale.num_steps, scale.save_every, seed)
        missing = []
        for system in systems(scale.bounds):
            if row := known.get((system.name, system.bound, seed, task.num_steps)):
                yield row
            else:
                missing.append(system)
        for system, run in runs(missing, task, peers, folder / str(seed)):
            named: dict[str, str | int | float] = {"system": system.name, "bound": system.bound, "seed": seed}
            if isinstance(run, NotMeasured):
                yield named | {"not_measured": str(run)}
                continue
            found = metrics_of(run, task) | evaluator.metrics(run, scale.target)
            row = named | {"steps": task.num_steps} | found
            keep(row, kept)
            yield row


def rows_of(kept: Path | None) -> list[Row]:
    """The rows of earlier calls."""
    lines = kept.read_text(encoding="utf-8").splitlines() if kept and kept.exists() else ()
    return [json.loads(line) for line in lines]


def keep(row: Row, kept: Path | None) -> None:
    """Print a row, and keep it for later calls."""
    print(json.dumps(row), flush=True)
    if kept:
        with kept.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def name_of(row: Row) -> tuple[str | int | float, ...]:
    return row["system"], row["bound"], row["seed"], row["steps"]


def trials(peers: Peers, folder: Path) -> Iterator[Row]:
    """A few steps of TRL with each of the settings in TRIALS."""
    task = Task(3 * WARM_UP, 3 * WARM_UP, 0)
    chosen = [
        System(f"{kind} {tried}", kind, 2 if kind == "async" else 0, tried)
        for kind, all_tried in TRIALS.items()
        for tried in all_tried
    ]
    for system, run in runs(chosen, task, peers, folder):
        found = metrics_of(run, task) if isinstance(run, Run) else {"not_measured": str(run)}
        print(system.name, found, flush=True)
        yield {"settings": system.name, **found}


def runs(
    chosen: Iterable[System], task: Task, peers: Peers, folder: Path
) -> Iterator[tuple[System, Run | NotMeasured]]:
    """Run systems in order, with a server for those that need one. Another number of threads restarts it."""
    with ExitStack() as stack:
        served, threads = peers, 0
        for number, system in enumerate(chosen):
            try:
                if system.kind != "dora":
                    peers.python("trl")  # raises before a server is started
                if system.server_threads not in (0, threads):
                    stack.close()
                    own = vllm_server(peers, folder / f"server-{number}", system.server_threads)
                    served, threads = stack.enter_context(own), system.server_threads
                yield system, system.run(task, folder / str(number), served)
            except NotMeasured as reason:
                yield system, reason


def metrics_of(run: Run, task: Task) -> dict[str, str | int | float]:
    """Throughput, cost and statistics of a run."""
    size = task.config.trainer.batch_size * task.config.sampling.group_size
    first, last = run.rewards[: 2 * WARM_UP], run.rewards[-2 * WARM_UP :]
    num_steps = len(run.ends) - WARM_UP
    return {
        "samples_per_s": num_steps * size / (run.ends[-1] - run.ends[WARM_UP - 1]),
        "train_s": run.ends[-1] - run.began,
        "cpu_s": run.cpu_s,
        "peak_MB": run.peak_bytes / 1e6,
        "discarded": run.num_discarded,
        "staleness_mean": run.staleness[0],
        "staleness_max": int(run.staleness[1]),
        "generated_tokens": run.generated_tokens,
        "trained_tokens": run.trained_tokens,
        "reward_first": statistics.fmean(first),
        "reward_last": statistics.fmean(last),
    }


class Evaluator:
    """Answers the held-out prompts with the models of a run."""

    def __init__(self, num_answers: int) -> None:
        config = Task(1, 1, 0).config
        self._start, self._num_answers = Path(str(config.model.path)), num_answers
        shape, _ = load_pretrained(self._start)
        self._tokenizer, self._rows = Tokenizer(self._start), gcd.held_out_rows()
        self._sampling = SamplingParams(1.0, config.sampling.max_response_length, self._tokenizer.stop_ids)
        self._engine = Engine(shape, max_rows=32, max_context=512, version_slots=1)
        self._num_evaluated = 0
        self._start_accuracy = self.accuracy(self._start)

    def metrics(self, run: Run, target: float) -> dict[str, str | float]:
        """The time at which the target was reached, and accuracies before and after training."""
        times = [0.0] + [run.ends[num_steps - 1] - run.began for num_steps in sorted(run.models)]
        found, left = [self._start_accuracy], [run.models[num_steps] for num_steps in sorted(run.models)]
        while left and found[-1] < target:
            found.append(self.accuracy(left.pop(0)))
        return {
            "to_accuracy_s": reached(times, found, target),
            "accuracy_before": self._start_accuracy,
            "accuracy_after": self.accuracy(left[-1]) if left else found[-1],
        }

    def accuracy(self, folder: Path) -> float:
        """Accuracy of a model on the held-out prompts, sampled at temperature 1."""
        version = self._num_evaluated
        self._num_evaluated += 1
        self._engine.load(version, load_pretrained(folder)[1])
        self._engine.submit([
            Request(
                RequestId(0, i, k), GroupId(0, i), tuple(self._tokenizer.encode(row["prompt"])), version,
                i * self._num_answers + k, self._sampling,
            )
            for i, row in enumerate(self._rows)
            for k in range(self._num_answers)
        ])  # fmt: skip
        rewards = []
        while not self._engine.is_idle:
            for answer in self._engine.step():
                text = self._tokenizer.decode(answer.token_ids)
                rewards.append(reward(self._rows[answer.id.row]["prompt"], text))
        self._engine.drop(version)
        return statistics.fmean(rewards)


def reached(times: Sequence[float], found: Sequence[float], target: float) -> float | str:
    """The interpolated time at which the accuracy reaches the target; only the last may be above it."""
    if found[-1] < target:
        return "not reached"
    if len(found) == 1:
        return 0.0
    share = (target - found[-2]) / (found[-1] - found[-2])
    return times[len(found) - 2] + share * (times[len(found) - 1] - times[len(found) - 2])


def check_learning(rows: Iterable[Row]) -> None:
    """Raises AssertionError if a trainer did not improve the model."""
    for row in rows:
        if "not_measured" not in row:
            gain = float(row["accuracy_after"]) - float(row["accuracy_before"])
            assert gain > 0.1, f"{row['system']}, S = {row['bound']}: accuracy rose by {gain:.3f} only"


def ratios_of(rows: list[Row]) -> dict[str, float]:
    """DORA relative to each of TRL's trainers, by staleness bounds; above 1 is better for DORA."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if "not_measured" not in row:
            name = str(row["system"]).lower().replace(",", "").replace(" ", "_")
            found.setdefault(f"{name}_s{row['bound']}", []).append(row)

    def median(key: str, column: str) -> float:
        return statistics.median(float(row[column]) for row in found[key])

    ratios: dict[str, float] = {}
    for own in (key for key in found if key.startswith("dora")):
        for other in (key for key in found if not key.startswith("dora")):
            name = f"{own}_vs_{other}"
            ratios[f"{name}_samples_per_s"] = median(own, "samples_per_s") / median(other, "samples_per_s")
            if not any(row["to_accuracy_s"] == "not reached" for key in (own, other) for row in found[key]):
                ratios[f"{name}_to_accuracy"] = median(other, "to_accuracy_s") / median(own, "to_accuracy_s")
            ratios[f"{name}_cpu_s"] = median(other, "cpu_s") / median(own, "cpu_s")
            ratios[f"{name}_peak_MB"] = median(other, "peak_MB") / median(own, "peak_MB")
    return ratios | {f"{key}_discarded": median(key, "discarded") for key in found}


if __name__ == "__main__":
    main()
