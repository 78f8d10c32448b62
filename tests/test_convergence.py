"""The statistics of the convergence benchmark: intervals, tests and times of artificial rows."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from dora.config import load
from dora.runtime.process import backends
from dora.runtime.run_setup import RunSetup

pytestmark = pytest.mark.usefixtures("benchmark_scripts")


def tables_with(column: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The lines of the tables that have a column."""
    return [line for line in import_module("convergence_tables").tables(rows) if column in line]


def row(policy: str, seed: int, final: float, task: str = "chains") -> dict[str, Any]:
    """The row of a run whose accuracy rises linearly from 0 to `final` in 10 s."""
    lengths = {f"{n}_{of}": 40.0 for n in ("generated", "trained") for of in ("mean", "p50", "p90", "p99")}
    lengths |= {f"trained_mean_fifth_{fifth}": 40.0 for fifth in range(1, 6)}
    names = ("mixed_share", "segments", "staleness_mean", "ess", "kl")
    figures = dict.fromkeys((*names, "dropped_share", "dropped_share_of_longest"), 0.0)
    return {
        "task": task,
        "policy": policy,
        "S": 0 if policy == "sync" else 2,
        "correction": "none",
        "seed": seed,
        "steps": 100,
        "wall_s": 10.0,
        "cpu_s": 15.0,
        **{f"at_{point}": final * point / 100 for point in range(0, 101, 20)},
        **{f"s_at_{point}": point / 10 for point in range(20, 101, 20)},
        **figures,
        **lengths,
    }


def test_every_setting_is_a_valid_run(tmp_path: Path) -> None:
    convergence, runs = import_module("convergence"), import_module("convergence_run")
    assert len(set(convergence.SETTINGS)) == len(convergence.SETTINGS)
    for setting in (*convergence.SETTINGS, *convergence.QUICK):
        config = load.read_config(runs.EXAMPLES / "sorting.toml", [*setting.changes(batch_size=8)])
        backends.check_backends(config)
        limits = RunSetup.make(config, tmp_path).limits
        assert limits.max_staleness >= setting.max_staleness
        assert limits.breaks_c1 == (setting.policy in runs.MIXED)
        # `dropping` has no more groups in flight than the others.
        assert config.max_groups_in_flight == (setting.max_staleness + 1) * 8


def test_a_band_is_the_confidence_interval_of_student() -> None:
    mean, half = import_module("bands").band([1.0, 2.0, 3.0, 4.0, 5.0])
    assert (mean, round(half, 4)) == (3.0, 1.9629)  # 2.776 * sqrt(2.5 / 5)


def test_the_band_of_one_seed_covers_every_accuracy() -> None:
    assert import_module("bands").band([0.8]) == (0.8, 1.0)


def test_paired_seeds_separate_a_difference_from_noise() -> None:
    rows = [row("sync", seed, 0.8 + seed / 10) for seed in range(3)]
    near = [row("dora", seed, 0.8 + seed / 10 + (seed - 1) / 100) for seed in range(3)]
    far = [row("drain", seed, 0.7 + seed / 10 + seed / 1000) for seed in range(3)]
    tests = tables_with("within_noise", [*rows, *near, *far])
    found = {(t["task"], t["policy"]): t["within_noise"] for t in tests}
    expected = {("chains", "dora"): 1, ("chains", "drain"): 0}
    assert found == expected | {("all", policy): bound for (_, policy), bound in expected.items()}


def test_no_significant_difference_does_not_imply_equivalence() -> None:
    sync = [row("sync", seed, 0.8) for seed in range(3)]
    sure = [row("dora", seed, 0.8 + (seed - 1) / 1000) for seed in range(3)]
    noisy = [row("drain", seed, 0.8 + (seed - 1) / 20) for seed in range(3)]
    tests = tables_with("equivalent", [*sync, *sure, *noisy])
    found = {t["policy"]: (t["within_noise"], t["equivalent"]) for t in tests if t["task"] == "all"}
    assert found == {"dora": (1, 1), "drain": (1, 0)}


def test_tasks_are_averaged_before_seeds_are_compared() -> None:
    rows = [row(policy, seed, 0.8, task) for policy in ("sync", "dora") for seed in range(2) for task in "ab"]
    rows[-1]["at_100"] = 0.9
    tests = tables_with("within_noise", rows)
    (pooled,) = [t for t in tests if t["task"] == "all"]
    assert (pooled["pairs"], pooled["difference"]) == (2, 0.025)


def test_the_time_to_the_target_needs_most_seeds_to_reach_it() -> None:
    rows = [row("sync", seed, 0.5) for seed in range(3)]
    rows += [row("dora", seed, final) for seed, final in enumerate((0.4, 0.4, 1.0))]
    times = {t["policy"]: t for t in import_module("convergence_tables").tables(rows) if "s_to_target" in t}
    assert (times["dora"]["reached"], times["dora"]["s_to_target"]) == (1, "-")


def test_answers_of_several_versions_are_compared_with_those_of_one_at_the_same_bound() -> None:
    mixed = [row("partial", seed, 0.7) | {"mixed_share": 0.5} for seed in range(2)]
    rows = [*(row("sync", seed, 0.9) for seed in range(2)), *(row("dora", seed, 0.8) for seed in range(2))]
    compared = tables_with("trajectories", [*rows, *mixed])
    found = {t["policy"]: (t["trajectories"], t["less_dora"], t["mixed_share"]) for t in compared}
    assert found == {"dora": ("single", 0.0, 0.0), "partial": ("mixed", -0.1, 0.5)}


def test_seeds_without_a_partner_are_left_out_of_tests() -> None:
    rows = [row("sync", 0, 0.8), *(row("dora", seed, 0.8) for seed in range(3))]
    tests = tables_with("within_noise", rows)
    assert [t["pairs"] for t in tests] == [1, 1]


def test_the_time_to_an_accuracy_lies_between_two_points() -> None:
    rows = [row("sync", 0, 0.5), row("dora", 0, 1.0)]
    times = tables_with("s_to_target", rows)
    assert {t["policy"]: (t["s_to_target"], t["samples_to_target"]) for t in times} == {
        "sync": (9.0, 5760),
        "dora": (4.5, 2880),
    }


def test_a_kept_run_is_not_repeated(tmp_path: Path) -> None:
    convergence, file = import_module("convergence"), tmp_path / "kept.jsonl"
    convergence.Kept(file).add(row("sync", 0, 0.8))
    kept = convergence.Kept(file)
    assert kept.has("chains", "sync", 0, "none", 0, 100)
    assert not kept.has("chains", "sync", 0, "none", 1, 100)


def test_the_dropping_trainer_ignores_stale_samples() -> None:
    import torch
    from tests.trainer.batches import TINY, initial

    from dora.trainer.settings import Sample, TrainerSettings

    fresh = [Sample([1, 2], [3, 4], [-2.0, -2.0], 1.0), Sample([1, 2], [5], [-2.0], -1.0)]
    stale = [Sample([1, 2], [6, 6], [-2.0, -2.0], 1.0, staleness=3)]
    weights = []
    for batch in (fresh, [*fresh, *stale]):
        settings = TrainerSettings(lr=1e-2, num_steps=1, warmup_steps=0)
        trainer = import_module("dropping").Dropping(TINY, initial(), settings, torch.device("cpu"))
        trainer.step(batch)
        weights.append(trainer.flat.clone())
    assert torch.equal(*weights)
