"""Agent frameworks, unmodified, run episodes through the real server: `make test-agents`.

The turns of the model are given, because a tiny model without training calls no tools.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.service.fake_run import FakeRun, serve
from tests.service.test_agent_apis import make_run
from tests.service.test_agent_clients import address, model

from dora.envs.episode import EpisodeBranched, EpisodeObservation, EpisodeStarted

EXAMPLES = Path(__file__).parents[2] / "examples" / "agents"
PYTHON = os.environ.get("AGENTS_PYTHON", sys.executable)  # that has the frameworks
VERIFIERS_PYTHON = os.environ.get("VERIFIERS_PYTHON", sys.executable)  # with another client
VERIFIERS = {  # it starts uv
    "PYTHONPATH": str(EXAMPLES),
    "PATH": f"{Path(VERIFIERS_PYTHON).parent}:{os.environ['PATH']}",
}
MAX_TOKENS = 30_000  # of prompts with a vocabulary of letters

pytestmark = pytest.mark.agents


@pytest.fixture
def run(tmp_path: Path) -> Iterator[FakeRun]:
    """A served run; an episode waits for an agent."""
    run = make_run(
        tmp_path,
        MAX_TOKENS,
        sampling__stop='["Observation:", "Calling tools:"]',  # those of smolagents, which always sends them
        trainer__micro_batch_tokens=2 * MAX_TOKENS,
    )
    with serve(run):
        yield run


def call(name: str, arguments: str) -> str:
    """A turn that calls a tool."""
    return f'<tool_call>{{"name": "{name}", "arguments": {arguments}}}</tool_call>'


ADD = call("add", '{"a": 2, "b": 3}')
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && echo 5"


@pytest.mark.parametrize(
    ("module", "script", "turns", "output", "settings"),
    [
        ("litellm", "with_litellm.py", [ADD, "5"], "1.0", {}),
        ("agents", "with_openai_agents.py", [ADD, "5"], "1.0", {}),
        ("smolagents", "with_smolagents.py", [ADD, call("final_answer", '{"answer": "5"}')], "1.0", {}),
        (
            "minisweagent",
            "with_mini_swe_agent.py",
            [call("bash", '{"command": "expr 2 + 3"}'), call("bash", f'{{"command": "{SUBMIT}"}}')],
            "1.0",
            {"MSWEA_SILENT_STARTUP": "1"},
        ),
        ("verifiers", "with_verifiers.py sums", [ADD, "5"], "1.0", VERIFIERS),
        ("verifiers", "with_verifiers.py sums", ["5"], "1.0", VERIFIERS),
    ],
)
def test_a_framework_runs_an_episode(
    run: FakeRun, module: str, script: str, turns: list[str], output: str, settings: dict[str, str]
) -> None:
    python = VERIFIERS_PYTHON if module == "verifiers" else PYTHON
    if subprocess.run(
        [python, "-c", f"import importlib.util as u; exit(u.find_spec('{module}') is None)"]
    ).returncode:
        pytest.skip(f"{python} has no {module}; make test-agents installs it")
    url, token = address(run)
    service = {"OPENAI_BASE_URL": f"{url}/s/a/v1", "OPENAI_API_KEY": token}
    row = {"DORA_PROMPT": "2 + 3?", "DORA_FIELDS": '{"idx": 2, "answer": "5"}'}
    offline = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "HF_HUB_OFFLINE": "1", "PYTHONPATH": ""}
    file, *arguments = script.split()
    with model(run, turns, MAX_TOKENS) as replies:
        ended = subprocess.run(
            [python, EXAMPLES / file, *arguments],
            env={**os.environ, **offline, **service, **row, **settings, "HOME": str(run.setup.out)},
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout.strip().splitlines()[-1] == output
    started, *more = replies
    assert isinstance(started, EpisodeStarted)
    assert {type(reply) for reply in more} <= {EpisodeObservation, EpisodeBranched}
    assert run.agents.num_retokenized == 0
