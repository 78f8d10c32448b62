"""What the pages say to do with a run is done: one that is over is read, one that is served is talked to."""

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
from tests.service.standing import StandingRun

from dora.config.schema import ServiceSection
from dora.core.types import RequestId
from dora.runtime.rollout.episodes import EpisodeEnded, EpisodeId, PolicyTurn
from dora.service.server import WebGateway

READ = ("dora audit", "dora why", "dora replay", "dora report", "dora trace")


def words_of(line: str) -> list[str]:
    """As a shell would hand them on."""
    return [found for word in shlex.split(line, comments=True) for found in sorted(glob(word)) or [word]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    furnish(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_run_that_is_over_is_read_as_the_pages_say(here: Path) -> None:
    """As small as answers to row 31 allow."""
    (here / "runs" / "a").rename(here / "runs" / "before")
    small = {"run.steps": 2, "trainer.batch_size": 20, "sampling.group_size": 2, "data.shuffle": "false"}
    short = {"sampling.max_response_length": 24, "eval.num_prompts": 0, "engine.kernels": "eager"}
    sets = [part for key, value in (small | short).items() for part in ("--set", f"{key}={value}")]
    for name in ("a", "b"):
        assert dora("train", "examples/gcd.toml", "--out", f"runs/{name}", *sets) == 0
    (here / "runs" / "demo-1").symlink_to(here / "runs" / "a")
    lines = {line for _, line in commands() if line.startswith(READ) and "-- -51" not in line}
    failed = [line for line in sorted(lines) if dora(*words_of(line)[1:]) != 0]
    assert (failed, len(lines) > 3) == ([], True)


def of_page(page: str, text: str) -> Block:
    """The one block of Python of a page that has this text."""
    (block,) = [b for b in of_language("python") if b.page == page and text in b.text]
    return block


@pytest.fixture
def served(here: Path) -> Iterator[Run]:
    """The run that the pages speak of: prompts and rewards come from outside."""
    (line,) = [
        line for b, line in commands() if b.page == "docs/external-trainer.md" and "runs/served" in line
    ]
    words = re.findall(r"--set (\S+?)=(\S+)", line)
    changes = {key.replace(".", "__"): value for key, value in words} | {"run__steps": 3}
    small = {"trainer__batch_size": 2, "sampling__group_size": 2, "sampling__max_response_length": 48}
    made = Run(here / "examples" / "gcd.toml", here / "runs" / "served", command="serve", **changes, **small)
    try:
        made.wait_until((made.out / "service.json").is_file, "its service")
        yield made
    finally:
        made.kill_all()


def test_a_run_that_is_served_gets_prompts_and_rewards_as_the_pages_say(served: Run) -> None:
    judge = of_page("docs/external-trainer.md", "get_experience")
    threading.Thread(target=run, args=(judge, {"__name__": "judge"}), daemon=True).start()
    run(of_page("docs/external-trainer.md", "put_prompts"), {"__name__": "prompts"})
    run(of_page("docs/service.md", "add_engines"), {"__name__": "looking"})
    ended = served.end()
    assert ended.code == 0, ended


def test_an_agent_plays_as_the_page_says(here: Path) -> None:
    """Its prompt is put to the model, whose turn is judged, and the reward ends the episode."""
    standing = StandingRun(here / "task", service__agents="true", data__path="gcd")
    standing.plan.out.mkdir()
    (here / "runs" / "agents").symlink_to(standing.plan.out)
    door = WebGateway(ServiceSection(), standing.plan.out)
    door.open(standing.calls, lambda sentence: None)
    episode, names = EpisodeId(RequestId(0, 0, 0), 0), dict[str, Any]()
    block = of_page("docs/service.md", "async def play")
    alone = re.sub(r"with Client\(.*?\n\n\n", "", block.text, flags=re.DOTALL)  # it is tried above
    play = run(replace(block, text=alone), names)["play"]
    assert callable(play)
    playing = threading.Thread(target=lambda: asyncio.run(play()))
    try:
        standing.agents.start(episode, version=1)
        playing.start()
        standing.told.get(timeout=20)
        standing.agents.on_turn(PolicyTurn(episode, 0, standing.plan.tokenizer.encode("01=61"), "stop", 8))
        standing.look()
        playing.join(20)
        assert standing.words()[-1] == EpisodeEnded(episode, 0, 0.0)
    finally:
        standing.calls.close()
        door.close()
