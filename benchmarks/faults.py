"""Faults of every kind, one every few seconds, in real runs: what is lost, and how soon all is well again.

Runs of the demo's task with paced engines, some without faults, to compare with. Into the others faults are
injected from outside: processes get SIGKILL or SIGSTOP, connections are cut, a reward function never
returns, no file may grow any more, an engine has a tenth of its time. With --runtime ray a run has two nodes
of a cluster, one of which loses its raylet and is replaced. Stations are hit side by side, each again only
once it is well. Every run is audited and replayed: lost, doubled, mixed and too_stale are what that finds,
and make the exit code 1.

detection_s is from the fault to the moment at which the driver knows, recovery_s to the moment at which all
is as it was: another process has taken the place, and a trainer has redone its steps. Throughput is tokens
trained a second, with faults over without.
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

from fault_kinds import KINDS, REWARD, Strike, Wound, reach_of, station_of
from fault_nodes import RAYLET_KILLED, STORAGE_KILLED, kinds_on, two_nodes
from rich.console import Console

from dora.audit import audit
from dora.config import load
from dora.journal import replay
from dora.journal.reader import read_journal
from dora.runtime import run
from dora.runtime.control.requests import RequestQueue
from dora.service.context import RunContext
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
kernels = "eager"
num_engines = 4
max_num_seqs = 8
min_step_time = "40ms"
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
ALL_KINDS = (*KINDS, RAYLET_KILLED, STORAGE_KILLED)  # the last ones only on Ray
LOOK_S = 0.1  # between two looks at what is not well
PATIENCE_S = 120.0  # until all is well after a fault: a restart may wait for a minute
LOST, DOUBLED, MIXED, TOO_STALE = "lost", "doubled", "mixed", "too_stale"
NUM_SAID = 40  # last lines of a run in which something was found
T = TypeVar("T")
AGAIN = (
    "twice",
    "again",
    " was already ",
    "two ",
)  # findings against C2 that are of too much, not too little


@dataclass
class Injected:
    """One fault; times in seconds."""

    kind: str
    wound: Wound
    at_s: float
    detection_s: float | None = None
    recovery_s: float | None = None


class Injector:
    """A door through which faults come, from a thread of its own; it ends the run after the last one."""

    def __init__(self, strikes: Sequence[tuple[str, Strike]], gap_s: float, least_s: float) -> None:
        """One fault every `gap_s` at most; without any, the run goes for `least_s`."""
        self.done: list[Injected] = []
        self.failures: list[str] = []
        self._strikes, self._gap_s, self._least_s = strikes, gap_s, least_s
        self._thread = threading.Thread(target=self._work, daemon=True)

    def open(self, calls: RequestQueue, notice: Callable[[str], None]) -> None:
        self._calls = calls
        self._thread.start()

    def close(self) -> None:
        """The run is over."""

    def _work(self) -> None:
        try:
            self._ask(_has_begun, PATIENCE_S)
            began_s = time.monotonic()
            self._strike_all()
            time.sleep(max(0.0, began_s + self._least_s - time.monotonic()))
        except Exception as error:
            self.failures.append(f"{type(error).__name__}: {error}")
        finally:
            os.kill(os.getpid(), signal.SIGTERM)

    def _strike_all(self) -> None:
        left = [(number, kind, strike) for number, (kind, strike) in enumerate(self._strikes)]
        unwell: list[Injected] = []
        next_s = 0.0
        while left or unwell:
            free = _first_free([kind for _, kind, _ in left], [fault.wound.station for fault in unwell])
            if free is not None and time.monotonic() >= next_s:
                unwell.append(self._strike(*left.pop(free)))
                next_s = time.monotonic() + self._gap_s
            time.sleep(LOOK_S)
            for fault in unwell:
                self._ask(partial(_look, fault=fault), PATIENCE_S)
                waited_s = time.monotonic() - fault.at_s
                assert waited_s < PATIENCE_S, f"{fault.kind}: not well after {waited_s:.0f} s"
            unwell = [fault for fault in unwell if fault.recovery_s is None]

    def _strike(self, number: int, kind: str, strike: Strike) -> Injected:
        at_s = time.monotonic()
        wound = self._ask(lambda inside: strike(inside, number), PATIENCE_S)
        self.done.append(Injected(kind, wound, at_s))
        return self.done[-1]

    def _ask(self, function: Callable[[RunContext], T | None], wait_s: float) -> T:
        answer: Future[T | None] = self._calls.ask(function, wait_s)
        found = answer.result(timeout=wait_s + 5.0)
        assert found is not None, "the run does not get there"
        return found


def _first_free(kinds: Sequence[str], unwell: Sequence[str]) -> int | None:
    """The place of the first whose stations are well, and that nobody before it waits for."""
    taken = set[str]().union(*map(reach_of, unwell))
    for place, kind in enumerate(kinds):
        wanted = reach_of(station_of(kind))
        if not wanted & taken:
            return place
        taken |= wanted
    return None


def _has_begun(inside: RunContext) -> bool | None:
    """Once a few steps are trained, so that the first things are done."""
    return True if inside.is_training and len(inside.meter.steps) >= 2 else None


def _look(inside: RunContext, fault: Injected) -> bool:
    """Note what has become of a fault."""
    passed_s, wound = time.monotonic() - fault.at_s, fault.wound
    if wound.is_noticed is not None and fault.detection_s is None and wound.is_noticed(inside):
        fault.detection_s = passed_s
    if (wound.is_noticed is None or fault.detection_s is not None) and wound.is_over(inside):
        fault.recovery_s = passed_s
    return True


@dataclass
class Trial:
    """One run and what was found in its record."""

    injected: list[Injected]
    findings: dict[str, list[str]]
    tokens_per_s: float
    wall_s: float
    failed_groups: int
    regenerated_tokens: int
    redone_steps: int


def trial(
    seed: int, strikes: Sequence[tuple[str, Strike]], gap_s: float, least_s: float, ground: Sequence[str]
) -> Trial:
    """A run with these faults, or with none for at least so long; `ground` says where."""
    with tempfile.TemporaryDirectory() as folder:
        out, reward, path = Path(folder) / "run", Path(folder) / "judge.py", Path(folder) / "task.toml"
        reward.write_text(REWARD)
        path.write_text(CONFIG.format(seed=seed, model=MODEL.resolve(), reward=reward))
        injector = Injector(strikes, gap_s, least_s)
        with (Path(folder) / "log.txt").open("w+") as log:
            run.train(load.read_config(path, ground), out, Console(file=log, width=200), door=injector)
            log.seek(0)
            said = log.readlines()
        s = json.loads((out / "summary.json").read_text())
        found = judged(out)
        found[LOST] += injector.failures + ([] if s["stopped"] == "SIGTERM" else [f"ended by {s['stopped']}"])
        if any(found.values()):
            print("".join(said[-NUM_SAID:]))
    keys = ("tokens_per_s", "wall_s", "failed_groups", "regenerated_tokens", "redone_steps")
    return Trial(injector.done, found, *(s[key] for key in keys))


def judged(out: Path) -> dict[str, list[str]]:
    """What audit and replay find, by what it means."""
    verdict = audit.check(out)
    found = {
        LOST: [],
        DOUBLED: [],
        MIXED: [*verdict.findings_against("C1")],
        TOO_STALE: [*verdict.findings_against("C3")],
    }
    for finding in verdict.findings_against("C2"):
        found[DOUBLED if any(word in finding for word in AGAIN) else LOST].append(finding)
    if (difference := replay.first_difference(read_journal(out))) is not None:
        found[LOST].append(f"replay: {difference}")
    return found


def rows_of(injected: list[Injected]) -> Iterator[Row]:
    """One for each kind; what nobody has to notice has no recovery, it ends when the benchmark ends it."""
    for kind in ALL_KINDS:
        own = [fault for fault in injected if fault.kind == kind]
        if own:
            noticed = [fault.detection_s for fault in own if fault.detection_s is not None]
            over = [
                fault.recovery_s for fault in own if fault.recovery_s is not None and fault.wound.is_noticed
            ]
            yield {
                "kind": kind,
                "injected": len(own),
                **_spread("detection_s", noticed),
                **_spread("recovery_s", over),
            }


def _spread(name: str, times_s: list[float]) -> Row:
    if not times_s:
        return {f"{name}_p50": "", f"{name}_max": ""}
    return {f"{name}_p50": round(statistics.median(times_s), 3), f"{name}_max": round(max(times_s), 3)}


@dataclass(frozen=True)
class Scale:
    """How many faults in all and in a run, one every `gap_s`; runs without any for `calm_s`."""

    num_faults: int
    per_run: int
    gap_s: float
    calm_s: float
    num_calm: int


SCALES = {  # runtime, whether it is quick
    ("local", False): Scale(204, 34, 6.0, 60.0, 3),
    ("local", True): Scale(12, 12, 0.3, 5.0, 1),
    ("ray", False): Scale(56, 28, 6.0, 60.0, 2),
    ("ray", True): Scale(14, 14, 0.3, 5.0, 1),
}


def _kinds(text: str) -> list[str]:
    """Those that --kinds names."""
    if unknown := set(text.split(",")) - {*ALL_KINDS}:
        known = ", ".join(ALL_KINDS)
        raise ArgumentTypeError(f"no kind: {', '.join(sorted(unknown))}; there are: {known}")
    return text.split(",")


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--faults", type=int, metavar="N", help="how many")
    parser.add_argument("--kinds", type=_kinds, metavar="K,K", help=f"of {', '.join(ALL_KINDS)}")
    parser.add_argument("--runtime", default="local", choices=("local", "ray"), help="where stations run")
    given = parser.parse_args()
    options = options_of(given)
    scale = SCALES[given.runtime, options.quick]
    with ExitStack() as stack:
        strikes, ground = KINDS, list[str]()
        if given.runtime == "ray":
            nodes = stack.enter_context(two_nodes())
            strikes, ground = KINDS | kinds_on(nodes), ["runtime.kind=ray", f"ray.address={nodes.address}"]
        if unknown := set(given.kinds or ()) - strikes.keys():
            parser.error(f"with --runtime {given.runtime} there is no {', '.join(unknown)}")
        chosen = {kind: strikes[kind] for kind in given.kinds or strikes}
        trials, rest = campaign(given.faults or scale.num_faults, scale, chosen, ground)
    sys.exit(report(options, trials, rest))


def campaign(
    num_faults: int, scale: Scale, strikes: Mapping[str, Strike], ground: Sequence[str]
) -> tuple[list[Trial], list[Trial]]:
    """Runs with so many faults, and runs without any."""
    chosen = itertools.cycle(strikes.items())
    trials, rest = list[Trial](), list[Trial]()
    while (left := num_faults - sum(len(one.injected) for one in trials)) > 0 and len(trials) < num_faults:
        if len(rest) < scale.num_calm:
            rest.append(trial(len(rest), [], scale.gap_s, scale.calm_s, ground))
        struck = [next(chosen) for _ in range(min(left, scale.per_run))]
        trials.append(trial(len(trials), struck, scale.gap_s, 0.0, ground))
        count = sum(len(one.injected) for one in trials)
        for what, finding in ((w, f) for w, found in trials[-1].findings.items() for f in found):
            print(f"run {len(trials)}: {what}: {finding}")
        paces = f"{trials[-1].tokens_per_s:.0f} tokens/s, {rest[-1].tokens_per_s:.0f} without faults"
        print(f"run {len(trials)}: {count} of {num_faults}, {trials[-1].wall_s:.0f} s, {paces}", flush=True)
    return trials, rest


def report(options: Options, trials: list[Trial], rest: list[Trial]) -> int:
    """Print and write it; the exit code."""
    injected = [fault for one in trials for fault in one.injected]
    broken = Counter({what: 0 for what in (LOST, DOUBLED, MIXED, TOO_STALE)})
    for one in (*trials, *rest):
        broken.update({what: len(found) for what, found in one.findings.items()})
    wall_s = sum(one.wall_s for one in trials)
    with_faults = sum(one.tokens_per_s * one.wall_s for one in trials) / wall_s
    without = statistics.median(one.tokens_per_s for one in rest)
    ratios = {"injected": float(len(injected)), **{what: float(num) for what, num in broken.items()}}
    ratios |= {
        "runs": float(len(trials)),
        "seconds_per_fault": wall_s / max(1, len(injected)),
        "tokens_per_s_with_faults": with_faults,
        "tokens_per_s_without": without,
        "throughput_with_over_without": with_faults / without,
    }
    for key in ("failed_groups", "regenerated_tokens", "redone_steps"):
        ratios[key] = float(sum(getattr(one, key) for one in trials))
    publish(options, [*rows_of(injected)], ratios)
    return 1 if broken.total() else 0


if __name__ == "__main__":
    main()
