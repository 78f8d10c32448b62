"""Kill an engine in the middle of a migration, again and again: no request is lost or owned twice.

Whole runs of a few steps, in which requests move all the time. Each kill aims at one moment of the
protocol and at one of the two engines; a new engine joins in its place. Every fact and order is
checked while it happens (a violation ends the benchmark), and the record of every run is audited
and replayed: what that finds is counted, and the exit code is 1 if it is anything. --kills N sets
how many; --quick is 8.
"""

from __future__ import annotations

import itertools
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import psutil
from report import make_parser, options_of, publish

from dora import settings
from dora.core.actions import Action, Migrate
from dora.core.events import EngineLost, Event, Migrated, MigrationFailed
from dora.core.orchestrator import Orchestrator
from dora.observe import audit, replay
from dora.observe.journal import read_journal
from dora.runtime.drive import drive
from dora.runtime.journal import Journal
from dora.runtime.local import LocalHands
from dora.runtime.moving import Move
from dora.runtime.plan import Plan
from dora.sim.checker import Ledger

Aim = tuple[str, str]  # moment, side

MODEL = Path(__file__).parent.parent / "examples" / "gcd-start"
CONFIG = """
[run]
steps = 20
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
max_rows = 3
version_slots = 1
pace = "10ms"
[reward]
function = "dora.rewards.gcd:reward"
[trainer]
batch_size = 2
lr = 1e-4
[runtime]
max_restarts = 0
[orchestrator]
level_running = true
rebalance_interval_s = 0.1
"""
MOMENTS = ("asked", "reserved", "offered", "taken")  # how far the move has come
SIDES = ("source", "destination")
AIMS = [(moment, SIDES[(i + turn) % 2]) for turn in (0, 1) for i, moment in enumerate(MOMENTS)]
MIN_ENGINES = 3  # that have joined, before one is killed
STEP_S = 0.0005  # between two looks at the move aimed at


class Killer:
    """Hands that kill an engine of a move; `aims` says which and when, one after the other."""

    def __init__(self, hands: LocalHands, aims: Sequence[Aim]) -> None:
        self.hands = hands
        self.kills: list[Aim] = []
        self._aims = list(aims)
        self._target: Migrate | None = None

    @property
    def now(self) -> float:
        return self.hands.now

    def perform(self, order: Action) -> None:
        self.hands.perform(order)
        if isinstance(order, Migrate) and self._target is None and self._may_kill():
            self._target = order

    def next_fact(self, until: float | None) -> Event | None:
        while self._target is not None:
            self._strike(self._target)
            soon = self.now + STEP_S
            if (fact := self.hands.next_fact(soon if until is None else min(soon, until))) is not None:
                return fact
            if until is not None and self.now >= until:
                return None
        return self.hands.next_fact(until)

    def _may_kill(self) -> bool:
        return len(self.kills) < len(self._aims) and len(self.hands.fleet.joined) >= MIN_ENGINES

    def _strike(self, order: Migrate) -> None:
        """Kill, if the move is where it is aimed at; a move that was faster gets away."""
        moment, side = self._aims[len(self.kills)]
        moves = [m for m in self.hands.fleet.moves.under_way.values() if m.order is order]
        if not moves:
            self._target = None
            return
        if not self._has_come_to(moves[0], moment):
            return
        engine = getattr(order, side)
        psutil.Process(self.hands.fleet.workers[engine].pid).kill()
        self.hands.fleet.start()
        self.kills.append((moment, side))
        self._target = None

    def _has_come_to(self, move: Move, moment: str) -> bool:
        if moment == "asked":
            return True
        if moment == "reserved":
            return move.is_source_open
        return (self.hands.weights.folder / f"move-{move.id}.{moment}").exists()


def run(folder: Path, seed: int, aims: Sequence[Aim]) -> tuple[list[Aim], Counter[str]]:
    """One run with kills, checked in all ways there are; the kills and what was told of the moves."""
    (folder / "config.toml").write_text(CONFIG.format(model=MODEL.resolve()))
    plan = Plan.make(settings.read(folder / "config.toml", [f"run.seed={seed}"]), folder)
    core, ledger, told = Orchestrator(plan.limits), Ledger(plan.limits), Counter[str]()
    journal = Journal(folder / "journal.jsonl", plan.limits, "", len(plan.dataset))
    hands = LocalHands(plan, notice=lambda sentence: None)
    killer = Killer(hands, aims)

    def record(now: float, event: Event | None, orders: Sequence[Action]) -> None:
        journal.record(now, event, orders)
        if event is not None:
            ledger.hear(event)
            told[type(event).__name__] += 1
        for order in orders:
            ledger.obey(order)

    try:
        hands.wait_until_ready()
        hands.join_all()
        drive(core, killer, record)
    finally:
        hands.close()
        journal.close()
    ledger.close()
    for finding in findings(folder):
        print(f"seed {seed}: {finding}")
        told["findings"] += 1
    return killer.kills, told


def findings(folder: Path) -> list[str]:
    """What audit and replay find in the record of a run: lost requests, two owners, other orders."""
    difference = replay.first_difference(read_journal(folder))
    return [str(found) for found in (*audit.check(folder).findings, difference) if found is not None]


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument("--kills", type=int, metavar="N", help="how many; 100, and 8 with --quick")
    given = parser.parse_args()
    options = options_of(given)
    num_kills = given.kills or (8 if options.quick else 100)
    aims = list(itertools.islice(itertools.cycle(AIMS), num_kills))
    kills: list[Aim] = []
    told: Counter[str] = Counter()
    num_runs = 0
    while len(kills) < num_kills:
        with tempfile.TemporaryDirectory() as folder:
            new, heard = run(Path(folder), num_runs, aims[len(kills) :])
        kills += new
        told += heard
        num_runs += 1
        print(f"run {num_runs}: {len(kills)} of {num_kills} kills, {told['findings']} findings", flush=True)
    counts = Counter(kills)
    rows = [{"moment": moment, "killed": side, "kills": counts[moment, side]} for moment, side in AIMS]
    facts = (Migrated, MigrationFailed, EngineLost)
    ratios = {"runs": float(num_runs), "kills": float(len(kills)), "findings": float(told["findings"])}
    publish(options, rows, ratios | {fact.__name__: float(told[fact.__name__]) for fact in facts})
    sys.exit(1 if told["findings"] else 0)


if __name__ == "__main__":
    main()
