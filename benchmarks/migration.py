"""What the migration of a request of 1,000 tokens between two engine processes costs, and how long it pauses.

It uses real processes, pipes and the driver's own code. CPU time is that of both engines and the driver while
no engine decodes. It is compared with the prefill of as many tokens on one engine. The prompts are short, so
that the destination has no blocks cached. Requests migrate one at a time, and many at once, as when an engine
changes its version. Stop time is measured while both engines decode, from the source's last token to the
destination's first one, in decode steps.

With --vllm-python or --sglang-python, requests of 128 to 4,096 tokens migrate between two servers instead:
with their KV, in files and, if the interpreter has it, over NIXL, and without. Stop time is then from the
source's halt to the first token from the destination.

    python benchmarks/migration.py [--vllm-python PYTHON | --sglang-python PYTHON] [--quick] [--json FILE]
"""

from __future__ import annotations

import random
import shutil
import statistics
import subprocess
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from models import DEMO, THIRTY_MILLION

from dora.core.actions import Migrate
from dora.core.events import Event, Migrated
from dora.core.types import GroupId, RequestId
from dora.engine.interface import KVTransfer
from dora.engine.kv_transfer.handoff import HandoffSlots, HandoffState
from dora.engine.messages import ImportFinished
from dora.engine.request import Completion, Request, SamplingParams
from dora.model.config import ModelConfig
from dora.model.pretrained import save_pretrained
from dora.model.weights import WeightLayout, initial_weights, parameter_shapes
from dora.runtime.process import messages as m
from dora.runtime.process.worker_process import Worker, WorkerMessages, preload_workers
from dora.runtime.rollout.engine_worker import run_engine
from dora.runtime.rollout.migration import Migrations
from dora.weights.store import WeightStore, make_store_folder
from report import Options, Row, make_parser, options_of, publish

if TYPE_CHECKING:
    from dora.engine.backends.http_engine import HttpEngine

MODELS = {"demo": DEMO, "30m": THIRTY_MILLION}
NUM_TOKENS, PROMPT_LENGTH, MAX_CONTEXT = 1000, 15, 1536
NUM_BUSY_ROWS = 16  # of each engine, while stop time is measured
WAIT_S = 120.0
PROCESS_CLOCK = 2  # the clock id of a process, as clock_getcpuclockid(3) computes it


@dataclass(frozen=True)
class Case:
    """A model and the number of repetitions."""

    name: str
    config: ModelConfig
    num_migrations: int
    num_together: int
    num_busy_migrations: int
    num_prefills: int


