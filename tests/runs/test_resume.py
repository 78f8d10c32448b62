"""A run whose processes all die at once goes on: nothing is lost, doubled or too old in all its lives."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console
from tests.runtime.running import CommandResult, Run, dora, journal, metrics, summary, wait_until_gone
from tests.runtime.tiny import MODEL, PROMPTS, write_task

from dora.config import load
from dora.config.toml import to_toml
from dora.core.codec import SNAPSHOT_SCHEMA
from dora.errors import InputError
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from dora.runtime.recovery.resume import CHANGEABLE_KEYS, read_recorded_journal, resumed_config
from dora.runtime.run import resume

STEPS, BATCH_SIZE = 6, 2
CHANGES: dict[str, object] = {"run__steps": STEPS, "trainer__save_freq": 2, "trainer__keep_last": 1}


class Life:
    """A run of the tiny task that can be killed as a whole, and gone on with."""

    def __init__(self, task: Path, out: Path) -> None:
        self.task, self.out = task, out
        self.runs: list[Run] = []

    def begin(self, **changes: object) -> Run:
        self.runs.append(Run(self.task, self.out, **{**CHANGES, **changes}))  # type: ignore[arg-type]
        return self.runs[-1]

    def go_on(self, **changes: object) -> Run:
        self.runs.append(Run(None, self.out, **changes))  # type: ignore[arg-type]
        return self.runs[-1]

    def kill_after(self, run: Run, num_lines: int) -> None:
        """Kill driver and workers in the same instant, once so many more facts and orders are recorded."""
        begun = len(journal(self.out))
        run.wait_until(lambda: len(journal(self.out)) >= begun + num_lines, f"{num_lines} more lines")
        workers = run.workers()
        os.killpg(run.pid, signal.SIGKILL)
        run.end()
        assert wait_until_gone(workers, 2.0) == []

    def samples(self) -> dict[tuple[str, int], tuple[object, ...]]:
        """(group, sibling) -> tokens, reward and end."""
        with sqlite3.connect(self.out / "samples.sqlite") as db:
            rows = db.execute(
                "select group_id, sibling, token_ids, reward, version, state, trained_step from samples"
            )
            return {(group, sibling): tuple(rest) for group, sibling, *rest in rows}


@pytest.fixture
def life(task: Path, tmp_path: Path) -> Iterator[Life]:
    made = Life(task, tmp_path / "run")
    yield made
    for run in made.runs:
        run.kill_all()


def check_union(out: Path, ended: CommandResult) -> None:
    """All guarantees over all lives, and the end reached."""
    assert (ended.code, ended.err) == (0, ""), ended
    audit, replay = dora("audit", out), dora("replay", out)
    assert (audit.code, replay.code) == (0, 0), audit.out + replay.out
    num = STEPS * BATCH_SIZE
    assert f"{num} groups admitted = {num} trained + 0 filtered + 0 failed + 0 pending" in audit.out
    s = summary(out)
    assert (s["steps"], s["trained_groups"], s["pending_groups"]) == (STEPS, num, 0)
    assert s["trained_samples"] == 2 * num == sum(s["staleness_histogram"].values())
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    assert [line["step"] for line in metrics(out)] == list(range(STEPS))
    assert (out / "checkpoints" / f"step-{STEPS}" / "model.safetensors").is_file()


def test_a_run_that_was_killed_three_times_comes_to_its_end(life: Life) -> None:
    """With half a line in its journal once, and half a checkpoint another time."""
    life.kill_after(life.begin(), 40)
    scored = {key: row for key, row in life.samples().items() if row[1] is not None}
    path = life.out / "journal.jsonl"
    *whole, last = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole) + last[:9])

    run = life.go_on(trainer__keep_last=3)
    run.wait_until((life.out / "checkpoints" / "step-4").is_dir, "two checkpoints")
    life.kill_after(run, 1)
    checkpoints = life.out / "checkpoints"
    (checkpoints / "step-4" / "optimizer.pt").write_bytes(b"half")
    (checkpoints / "step-5.draft").mkdir()

    core = checkpoints / "step-2" / "core.json"
    with tampered(core, '"next_index": ', '"next_index":1'):
        assert "step-2 is not a checkpoint of this run's record" in refusal(life.out)
    by_an_older_version = f'"schema": {SNAPSHOT_SCHEMA}', f'"schema": {SNAPSHOT_SCHEMA - 1}'
    core.write_text(core.read_text().replace(*by_an_older_version))
    with other_weights(life.task.parent / "start"):  # a reference, or adapters, would be to them
        assert "start' does not hold the weights that the run began with" in refusal(life.out)
    run = life.go_on()
    life.kill_after(run, 20)
    assert f"resumed at {checkpoints / 'step-2'}: 2 trained steps kept" in run.end().out
    check_union(life.out, life.go_on().end())
    after = life.samples()
    assert {key: after[key][:3] for key in scored} == {key: row[:3] for key, row in scored.items()}
    assert {row[3] for row in after.values()} == {"trained"}
    assert sorted(found.name for found in checkpoints.iterdir()) == ["step-6"]
    check_redone(life.out)


def check_redone(out: Path) -> None:
    """Steps that were redone are counted, and gave the same weights."""
    lines = journal(out)
    redone = [len(line["redone"]) for line in lines if line["kind"] == "resumed"]
    assert (len(redone), sum(redone)) == (summary(out)["attempts"] - 1, summary(out)["redone_steps"])
    assert max(redone) > 0
    digests: dict[int, set[str]] = {}
    for line in lines:
        if line["kind"] == "published":
            digests.setdefault(line["version"], set()).add(line["digest"])
    assert [len(found) for found in digests.values()] == [1] * (STEPS + 1)


def test_requests_that_begin_again_get_the_tokens_they_would_have_got(life: Life, task: Path) -> None:
    """With one version nothing else can change them. The trainer is told of what was committed."""
    one = {"run__steps": 1, "trainer__batch_size": 6, "orchestrator__max_staleness": 0}
    run = life.begin(**one, trainer__micro_batch_tokens=32, engine__max_num_seqs=2)
    run.wait_until(lambda: "commit" in [line["kind"] for line in journal(life.out)], "a group in the batch")
    life.kill_after(run, 0)
    assert life.go_on().end().code == 0
    assert metrics(life.out)[0]["actor/num_tokens_early"] > 0
    calm = Life(task, life.out.with_name("calm"))
    assert calm.begin(**one).end().code == 0
    assert {k: row[0] for k, row in life.samples().items()} == {
        k: row[0] for k, row in calm.samples().items()
    }


def test_a_run_stopped_by_ctrl_c_goes_on_where_it_was(life: Life) -> None:
    run = life.begin(trainer__save_freq=0)
    run.wait_for_steps(2)
    os.kill(run.pid, signal.SIGINT)
    assert run.end().code == 130
    assert f"dora train --resume {life.out} goes on" in run.end().out
    stopped = summary(life.out)
    ended = life.go_on(engine__num_engines=1).end()
    assert f"{stopped['steps']} trained steps kept, 0 redone" in ended.out
    check_union(life.out, ended)
    assert summary(life.out)["redone_steps"] == 0


def test_a_run_that_died_in_its_last_moments_is_finished(life: Life) -> None:
    """After the last fact, before the last checkpoint."""
    assert life.begin(trainer__save_freq=0).end().code == 0
    shutil.rmtree(life.out / "checkpoints")
    (life.out / "summary.json").unlink()
    check_union(life.out, life.go_on().end())
    again = dora("train", "--resume", life.out)
    assert again.code == 2
    assert f"has finished all its {STEPS} steps" in again.err
    with tampered(life.out / "summary.json", '"stopped": ""', '"stopped": "Ctrl-C"'):
        assert read_recorded_journal(life.out, len(PROMPTS)).lines, "the evaluation after training is due"


def test_a_run_that_died_before_it_began_begins(life: Life) -> None:
    run = life.begin()
    run.wait_until((life.out / "journal.jsonl").is_file, "the journal")
    os.killpg(run.pid, signal.SIGKILL)
    run.end()
    check_union(life.out, life.go_on().end())
    assert summary(life.out)["attempts"] == 1


def refusal(folder: Path, *overrides: str) -> str:
    """Why a run may not go on; nothing is started."""
    with pytest.raises(InputError) as refused:
        resume(folder, overrides, Console())
    return str(refused.value)


def test_what_cannot_go_on_is_refused_in_words(life: Life, tmp_path: Path) -> None:
    run = life.begin(run__steps=1000, trainer__save_freq=0)
    run.wait_for_steps(1)
    assert "this run is running; stop it first" in refusal(life.out)
    life.kill_after(run, 1)
    with (life.out / "journal.jsonl").open("a") as file:
        file.write('{"half a line')
    before = [(life.out / name).read_bytes() for name in ("journal.jsonl", "metrics.jsonl")], life.samples()
    assert "is not the folder of a run" in refusal(tmp_path)
    assert "trainer.lr was 0.01 and cannot become 0.5" in refusal(life.out, "trainer.lr=0.5")
    assert "run.steps was 1000 and cannot become 9" in refusal(life.out, "run.steps=9")
    with tampered(life.out / "config.toml", "lr = 0.01", "lr = 0.02"):
        assert "is not what the run began with" in refusal(life.out)
    with tampered(life.task.parent / "prompts.jsonl", '"1', '"2'):
        assert "is not what it was when the run began" in refusal(life.out)
    with tampered(life.task.parent / "prompts.jsonl", '{"prompt": "10:"}\n', ""):
        assert "the dataset had 7 prompts and now has 6" in refusal(life.out)
    with tampered(life.out / "journal.jsonl", '"kind": "admit"', '"kind": "commit"'):
        assert "neither an event nor an action" in refusal(life.out)
    with tampered(life.out / "journal.jsonl", '"deadline": 2', '"deadline": 3'):
        assert "does not order what is recorded from line" in refusal(life.out)
    (life.out / "tensorboard").write_text("no folder")
    assert "tensorboard cannot start" in refusal(life.out, 'metrics.report_to=["tensorboard"]')
    after = [(life.out / name).read_bytes() for name in ("journal.jsonl", "metrics.jsonl")], life.samples()
    assert after == before
    with sqlite3.connect(life.out / "samples.sqlite") as db:
        db.execute("delete from samples where trained_step = 0 and sibling = 1")
    assert "lacks answers of group" in refusal(life.out)


def test_a_run_goes_on_when_its_cluster_is_gone(tmp_path: Path) -> None:
    changes = ["runtime.kind=ray", "ray.address=gone:6379", "ray.engine_cpus=2"]
    written = to_toml(load.read_config(write_task(tmp_path), changes))
    (tmp_path / "config.toml").write_text(written)
    here = resumed_config(tmp_path, ["runtime.kind=local"])
    assert (here.runtime.kind, here.ray.address) == ("local", None)
    there = resumed_config(tmp_path, ["ray.address=other:6379"])
    assert (there.ray.address, there.ray.engine_cpus) == ("other:6379", 2)
    with pytest.raises(InputError, match=r"ray\.address has no effect without runtime\.kind = ray"):
        resumed_config(tmp_path, ["runtime.kind=local", "ray.address=other:6379"])


def test_the_page_names_all_that_may_change() -> None:
    page = (Path(__file__).parents[2] / "docs" / "resume.md").read_text()
    named = [
        pattern if pattern.endswith(".*") else pattern.replace("*", "NAME") for pattern in CHANGEABLE_KEYS
    ]
    assert [pattern for pattern in named if f"`{pattern}`" not in page] == []


@contextlib.contextmanager
def other_weights(folder: Path) -> Iterator[None]:
    """A model of the same shapes in a folder, for a while."""
    path = folder / "model.safetensors"
    before = path.read_bytes()
    save_pretrained(folder, MODEL, initial_weights(MODEL, seed=99))
    try:
        yield
    finally:
        path.write_bytes(before)


@contextlib.contextmanager
def tampered(path: Path, old: str, new: str) -> Iterator[None]:
    """A file with other words in it, for a while."""
    before = path.read_text()
    assert old in before
    path.write_text(before.replace(old, new))
    yield
    path.write_text(before)
