"""Every run measures the mismatch of trainer and engine log-probs; in exact mode there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runs.test_mixture_of_experts import MIXTURE
from tests.runtime.running import metrics, summary
from tests.runtime.tiny import write_task

from dora.model.pretrained import save_pretrained
from dora.model.weights import initial_weights

LARGEST = "mismatch/logprob_abs_diff_max"


@pytest.mark.parametrize("kernels", ["eager", "numba"])
@pytest.mark.parametrize("max_staleness", [0, 1])
def test_an_exact_run_has_no_mismatch(start_run: StartRun, max_staleness: int, kernels: str) -> None:
    run = start_run(
        engine__exact_logprobs="true",
        engine__kernels=kernels,
        orchestrator__max_staleness=max_staleness,
        run__steps=6,
    )
    ended = run.succeed()
    assert [step[LARGEST] for step in metrics(run.out)] == [0.0] * 6
    assert summary(run.out)["logprob_mismatch_max"] == 0.0
    assert "none: bit for bit equal" in ended.out


def test_a_one_step_off_policy_run_measures_its_mismatch_in_every_step(start_run: StartRun) -> None:
    run = start_run(orchestrator__update_policy="one_step", run__steps=6)
    run.succeed()
    steps = metrics(run.out)
    assert all(step["staleness/mean"] == 1 for step in steps[1:])
    assert all(0 <= step[LARGEST] < 3e-6 for step in steps)
    assert summary(run.out)["logprob_mismatch_max"] == max(step[LARGEST] for step in steps)


def test_an_exact_run_of_experts_with_top_p_has_no_mismatch(start_run: StartRun, tmp_path: Path) -> None:
    config = write_task(tmp_path)
    save_pretrained(tmp_path / "start", MIXTURE, initial_weights(MIXTURE, seed=0, std=0.3))
    run = start_run(config, engine__exact_logprobs="true", sampling__temperature=0.8, sampling__top_p=0.9)
    run.succeed()
    assert summary(run.out)["logprob_mismatch_max"] == 0.0
