"""Forecasts beside what happened: real runs on this machine, and what the simulator says of each.

Engines decode at a pace, as an accelerator does, or as fast as two cores go; policies, bounds and two shapes
of lengths (`workloads.py`) vary. Of either kind, costs are measured in the journals of a few runs, which
`calibrates` names: a synchronous one, and one in which engines and trainer work at once, with both shapes
where they share cores; all others are predicted. The lengths of answers are given, for they are forced. Real
and predicted tokens a second are of trained answers, from the end of the first training step to that of the
last. With --runs, runs are kept in a folder and used again.

    python benchmarks/validation.py [--quick] [--runs FOLDER] [--json FILE]
"""

from __future__ import annotations

import shutil
import tempfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from contenders import ONE_SLOT, WIDE
from report import Row, make_parser, options_of, publish
from rich.console import Console
from workloads import EXAMPLE, Changes, ForcedLight, ForcedTail, differ, forced

from dora import settings
from dora.cli_simulate import recorded
from dora.runtime import run
from dora.runtime.plan import Plan
from dora.sim.forecast.checking import calibrated
from dora.sim.forecast.measured import Measured, measure

PACE = "30ms"
SHAPES: dict[str, type[Plan]] = {"tail": ForcedTail, "light": ForcedLight}
PAIR: Changes = {"engine.num_engines": 2, "engine.max_rows": 16}
FOUR: Changes = {"engine.num_engines": 4, "engine.max_rows": 8}
DRAIN: Changes = {"orchestrator.batches_per_version": 4}
GOAL = 0.15  # of a prediction's error


@dataclass(frozen=True)
class Trial:
    """One real run."""

    pace: str  # of a decode step; "none": as fast as the machine can
    policy: str
    max_staleness: int
    lengths: str
    num_steps: int
    own: Changes
    calibrates: bool = False

    @property
    def engines(self) -> str:
        slots = ", one slot" if "engine.version_slots" in self.own else ""
        return f"{self.own['engine.num_engines']} x {self.own['engine.max_rows']} rows{slots}"

    @property
    def folder(self) -> str:
        """Whatever differs, so that a run that is kept is never taken for another."""
        said = [*self.settings().items()]
        return f"{self.pace}-{self.policy}-{self.max_staleness}-{zlib.crc32(repr(said).encode()):08x}"

    def settings(self) -> dict[str, object]:
        """Configuration keys and values."""
        paced = {"engine.pace": self.pace, "orchestrator.rush": "false"} if self.pace != "none" else {}
        return {
            "run.steps": self.num_steps,
            "eval.num_prompts": 0,
            **forced(differ, 4),
            "orchestrator.update_policy": self.policy,
            "orchestrator.max_staleness": self.max_staleness,
            **paced,
            **self.own,
        }

    def run(self, out: Path) -> None:
        """Make it."""
        config = settings.read(EXAMPLE, [f"{key}={value}" for key, value in self.settings().items()])
        run.train(config, out, Console(quiet=True), SHAPES[self.lengths])


TRIALS = (
    Trial(PACE, "sync", 0, "tail", 5, PAIR, calibrates=True),
    Trial(PACE, "dora", 2, "light", 18, PAIR, calibrates=True),
    Trial(PACE, "one_step", 1, "tail", 5, PAIR),
    Trial(PACE, "dora", 2, "tail", 10, PAIR),
    Trial(PACE, "dora", 4, "tail", 12, FOUR),
    Trial(PACE, "partial", 2, "tail", 10, PAIR),
    Trial("none", "sync", 0, "tail", 90, WIDE, calibrates=True),
    Trial("none", "dora", 2, "tail", 130, WIDE, calibrates=True),
    Trial("none", "dora", 2, "light", 180, WIDE, calibrates=True),
    Trial("none", "one_step", 1, "light", 160, WIDE),
    Trial("none", "dora", 4, "light", 180, {**WIDE, **ONE_SLOT}),
    Trial("none", "drain", 4, "tail", 130, {**WIDE, **DRAIN}),
    Trial("none", "dora", 1, "tail", 120, {**WIDE, **ONE_SLOT}),
)
QUICK = (
    Trial(PACE, "sync", 0, "light", 4, PAIR, calibrates=True),
    Trial(PACE, "dora", 2, "light", 6, PAIR, calibrates=True),
    Trial(PACE, "one_step", 1, "light", 5, PAIR),
)


def compare(trials: Sequence[Trial], folder: Path) -> list[Row]:
    """Trials of one pace: real, and as costs measured in those that calibrate predict them."""
    runs = [(trial, recorded([folder / trial.folder])) for trial in trials]
    costs = measure([run for trial, own in runs if trial.calibrates for run in own.values()])
    rows: list[Row] = [costs_of(trials[0].pace, costs)]
    for trial, own in runs:
        found = calibrated({}, own, costs)[0]
        error = float(found["error"])
        rows.append(
            {
                "pace": trial.pace,
                "policy": trial.policy,
                "S": trial.max_staleness,
                "lengths": trial.lengths,
                "engines": trial.engines,
                "steps": found["steps"],
                "calibrates": "yes" if trial.calibrates else "no",
                "tokens_per_s": found["tokens/s"],
                "predicted": found["forecast"],
                "error": error,
                "within": "yes" if abs(error) <= GOAL else "no",
            }
        )
    return rows


def costs_of(pace: str, costs: Measured) -> Row:
    """What was measured; times in ms."""
    return {
        "costs_at_pace": pace,
        "step_ms": 1e3 * costs.decode.fixed_s,
        "row_ms": 1e3 * costs.decode.each_s,
        "version_ms": 1e3 * costs.version_s,
        "answer_ms": 1e3 * costs.telling_s,
        "train_ms": 1e3 * costs.train.fixed_s,
        "train_1000_ms": 1e3 * costs.train.each_s,
        "publish_ms": 1e3 * costs.publishing_s,
        "load_ms": 1e3 * costs.loading_s,
        "reward_ms": 1e3 * costs.reward_s,
        "decode_slower": costs.contention.decode,
        "train_slower": costs.contention.train,
    }


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Of the runs that were predicted."""
    errors = [abs(float(row["error"])) for row in rows if row.get("calibrates") == "no"]
    return {
        "predicted": len(errors),
        "predicted_within_15_percent": sum(error <= GOAL for error in errors),
        "mean_error": sum(errors) / len(errors),
        "largest_error": max(errors),
    }


def main() -> None:
    parser = make_parser(str(__doc__))
    parser.add_argument("--runs", type=Path, metavar="FOLDER", help="keep runs here, and use those there")
    given = parser.parse_args()
    options = options_of(given)
    trials = QUICK if options.quick else TRIALS
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.runs or Path(scratch)
        for trial in trials:
            if not ((out := folder / trial.folder) / "summary.json").exists():
                shutil.rmtree(out, ignore_errors=True)  # of a run that was cut off
                trial.run(out)
        paces = dict.fromkeys(trial.pace for trial in trials)
        rows = [row for pace in paces for row in compare([t for t in trials if t.pace == pace], folder)]
    publish(options, rows, summary(rows))


if __name__ == "__main__":
    main()
