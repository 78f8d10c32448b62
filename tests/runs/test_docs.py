"""The commands and programs of the documentation work: on finished runs, and on runs that are served."""

from __future__ import annotations

import asyncio
import re
import shlex
import threading
from collections.abc import Iterator
from dataclasses import replace
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from tests.docs.blocks import Block, commands, dora, furnish, of_language, run
from tests.runtime.running import Run
from tests.service.fake_run import FakeRun, serve

from dora import api
from dora.core.types import RequestId
from dora.envs.episode import EpisodeEnded, EpisodeId, PolicyTurn

EXAMPLES = Path(__file__).parents[2] / "examples"
READING = ("dora audit", "dora why", "dora replay", "dora report", "dora trace")


def arguments_of(line: str) -> list[str]:
    """The words of a command line, expanded as by a shell."""
    return [found for word in shlex.split(line, comments=True) for found in sorted(glob(word)) or [word]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with the files that the pages mention."""
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_commands_that_read_a_finished_run_work(here: Path) -> None:
    """The runs are small: groups in the commands are replaced by one that they have."""
    (here / "runs" / "a").rename(here / "runs" / "before")
    small = {"run.steps": 2, "trainer.batch_size": 4, "sampling.group_size": 2, "data.shuffle": "false"}
    short = {"sampling.max_response_length": 24, "eval.num_prompts": 0, "engine.kernels": "eager"}
    sets = [part for key, value in (small | short).items() for part in ("--set", f"{key}={value}")]
    for name in ("a", "b"):
        assert dora("train", "examples/gcd.toml", "--out", f"runs/{name}", *sets) == 0
    lines = {
        re.sub(r"\b0/\d+", "0/3", line)
        for _, line in commands()
        if line.startswith(READING) and "-- -51" not in line  # a held-out group
    }
    for name in {"demo-1", *re.findall(r"\bruns/([\w-]+)", "\n".join(lines))} - {"a", "b"}:
        (here / "runs" / name).symlink_to(here / "runs" / "a")
    failed = [line for line in sorted(lines) if dora(*arguments_of(line)[1:]) != 0]
    assert (failed, len(lines) > 3) == ([], True)


def find_block(page: str, text: str) -> Block:
    """The only Python block of a page that contains this text."""
    (block,) = [b for b in of_language("python") if b.page == page and text in b.text]
    return block


@pytest.fixture
def served(here: Path) -> Iterator[Run]:
    """The run of docs/external-trainer.md, with external prompts and rewards, but smaller."""
    (line,) = [
        line for b, line in commands() if b.page == "docs/external-trainer.md" and "runs/served" in line
    ]
    words = re.findall(r"--set (\S+?)=(\S+)", line)
    changes = {key.replace(".", "__"): value for key, value in words} | {"run__steps": 3}
    small: dict[str, Any] = {
        "trainer__batch_size": 2,
        "sampling__group_size": 2,
        "sampling__max_response_length": 48,
    }
    served = Run(
        here / "examples" / "gcd.toml", here / "runs" / "served", command="serve", **changes, **small
    )
    try:
        served.wait_until((served.out / "service.json").is_file, "its service")
        yield served
    finally:
        served.kill_all()


def test_the_clients_of_the_pages_supply_prompts_and_rewards(served: Run) -> None:
    reward_worker = find_block("docs/external-trainer.md", "get_experience")
    threading.Thread(target=run, args=(reward_worker, {"__name__": "reward_worker"}), daemon=True).start()
    run(find_block("docs/external-trainer.md", "put_prompts"), {"__name__": "prompts"})
    run(find_block("docs/service.md", "add_engines"), {"__name__": "control"})
    served.succeed()


def test_the_agent_of_the_page_runs_an_episode(here: Path) -> None:
    fake = FakeRun(here / "task", service__agents="true", data__path="gcd")
    (here / "runs" / "agents").symlink_to(fake.setup.out)
    episode, names = EpisodeId(RequestId(0, 0, 0), 0), dict[str, Any]()
    block = find_block("docs/service.md", "async def run_episode")
    agent_only = re.sub(r"with Client\(.*?\n\n\n", "", block.text, flags=re.DOTALL)  # tested above
    run_episode = run(replace(block, text=agent_only), names)["run_episode"]
    assert callable(run_episode)
    agent = threading.Thread(target=lambda: asyncio.run(run_episode()))
    with serve(fake):
        fake.agents.start(episode, version=1)
        agent.start()
        fake.messages.get(timeout=20)
        fake.agents.on_turn(PolicyTurn(episode, 0, fake.setup.tokenizer.encode("01=61"), "stop", 8))
        fake.process()
        agent.join(20)
        assert fake.replies()[-1] == EpisodeEnded(episode, 0, 0.0)


@pytest.mark.timeout(240)
def test_the_page_of_python_starts_and_reads_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its runs, but of one step and without evaluation."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(EXAMPLES)
    train, few = api.train, {"run.steps": 1, "trainer.batch_size": 2, "sampling.max_response_length": 40}

    def train_a_little(config: Any, out: str, overrides: Any = None, **options: Any) -> api.Run:
        none = {"eval.num_prompts": 0, "eval.every": 0, "trainer.keep_best": False}
        no_evaluation = {} if isinstance(config, dict) else none
        return train(config, out, {**(overrides or {}), **few, **no_evaluation}, **options)

    monkeypatch.setattr(api, "train", train_a_little)
    names: dict[str, Any] = {}
    for block in of_language("python"):
        if block.page == "docs/python-api.md":
            run(block, names)
    assert [run.status.state for run in names["runs"]] == ["finished"] * 2
    assert (tmp_path / "runs" / "a" / "report.html").is_file()
    assert names["best"].folder.name.startswith("lr-")
