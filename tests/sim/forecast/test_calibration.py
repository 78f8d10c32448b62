"""Costs found in a record are those it was made with, and what is forecast of them is what was recorded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from dora.cli import app
from dora.core.actions import Action
from dora.core.events import Event, Resumed
from dora.core.orchestrator import Orchestrator
from dora.core.records import Limits
from dora.errors import InputError
from dora.runtime.journal import Journal
from dora.sim.forecast.bench import Contention
from dora.sim.forecast.calibration import forecast_speed
from dora.sim.forecast.checking import UNCALIBRATED, calibrated, stated
from dora.sim.forecast.fluid import FluidEngine
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.manner import Manner
from dora.sim.forecast.measured import Line, Measured, Points, fitted, integral, measure
from dora.sim.forecast.player import Player
from dora.sim.forecast.recorded import Recorded, read

COSTS = Measured(
    Line(0.009, 0.0004), Line(0.8, 0.05), version_s=0.001, telling_s=0.02, loading_s=0.3, stopping_s=0.05,
    publishing_s=0.2, reward_s=0.05, moving_s=0.01,
)  # fmt: skip
SHARED = replace(COSTS, contention=Contention(0.3, 0.6))


EXAMPLE = Path(__file__).parents[3] / "examples" / "gcd.toml"
Lines = list[tuple[float, Event | Action]]


def recorded(limits: Limits, costs: Measured = COSTS, seed: int = 0) -> Recorded:
    """A run that was never real."""
    return read(limits, played(limits, costs, seed))


def played(limits: Limits, costs: Measured = COSTS, seed: int = 0) -> Lines:
    lines: Lines = []
    engines = [FluidEngine(number, costs, 8) for number in range(3)]
    manner = Manner(
        reward_s=costs.reward_s, telling_s=costs.telling_s, contention=costs.contention, report_s=1.0, slots=2
    )
    lengths = Lengths(800, 120.0, prompt=0, seed=seed)
    sizes = (limits.batch_size, limits.group_size)
    Player(
        Orchestrator(limits), engines, costs, lengths, sizes, manner, lambda *line: lines.append(line)
    ).play()
    return lines


def write(folder: Path, limits: Limits, *more: Event) -> Path:
    """What a run leaves behind, as far as it is read here."""
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "config.toml")
    journal = Journal(folder / "journal.jsonl", limits, "", None)
    for now, record in [*played(limits), *((1e6, event) for event in more)]:
        event, orders = (record, ()) if isinstance(record, Event) else (None, (record,))
        journal.record(now, event, orders)
    journal.close()
    (folder / "metrics.jsonl").write_text(
        '{"step": 0, "timing_s/update_actor": 0.5}\n{"ste', encoding="utf-8"
    )
    return folder


LIMITS = Limits(num_steps=14, batch_size=8, group_size=4, max_staleness=2)
SYNC = replace(LIMITS, max_staleness=0, batches_per_version=1)


def test_costs_are_found_again() -> None:
    found = measure([recorded(LIMITS)])
    assert found.decode.at(6) == pytest.approx(COSTS.decode.at(6), rel=0.05)
    assert found.decode.each_s == pytest.approx(COSTS.decode.each_s, rel=0.3)
    assert found.train.at(4) == pytest.approx(COSTS.train.at(4), rel=0.02)
    assert found.loading_s == pytest.approx(0.3)
    assert found.publishing_s == pytest.approx(0.2)
    assert found.reward_s == pytest.approx(0.05)


def test_two_runs_say_what_engines_and_trainer_do_to_each_other() -> None:
    found = measure([recorded(SYNC, SHARED), recorded(LIMITS, SHARED)])
    assert found.contention.decode == pytest.approx(0.3, abs=0.1)
    assert found.contention.train == pytest.approx(0.6, abs=0.1)
    assert found.train.at(4) == pytest.approx(SHARED.train.at(4), rel=0.1)


def test_where_they_always_work_together_what_each_costs_alone_is_not_guessed() -> None:
    """The cost is as it was."""
    took_s, ones = np.array([2.0, 2.2, 1.8]), np.ones(3)
    (found_s,), slower = fitted([Points(took_s, ones[:, None], ones, ones)], 1.0)
    assert (found_s, slower) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_what_was_measured_at_one_bound_predicts_others(staleness: int) -> None:
    other = recorded(replace(LIMITS, max_staleness=staleness), seed=1)
    assert forecast_speed(other, measure([recorded(LIMITS)])) == pytest.approx(other.tokens_per_s, rel=0.1)


def test_a_run_on_shared_cores_is_predicted_from_others() -> None:
    costs = measure([recorded(SYNC, SHARED), recorded(LIMITS, SHARED)])
    other = recorded(replace(LIMITS, max_staleness=4), SHARED, seed=1)
    assert forecast_speed(other, costs) == pytest.approx(other.tokens_per_s, rel=0.1)
    assert forecast_speed(other, replace(costs, contention=Contention())) > 1.05 * other.tokens_per_s


def test_a_run_that_says_too_little_is_refused() -> None:
    with pytest.raises(InputError, match=r"0 training steps and 0 answers .* at least 3 of each"):
        measure([read(LIMITS, [])])


def test_a_run_too_short_to_have_a_speed_is_refused_by_name() -> None:
    run, short = recorded(LIMITS), recorded(LIMITS)
    del short.trainings[1:]
    with pytest.raises(InputError, match=r"runs/short has 1 training steps; .* leave it out"):
        calibrated({"runs/known": run}, {"runs/short": short})


def test_a_run_that_was_resumed_is_refused(tmp_path: Path) -> None:
    run = write(tmp_path / "run", LIMITS, Resumed(14, (), ()))
    with pytest.raises(InputError, match="run was killed and resumed"):
        app(["simulate", "calibrate", str(run)], standalone_mode=False)


def test_what_would_take_less_than_nothing_takes_nothing() -> None:
    parts = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = Points(np.array([5.0, 4.0, 3.0]), parts, np.zeros(3), np.ones(3))
    (fixed_s, each_s), slower = fitted([falling], 1.0)
    assert (fixed_s, each_s, slower) == pytest.approx((4.0, 0.0, 0.0))


def test_what_changes_now_and_then_is_summed_over_time() -> None:
    rows = integral([(3.0, -2.0), (1.0, 2.0), (2.0, 1.0)])
    assert [rows(at_s) for at_s in (0.0, 1.5, 2.0, 4.0)] == pytest.approx([0.0, 1.0, 2.0, 5.0])


def test_the_error_of_calibration_is_stated() -> None:
    own, other = recorded(LIMITS), recorded(SYNC, seed=1)
    rows = calibrated({"own": own}, {"other": other})
    assert [row["calibrates"] for row in rows] == ["yes", "no"]
    said = stated(rows)
    assert "% of own (trained tokens/s)" in said
    assert "not calibrated on, " in said
    assert "% of other." in said
    assert stated([]) == UNCALIBRATED


def test_a_run_is_measured_from_its_folder_and_the_planner_says_how_far_it_is_off(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, sync = write(tmp_path / "own", LIMITS), write(tmp_path / "sync", SYNC)
    app(f"simulate calibrate {own} --check {sync} --json {tmp_path}/c.json".split(), standalone_mode=False)
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [(row["run"], row["calibrates"]) for row in rows] == [(f"{own}", "yes"), (f"{sync}", "no")]
    assert abs(rows[0]["error"]) < 0.1
    plan = "plan --model qwen2.5-7b --devices 8 --batch 2 --group 2 --played 1 --policies sync"
    app([*plan.split(), "--run", f"{own}"], standalone_mode=False)
    assert f"% of {own}" in capsys.readouterr().out.replace("\n", "")
    (own / "config.toml").unlink()
    with pytest.raises(InputError, match=r"own is not the folder of a run: it has no config.toml"):
        app(f"simulate calibrate {own}".split(), standalone_mode=False)
    with pytest.raises(typer.BadParameter, match="name it with --run"):
        app([*plan.split(), "--check", f"{own}"], standalone_mode=False)
