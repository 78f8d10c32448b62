"""Costs fitted to a record are those it was made with, and forecasts with them repeat what was recorded."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from dora.cli.main import app
from dora.cli.simulate import read_runs
from dora.core.actions import Action, Admit, Commit, Generate, Load, Migrate, Publish, Score, Train
from dora.core.events import (
    EngineJoined,
    EngineLost,
    EngineRemoved,
    Event,
    GroupScored,
    Loaded,
    LoadFailed,
    Migrated,
    MigrationFailed,
    ProgressReported,
    Published,
    RequestFinished,
    Resumed,
    ScoringFailed,
    StepFailed,
    Trained,
    TrainerReplaced,
)
from dora.core.orchestrator import Orchestrator
from dora.core.types import GroupId, Limits, RequestId
from dora.errors import InputError
from dora.journal.reader import JournalLine
from dora.journal.writer import JournalWriter
from dora.planner.calibrate import (
    FitData,
    FittedCosts,
    LinearCost,
    RecordedLengths,
    RecordedRun,
    TrainingSpan,
    fit,
    fit_costs,
    forecast_all,
    forecast_tokens_per_s,
    integrate,
    read_run,
)
from dora.planner.commands import NOT_CALIBRATED, describe_error
from dora.planner.fluid import FluidEngine
from dora.planner.lengths import LengthDistribution
from dora.planner.simulator import Contention, Simulator, SimulatorOptions

EXAMPLE = Path(__file__).parents[2] / "examples" / "gcd.toml"
COSTS = FittedCosts(
    LinearCost(0.009, 0.0004),
    LinearCost(0.8, 0.05),
    per_version_s=0.001,
    finish_report_s=0.02,
    load_s=0.3,
    load_stop_s=0.05,
    publish_s=0.2,
    reward_s=0.05,
    migration_s=0.01,
)
SHARED_CORES = replace(COSTS, contention=Contention(0.3, 0.6))
LIMITS = Limits(num_steps=14, batch_size=8, group_size=4, max_staleness=2)
SYNC = replace(LIMITS, max_staleness=0, batches_per_version=1)


def recorded_run(limits: Limits, costs: FittedCosts = COSTS, seed: int = 0) -> RecordedRun:
    """The record of a simulated run."""
    return read_run(limits, simulated_lines(limits, costs, seed))


def simulated_lines(
    limits: Limits, costs: FittedCosts = COSTS, seed: int = 0, zero_variance: frozenset[int] = frozenset()
) -> list[JournalLine]:
    """All events and actions of a simulated run."""
    lines: list[JournalLine] = []
    engines = [FluidEngine(number, costs, 8) for number in range(3)]
    options = SimulatorOptions(
        reward_s=costs.reward_s,
        finish_report_s=costs.finish_report_s,
        contention=costs.contention,
        report_interval_s=1.0,
        version_slots=2,
        zero_variance=zero_variance,
    )
    lengths = LengthDistribution(800, 120.0, prompt=0, seed=seed)

    def listen(now: float, record: Event | Action) -> None:
        lines.append(JournalLine(len(lines), now, record))

    Simulator(Orchestrator(limits), engines, costs, lengths, limits, options, listen).run()
    return lines


def write_run(folder: Path, limits: Limits, *more: Event) -> Path:
    """The files of a run that calibration reads."""
    folder.mkdir()
    shutil.copy(EXAMPLE, folder / "config.toml")
    journal = JournalWriter(folder / "journal.jsonl", limits, "", None)
    for line in simulated_lines(limits):
        event, actions = (line.record, ()) if isinstance(line.record, Event) else (None, (line.record,))
        journal.record(line.t_s, event, actions)
    for event in more:
        journal.record(1e6, event, ())
    journal.close()
    lines = '{"step": 0, "timing_s/update_actor": 0.5}', '{"step": 0, "val/version": 1}', '{"ste'
    (folder / "metrics.jsonl").write_text("\n".join(lines), encoding="utf-8")
    return folder


def interrupted_run(*last: Event | Action, update_s: float = 0.0) -> RecordedRun:
    """One trained group, one of which a response is missing, and failures; `last` has not ended."""
    a, b = GroupId(0, 0), GroupId(0, 1)
    (a0, a1), (b0, b1) = ([RequestId(*group, k) for k in range(2)] for group in (a, b))
    held_out = RequestId(-2, 0, 0)
    records: list[tuple[float, list[Event | Action]]] = [
        (0.0, [EngineJoined(0, 8, 2), EngineJoined(1, 8, 2), Load(0, 0), Load(1, 0), Score(b)]),
        (0.5, [Loaded(0, 0, "d", 0.1), LoadFailed(1, 0, "out of memory"), Admit(a, 0, 0, 0)]),
        (0.5, [Generate(0, 0, (a0, a1)), Admit(b, 1, 0, 1), Generate(0, 0, (b0, b1))]),
        (1.0, [Migrate(a1, 0, 1, 0, "kv"), Migrate(b1, 0, 1, 0, "kv"), ScoringFailed(b, "crashed")]),
        (2.0, [Migrated(a1, 0, 1, 12, 100, 0.25, 0.01), MigrationFailed(b1, 0, 1, "lease over")]),
        (2.5, [RequestFinished(0, a0, 0, 10, (), "stop")]),
        (3.5, [RequestFinished(1, a1, 0, 20, (), "stop"), Score(a)]),
        (4.0, [GroupScored(a, (1.0, 0.0)), Commit(a, 0), Train(0, (a,))]),
        (5.0, [StepFailed(0, "out of memory"), Train(0, (a,))]),
        (6.0, [Trained(0), Publish(1)]),
        (6.5, [Published(1, "e"), RequestFinished(0, b0, 0, 30, (), "stop"), Generate(0, 0, (held_out,))]),
        (6.5, [RequestFinished(0, held_out, 0, 1, (), "stop"), *last]),
        (9.0, [ProgressReported(0, ((b1, 40),), 1.0)]),
    ]
    lines = [(t_s, record) for t_s, own in records for record in own]
    limits = replace(LIMITS, num_steps=2, batch_size=1, group_size=2)
    found = [JournalLine(seq, t_s, record) for seq, (t_s, record) in enumerate(lines)]
    return read_run(limits, found, {0: update_s, 1: 3.0})


@pytest.mark.parametrize(
    "last",
    [
        Train(1, (GroupId(0, 1),)),
        Publish(2),
        Load(0, 1),
        Score(GroupId(0, 1)),
        Migrate(RequestId(0, 1, 1), 0, 1, 0, "kv"),
    ],
)
def test_only_what_has_ended_well_is_measured(last: Action) -> None:
    run = interrupted_run(last)
    assert run.trainings == [TrainingSpan(5.0, 6.0, 30)]
    assert run.durations_s == {
        "load": [0.5],
        "load stop": [0.1],
        "migration": [0.25],
        "reward": [0.5],
        "publish": [0.5],
    }
    found = [(str(span.request), span.engine.engine, span.num_new_tokens) for span in run.requests]
    assert found == [("0/0/1", 0, 12), ("0/0/0", 0, 10), ("0/1/0", 0, 30), ("0/0/1", 1, 8)]


def test_a_group_without_all_responses_gets_the_lengths_of_another() -> None:
    assert RecordedLengths(interrupted_run()).draw(0, 2, 1)[:2] == [[10, 20], [10, 20]]


@pytest.mark.parametrize(("update_s", "early_s"), [(0.75, 0.0), (1.5, 0.5)])
def test_compute_time_beyond_the_step_was_spent_before_its_batch_was_complete(
    update_s: float, early_s: float
) -> None:
    (training,) = interrupted_run(update_s=update_s).trainings
    assert (training.work_started_s, training.work_s) == (5.0 - early_s, 1.0 + early_s)


def test_costs_are_recovered() -> None:
    found = fit_costs([recorded_run(LIMITS)])
    assert found.decode.at(6) == pytest.approx(COSTS.decode.at(6), rel=0.05)
    assert found.decode.per_unit_s == pytest.approx(COSTS.decode.per_unit_s, rel=0.3)
    assert found.train.at(4) == pytest.approx(COSTS.train.at(4), rel=0.02)
    assert found.load_s == pytest.approx(0.3)
    assert found.migration_s == pytest.approx(0.01)
    assert found.publish_s == pytest.approx(0.2)
    assert found.reward_s == pytest.approx(0.05)


def test_a_cost_is_the_mean_of_all_runs_or_zero() -> None:
    run = recorded_run(SYNC)
    runs = [replace(run, durations_s=own) for own in ({"load stop": [0.1, 0.2]}, {"load stop": [0.6]}, {})]
    found = fit_costs(runs)
    assert (found.load_stop_s, found.migration_s) == pytest.approx((0.3, 0.0))


def test_two_runs_show_the_contention_of_engines_and_trainer() -> None:
    found = fit_costs([recorded_run(SYNC, SHARED_CORES), recorded_run(LIMITS, SHARED_CORES)])
    assert found.contention.decode == pytest.approx(0.3, abs=0.1)
    assert found.contention.train == pytest.approx(0.6, abs=0.1)
    assert found.train.at(4) == pytest.approx(SHARED_CORES.train.at(4), rel=0.1)


def test_workers_that_always_overlap_show_no_contention() -> None:
    """The cost is as measured, even if the spans with more overlap are longer."""
    durations_s, overlaps, ones = np.array([2.0, 2.2, 1.8]), np.array([0.8, 1.0, 0.6]), np.ones(3)
    (cost_s,), slowdown = fit([FitData(durations_s, ones[:, None], overlaps, ones)], 1.0)
    assert (cost_s, slowdown) == pytest.approx((2.0, 0.0))


@pytest.mark.parametrize("staleness", [0, 1, 4])
def test_costs_of_one_bound_predict_other_bounds(staleness: int) -> None:
    other = recorded_run(replace(LIMITS, max_staleness=staleness), seed=1)
    forecast = forecast_tokens_per_s(other, fit_costs([recorded_run(LIMITS)]))
    assert forecast == pytest.approx(other.tokens_per_s, rel=0.1)


def test_a_run_that_filters_groups_is_predicted() -> None:
    """Engines generate the filtered groups, too, and the trainer does not train them."""
    limits = replace(LIMITS, filter_groups=True)
    run = read_run(limits, simulated_lines(limits, zero_variance=frozenset(range(0, 999, 3))))
    assert sum(group.outcome == "filtered" for group in run.groups.values()) > 50
    assert forecast_tokens_per_s(run, COSTS) == pytest.approx(run.tokens_per_s, rel=0.02)


def test_a_run_on_shared_cores_is_predicted_from_others() -> None:
    costs = fit_costs([recorded_run(SYNC, SHARED_CORES), recorded_run(LIMITS, SHARED_CORES)])
    other = recorded_run(replace(LIMITS, max_staleness=4), SHARED_CORES, seed=1)
    assert forecast_tokens_per_s(other, costs) == pytest.approx(other.tokens_per_s, rel=0.1)
    without_contention = replace(costs, contention=Contention())
    assert forecast_tokens_per_s(other, without_contention) > 1.05 * other.tokens_per_s


def test_a_run_with_too_few_spans_is_refused() -> None:
    with pytest.raises(InputError, match=r"0 training steps and 0 responses .* at least 3 of each"):
        fit_costs([read_run(LIMITS, [])])
    run = recorded_run(LIMITS)
    with pytest.raises(InputError, match=r"2 training steps and [1-9]\d+ responses"):
        fit_costs([replace(run, trainings=run.trainings[:2])])
    with pytest.raises(InputError, match=r"14 training steps and 2 responses"):
        fit_costs([replace(run, requests=[span for span in run.requests if span.is_uninterrupted][:2])])


def test_a_run_too_short_to_have_a_speed_is_refused_by_name() -> None:
    run, short = recorded_run(LIMITS), recorded_run(LIMITS)
    del short.trainings[1:]
    with pytest.raises(InputError, match=r"runs/short has 1 training steps; .* leave out this run"):
        forecast_all({"runs/known": run}, {"runs/short": short})


@pytest.mark.parametrize("event", [Resumed(14, (), ()), TrainerReplaced(13, ((GroupId(0, 0),),))])
def test_a_run_with_redone_steps_is_refused(tmp_path: Path, event: Event) -> None:
    run = write_run(tmp_path / "run", LIMITS, event)
    with pytest.raises(InputError, match="run was resumed"):
        app(["simulate", "calibrate", str(run)], standalone_mode=False)


@pytest.mark.parametrize("event", [EngineLost(0, "crashed"), EngineRemoved(0), EngineJoined(9, 8, 2)])
def test_a_run_whose_engines_changed_is_refused(tmp_path: Path, event: Event) -> None:
    """The forecast would have the lost engine and its replacement at the same time."""
    run = write_run(tmp_path / "run", LIMITS, event)
    with pytest.raises(InputError, match="run lost, removed or added an engine, so its speed"):
        app(["simulate", "calibrate", str(run)], standalone_mode=False)


def test_a_step_keeps_its_update_time_when_an_evaluation_follows(tmp_path: Path) -> None:
    (run,) = read_runs([write_run(tmp_path / "run", LIMITS)]).values()
    assert run.update_s == {0: 0.5}


def test_a_cost_that_would_be_negative_is_zero() -> None:
    units = np.array([[1.0, 1.0], [1.0, 2.0], [1.0, 3.0]])
    falling = FitData(np.array([5.0, 4.0, 3.0]), units, np.zeros(3), np.ones(3))
    (fixed_s, per_unit_s), slowdown = fit([falling], 1.0)
    assert (fixed_s, per_unit_s, slowdown) == pytest.approx((4.0, 0.0, 0.0))


def test_a_quantity_that_changes_in_steps_is_integrated_over_time() -> None:
    rows = integrate([(3.0, -2.0), (1.0, 2.0), (2.0, 1.0)])
    assert [rows(time_s) for time_s in (0.0, 1.5, 2.0, 4.0)] == pytest.approx([0.0, 1.0, 2.0, 5.0])


def test_the_error_of_calibration_is_described() -> None:
    own, other = recorded_run(LIMITS), recorded_run(SYNC, seed=1)
    forecasts = forecast_all({"own": own}, {"other": other})
    assert [forecast.is_fitted for forecast in forecasts] == [True, False]
    description = describe_error(forecasts)
    assert "% of own (trained tokens/s)" in description
    assert "of other runs, " in description
    assert "% of other." in description
    assert describe_error([]) == NOT_CALIBRATED


def test_costs_are_fitted_to_a_run_folder_and_the_planner_prints_their_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own, sync = write_run(tmp_path / "own", LIMITS), write_run(tmp_path / "sync", SYNC)
    app(f"simulate calibrate {own} --check {sync} --json {tmp_path}/c.json".split(), standalone_mode=False)
    rows = json.loads((tmp_path / "c.json").read_text())["rows"]
    assert [(row["run"], row["fitted"]) for row in rows] == [(f"{own}", "yes"), (f"{sync}", "no")]
    assert abs(rows[0]["error"]) < 0.1
    plan = (
        "plan --model qwen2.5-7b --devices 8 --batch-size 2 --group-size 2 --max-simulated 1 --policies sync"
    )
    app([*plan.split(), "--run", f"{own}"], standalone_mode=False)
    assert f"% of {own}" in capsys.readouterr().out.replace("\n", "")
    (own / "config.toml").unlink()
    with pytest.raises(InputError, match=r"own/config.toml cannot be read: .*; restore the file"):
        app(f"simulate calibrate {own}".split(), standalone_mode=False)
    with pytest.raises(typer.BadParameter, match="name it with --run"):
        app([*plan.split(), "--check", f"{own}"], standalone_mode=False)
