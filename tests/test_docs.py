"""Links, commands, configurations and numbers of the documentation are valid."""

from __future__ import annotations

import asyncio
import json
import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest

from dora.cli.main import app
from dora.config import load
from dora.config.load import parse_config
from dora.envs.base import Step

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
RESULTS = ROOT / "benchmarks" / "results"
README = (ROOT / "README.md").read_text(encoding="utf-8")
BENCHMARKS_PAGE = " ".join((ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8").split())
CONFIGS = sorted(ROOT.glob("examples/**/*.toml"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_local_link_of_a_page_exists(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_every_example_configuration_is_valid(config: Path) -> None:
    given = tomllib.loads(config.read_text(encoding="utf-8"))
    missing = [f"{name}.path={ROOT}" for name in ("model", "data") if "path" not in given[name]]
    assert load.read_config(config, missing).run.steps > 0


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_command_of_a_page_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    lines = re.findall(r"(?:^    |`)(dora [^`\n#]+)", text, flags=re.MULTILINE)
    known = {
        str(command.name or command.callback.__name__)
        for command in app.registered_commands
        if command.callback
    }
    known |= {str(group.name) for group in app.registered_groups}
    assert {shlex.split(line)[1] for line in lines} <= known
    targets = set(re.findall(r"make (demo|test|\w+)`?(?:\s|$)", text)) & {"demo", "test"}
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(f"\n{target}:" in makefile for target in targets)


def test_every_command_has_an_example_on_the_page_of_commands() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    groups = {str(group.name): group.typer_instance for group in app.registered_groups}
    names = [
        (prefix, command)
        for prefix, own in {"": app, **groups}.items()
        if own
        for command in own.registered_commands
    ]
    commands = {
        f"dora {prefix} ".replace("  ", " ") + str(command.name or command.callback.__name__)
        for prefix, command in names
        if command.callback
    }
    assert len(commands) > 20
    assert [name for name in sorted(commands) if f"`{name}`" not in page or f"\n    {name}" not in page] == []


def test_the_demo_on_the_page_of_benchmarks_is_the_committed_one() -> None:
    """The tables of the page are generated; tests/docs/test_site.py compares them."""
    figures = json.loads((RESULTS / "demo.json").read_text(encoding="utf-8"))
    ratio = figures["ratios"]["sync_over_dora_wall_s"]
    assert f"{ratio:.2f} times the wall time" in BENCHMARKS_PAGE
    assert figures["machine"]["cpu"] in BENCHMARKS_PAGE


def blocks_of_readme(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 120
    assert len(README.split()) <= 900


def test_the_configuration_in_the_readme_is_complete() -> None:
    (block,) = blocks_of_readme("toml")
    assert parse_config(tomllib.loads(block)).run.steps > 0


def test_the_reward_and_the_environment_in_the_readme_work() -> None:
    names: dict[str, Any] = {}
    for block in blocks_of_readme("python"):
        exec(block, names)
    reward, episode = names["reward"], names["Doubling"]()
    assert reward("6 x 7 = ", " 42 ", answer="42") == 1.0
    assert reward("6 x 7 = ", "41", answer="42") == 0.0
    assert asyncio.run(episode.reset({"number": 12, "prompt": "12,12:"}, 0)) == "12,12:"
    assert asyncio.run(episode.step(" 24")) == Step("", 1.0, True)


def test_the_figures_of_the_readme_are_the_committed_ones() -> None:
    def ratios(name: str) -> dict[str, float]:
        content: dict[str, dict[str, float]] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        return content["ratios"]

    speed, faults, peers = ratios("policies"), ratios("faults"), ratios("peers")
    mixed = [
        speed[f"{paced}dora_vs_{policy}"] for paced in ("", "paced_") for policy in ("partial", "inflight")
    ]
    accuracy, half = (100 * ratios("convergence")[f"dora_s2_minus_sync_all{part}"] for part in ("", "_half"))
    same = [ratios("peers_async")[f"samples_per_s_dora_one_version_vs_trl_s{bound}"] for bound in (2, 4)]
    expected = [
        f"{speed['dora_vs_sync']:.2f} times the tokens/s of synchronous training",
        f"{min(mixed):.2f} to {max(mixed):.2f} times the throughput",
        f"{accuracy:.1f} ± {half:.1f} points",
        f"{faults['injected']:.0f} injected faults",
        f"lost, doubled or mixed {faults['lost'] + faults['doubled'] + faults['mixed']:.0f} samples",
        f"pauses for {ratios('migration')['stop_steps']:.1f} decode steps",
        f"discarded {peers['trl_async_vllm_s2_discarded']:,.0f} responses",
        f"discards {peers['dora_s2_discarded']:.0f};",
        f"trains {same[0]:.2f} to {same[1]:.2f} times as many samples/s",
    ]
    readme = " ".join(README.split())
    assert [claim for claim in expected if claim not in readme] == []


def test_the_final_accuracy_on_the_page_of_benchmarks_is_the_committed_one() -> None:
    rows = json.loads((RESULTS / "convergence.json").read_text("utf-8"))["rows"]
    wanted = {"task": "all", "policy": "dora", "S": 2, "correction": "none", "pairs": 5}
    (found,) = [row for row in rows if wanted.items() <= row.items()]
    claim = f"that of `sync` by {100 * found['difference']:+.1f} ± {100 * found['half']:.1f} points"
    assert claim in " ".join(BENCHMARKS_PAGE.split())


def test_the_comparison_with_trl_on_the_page_of_benchmarks_is_the_committed_one() -> None:
    found = json.loads((RESULTS / "peers.json").read_text("utf-8"))["ratios"]
    same_server = json.loads((RESULTS / "peers_async.json").read_text("utf-8"))["ratios"]
    sync = found["dora_s0_vs_trl_sync_s0_samples_per_s"]
    asynchronous = found["dora_s2_vs_trl_async_vllm_s2_samples_per_s"]
    tokens = [same_server[f"trained_tokens_per_s_dora_one_version_vs_trl_s{bound}"] for bound in (2, 4)]
    slower = [same_server[f"samples_per_s_dora_one_version_vs_trl_s{bound}"] for bound in (2, 4)]
    expected = [
        f"{sync:.1f} times the samples per second of TRL's `GRPOTrainer`",
        f"{asynchronous:.1f} times those of `AsyncGRPOTrainer`",
        f"discards {found['trl_async_vllm_s2_discarded']:,.0f} responses",
        f"{slower[0]:.2f} to {slower[1]:.2f} times its samples per second",
        f"{tokens[0]:.2f} to {tokens[1]:.2f} times its tokens per second",
    ]
    page = " ".join(BENCHMARKS_PAGE.split())
    assert [claim for claim in expected if claim not in page] == []
    assert found["dora_s0_discarded"] == found["dora_s2_discarded"] == 0
    assert {same_server[f"discarded_dora_one_version_s{bound}"] for bound in (2, 4)} == {0.0}


def test_the_engine_is_the_fastest_in_every_setting_of_the_committed_grid() -> None:
    rows = json.loads((RESULTS / "engine_grid.json").read_text("utf-8"))["rows"]
    steps: dict[tuple[object, ...], dict[str, float]] = {}
    for row in (row for row in rows if "step_cpu_ms" in row):
        setting = (row["model"], row["batch"], row["context"], row["lengths"])
        steps.setdefault(setting, {})[row["decoder"]] = row["step_cpu_ms"]
    assert len(steps) == 48
    assert [setting for setting, own in steps.items() if min(own, key=lambda d: own[d]) != "engine"] == []
