"""SIGKILL of an engine or of a whole run: how many tokens unfinished responses keep, and what keeping costs.

kills: one run of long responses on paced engines. Every few seconds an engine is killed, which the run
replaces, or the driver with all workers, after which the run is resumed. A thread notes when the file of
partial outputs gets tokens of each response (it looks every 5 ms). An engine reports all its unfinished
responses together, so what it generated after the last report before the kill is lost: lost_s is the time
since then, of the killed engine for which it is longest. An engine that had not reported yet is left out.
The pace is 50 ms per token, so each response lost at most lost_s / 0.05 tokens. At the end `dora audit`
checks the run; findings make the exit code 1.

reports: what one report costs the engine (to collect and serialize it) and the driver (to read and write it).
It has the last 200 of 400 tokens of each of 32 responses. An engine of this model generates as many in an
interval.

    python benchmarks/kept_tokens.py [--only kills|reports] [--kills N] [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import pickle
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import psutil
from resume import Attempt

from dora.audit import audit
from dora.config.schema import RuntimeSection
from dora.core.types import RequestId
from dora.engine.engine import Engine
from dora.engine.messages import OutputPart
from dora.engine.request import Request, SamplingParams
from dora.model.pretrained import load_pretrained
from dora.runtime.rollout.engine_worker import OutputReporter
from dora.runtime.rollout.partial_outputs import FILE_NAME, PartialOutputs, read_records
from report import Row, make_parser, options_of, publish

MODEL = (Path(__file__).parent.parent / "examples" / "gcd-start").resolve()
NUM_ENGINES, ROWS = 3, 4
WATCH_S = 0.005
ENGINE, RUN = "an engine", "the whole run"
CONFIG = f"""
[run]
steps = 100000
[model]
path = "{MODEL}"
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
prioritize_stragglers = false  # it pauses requests, and what is paused has no new tokens to report
[runtime]
max_restarts = 1000
"""
PARTS = ("kills", "reports")
NUM_ROWS, NUM_REPORTED = 32, 200


class Loss(NamedTuple):
    """Of a kill. Only responses that keep tokens count."""

    killed: str
    num_responses: int
    kept_tokens: int
    lost_s: float | None  # None: no engine had reported


class Kill(NamedTuple):
    killed: str
    at_s: float


class KilledRun:
    """A run whose processes are killed."""

    def __init__(self, folder: Path) -> None:
        (folder / "run.toml").write_text(CONFIG)
        self.out = folder / "run"
        self._attempt = Attempt(self.out, [folder / "run.toml", "--out", self.out])
        self._engines: list[psutil.Process] = []
        self.kills: list[Kill] = []
        self._wait_for_workers()

    def kill_engine(self) -> None:
        """Kill an engine, and wait for its replacement."""
        engine = random.choice(self._engines)
        known = {*self._workers()}
        self.kills.append(Kill(ENGINE, time.time()))
        engine.kill()
        self._engines.remove(engine)
        while not (new := {*self._workers()} - known):
            time.sleep(0.05)
        self._engines += new

    def kill_all(self) -> None:
        """Kill the driver and all workers, and resume the run."""
        self.kills.append(Kill(RUN, time.time()))
        self._attempt.kill()
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


class Tail:
    """The bytes of a growing file that were not taken yet."""

    def __init__(self, path: Path) -> None:
        self._path, self._inode, self._offset, self._rest = path, 0, 0, b""

    def take(self, find_end: Callable[[bytes], int]) -> bytes:
        """What is new, up to the end of its last whole record, which `find_end` finds."""
        try:
            with self._path.open("rb") as file:
                state = os.fstat(file.fileno())
                if state.st_ino != self._inode:
                    self._inode, self._offset, self._rest = state.st_ino, 0, b""
                if state.st_size < self._offset:  # a resumed run cuts a torn line off
                    self._offset, self._rest = state.st_size, b""
                file.seek(self._offset)
                new = file.read()
        except FileNotFoundError:
            return b""
        self._offset += len(new)
        data = self._rest + new
        end = find_end(data)
        self._rest = data[end:]
        return data[:end]


def end_of_lines(data: bytes) -> int:
    return data.rfind(b"\n") + 1


def end_of_records(data: bytes) -> int:
    """A record is a checksum, its number of bytes, and these."""
    end = 0
    while (start := end + 8) <= len(data):
        stop = start + int.from_bytes(data[end + 4 : start], "little")
        if stop > len(data):
            break
        end = stop
    return end


class Watch(threading.Thread):
    """Notes when the files of a run get lines of the journal and tokens of unfinished outputs."""

    def __init__(self, out: Path) -> None:
        super().__init__(daemon=True)
        self.lines: list[tuple[float, str]] = []
        self.kept_s: dict[tuple[RequestId, int], float] = {}  # request, number of kept tokens -> since when
        self._journal, self._outputs = Tail(out / "journal.jsonl"), Tail(out / FILE_NAME)
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(WATCH_S):
            now_s = time.time()
            self.lines += [(now_s, line) for line in self._journal.take(end_of_lines).decode().splitlines()]
            for request, record in read_records(self._outputs.take(end_of_records)):
                if isinstance(record, OutputPart):
                    self.kept_s.setdefault((request, record.start + len(record.token_ids)), now_s)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def losses(watch: Watch, kills: Iterable[Kill]) -> Iterator[Loss]:
    """What was lost by each kill."""
    placed: dict[RequestId, tuple[int, float]] = {}  # request -> engine, since when
    at_s = {killed: iter([kill.at_s for kill in kills if kill.killed == killed]) for killed in (ENGINE, RUN)}
    for line_s, text in watch.lines:
        line: dict[str, Any] = json.loads(text)
        match line.get("kind"):
            case "generate":
                placed |= {RequestId(*request): (line["engine"], line_s) for request in line["requests"]}
            case "migrated":
                request = RequestId(*line["request"])
                placed[request] = (line["destination"], line_s)
            case "engine_lost" | "resumed" as kind:
                killed = ENGINE if kind == "engine_lost" else RUN
                kill_s = next(at_s[killed], None)
                if kill_s is None:
                    raise SystemExit(f"the run has lost an engine that was not killed: {text}")
                kept = {RequestId(*request): num for request, num in line["kept_tokens"]}
                reported_s: dict[int, list[float]] = {}  # by engine
                for request in kept.keys() & placed.keys():  # the others had lost their engine before
                    engine, placed_s = placed[request]
                    kept_s = watch.kept_s[request, kept[request]]
                    if kept_s > placed_s:  # by this engine
                        reported_s.setdefault(engine, []).append(kept_s)
                lost_s = [max(0.0, kill_s - max(each)) for each in reported_s.values()]
                yield Loss(killed, len(kept), sum(kept.values()), max(lost_s, default=None))
                engines = {line["engine"]} if killed == ENGINE else {engine for engine, _ in placed.values()}
                placed = {request: each for request, each in placed.items() if each[0] not in engines}


def rows_of(found: list[Loss]) -> list[Row]:
    rows: list[Row] = []
    for killed in (ENGINE, RUN):
        own = [loss for loss in found if loss.killed == killed]
        if lost_s := [loss.lost_s for loss in own if loss.lost_s is not None]:
            rows.append(
                {
                    "killed": killed,
                    "kills": len(own),
                    "kills_after_a_report": len(lost_s),
                    "responses": sum(loss.num_responses for loss in own),
                    "kept_tokens": sum(loss.kept_tokens for loss in own),
                    "median_lost_s": statistics.median(lost_s),
                    "max_lost_s": max(lost_s),
                }
            )
    return rows


def measure_reports(num_reports: int) -> tuple[list[Row], dict[str, float]]:
    """What reports cost, as a share of the time between two of them."""
    config, weights = load_pretrained(MODEL)
    engine_s, driver_s = list[float](), list[float]()
    length = 2 * NUM_REPORTED
    sampling = SamplingParams(temperature=1.0, max_tokens=length + 1, stop_ids=())
    engine = Engine(config, max_rows=NUM_ROWS, max_context=length + 8, version_slots=1)
    engine.load(0, weights)
    reporter = OutputReporter(engine, interval_s=1.0)
    with tempfile.TemporaryDirectory() as folder:
        outputs = PartialOutputs(Path(folder, FILE_NAME))
        for number in range(num_reports):
            ids = [RequestId(number, row, 0) for row in range(NUM_ROWS)]
            engine.submit([Request(id, id.group, (3, 4, 5), 0, id.row, sampling) for id in ids])
            for _ in range(2):  # the second is measured: it adds to outputs
                for _ in range(NUM_REPORTED):
                    engine.step()
                start_s = time.perf_counter()
                message = pickle.dumps(reporter.new_parts())
                sent_s = time.perf_counter()
                parts = pickle.loads(message)
                outputs.add(parts)
                end_s = time.perf_counter()
            assert sum(part.start > 0 for part in parts) == NUM_ROWS
            engine_s.append(sent_s - start_s)
            driver_s.append(end_s - sent_s)
            engine.abort(ids)
            for id in ids:
                outputs.forget(id)
        outputs.close()
    interval_s = RuntimeSection().output_interval_s
    found = {"engine": statistics.median(engine_s), "driver": statistics.median(driver_s)}
    row: Row = {
        "reports": num_reports,
        "responses": NUM_ROWS,
        "length": length,
        "new_tokens": NUM_ROWS * NUM_REPORTED,
        **{f"{who}_ms": 1e3 * each for who, each in found.items()},
    }
    return [row], {f"a report / its interval, {who}": each / interval_s for who, each in found.items()}


def measure_kills(num_kills: int) -> tuple[list[Row], dict[str, float], tuple[str, ...]]:
    """Rows, ratios, and the findings of the audit."""
    random_s = random.Random(0)
    random.seed(0)
    with tempfile.TemporaryDirectory() as folder:
        run, watch = KilledRun(Path(folder)), Watch(Path(folder, "run"))
        watch.start()
        for number in range(num_kills):
            time.sleep(random_s.uniform(2.0, 4.0))
            run.kill_all() if number % 5 == 4 else run.kill_engine()
        time.sleep(3.0)
        run.stop()
        watch.stop()
        result = audit.check(run.out)
        found = list(losses(watch, run.kills))
    for finding in result.findings:
        print(finding)
    versions = result.guarantees.versions
    share = versions.num_kept_tokens / max(1, versions.num_kept_tokens + versions.num_lost_tokens)
    ratios = {
        "findings": float(len(result.findings)),
        "audit: kept_tokens": float(versions.num_kept_tokens),
        "audit: lost_tokens": float(versions.num_lost_tokens),
        "audit: kept / (kept + lost)": share,
    }
    return rows_of(found), ratios, result.findings


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument(
        "--kills", type=int, metavar="N", help="number of kills (default: 50; 5 with --quick)"
    )
    parser.add_argument("--only", choices=PARTS, metavar="PART", help="only kills, or reports")
    given = parser.parse_args()
    options = options_of(given)
    rows, ratios, findings = list[Row](), dict[str, float](), tuple[str, ...]()
    parts = PARTS if given.only is None else (given.only,)
    if "kills" in parts:
        rows, ratios, findings = measure_kills(given.kills or (5 if options.quick else 50))
    if "reports" in parts:
        report_rows, report_ratios = measure_reports(3 if options.quick else 20)
        rows, ratios = rows + report_rows, ratios | report_ratios
    publish(options, rows, ratios)
    sys.exit(1 if findings else 0)


if __name__ == "__main__":
    main()