class EnginePair:
    """Two engine processes with version 0, and a driver that only migrates.

    `device`, `dtype` and `kv_transfer` are those of the engines.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: str = "cpu",
        dtype: str = "float32",
        kv_transfer: KVTransfer = "shared",
    ) -> None:
        self.folder, self._device, self._dtype = make_store_folder(0), device, dtype
        self._kv_transfer = kv_transfer
        self._vocab_size, self._source = config.vocab_size, random.Random(0)
        weights = initial_weights(config, seed=0, std=0.1)
        save_pretrained(self.folder / "model", config, weights)
        WeightStore(self.folder, dtype, parameter_shapes(config)).publish(0, weights)
        self._messages = WorkerMessages()
        self._events: deque[Event] = deque()
        self.migrations = Migrations(self.folder, WAIT_S, self._events, self.send)
        preload_workers()
        self.workers = [self._start(number) for number in range(2)]
        self.reports: dict[int, m.EngineReport] = {}
        self._killed: set[int] = set()
        self._num_rows = 0
        self.wait_for(m.WorkerReady, 0, 1)
        self.send_to_both(m.LoadWeights(0))
        self.wait_for(m.WeightsLoaded, 0, 1)

    def close(self) -> None:
        for worker in self.workers:
            worker.kill()
        shutil.rmtree(self.folder)

    def pool(self, number: int) -> Path:
        return self.folder / f"pool-{number}.kv"

    def send(self, number: int, message: object) -> bool:
        self.workers[number].send(message)
        return True

    def send_to_both(self, message: object) -> None:
        for number in range(2):
            self.send(number, message)

    def receive(self) -> tuple[int, Any]:
        """The next message of an engine, after replies of migrations have been handled."""
        worker, message = self._messages.get(timeout=WAIT_S)
        number = self.workers.index(worker)
        match message:
            case m.ImportFinished() | m.ImportFailed() | m.ExportFinished() | m.ExportFailed():
                self.migrations.on_reply(message)
            case m.EngineReport():
                self.reports[number] = message
            case m.WorkerExited() if number not in self._killed:
                raise RuntimeError(worker.traceback)
        return number, message

    def wait_for(self, kind: type, *numbers: int) -> None:
        """Wait until each of these engines has sent a message of one type."""
        pending = set(numbers)
        while pending:
            number, message = self.receive()
            if isinstance(message, kind):
                pending.discard(number)

    def pause(self) -> None:
        self.send_to_both(m.PauseDecoding())
        self.wait_for(m.DecodingPaused, 0, 1)

    def request(self, length: int, max_tokens: int) -> Request:
        """A new request with a prompt that no engine has cached."""
        self._num_rows += 1
        prompt = tuple(self._source.randrange(self._vocab_size) for _ in range(length))
        group = GroupId(0, self._num_rows)
        return Request(
            RequestId(*group, 0), group, prompt, 0, self._num_rows, SamplingParams(1.0, max_tokens)
        )

    def migrate(self, request: Request, source: int) -> Migrated:
        """Migrate a request to the other engine, and wait until both have finished."""
        (event,) = self.migrate_all([request], source)
        return event

    def migrate_all(self, requests: list[Request], source: int) -> list[Migrated]:
        """Migrate requests to the other engine at once, and wait until both have finished."""
        for request in requests:
            self.migrations.start(Migrate(request.id, source, 1 - source, 0, ""), request, self.pool(source))
        while self.migrations.in_progress:
            self.receive()
        events = [self._events.popleft() for _ in requests]
        return [event for event in events if isinstance(event, Migrated) or _fail(event)]

    def kill_during_copy(self, request: Request, killed: int) -> HandoffState:
        """SIGKILL an engine once engine 1 has reserved blocks for a request of engine 0.

        Returns how far the migration had come. Raises RuntimeError if the other engine fails after it.
        """
        self.migrations.start(Migrate(request.id, 0, 1, 0, ""), request, self.pool(0))
        (migration,) = self.migrations.in_progress.values()
        while (state := self.migrations.state_of(migration)) is HandoffState.STARTED:
            time.sleep(1e-4)
        self._killed.add(killed)
        self.workers[killed].kill()
        self.migrations.on_engine_lost(killed)
        self.send(1 - killed, m.SubmitRequests([self.request(PROMPT_LENGTH, 20)]))
        self.send(1 - killed, m.ResumeDecoding())
        self.wait_for(m.RequestsCompleted, 1 - killed)
        return state

    def cpu_s(self) -> list[float]:
        """CPU time of both engines and of the driver."""
        engines = (worker.process.pid for worker in self.workers)
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
            device=self._device,
            dtype=self._dtype,
            kv_transfer=self._kv_transfer,
        )
        return Worker(f"engine {number}", run_engine, spec, self._messages)


def prefill_ms(pair: EnginePair, repeats: int) -> float:
    """CPU time of the best prefill of NUM_TOKENS: a new prompt, less the same prompt when it is cached."""
    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats):
        request = pair.request(NUM_TOKENS + 1, 2)
        for is_new in (True, False):
            began_s = pair.cpu_s()[0]
            pair.send(0, m.SubmitRequests([request]))
            pair.wait_for(m.RequestsCompleted, 0)
            times[is_new].append((pair.cpu_s()[0] - began_s) * 1e3)
    return min(times[True]) - statistics.median(times[False])


def _fail(event: Event) -> bool:
    raise RuntimeError(f"a migration has failed: {event}")


def requests_of(pair: EnginePair, count: int, num_tokens: int) -> list[Request]:
    """Requests that engine 0 has decoded to about `num_tokens` of prompt and answer. Both engines pause."""
    requests = [pair.request(PROMPT_LENGTH, MAX_CONTEXT - PROMPT_LENGTH) for _ in range(count)]
    timer = pair.request(PROMPT_LENGTH, num_tokens - PROMPT_LENGTH)
    pair.send(0, m.SubmitRequests([*requests, timer]))
    pair.wait_for(m.RequestsCompleted, 0)
    pair.pause()
    return requests


def measure_cost(case: Case, pair: EnginePair) -> Row:
    """Migrations in both directions while no engine decodes."""
    best_prefill_ms = prefill_ms(pair, case.num_prefills)
    requests = requests_of(pair, case.num_together, NUM_TOKENS)
    for number in range(4):  # so that both have mapped the other's pool
        pair.migrate_all(requests, number % 2)
    events, times = [], [pair.cpu_s()]
    for number in range(case.num_migrations):
        events.append(pair.migrate(requests[0], number % 2))
        times.append(pair.cpu_s())
    spent_ms = np.diff(times, axis=0) * 1e3  # [migrations, processes]
    events, times = [], [pair.cpu_s()]
    for number in range(2 * max(1, case.num_migrations // case.num_together // 2)):
        events += pair.migrate_all(requests, number % 2)
        times.append(pair.cpu_s())
    together_ms = np.diff(times, axis=0).sum(1) * 1e3 / len(requests)
    pair.send(0, m.AbortRequests(tuple(request.id for request in requests)))
    export = statistics.median(event.num_bytes / event.copy_s for event in events)
    memcpy = memcpy_rate(events[0].num_bytes)
    return {
        "model": case.name,
        "parameters": WeightLayout(case.config).numel,
        "tokens": PROMPT_LENGTH + events[0].num_tokens,
        "kv_mb": events[0].num_bytes / 1e6,
        "prefill_cpu_ms": best_prefill_ms,
        "move_cpu_ms": float(np.median(spent_ms.sum(1))),
        "mean_ms": float(spent_ms.sum(1).mean()),
        "driver_ms": float(np.median(spent_ms[:, 2])),
        "together": len(requests),
        "together_ms": float(np.median(together_ms)),
        "export_gb_s": export / 1e9,
        "memcpy_gb_s": memcpy / 1e9,
        "moves": case.num_migrations + len(events),
    }


def memcpy_rate(num_bytes: int) -> float:
    """Bytes per second at which this machine copies as much between buffers outside its caches."""
    num_buffers = max(4, 2**28 // num_bytes)
    source, target = (np.ones((num_buffers, num_bytes), np.uint8) for _ in range(2))
    times = []
    for i in range(num_buffers):
        began_s = time.perf_counter()
        np.copyto(target[i], source[i])
        times.append(time.perf_counter() - began_s)
    return num_bytes / statistics.median(times)


def measure_stop(case: Case, pair: EnginePair) -> Row:
    """Migrations between engines that decode NUM_BUSY_ROWS rows each."""
    max_tokens = MAX_CONTEXT - PROMPT_LENGTH
    rows = [[pair.request(PROMPT_LENGTH, max_tokens) for _ in range(NUM_BUSY_ROWS)] for _ in range(2)]
    for number in range(2):
        pair.send(number, m.SubmitRequests(rows[number]))
    pair.send_to_both(m.ResumeDecoding())
    migrating, stops_s = rows[0][0], []
    for number in range(case.num_busy_migrations):
        stops_s.append(pair.migrate(migrating, number % 2).stop_s)
    pair.pause()
    pair.reports.clear()
    pair.wait_for(m.EngineReport, 0, 1)
    step_s = 1 / statistics.mean(report.row_tokens_per_s for report in pair.reports.values())
    stop_s = statistics.median(stops_s)
    return {
        "model": case.name,
        "rows": NUM_BUSY_ROWS,
        "step_ms": step_s * 1e3,
        "median_stop_ms": stop_s * 1e3,
        "stop_steps": 1 + stop_s / step_s,  # the first token comes one step after the row
        "longest_stop_steps": 1 + max(stops_s) / step_s,
        "busy_moves": len(stops_s),
    }


SERVER_TOKENS = (128, 256, 512, 1024, 2048, 4096)  # of prompt and answer when a request migrates
NIXL_TOKENS = (128, 512, 2048)  # fewer: under vLLM, NIXL's threads need a core of each server
NUM_BEFORE, NUM_AFTER = 32, 96  # tokens of the answer before and after the migration


class ServerPair:
    """Two engines on servers with version 0, and a driver that only migrates, in this process.

    A third one, `reference`, generates what does not migrate: it has no prompt cached either. A server that
    has a prompt cached prefills fewer tokens at once, and rounds otherwise.
    """

    def __init__(self, config: ModelConfig, backend: str, python: str, kv_connector: str) -> None:
        from dora.engine.backends.sglang import Sglang
        from dora.engine.backends.vllm import Vllm

        self.backend = backend
        self._folder, self._vocab_size, self._source = (
            make_store_folder(0),
            config.vocab_size,
            random.Random(0),
        )
        weights = initial_weights(config, seed=0, std=0.1)
        save_pretrained(self._folder / "model", config, weights)
        self._slots, self._num_requests, self._num_migrations = HandoffSlots(self._folder), 0, 0
        engines: list[HttpEngine] = []
        for number in range(3):
            pool = self._folder / f"pool-{number}"
            sizes = {"max_rows": 2, "max_context": SERVER_TOKENS[-1] + NUM_AFTER, "version_slots": 1}
            where = {"device": "cpu", "dtype": "float32", "python": python, "pool": pool}
            where |= {"kv_connector": kv_connector if number < 2 else "files"}
            kind = Vllm if backend == "vllm" else Sglang
            engines.append(kind(model=str(self._folder / "model"), **sizes, **where))
            engines[-1].load(0, weights)
        *self.engines, self.reference = engines

    def close(self) -> None:
        for engine in (*self.engines, self.reference):
            engine.close()
        shutil.rmtree(self._folder)

    def request(self, num_tokens: int) -> Request:
        """A request that migrates with about `num_tokens`. Its tokens are the likeliest ones."""
        self._num_requests += 1
        prompt = tuple(self._source.randrange(self._vocab_size) for _ in range(num_tokens - NUM_BEFORE))
        group = GroupId(0, self._num_requests)
        sampling = SamplingParams(0.0, NUM_BEFORE + NUM_AFTER)
        return Request(RequestId(*group, 0), group, prompt, 0, self._num_requests, sampling)

    def generate(self, request: Request) -> Completion:
        """The answer without a migration."""
        self.reference.submit([request])
        return _until(self.reference.step)[0]

    def move(self, request: Request, carries_kv: bool) -> tuple[float, ImportFinished, Completion]:
        """Migrate with NUM_BEFORE tokens of the answer. Returns the time without new tokens (s)."""
        source, destination = self.engines
        source.submit([request])
        while source.progress()[request.id] < NUM_BEFORE:
            source.step()
        self._num_migrations += 1
        number, slot = self._num_migrations, self._slots.allocate(self._num_migrations, request)
        pool = source.kv_pool if carries_kv else None
        assert destination.reserve_migration(m.ReserveMigration(number, request, pool, slot, WAIT_S)) is None
        began_s = time.perf_counter()
        assert source.start_export(m.StartExport(number, request.id, slot, WAIT_S, carries_kv)) is None
        replies: list[object] = []
        while len(replies) < 2:
            replies += source.poll_migrations() + destination.poll_migrations()
        (imported,) = (reply for reply in replies if isinstance(reply, ImportFinished))
        while destination.progress()[request.id] <= imported.num_tokens:
            destination.step()
        stop_s = time.perf_counter() - began_s
        return stop_s, imported, _until(destination.step)[0]


def _until(step: Callable[[], list[Completion]]) -> list[Completion]:
    """Step until there are answers."""
    while not (answers := step()):
        pass
    return answers


def measure_server(pair: ServerPair, num_tokens: int, num_repeats: int) -> Row:
    """Stop time with KV and without, and the log-probs after a migration against those without one."""
    stops_ms: dict[bool, list[float]] = {True: [], False: []}
    prefilled: dict[bool, set[int]] = {True: set(), False: set()}
    differences: dict[bool, float] = {True: 0.0, False: 0.0}
    num_bytes = 0
    for _ in range(num_repeats):
        for carries_kv in (True, False):
            request = pair.request(num_tokens)
            stop_s, imported, answer = pair.move(request, carries_kv)
            stops_ms[carries_kv].append(stop_s * 1e3)
            prefilled[carries_kv].add(imported.num_prefilled)
            num_bytes = max(num_bytes, imported.num_bytes)
            unmoved = pair.generate(request)
            assert answer.token_ids.tolist() == unmoved.token_ids.tolist(), "the tokens differ"
            assert np.isfinite(answer.logprobs).all(), "a log-prob is no number"
            difference = float(np.abs(answer.logprobs - unmoved.logprobs).max())
            differences[carries_kv] = max(differences[carries_kv], difference)
    with_kv, without = (statistics.median(stops_ms[carries_kv]) for carries_kv in (True, False))
    return {
        f"{pair.backend}_tokens": num_tokens,
        "kv_mb": num_bytes / 1e6,
        "stop_ms": with_kv,
        "prefill_stop_ms": without,
        "ratio": without / with_kv,
        "max_prefilled": max(prefilled[True]),
        "logprob_difference": differences[True],
        "logprob_difference_prefilled": differences[False],
        "repeats": num_repeats,
    }


def run_servers(options: Options, backend: str, python: str) -> None:
    config = replace(THIRTY_MILLION, max_position_embeddings=SERVER_TOKENS[-1] + NUM_AFTER)
    rows: list[Row] = []
    ratios: dict[str, float] = {}
    for kv_connector in ("files", "nixl") if _has_nixl(python) else ("files",):
        pair = ServerPair(config, backend, python, kv_connector)
        try:
            measure_server(pair, SERVER_TOKENS[0], 1)  # the first calls of a server are slow
            lengths = SERVER_TOKENS if kv_connector == "files" else NIXL_TOKENS
            num_repeats = 3 if options.quick or kv_connector == "nixl" else 7
            own = [
                measure_server(pair, num_tokens, num_repeats)
                for num_tokens in (lengths[:2] if options.quick else lengths)
            ]
            num_recomputed = sum(engine.num_recomputed for engine in pair.engines)
        finally:
            pair.close()
        rows += [{"kv_connector": kv_connector, **row} for row in own]
        ratios |= {
            f"{kv_connector}_prefill_over_kv_{row[f'{backend}_tokens']}": float(row["ratio"]) for row in own
        }
        prefilled = num_recomputed + sum(int(row["max_prefilled"]) for row in own)
        ratios[f"{kv_connector}_prefilled_with_kv"] = float(prefilled)
        ratios[f"{kv_connector}_logprob_difference"] = max(float(row["logprob_difference"]) for row in own)
    publish(options, rows, ratios)


def _has_nixl(python: str) -> bool:
    return not subprocess.run([python, "-c", "import nixl"], capture_output=True).returncode


def main() -> None:
    parser = make_parser(__doc__ or "")
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument("--vllm-python", metavar="PYTHON", help="interpreter that has vLLM")
    servers.add_argument("--sglang-python", metavar="PYTHON", help="interpreter that has SGLang")
    given = parser.parse_args()
    options = options_of(given)
    if given.vllm_python:
        run_servers(options, "vllm", given.vllm_python)
    elif given.sglang_python:
        run_servers(options, "sglang", given.sglang_python)
    else:
        run_native(options)


def run_native(options: Options) -> None:
    costs: list[Row] = []
    stops: list[Row] = []
    for name, config in MODELS.items():
        factor = 1 if options.quick else 4
        is_small = name == "demo"
        num_migrations, num_together = (factor * 100, 16) if is_small else (factor * 40, 4)
        case = Case(name, config, num_migrations, num_together, factor * 16, 8 if is_small else 3)
        pair = EnginePair(config)
        try:
            costs.append(measure_cost(case, pair))
            stops.append(measure_stop(case, pair))
        finally:
            pair.close()
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
