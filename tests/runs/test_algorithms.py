"""Whole runs of algorithms other than the default one."""

from __future__ import annotations

import re
from pathlib import Path

from tests.runs.conftest import StartRun
from tests.runs.resumable import BATCH_SIZE, STEPS, ResumableRun, check_redone, write_held_task
from tests.runtime.running import Run, dora, metrics, query, summary


def check_finished(run: Run) -> None:
    """All groups are trained, and audit and replay accept the journal."""
    run.succeed()
    assert summary(run.out)["trained_groups"] == 2 * len(metrics(run.out))
    run.check_records()


def test_a_trainer_accumulates_groups_before_their_batch_is_complete(start_run: StartRun) -> None:
    """Responses take long, so most groups of a batch are accumulated before its last one is complete."""
    run = start_run(
        run__steps=6, trainer__micro_batch_tokens=40, trainer__batch_size=4, engine__min_step_time="20ms"
    )
    run.succeed()
    steps = metrics(run.out)
    assert all(0 <= step["actor/num_tokens_early"] <= step["actor/num_tokens"] for step in steps)
    assert sum(step["actor/num_tokens_early"] for step in steps) > 0
    run.check_records()


def test_advantages_of_a_whole_batch_are_computed_once_it_is_complete(start_run: StartRun) -> None:
    run = start_run(
        algorithm__adv_estimator="reinforce_plus_plus_baseline",
        algorithm__policy_loss="cispo",
        algorithm__clip_ratio_low=1.0,
    )
    check_finished(run)
    assert all(step["actor/num_tokens_early"] == 0 for step in metrics(run.out))
    assert all(step["actor/grad_norm"] > 0 for step in metrics(run.out))
    assert query(run.out, "select count(*) from samples where advantage is not null") == [(0,)]


def test_a_run_with_every_part_of_an_objective(start_run: StartRun) -> None:
    run = start_run(
        algorithm__adv_estimator="rloo",
        algorithm__policy_loss="gspo",
        algorithm__loss_agg_mode="seq-mean-token-mean",
        algorithm__entropy_coeff=0.01,
        algorithm__kl_loss_coef=0.1,
        algorithm__kl_loss_type="k3+",
        algorithm__overlong_buffer_tokens=8,
        correction__proximal="recomputed",
        correction__token="tis",
        correction__sequence="mis",
        correction__mis_high=1.2,
        correction__staleness_decay=0.9,
        trainer__deterministic="true",
    )
    check_finished(run)
    for step in metrics(run.out):
        assert step["actor/kl_loss"] >= 0
        assert 0 < step["off_policy/ess"] <= 1
        assert 0 <= step["off_policy/frac_masked"] <= 1


def test_a_run_with_online_dpo(start_run: StartRun) -> None:
    run = start_run(
        algorithm__policy_loss="online_dpo",
        algorithm__loss_agg_mode="seq-mean-token-sum",
        sampling__group_size=3,
        engine__max_num_seqs=6,
    )
    check_finished(run)
    assert {row for (row,) in query(run.out, "select advantage from samples")} == {1.0, 0.0, -1.0}


OWN_FUNCTIONS = """
import itertools
from pathlib import Path

calls = itertools.count()


def loss(tokens, settings, clipped_from):
    return -tokens.advantages * tokens.logprobs, tokens.staleness >= clipped_from


def advantages(rewards):
    if next(calls) >= 5 and Path({fault!r}).exists():
        raise KeyError("no such prompt")
    return [reward - min(rewards) for reward in rewards]
"""


def test_a_run_with_a_loss_and_an_estimator_of_the_users(resumable: ResumableRun, tmp_path: Path) -> None:
    """The estimator fails in the middle of the run, which resumes once it is corrected."""
    fault, file = tmp_path / "fault", tmp_path / "own.py"
    file.write_text(OWN_FUNCTIONS.format(fault=str(fault)))
    fault.touch()
    functions = {"policy_loss": f"{file}:loss", "adv_estimator": f"{file}:advantages"}
    functions["policy_loss_options"] = "{clipped_from = 1}"
    run = resumable.start(**{f"algorithm__{key}": function for key, function in functions.items()})
    ended = run.end()
    assert ended.code == 1, ended
    assert f"algorithm.adv_estimator = '{file}:advantages': for the rewards [" in ended.err
    assert f"it raised KeyError: 'no such prompt' ({file}:14); correct it" in ended.err
    fault.unlink()
    resumed = resumable.resume()
    resumed.succeed()
    resumed.check_records()
    for step in metrics(resumable.out):
        assert (step["actor/pg_clipfrac"] > 0) == (step["staleness/max"] > 0)
    stored = query(resumable.out, "select reward, advantage from samples where group_id = '0/0'")
    lowest = min(reward for reward, _ in stored)
    assert [advantage for _, advantage in stored] == [reward - lowest for reward, _ in stored]
    skipped = "whose advantage cannot be computed (algorithm.adv_estimator = "
    file.write_text("def advantages(rewards):\n    return rewards[99]\n")
    assert skipped in resumed.audit()
    file.write_text("def advantages(rewards):\n    return [reward + 1 for reward in rewards]\n")
    assert (
        f"expected {stored[0][0] + 1} by {file}:advantages as its file is now" in dora("audit", run.out).out
    )
    file.unlink()
    assert skipped in resumed.audit()


