"""Seconds by roofline: closed forms agree with sums, and each term moves the way physics says."""

from __future__ import annotations

from itertools import accumulate

import pytest

from dora.errors import InputError
from dora.sim.forecast.costs import EngineCost, Pace, TrainerCost
from dora.sim.forecast.hardware import DEVICES, Efficiency, device_of
from dora.sim.forecast.shapes import SHAPES, shape_of

EXACT = Efficiency(memory=1.0, flops=1.0, link=1.0, step_s=0.0, hop_s=0.0)
SMALL, LARGE, MOE = SHAPES["qwen2.5-0.5b"], SHAPES["qwen2.5-32b"], SHAPES["longcat-flash"]
PACES = [Pace(2.0, 1.0, 0.01), Pace(0.5, 1.0, 0.01), Pace(2.0, 1.0, 0.0), Pace(0.5, 1.0, 0.0)]


@pytest.mark.parametrize("pace", PACES)
def test_many_steps_take_what_each_takes_together(pace: Pace) -> None:
    each = [max(pace.floor_s, pace.start_s + (k + 0.5) * pace.slope_s) for k in range(300)]
    for num, seconds in enumerate(accumulate(each), 1):
        assert pace.seconds(num) == pytest.approx(seconds, rel=1e-4)


@pytest.mark.parametrize("pace", PACES)
def test_steps_are_the_inverse_of_seconds(pace: Pace) -> None:
    for num in (0.0, 0.25, 1.0, 99.0, 100.0, 101.0, 30_000.0):
        assert pace.steps(pace.seconds(num)) == pytest.approx(num, rel=1e-9, abs=1e-9)


def test_one_row_reads_all_weights_and_many_rows_are_bound_by_compute() -> None:
    cost = EngineCost(SMALL, DEVICES["H200"], EXACT)
    assert cost.pace(1, 1, 0).seconds(1) == pytest.approx(SMALL.weight_bytes / 4.8e12, rel=1e-3)
    assert cost.pace(4096, 4096, 0).floor_s == pytest.approx(4096 * 2 * SMALL.parameters / 989e12)


def test_a_step_with_context_takes_what_engines_are_measured_at_on_a_gpu() -> None:
    """The roofline of 64 rows of 8,000 tokens, 4.3 TB/s: 1.73 ms."""
    cost = EngineCost(SMALL, DEVICES["H200"], Efficiency(memory=4.3 / 4.8, flops=0.8, step_s=0.0))
    assert cost.pace(64, 64, 64 * 8000).seconds(1) == pytest.approx(1.73e-3, rel=0.05)


def test_several_versions_on_an_engine_read_their_weights_each() -> None:
    cost = EngineCost(LARGE, DEVICES["H800"], EXACT, tensor=4)
    one, two = (cost.pace(2, 2, 0, versions).seconds(1) for versions in (1, 2))
    assert two == pytest.approx(2 * one, rel=1e-2)


def test_the_fullest_rank_of_experts_stalls_all_and_more_rows_even_it_out() -> None:
    def cost(expert: int) -> EngineCost:
        return EngineCost(MOE, DEVICES["H800"], EXACT, 1, expert, expert_skew=0.0)

    stalls = [cost(expert).imbalance(8 * expert) for expert in (64, 128, 256)]
    assert 1 < stalls[0] < stalls[1] < stalls[2]
    assert cost(256).imbalance(256 * 64) < stalls[2]
    even, uneven = (cost(64).pace(64 * 8, 8, context).seconds(1) for context in (8 * 4000, 8 * 16000))
    assert uneven > even


def test_what_does_not_fit_is_refused_with_the_numbers_that_clash() -> None:
    with pytest.raises(InputError, match=r"weights take 65\.6 GB of each of 1 .* H800 has 72\.0 GB|tensor"):
        EngineCost(SHAPES["qwen2.5-72b"], DEVICES["H800"], EXACT)
    with pytest.raises(InputError, match=r"takes 525 GB, and 4 x H800 have 288 GB"):
        TrainerCost(LARGE, DEVICES["H800"], 4, EXACT)
    with pytest.raises(InputError, match=r"64 ranks need as many experts; qwen2.5-32b has 0"):
        EngineCost(LARGE, DEVICES["H800"], EXACT, 1, 64)
    with pytest.raises(InputError, match=r"train = 1\.5 must be above 0, at most 1"):
        Efficiency(train=1.5)
    with pytest.raises(InputError, match="'H900' is not known; the presets are H800, H100"):
        device_of("H900")
    with pytest.raises(InputError, match="'gpt' is not known; the presets are qwen"):
        shape_of("gpt")


def test_a_training_step_takes_its_flops() -> None:
    cost = TrainerCost(LARGE, DEVICES["H800"], 64, Efficiency(train=0.4), num_forwards=0)
    seconds = cost.work_s(2400)
    assert seconds == pytest.approx(6 * LARGE.parameters * 2400 / (64 * 989e12 * 0.4), rel=0.03)
    assert cost.work_s(30_000) > 12.5 * seconds  # attention
