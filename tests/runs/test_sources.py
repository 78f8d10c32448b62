"""A run with two datasets: their shares, metrics and rewards, with an engine killed and after a resume."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from tests.runs.conftest import StartRun
from tests.runs.resumable import refusal
from tests.runs.test_resume import tampered
from tests.runtime.running import dora, metrics, query, summary
from tests.runtime.tiny import CONFIG, REWARD, write_task

from dora.core.actions import SkipPrompts
from dora.core.events import Resumed
from dora.journal.reader import read_journal

SOURCES = """
[eval]
num_prompts = 2
greedy = false
[[eval_source]]
name = "sevens"
path = "prompts.jsonl"
[[eval_source]]
name = "threes"
path = "threes.jsonl"
prompt_key = "question"
[[source]]
name = "sevens"
path = "prompts.jsonl"
ratio = 3
[[source]]
name = "threes"
path = "threes.jsonl"
prompt_key = "question"
"""
BY_SOURCE = """
def reward(prompt, completion, source, **row):
    if prompt in ("10:", "11:"):
        return 1.0
    return completion.count("7" if source == "sevens" else "3") / 100
"""


def write_sources(folder: Path, reward: str = BY_SOURCE) -> Path:
    task = write_task(folder, reward)
    rows = [{"question": f"{number}:", "level": number % 2} for number in range(70, 75)]
    (folder / "threes.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    task.write_text(CONFIG.replace('path = "prompts.jsonl"\n', "").partition("[eval]")[0] + SOURCES)
    return task


def skips_by_attempt(out: Path) -> list[int]:
    """Prompts that the curriculum skipped before the resume and after it."""
    attempts = [0]
    for line in read_journal(out).lines:
        attempts += [0] if isinstance(line.record, Resumed) else []
        attempts[-1] += len(line.record.groups) if isinstance(line.record, SkipPrompts) else 0
    return attempts


def test_a_resume_refuses_other_numbers_of_prompts(tmp_path: Path) -> None:
    """Also with as many in all, and fewer held-out ones only."""
    task, out = write_sources(tmp_path), tmp_path / "run"
    (tmp_path / "held_out.jsonl").write_text('{"prompt": "12:"}\n{"prompt": "13:"}\n')
    task.write_text(task.read_text().replace("prompts.jsonl", "held_out.jsonl", 1))
    assert dora("train", task, "--out", out, "--steps", "1", "--set", "trainer.lr_decay=constant").code == 0
    with (
        tampered(tmp_path / "threes.jsonl", '{"question": "74:", "level": 0}\n', ""),
        tampered(tmp_path / "prompts.jsonl", '{"prompt": "16:"}\n', '{"prompt": "16:"}\n{"prompt": "17:"}\n'),
    ):
        assert "sources were (7, 5) and are now (8, 4); restore" in refusal(out, "run.steps=2")
    with tampered(tmp_path / "held_out.jsonl", '{"prompt": "13:"}\n', ""):
        assert "the held-out prompts were 4 and are now 3; restore" in refusal(out, "run.steps=2")
    with tampered(tmp_path / "threes.jsonl", "7", "8"):
        assert "source.threes: " in refusal(out, "run.steps=2")


def test_two_datasets_have_their_shares_and_skip_solved_prompts_after_a_crash_and_a_resume(
    start_run: StartRun, tmp_path: Path
) -> None:
    task = write_sources(tmp_path)
    changes = {"curriculum__easy_threshold": 1.0, "curriculum__skip_epochs": 2}
    run = start_run(task, run__steps=14, trainer__batch_size=4, engine__min_step_time="30ms", **changes)
    run.wait_for_steps(2)
    run.workers()[0].kill()
    run.wait_for_steps(5)
    run.kill_all()
    resumed = dora("train", "--resume", run.out)
    assert resumed.code == 0, resumed.err
    run.audit("--deep", "4")
    names = query(run.out, "select distinct group_id from samples where trained_step is not null")
    groups = [tuple(map(int, name.split("/"))) for (name,) in names]
    counts = Counter("sevens" if row < 7 else "threes" for _, row in groups)
    assert abs(counts["threes"] - len(groups) / 4) <= 5  # of the groups in flight any may be trained first
    of_row = Counter(row for _, row in groups)
    assert max(of_row[0], of_row[1]) < min(of_row[row] for row in range(2, 7))
    skips = skips_by_attempt(run.out)
    assert len(skips) == 2
    assert skips[1] > 0
    assert summary(run.out)["skipped_prompts"] == sum(skips)
    before, after = summary(run.out)["evaluations"]
    assert {before["sevens/pass@1"], after["sevens/pass@1"]} == {1.0}  # "10:" and "11:"
    assert {before["threes/pass@1"], after["threes/pass@1"]} == {0.0}
    assert before["pass@1"] == 0.5
    lines = metrics(run.out)
    assert 0 < lines[-1]["data/num_skipped"] <= sum(skips)
    num_groups = [sum(line.get(f"source/{name}/num_groups", 0) for name in counts) for line in lines]
    assert {*num_groups} == {4}
    assert all("source/threes/reward/mean" in line for line in lines if "source/threes/num_groups" in line)


def test_a_column_that_one_source_lacks_is_named(tmp_path: Path) -> None:
    task = write_sources(tmp_path, REWARD.replace("**row", "level, **row"))
    ended = dora("train", task, "--out", tmp_path / "run")
    assert ended.code == 2
    lacks = f"needs the column 'level', which source.sevens ({tmp_path / 'prompts.jsonl'}) lacks; add it"
    assert lacks in ended.err


def test_a_column_that_a_row_of_a_source_lacks_is_named(tmp_path: Path) -> None:
    task = write_sources(tmp_path, REWARD.replace("**row", "level=None, answer='7', *, hint, **row"))
    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "10:", "hint": "h"}, {"prompt": "11:"}]
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    ended = dora("train", task, "--out", tmp_path / "run")
    assert ended.code == 2
    assert f"needs the column 'hint', which source.sevens: {prompts}, line 2 lacks; add it" in ended.err
