"""examples/tool_caller: both forms sample the same tokens and train the same weights, bit for bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, query, summary

from dora.audit import audit
from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.tokenizer import Tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_caller"
NUM_STEPS = 2
SETTINGS = {
    "run__steps": NUM_STEPS,
    "trainer__batch_size": 1,  # each episode of the harness takes seconds to import OpenAI's client
    "sampling__group_size": 4,
    "trainer__warmup_steps": 0,
    "eval__num_prompts": 0,
    "orchestrator__max_staleness": 0,
    "trainer__deterministic": "true",
    "engine__exact_logprobs": "true",
}


def trained(run: Run) -> tuple[bytes, list[tuple[Any, ...]]]:
    """The last weights and all trained samples of a run that must end well and pass the audit."""
    run.succeed()
    assert summary(run.out)["steps"] == NUM_STEPS
    assert audit.check(run.out).findings == ()
    columns = "group_id, sibling, prompt_ids, token_ids, loss_mask, reward, advantage"
    rows = query(run.out, f"select {columns} from samples where state = 'trained' order by 1, 2")
    weights = run.out / "checkpoints" / f"step-{NUM_STEPS}" / "model.safetensors"
    return weights.read_bytes(), rows


def test_both_forms_train_the_same(start_run: StartRun, tmp_path: Path) -> None:
    by_environment = trained(start_run(EXAMPLE / "environment.toml", **SETTINGS))
    (tmp_path / "run").rename(tmp_path / "environment")
    run = start_run(EXAMPLE / "harness.toml", command="serve", **SETTINGS)
    run.wait_until((run.out / "service.json").exists, "its service")
    agents = dora("rollout", run.out, "--concurrency", "2", "--", sys.executable, EXAMPLE / "harness.py")
    assert agents.code == 0, agents.err
    by_harness = trained(run)
    assert by_harness == by_environment
    assert by_harness[0] != (EXAMPLE / "start" / "model.safetensors").read_bytes()
    assert {reward for *_, reward, _ in by_harness[1]} == {0.0, 1.0}


def test_the_harness_knows_nothing_of_dora() -> None:
    code = "import sys, harness; sys.exit(any(name.partition('.')[0] == 'dora' for name in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=EXAMPLE, check=False).returncode == 0


def test_the_environment_shows_the_tools_as_the_template_does() -> None:
    code = (
        "import asyncio, json, environment, shop;"
        "shown = asyncio.run(environment.Shop().reset({'prompt': 'What do 7 fig cost?'}, 0));"
        "print(json.dumps([shown, shop.TOOLS]))"
    )
    printed = subprocess.run(
        [sys.executable, "-c", code], cwd=EXAMPLE, check=True, capture_output=True, text=True
    ).stdout
    shown: list[Any]
    tools: list[Any]
    shown, tools = json.loads(printed)
    encoder = PromptEncoder(Tokenizer(EXAMPLE / "start"), ChatTemplate(EXAMPLE / "start"))
    assert encoder.encode(shown) == encoder.encode("What do 7 fig cost?", tools)
