"""The production orchestrator on described hardware: every policy, its bound, and the effect of its parts."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from dora.cli.main import app
from dora.core.actions import Generate
from dora.core.events import RequestFinished
from dora.core.types import RequestId
from dora.errors import InputError
from dora.planner.cluster import Deployment, Layout, Workload
from dora.planner.hardware import DEVICES, MODELS, Efficiency
from dora.planner.lengths import LengthDistribution
from dora.planner.policies import DORA_ABLATIONS, POLICIES
from dora.planner.simulator import Totals, mean_metrics

H800 = DEVICES["H800"]
LENGTHS = LengthDistribution(16_000, 1000.0, tail=1.2, prompt=100)
WORKLOAD = Workload(MODELS["qwen2.5-7b"], LENGTHS, 8, 4, Efficiency(train=0.1, train_step_s=1.0))


def deploy(
    name: str, staleness: int = 2, workload: Workload = WORKLOAD, num_steps: int = 10, **changes: object
) -> Deployment:
    policy = POLICIES[name]
    staleness = staleness if policy.max_staleness is None else policy.max_staleness
    rollout = () if policy.is_colocated else ((H800, 4),)
    layout = Layout(name, staleness, (H800, 4), rollout, num_rows=10)
    return Deployment(workload, replace(layout, **changes), num_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_trains_every_step_and_no_answer_twice(name: str) -> None:
    result = deploy(name).simulate()
    assert [step.staleness.total() for step in result.steps] == [8] * 10
    assert sum(step.num_tokens for step in result.steps) > 0
    assert (result.num_dropped > 0) == (name == "oversample_drop")
    assert (result.num_recomputed > 0) == (name == "partial")


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("num_rows", [1, 3])
def test_no_engine_decodes_more_requests_than_it_has_rows(name: str, num_rows: int) -> None:
    """Also with fewer rows than a group has responses."""
    deployment = deploy(name, num_rows=num_rows)
    result = deployment.simulate()
    assert [step.staleness.total() for step in result.steps] == [8] * 10
    assert result.row_s <= result.decode_s * num_rows * (1 + 1e-9)


@pytest.mark.parametrize("staleness", range(9))
def test_dora_keeps_its_bound_and_every_trained_group_is_the_next_of_the_dataset(staleness: int) -> None:
    result = deploy("dora", staleness, num_steps=2 * staleness + 5).simulate()
    assert max(age for step in result.steps for age in step.staleness) <= staleness
    drawn = [LENGTHS.draw(0, 4, 8)[k] for k in range(8 * len(result.steps))]
    assert sum(step.num_tokens for step in result.steps) == sum(sum(group) + 4 * 100 for group in drawn)


def test_a_forecast_is_deterministic_and_asynchrony_is_faster() -> None:
    metrics = [deploy("dora", 4, num_steps=16).metrics() for _ in range(2)]
    assert metrics[0] == metrics[1]
    assert metrics[0]["tokens_per_s"] > 1.2 * deploy("sync_split").metrics()["tokens_per_s"]


def test_means_of_single_steps_are_those_of_the_run_and_their_spread_is_beside_them() -> None:
    deployment = deploy("dora", 2)
    num_engines, num_rows = len(deployment.engines), deployment.num_rows
    result = deployment.simulate()
    ends = [(0.0, Totals()), *((step.ended_s, step.totals) for step in result.steps[:-1])]
    single = [
        mean_metrics([step], *end, num_engines, num_rows)
        for step, end in zip(result.steps, ends, strict=True)
    ]
    found, steady = result.metrics(num_engines, num_rows, 2), single[4:7]
    durations = [one["step_s"] for one in single]
    for name in ("engine_utilization", "row_utilization"):
        values = [one[name] for one in single]
        assert np.average(values, weights=durations) == pytest.approx(found[name])
        assert found[f"{name}_std"] == pytest.approx(np.std(values))
    for name in ("migrations", "dropped_tokens", "recomputed_tokens"):
        assert np.mean([one[name] for one in single]) == pytest.approx(found[name])
    for name in ("step_s", "staleness_mean"):
        assert np.mean([one[name] for one in steady]) == pytest.approx(found[name])
    for name in ("step_s", "tokens_per_s", "exposed_fraction"):
        assert found[f"{name}_std"] == pytest.approx(np.std([one[name] for one in steady]))
        assert found[f"{name}_std"] > 0
    assert found["migrations_std"] > 0


def test_decoding_costs_events_by_answers_and_not_by_tokens() -> None:
    long = replace(WORKLOAD, lengths=replace(LENGTHS, limit=160_000, mean=10_000.0))
    few, many = (
        deploy("dora", workload=workload, rebalance_interval_s=1e6).simulate().num_events
        for workload in (WORKLOAD, long)
    )
    assert many < 1.2 * few


def test_an_answer_takes_the_time_of_its_tokens() -> None:
    """One row on one engine: the decode steps of 500 tokens, one after another."""
    lengths = LengthDistribution(500, family="trace", trace=(500,), prompt=100)
    workload = replace(WORKLOAD, lengths=lengths, batch_size=1, group_size=1)
    deployment = Deployment(workload, Layout("sync_split", 0, (H800, 4), ((H800, 1),)), 3)
    cost = deployment.engines[0].cost
    decode_s = sum(cost.terms(1, 1).step_time(100 + k).seconds(1) for k in range(500))
    overhead_s = cost.prefill_s(100) + cost.load_s + deployment.trainer.publish_s
    first, second, *_ = deployment.simulate().steps
    elapsed_s = second.ended_s - second.train_s - first.ended_s
    assert elapsed_s == pytest.approx(decode_s + overhead_s, rel=1e-3)


def test_kv_that_does_not_fit_is_swapped_out_and_the_run_still_finishes() -> None:
    lengths = LengthDistribution(16_000, family="trace", trace=(2_000,), prompt=100)
    small = replace(H800, memory_bytes=20e9)
    layout = Layout("dora", 2, (H800, 4), ((small, 2),), num_rows=40)
    result = Deployment(replace(WORKLOAD, lengths=lengths), layout, 8).simulate()
    assert len(result.steps) == 8
    assert result.max_kv_usage == pytest.approx(1.0, abs=0.01)


def test_sliding_windows_leave_room_for_more_rows_and_never_overfill_the_kv() -> None:
    model = replace(MODELS["qwen2.5-7b"], window=128, windowed=0.75)
    crowded = replace(H800, memory_bytes=(model.weight_bytes + 3e9) / 0.9)
    deployments = [
        Deployment(
            replace(WORKLOAD, model=one, batch_size=64),
            Layout("dora", 2, (H800, 4), ((crowded, 1),)),
            num_steps=10,
        )
        for one in (WORKLOAD.model, model)
    ]
    full, windowed = (deployment.num_rows for deployment in deployments)
    assert windowed > 2.5 * full
    results = [deployment.simulate() for deployment in deployments]
    assert all(0.5 < result.max_kv_usage < 1.01 for result in results)
    assert results[1].steps[-1].ended_s < results[0].steps[-1].ended_s


def test_a_part_that_is_left_out_does_nothing() -> None:
    whole, without_migrations, without_kv = (
        deploy("dora", 4, num_steps=14, ablations=ablations).metrics()
        for ablations in ((), ("moves", "shares"), ("kv",))
    )
    assert whole["migrations"] > 0
    assert whole["recomputed_tokens"] == 0
    assert without_migrations["migrations"] == 0
    assert without_kv["recomputed_tokens"] > 0


def test_no_answer_continues_before_its_environment_has_answered() -> None:
    """Also where engines get DecodeOnly and requests migrate meanwhile."""
    started_s: dict[RequestId, float] = {}
    durations_s: list[float] = []

    def listen(now: float, record: object) -> None:
        if isinstance(record, Generate):
            started_s.update(dict.fromkeys(record.requests, now))
        elif isinstance(record, RequestFinished) and record.num_tokens > 12:  # else it has fewer turns
            durations_s.append(now - started_s[record.request])

    episodes = replace(WORKLOAD, lengths=replace(LENGTHS, num_turns=4, turn_delay_s=30.0))
    deploy("dora", workload=episodes).simulator(listen).run()
    assert min(durations_s) > 3 * 30


def test_episodes_wait_for_their_environment_between_turns() -> None:
    episodes = replace(WORKLOAD, lengths=replace(LENGTHS, num_turns=4, turn_delay_s=5.0))
    single_turn_s = deploy("sync_split").metrics()["step_s"]
    assert deploy("sync_split", workload=episodes).metrics()["step_s"] > single_turn_s + 10


def test_a_mixed_fleet_decodes_faster_than_its_slow_half() -> None:
    slow = deploy("dora", rollout=((DEVICES["A100"], 2),)).metrics()["tokens_per_s"]
    mixed = deploy("dora", rollout=((DEVICES["A100"], 2), (H800, 2))).metrics()["tokens_per_s"]
    assert mixed > slow


def test_an_elastic_trainer_speeds_up_rollout_that_is_too_slow() -> None:
    """The bound, the dataset's order and every answer are kept."""
    lengths = LengthDistribution(2_000, 1000.0, tail=0.3, prompt=100)
    workload = replace(WORKLOAD, lengths=lengths, batch_size=16)
    off, on = (
        deploy("dora", workload=workload, rollout=((H800, 1),), is_elastic=is_elastic)
        for is_elastic in (False, True)
    )
    assert (len(off.engines), len(on.engines)) == (1, 5)
    assert on.metrics()["tokens_per_s"] > 1.5 * off.metrics()["tokens_per_s"]
    steps = on.simulate().steps
    assert max(age for step in steps for age in step.staleness) <= 2
    assert sum(step.num_tokens for step in steps) == sum(step.num_tokens for step in off.simulate().steps)


