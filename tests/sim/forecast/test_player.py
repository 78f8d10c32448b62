"""The production orchestrator on described hardware: every policy, its bound, and what its parts do."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from dora.cli import app
from dora.core.actions import Generate
from dora.core.events import RequestFinished
from dora.core.records import RequestId
from dora.errors import InputError
from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.hardware import DEVICES, Efficiency
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.rules import PARTS, POLICIES
from dora.sim.forecast.shapes import SHAPES

H800 = DEVICES["H800"]
LENGTHS = Lengths(16_000, 1000.0, tail=1.2, prompt=100)
JOB = Job(SHAPES["qwen2.5-7b"], LENGTHS, 8, 4, Efficiency(train=0.1, train_s=1.0))


def setup_of(name: str, staleness: int = 2, job: Job = JOB, num_steps: int = 10, **changes: object) -> Setup:
    policy = POLICIES[name]
    staleness = staleness if policy.max_staleness is None else policy.max_staleness
    apart = () if policy.is_colocated else ((H800, 4),)
    layout = Layout(name, staleness, (H800, 4), apart, rows=10)
    return Setup(job, replace(layout, **changes), num_steps)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_trains_every_step_and_no_answer_twice(name: str) -> None:
    setup = setup_of(name)
    player = setup.player()
    outcome = player.play()
    assert [step.answers for step in outcome.steps] == [32] * 10
    assert not player.engines[0].cost.kv_tokens < 0
    trained = sum(step.tokens for step in outcome.steps)
    assert trained > 0
    assert (outcome.num_dropped > 0) == (name == "oversample_drop")
    assert (outcome.num_refilled > 0) == (name == "partial")


@pytest.mark.parametrize("staleness", range(9))
def test_dora_keeps_its_bound_and_every_trained_group_is_the_next_of_the_dataset(staleness: int) -> None:
    outcome = setup_of("dora", staleness, num_steps=2 * staleness + 5).play()
    assert max(age for step in outcome.steps for age in step.ages) <= staleness
    drawn = [LENGTHS.draw(0, 4, 8)[k] for k in range(8 * len(outcome.steps))]
    assert sum(step.tokens for step in outcome.steps) == sum(sum(group) + 4 * 100 for group in drawn)


def test_a_forecast_is_the_same_every_time_and_asynchrony_pays() -> None:
    figures = [setup_of("dora", 4, num_steps=16).figures() for _ in range(2)]
    assert figures[0] == figures[1]
    assert figures[0]["tokens_per_s"] > 1.2 * setup_of("sync_split").figures()["tokens_per_s"]


def test_decoding_costs_events_by_answers_and_not_by_tokens() -> None:
    long = replace(JOB, lengths=replace(LENGTHS, limit=160_000, mean=10_000.0))
    few, many = (setup_of("dora", job=job, interval_s=1e6).play().num_events for job in (JOB, long))
    assert many < 1.2 * few


def test_an_answer_takes_the_time_of_its_tokens() -> None:
    """One row on one engine: the decode steps of 500 tokens, one after another."""
    lengths = Lengths(500, family="trace", trace=(500,), prompt=100)
    setup = Setup(replace(JOB, lengths=lengths, batch_size=1, group_size=1),
                  Layout("sync_split", 0, (H800, 4), ((H800, 1),)), 3)  # fmt: skip
    cost = setup.engines[0].cost
    decode_s = sum(cost.pace(1, 1, 100 + k).seconds(1) for k in range(500))
    waits_s = cost.prefill_s(100) + cost.load_s() + setup.trainer.publish_s()
    steps = setup.play().steps
    took_s = steps[1].began_s - steps[0].ended_s
    assert took_s == pytest.approx(decode_s + waits_s, rel=1e-3)


def test_kv_that_does_not_fit_is_swapped_and_everything_still_ends() -> None:
    lengths = Lengths(16_000, family="trace", trace=(2_000,), prompt=100)
    tight = replace(H800, memory_bytes=20e9)
    layout = Layout("dora", 2, (H800, 4), ((tight, 2),), rows=40)
    outcome = Setup(replace(JOB, lengths=lengths), layout, 8).play()
    assert len(outcome.steps) == 8
    assert outcome.kv_peak == pytest.approx(1.0, abs=0.01)


def test_a_part_that_is_left_out_does_nothing() -> None:
    whole, none, refilled = (
        setup_of("dora", 4, num_steps=14, without=without).figures()
        for without in ((), ("moves", "shares"), ("kv",))
    )
    assert whole["moves"] > 0
    assert whole["refilled"] == 0
    assert none["moves"] == 0
    assert refilled["refilled"] > 0


def test_no_answer_goes_on_before_its_environment_has_answered() -> None:
    """Though engines are told to rush, and to decode all again, and rows move, while they wait for it."""
    began: dict[RequestId, float] = {}
    took: list[float] = []

    def hear(now: float, record: object) -> None:
        if isinstance(record, Generate):
            began.update(dict.fromkeys(record.requests, now))
        elif isinstance(record, RequestFinished) and record.num_tokens > 12:  # else it has fewer turns
            took.append(now - began[record.request])

    episodes = replace(JOB, lengths=replace(LENGTHS, turns=4, delay_s=30.0))
    setup_of("dora", job=episodes).player(hear).play()
    assert min(took) > 3 * 30


def test_episodes_wait_for_their_environment_between_turns() -> None:
    apart = replace(JOB, lengths=replace(LENGTHS, turns=4, delay_s=5.0))
    at_once = setup_of("sync_split").figures()["step_s"]
    assert setup_of("sync_split", job=apart).figures()["step_s"] > at_once + 10


def test_a_mixed_fleet_decodes_faster_than_its_slow_half() -> None:
    slow = setup_of("dora", rollout=((DEVICES["A100"], 2),)).figures()["tokens_per_s"]
    mixed = setup_of("dora", rollout=((DEVICES["A100"], 2), (H800, 2))).figures()["tokens_per_s"]
    assert mixed > slow


def test_a_trainer_that_lends_its_devices_hides_rollout_that_is_too_slow() -> None:
    """Elastic roles on and off; the bound, the dataset's order and every answer are kept."""
    lengths = Lengths(2_000, 1000.0, tail=0.3, prompt=100)
    job = replace(JOB, lengths=lengths, batch_size=16)
    off, on = (
        setup_of("dora", job=job, rollout=((H800, 1),), is_elastic=is_elastic) for is_elastic in (False, True)
    )
    assert (len(off.engines), len(on.engines)) == (1, 5)
    assert on.figures()["tokens_per_s"] > 1.5 * off.figures()["tokens_per_s"]
    outcome = on.play()
    assert max(age for step in outcome.steps for age in step.ages) <= 2
    assert sum(step.tokens for step in outcome.steps) == sum(step.tokens for step in off.play().steps)


