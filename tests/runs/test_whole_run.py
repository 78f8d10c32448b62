"""A run of a few steps from start to end, and the files that it writes."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs.conftest import StartRun
from tests.runtime.running import Run, dora, journal, metrics, summary

from dora.model.pretrained import load_pretrained

STEPS, BATCH_SIZE, GROUP_SIZE = 6, 2, 2
KEYS = [
    "steps",
    "trained_groups",
    "trained_samples",
    "filtered_groups",
    "failed_groups",
    "pending_groups",
    "eval_before",
    "eval_after",
    "eval_greedy_before",
    "eval_greedy_after",
    "best_version",
    "best_checkpoint",
    "reward_last",
    "trained_tokens",
    "regenerated_tokens",
    "reprefill_tokens",
    "wall_s",
    "tokens_per_s",
    "live_versions_max",
    "live_versions_mean",
    "staleness_histogram",
    "staleness_mean",
    "staleness_max",
    "rollout_utilization",
    "trainer_idle_ratio",
    "stall_s",
    "exposed_rollout_s",
    "orchestrator_time_ratio",
    "migrations",
    "migrated_kv_bytes",
    "engine_failures",
    "engine_restarts",
    "attempts",
    "redone_steps",
    "redone_tokens",
    "c1",
    "c2",
    "c3",
]


@pytest.fixture(scope="module")
def run(task: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A finished run with evaluation."""
    out = tmp_path_factory.mktemp("whole") / "run"
    changes: dict[str, Any] = {"run__steps": STEPS, "engine__min_step_time": "20ms", "eval__num_prompts": 3}
    run = Run(task, out, eval__path=task.parent / "prompts.jsonl", **changes)
    result = run.end()
    assert (result.code, result.err) == (0, ""), result
    assert "C1 kept, C2 kept, C3 kept" in result.out
    return run


def test_the_summary_has_all_documented_keys(run: Run) -> None:
    assert [key for key in KEYS if key not in summary(run.out)] == []


def test_the_summary_adds_up(run: Run) -> None:
    s = summary(run.out)
    assert s["steps"] == STEPS
    assert s["trained_groups"] == STEPS * BATCH_SIZE
    assert s["trained_samples"] == STEPS * BATCH_SIZE * GROUP_SIZE
    assert sum(s["staleness_histogram"].values()) == s["trained_samples"]
    mean = sum(int(age) * count for age, count in s["staleness_histogram"].items()) / s["trained_samples"]
    assert s["staleness_mean"] == pytest.approx(mean)
    assert s["staleness_max"] == max(map(int, s["staleness_histogram"])) <= 2
    assert (s["filtered_groups"], s["failed_groups"], s["pending_groups"], s["engine_failures"]) == (
        0,
        0,
        0,
        0,
    )
    assert s["tokens_per_s"] == pytest.approx(s["trained_tokens"] / s["wall_s"], rel=0.01)
    assert all(
        0 < s[share] < 1 for share in ("rollout_utilization", "trainer_idle_ratio", "orchestrator_time_ratio")
    )
    assert 0 <= s["stall_s"] <= s["wall_s"]
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)
    assert None not in (s["eval_before"], s["eval_after"], s["eval_greedy_before"], s["eval_greedy_after"])


def test_the_last_step_is_printed_once_and_the_last_line_names_the_run_folder(run: Run) -> None:
    lines = run.end().out.splitlines()
    assert sum(line.startswith(f"step {STEPS}/{STEPS},") for line in lines) == 1
    hint = f"dora report {run.out} writes an HTML report, dora dash {run.out} serves it"
    assert lines[-1] == f"run folder {run.out}: {hint}"


def test_several_versions_are_live_at_once(run: Run) -> None:
    s = summary(run.out)
    assert s["live_versions_max"] >= 2
    assert 1 < s["live_versions_mean"] <= s["live_versions_max"] <= 3