@pytest.mark.parametrize("part", DORA_ABLATIONS)
def test_every_part_may_be_left_out_and_the_bound_holds(part: str) -> None:
    steps = deploy("dora", 2, ablations=(part,)).simulate().steps
    assert [step.staleness.total() for step in steps] == [8] * 10
    assert max(age for step in steps for age in step.staleness) <= 2


def test_a_skewed_mixture_of_experts_waits_for_its_busiest_rank() -> None:
    workload = replace(WORKLOAD, model=MODELS["qwen3-30b-a3b"])
    even_s, skewed_s = (
        deploy("dora", workload=replace(workload, expert_skew=skew), trainer=(H800, 8), ep_size=4)
        .engines[0]
        .cost.terms(4096, 1024)
        .step_time(0)
        .seconds(1)
        for skew in (0.0, 1.0)
    )
    assert skewed_s > 1.2 * even_s


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"staleness": -1}, "S = -1 must be at least 0"),
        ({"name": "sync", "max_staleness": 3}, "S = 3: policy sync has S = 0 by definition"),
        ({"rollout": ((H800, 3),), "tp_size": 2}, "3 x H800 do not divide into engines .* = 2 devices"),
        ({"rollout": ()}, "policy dora needs devices for rollout alone, and there are none"),
        ({"name": "sync", "rollout": ((H800, 2),)}, "policy sync shares all devices .* 2 are for rollout"),
        ({"ablations": ("luck",)}, "without luck: .* the parts are moves, shares"),
        ({"num_steps": 6}, "6 steps are too few at S = 2: .* simulate at least 9"),
        ({"trainer": (H800, 1)}, r"takes 122 GB, and 1 x H800 have 72 GB"),
        ({"rollout": ((replace(H800, memory_bytes=17e9), 2),)}, "holds the KV of .* need 16,100; raise"),
    ],
)
def test_an_impossible_layout_is_refused_with_the_numbers(changes: dict[str, object], message: str) -> None:
    given = {"name": "dora"} | changes
    with pytest.raises(InputError, match=message):
        deploy(**given).metrics()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-S -1", "S = -1 must be at least 0"),
        ("--limit 40000", r"prompt 110 \+ limit 40000 = 40110 tokens exceed the context of 32768"),
        ("--mean 40000", "mean length 40000.0 must be at least 1 and below the limit 30720"),
        ("--correlation 1.5", "lengths: correlation = 1.5 must be between 0 and 1"),
        ("--tail -1", "lengths: tail = -1.0 must be above 0"),
        ("--tail 50", "lengths: tail = 50.0 must be above 0 and at most 30"),
        ("--tail 15", "no lognormal with tail = 15 .* has the mean 2300; the nearest mean is 4301"),
        ("--family pareto --tail 0.1", "no pareto with tail = 0.1 .* the nearest mean is 6087"),
        ("--growth inf", "lengths: growth = inf must be above -1"),
        ("--turns 2 --turn-delay inf", "lengths: turn delay = inf must be 0, or above 0"),
        ("--reward inf", "reward inf s and expert skew 0.1 must be finite"),
        ("--turn-delay 3", "lengths: turn delay = 3.0 must be 0, or above 0 with at least 2 turns"),
        ("--column a", "--column a needs --trace"),
        ("--trace . --column a", "--column a needs --trace with a CSV file"),
        ("--trace FILE --mean 10", "--mean: --trace .* has the lengths"),
        ("--trace FILE --column b", "has no column 'b'; its columns are GeneratedTokens"),
        ("--trace FILE --limit 50", "longest response of the trace has 70 tokens, above the limit 50"),
        (
            "--policies sync --without moves",
            "without moves applies to policy dora alone, and the policies are sync",
        ),
        ("--policies sync --elastic", "sync share all devices: elastic and rollout have no effect"),
        ("--policies sync --slack 3", "slack = 3 groups below the bound has no effect with S = 0"),
        ("--policies dora -S ,", "nothing to simulate: give at least one policy and one S"),
        ("--policies dora --without luck", "without luck: .* the parts are moves, shares"),
        ("--trainer 8", "8 devices leave none for rollout beside 8 that train"),
        ("--rollout A100", "'A100' in 'A100' must be a device and a number, such as A100:32"),
        ("--rollout A100:\u00b2", "must be a device and a number, such as A100:32"),
        ("--rollout H800:3 --tp 2", "3 x H800 do not divide into engines of TP 2"),
        ("--timeline no/such/lanes.svg", "no/such is not a folder"),
        ("--plot speed.png", "name it speed.svg"),
    ],
)
def test_the_command_refuses_invalid_options_before_the_first_simulation(
    words: str, message: str, tmp_path: Path
) -> None:
    trace = tmp_path / "trace.csv"
    trace.write_text("GeneratedTokens\n70\n")
    command = f"simulate run --model qwen2.5-7b --devices 8 {words}".replace("FILE", str(trace))
    with pytest.raises(InputError, match=message):
        app(command.split(), standalone_mode=False)


