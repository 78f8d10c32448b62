"""examples/tool_caller: its two forms have the same prompts, and run a few steps that pass the audit."""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, summary

from dora.audit import audit
from dora.data.chat import ChatTemplate, PromptEncoder
from dora.data.tokenizer import Tokenizer

EXAMPLE = Path(__file__).parents[2] / "examples" / "tool_caller"
FEW = {"run__steps": 2, "eval__num_prompts": 0, "sampling__group_size": 2, "engine__num_engines": 1}


def check(run: Run) -> dict[str, str]:
    """The run has ended well, in episodes of three turns; returns the text of each prompt."""
    ended = run.end()
    assert ended.code == 0, ended.err
    assert summary(run.out)["steps"] == 2
    assert audit.check(run.out).findings == ()
    with sqlite3.connect(run.out / "samples.sqlite") as samples:
        assert {state for (state,) in samples.execute("select distinct state from samples")} >= {"trained"}
    lines = dora("samples", run.out, "--jsonl").out.splitlines()
    found = [json.loads(line) for line in lines]
    assert max(response["response"].count("<|im_start|>tool") for response in found) >= 2
    return {sample["group"]: sample["prompt"] for sample in found}


def test_both_forms_train_on_the_same_prompts(start_run: StartRun, tmp_path: Path) -> None:
    environment = check(start_run(EXAMPLE / "environment.toml", **FEW))
    (tmp_path / "run").rename(tmp_path / "environment")
    run = start_run(EXAMPLE / "harness.toml", command="serve", **FEW)
    run.wait_until((run.out / "service.json").exists, "its service")
    agents = dora("rollout", run.out, "--concurrency", "2", "--", sys.executable, EXAMPLE / "harness.py")
    assert agents.code == 0, agents.err
    assert "rewarded" in agents.out
    harness = check(run)
    shared = environment.keys() & harness.keys()
    assert len(shared) >= 2
    assert {group: environment[group] for group in shared} == {group: harness[group] for group in shared}


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
