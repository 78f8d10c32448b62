"""A full disk ends the run with a message, and its files stay readable."""

from __future__ import annotations

import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, environment, wait_until_gone

LINUX_ONLY = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")


@LINUX_ONLY
def test_a_run_whose_files_cannot_grow_can_be_resumed(start_run: StartRun) -> None:
    run = start_run(run__steps=9, engine__min_step_time="60ms")
    run.wait_for_steps(1)
    workers = run.workers()
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (0, 0))  # from now on no file of the driver grows
    ended = run.end()
    assert ended.code == 1, ended
    assert "the run cannot continue: " in ended.err
    assert "no transaction" not in ended.err
    assert "disk of" not in ended.err, "a file that may not grow is no full disk"
    assert f"dora train --resume {run.out}" in ended.err
    assert "Traceback" not in ended.err
    assert wait_until_gone(workers) == []
    assert run.weight_folders() == []
    run.audit()
    assert dora("replay", run.out).code == 0
    resumed = dora("train", "--resume", run.out)
    assert (resumed.code, resumed.err) == (0, "")
    assert "C1 kept, C2 kept, C3 kept" in resumed.out


@LINUX_ONLY
def test_a_checkpoint_that_does_not_fit_on_the_disk_does_not_end_the_run(start_run: StartRun) -> None:
    run = start_run(run__steps=9, trainer__save_freq=1, engine__min_step_time="60ms")
    run.wait_until((run.out / "checkpoints" / "step-1").is_dir, "the first checkpoint")
    optimizer_bytes = (run.out / "checkpoints" / "step-1" / "optimizer.pt").stat().st_size
    trainer = run.workers()[-2]
    limit = optimizer_bytes - 1  # more than the weights, which it has to publish
    resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (limit, limit))
    ended = run.end()
    assert ended.code == 1, ended
    assert "could not be written: " in ended.out
    assert "; earlier checkpoints stay valid" in ended.out
    assert "disk space" not in ended.err, "a file that may not grow is no full disk"
    assert f"resume the run: dora train --resume {run.out}" in ended.err
    assert list((run.out / "checkpoints").glob("*.draft")) == []
    resumed = dora("train", "--resume", run.out)
    assert (resumed.code, resumed.err) == (0, "")
    assert (run.out / "checkpoints" / "step-9" / "optimizer.pt").stat().st_size == optimizer_bytes


def can_mount() -> bool:
    """Whether this system lets a process mount a file system that only it sees."""
    command = ["unshare", "--user", "--map-root-user", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"]
    return bool(shutil.which("unshare")) and subprocess.run(command, capture_output=True).returncode == 0


@pytest.mark.skipif(not can_mount(), reason="needs user namespaces")
def test_a_run_on_a_full_disk_names_the_disk_and_what_it_needs(task: Path, tmp_path: Path) -> None:
    """The run's folder is on a file system of 400 kB; after the disk has been enlarged the run is resumed."""
    out = tmp_path / "disk" / "run"
    out.parent.mkdir()
    script = """
        mount -t tmpfs -o size=400k tmpfs "$1" || exit 99
        sets="--set engine.min_step_time=1ms --set trainer.save_freq"
        "$2" -m dora train "$3" --out "$1/run" --set run.steps=2000 $sets=1
        echo "code $?"
        mount -o remount,size=100m "$1"
        "$2" -m dora train --resume "$1/run" $sets=0 &
        wait_s=0; until grep -q '"kind": "resumed"' "$1/run/journal.jsonl" || [ $wait_s = 90 ]; do
            sleep 1; wait_s=$((wait_s + 1)); done
        kill -TERM $!; wait $!
        echo "resumed $?"
    """
    command = ["unshare", "--user", "--map-root-user", "--mount", "bash", "-c", script, "bash"]
    arguments = [str(out.parent), sys.executable, str(task)]
    ended = subprocess.run([*command, *arguments], capture_output=True, text=True, env=environment())
    assert "code 1\n" in ended.stdout, ended
    sentence = rf"the disk of {out} is full: up to [\d.]+ MB needed, [\d.]+ MB free. Free disk space there"
    assert re.search(sentence, ended.stderr), ended
    assert "Traceback" not in ended.stderr
    assert "resumed 130" in ended.stdout, ended