@pytest.mark.parametrize("part", PARTS)
def test_every_part_may_be_left_out_and_the_bound_holds(part: str) -> None:
    outcome = setup_of("dora", 2, without=(part,)).play()
    assert [step.answers for step in outcome.steps] == [32] * 10
    assert max(age for step in outcome.steps for age in step.ages) <= 2


def test_a_skewed_mixture_waits_for_its_most_wanted_rank_of_experts() -> None:
    job = replace(JOB, shape=SHAPES["qwen3-30b-a3b"])
    even, skewed = (
        setup_of("dora", job=replace(job, expert_skew=skew), train=(H800, 8), expert=4).engines[0].cost
        for skew in (0.0, 1.0)
    )
    assert skewed.pace(4096, 1024, 0).seconds(1) > 1.2 * even.pace(4096, 1024, 0).seconds(1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"staleness": -1}, "S = -1 must be at least 0"),
        ({"name": "sync", "max_staleness": 3}, "S = 3: policy sync has S = 0 by its definition"),
        ({"rollout": ((H800, 3),), "tensor": 2}, "3 x H800 cannot be shared out .* = 2 devices"),
        ({"rollout": ()}, "policy dora has devices of its own, and 0 are for rollout"),
        ({"name": "sync", "rollout": ((H800, 2),)}, "policy sync shares all devices .* 2 are for rollout"),
        ({"without": ("luck",)}, "without luck: the parts of policy dora are moves, shares"),
        ({"num_steps": 6}, "6 steps are too few at S = 2: .* simulate at least 9"),
        ({"train": (H800, 1)}, r"takes 122 GB, and 1 x H800 have 72 GB"),
        ({"rollout": ((replace(H800, memory_bytes=17e9), 2),)}, "room for the KV of .* need 16,100; raise"),
    ],
)
def test_what_cannot_be_is_refused_with_the_numbers_that_clash(
    changes: dict[str, object], message: str
) -> None:
    given = {"name": "dora"} | changes
    with pytest.raises(InputError, match=message):
        setup_of(**given).figures()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("-S -1", "S = -1 must be at least 0"),
        ("--limit 40000", r"prompt 110 \+ limit 40000 = 40110 tokens is beyond the context of 32768"),
        ("--mean 40000", "mean length 40000.0 must be at least 1 and below the limit 30720"),
        ("--alike 1.5", "lengths: alike = 1.5 must be 0 to 1"),
        ("--tail -1", "lengths: tail = -1.0 must be above 0"),
        ("--delay 3", "lengths: delay = 3.0 must be 0, or of more than one turn"),
        ("--column a", "--column a is of a --trace, and none is given"),
        ("--trace FILE --mean 10", "--mean would say what --trace .* says already"),
        ("--trace FILE --column b", "has no column 'b'; its columns are GeneratedTokens"),
        ("--trace FILE --limit 50", "longest answer of the trace has 70 tokens, .* limit is 50"),
        ("--policies sync --without moves", "without moves is of policy dora, and sync are played"),
        ("--policies sync --elastic", "sync share all devices: elastic and rollout would do nothing"),
        ("--policies sync --slack 3", "slack = 3 groups are kept below the bound, and S = 0 has none"),
        ("--policies dora -S ,", "nothing to simulate: give at least one policy and one S"),
        ("--policies dora --without luck", "without luck: the parts of policy dora are moves, shares"),
        ("--trainer 8", "8 devices leave none for rollout beside 8 that train"),
        ("--rollout A100", "'A100' in 'A100' is no kind of device with a number, such as A100:32"),
        ("--rollout H800:3 --tensor 2", "3 x H800 cannot be shared out among engines of tensor 2"),
        ("--timeline no/such/lanes.svg", "no/such is no folder"),
        ("--plot speed.png", "name it speed.svg"),
    ],
)
def test_the_command_refuses_what_cannot_be_before_anything_is_played(
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
        "simulate run --model qwen2.5-7b --trainer 2 --rollout H800:2,A100:4 --batch 2 --group 2 --tensor 1 "
        f"--steps 9 --policies dora -S 2 --trace {trace} --column length --limit 1000 --alike 0.5 "
        f"--drift 0.01 --turns 2 --delay 1 --reward 0.5 --json {out}"
    )
    app(command.split(), standalone_mode=False)
    (row,) = json.loads(out.read_text())["rows"]
    assert (row["trainer"], row["rollout"], row["staleness_max"]) == (2, 6, 2)


def test_the_command_prints_a_row_for_every_policy_and_bound(
    capsys: pytest.CaptureFixture[str],
) -> None:
    command = "simulate run --model qwen2.5-7b --devices 8 --batch 4 --group 2 --steps 9 --tensor 1 -S 0,2"
    app(command.split(), standalone_mode=False)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [
        ["sync", "0"], ["one_step", "1"], ["partial", "0"], ["partial", "2"], ["dora", "0"], ["dora", "2"],
    ]  # fmt: skip
