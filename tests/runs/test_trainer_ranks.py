"""A whole run whose trainer is two processes, whom nobody else can reach; one of them dies."""

from __future__ import annotations

import stat
from pathlib import Path

import psutil
import torch
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, metrics, wait_until_gone

from dora.trainer.checkpoint import load_checkpoint

RANK_1 = 3  # among the workers, after two engines and rank 0
ON_POLICY = {"orchestrator__max_staleness": 0, "trainer__deterministic": "true", "trainer__batch_size": 4}


LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def check_that_nobody_else_can_come_in(run: Run) -> None:
    """What speaks TCP does so within this machine, and a socket in a file is its owner's alone."""
    driver = psutil.Process(run.pid)
    found = [
        own for each in (driver, *driver.children(recursive=True)) for own in each.net_connections("inet")
    ]
    assert found  # the ranks'
    assert [own for own in found if len(own.laddr) == 2 and own.laddr[0] not in LOOPBACK] == []
    (folder,) = run.weight_folders()
    for path, mode in ((folder, 0o700), (folder / "stream" / "stream.sock", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_run_that_lost_a_rank_ends_with_the_weights_of_one_that_had_none(
    start_run: StartRun, task: Path, tmp_path: Path
) -> None:
    """On-policy and in a fixed order, so that two ranks and one see the same samples."""
    alone = Run(task, tmp_path / "alone", run__steps=8, **ON_POLICY)  # type: ignore[arg-type]
    run = start_run(run__steps=8, trainer__num_ranks=2, trainer__save_freq=2, **ON_POLICY)
    run.wait_for_steps(3)
    check_that_nobody_else_can_come_in(run)
    workers = run.workers()
    workers[RANK_1].kill()
    ended = run.end()
    assert ended.code == 0, ended
    assert "the trainer is lost (trainer's rank 1 was killed by SIGKILL); engines go on" in ended.out
    assert not wait_until_gone(workers, timeout_s=5.0)
    assert dora("audit", run.out).code == 0
    assert alone.end().code == 0, alone.end()
    found, expected = (load_checkpoint(one.out / "checkpoints" / "step-8")[1] for one in (run, alone))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for step, other in zip(metrics(run.out), metrics(alone.out), strict=True):
        assert step["actor/num_tokens"] == other["actor/num_tokens"]
        assert step["mismatch/logprob_abs_diff_max"] < 1e-5