def test_the_command_takes_a_mixed_fleet_and_a_trace(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    trace, out = tmp_path / "trace.csv", tmp_path / "figures.json"
    trace.write_text("length\n70\n700\n")
    command = (
        "simulate run --model qwen2.5-7b --trainer 2 --rollout H800:2,A100:4 --batch-size 2 "
        "--group-size 2 --tp 1 --steps 9 --policies dora -S 2 --limit 1000 --correlation 0.5 "
        f"--trace {trace} --column length "
        f"--growth 0.01 --turns 2 --turn-delay 1 --reward 0.5 --json {out}"
    )
    app(command.split(), standalone_mode=False)
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["trainer"], row["rollout"], row["staleness_max"]) == (2, 6, 2)


def test_the_command_prints_a_row_for_every_policy_and_bound(capsys: pytest.CaptureFixture[str]) -> None:
    command = (
        "simulate run --model qwen2.5-7b --devices 8 --batch-size 4 --group-size 2 --steps 9 --tp 1 -S 0,2"
    )
    app(command.split(), standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert "live versions" in lines[-1]
    assert [line.split()[:2] for line in lines[1:-2]] == [
        ["sync", "0"], ["one_step", "1"], ["partial", "0"], ["partial", "2"], ["dora", "0"], ["dora", "2"],
    ]  # fmt: skip
