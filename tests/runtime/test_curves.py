"""A run that goes on has every line of its curves once."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runtime.running import metrics
from tests.runtime.test_trackers import scalars

from dora import settings
from dora.config import Config
from dora.runtime.curves import Curves
from dora.runtime.held_out import Evaluation


@pytest.fixture
def config(task: Path) -> Config:
    return settings.read(task, ['metrics.report_to=["tensorboard"]'])


def evaluation(version: int) -> Evaluation:
    return Evaluation(version, num_prompts=2, num_answers=1, is_greedy=True)


def test_what_a_life_told_of_redone_steps_is_cut_off_and_evaluations_are_told_once(
    config: Config, tmp_path: Path
) -> None:
    """Version 4 was judged in the instant of death; 9 is the last one, which is evaluated again."""
    before = Curves(config, tmp_path, pytest.fail)
    before.write_evaluation(evaluation(0), 0, 0.5)
    for step in range(4):
        before.write({"step": step, "x": 0.25 * step})
        if step == 2:
            before.write_evaluation(evaluation(2), 3, 1.5)
    before.write_evaluation(evaluation(9), 4, 9.5)
    before.close_file()
    before.close_trackers()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "half')

    after = Curves(config, tmp_path, pytest.fail, 2, [evaluation(2), evaluation(4)], 7.25)
    after.write({"step": 2, "x": 8.0})
    after.close_file()
    after.close_trackers()
    lines = [(line["step"], line.get("val/version", "step")) for line in metrics(tmp_path)]
    assert lines == [(0, 0), (0, "step"), (1, "step"), (2, 2), (1, 4), (2, "step")]
    made_up = next(line for line in metrics(tmp_path) if line.get("val/version") == 4)
    assert (made_up["t_s"], made_up["val/num_failed"]) == (7.25, 2)
    shown = [*scalars(tmp_path / "tensorboard")]
    assert [(step, value) for step, tag, value in shown if tag == "val/version"] == [(0, 0), (2, 2), (1, 4)]
    assert [(step, value) for step, tag, value in shown if tag == "x"] == [(0, 0), (1, 0.25), (2, 8)]
