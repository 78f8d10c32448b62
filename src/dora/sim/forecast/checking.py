"""`dora simulate calibrate`: a run's measured costs, and forecasts made of them beside what really happened.

The run itself says how well the model can describe it; others, how well it predicts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from dora.sim.forecast.calibration import Recorded, forecast_speed
from dora.sim.forecast.compare import Row, show


def rows_of(runs: Mapping[str, Recorded]) -> list[Row]:
    """Trained tokens a second of each run, real and forecast with the first one's costs."""
    costs = next(iter(runs.values())).measured
    rows: list[Row] = []
    for name, run in runs.items():
        real, found = run.tokens_per_s, forecast_speed(run, costs)
        row: Row = {"run": name, "steps": len(run.steps), "tokens/s": real, "forecast": found}
        rows.append({**row, "error": found / real - 1})
    return rows


def main(runs: Mapping[str, Recorded], path: Path | None) -> int:
    """Print what was measured and how far the forecasts are off, and write it."""
    costs = next(iter(runs.values())).measured
    measured: list[Row] = [
        {"what": "decode step, without rows (ms)", "measured": 1e3 * costs.decode.fixed_s},
        {"what": "... for each row", "measured": 1e3 * costs.decode.each_s},
        {"what": "training step, without tokens (s)", "measured": costs.train.fixed_s},
        {"what": "... for each 1,000 tokens", "measured": costs.train.each_s},
        {"what": "publication (s)", "measured": costs.publishing_s},
        {"what": "load (s)", "measured": costs.loading_s},
        {"what": "reward (s)", "measured": costs.reward_s},
        {"what": "move (s)", "measured": costs.moving_s},
    ]
    show(measured)
    print()
    rows = rows_of(runs)
    show(rows)
    if path is not None:
        path.write_text(json.dumps({"measured": measured, "rows": rows}, indent=2) + "\n", encoding="utf-8")
    return 0
