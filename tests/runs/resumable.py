"""A run of the tiny task that a test kills as a whole and resumes."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.journal.recorded_runs import write_chained
from tests.runtime.running import CommandResult, Run, dora, journal, metrics, query, summary
from tests.runtime.tiny import write_task

from dora.errors import InputError
from dora.journal.writer import file_digest
from dora.runtime.run import resume
from dora.trainer.checkpoint_folders import MANIFEST, write_manifest

STEPS, BATCH_SIZE = 6, 2
# A busy machine, too, sees what a run does in seconds.
SLOW: dict[str, Any] = {"engine__min_step_time": "100ms"}
QUICK: dict[str, Any] = {"engine__min_step_time": "10ms"}
CHANGES: dict[str, object] = {"run__steps": STEPS, "trainer__save_freq": 2, "trainer__keep_last": 1}


# To open the FIFO waits for a writer, and there is none.
HELD_REWARD = """
import itertools, os

calls = itertools.count()

def reward(prompt, completion, **row):
    if next(calls) >= {num_scored} and os.path.exists({fifo!r}):
        open({fifo!r}).close()
    return completion.count("7") + len(set(completion)) / 100
"""


def write_held_task(folder: Path, num_scored: int) -> tuple[Path, Path]:
    """The tiny task with a reward function that scores so many samples and no more while a FIFO exists.

    So a run goes no further, however long a test takes to kill it. Returns the configuration and the FIFO.
    """
    fifo = folder / "fifo"
    os.mkfifo(fifo)
    task = write_task(folder, reward=HELD_REWARD.format(num_scored=num_scored, fifo=str(fifo)))
    task.write_text(task.read_text().replace("[reward]\n", "[reward]\ntimeout_s = 600\n"))
    return task, fifo


class ResumableRun:
    """A run of the tiny task and its resumptions, in one folder."""

    def __init__(self, task: Path, out: Path) -> None:
        self.task, self.out = task, out
        self.runs: list[Run] = []

    def start(self, **changes: object) -> Run:
        self.runs.append(Run(self.task, self.out, **{**CHANGES, **changes}))  # type: ignore[arg-type]
        return self.runs[-1]

    def resume(self, **changes: object) -> Run:
        """Resume the run, at the speed of the tiny task if it was `SLOW` before."""
        self.runs.append(Run(None, self.out, **{**QUICK, **changes}))
        return self.runs[-1]

    def kill_after(self, run: Run, num_lines: int) -> None:
        """Kill the driver and its workers at once, after so many more lines of the journal."""
        num_before = len(journal(self.out))
        run.wait_until(lambda: len(journal(self.out)) >= num_before + num_lines, f"{num_lines} more lines")
        run.kill()

    def kill_all(self) -> None:
        for run in self.runs:
            run.kill_all()

    def samples(self) -> dict[tuple[str, int], tuple[object, ...]]:
        """(group, sibling) -> tokens, reward, version, state and training step."""
        columns = "group_id, sibling, token_ids, reward, version, state, trained_step"
        rows = query(self.out, f"select {columns} from samples")
        return {(group, sibling): tuple(rest) for group, sibling, *rest in rows}


def refusal(out: Path, *overrides: str) -> str:
    """Why a run cannot be resumed; nothing is started."""
    with pytest.raises(InputError) as refused:
        resume(out, overrides, Console())
    return str(refused.value)


def check_same_tokens(run: ResumableRun, **changes: object) -> None:
    """A run that nothing disturbs has the same tokens."""
    undisturbed = ResumableRun(run.task, run.out.with_name("undisturbed"))
    undisturbed.start(**changes).succeed()
    found, expected = (
        {key: tokens for key, (tokens, *_) in each.samples().items()} for each in (run, undisturbed)
    )
    assert found == expected


def forge_manifest(checkpoint: Path) -> None:
    """Make a damaged checkpoint look whole: its manifest, and the journal that has the manifest's digest."""
    manifest, path = checkpoint / MANIFEST, checkpoint.parent.parent / "journal.jsonl"
    before = file_digest(manifest)
    write_manifest(checkpoint)
    *complete, torn = path.read_text().replace(before, file_digest(manifest)).split("\n")
    write_chained(path, [json.loads(line) for line in complete])
    with path.open("a") as file:
        file.write(torn)


def check_finished(out: Path, ended: CommandResult, evaluated: Sequence[int] = ()) -> None:
    """The run has finished, and the guarantees hold over all its resumptions.

    `evaluated` are the versions in metrics.jsonl.
    """
    assert (ended.code, ended.err) == (0, ""), ended
    audit, replay = dora("audit", out), dora("replay", out)
    assert (audit.code, replay.code) == (0, 0), audit.out + replay.out
    num = STEPS * BATCH_SIZE
    assert f"{num} groups admitted = {num} trained + 0 filtered + 0 failed + 0 pending" in audit.out
    s = summary(out)
    assert (s["steps"], s["trained_groups"], s["pending_groups"]) == (STEPS, num, 0)
    assert s["trained_samples"] == 2 * num == sum(s["staleness_histogram"].values())
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    evaluations = [line["val/version"] for line in metrics(out) if "val/version" in line]
    assert evaluations == [*evaluated]
    assert [line["step"] for line in metrics(out) if "val/version" not in line] == list(range(STEPS))
    assert (out / "checkpoints" / f"step-{STEPS}" / "model.safetensors").is_file()


def check_redone(out: Path) -> None:
    """Redone steps are counted and gave the same weights."""
    lines = journal(out)
    redone = [len(line["redone"]) for line in lines if line["kind"] == "resumed"]
    assert (len(redone), sum(redone)) == (summary(out)["attempts"] - 1, summary(out)["redone_steps"])
    assert max(redone) > 0
    digests: dict[int, set[str]] = {}
    for line in lines:
        if line["kind"] == "published":
            digests.setdefault(line["version"], set()).add(line["digest"])
    assert [len(found) for found in digests.values()] == [1] * (STEPS + 1)
