"""Agent frameworks, unmodified, run all episodes of runs of examples/tool_caller: `make test-agents`.

Its model is trained to call tools.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, summary

from dora.audit import audit
from dora.data.tokenizer import Tokenizer
from dora.journal.reader import read_responses, read_samples

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_caller"
PYTHON = os.environ.get("AGENTS_PYTHON", sys.executable)  # that has the frameworks
TIMEOUT_S = 600.0  # each episode imports its framework

pytestmark = pytest.mark.agents


@pytest.mark.parametrize("framework", ["anthropic", "litellm", "openai_agents", "verifiers"])
def test_a_framework_runs_the_episodes_of_a_run(start_run: StartRun, framework: str) -> None:
    run = start_run(
        EXAMPLE / "harness.toml",
        command="serve",
        run__steps=2,
        trainer__batch_size=1,
        eval__num_prompts=0,
        reward__max_failed_fraction=0.0,
    )
    run.wait_until((run.out / "service.json").exists, "its service")
    settings = ["LITELLM_LOCAL_MODEL_COST_MAP=True", "HF_HUB_OFFLINE=1", "PYTHONPATH="]
    program: list[str | Path] = ["env", *settings, PYTHON, EXAMPLE / f"with_{framework}.py"]
    agents = dora("rollout", run.out, "--concurrency", "2", "--", *program, timeout_s=TIMEOUT_S)
    assert agents.code == 0, agents.err
    ended = run.end()
    assert ended.code == 0, ended.err
    assert summary(run.out)["steps"] == 2
    assert audit.check(run.out).findings == ()
    rows = [row for row in read_samples(run.out).values() if row.state == "trained"]
    assert {row.reward for row in rows} == {0.0, 1.0}
    decode = Tokenizer(EXAMPLE / "start").decode
    right = read_responses(run.out, [row for row in rows if row.reward == 1.0])
    assert any(
        '"name": "lookup"' in (text := decode(each.token_ids)) and '"name": "calculate"' in text
        for each in right
        if each is not None and 0 in each.loss_mask  # the results of the calls
    )
