"""What it costs to move a request of 1,000 tokens between two engine processes, and how long it stops.

Real processes, pipes and the driver's own bookkeeping. CPU time is that of both engines and the
driver, while nobody decodes; it is compared with what one engine needs to prefill as many tokens.
The prompts are short, so that nothing is known to the other side. Requests move alone, and many
at once, as they do when an engine changes its version. Stop time is measured while both engines
decode: from the source's last token to the destination's first one, in its decode steps.

    python benchmarks/migration.py [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import shutil
import statistics
import time
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from models import DEMO, THIRTY_MILLION
from report import Row, parse_options, publish

from dora.core.actions import Migrate
from dora.core.events import Event, Migrated
from dora.core.records import GroupId, RequestId
from dora.engine.sequence import Request, Sampling
from dora.model.config import ModelConfig
from dora.model.folder import save_folder
from dora.model.weights import Layout, initial_weights
from dora.runtime import messages as m
from dora.runtime.moving import Moves
from dora.runtime.process import Told, Worker
from dora.runtime.workers import run_engine
from dora.weights.store import WeightStore, make_store_folder

MODELS = {"demo": DEMO, "30m": THIRTY_MILLION}
NUM_TOKENS, PROMPT_LENGTH, MAX_CONTEXT = 1000, 15, 1536
NUM_BUSY_ROWS = 16  # of each engine, while stop time is measured
WAIT_S = 120.0
PROCESS_CLOCK = 2  # what clock_getcpuclockid(3) makes of a process id


@dataclass(frozen=True)
class Setting:
    """A model and how often to repeat."""

    name: str
    config: ModelConfig
    num_moves: int
    num_together: int
    num_busy_moves: int
    num_prefills: int


class Bench:
    """Two engine processes that hold version 0, and a driver reduced to moves."""

    def __init__(self, config: ModelConfig) -> None:
        self.folder = make_store_folder(0)
        self._vocab_size, self._source = config.vocab_size, random.Random(0)
        weights = initial_weights(config, seed=0, std=0.1)
        save_folder(self.folder / "model", config, weights)
        WeightStore(self.folder).publish(0, weights)
        self._told = Told()
        self._facts: deque[Event] = deque()
        self.moves = Moves(self.folder, WAIT_S, self._facts, self.tell, lambda _: 0)
        self.workers = [self._start(number) for number in range(2)]
        self.beats: dict[int, m.Beat] = {}
        self._num_rows = 0
        self.hear(m.Ready, 0, 1)
        self.tell_both(m.LoadWeights(0))
        self.hear(m.WeightsLoaded, 0, 1)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        shutil.rmtree(self.folder)

    def pool(self, number: int) -> Path:
        return self.folder / f"pool-{number}.kv"

    def tell(self, number: int, message: object) -> bool:
        self.workers[number].send(message)
        return True

    def tell_both(self, message: object) -> None:
        for number in range(2):
            self.tell(number, message)

    def listen(self) -> tuple[int, Any]:
        """The next word of an engine; those about moves are attended to."""
        worker, message = self._told.get(timeout=WAIT_S)
        number = self.workers.index(worker)
        match message:
            case m.Reserved() | m.Received() | m.NotReceived() | m.Sent() | m.Kept():
                self.moves.heard(message)
            case m.Beat():
                self.beats[number] = message
            case m.Gone():
                raise RuntimeError(worker.crash)
        return number, message

    def hear(self, kind: type, *numbers: int) -> None:
        """Wait until each of these engines has said a word of one kind."""
        silent = set(numbers)
        while silent:
            number, message = self.listen()
            if isinstance(message, kind):
                silent.discard(number)

    def pause(self) -> None:
        self.tell_both(m.PauseRows())
        self.hear(m.RowsPaused, 0, 1)

    def request(self, length: int, max_tokens: int) -> Request:
        """A new one with a prompt nobody has seen."""
        self._num_rows += 1
        prompt = tuple(self._source.randrange(self._vocab_size) for _ in range(length))
        group = GroupId(0, self._num_rows)
        return Request(RequestId(*group, 0), group, prompt, 0, self._num_rows, Sampling(1.0, max_tokens))

    def move(self, request: Request, source: int) -> Migrated:
        """Move a request to the other engine; returns when both have settled."""
        (fact,) = self.move_all([request], source)
        return fact

    def move_all(self, requests: list[Request], source: int) -> list[Migrated]:
        """Move requests to the other engine at once; returns when both have settled."""
        for request in requests:
            self.moves.begin(Migrate(request.id, source, 1 - source, 0, ""), request, self.pool(source))
        while self.moves.under_way:
            self.listen()
        facts = [self._facts.popleft() for _ in requests]
        return [fact for fact in facts if isinstance(fact, Migrated) or _fail(fact)]

    def cpu_s(self) -> list[float]:
        """CPU time so far of both engines and of the driver."""
        engines = (worker.pid for worker in self.workers)
        clocks = [~pid << 3 | PROCESS_CLOCK for pid in engines if pid is not None]
        return [*(time.clock_gettime(clock) for clock in clocks), time.process_time()]

    def _start(self, number: int) -> Worker:
        spec = m.EngineSpec(
            model=self.folder / "model",
            weights=self.folder,
            pool=self.pool(number),
            max_rows=NUM_BUSY_ROWS + 2,
            max_context=MAX_CONTEXT,
            version_slots=1,
            kernels="auto",
            pace_s=0.0,
            tail_interval=1,
            max_staleness=1,
        )
        return Worker(f"engine {number}", run_engine, spec, self._told)


def prefill_ms(bench: Bench, repeats: int) -> float:
    """CPU time of the best prefill of NUM_TOKENS: a new prompt, less the same prompt once it is known."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        asked = bench.request(NUM_TOKENS + 1, 2)
        for is_new in (True, False):
            began_s = bench.cpu_s()[0]
            bench.tell(0, m.Submit([asked]))
            bench.hear(m.Completed, 0)
            times[is_new].append((bench.cpu_s()[0] - began_s) * 1e3)
    return min(times[True]) - statistics.median(times[False])


