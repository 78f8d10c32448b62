"""`dora simulate calibrate`: costs measured in real runs, and forecasts made of them beside what happened.

The runs they were measured in say how well the model can describe them; others, how well it predicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from dora.errors import InputError
from dora.sim.forecast.calibration import forecast_speed
from dora.sim.forecast.compare import Row, check_files, show
from dora.sim.forecast.measured import Measured, measure
from dora.sim.forecast.recorded import Recorded

UNCALIBRATED = (
    "Costs are those of data sheets, not calibrated: docs/paper.md says how far they were off there, and "
    "--run RUN how far the simulator is off a run of yours."
)


def calibrated(
    fitted: Mapping[str, Recorded], others: Mapping[str, Recorded], costs: Measured | None = None
) -> list[Row]:
    """Trained tokens a second of each run, real and forecast; costs are measured in those `fitted`."""
    for name, run in {**fitted, **others}.items():
        if len(run.trainings) < 2:
            raise InputError(
                f"{name} has {len(run.trainings)} training steps; a speed is from the end of the first to "
                "that of the last, so that it takes 2: leave it out, or let it go on"
            )
    costs = costs or measure([*fitted.values()])
    rows: list[Row] = []
    for name, run in {**fitted, **others}.items():
        real, found = run.tokens_per_s, forecast_speed(run, costs)
        row: Row = {"run": name, "calibrates": "yes" if name in fitted else "no", "steps": len(run.trainings)}
        rows.append({**row, "tokens/s": real, "forecast": found, "error": found / real - 1})
    return rows


def stated(rows: Sequence[Row]) -> str:
    """The error of calibration in a sentence or two."""
    if not rows:
        return UNCALIBRATED
    own = [f"{float(row['error']):+.0%} of {row['run']}" for row in rows if row["calibrates"] == "yes"]
    predicted = [f"{float(row['error']):+.0%} of {row['run']}" for row in rows if row["calibrates"] == "no"]
    others = (
        f"of runs that it was not calibrated on, {', '.join(predicted)}"
        if predicted
        else "--check has others"
    )
    return (
        "Costs of devices are those of data sheets. With costs measured in your own run the simulator is off "
        f"by {', '.join(own)} (trained tokens/s); {others}."
    )


def main(fitted: Mapping[str, Recorded], others: Mapping[str, Recorded], path: Path | None) -> int:
    """Print what was measured and how far the forecasts are off, and write it."""
    check_files(path)
    costs = measure([*fitted.values()])
    measured: list[Row] = [
        {"what": "decode step, without rows (ms)", "measured": 1e3 * costs.decode.fixed_s},
        {"what": "... for each row", "measured": 1e3 * costs.decode.each_s},
        {"what": "... for each version but one", "measured": 1e3 * costs.version_s},
        {"what": "... longer while the trainer works (share)", "measured": costs.contention.decode},
        {"what": "answer, beside its steps (ms)", "measured": 1e3 * costs.telling_s},
        {"what": "training step, without tokens (s)", "measured": costs.train.fixed_s},
        {"what": "... for each 1,000 tokens", "measured": costs.train.each_s},
        {"what": "... longer while all engines decode (share)", "measured": costs.contention.train},
        {"what": "publication (s)", "measured": costs.publishing_s},
        {"what": "load (s)", "measured": costs.loading_s},
        {"what": "reward (s)", "measured": costs.reward_s},
        {"what": "move (s)", "measured": costs.moving_s},
    ]
    rows = calibrated(fitted, others, costs)
    show(measured)
    print()
    show(rows)
    if path is not None:
        path.write_text(json.dumps({"measured": measured, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0
