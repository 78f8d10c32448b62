"""Kill an engine in the middle of a migration, many times: no request is lost or owned by two engines.

Runs of a few steps migrate requests all the time. Each kill aims at one moment of the protocol and at one of
the two engines. A new engine replaces the killed one. A checker verifies every event and action during the
run (a violation ends the benchmark). Afterwards the journal of every run is audited and replayed. The exit
code is 1 if that has findings. --kills N sets the number of kills; --quick is 8.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil

from dora.audit import audit
from dora.config import load
from dora.core.actions import Action, Migrate
from dora.core.events import EngineLost, Event, Migrated, MigrationFailed
from dora.core.orchestrator import Orchestrator
from dora.journal import replay
from dora.journal.reader import read_journal
from dora.journal.writer import JournalWriter
from dora.runtime.executor import ProcessExecutor
from dora.runtime.main_loop import run_main_loop
from dora.runtime.rollout.migration import MigrationInProgress
from dora.runtime.run_setup import RunSetup
from dora.sim.checker import Checker
from report import make_parser, options_of, publish

Aim = tuple[str, str]  # moment, side

MODEL = Path(__file__).parent.parent / "examples" / "gcd-start"
CONFIG = """
[model]
path = "{model}"
[data]
path = "gcd"
max_prompt_length = 8
[sampling]
group_size = 4
max_response_length = 100
[engine]
kernels = "eager"
num_engines = 4
max_num_seqs = 3
version_slots = 1
min_step_time = "10ms"
[reward]
function = "dora.rewards.gcd:reward"
[trainer]
batch_size = 2
lr = 1e-4
[runtime]
max_restarts = 0
[orchestrator]
balance_running = true
rebalance_interval_s = 0.1
"""
MOMENTS = ("requested", "reserved", "exported", "imported")  # how far the migration has come
SIDES = ("source", "destination")
AIMS = [(moment, SIDES[(i + turn) % 2]) for turn in (0, 1) for i, moment in enumerate(MOMENTS)]
MIN_ENGINES = 3  # that must have joined before one is killed
POLL_INTERVAL_S = 0.0005  # between two checks of the migration aimed at


class KillingExecutor:
    """An executor that also kills engines of migrations at the moments and sides of `aims`, in order."""

    def __init__(self, executor: ProcessExecutor, aims: Sequence[Aim]) -> None:
        self.executor = executor
        self.kills: list[Aim] = []
        self._aims = list(aims)
        self._target: Migrate | None = None

    @property
    def now(self) -> float:
        return self.executor.now

    def execute(self, action: Action) -> None:
        self.executor.execute(action)
        if isinstance(action, Migrate) and self._target is None and self._may_kill():
            self._target = action

    def next_event(self, until: float | None) -> Event | None:
        while self._target is not None:
            self._try_to_kill(self._target)
            soon = self.now + POLL_INTERVAL_S
            if (event := self.executor.next_event(soon if until is None else min(soon, until))) is not None:
                return event
            if until is not None and self.now >= until:
                return None
        return self.executor.next_event(until)

    def _may_kill(self) -> bool:
        return len(self.kills) < len(self._aims) and len(self.executor.engine_pool.joined) >= MIN_ENGINES

    def _try_to_kill(self, action: Migrate) -> None:
        """Kill if the migration has come to the moment. A migration that has ended is no target any more."""
        moment, side = self._aims[len(self.kills)]
        migrations = [
            m for m in self.executor.engine_pool.migrations.in_progress.values() if m.action is action
        ]
        if not migrations:
            self._target = None
            return
        if not self._has_reached(migrations[0], moment):
            return
        engine = getattr(action, side)
        psutil.Process(self.executor.engine_pool.workers[engine].process.pid).kill()
        self.executor.engine_pool.start()
        self.kills.append((moment, side))
        self._target = None

    def _has_reached(self, migration: MigrationInProgress, moment: str) -> bool:
        state = self.executor.engine_pool.migrations.state_of(migration)
        return moment == "requested" or state.name.lower() == moment


def run(folder: Path, seed: int, aims: Sequence[Aim]) -> tuple[list[Aim], Counter[str]]:
    """One checked run. Returns its kills, and the number of events by type and of findings."""
    (folder / "config.toml").write_text(CONFIG.format(model=MODEL.resolve()))
    changes = [f"run.seed={seed}", f"run.steps={min(20, 4 + 2 * len(aims))}"]
    setup = RunSetup.make(load.read_config(folder / "config.toml", changes), folder)
    orchestrator, counts = Orchestrator(setup.limits), Counter[str]()
    checker = Checker(setup.limits, len(setup.dataset))
    journal = JournalWriter(folder / "journal.jsonl", setup.limits, "", len(setup.dataset))
    executor = ProcessExecutor(setup, notice=lambda message: None)
    killer = KillingExecutor(executor, aims)

    def record(now: float, event: Event | None, actions: Sequence[Action]) -> None:
        journal.record(now, event, actions)
        if event is not None:
            checker.observe(event)
            counts[type(event).__name__] += 1
        for action in actions:
            checker.check(action)

    try:
        while executor.not_started():
            executor.poll()
        executor.begin_clock()
        executor.join_all()
        run_main_loop(orchestrator, killer, record)
    finally:
        executor.close()
        journal.close()
    checker.finish()
    for finding in findings(folder):
        print(f"seed {seed}: {finding}")
        counts["findings"] += 1
    return killer.kills, counts


def findings(folder: Path) -> list[str]:
    """What audit and replay find in the journal of a run: lost requests, two owners, different actions."""
    difference = replay.first_difference(read_journal(folder))
    return [str(found) for found in (*audit.check(folder).findings, difference) if found is not None]


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument(
        "--kills", type=int, metavar="N", help="number of kills (default: 100; 8 with --quick)"
    )
    given = parser.parse_args()
    options = options_of(given)
    num_kills = given.kills or (8 if options.quick else 100)
    aims = list(itertools.islice(itertools.cycle(AIMS), num_kills))
    kills: list[Aim] = []
    counts: Counter[str] = Counter()
    num_runs = 0
    while len(kills) < num_kills:
        with tempfile.TemporaryDirectory() as folder:
            new, new_counts = run(Path(folder), num_runs, aims[len(kills) :])
        kills += new
        counts += new_counts
        num_runs += 1
        progress = f"{len(kills)} of {num_kills} kills, {counts['findings']} findings"
        print(f"run {num_runs}: {progress}", flush=True)
    kills_by_aim = Counter(kills)
    rows = [{"moment": moment, "killed": side, "kills": kills_by_aim[moment, side]} for moment, side in AIMS]
    event_types = (Migrated, MigrationFailed, EngineLost)
    ratios = {"runs": float(num_runs), "kills": float(len(kills)), "findings": float(counts["findings"])}
    publish(options, rows, ratios | {kind.__name__: float(counts[kind.__name__]) for kind in event_types})
    sys.exit(1 if counts["findings"] else 0)


if __name__ == "__main__":
    main()
