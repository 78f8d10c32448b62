"""A full disk ends the run with a message, and its files stay readable."""

from __future__ import annotations

import re
import resource

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, wait_until_gone

LINUX_ONLY = pytest.mark.skipif(not hasattr(resource, "prlimit"), reason="needs Linux")


@LINUX_ONLY
def test_a_run_ended_by_a_full_disk_can_be_resumed(start_run: StartRun) -> None:
    run = start_run(run__steps=9, engine__min_step_time="60ms")
    run.wait_for_steps(1)
    workers = run.workers()
    resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (0, 0))  # from now on no file of the driver grows
    ended = run.end(timeout_s=20)
    assert ended.code == 1, ended
    assert "the run cannot continue: " in ended.err
    assert "no transaction" not in ended.err
    assert re.search(
        rf"the disk of {run.out} has [\d.,]+ [GM]B free, and a checkpoint takes up to ", ended.err
    )
    assert "Traceback" not in ended.err
    assert wait_until_gone(workers, 2.0) == []
    assert run.weight_folders() == []
    assert dora("audit", run.out).code == 0
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
    limit = optimizer_bytes // 2 + 1000  # more than the weights, which it has to publish
    resource.prlimit(trainer.pid, resource.RLIMIT_FSIZE, (limit, limit))
    ended = run.end()
    assert ended.code == 1, ended
    assert "could not be written: " in ended.out
    assert "; earlier checkpoints stay valid" in ended.out
    assert "free disk space and resume the run" in ended.err
    assert list((run.out / "checkpoints").glob("*.draft")) == []
    resumed = dora("train", "--resume", run.out)
    assert (resumed.code, resumed.err) == (0, "")
    assert (run.out / "checkpoints" / "step-9" / "optimizer.pt").stat().st_size == optimizer_bytes
