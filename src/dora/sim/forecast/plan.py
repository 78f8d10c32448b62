"""`dora plan`: which policy, split, parallel size and bound, for a job on so many devices.

All layouts that fit are ranked by a formula, which knows rates and the longest answer and nothing of queues;
the best are played by the production orchestrator, and those figures are printed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track

from dora.errors import InputError
from dora.sim.forecast.checking import stated
from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.compare import Row, show
from dora.sim.forecast.fit import Figures
from dora.sim.forecast.hardware import Device
from dora.sim.forecast.rules import policy_of
from dora.sim.forecast.shapes import TRAINED_BYTES

TENSORS = (1, 2, 4, 8)
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # of the devices, for the trainer
BAR = 40  # characters of the longest


@dataclass(frozen=True)
class Question:
    """What is to be planned."""

    job: Job
    device: Device
    num_devices: int
    max_staleness: int
    policies: tuple[str, ...]
    expert: int = 1

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise InputError(f"S = {self.max_staleness} must be at least 0")
        if self.num_devices < 1:
            raise InputError(f"{self.num_devices} devices must be at least 1")


def candidates(asked: Question) -> Iterator[Setup]:
    """Layouts that can be. Raises InputError, that of the first one tried, where none can."""
    refusal: InputError | None = None
    num_found = 0
    for layout in _layouts(asked):
        setup = Setup(asked.job, layout, 2 * layout.max_staleness + 7)
        try:
            _ = (setup.engines, setup.trainer)
        except InputError as error:
            refusal = refusal or error
            continue
        num_found += 1
        yield setup
    if not num_found:
        raise refusal or InputError(f"{asked.num_devices} devices leave nothing to choose")


def _layouts(asked: Question) -> Iterator[Layout]:
    device, num = asked.device, asked.num_devices
    for name in asked.policies:
        policy = policy_of(name)
        for tensor in TENSORS:
            base = Layout(name, policy.max_staleness or 0, (device, num), (), tensor, asked.expert)
            if policy.is_colocated:
                yield replace(base, max_staleness=policy.max_staleness or 0)
                continue
            unit = tensor * asked.expert
            splits = {num - max(1, round(num * (1 - share) / unit)) * unit for share in SHARES}
            bounds = (
                range(1, asked.max_staleness + 1) if policy.max_staleness is None else [policy.max_staleness]
            )
            for num_train in sorted(n for n in splits if 0 < n < num):
                for staleness in [s for s in bounds if s <= asked.max_staleness]:
                    apart = ((device, num - num_train),)
                    yield replace(base, max_staleness=staleness, train=(device, num_train), rollout=apart)


def estimate(setup: Setup) -> float:
    """Seconds of a step by rates alone: training, rollout, and the longest answer within its bound."""
    job, layout = setup.job, setup.layout
    mean = float(job.lengths.sample.mean())
    train_s = job.num_answers * setup.trainer.work_s(job.lengths.prompt + mean) + job.efficiency.train_s
    speed, step_s = 0.0, 0.0
    for cost, rows, _ in setup.engines:
        rank_rows = -(-rows // cost.expert)
        one_s = cost.pace(rows, rank_rows, rank_rows * job.lengths.resident).seconds(1.0)
        speed, step_s = speed + rows / one_s, max(step_s, one_s)
    rollout_s = job.num_answers * mean / speed
    longest_s = float(np.quantile(job.lengths.sample, 1 - 0.5 / job.num_answers)) * step_s
    if policy_of(layout.policy).is_colocated or layout.max_staleness == 0:
        return train_s + max(rollout_s, longest_s)
    return max(train_s, rollout_s, longest_s / layout.max_staleness)


def row_of(setup: Setup, found: Figures) -> Row:
    """A plan as it is printed. Memory in GB of one device."""
    layout, (cost, rows, _) = setup.layout, setup.engines[0]
    weights = cost.shape.weight_bytes / cost.num_devices / 1e9
    return {
        "policy": layout.policy,
        "S": layout.max_staleness,
        "trainer": layout.train[1],
        "rollout": sum(num for _, num in layout.rollout),
        "tensor": layout.tensor,
        "rows": rows,
        "tokens/s": found["tokens_per_s"],
        "step s": found["step_s"],
        "trainer idle": found["exposed"],
        "engines idle": 1 - found["busy_engines"],
        "staleness": found["staleness"],
        "max": found["staleness_max"],
        "weights GB": weights,
        "KV GB": min(1.0, found["kv_peak"]) * cost.kv_tokens * cost.shape.kv_bytes / cost.num_devices / 1e9,
        "trainer GB": cost.shape.parameters * TRAINED_BYTES / layout.train[1] / 1e9,
    }


def main(asked: Question, num_played: int, path: Path | None, checked: Sequence[Row] = ()) -> int:
    """Search, print the best plans, what if the tail doubles, and how far forecasts are off."""
    ranked = sorted(candidates(asked), key=estimate)
    chosen = _variety(ranked, num_played)
    console = Console(stderr=True)
    played = [(setup, setup.figures()) for setup in track(chosen, "playing", console=console, transient=True)]
    played.sort(key=lambda one: -one[1]["tokens_per_s"])
    rows = [row_of(*one) for one in played]
    show(rows)
    print(f"\n{bars(rows)}\n")
    heavy = _heavier(played[0][0])
    print(
        f"If the 99th percentile of answers doubles, the best plan steps in {heavy['step_s']:,.0f} s in "
        f"place of {played[0][1]['step_s']:,.0f} and trains {heavy['tokens_per_s']:,.0f} tokens/s. "
        f"{len(ranked)} layouts fit, {len(rows)} were played.\n{stated(checked)}"
    )
    if path is not None:
        written = {"rows": rows, "tail_doubled": heavy, "calibration": [*checked]}
        path.write_text(json.dumps(written, indent=2) + "\n", encoding="utf-8")
    return 0


def bars(rows: Sequence[Row]) -> str:
    """Plans by their tokens a second, the first the best."""
    best, lines = float(rows[0]["tokens/s"]), []
    for row in rows:
        name = f"{row['policy']} S={row['S']} {row['trainer']}+{row['rollout']} t{row['tensor']}"
        speed = float(row["tokens/s"])
        lines.append(f"{name:>28} {'#' * max(1, round(BAR * speed / best))} {speed:,.0f}")
    return "\n".join(lines)


def _variety(ranked: Sequence[Setup], most: int) -> list[Setup]:
    """The best of each policy and bound first, then the next best of all."""
    first = {(one.layout.policy, one.layout.max_staleness): one for one in reversed(ranked)}
    rest = [one for one in ranked if one not in first.values()]
    leaders = sorted(first.values(), key=estimate)
    return [*leaders, *rest][: max(most, 1)]


def _heavier(setup: Setup) -> Figures:
    job = replace(setup.job, lengths=setup.job.lengths.heavier())
    return replace(setup, job=job).figures()
