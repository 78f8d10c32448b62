"""A disk that is full ends the run in words, and what is on it stays readable."""

from __future__ import annotations

import resource

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, wait_until_gone

LINUX_ONLY = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="only Linux limits another process")


@LINUX_ONLY
def test_a_full_disk_ends_the_run_in_words_and_with_room_it_goes_on(start_run: StartRun) -> None:
    run = start_run(run__steps=9, engine__min_step_time="20ms")
    run.wait_for_steps(1)
    workers = run.workers()
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (0, 0))  # from now on no file of the driver grows
    ended = run.end(timeout_s=20)
    assert ended.code == 1, ended
    assert "the run cannot go on: " in ended.err
    assert f"what is in {run.out} stays readable" in ended.err
    assert "Traceback" not in ended.err
    assert wait_until_gone(workers, 2.0) == []
    assert run.weight_folders() == []
    assert dora("audit", run.out).code == 0
    assert dora("replay", run.out).code == 0
    resumed = dora("train", "--resume", run.out)
    assert (resumed.code, resumed.err) == (0, "")
    assert "C1 kept, C2 kept, C3 kept" in resumed.out


@LINUX_ONLY
def test_a_disk_without_room_for_a_checkpoint_does_not_end_the_run(start_run: StartRun) -> None:
    run = start_run(run__steps=9, trainer__save_freq=1)
    run.wait_until((run.out / "checkpoints" / "step-1").is_dir, "the first checkpoint")
    optimizer_bytes = (run.out / "checkpoints" / "step-1" / "optimizer.pt").stat().st_size
    trainer = run.workers()[-2]
    limit = optimizer_bytes // 2 + 1000  # more than the weights, which it has to publish
    resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (limit, limit))
    ended = run.end()
    assert ended.code == 1, ended
    assert "could not be written: " in ended.out
    assert "; the ones before it stay" in ended.out
    assert "make room and resume the run" in ended.err
    assert list((run.out / "checkpoints").glob("*.draft")) == []
    resumed = dora("train", "--resume", run.out)
    assert (resumed.code, resumed.err) == (0, "")
    assert (run.out / "checkpoints" / "step-9" / "optimizer.pt").stat().st_size == optimizer_bytes
