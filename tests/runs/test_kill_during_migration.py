"""An engine is killed during a migration: no request is lost or owned twice, and the run continues."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runtime.running import environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "kill_during_migration.py"


@pytest.mark.timeout(300)  # seconds; about 30 on idle cores
def test_a_kill_at_each_point_of_a_migration_loses_nothing(tmp_path: Path) -> None:
    """A short run of the benchmark, which fails if an event, an action or a sample is wrong."""
    command = [sys.executable, str(SCRIPT), "--kills", "4", "--json", str(tmp_path / "figures.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, env=environment())
    assert done.returncode == 0, done.stderr
    figures = json.loads((tmp_path / "figures.json").read_text())
    killed = {(row["moment"], row["killed"]) for row in figures["rows"] if row["kills"]}
    assert killed == {
        ("requested", "source"),
        ("reserved", "destination"),
        ("exported", "source"),
        ("imported", "destination"),
    }
    assert figures["ratios"]["kills"] == 4
    assert figures["ratios"]["findings"] == 0
    assert figures["ratios"]["MigrationFailed"] >= 2
