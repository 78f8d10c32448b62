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
from dora.sim.forecast.plan import Question, candidates, estimate
from dora.sim.forecast.shapes import SHAPES

JOB = Job(SHAPES["qwen2.5-7b"], Lengths(16_000, 1500.0, prompt=100), 4, 4)
ASKED = Question(JOB, DEVICES["H800"], 16, 2, ("sync", "one_step", "dora"))


def test_every_layout_it_tries_uses_all_devices_and_keeps_the_bound() -> None:
    found = [setup.layout for setup in candidates(ASKED)]
    assert {layout.num_devices for layout in found} == {16}
    assert {(layout.policy, layout.max_staleness) for layout in found} == {
        ("sync", 0), ("one_step", 1), ("dora", 1), ("dora", 2),
    }  # fmt: skip
    assert len({layout.tensor for layout in found}) > 1


def test_its_formula_is_near_what_is_played() -> None:
    for policy in ("sync", "dora"):
        setup = min(candidates(replace(ASKED, policies=(policy,))), key=estimate)
        assert estimate(setup) == pytest.approx(setup.figures()["step_s"], rel=0.5)


def test_a_job_that_fits_nowhere_is_refused_with_what_it_lacks() -> None:
    with pytest.raises(InputError, match=r"takes 122 GB, and 1 x H800 have 72 GB"):
        next(candidates(replace(ASKED, num_devices=1, policies=("sync",))))
    with pytest.raises(InputError, match="S = -1 must be at least 0"):
        replace(ASKED, max_staleness=-1)


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
    printed = capsys.readouterr().out
    assert printed.count("#") > 40
    assert "If the 99th percentile of answers doubles" in printed
    assert UNCALIBRATED in printed
