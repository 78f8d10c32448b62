"""Real runs are drawn as forecasts are, and lend them their answers."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from dora.cli import app
from dora.cli_simulate import answers_of
from dora.core.events import Migrated, RequestFinished, Trained
from dora.errors import InputError
from dora.observe.journal import read_journal


@pytest.fixture
def ended_run(good_run: Path, tmp_path: Path) -> Path:
    shutil.copytree(good_run, tmp_path / "run")
    (tmp_path / "run/summary.json").write_text(json.dumps({"tokens_per_s": 1234.5}))
    return tmp_path / "run"


def call(command: str) -> None:
    app(command.split(), standalone_mode=False)


def test_a_timeline_has_every_engine_step_and_move_of_the_run(good_run: Path, tmp_path: Path) -> None:
    call(f"simulate timeline {good_run} {tmp_path / 'lanes.svg'}")
    svg = (tmp_path / "lanes.svg").read_text()
    records = [line.record for line in read_journal(good_run).lines]
    assert svg.count("<title>step ") == sum(isinstance(record, Trained) for record in records)
    assert ("from engine" in svg) == any(isinstance(record, Migrated) for record in records)
    assert "engine 0</text>" in svg


def test_speed_is_drawn_by_policy_and_bound(ended_run: Path, tmp_path: Path) -> None:
    call(f"simulate speed {ended_run} {ended_run} --out {tmp_path / 'speed.svg'}")
    svg = (tmp_path / "speed.svg").read_text()
    assert svg.count("<circle") == 2
    assert re.search(">(dora|drain)</text>", svg)


def test_a_run_that_has_not_ended_has_no_speed(good_run: Path, ended_run: Path, tmp_path: Path) -> None:
    (ended_run / "summary.json").unlink()
    with pytest.raises(InputError, match=r"has not ended: it has no summary\.json"):
        call(f"simulate speed {ended_run} --out {tmp_path / 'speed.svg'}")
    with pytest.raises(InputError, match="none is no folder"):
        call(f"simulate speed {good_run} --out {tmp_path / 'none/speed.svg'}")


def test_a_run_s_answers_are_lengths_to_forecast_with(good_run: Path) -> None:
    finished = [
        line.record for line in read_journal(good_run).lines if isinstance(line.record, RequestFinished)
    ]
    answers = answers_of(good_run)
    assert sorted(answers) == sorted(one.num_tokens for one in finished if not one.request.is_held_out)
    longest, command = (
        max(answers),
        f"plan --model qwen2.5-7b --devices 4 --batch 2 --group 2 --trace {good_run}",
    )
    with pytest.raises(InputError, match=f"longest answer of the trace has {longest} tokens"):
        call(f"{command} --limit {longest - 1}")