def test_an_engine_decodes_two_versions_at_once(run: Run) -> None:
    running: dict[tuple[int, ...], tuple[int, int]] = {}  # request -> (engine, version)
    max_versions = 0
    for line in journal(run.out):
        if line["kind"] == "generate":
            running |= {tuple(r): (line["engine"], line["version"]) for r in line["requests"]}
        elif line["kind"] == "request_finished":
            del running[tuple(line["request"])]
        versions = [{v for e, v in running.values() if e == engine} for engine in (0, 1)]
        max_versions = max(max_versions, *map(len, versions))
    assert max_versions >= 2


def test_each_step_has_one_line_of_metrics(run: Run) -> None:
    lines = metrics(run.out)
    assert [line["step"] for line in lines] == list(range(STEPS))
    assert sum(line["num_response_tokens"] for line in lines) == summary(run.out)["trained_tokens"]
    assert all(line["actor/grad_norm"] > 0 for line in lines)


def test_the_checkpoint_loads_here_and_in_transformers(run: Run, task: Path) -> None:
    from transformers import AutoTokenizer, Qwen3ForCausalLM

    folder = run.out / "checkpoints" / f"step-{STEPS}"
    config, flat = load_pretrained(folder)
    assert config == load_pretrained(task.parent / "start")[0]
    assert not torch.equal(flat, load_pretrained(task.parent / "start")[1])
    theirs = Qwen3ForCausalLM.from_pretrained(folder)
    ours = AutoTokenizer.from_pretrained(folder)("10:").input_ids
    assert theirs(torch.tensor([ours])).logits.shape == (1, 3, config.vocab_size)


def test_audit_and_replay_agree_with_the_run(run: Run) -> None:
    audit, replay = dora("audit", run.out, "--deep", "4"), dora("replay", run.out)
    assert (audit.code, replay.code) == (0, 0)
    assert "log-probs ok  4 samples recomputed" in audit.out
    assert f"{STEPS * BATCH_SIZE} groups admitted = {STEPS * BATCH_SIZE} trained" in audit.out
    assert "replay agrees" in replay.out


def test_without_a_terminal_a_run_prints_plain_lines(run: Run) -> None:
    out = run.end().out
    assert "\x1b" not in out
    line = re.search(rf"^step \d/{STEPS}, \d+ s left, reward .*$", out, re.MULTILINE)
    assert line, out
    reading, starting = out.splitlines()[:2]
    assert reading.startswith("reading model.path = ")
    assert starting == "starting 2 engines, 1 trainer, 1 reward worker"
    assert "accuracy" not in out  # the rewards are not 0 or 1
    for expected in ("tokens/s", "versions v", "staleness", "stall"):
        assert expected in line.group()
    assert all(f"{when} training (version " in out for when in ("before", "after"))


def test_a_finished_run_leaves_nothing_in_memory(run: Run) -> None:
    assert run.weight_folders() == []


def test_a_sync_run_has_one_live_version_and_no_stale_samples(start_run: StartRun) -> None:
    run = start_run(orchestrator__update_policy="sync")
    run.succeed()
    s = summary(run.out)
    assert (s["live_versions_max"], s["live_versions_mean"]) == (1, 1)
    assert set(s["staleness_histogram"]) == {"0"}
    assert s["trained_groups"] == 8
    assert (s["c1"], s["c2"], s["c3"]) == (True, True, True)


def test_the_example_of_a_custom_task_trains(start_run: StartRun, task: Path) -> None:
    example = Path(__file__).parents[2] / "examples" / "own_task" / "sevens.toml"
    small = {"sampling__group_size": 4, "trainer__batch_size": 2, "sampling__max_response_length": 12}
    start = {"model__path": task.parent / "start", "engine__kernels": "eager"}
    run = start_run(example, run__steps=2, **small, **start)
    run.succeed()
    assert summary(run.out)["trained_groups"] == 4
