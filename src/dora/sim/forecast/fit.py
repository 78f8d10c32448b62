"""What DORA's paper does not say, found from its synchronous and partial-rollout rows alone.

The trainer's MFU and fixed time are a line through four points; the engines' time beside the roofline is that
at which a synchronous step's rollout takes what it took; how old partial rollout's answers may be, and how
alike siblings are in length, are those at which its rollout does. Everything else is assumed, and listed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.hardware import DEVICES, Efficiency
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.published import DORA, FITTED_ON, row
from dora.sim.forecast.shapes import SHAPES

SIZES = (64, 128)
BATCH, GROUP, LIMIT, PROMPT, MEAN = 512, 16, 30_720, 110, 2375  # tokens
ASSUMED = {
    "sigma": 1.2,  # of lengths: the paper's 99th percentile is over 10 times the median, which is 1.0 or more
    "prompt": PROMPT,  # tokens; "mean response 2.4K" and tokens a trajectory differ by about so many
    "tensor": 4,  # devices of an engine
    "memory": 0.9,  # share of the memory's speed
    "flops": 0.75,  # share of the compute, while decoding
    "partial_extra": 0.25,  # groups that partial rollout begins beyond a batch, of a batch
}
NODE = 8  # GPUs, which go to rollout or to the trainer together
MOST_ALIKE = 0.9
LIKELY = 0.5  # correlation of siblings, before it is fitted
PARTIAL_BOUNDS = (1, 2, 3)  # S of partial rollout, which the paper does not print
QUARTER = 4  # of the devices and of the batch, for what is played often
LOOK, REPORT = 8, 24  # steps with a full pipeline, to choose a split and for a row, so that chance evens out
Figures = dict[str, float]
Play = Callable[[Setup], Figures]


@dataclass(frozen=True)
class Fitted:
    """What was fitted, and the paper's job with it; answers are as long as in its synchronous rows."""

    train: float = 0.2244  # MFU
    train_s: float = 145.0  # of a training step, however many devices share it
    step_s: float = 0.0181  # of a decode step, beside the roofline
    partial_bound: float = 2  # S of partial rollout
    alike: float = LIKELY  # correlation of siblings' lengths

    @cached_property
    def job(self) -> Job:
        tokens = sum(row("sync", gpus).mega_tokens for gpus in SIZES) / len(SIZES) * 1e6
        mean = tokens / (BATCH * GROUP) - PROMPT
        lengths = Lengths(LIMIT, mean, tail=ASSUMED["sigma"], prompt=PROMPT, alike=self.alike)
        efficiency = Efficiency(
            memory=ASSUMED["memory"], flops=ASSUMED["flops"], train=self.train, train_s=self.train_s,
            step_s=self.step_s,
        )  # fmt: skip
        return Job(SHAPES["qwen2.5-32b"], lengths, BATCH, GROUP, efficiency)


def layout_of(policy: str, staleness: int, gpus: int, num_train: int | None = None, slack: int = 0) -> Layout:
    """Colocated without `num_train`."""
    device = DEVICES["H800"]
    apart = () if num_train is None else ((device, gpus - num_train),)
    train = (device, num_train or gpus)
    return Layout(policy, staleness, train, apart, tensor=int(ASSUMED["tensor"]), slack=slack)