def _fail(fact: Event) -> bool:
    raise RuntimeError(f"a move has failed: {fact}")


def requests_of(bench: Bench, count: int, num_tokens: int) -> list[Request]:
    """Requests that engine 0 has decoded for about `num_tokens` of prompt and answer; all pause."""
    asked = [bench.request(PROMPT_LENGTH, MAX_CONTEXT - PROMPT_LENGTH) for _ in range(count)]
    timer = bench.request(PROMPT_LENGTH, num_tokens - PROMPT_LENGTH)
    bench.tell(0, m.Submit([*asked, timer]))
    bench.hear(m.Completed, 0)
    bench.pause()
    return asked


def measure_cost(setting: Setting, bench: Bench) -> Row:
    """Moves there and back, while nobody decodes."""
    least_ms = prefill_ms(bench, setting.num_prefills)
    asked = requests_of(bench, setting.num_together, NUM_TOKENS)
    for number in range(4):  # both map the other's pool
        bench.move_all(asked, number % 2)
    facts, times = [], [bench.cpu_s()]
    for number in range(setting.num_moves):
        facts.append(bench.move(asked[0], number % 2))
        times.append(bench.cpu_s())
    spent_ms = np.diff(times, axis=0) * 1e3  # [moves, processes]
    facts, times = [], [bench.cpu_s()]
    for number in range(2 * max(1, setting.num_moves // setting.num_together // 2)):
        facts += bench.move_all(asked, number % 2)
        times.append(bench.cpu_s())
    together_ms = np.diff(times, axis=0).sum(1) * 1e3 / len(asked)
    bench.tell(0, m.GiveUp(tuple(request.id for request in asked)))
    export = statistics.median(fact.num_bytes / fact.copy_s for fact in facts)
    memcpy = memcpy_rate(facts[0].num_bytes)
    return {
        "model": setting.name,
        "parameters": Layout(setting.config).numel,
        "tokens": PROMPT_LENGTH + facts[0].num_tokens,
        "kv_mb": facts[0].num_bytes / 1e6,
        "prefill_cpu_ms": least_ms,
        "move_cpu_ms": float(np.median(spent_ms.sum(1))),
        "mean_ms": float(spent_ms.sum(1).mean()),
        "driver_ms": float(np.median(spent_ms[:, 2])),
        "together": len(asked),
        "together_ms": float(np.median(together_ms)),
        "export_gb_s": export / 1e9,
        "memcpy_gb_s": memcpy / 1e9,
        "moves": setting.num_moves + len(facts),
    }


def memcpy_rate(num_bytes: int) -> float:
    """Bytes per second at which this machine copies as much, from and to memory out of the caches."""
    num_buffers = max(4, 2**28 // num_bytes)
    source, target = (np.ones((num_buffers, num_bytes), np.uint8) for _ in range(2))
    times = []
    for i in range(num_buffers):
        began_s = time.perf_counter()
        np.copyto(target[i], source[i])
        times.append(time.perf_counter() - began_s)
    return num_bytes / statistics.median(times)


def measure_stop(setting: Setting, bench: Bench) -> Row:
    """Moves between engines that decode NUM_BUSY_ROWS rows each."""
    max_tokens = MAX_CONTEXT - PROMPT_LENGTH
    rows = [[bench.request(PROMPT_LENGTH, max_tokens) for _ in range(NUM_BUSY_ROWS)] for _ in range(2)]
    for number in range(2):
        bench.tell(number, m.Submit(rows[number]))
    bench.tell_both(m.ResumeRows())
    moved, stops_s = rows[0][0], []
    for number in range(setting.num_busy_moves):
        stops_s.append(bench.move(moved, number % 2).stop_s)
    bench.pause()
    bench.beats.clear()
    bench.hear(m.Beat, 0, 1)
    step_s = 1 / statistics.mean(beat.row_tokens_per_s for beat in bench.beats.values())
    stop_s = statistics.median(stops_s)
    return {
        "model": setting.name,
        "rows": NUM_BUSY_ROWS,
        "step_ms": step_s * 1e3,
        "median_stop_ms": stop_s * 1e3,
        "stop_steps": 1 + stop_s / step_s,  # the first token comes one step after the seat
        "longest_stop_steps": 1 + max(stops_s) / step_s,
        "busy_moves": len(stops_s),
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    costs: list[Row] = []
    stops: list[Row] = []
    for name, config in MODELS.items():
        factor = 1 if options.quick else 4
        is_small = name == "demo"
        num_moves, num_together = (factor * 100, 16) if is_small else (factor * 40, 4)
        setting = Setting(name, config, num_moves, num_together, factor * 16, 8 if is_small else 3)
        bench = Bench(config)
        try:
            costs.append(measure_cost(setting, bench))
            stops.append(measure_stop(setting, bench))
        finally:
            bench.close()
    gains, together = (
        [float(row["prefill_cpu_ms"]) / float(row[column]) for row in costs]
        for column in ("move_cpu_ms", "together_ms")
    )
    exports = [float(row["export_gb_s"]) / float(row["memcpy_gb_s"]) for row in costs]
    ratios = {f"reprefill_over_migrate_{name}": gain for name, gain in zip(MODELS, gains, strict=True)}
    ratios |= {f"reprefill_over_migrate_together_{n}": gain for n, gain in zip(MODELS, together, strict=True)}
    ratios |= {
        "reprefill_over_migrate": min(gains),
        "stop_steps": max(float(row["stop_steps"]) for row in stops),
        "longest_stop_steps": max(float(row["longest_stop_steps"]) for row in stops),
        "export_over_memcpy": min(exports),
    }
    publish(options, [*costs, *stops], ratios)


if __name__ == "__main__":
    main()