def test_a_critic_resumes_with_its_policy(resumable: ResumableRun, tmp_path: Path) -> None:
    """With several updates a step and groups of one. Redone steps give the same bits."""
    resumable.task, fifo = write_held_task(tmp_path, num_scored=3 * BATCH_SIZE)
    objective: dict[str, object] = {
        "algorithm__adv_estimator": "gae",
        "algorithm__lam": 0.95,
        "critic__lr": 1e-2,
        "critic__ppo_epochs": 2,
        "sampling__group_size": 1,
        "trainer__mini_batch_tokens": 24,
    }
    run = resumable.start(**objective)
    run.wait_for_steps(3)
    resumable.kill_after(run, 0)
    fifo.unlink()
    resumed = resumable.resume()
    resumed.succeed()
    check_redone(resumable.out)
    resumed.check_records()
    steps = metrics(resumable.out)
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    assert sum(step["actor/num_updates"] for step in steps) > len(steps) == STEPS
    assert query(resumable.out, "select count(*) from samples where advantage is not null") == [(0,)]


def test_truncated_responses_have_no_loss_before_and_after_a_resume(
    resumable: ResumableRun, tmp_path: Path
) -> None:
    """The resumed run reads finish reasons from the sample store. Redone steps give the same bits."""
    resumable.task, fifo = write_held_task(tmp_path, num_scored=3 * BATCH_SIZE * 2)
    run = resumable.start(algorithm__mask_truncated_responses="true", algorithm__entropy_coeff=0.01)
    run.wait_for_steps(3)
    resumable.kill_after(run, 0)
    fifo.unlink()
    resumed = resumable.resume()
    resumed.succeed()
    check_redone(resumable.out)
    resumed.check_records()
    columns = "trained_step, finish_reason, length(token_ids) / 4"
    trained = query(resumable.out, f"select {columns} from samples where state = 'trained'")
    assert {reason for _, reason, _ in trained} == {"length", "stop"}
    for step in metrics(resumable.out):
        responses = [(reason, num) for number, reason, num in trained if number == step["step"]]
        in_loss = [num for reason, num in responses if reason == "stop"]
        assert step["actor/frac_masked_responses"] == 1 - len(in_loss) / len(responses)
        assert step["actor/num_tokens"] == sum(in_loss)
    query(resumable.out, "update samples set finish_reason = null where trained_step = 0 and sibling = 0")
    audited = dora("audit", resumable.out)
    assert audited.code == 1
    assert "is stored with the finish reason None, the journal has" in audited.out


def test_a_step_whose_responses_are_all_truncated_has_no_gradient(start_run: StartRun) -> None:
    """A response of one token ends at its maximum length, unless this token is the end token."""
    run = start_run(algorithm__mask_truncated_responses="true", sampling__max_response_length=1)
    ended = run.succeed()
    run.check_records()
    masked = [step for step in metrics(run.out) if step["actor/frac_masked_responses"] == 1]
    assert masked
    assert {(step["actor/num_tokens"], step["actor/grad_norm"]) for step in masked} == {(0, 0)}
    assert re.search(r"step \d had no gradient: .*truncated", ended.out)


def test_a_dry_run_prints_when_gradients_are_computed(task: Path) -> None:
    assert (
        "gradients             accumulated while the batch fills up" in dora("train", task, "--dry-run").out
    )
    deterministic = dora("train", task, "--dry-run", "--set", "trainer.deterministic=true").out
    assert (
        "gradients             computed once the batch is complete: trainer.deterministic = true"
        in deterministic
    )


def test_a_dry_run_counts_the_memory_of_a_critic_and_of_a_rollback(task: Path) -> None:
    changes = "--set", "algorithm.adv_estimator=gae", "--set", "trainer.mini_batch_tokens=24"
    printed = dora("train", task, "--dry-run", *changes).out
    assert "optimizer updates of about 24 response tokens" in printed
    assert re.search(r"critic +[\d,]+ parameters", printed)
    assert "to roll back a step that fails between two updates" in printed
