"""The planner's search: which policy, bound, split of the devices, parallel sizes and rows.

All layouts that can be are ranked by a formula, which knows rates and the longest answer and nothing of
queues. The best of each policy and bound are played by the production orchestrator, and from the fastest the
search climbs: its neighbours, which differ in one choice by one notch, are played until none is faster.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np

from dora.errors import InputError
from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.fit import Figures
from dora.sim.forecast.hardware import Device
from dora.sim.forecast.rules import Policy, policy_of

SIZES = (1, 2, 4, 8, 16, 32, 64, 128)  # of tensor and expert parallelism
SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)  # of the devices, for the trainer
ROWS = (1.0, 0.5, 0.25)  # of those that an engine's KV has room for
WINDOW = 10  # steps that are looked at, beside those in which the pipeline fills and drains
PARTS = 12  # of a burst's lengths
Place = tuple[float, ...]  # a layout's choices, as indices of what there is to choose


@dataclass(frozen=True)
class Question:
    """What is to be planned. `expert` None: searched, too."""

    job: Job
    device: Device
    num_devices: int
    max_staleness: int
    policies: tuple[str, ...]
    expert: int | None = None

    def __post_init__(self) -> None:
        if self.max_staleness < 0:
            raise InputError(f"S = {self.max_staleness} must be at least 0")
        if self.num_devices < 1:
            raise InputError(f"{self.num_devices} devices must be at least 1")
        unbound = [name for name in self.policies if not policy_of(name).is_bounded]
        if unbound:
            raise InputError(
                f"policies {', '.join(unbound)} keep no bound, so no plan of theirs would promise "
                f"S = {self.max_staleness}; leave them out"
            )
        least = min((policy_of(name).max_staleness or 0 for name in self.policies), default=0)
        if least > self.max_staleness or not self.policies:
            raise InputError(
                f"policies {', '.join(self.policies) or 'none'}: none goes with S = {self.max_staleness}; "
                f"the least bound of them is {least}"
            )


@dataclass(frozen=True)
class Plan:
    """A layout that was played."""

    setup: Setup
    figures: Figures

    @property
    def tokens_per_s(self) -> float:
        return self.figures["tokens_per_s"]


def candidates(asked: Question) -> dict[Place, Setup]:
    """Layouts that can be, by their choices. Raises InputError, of the largest engines, if none can."""
    refusals: dict[int, InputError] = {}  # by the devices of an engine
    found: dict[Place, Setup] = {}
    for place, layout, share in _layouts(asked):
        setup = Setup(asked.job, layout, 2 * asked.max_staleness + 3 + WINDOW)
        try:
            rows = int(setup.engines[0].rows * share)
            _ = setup.trainer
        except InputError as error:
            refusals.setdefault(layout.tensor * layout.expert, error)
            continue
        if rows:
            found[place] = setup if share == 1 else setup.changed(rows=rows)
    if not found:
        nothing = InputError(f"{asked.num_devices} devices leave nothing to choose")
        raise refusals[max(refusals)] if refusals else nothing
    return found


def _layouts(asked: Question) -> Iterator[tuple[Place, Layout, float]]:
    device, num = asked.device, asked.num_devices
    most = asked.job.shape.num_experts or 1
    experts = [asked.expert] if asked.expert else [size for size in SIZES if size <= most]
    for which, name in enumerate(asked.policies):
        policy = policy_of(name)
        for tensor, expert, share in product(SIZES, experts, ROWS):
            unit = tensor * expert
            if tensor > device.node_size or unit > num:
                continue
            splits = [num] if policy.is_colocated else _splits(num, unit)
            for split, bound in product(range(len(splits)), _bounds(policy, asked.max_staleness)):
                train, rest = splits[split], num - splits[split]
                apart = ((device, rest),) if rest else ()
                layout = Layout(name, bound, (device, train), apart, tensor, expert)
                sizes = (SIZES.index(tensor), experts.index(expert), ROWS.index(share))
                yield (which, bound, *sizes, train / num), layout, share


def _splits(num: int, unit: int) -> list[int]:
    """Devices of the trainer, where the others make whole engines."""
    found = {num - max(1, round(num * (1 - share) / unit)) * unit for share in SHARES}
    return sorted(n for n in found if 0 < n < num)


def _bounds(policy: Policy, most: int) -> Sequence[int]:
    if policy.max_staleness is not None:
        return [policy.max_staleness] if policy.max_staleness <= most else []
    return range(min(1, most), most + 1)


class Formula:
    """Seconds of a step by rates alone: training, rollout, and the longest answer within its bound."""

    def __init__(self, job: Job) -> None:
        answers = job.lengths.sample
        self.job, self.mean, self.context = job, float(answers.mean()), job.lengths.resident
        self.longest = float(np.quantile(answers, 1 - 0.5 / job.num_answers))
        self.parts: list[float] = [*np.quantile(answers, np.arange(PARTS) / PARTS).tolist(), self.longest]

    def step_s(self, setup: Setup) -> float:
        job, policy, bound = self.job, policy_of(setup.layout.policy), setup.layout.max_staleness
        work_s = setup.trainer.work_s(job.lengths.prompt + self.mean)
        train_s = job.num_answers * work_s + setup.trainer.fixed_s
        if bound == 0:
            return train_s + self._burst_s(setup)
        if policy.one_version:
            return max(train_s, self._burst_s(setup))
        full = rows = setup.num_rows / len(setup.engines)
        tokens, step_s = job.num_answers * self.mean / len(setup.engines), 0.0
        for _ in range(12):  # a step takes as long as its busy rows let it, and has as many as fill its time
            one_s = self._decode_s(setup, rows)
            step_s = max(train_s, tokens * one_s / full, self.longest * one_s / bound)
            rows = (rows + min(full, tokens * one_s / step_s)) / 2
        return train_s + step_s if policy.is_colocated else step_s

    def _burst_s(self, setup: Setup) -> float:
        """A batch that begins together: rounds of full rows, and a last one that runs dry."""
        share, full = self.job.num_answers / len(setup.engines), setup.num_rows / len(setup.engines)
        rows = min(full, share)
        last_s = sum(
            (end - begin) * self._decode_s(setup, rows * (1 - (k + 1) / PARTS) + 1)
            for k, (begin, end) in enumerate(pairwise(self.parts))
        )
        return (share / rows - 1) * self.mean * self._decode_s(setup, full) + last_s

    def _decode_s(self, setup: Setup, rows: float) -> float:
        """One decode step of the first engine with so many rows of usual context."""
        cost, num = setup.engines[0].cost, max(1, round(rows))
        rank_rows = -(-num // cost.expert)
        return cost.pace(num, rank_rows, rank_rows * self.context).seconds(1.0)


def search(asked: Question, most: int) -> Iterator[Plan]:
    """Plans as they are played, at most so many."""
    places, formula = candidates(asked), Formula(asked.job)
    ranked = sorted(places, key=lambda place: formula.step_s(places[place]))
    first = {place[:2]: place for place in reversed(ranked)}
    queue = sorted(first.values(), key=ranked.index)
    played: dict[Place, Plan] = {}
    while queue and len(played) < most:
        place = queue.pop(0)
        played[place] = Plan(places[place], places[place].figures())
        yield played[place]
        if not queue:
            best = max(played, key=lambda one: played[one].tokens_per_s)
            near = neighbours(best, places) - played.keys()
            queue = [one for one in ranked if one in near]


def neighbours(place: Place, places: Iterable[Place]) -> set[Place]:
    """Those that differ in one choice by one notch; where that is not the split, at the nearest split."""
    splits: dict[Place, list[float]] = {}
    for one in places:
        splits.setdefault(one[:-1], []).append(one[-1])
    found: set[Place] = set()
    for choices, at in splits.items():
        notches = sum(abs(a - b) for a, b in zip(choices, place, strict=False))
        if choices[0] != place[0] or notches > 1:
            continue
        if notches:
            found.add((*choices, min(at, key=lambda split: abs(split - place[-1]))))
        else:
            less, more = ([s for s in at if (s - place[-1]) * side > 0] for side in (-1, 1))
            found |= {(*choices, split) for split in (*sorted(less)[-1:], *sorted(more)[:1])}
    return found


def heavier(plan: Plan, times: float = 2.0) -> Figures:
    """What becomes of it if the 99th percentile of answers is so many times as long, the median the same."""
    setup = plan.setup
    job = replace(setup.job, lengths=setup.job.lengths.heavier(times))
    return replace(setup, job=job).figures()
