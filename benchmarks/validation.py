"""Forecasts of real runs on this machine, beside what was measured.

Engines decode at a fixed pace, as accelerators do, or as fast as two cores allow; policies, bounds and two
shapes of lengths (`workloads.py`) vary. For each pace, costs are fitted to the journals of the runs that
`calibrates` names: a synchronous run, and asynchronous ones in which engines and trainer work at once. All
other runs are predicted. The lengths of answers are forced, and so given to the forecast. Speeds are trained
tokens per second from the end of the first training step to that of the last. --runs keeps runs in a folder,
and uses those that are there.

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
from rich.console import Console
from workloads import EXAMPLE, Changes, ForcedLight, ForcedTail, differ, forced

from dora.cli.simulate import read_runs
from dora.config import load
from dora.planner.calibrate import FittedCosts, fit_costs, forecast_all
from dora.runtime import run
from dora.runtime.run_setup import RunSetup
from report import Row, make_parser, options_of, publish

PACE = "30ms"
SHAPES: dict[str, type[RunSetup]] = {"tail": ForcedTail, "light": ForcedLight}
PAIR: Changes = {"engine.num_engines": 2, "engine.max_num_seqs": 16}
FOUR: Changes = {"engine.num_engines": 4, "engine.max_num_seqs": 8}
DRAIN: Changes = {"orchestrator.batches_per_version": 4}
MAX_ERROR = 0.15  # of a prediction


@dataclass(frozen=True)
class Trial:
    """One real run."""

    pace: str  # of a decode step; "none": as fast as the machine can
    policy: str
    max_staleness: int
    lengths: str
    num_steps: int
    changes: Changes
    calibrates: bool = False

    @property
    def engines(self) -> str:
        slots = ", one slot" if "engine.version_slots" in self.changes else ""
        return f"{self.changes['engine.num_engines']} x {self.changes['engine.max_num_seqs']} rows{slots}"

    @property
    def folder(self) -> str:
        """Unique to the settings, so that a run that is kept is not taken for another."""
        settings = repr([*self.settings().items()])
        return f"{self.pace}-{self.policy}-{self.max_staleness}-{zlib.crc32(settings.encode()):08x}"

    def settings(self) -> dict[str, object]:
        """Configuration keys and values."""
        paced = (
            {"engine.min_step_time": self.pace, "orchestrator.prioritize_stragglers": "false"}
            if self.pace != "none"
            else {}
        )
        return {
            "run.steps": self.num_steps,
            "eval.num_prompts": 0,
            **forced(differ, 4),
            "orchestrator.update_policy": self.policy,
            "orchestrator.max_staleness": self.max_staleness,
            **paced,
            **self.changes,
        }

    def run(self, out: Path) -> None:
        """Run it in this folder."""
        config = load.read_config(EXAMPLE, [f"{key}={value}" for key, value in self.settings().items()])
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
    """Trials of one pace: measured, and forecast with costs fitted to those that calibrate."""
    runs = [(trial, read_runs([folder / trial.folder])) for trial in trials]
    costs = fit_costs([run for trial, own in runs if trial.calibrates for run in own.values()])
    rows: list[Row] = [costs_of(trials[0].pace, costs)]
    for trial, own in runs:
        forecast = forecast_all({}, own, costs)[0]
        rows.append(
            {
                "pace": trial.pace,
                "policy": trial.policy,
                "S": trial.max_staleness,
                "lengths": trial.lengths,
                "engines": trial.engines,
                "steps": forecast.num_steps,
                "calibrates": "yes" if trial.calibrates else "no",
                "tokens_per_s": forecast.measured_tokens_per_s,
                "predicted": forecast.forecast_tokens_per_s,
                "error": forecast.error,
                "within": "yes" if abs(forecast.error) <= MAX_ERROR else "no",
            }
        )
    return rows


def costs_of(pace: str, costs: FittedCosts) -> Row:
    """The fitted costs; times in ms."""
    return {
        "costs_at_pace": pace,
        "step_ms": 1e3 * costs.decode.fixed_s,
        "row_ms": 1e3 * costs.decode.per_unit_s,
        "version_ms": 1e3 * costs.per_version_s,
        "answer_ms": 1e3 * costs.finish_report_s,
        "train_ms": 1e3 * costs.train.fixed_s,
        "train_1000_ms": 1e3 * costs.train.per_unit_s,
        "publish_ms": 1e3 * costs.publish_s,
        "load_ms": 1e3 * costs.load_s,
        "reward_ms": 1e3 * costs.reward_s,
        "decode_slower": costs.contention.decode,
        "train_slower": costs.contention.train,
    }


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Errors of the runs that were predicted."""
    errors = [abs(float(row["error"])) for row in rows if row.get("calibrates") == "no"]
    return {
        "predicted": len(errors),
        "predicted_within_15_percent": sum(error <= MAX_ERROR for error in errors),
        "mean_error": sum(errors) / len(errors),
        "largest_error": max(errors),
    }


def main() -> None:
    parser = make_parser(str(__doc__))
    parser.add_argument(
        "--runs", type=Path, metavar="FOLDER", help="keep runs in this folder, and use those that are there"
    )
    given = parser.parse_args()
    options = options_of(given)
    trials = QUICK if options.quick else TRIALS
    with tempfile.TemporaryDirectory() as scratch:
        folder = given.runs or Path(scratch)
        for trial in trials:
            if not ((out := folder / trial.folder) / "summary.json").exists():
                shutil.rmtree(out, ignore_errors=True)  # of a run that did not end
                trial.run(out)
        paces = dict.fromkeys(trial.pace for trial in trials)
        rows = [row for pace in paces for row in compare([t for t in trials if t.pace == pace], folder)]
    publish(options, rows, summary(rows))


if __name__ == "__main__":
    main()
