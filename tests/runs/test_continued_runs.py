"""Runs that start with weights and optimizer of another run's checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from tests.runs.resumable import SLOW, STEPS, ResumableRun, check_finished
from tests.runs.test_longer_runs import digests
from tests.runtime.running import dora
from tests.runtime.tiny import PROMPTS

from dora.audit.logprob_recheck import check
from dora.errors import InputError, ModelError
from dora.runtime.run import resume

# Every step trains all prompts on their likeliest responses, so that equal weights give equal batches.
REPEATED: dict[str, Any] = {
    "trainer__lr_decay": "constant",
    "trainer__deterministic": "true",
    "trainer__batch_size": len(PROMPTS),
    "engine__exact_logprobs": "true",
    "orchestrator__max_staleness": 0,
    "sampling__top_p": 0.001,  # the likeliest token
    "data__shuffle": "false",
    "algorithm__entropy_coeff": 0.01,  # a gradient without advantages
    "trainer__save_freq": 2,
    "trainer__keep_last": 3,
}


@pytest.fixture
def other(task: Path, resumable: ResumableRun) -> ResumableRun:
    """A second run, beside the first."""
    return ResumableRun(task, resumable.out.with_name("other"))


def test_the_first_step_is_that_of_the_uninterrupted_run(
    resumable: ResumableRun, other: ResumableRun
) -> None:
    """Only if the moments of the optimizer are kept, too."""
    resumable.start(**REPEATED, run__steps=3).succeed()
    checkpoint = resumable.out / "checkpoints" / "step-2"
    ended = other.start(**REPEATED, run__steps=1, trainer__continue_from=checkpoint).succeed()
    assert f"weights and optimizer are those of {checkpoint}; steps, learning-rate schedule" in ended.out
    before, after = digests(resumable.out), digests(other.out)
    assert (after[0], after[1]) == (before[2], before[3])

    anew = ResumableRun(other.task, other.out.with_name("anew"))
    anew.start(**REPEATED, run__steps=1, model__path=checkpoint).succeed()
    assert digests(anew.out)[0] == before[2]
    assert digests(anew.out)[1] != before[3]


@pytest.mark.parametrize(
    ("changes", "of_resume"),
    [
        ({}, {}),
        ({"trainer__lora_rank": 2, "trainer__lora_alpha": 6}, {"trainer__num_ranks": 2}),
        ({"algorithm__adv_estimator": "gae"}, {}),
        ({"trainer__num_ranks": 2}, {}),
    ],
    ids=["all weights", "LoRA, then two ranks", "critic", "two ranks"],
)
def test_a_continued_run_is_resumed_and_audited(
    resumable: ResumableRun, other: ResumableRun, changes: dict[str, Any], of_resume: dict[str, Any]
) -> None:
    resumable.start(run__steps=2, **changes).succeed()
    checkpoint = resumable.out / "checkpoints" / "step-2"
    run = other.start(trainer__continue_from=checkpoint, **changes, **SLOW, trainer__save_freq=0)
    run.wait_for_steps(1)
    other.kill_after(run, 0)
    check_finished(other.out, other.resume(**of_resume).end())
    assert digests(other.out)[0] == digests(resumable.out)[2]
    (first, *_) = check(other.out, 8).versions
    assert (first.source.version, first.findings) == (0, ())
    with pytest.raises(InputError, match="has finished all its"):
        resume(other.out, (), Console())
    shutil.copyfile(other.task.parent / "start" / "model.safetensors", checkpoint / "model.safetensors")
    with pytest.raises(ModelError, match=r"the checkpoint is damaged: model\.safetensors differs"):
        resume(other.out, (f"run.steps={STEPS + 1}", "trainer.lr_decay=constant"), Console())


def test_the_option_names_a_checkpoint_for_a_new_run(resumable: ResumableRun, task: Path) -> None:
    resumable.start(run__steps=1).succeed()
    new, checkpoint = resumable.out.with_name("new"), resumable.out / "checkpoints" / "step-1"
    ended = dora("train", task, "--out", new, "--continue-from", checkpoint, "--steps", "1")
    assert ended.code == 0, ended
    assert f'continue_from = "{checkpoint}"' in (new / "config.toml").read_text()
    refused = dora("train", task, "--out", new.with_name("refused"), "--continue-from", task.parent / "start")
    assert refused.code == 2
    assert "it has no optimizer.pt, so it is not a checkpoint of a run" in refused.err
    assert len(refused.err.splitlines()) == 1
    refused = dora("train", "--resume", new, "--continue-from", checkpoint)
    assert "--continue-from starts a new run: leave out --resume" in refused.err
