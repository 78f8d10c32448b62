"""Reference, proximal log-probs and critic beside the trainer: a run keeps its bits whatever dies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, metrics, summary
from tests.runtime.tiny import write_task

from dora.trainer.checkpoint import load_checkpoint

STEPS = 6
CHANGES = {
    "run__steps": STEPS,
    "engine__exact_logprobs": "true",
    "orchestrator__max_staleness": 0,
    "algorithm__adv_estimator": "gae",
    "algorithm__kl_loss_coef": 0.1,
    "correction__proximal": "recomputed",
    "correction__token": "tis",
    "trainer__aux_workers": '["reference", "proximal", "critic"]',
    "trainer__mini_batch_tokens": 30,
    "trainer__deterministic": "true",
    "trainer__save_freq": 2,
}
ENGINE, REFERENCE, CRITIC = 0, 2, 4  # of the workers: two engines, three stations


@pytest.mark.timeout(240)
def test_a_run_is_the_same_to_the_bit_when_engine_reference_and_critic_die(
    start_run: StartRun, tmp_path: Path
) -> None:
    config = write_task(tmp_path)
    run = start_run(config, **CHANGES)
    assert run.end().code == 0, run.end()
    whole = run.out.rename(tmp_path / "whole")
    last = metrics(whole)[-1]
    assert last["actor/num_updates"] > 1.0
    assert last["actor/kl_loss"] > 0.0
    assert last["critic/vf_loss"] > 0.0

    broken = start_run(config, **CHANGES)
    broken.wait_for_steps(1)
    workers = broken.workers()
    workers[ENGINE].kill()
    workers[REFERENCE].kill()
    broken.wait_for_steps(3)
    workers[CRITIC].kill()
    ended = broken.end()
    assert (ended.code, ended.err) == (0, ""), ended
    assert "reference station was killed by SIGKILL; it is replaced" in ended.out
    assert "the trainer is lost (critic was killed by SIGKILL); engines go on" in ended.out
    assert dora("audit", broken.out).code == 0
    s = summary(broken.out)
    assert (s["trainer_failures"], s["engine_failures"], s["attempts"], s["pending_groups"]) == (1, 1, 1, 0)
    assert s["redone_steps"] > 0

    ends = [load_checkpoint(out / "checkpoints" / f"step-{STEPS}") for out in (whole, broken.out)]
    (_, flat, state, _), (_, flat_again, state_again, _) = ends
    assert torch.equal(flat, flat_again)
    assert torch.equal(state["critic"]["flat"], state_again["critic"]["flat"])


def test_a_station_that_is_stopped_is_replaced(start_run: StartRun) -> None:
    compares = {"algorithm__kl_loss_coef": 0.1, "trainer__aux_workers": '["reference"]'}
    run = start_run(run__steps=6, engine__min_step_time="20ms", runtime__trainer_timeout_s=3.0, **compares)
    run.wait_for_steps(1)
    run.workers()[REFERENCE].suspend()
    ended = run.end()
    assert ended.code == 0, ended
    assert "reference station was killed by SIGKILL; it is replaced" in ended.out
    assert summary(run.out)["trained_groups"] == 12
