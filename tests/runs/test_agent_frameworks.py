"""Agent frameworks, unmodified, run the episodes of whole runs with a tiny model: `make test-agents`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.runs.conftest import StartRun
from tests.runtime.running import dora, summary
from tests.service.test_agent_apis import prepare

from dora.audit import audit

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
PYTHON = os.environ.get("AGENTS_PYTHON", sys.executable)  # that has the frameworks

pytestmark = pytest.mark.agents


@pytest.mark.parametrize("framework", ["litellm", "openai_agents", "verifiers"])
def test_a_framework_runs_the_episodes_of_a_run(task: Path, start_run: StartRun, framework: str) -> None:
    prepare(task.parent / "start")
    run = start_run(
        command="serve",
        run__steps=2,
        service__agents="true",
        data__chat_template="true",
        data__max_prompt_length=400,
        sampling__max_response_length=200,
        sampling__max_turn_length=40,
        reward__max_failed_fraction=1.0,
    )
    run.wait_until((run.out / "service.json").exists, "its service")
    settings = ["LITELLM_LOCAL_MODEL_COST_MAP=True", "HF_HUB_OFFLINE=1", "PYTHONPATH="]
    program: list[str | Path] = ["env", *settings, PYTHON, EXAMPLES / f"with_{framework}.py"]
    agents = dora("rollout", run.out, "--concurrency", "2", "--", *program)
    assert agents.code == 0, agents.err
    ended = run.end()
    assert ended.code == 0, ended.err
    assert summary(run.out)["steps"] == 2
    assert audit.check(run.out).findings == ()
