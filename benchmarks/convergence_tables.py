"""Tables of `convergence.py`: bands over seeds, tests, trajectories, lengths and times.

Runs without a partner of the same seed are left out of tests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from bands import band, paired
from convergence_run import MIXED, NUM_POINTS

Rows = Sequence[dict[str, Any]]
POINTS = [100 * point // NUM_POINTS for point in range(NUM_POINTS + 1)]
TARGET = 0.9  # of the gain of `sync`: the accuracy to which time and samples are measured
SAMPLES_PER_STEP = 64
MARGIN = 0.03  # of accuracy; smaller differences count as equivalent
SHARED_BOUND = 2  # at which answers of one version and of several are compared


def tables(rows: Rows) -> list[dict[str, Any]]:
    """All tables one after the other; each has its own columns."""
    return [
        *_bands(rows),
        *_tests(rows),
        *_trajectories(rows),
        *_lengths(rows),
        *_times(rows),
        *_untaught(rows),
    ]


def ratios_of(rows: Rows) -> dict[str, float]:
    """The main results: differences of final accuracy with half of their 95 % interval."""
    found: dict[str, float] = {}
    for test in _tests(rows):
        if (test["policy"], test["S"], test["correction"]) == ("dora", 2, "none"):
            found[f"dora_s2_minus_sync_{test['task']}"] = test["difference"]
            found[f"dora_s2_minus_sync_{test['task']}_half"] = test["half"]
            found[f"dora_s2_equivalent_{test['task']}"] = test["equivalent"]
    for row in _lengths(rows):
        if row["policy"] == "dropping":
            found[f"dropped_share_{row['task']}"] = row["dropped_share"]
            found[f"dropped_share_of_longest_{row['task']}"] = row["dropped_share_of_longest"]
    return found


def _groups(rows: Rows) -> Iterator[tuple[dict[str, Any], Rows]]:
    """The rows of each task and setting, with the columns that identify them."""
    names = ("task", "policy", "S", "correction")
    for identity in dict.fromkeys(tuple(row[name] for name in names) for row in rows):
        named = dict(zip(names, identity, strict=True))
        yield named, [row for row in rows if named.items() <= row.items()]


def _bands(rows: Rows) -> Iterator[dict[str, Any]]:
    """Accuracy against samples: mean over seeds, and half of its 95 % interval."""
    for named, own in _groups(rows):
        line = named | {"seeds": len(own)}
        for point in POINTS:
            mean, half = band([row[f"at_{point}"] for row in own])
            line |= {f"at_{point}": round(mean, 4), f"half_{point}": round(half, 4)}
        yield line


def _pairs(ours: Rows, theirs: Rows) -> tuple[list[float], list[float]]:
    """Final accuracies by seed; each is a mean over the tasks that both have for that seed."""
    own, others = ({(row["seed"], row["task"]): row["at_100"] for row in rows} for rows in (ours, theirs))
    seeds: dict[int, list[tuple[float, float]]] = {}
    for key in own.keys() & others.keys():
        seeds.setdefault(key[0], []).append((own[key], others[key]))
    means = [tuple(map(statistics.fmean, zip(*seeds[seed], strict=True))) for seed in sorted(seeds)]
    return [mean for mean, _ in means], [mean for _, mean in means]


def _tests(rows: Rows) -> Iterator[dict[str, Any]]:
    """Final accuracy minus that of `sync` by seed: for each task, and for means over all tasks."""
    sync = [row for row in rows if row["policy"] == "sync"]
    pooled: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for named, own in _groups(rows):
        if named["policy"] != "sync":
            pooled.setdefault((named["policy"], named["S"], named["correction"]), []).extend(own)
            yield from _test(named, own, sync)
    for (policy, staleness, correction), own in pooled.items():
        named = {"task": "all", "policy": policy, "S": staleness, "correction": correction}
        yield from _test(named, own, sync)


def _test(named: dict[str, Any], ours: Rows, theirs: Rows) -> Iterator[dict[str, Any]]:
    """`within_noise`: no significant difference; `equivalent`: differences of MARGIN or more are excluded."""
    pair = _pairs(ours, theirs)
    if pair[0]:
        difference, half = paired(*pair)
        yield named | {
            "pairs": len(pair[0]),
            "difference": round(difference, 4),
            "half": round(half, 4),
            "within_noise": int(abs(difference) <= half),
            "equivalent": int(abs(difference) + half < MARGIN),
        }


def _trajectories(rows: Rows) -> Iterator[dict[str, Any]]:
    """Answers of one version against answers of several, at the same bound."""
    at_bound = [row for row in rows if row["S"] == SHARED_BOUND and row["policy"] != "dropping"]
    for named, own in _groups(at_bound):
        single = [r for r in rows if named | {"policy": "dora"} == {name: r[name] for name in named}]
        pair = _pairs(own, single)
        if not pair[0]:
            continue
        mean, half = band([row["at_100"] for row in own])
        difference, difference_half = paired(*pair)
        yield {
            "trajectories": "mixed" if named["policy"] in MIXED else "single",
            **named,
            "final": round(mean, 4),
            "final_half": round(half, 4),
            "less_dora": round(difference, 4),
            "less_dora_half": round(difference_half, 4),
            **_means(own, ("mixed_share", "segments", "staleness_mean", "ess", "kl", "wall_s", "cpu_s")),
        }


def _lengths(rows: Rows) -> Iterator[dict[str, Any]]:
    """Lengths (tokens) of generated and of trained answers, the latter also by fifth of the run."""
    columns = [f"{name}_{of}" for name in ("generated", "trained") for of in ("mean", "p50", "p90", "p99")]
    columns += [f"trained_mean_fifth_{fifth}" for fifth in range(1, 6)]
    for named, own in _groups(rows):
        if named["correction"] == "none":
            means = _means(own, ("dropped_share", "dropped_share_of_longest", *columns))
            ratio = means["trained_mean"] / means["generated_mean"]
            yield named | means | {"trained_over_generated": round(ratio, 4)}


def _times(rows: Rows) -> Iterator[dict[str, Any]]:
    """Time and samples to the target: medians over seeds; `-` if most seeds do not reach it."""
    targets = {}
    for task in dict.fromkeys(row["task"] for row in rows):
        sync = [row for row in rows if (row["task"], row["policy"]) == (task, "sync")]
        if sync:
            start, end = (statistics.fmean(row[f"at_{point}"] for row in sync) for point in (0, 100))
            targets[task] = start + TARGET * (end - start)
    for named, own in _groups([row for row in rows if row["task"] in targets]):
        target = targets[named["task"]]
        reached = [_reached(row, target) for row in own]
        samples, took_s = (statistics.median(point[i] for point in reached) for i in (0, 1))
        yield named | {
            "target": round(target, 4),
            "reached": sum(share < math.inf for share, _ in reached),
            "samples_to_target": round(samples) if samples < math.inf else "-",
            "s_to_target": round(took_s, 2) if took_s < math.inf else "-",
            "wall_s": round(statistics.median(row["wall_s"] for row in own), 2),
        }


def _untaught(rows: Rows) -> Iterator[dict[str, Any]]:
    """Accuracy on held-out prompts unlike all demonstrations, before and after training."""
    for named, own in _groups([row for row in rows if "untaught_at_0" in row]):
        mean, half = band([row["untaught_at_100"] for row in own])
        before = statistics.fmean(row["untaught_at_0"] for row in own)
        yield named | {"untaught_at_0": before, "untaught_at_100": round(mean, 4), "half": round(half, 4)}


def _reached(row: dict[str, Any], target: float) -> tuple[float, float]:
    """Samples and seconds at which the interpolated curve first reaches the target, or inf."""
    before = (row["at_0"], 0.0, 0.0)
    for point in POINTS[1:]:
        now = (row[f"at_{point}"], point / 100 * row["steps"] * SAMPLES_PER_STEP, row[f"s_at_{point}"])
        if now[0] >= target:
            share = 1.0 if now[0] == before[0] else max(0.0, (target - before[0]) / (now[0] - before[0]))
            return before[1] + share * (now[1] - before[1]), before[2] + share * (now[2] - before[2])
        before = now
    return math.inf, math.inf


def _means(rows: Rows, columns: Iterable[str]) -> dict[str, float]:
    return {column: round(statistics.fmean(row[column] for row in rows), 4) for column in columns}
