"""Runs with aux workers for reference, proximal log-probs and critic: crashes do not change the weights."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, metrics, summary
from tests.runtime.tiny import CHARACTERS, MODEL, write_task

from dora.data.tokenizer import save_character_tokenizer
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
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
ENGINE, REFERENCE, CRITIC = 0, 3, 5  # of the workers: two engines, the trainer, three aux workers


@pytest.mark.timeout(240)
def test_crashes_of_engine_reference_and_critic_do_not_change_the_bits(
    start_run: StartRun, tmp_path: Path
) -> None:
    config = write_task(tmp_path)
    run = start_run(config, **CHANGES)
    run.succeed()
    undisturbed = run.out.rename(tmp_path / "undisturbed")
    last = metrics(undisturbed)[-1]
    assert last["actor/num_updates"] > 1.0
    assert last["actor/kl_loss"] > 0.0
    assert last["critic/vf_loss"] > 0.0

    disturbed = start_run(config, **CHANGES)
    disturbed.wait_for_steps(1)
    workers = disturbed.workers()
    workers[ENGINE].kill()
    workers[REFERENCE].kill()
    disturbed.wait_for_steps(3)
    workers[CRITIC].kill()
    ended = disturbed.end()
    assert (ended.code, ended.err) == (0, ""), ended
    assert "reference worker was killed by SIGKILL: restarting it" in ended.out
    assert "trainer lost (critic was killed by SIGKILL): engines keep generating" in ended.out
    disturbed.audit()
    s = summary(disturbed.out)
    assert (s["trainer_failures"], s["engine_failures"], s["attempts"], s["pending_groups"]) == (1, 1, 1, 0)
    assert s["redone_steps"] > 0

    ends = [load_checkpoint(out / "checkpoints" / f"step-{STEPS}") for out in (undisturbed, disturbed.out)]
    (_, flat, state, _), (_, flat_again, state_again, _) = ends
    assert torch.equal(flat, flat_again)
    assert torch.equal(state["critic"]["flat"], state_again["critic"]["flat"])


def test_a_suspended_aux_worker_is_restarted(start_run: StartRun) -> None:
    changes = {"algorithm__kl_loss_coef": 0.1, "trainer__aux_workers": '["reference"]'}
    run = start_run(run__steps=6, engine__min_step_time="60ms", runtime__trainer_timeout_s=3.0, **changes)
    run.wait_for_steps(1)
    run.workers()[REFERENCE].suspend()
    ended = run.succeed()
    limit = "runtime.trainer_timeout_s = 3 s"
    assert f"reference worker sent no heartbeat for more than {limit}" in ended.out
    assert summary(run.out)["trained_groups"] == 12


def test_a_policy_learns_from_a_teacher_whose_worker_and_an_engine_crash(
    start_run: StartRun, tmp_path: Path
) -> None:
    """The teacher writes sevens. Its reverse KL falls, although no reward counts."""
    config = write_task(tmp_path)
    rows = [{"prompt": f"{number}:", "response": "7" * 12} for number in range(10, 17)]
    (tmp_path / "sevens.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = ("--model", tmp_path / "start", "--out", tmp_path / "teacher", "--epochs", "60")
    options = ("--batch-size", "7", "--lr", "0.02")
    assert dora("sft", tmp_path / "sevens.jsonl", *given, *options).code == 0
    run = start_run(
        config,
        run__steps=30,
        distillation__teachers=f"['{tmp_path / 'teacher'}']",
        sampling__group_size=4,
        trainer__batch_size=4,
        trainer__lr=0.03,
        trainer__warmup_steps=1,
    )
    run.wait_for_steps(2)
    workers = run.workers()
    workers[ENGINE].kill()
    workers[REFERENCE].kill()
    run.succeed()
    kl = [line["distillation/reverse_kl"] for line in metrics(run.out)]
    assert sum(kl[-5:]) < sum(kl[:5]) / 2
    run.audit("--deep", "4")


def test_a_teacher_of_another_vocabulary_is_refused(start_run: StartRun, tmp_path: Path) -> None:
    teacher = tmp_path / "teacher"
    save_pretrained(teacher, MODEL, initial_weights(MODEL, seed=1))
    save_character_tokenizer(teacher, CHARACTERS[::-1])
    ended = dora("train", write_task(tmp_path), "--set", f"distillation.teachers=['{teacher}']")
    assert ended.code == 2
    assert "has another vocabulary than model.path; name a model of the same tokenizer" in ended.err
