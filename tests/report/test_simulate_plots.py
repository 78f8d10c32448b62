"""`dora simulate` draws real runs as it draws forecasts, and uses their response lengths."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from dora.cli.main import app
from dora.cli.simulate import _read_run_lengths
from dora.core.events import Migrated, RequestFinished, Trained
from dora.errors import InputError
from dora.journal.reader import read_journal


@pytest.fixture
def run_with_summary(finished_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished_run, tmp_path / "run")
    (tmp_path / "run/summary.json").write_text(json.dumps({"tokens_per_s": 1234.5}))
    return tmp_path / "run"


def call(command: str) -> None:
    app(command.split(), standalone_mode=False)


def test_a_timeline_has_every_engine_step_and_migration_of_the_run(
    finished_run: Path, tmp_path: Path
) -> None:
    call(f"simulate timeline {finished_run} {tmp_path / 'lanes.svg'}")
    svg = (tmp_path / "lanes.svg").read_text()
    records = [line.record for line in read_journal(finished_run).lines]
    assert svg.count("<title>step ") == sum(isinstance(record, Trained) for record in records)
    assert ("from engine" in svg) == any(isinstance(record, Migrated) for record in records)
    assert "engine 0</text>" in svg


def test_throughput_is_drawn_by_policy_and_bound(run_with_summary: Path, tmp_path: Path) -> None:
    call(f"simulate speed {run_with_summary} {run_with_summary} --out {tmp_path / 'speed.svg'}")
    svg = (tmp_path / "speed.svg").read_text()
    assert svg.count("<circle") == 2
    assert re.search(">(dora|drain)</text>", svg)


def test_an_unfinished_run_has_no_throughput(
    finished_run: Path, run_with_summary: Path, tmp_path: Path
) -> None:
    (run_with_summary / "summary.json").unlink()
    with pytest.raises(InputError, match=r"has not finished: it has no summary\.json"):
        call(f"simulate speed {run_with_summary} --out {tmp_path / 'speed.svg'}")
    with pytest.raises(InputError, match="none is not a folder"):
        call(f"simulate speed {finished_run} --out {tmp_path / 'none/speed.svg'}")


def test_response_lengths_of_a_run_can_be_simulated(finished_run: Path) -> None:
    finished = [
        line.record for line in read_journal(finished_run).lines if isinstance(line.record, RequestFinished)
    ]
    lengths = _read_run_lengths(finished_run)
    assert sorted(lengths) == sorted(one.num_tokens for one in finished if not one.request.is_held_out)
    longest, command = (
        max(lengths),
        f"plan --model qwen2.5-7b --devices 4 --batch-size 2 --group-size 2 --trace {finished_run}",
    )
    with pytest.raises(InputError, match=f"longest response of the trace has {longest} tokens"):
        call(f"{command} --limit {longest - 1}")
