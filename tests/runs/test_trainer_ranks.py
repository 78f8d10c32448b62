"""A whole run with a trainer of two ranks, which only this machine can reach; one of them crashes."""

from __future__ import annotations

import stat
from pathlib import Path
from typing import Any

import psutil
import torch
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, metrics, wait_until_gone

from dora.trainer.checkpoint import load_checkpoint

RANK_1 = 3  # index among the workers: after two engines and rank 0
ON_POLICY = {"orchestrator__max_staleness": 0, "trainer__deterministic": "true", "trainer__batch_size": 4}
LOOPBACK = {"127.0.0.1", "::1", "::ffff:127.0.0.1"}


def check_closed_to_others(run: Run) -> None:
    """TCP sockets are on the loopback interface, and Unix sockets are accessible to their owner only."""
    driver = psutil.Process(run.pid)
    processes = driver, *driver.children(recursive=True)
    connections = [connection for process in processes for connection in process.net_connections("inet")]
    assert connections  # between the ranks
    assert [c for c in connections if len(c.laddr) == 2 and c.laddr[0] not in LOOPBACK] == []
    (folder,) = run.weight_folders()
    for path, mode in ((folder, 0o700), (folder / "stream" / "stream.sock", 0o600)):
        assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_run_with_adapters_that_lost_a_rank_ends_with_the_weights_of_a_run_with_one_rank(
    start_run: StartRun, task: Path, tmp_path: Path
) -> None:
    """On-policy and in a fixed order, so that two ranks and one see the same samples."""
    settings: dict[str, Any] = ON_POLICY | {"trainer__lora_rank": 4, "run__steps": 5}
    single = Run(task, tmp_path / "single", **settings)
    run = start_run(trainer__num_ranks=2, trainer__save_freq=2, **settings)
    run.wait_for_steps(3)
    check_closed_to_others(run)
    workers = run.workers()
    workers[RANK_1 - 1].kill()
    ended = run.succeed()
    assert "trainer lost (trainer was killed by SIGKILL): engines keep generating" in ended.out
    assert not wait_until_gone(workers)
    run.audit()
    single.succeed()
    found, expected = (load_checkpoint(each.out / "checkpoints" / "step-5")[1] for each in (run, single))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    for step, other in zip(metrics(run.out), metrics(single.out), strict=True):
        assert step["actor/num_tokens"] == other["actor/num_tokens"]
        assert step["mismatch/logprob_abs_diff_max"] < 1e-5


def test_two_ranks_train_the_policy_and_the_critic_that_one_trains(
    start_run: StartRun, task: Path, tmp_path: Path
) -> None:
    """Rank 1 crashes; the trainer resumes from a checkpoint of both ranks."""
    changes = {"algorithm__adv_estimator": "gae", "trainer__offload_optimizer": "true"}
    settings: dict[str, Any] = ON_POLICY | changes | {"run__steps": 5}
    single = Run(task, tmp_path / "single", **settings)
    run = start_run(trainer__num_ranks=2, trainer__save_freq=2, **settings)
    run.wait_for_steps(3)
    run.workers()[RANK_1].kill()
    run.succeed()
    assert "trainer lost (trainer rank 1 was killed by SIGKILL)" in run.end().out
    run.audit()
    single.succeed()
    found, expected = (load_checkpoint(each.out / "checkpoints" / "step-5") for each in (run, single))
    torch.testing.assert_close(found[1], expected[1], rtol=0, atol=1e-5)
    flats = found[2]["critic"]["flat"], expected[2]["critic"]["flat"]
    torch.testing.assert_close(*flats, rtol=0, atol=1e-5)
