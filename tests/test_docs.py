"""What the documentation says is there: links, commands, configurations, numbers."""

from __future__ import annotations

import json
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from dora.cli.main import app
from dora.config import load
from dora.config.load import parse_config

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/*.md")])
RESULTS = ROOT / "benchmarks" / "results"
CONFIGS = sorted(ROOT.glob("examples/**/*.toml"))


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_every_link_of_a_page_leads_to_a_file(page: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8"))
    local = [target for target in targets if "://" not in target]
    assert [target for target in local if not (page.parent / target).exists()] == []


@pytest.mark.parametrize("config", CONFIGS, ids=name_of)
def test_every_example_can_be_read(config: Path) -> None:
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


def test_the_figures_of_the_readme_are_those_of_the_committed_benchmark() -> None:
    figures = json.loads((ROOT / "benchmarks" / "results" / "demo.json").read_text(encoding="utf-8"))
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    expected = [
        f"| {r['policy']} | {r['seed']} | {r['sampled_before']:.3f} to {r['sampled_after']:.3f} "
        f"| {r['greedy_before']:.3f} to {r['greedy_after']:.3f} | {r['cpu_s']:.0f} | {r['wall_s']:.0f} "
        f"| {r['live_versions']:.2f} | {r['busy']:.2f} | {r['stall_s']:.1f} |"
        for r in figures["rows"]
    ]
    assert [line for line in readme.splitlines() if line.startswith(("| dora |", "| sync |"))] == expected
    ratio = figures["ratios"]["sync_over_dora_wall_s"]
    assert f"{ratio:.2f} times the wall time" in readme
    assert figures["machine"]["cpu"] in readme


def test_the_figures_of_orchestration_in_the_readme_are_those_of_the_committed_benchmarks() -> None:
    found: dict[str, dict[str, float]] = {}
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        found[path.stem] = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    place, move, elastic = found["placement"], found["migration"], found["elastic"]
    core, kills, swarm = found["orchestrator"], found["kill_during_migration"], found["swarm"]
    expected = [
        f"| {place['occupancy_orchestrated']:.2f}, static {place['occupancy_static']:.2f} |",
        f"| {place['static_over_orchestrated_wall_s']:.2f} times |",
        f"| {move['reprefill_over_migrate_demo']:.0f}, {move['reprefill_over_migrate_30m']:.0f} times |",
        f"| {move['stop_steps']:.1f} decode steps |",
        f"| p99 {core['handle_p99_ms']:.2f} ms |",
        f"| {core['rebalance_ms']:.0f} ms, whole {core['whole_rebalance_ms'] / 1e3:.1f} s |",
        f"| {kills['kills']:.0f} kills, {kills['findings']:.0f} findings |",
        f"| {swarm['violations']:.0f} violations, {swarm['deadlocks']:.0f} deadlocks |",
        f"| {elastic['apart_over_elastic_wall_s_demo']:.2f}, "
        f"{elastic['apart_over_elastic_wall_s_paced']:.2f} times |",
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [figure for figure in expected if figure not in readme] == []


def test_the_configuration_in_the_readme_is_complete() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```toml\n(.*?)```", readme, flags=re.DOTALL)
    assert parse_config(tomllib.loads(block)).run.steps > 0


def test_the_reward_in_the_readme_is_a_reward() -> None:
    (block,) = re.findall(
        r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    names: dict[str, object] = {}
    exec(block, names)
    reward = names["reward"]
    assert callable(reward)
    assert reward("6 x 7 = ", " 42 ", answer="42") == 1.0
    assert reward("6 x 7 = ", "41", answer="42") == 0.0


def test_the_figures_of_the_engine_in_the_readme_are_those_of_the_committed_benchmarks() -> None:
    def ratios(name: str) -> dict[str, float]:
        content: dict[str, dict[str, float]] = json.loads((RESULTS / f"{name}.json").read_text("utf-8"))
        return content["ratios"]

    e, v, x = ratios("engine"), ratios("versions"), ratios("exact")
    decoding = x["exact_over_normal_decode_0.5M_float32_batch_32"]
    training = x["exact_over_normal_trainer_forward_and_backward_0.5M_float32_batch_8"]
    expected = [
        f"| {e['vs_bare']:.1f}, {e['vs_bare_10M']:.1f} times |",
        f"| {e['vs_generate']:.1f}, {e['vs_continuous_batching']:.1f}, {e['vs_vllm_cpu']:.1f} times |",
        f"| {e['roofline_share_10M']:.2f} of them reached |",
        f"| {v['one_over_24_8_rows_0.5M']:.2f}, {v['one_over_24_8_rows_10M']:.2f} times |",
        f"| {decoding:.2f}, {training:.2f} times |",
        f"{e['vs_bare_equal_lengths']:.1f} times the engine's time",
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [line for line in expected if line not in readme] == []


def test_the_figures_of_the_trainer_in_the_readme_are_those_of_the_committed_benchmarks() -> None:
    ratios = json.loads((RESULTS / "trainer.json").read_text("utf-8"))["ratios"]
    kills = json.loads((RESULTS / "resume.json").read_text("utf-8"))["ratios"]
    padded, trl, memory = (
        [ratios[name + size] for size in ("", "_10M", "_60M")]
        for name in ("vs_padded_loop", "vs_trl", "peak_memory_over_padded")
    )
    expected = [
        f"| {', '.join(f'{ratio:.1f}' for ratio in padded)} times |",
        f"| {', '.join(f'{ratio:.1f}' for ratio in trl)} times |",
        f"| {', '.join(f'{ratio:.2f}' for ratio in memory)} |",
        f"| {kills['kills']:.0f} kills, {kills['violations']:.0f} violations |",
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [figure for figure in expected if figure not in readme] == []


def test_the_figures_of_the_stream_in_the_readme_are_those_of_the_committed_benchmarks() -> None:
    ratios: dict[str, float] = {}
    for name in ("stream", "workflow", "weights"):
        ratios |= json.loads((RESULTS / f"{name}.json").read_text("utf-8"))["ratios"]
    expected = [
        f"| {ratios['task_by_task_over_pipelined_step_s_demo']:.1f} times |",
        f"| {ratios['eager_over_deferred_stop_60M']:.1f} times |",
        f"| {ratios['latency_vs_transferqueue']:.1f} times |",
        f"| {ratios['throughput_vs_transferqueue']:.0f} times |",
        f"| {ratios['memcpy_share']:.2f} |",
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [figure for figure in expected if figure not in readme] == []


def test_what_the_readme_says_of_learning_is_what_the_committed_benchmark_found() -> None:
    rows = json.loads((RESULTS / "convergence.json").read_text("utf-8"))["rows"]
    wanted = {"task": "all", "policy": "dora", "S": 2, "correction": "none", "pairs": 5}
    (found,) = [row for row in rows if wanted.items() <= row.items()]
    said = f"that of `sync` {100 * found['difference']:+.1f} ± {100 * found['half']:.1f} points"
    assert said in (ROOT / "README.md").read_text(encoding="utf-8")


def test_what_the_readme_says_of_other_trainers_is_what_the_committed_benchmark_found() -> None:
    found = json.loads((RESULTS / "peers.json").read_text("utf-8"))["ratios"]
    sync = found["dora_s0_vs_trl_sync_s0_samples_per_s"]
    running_ahead = found["dora_s2_vs_trl_async_vllm_s2_samples_per_s"]
    expected = [
        f"{sync:.1f} times those of `GRPOTrainer`, {running_ahead:.1f} times those of `AsyncGRPOTrainer`\n",
        f"discards {found['trl_async_vllm_s2_discarded']:,.0f} answers",
    ]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert [words for words in expected if words not in readme] == []
    assert found["dora_s0_discarded"] == found["dora_s2_discarded"] == 0


def test_the_engine_is_the_fastest_in_every_setting_of_the_committed_grid() -> None:
    rows = json.loads((RESULTS / "engine_grid.json").read_text("utf-8"))["rows"]
    steps: dict[tuple[object, ...], dict[str, float]] = {}
    for row in (row for row in rows if "step_cpu_ms" in row):
        setting = (row["model"], row["batch"], row["context"], row["lengths"])
        steps.setdefault(setting, {})[row["decoder"]] = row["step_cpu_ms"]
    assert len(steps) == 48
    assert [setting for setting, own in steps.items() if min(own, key=lambda d: own[d]) != "engine"] == []
