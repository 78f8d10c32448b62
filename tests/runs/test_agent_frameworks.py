"""Agent frameworks, unmodified, run all episodes of runs of examples/tool_caller: `make test-agents`.

Its model is trained to call tools.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, summary

from dora.audit import audit
from dora.data.tokenizer import Tokenizer
from dora.journal.reader import read_responses, read_samples

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE = EXAMPLES / "tool_caller"
PYTHON = os.environ.get("AGENTS_PYTHON", sys.executable)  # that has the frameworks
VERIFIERS_PYTHON = os.environ.get("VERIFIERS_PYTHON", sys.executable)
TIMEOUT_S = 600.0  # each episode imports its framework
SETTINGS = ("env", "LITELLM_LOCAL_MODEL_COST_MAP=True", "HF_HUB_OFFLINE=1", "PYTHONPATH=")

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
    program: tuple[str | Path, ...] = (*SETTINGS, PYTHON, EXAMPLE / f"with_{framework}.py")
    if framework == "verifiers":
        uv = f"PATH={Path(VERIFIERS_PYTHON).parent}:{os.environ['PATH']}"
        runner = (VERIFIERS_PYTHON, EXAMPLES / "agents" / "with_verifiers.py", "shop_taskset")
        program = (*SETTINGS, f"PYTHONPATH={EXAMPLE}", uv, *runner)
    agents = dora("rollout", run.out, "--concurrency", "2", "--", *program, timeout_s=TIMEOUT_S)
    assert agents.code == 0, agents.err
    run.succeed()
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


@pytest.mark.parametrize("framework", ["mini_swe_agent", "smolagents"])
def test_a_framework_runs_the_episodes_of_a_model_that_does_not_know_its_tools(
    start_run: StartRun, tmp_path: Path, framework: str
) -> None:
    """It has a long prompt of its own, and repeats it after each turn with an error; the rewards are 0."""
    shutil.copytree(EXAMPLE, tmp_path / "shop")
    file = tmp_path / "shop" / "start" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"max_position_embeddings": 20000}))
    run = start_run(
        tmp_path / "shop" / "harness.toml",
        command="serve",
        run__steps=1,
        trainer__batch_size=1,
        sampling__group_size=2,
        sampling__max_response_length=1000,
        sampling__stop='["Observation:", "Calling tools:"]',
        data__max_prompt_length=16000,
        engine__max_num_seqs=4,
        trainer__micro_batch_tokens=20000,
        eval__num_prompts=0,
        reward__max_failed_fraction=0.0,
    )
    run.wait_until((run.out / "service.json").exists, "its service")
    program = (*SETTINGS, PYTHON, EXAMPLES / "agents" / f"with_{framework}.py")
    agents = dora("rollout", run.out, "--concurrency", "2", "--", *program, timeout_s=TIMEOUT_S)
    assert agents.code == 0, agents.err
    run.succeed()
    assert audit.check(run.out).findings == ()
    trained = [row for row in read_samples(run.out).values() if row.state == "trained"]
    assert [row.reward for row in trained] == [0.0, 0.0]
    for response in read_responses(run.out, trained):
        assert response is not None
        assert 0 in response.loss_mask, "more than one turn"
