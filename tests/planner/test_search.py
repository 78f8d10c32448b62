"""The planner's search: the layouts it tries, their ranking, and the problems it refuses."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import typer

from dora.cli.main import app
from dora.errors import InputError
from dora.planner.cluster import Workload
from dora.planner.commands import NOT_CALIBRATED, describe_gain
from dora.planner.hardware import DEVICES, MODELS
from dora.planner.lengths import LengthDistribution
from dora.planner.search import SearchProblem, StepTimeFormula, candidates, neighbours, search

WORKLOAD = Workload(MODELS["qwen2.5-7b"], LengthDistribution(16_000, 1500.0, prompt=100), 4, 4)
PROBLEM = SearchProblem(WORKLOAD, DEVICES["H800"], 16, 2, ("sync", "one_step", "dora"))


def test_every_candidate_uses_all_devices_and_keeps_the_bound() -> None:
    found = [deployment.layout for deployment in candidates(PROBLEM).values()]
    assert {layout.num_devices for layout in found} == {16}
    assert {(layout.policy, layout.max_staleness) for layout in found} == {
        ("sync", 0), ("one_step", 1), ("dora", 1), ("dora", 2),
    }  # fmt: skip
    assert {layout.tp_size for layout in found} == {1, 2, 4}  # 8 does not divide 28 attention heads
    assert {layout.ep_size for layout in found} == {1}
    assert len({layout.num_rows for layout in found if layout.tp_size == 4}) > 2


def test_expert_parallel_sizes_are_searched_for_models_with_experts() -> None:
    problem = replace(PROBLEM, workload=replace(WORKLOAD, model=MODELS["qwen3-30b-a3b"]))
    assert {d.layout.ep_size for d in candidates(problem).values()} == {1, 2, 4, 8, 16}
    assert {d.layout.ep_size for d in candidates(replace(problem, ep_size=4)).values()} == {4}


def test_the_search_ends_at_a_plan_without_faster_neighbours_and_simulates_none_twice() -> None:
    problem = replace(PROBLEM, policies=("dora",))
    found = candidates(problem)
    tokens_per_s = {plan.deployment.layout: plan.tokens_per_s for plan in search(problem, 40)}
    best_layout = max(tokens_per_s, key=tokens_per_s.__getitem__)
    best = next(choices for choices, deployment in found.items() if deployment.layout == best_layout)
    near = {found[choices].layout for choices in neighbours(best, found)}
    assert 2 < len(near) < len(tokens_per_s) < 40
    assert near < tokens_per_s.keys()
    assert len([*search(problem, 3)]) == 3


# Short responses of nearly equal length: one live version is enough.
LIGHT = replace(WORKLOAD, lengths=LengthDistribution(400, 40.0, tail=0.3, prompt=100))


def test_a_layout_that_another_policy_wins_is_tried_with_dora() -> None:
    problem = replace(PROBLEM, workload=LIGHT, policies=("drain", "dora"))
    for max_simulated in (1, 6):
        plans = sorted(search(problem, max_simulated), key=lambda plan: -plan.tokens_per_s)
        best = plans[0].deployment.layout
        if best.policy != "dora":
            same = replace(best, policy="dora", num_rows=plans[0].deployment.engines[0].num_rows)
            assert same in [plan.deployment.layout for plan in plans]
        assert {plan.deployment.layout.policy for plan in plans} == {"drain", "dora"}


def test_the_gain_of_several_versions_or_the_reason_for_none_is_said_in_words() -> None:
    def verdict(problem: SearchProblem) -> str | None:
        return describe_gain(sorted(search(problem, 6), key=lambda plan: -plan.tokens_per_s))

    light = verdict(replace(PROBLEM, workload=LIGHT, policies=("drain", "dora")))
    assert light is not None
    assert light.startswith("No gain from several live versions here: drain is enough")
    heavy = replace(WORKLOAD, lengths=LengthDistribution(16_000, 1500.0, tail=1.6, prompt=100))
    found = verdict(replace(PROBLEM, workload=heavy, policies=("drain", "dora")))
    assert found is not None
    assert found.startswith("Several live versions (dora) train ")
    assert verdict(replace(PROBLEM, policies=("dora",))) is None


def write_light_trace(folder: Path) -> Path:
    """Prompts and completions of a code-completion service: few of its answers are longer than usual."""
    source = random.Random(1)
    rows = [(source.randint(800, 3000), round(source.lognormvariate(3.4, 0.35))) for _ in range(400)]
    path = folder / "completions.csv"
    lines = (f"{prompt},{answer}\n" for prompt, answer in rows)
    path.write_text("ContextTokens,GeneratedTokens\n" + "".join(lines))
    return path


NO_GAIN = re.compile(
    r"No gain from several live versions here: drain is enough \(dora: [+-]0\.\d% tokens/s\); "
    r"the 99th percentile of responses is only 2\.\d times their median"
)


def test_on_an_unseen_trace_with_a_light_tail_plan_and_forecast_say_that_one_version_is_enough(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = (
        f"--model qwen2.5-7b --devices 16 --batch-size 16 --group-size 8 --limit 200 "
        f"--policies drain,dora -S 4 --trace {write_light_trace(tmp_path)}"
    )
    app(f"plan {workload} --max-simulated 8".split(), standalone_mode=False)
    assert NO_GAIN.search(capsys.readouterr().out)
    path = tmp_path / "run.json"
    app(f"simulate run {workload} --tp 1 --steps 14 --json {path}".split(), standalone_mode=False)
    assert NO_GAIN.search(capsys.readouterr().out)
    drain, dora = json.loads(path.read_text())["rows"]
    assert dora["tokens_per_s"] == pytest.approx(drain["tokens_per_s"], rel=0.01)


@pytest.mark.parametrize(
    ("policies", "verdict"),
    [
        (
            "drain,dora,partial",
            r"Several live versions \(dora\) train \d+% more tokens/s than drain, the best",
        ),
        ("dora", None),
        ("partial,dora,sync", None),  # `sync` has the devices of both, and `partial` breaks C1
    ],
)
def test_a_forecast_compares_several_versions_with_one_on_the_same_devices(
    capsys: pytest.CaptureFixture[str], policies: str, verdict: str | None
) -> None:
    command = (
        "simulate run --model qwen2.5-7b --devices 8 --tp 1 --batch-size 4 --group-size 4 "
        f"--mean 1500 --tail 1.6 -S 2 --policies {policies}"
    )
    app(command.split(), standalone_mode=False)
    printed = capsys.readouterr().out
    assert bool(re.search(verdict or "live versions", printed)) == (verdict is not None)


def test_the_spread_over_the_steps_is_beside_each_mean(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "rows.json"
    options = f"--model qwen2.5-7b --devices 8 --batch-size 4 --group-size 4 --policies dora --json {path}"
    means = {
        "simulate run --tp 1 -S 2": (
            "step s",
            "tokens/s",
            "with prompts",
            "exposed",
            "engine util",
            "row util",
        ),
        "plan --max-simulated 2": ("tokens/s", "with prompts", "step s", "trainer idle", "engines idle"),
    }
    for command, titles in means.items():
        app([*command.split(), *options.split()], standalone_mode=False)
        head, row, *_ = capsys.readouterr().out.splitlines()
        cells = dict(zip(re.split(r" {2,}", head), re.split(r" {2,}", row), strict=True))
        assert [title for title in titles if not re.fullmatch(r"[\d.,]+ ±[\d.,]+", cells[title])] == []
    first = json.loads(path.read_text())["rows"][0]
    assert 0 < first["step s std"] < first["step s"]


@pytest.mark.parametrize("policy", ["sync", "one_step", "dora"])
def test_the_formula_is_close_to_the_simulation(policy: str) -> None:
    found, formula = candidates(replace(PROBLEM, policies=(policy,))).values(), StepTimeFormula(WORKLOAD)
    deployment = min(found, key=formula.step_s)
    assert formula.step_s(deployment) == pytest.approx(deployment.metrics()["step_s"], rel=0.3)


def test_an_impossible_problem_is_refused_with_the_reason() -> None:
    reason = r"takes 122 GB, and 1 x H800 have 72 GB; raise --devices, or choose a --device with more memory"
    with pytest.raises(InputError, match=f"no layout of 1 x H800 fits: .*{reason}"):
        candidates(replace(PROBLEM, num_devices=1, policies=("sync",)))
    with pytest.raises(InputError, match="S = -1 must be at least 0"):
        replace(PROBLEM, max_staleness=-1)
    with pytest.raises(InputError, match=r"policies one_step: none is possible with S = 0; .* bound is 1"):
        replace(PROBLEM, max_staleness=0, policies=("one_step",))
    with pytest.raises(InputError, match=r"policies laminar have no staleness bound .* S = 2"):
        replace(PROBLEM, policies=("dora", "laminar"))


@pytest.mark.parametrize(
    "lengths",
    [
        LengthDistribution(10**6, 2000.0, tail=1.0),
        LengthDistribution(10**6, 2000.0, "pareto", 3.0),
        LengthDistribution(10**6, family="trace", trace=tuple(range(100, 5000))),
    ],
)
def test_a_heavier_tail_doubles_the_99th_percentile_and_keeps_the_median(lengths: LengthDistribution) -> None:
    before, after = (np.quantile(one.sample, (0.5, 0.99)) for one in (lengths, lengths.with_heavier_tail()))
    assert after[0] == pytest.approx(before[0], rel=0.05)
    assert after[1] == pytest.approx(2 * before[1], rel=0.15)


def test_the_command_prints_plans_bars_and_the_effect_of_a_heavier_tail(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "plan.json"
    command = (
        f"plan --model qwen2.5-7b --devices 8 --batch-size 2 --group-size 2 --max-simulated 3 --json {path}"
    )
    app(command.split(), standalone_mode=False)
    rows = json.loads(path.read_text())["rows"]
    assert [row["tokens/s"] for row in rows] == sorted((row["tokens/s"] for row in rows), reverse=True)
    printed = capsys.readouterr()
    assert printed.out.count("█") > 40
    assert "If the 99th percentile of responses doubles" in printed.out
    assert NOT_CALIBRATED in printed.out
    assert printed.err.startswith("best so far: ")


def test_a_repeated_policy_is_refused() -> None:
    with pytest.raises(typer.BadParameter, match=r"'dora,sync,dora' has dora more than once"):
        app(["plan", "--policies", "dora,sync,dora"], standalone_mode=False)


def test_prompts_of_a_trace_have_the_lengths_of_its_column(tmp_path: Path) -> None:
    trace, path = tmp_path / "trace.csv", tmp_path / "run.json"
    trace.write_text("ContextTokens,GeneratedTokens\n3000,10\n")
    command = (
        "simulate run --model qwen2.5-7b --devices 8 --tp 1 --batch-size 2 --group-size 2 --policies dora "
        f"-S 1 --limit 100 --trace {trace} --json {path}"
    )
    for options, tokens_per_response_token in (((), 301), (("--prompt", "90"), 10)):
        app([*command.split(), *options], standalone_mode=False)
        row = json.loads(path.read_text())["rows"][0]
        assert row["total_tokens_per_s"] == pytest.approx(tokens_per_response_token * row["tokens_per_s"])
    with pytest.raises(InputError, match="--prompt 90 and --prompt-column ContextTokens exclude each other"):
        app([*command.split(), "--prompt", "90", "--prompt-column", "ContextTokens"], standalone_mode=False)
