"""The planner: what it tries, how it ranks, and what it refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora.cli import app
from dora.errors import InputError
from dora.sim.forecast.checking import UNCALIBRATED
from dora.sim.forecast.cluster import Job
from dora.sim.forecast.hardware import DEVICES
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.search import Formula, Question, candidates, neighbours, search
from dora.sim.forecast.shapes import SHAPES

JOB = Job(SHAPES["qwen2.5-7b"], Lengths(16_000, 1500.0, prompt=100), 4, 4)
ASKED = Question(JOB, DEVICES["H800"], 16, 2, ("sync", "one_step", "dora"))


def test_every_layout_it_tries_uses_all_devices_and_keeps_the_bound() -> None:
    found = [setup.layout for setup in candidates(ASKED).values()]
    assert {layout.num_devices for layout in found} == {16}
    assert {(layout.policy, layout.max_staleness) for layout in found} == {
        ("sync", 0), ("one_step", 1), ("dora", 1), ("dora", 2),
    }  # fmt: skip
    assert {layout.tensor for layout in found} == {1, 2, 4, 8}
    assert {layout.expert for layout in found} == {1}
    assert len({layout.rows for layout in found if layout.tensor == 4}) > 2


def test_ranks_of_experts_are_searched_where_a_model_has_them() -> None:
    job = replace(JOB, shape=SHAPES["qwen3-30b-a3b"])
    assert {s.layout.expert for s in candidates(replace(ASKED, job=job)).values()} == {1, 2, 4, 8, 16}
    assert {s.layout.expert for s in candidates(replace(ASKED, job=job, expert=4)).values()} == {4}


def test_it_climbs_to_a_plan_without_faster_neighbours_and_plays_none_twice() -> None:
    asked = replace(ASKED, policies=("dora",))
    places = candidates(asked)
    plans = {plan.setup.layout: plan.tokens_per_s for plan in search(asked, 40)}
    best = next(place for place, setup in places.items() if setup.layout == max(plans, key=plans.__getitem__))
    near = {places[place].layout for place in neighbours(best, places)}
    assert 2 < len(near) < len(plans) < 40
    assert near < plans.keys()
    assert len([*search(asked, 3)]) == 3


@pytest.mark.parametrize("policy", ["sync", "one_step", "dora"])
def test_its_formula_is_near_what_is_played(policy: str) -> None:
    found, formula = candidates(replace(ASKED, policies=(policy,))).values(), Formula(JOB)
    setup = min(found, key=formula.step_s)
    assert formula.step_s(setup) == pytest.approx(setup.figures()["step_s"], rel=0.3)


def test_a_job_that_fits_nowhere_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(InputError, match=r"takes 122 GB, and 1 x H800 have 72 GB"):
        candidates(replace(ASKED, num_devices=1, policies=("sync",)))
    with pytest.raises(InputError, match="S = -1 must be at least 0"):
        replace(ASKED, max_staleness=-1)
    with pytest.raises(InputError, match=r"policies one_step: none goes with S = 0; the least .* is 1"):
        replace(ASKED, max_staleness=0, policies=("one_step",))
    with pytest.raises(InputError, match=r"policies laminar keep no bound, so no plan of theirs .* S = 2"):
        replace(ASKED, policies=("dora", "laminar"))


@pytest.mark.parametrize(
    "lengths",
    [
        Lengths(10**6, 2000.0, tail=1.0),
        Lengths(10**6, 2000.0, "pareto", 3.0),
        Lengths(10**6, family="trace", trace=tuple(range(100, 5000))),
    ],
)
def test_a_heavier_tail_doubles_the_99th_percentile_and_keeps_the_median(lengths: Lengths) -> None:
    before, after = (np.quantile(one.sample, (0.5, 0.99)) for one in (lengths, lengths.heavier()))
    assert after[0] == pytest.approx(before[0], rel=0.05)
    assert after[1] == pytest.approx(2 * before[1], rel=0.15)


def test_the_command_prints_plans_bars_and_what_a_heavier_tail_does(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    command = f"plan --model qwen2.5-7b --devices 8 --batch 2 --group 2 --played 3 --json {path}"
    app(command.split(), standalone_mode=False)
    rows = json.loads(path.read_text())["rows"]
    assert [row["tokens/s"] for row in rows] == sorted((row["tokens/s"] for row in rows), reverse=True)
    printed = capsys.readouterr()
    assert printed.out.count("█") > 40
    assert "If the 99th percentile of answers doubles" in printed.out
    assert UNCALIBRATED in printed.out
    assert printed.err.startswith("best so far: ")
