"""Faults of all kinds, one every few seconds, in real runs: what is lost, and how fast the runs recover.

The runs train on the demo's task with paced engines. Runs without faults are the baseline. In the others a
thread injects faults: processes receive SIGKILL or SIGSTOP, connections are cut, a reward function never
returns, files cannot grow any more, an engine gets a tenth of its time. With --runtime ray a run has two
nodes of a cluster, one of which loses its raylet and is replaced. With --vllm-python or --sglang-python a
run has two servers, which have too little memory for the KV of all their requests; they are killed and
stopped, and KV that migrates in files is damaged. Different components fail at the same time; each gets its
next fault only once it has recovered. Every run is audited and replayed. The findings are counted as lost,
doubled, mixed and too_stale, and make the exit code 1.

detection_s is the time from the fault until the driver knows of it. recovery_s is the time until the run is
as before: another process has replaced the lost one, and a trainer has redone its steps. Throughput is
trained tokens per second, with faults over without.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from argparse import ArgumentTypeError
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from fault_kinds import KINDS, REWARD, Fault, Inject, affected_by, component_of
from fault_nodes import RAYLET_KILLED, STORAGE_KILLED, kinds_on, two_nodes
from fault_servers import KV_DAMAGED, SERVER_KINDS, on_servers
from rich.console import Console

from dora.audit import audit, logprob_recheck
from dora.config import load
from dora.journal import replay
from dora.journal.reader import read_journal
from dora.runtime import run
from dora.runtime.control.requests import RequestQueue, RunEnd
from dora.runtime.executor import LiveRun
from report import Options, Row, make_parser, options_of, publish

MODEL = Path(__file__).parent.parent / "examples" / "gcd-start"
CONFIG = """
[run]
steps = 100000
seed = {seed}
[model]
path = "{model}"
[data]
path = "gcd"
max_prompt_length = 8
[sampling]
group_size = 4
max_response_length = 60
[engine]
num_engines = 4
max_num_seqs = 8
[reward]
function = "{reward}:reward"
timeout_s = 2.0
num_workers = 2
[trainer]
batch_size = 8
lr = 1e-4
save_freq = 2
deterministic = true
[eval]
num_prompts = 0
[orchestrator]
max_staleness = 8
[runtime]
heartbeat_timeout_s = 4.0
trainer_timeout_s = 4.0
max_restarts = 1000
"""
OWN_ENGINE = ("engine.kernels=eager", "engine.min_step_time=40ms")
ALL_KINDS = (*dict.fromkeys((*KINDS, *SERVER_KINDS, RAYLET_KILLED, STORAGE_KILLED)),)
POLL_S = 0.1  # between two checks of the faults that have not recovered
RECOVERY_TIMEOUT_S = 240.0  # the backoff of a restart may be a minute, and so may the start of a server
NUM_DEEP = 64  # samples of a run with servers whose log-probs are computed again
LOST, DOUBLED, MIXED, TOO_STALE = "lost", "doubled", "mixed", "too_stale"
NUM_LOG_LINES = 40  # printed of a run with findings: its last ones
T = TypeVar("T")
# Parts of findings against C2 that mean "more than once". All other findings against C2 mean "lost".
DOUBLED_MARKS = ("twice", "again", " was already ", "two ")


@dataclass
class InjectedFault:
    """A fault of a run; times in seconds."""

    kind: str
    fault: Fault
    at_s: float
    detection_s: float | None = None
    recovery_s: float | None = None


class Injector:
    """A `Gateway` of the run: a thread injects faults, and ends the run after the last one has recovered."""

    def __init__(self, faults: Sequence[tuple[str, Inject]], gap_s: float, min_s: float) -> None:
        """Inject at most one fault every `gap_s`. The run lasts at least `min_s`."""
        self.injected: list[InjectedFault] = []
        self.failures: list[str] = []
        self._faults, self._gap_s, self._min_s = faults, gap_s, min_s
        self._thread = threading.Thread(target=self._work, daemon=True)

    def open(self, requests: RequestQueue[LiveRun], notice: Callable[[str], None]) -> None:
        self._requests = requests
        self._thread.start()

    def end(self, end: RunEnd) -> None:
        """No request is in progress."""

    def close(self, is_urgent: Callable[[], bool]) -> None:
        """There is nothing to close."""

    def _work(self) -> None:
        try:
            self._call_driver(_has_trained, RECOVERY_TIMEOUT_S)
            began_s = time.monotonic()
            self._inject_all()
            time.sleep(max(0.0, began_s + self._min_s - time.monotonic()))
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _inject_all(self) -> None:
        left = [(number, kind, inject) for number, (kind, inject) in enumerate(self._faults)]
        active: list[InjectedFault] = []
        next_s = 0.0
        while left or active:
            index = _first_possible([kind for _, kind, _ in left], [each.fault.component for each in active])
            if index is not None and time.monotonic() >= next_s:
                active.append(self._inject(*left.pop(index)))
                next_s = time.monotonic() + self._gap_s
            time.sleep(POLL_S)
            for injected in active:
                self._call_driver(partial(_update_times, injected=injected), RECOVERY_TIMEOUT_S)
                waited_s = time.monotonic() - injected.at_s
                assert waited_s < RECOVERY_TIMEOUT_S, f"{injected.kind}: no recovery after {waited_s:.0f} s"
            active = [injected for injected in active if injected.recovery_s is None]

    def _inject(self, number: int, kind: str, inject: Inject) -> InjectedFault:
        at_s = time.monotonic()
        fault = self._call_driver(lambda run: inject(run, number), RECOVERY_TIMEOUT_S)
        self.injected.append(InjectedFault(kind, fault, at_s))
        return self.injected[-1]

    def _call_driver(self, function: Callable[[LiveRun], T | None], wait_s: float) -> T:
        """The first result of `function` that is not None; the driver calls it between events."""
        answer: Future[T | None] = self._requests.submit(function, wait_s)
        result = answer.result(timeout=wait_s + 5.0)
        assert result is not None, f"the run did not get there within {wait_s:g} s"
        return result


def _first_possible(kinds: Sequence[str], failed: Sequence[str]) -> int | None:
    """The index of the first kind whose components are well, and that no kind before it waits for."""
    reserved = set[str]().union(*map(affected_by, failed))
    for index, kind in enumerate(kinds):
        components = affected_by(component_of(kind))
        if not components & reserved:
            return index
        reserved |= components
    return None


def _has_trained(run: LiveRun) -> bool | None:
    """True once two steps are trained, so that every worker has started; None before."""
    return True if run.is_training and len(run.metrics.steps) >= 2 else None


def _update_times(run: LiveRun, injected: InjectedFault) -> bool:
    """Note detection and recovery of a fault."""
    passed_s, fault = time.monotonic() - injected.at_s, injected.fault
    if fault.is_detected is not None and injected.detection_s is None and fault.is_detected(run):
        injected.detection_s = passed_s
    is_detected = fault.is_detected is None or injected.detection_s is not None
    if is_detected and fault.has_recovered(run):
        injected.recovery_s = passed_s
    return True


@dataclass
class Trial:
    """One run, its faults, and the findings in its run folder."""

    injected: list[InjectedFault]
    findings: dict[str, list[str]]
    tokens_per_s: float
    wall_s: float
    failed_groups: int
    regenerated_tokens: int
    redone_steps: int


def run_trial(
    seed: int, faults: Sequence[tuple[str, Inject]], gap_s: float, min_s: float, overrides: Sequence[str]
) -> Trial:
    """A run with these faults, which lasts at least `min_s`."""
    with tempfile.TemporaryDirectory() as folder:
        out, reward, path = Path(folder) / "run", Path(folder) / "reward.py", Path(folder) / "task.toml"
        reward.write_text(REWARD)
        path.write_text(CONFIG.format(seed=seed, model=MODEL.resolve(), reward=reward))
        injector = Injector(faults, gap_s, min_s)
        with (Path(folder) / "log.txt").open("w+") as log:
            run.train(load.read_config(path, overrides), out, Console(file=log, width=200), gateway=injector)
            log.seek(0)
            log_lines = log.readlines()
        s = json.loads((out / "summary.json").read_text())
        found = findings(out, NUM_DEEP if any(o.startswith("engine.backend=") for o in overrides) else 0)
        found[LOST] += injector.failures + ([] if s["stopped"] == "SIGTERM" else [f"ended by {s['stopped']}"])
        if any(found.values()):
            print("".join(log_lines[-NUM_LOG_LINES:]))
    keys = ("tokens_per_s", "wall_s", "failed_groups", "regenerated_tokens", "redone_steps")
    return Trial(injector.injected, found, *(s[key] for key in keys))


def findings(out: Path, num_deep: int) -> dict[str, list[str]]:
    """The findings of audit and replay, by kind of violation; of `num_deep` samples also of the recheck."""
    verdict = audit.check(out)
    found = {
        LOST: [],
        DOUBLED: [],
        MIXED: [*verdict.findings_against("C1")],
        TOO_STALE: [*verdict.findings_against("C3")],
    }
    for finding in verdict.findings_against("C2"):
        is_doubled = any(mark in finding for mark in DOUBLED_MARKS)
        found[DOUBLED if is_doubled else LOST].append(finding)
    if num_deep:
        found[MIXED] += logprob_recheck.check(out, num_deep).findings
    if (difference := replay.first_difference(read_journal(out))) is not None:
        found[LOST].append(f"replay: {difference}")
    return found


def rows_of(injected: list[InjectedFault]) -> Iterator[Row]:
    """One row per kind. A fault without detection has no recovery either: the benchmark ends it."""
    for kind in ALL_KINDS:
        own = [each for each in injected if each.kind == kind]
        if own:
            detected = [each for each in own if each.detection_s is not None]
            yield {
                "kind": kind,
                "injected": len(own),
                **_spread("detection_s", [each.detection_s for each in detected]),
                **_spread("recovery_s", [each.recovery_s for each in detected]),
            }


def _spread(name: str, times: list[float | None]) -> Row:
    times_s = [time_s for time_s in times if time_s is not None]
    if not times_s:
        return {f"{name}_p50": "", f"{name}_max": ""}
    return {f"{name}_p50": round(statistics.median(times_s), 3), f"{name}_max": round(max(times_s), 3)}


@dataclass(frozen=True)
class Scale:
    """Sizes of a campaign: runs with `per_run` faults, one every `gap_s`, and `num_baselines` without."""

    num_faults: int
    per_run: int
    gap_s: float
    baseline_s: float  # duration of a run without faults
    num_baselines: int


SCALES = {  # by runtime or backend, and by whether it is quick
    ("local", False): Scale(204, 34, 6.0, 60.0, 3),
    ("local", True): Scale(12, 12, 0.3, 5.0, 1),
    ("ray", False): Scale(56, 28, 6.0, 60.0, 2),
    ("ray", True): Scale(14, 14, 0.3, 5.0, 1),
    ("servers", False): Scale(32, 16, 6.0, 60.0, 1),
    ("servers", True): Scale(8, 8, 0.3, 5.0, 1),
}


def _kinds(text: str) -> list[str]:
    """The value of --kinds."""
    if unknown := set(text.split(",")) - {*ALL_KINDS}:
        known = ", ".join(ALL_KINDS)
        raise ArgumentTypeError(f"unknown kinds: {', '.join(sorted(unknown))}; known: {known}")
    return text.split(",")


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--faults", type=int, metavar="N", help="number of faults")
    parser.add_argument("--kinds", type=_kinds, metavar="K,K", help=f"only these of: {', '.join(ALL_KINDS)}")
    parser.add_argument("--runtime", default="local", choices=("local", "ray"), help="where the workers run")
    servers = parser.add_mutually_exclusive_group()
    servers.add_argument(
        "--vllm-python", metavar="PYTHON", help="its vLLM generates; only with local workers"
    )
    servers.add_argument("--sglang-python", metavar="PYTHON", help="the same with SGLang")
    parser.add_argument("--kv-connector", choices=("files", "nixl"), help="of the servers")
    given = parser.parse_args()
    options = options_of(given)
    python = given.vllm_python or given.sglang_python
    if given.kv_connector and not python:
        parser.error("--kv-connector needs --vllm-python or --sglang-python")
    scale = SCALES["servers" if python else given.runtime, options.quick]
    with ExitStack() as stack:
        kinds, overrides = KINDS, [*OWN_ENGINE]
        if given.runtime == "ray":
            nodes = stack.enter_context(two_nodes())
            kinds = KINDS | kinds_on(nodes)
            overrides += ["runtime.kind=ray", f"ray.address={nodes.address}"]
        elif python:
            backend = "vllm" if given.vllm_python else "sglang"
            kinds, overrides = {**SERVER_KINDS}, on_servers(backend, python, given.kv_connector)
            if given.kv_connector == "nixl":
                del kinds[KV_DAMAGED]
        if unknown := set(given.kinds or ()) - kinds.keys():
            parser.error(f"these runs do not support: {', '.join(sorted(unknown))}")
        chosen = {kind: kinds[kind] for kind in given.kinds or kinds}
        trials, baselines = campaign(given.faults or scale.num_faults, scale, chosen, overrides)
    sys.exit(report(options, trials, baselines))


def campaign(
    num_faults: int, scale: Scale, kinds: Mapping[str, Inject], overrides: Sequence[str]
) -> tuple[list[Trial], list[Trial]]:
    """Runs with this many faults, and runs without any."""
    chosen = itertools.cycle(kinds.items())
    trials, baselines = list[Trial](), list[Trial]()
    while (left := num_faults - _num_injected(trials)) > 0 and len(trials) < num_faults:
        if len(baselines) < scale.num_baselines:
            baselines.append(run_trial(len(baselines), [], scale.gap_s, scale.baseline_s, overrides))
        faults = [next(chosen) for _ in range(min(left, scale.per_run))]
        trials.append(run_trial(len(trials), faults, scale.gap_s, 0.0, overrides))
        for violation, found in trials[-1].findings.items():
            for finding in found:
                print(f"run {len(trials)}: {violation}: {finding}")
        count, last = _num_injected(trials), trials[-1]
        speeds = f"{last.tokens_per_s:.0f} tokens/s, {baselines[-1].tokens_per_s:.0f} without faults"
        print(f"run {len(trials)}: {count} of {num_faults}, {last.wall_s:.0f} s, {speeds}", flush=True)
    return trials, baselines


def _num_injected(trials: Sequence[Trial]) -> int:
    return sum(len(trial.injected) for trial in trials)


def report(options: Options, trials: list[Trial], baselines: list[Trial]) -> int:
    """Print and write the results; returns the exit code."""
    injected = [fault for trial in trials for fault in trial.injected]
    violations = Counter({violation: 0 for violation in (LOST, DOUBLED, MIXED, TOO_STALE)})
    for trial in (*trials, *baselines):
        violations.update({violation: len(found) for violation, found in trial.findings.items()})
    wall_s = sum(trial.wall_s for trial in trials)
    with_faults = sum(trial.tokens_per_s * trial.wall_s for trial in trials) / wall_s
    without = statistics.median(trial.tokens_per_s for trial in baselines)
    ratios = {"injected": float(len(injected)), **{name: float(num) for name, num in violations.items()}}
    ratios |= {
        "runs": float(len(trials)),
        "seconds_per_fault": wall_s / max(1, len(injected)),
        "tokens_per_s_with_faults": with_faults,
        "tokens_per_s_without": without,
        "throughput_with_over_without": with_faults / without,
    }
    for key in ("failed_groups", "regenerated_tokens", "redone_steps"):
        ratios[key] = float(sum(getattr(trial, key) for trial in trials))
    publish(options, [*rows_of(injected)], ratios)
    return 1 if violations.total() else 0


if __name__ == "__main__":
    main()
