"""SIGKILL of an engine or of a whole run: how many tokens unfinished responses keep, and what keeping costs.

kills: one run of long responses on paced engines. Every few seconds an engine is killed, which the run
replaces, or the driver with all workers, after which the run is resumed. The journal says how many tokens
each response of a lost engine keeps. A response had lost tokens if it was longer: as long as last reported,
and one token more for each step since then, which is an upper bound. lost_s is the time that an engine takes
for the most tokens that one response lost. At the end `dora audit` checks the run; findings make the exit
code 1.

cost: short runs on engines without a pace, in turns with the default of `runtime.output_interval_s` and
with 0, which is without reports. Other load on the machine affects the CPU time of the run's processes less
than its throughput.

    python benchmarks/kept_tokens.py [--only kills|cost] [--kills N] [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from resume import COMMAND, Attempt

from dora.audit import audit
from dora.config.schema import RuntimeSection
from report import Row, make_parser, options_of, publish

STEP_S = 0.05  # of an engine
NUM_ENGINES, ROWS = 3, 4
ENGINE, RUN = "an engine", "the whole run"
CONFIG = f"""
[run]
steps = 100000
[model]
path = "{(Path(__file__).parent.parent / "examples" / "gcd-start").resolve()}"
[data]
path = "gcd"
max_prompt_length = 8
[sampling]
group_size = 4
max_response_length = 200
[engine]
num_engines = {NUM_ENGINES}
max_num_seqs = {ROWS}
min_step_time = "50ms"
[reward]
function = "dora.rewards.gcd:reward"
[trainer]
batch_size = 2
lr = 1e-4
save_freq = 5
[eval]
num_prompts = 0
[orchestrator]
max_staleness = 4
[runtime]
max_restarts = 1000
"""
PARTS = ("kills", "cost")
COST_SETTINGS = {
    "engine.min_step_time": "0ms",
    "engine.num_engines": 1,
    "engine.max_num_seqs": 32,
    "trainer.batch_size": 8,
    "trainer.save_freq": 0,
}


@dataclass(frozen=True)
class Loss:
    """Unfinished responses that lost their engine."""

    killed: str
    num_responses: int
    kept_tokens: int
    lost_tokens: float
    most_lost: float  # tokens of one response


class Cost(NamedTuple):
    """Of the trained tokens of a run. The CPU time is that of all its processes, with their start."""

    tokens_per_s: float
    cpu_us_per_token: float


class KilledRun:
    """A run whose processes are killed."""

    def __init__(self, folder: Path) -> None:
        (folder / "run.toml").write_text(CONFIG)
        self.out = folder / "run"
        self._attempt = Attempt(self.out, [folder / "run.toml", "--out", self.out])
        self._engines: list[psutil.Process] = []
        self.killed_at_s: list[float] = []  # of the whole run, by the run's clock
        self._wait_for_workers()

    def kill_engine(self) -> None:
        """Kill an engine, and wait for its replacement."""
        engine = random.choice(self._engines)
        known = {*self._workers()}
        engine.kill()
        self._engines.remove(engine)
        while not (new := {*self._workers()} - known):
            time.sleep(0.05)
        self._engines += new

    def kill_all(self) -> None:
        """Kill the driver and all workers, and resume the run."""
        journal = self.out / "journal.jsonl"
        killed_s = time.time()
        self._attempt.kill()
        last = [line for line in journal.read_text().split("\n")[:-1] if line.startswith("{")][-1]
        began_s = json.loads(last)["t_s"] - journal.stat().st_mtime
        self.killed_at_s.append(began_s + killed_s)
        self._attempt = Attempt(self.out, ["--resume", self.out])
        self._wait_for_workers()

    def stop(self) -> None:
        self._attempt.process.terminate()
        self._attempt.process.wait(120)

    def _wait_for_workers(self) -> None:
        """Engines start first, then the trainer and a reward worker."""
        if self._attempt.wait_for_lines(8) is None:
            raise SystemExit(f"the run has ended: {self._attempt.log()}")
        self._engines = self._workers()[:NUM_ENGINES]

    def _workers(self) -> list[psutil.Process]:
        servers = psutil.Process(self._attempt.process.pid).children()
        workers = [child for server in servers for child in server.children()]
        return sorted(workers, key=lambda child: (child.create_time(), child.pid))


def losses(journal: Path, killed_at_s: list[float]) -> Iterator[Loss]:
    """What was lost each time, in order."""
    reported: dict[int, dict[tuple[int, ...], tuple[int, float]]] = {}  # engine -> request -> tokens, time
    kills = iter(killed_at_s)
    for text in journal.read_text().split("\n")[:-1]:
        line: dict[str, Any] = json.loads(text)
        match line.get("kind"):
            case "progress_reported":
                own = reported[line["engine"]] = {}
                own |= {tuple(request): (num, line["t_s"]) for request, num in line["lengths"]}
            case "request_finished" | "request_failed":
                reported.get(line["engine"], {}).pop(tuple(line["request"]), None)
            case "engine_lost":
                yield _loss(ENGINE, reported.pop(line["engine"], {}), line["t_s"], line["kept_tokens"])
            case "resumed":
                running = {request: own for each in reported.values() for request, own in each.items()}
                yield _loss(RUN, running, next(kills), line["kept_tokens"])
                reported.clear()


def _loss(
    killed: str, reported: dict[tuple[int, ...], tuple[int, float]], at_s: float, kept_tokens: list[Any]
) -> Loss:
    kept = {tuple(request): num for request, num in kept_tokens}
    lost = [
        max(0.0, num + (at_s - then_s) / STEP_S - kept.get(request, 0))
        for request, (num, then_s) in reported.items()
    ]
    return Loss(killed, len(reported), sum(kept.values()), sum(lost), max(lost, default=0.0))


def rows_of(found: list[Loss]) -> list[Row]:
    rows: list[Row] = []
    for killed in (ENGINE, RUN):
        own = [loss for loss in found if loss.killed == killed]
        if own:
            lost_s = [loss.most_lost * STEP_S for loss in own]
            rows.append(
                {
                    "killed": killed,
                    "kills": len(own),
                    "responses": sum(loss.num_responses for loss in own),
                    "kept_tokens": sum(loss.kept_tokens for loss in own),
                    "lost_tokens": sum(loss.lost_tokens for loss in own),
                    "median_lost_s": statistics.median(lost_s),
                    "max_lost_s": max(lost_s),
                }
            )
    return rows


def measure_cost(num_pairs: int, num_steps: int) -> tuple[list[Row], dict[str, float]]:
    """Trained tokens per second with reports and without, in pairs of runs whose order alternates."""
    default_s = RuntimeSection().output_interval_s
    found: dict[float, list[Cost]] = {default_s: [], 0.0: []}
    for number in range(num_pairs):
        for interval_s in sorted(found, reverse=number % 2 == 0):
            found[interval_s].append(cost_of_run(interval_s, num_steps))
    rows: list[Row] = [
        {
            "output_interval_s": interval_s,
            "runs": num_pairs,
            "median_tokens_per_s": statistics.median(run.tokens_per_s for run in each),
            "min_tokens_per_s": min(run.tokens_per_s for run in each),
            "max_tokens_per_s": max(run.tokens_per_s for run in each),
            "median_cpu_us_per_token": statistics.median(run.cpu_us_per_token for run in each),
        }
        for interval_s, each in found.items()
    ]
    pairs = [*zip(*found.values(), strict=True)]
    return rows, {
        "throughput with reports / without, median of pairs": statistics.median(
            reported.tokens_per_s / silent.tokens_per_s for reported, silent in pairs
        ),
        "CPU time of a token with reports / without, median of pairs": statistics.median(
            reported.cpu_us_per_token / silent.cpu_us_per_token for reported, silent in pairs
        ),
    }


def cost_of_run(interval_s: float, num_steps: int) -> Cost:
    """A run that reports unfinished outputs at this interval."""
    settings = {**COST_SETTINGS, "runtime.output_interval_s": interval_s, "run.steps": num_steps}
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "run.toml"), Path(folder, "run")
        config.write_text(CONFIG)
        command = [*COMMAND, str(config), "--out", str(out), *sets]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        summary = json.loads((out / "summary.json").read_text())
    cpu_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(summary["tokens_per_s"], 1e6 * cpu_s / summary["trained_tokens"])


def measure_kills(num_kills: int) -> tuple[list[Row], dict[str, float], tuple[str, ...]]:
    """Rows, ratios, and the findings of the audit."""
    random_s = random.Random(0)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run = KilledRun(Path(folder))
        for number in range(num_kills):
            time.sleep(random_s.uniform(2.0, 4.0))
            run.kill_all() if number % 5 == 4 else run.kill_engine()
        time.sleep(3.0)
        run.stop()
        result = audit.check(run.out)
        found = list(losses(run.out / "journal.jsonl", run.killed_at_s))
    for finding in result.findings:
        print(finding)
    counts = result.counts
    share = counts.kept_tokens / max(1, counts.kept_tokens + counts.lost_tokens)
    ratios = {
        "findings": float(len(result.findings)),
        "audit: kept_tokens": float(counts.kept_tokens),
        "audit: lost_tokens": float(counts.lost_tokens),
        "audit: kept / (kept + lost)": share,
    }
    return rows_of(found), ratios, result.findings


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument(
        "--kills", type=int, metavar="N", help="number of kills (default: 50; 5 with --quick)"
    )
    parser.add_argument("--only", choices=PARTS, metavar="PART", help="this part only: kills or cost")
    given = parser.parse_args()
    options = options_of(given)
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    findings: tuple[str, ...] = ()
    if given.only != "cost":
        rows, ratios, findings = measure_kills(given.kills or (5 if options.quick else 50))
    if given.only != "kills":
        cost_rows, cost_ratios = measure_cost(*((2, 10) if options.quick else (15, 60)))
        rows, ratios = rows + cost_rows, ratios | cost_ratios
    publish(options, rows, ratios)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
