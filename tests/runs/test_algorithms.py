"""Algorithms beside the default one, from the configuration through whole runs."""

from __future__ import annotations

import re
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, metrics, summary
from tests.runs.test_resume import STEPS, Life, check_redone, life
from tests.runtime.tiny import MODEL

from dora.config.load import read_config
from dora.errors import ConfigError
from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights
from dora.runtime.run_setup import RunSetup

__all__ = ["life"]


def test_the_objective_reaches_the_trainer(task: Path) -> None:
    config = read_config(
        task,
        [
            "algorithm.policy_loss=dual_clip",
            "algorithm.clip_ratio_c=4.0",
            "algorithm.entropy_coeff=0.01",
            "algorithm.kl_loss_coef=0.1",
            "algorithm.kl_loss_type=k3+",
            "algorithm.overlong_buffer_tokens=8",
            "correction.proximal=interpolated",
            "correction.token=tis",
            "correction.tis_cap=3.0",
        ],
    )
    spec = RunSetup.make(config, task.parent / "out").trainer_spec(task.parent, task.parent)
    settings, scoring = spec.settings, spec.advantage_settings
    assert (settings.policy_loss, settings.loss_settings.clip_ratio_c) == ("dual_clip", 4.0)
    assert (settings.entropy_coeff, settings.kl_loss_coef, settings.kl_loss_type) == (0.01, 0.1, "k3+")
    assert (settings.correction.proximal, settings.correction.tis_cap) == ("interpolated", 3.0)
    assert (scoring.max_tokens, scoring.overlong_buffer_tokens, spec.streams_gradients) == (24, 8, True)
    assert spec.critic is None


def test_the_critic_reaches_the_trainer(task: Path) -> None:
    start = f"critic.path={task.parent / 'start'}"
    config = read_config(
        task, ["algorithm.adv_estimator=gae", "algorithm.gamma=0.99", start, "critic.lr=0.5"]
    )
    spec = RunSetup.make(config, task.parent / "out").trainer_spec(task.parent, task.parent)
    assert spec.critic is not None
    assert spec.critic.model == (task.parent / "start").resolve()
    assert (spec.critic.settings.gamma, spec.critic.settings.lr, spec.streams_gradients) == (0.99, 0.5, False)


def test_a_dry_run_counts_the_critic_and_what_a_step_is_undone_from(task: Path) -> None:
    changes = "--set", "algorithm.adv_estimator=gae", "--set", "trainer.mini_batch_tokens=24"
    told = dora("train", task, "--dry-run", *changes).out
    assert "optimizer updates of about 24 response tokens" in told
    assert re.search(r"critic +[\d,]+ parameters", told)
    assert "to roll back a step that fails between two updates" in told


def test_a_critic_that_cannot_read_what_the_policy_writes_is_refused(task: Path) -> None:
    other = replace(MODEL, vocab_size=MODEL.vocab_size + 1)
    save_pretrained(task.parent / "other", other, initial_weights(other, seed=0))
    changes = ["algorithm.adv_estimator=gae", f"critic.path={task.parent / 'other'}"]
    with pytest.raises(ConfigError, match=r"critic\.path = .*take a model of the policy's family"):
        RunSetup.make(read_config(task, changes), task.parent / "out")


def ended_well(run: Run) -> None:
    """All steps are taken, and audit and replay agree."""
    ended = run.end()
    assert ended.code == 0, ended
    assert summary(run.out)["trained_groups"] == 2 * len(metrics(run.out))
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), audit.out + replay.out


def test_a_trainer_begins_with_groups_before_their_batch_is_complete(start_run: StartRun) -> None:
    """An answer is long to come, so most of the others are worked on meanwhile."""
    run = start_run(
        run__steps=6, trainer__micro_batch_tokens=40, trainer__batch_size=4, engine__min_step_time="20ms"
    )
    ended = run.end()
    assert ended.code == 0, ended
    steps = metrics(run.out)
    assert all(0 <= step["actor/num_tokens_early"] <= step["actor/num_tokens"] for step in steps)
    assert sum(step["actor/num_tokens_early"] for step in steps) > 0
    audit, replay = dora("audit", run.out), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0), audit.out + replay.out


def test_advantages_of_the_whole_batch_are_made_once_it_is_complete(start_run: StartRun) -> None:
    run = start_run(
        algorithm__adv_estimator="reinforce_plus_plus_baseline",
        algorithm__policy_loss="cispo",
        algorithm__clip_ratio_low=1.0,
    )
    ended_well(run)
    assert all(step["actor/num_tokens_early"] == 0 for step in metrics(run.out))
    assert all(step["actor/grad_norm"] > 0 for step in metrics(run.out))
    with sqlite3.connect(run.out / "samples.sqlite") as db:
        assert db.execute("select count(*) from samples where advantage is not null").fetchone() == (0,)


def test_every_part_of_an_objective_goes_through_a_whole_run(start_run: StartRun) -> None:
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
    ended_well(run)
    for step in metrics(run.out):
        assert step["actor/kl_loss"] >= 0
        assert 0 < step["off_policy/ess"] <= 1
        assert 0 <= step["off_policy/frac_masked"] <= 1


def test_online_dpo_goes_through_a_whole_run(start_run: StartRun) -> None:
    run = start_run(
        algorithm__policy_loss="online_dpo",
        algorithm__loss_agg_mode="seq-mean-token-sum",
        sampling__group_size=3,
        engine__max_num_seqs=6,
    )
    ended_well(run)
    with sqlite3.connect(run.out / "samples.sqlite") as db:
        assert {row for (row,) in db.execute("select advantage from samples")} == {1.0, 0.0, -1.0}


def test_a_critic_goes_on_with_its_policy_after_the_death_of_both(life: Life) -> None:
    """Steps of several updates of both, groups of one; what is redone gives the same bits."""
    objective: dict[str, object] = {
        "algorithm__adv_estimator": "gae",
        "algorithm__lam": 0.95,
        "critic__lr": 1e-2,
        "critic__ppo_epochs": 2,
        "sampling__group_size": 1,
        "trainer__mini_batch_tokens": 24,
    }
    run = life.begin(**objective)
    run.wait_until((life.out / "checkpoints" / "step-2").is_dir, "a checkpoint")
    run.wait_for_steps(3)
    life.kill_after(run, 0)
    ended = life.go_on().end()
    assert ended.code == 0, ended
    check_redone(life.out)
    audit, replay = dora("audit", life.out), dora("replay", life.out)
    assert (audit.code, replay.code) == (0, 0), audit.out + replay.out
    steps = metrics(life.out)
    assert all(step["critic/grad_norm"] > 0 for step in steps)
    assert sum(step["actor/num_updates"] for step in steps) > len(steps) == STEPS
    with sqlite3.connect(life.out / "samples.sqlite") as db:
        assert db.execute("select count(*) from samples where advantage is not null").fetchone() == (0,)


def test_a_dry_run_says_what_gradients_wait_for(task: Path) -> None:
    assert (
        "gradients             accumulated while the batch fills up" in dora("train", task, "--dry-run").out
    )
    waits = dora("train", task, "--dry-run", "--set", "trainer.deterministic=true").out
    assert "gradients             computed once the batch is complete: trainer.deterministic = true" in waits