def shrunk(setup: Setup, by: int) -> Setup:
    """A part of the devices with the same part of the batch, which is as fast: only engines are fewer."""
    layout = setup.layout
    device, num = layout.train
    apart = tuple((one, n // by) for one, n in layout.rollout)
    part = replace(layout, train=(device, num // by), rollout=apart, slack=layout.slack // by)
    return replace(setup, job=replace(setup.job, batch_size=setup.job.batch_size // by), layout=part)


def num_steps(staleness: int, num_full: int) -> int:
    """Steps of a run in which the pipeline is full for so many; see `outcome.middle`."""
    return num_full + 2 * staleness + 3


def in_part(play: Play, setup: Setup, by: int) -> Figures:
    """Figures of the whole, from a part of it."""
    found = play(shrunk(setup, by))
    return {**found, **{name: found[name] * by for name in ("tokens_per_s", "tokens_per_step", "moves")}}


def fitted(play: Play) -> Fitted:
    """Everything, one after the other; engines again at the end, for siblings matter a little to them."""
    train, train_s = fit_trainer()
    found = replace(Fitted(), train=train, train_s=train_s)
    found = replace(found, step_s=fit_engine(play, found))
    at_bounds = [replace(found, partial_bound=bound) for bound in PARTIAL_BOUNDS]
    found = min(at_bounds, key=lambda one: abs(_exposed_error(play, "partial", one)))
    found = replace(found, alike=fit_alike(play, found))
    return replace(found, step_s=fit_engine(play, found))


def fit_trainer() -> tuple[float, float]:
    """MFU and fixed seconds of a training step: least squares over the rows' time beside rollout."""
    rows = [found for found in DORA if found.policy in FITTED_ON]
    ideal_s = [_work_s(found.gpus) * found.mega_tokens * 1e6 for found in rows]
    other_s = [60 * found.other_min for found in rows]
    mean_x, mean_y = sum(ideal_s) / len(rows), sum(other_s) / len(rows)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(ideal_s, other_s, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in ideal_s)
    return 1 / slope, mean_y - slope * mean_x


def _work_s(gpus: int) -> float:
    """A token's training on so many devices at their peak, in a sequence of mean length."""
    cost = Setup(Fitted(1.0, 0.0).job, layout_of("sync", 0, gpus), 1).trainer
    return cost.work_s(MEAN) / MEAN


def solve(error: Callable[[float], float], first: float, second: float, num_tries: int = 4) -> float:
    """Where an error that grows nearly in proportion is 0, by the secant; at most so many evaluations."""
    at, then = first, second
    wrong_at, wrong_then = error(at), error(then)
    for _ in range(num_tries - 2):
        if wrong_then == wrong_at or abs(wrong_then) < 0.1:
            break
        at, then, wrong_at = then, then - wrong_then * (then - at) / (wrong_then - wrong_at), wrong_then
        wrong_then = error(then)
    return then


def fit_engine(play: Play, found: Fitted) -> float:
    """Seconds of a decode step beside the roofline."""
    first = found.step_s

    def error(step_s: float) -> float:
        return _exposed_error(play, "sync", replace(found, step_s=step_s))

    return solve(error, first, 1.05 * first, 3)


def fit_alike(play: Play, found: Fitted) -> float:
    """How alike siblings are: the more, the fewer groups have a long one, and hold up partial rollout."""

    def error(alike: float) -> float:
        return _exposed_error(play, "partial", replace(found, alike=within(alike)))

    def within(alike: float) -> float:
        return min(MOST_ALIKE, max(0.0, alike))

    return within(solve(error, LIKELY, 0.7, 3))


def colocated(play: Play, found: Fitted, policy: str, gpus: int) -> Figures:
    """A row that is fitted on, from a quarter of it."""
    bound = int(found.partial_bound) if policy == "partial" else 0
    slack = bound * BATCH - int(ASSUMED["partial_extra"] * BATCH) if bound else 0
    layout = layout_of(policy, bound, gpus, slack=slack)
    return in_part(play, Setup(found.job, layout, num_steps(bound, REPORT)), QUARTER)


def _exposed_error(play: Play, policy: str, found: Fitted) -> float:
    """Minutes of exposed rollout beyond the paper's, mean over both sizes."""
    wrong = 0.0
    for gpus in SIZES:
        printed = row(policy, gpus).exposed_min
        assert printed is not None
        wrong += colocated(play, found, policy, gpus)["exposed_s"] / 60 - printed
    return wrong / len(SIZES)


def split(play: Play, job: Job, policy: str, staleness: int, gpus: int) -> tuple[int, dict[int, Figures]]:
    """GPUs for the trainer at which a step is shortest, and all tried.

    Node by node from five eighths, on halves; then an engine more or less than the best, on the whole.
    """
    tried: dict[int, Figures] = {}

    def step_s(num_train: int, by: int) -> float:
        if num_train not in tried or by == 1:
            num = num_steps(staleness, REPORT if by == 1 else LOOK)
            setup = Setup(job, layout_of(policy, staleness, gpus, num_train), num)
            tried[num_train] = in_part(play, setup, by)
        return tried[num_train]["step_s"]

    best, better = 0, gpus * 5 // 8 // NODE * NODE
    while better != best:
        best = better
        around = [n for n in (best, best - NODE, best + NODE) if 2 * NODE <= n <= gpus - NODE]
        better = min(around, key=lambda n: step_s(n, 2))
    unit = int(ASSUMED["tensor"])
    best = min((best, best - unit, best + unit), key=lambda n: step_s(n, 1))
    return best, dict(sorted(tried.items()))
