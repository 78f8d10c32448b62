"""Fits what DORA's paper does not print to its synchronous and partial-rollout rows alone.

* The trainer's MFU and fixed time are a line through four points.
* The engines' overhead of a decode step gives synchronous rollout the time that the paper prints.
* The staleness bound of partial rollout, and the correlation of siblings' lengths, do so for partial rollout.

Everything else is assumed, and listed in `ASSUMED`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from dora.planner.cluster import Deployment, Layout, Workload
from dora.planner.hardware import DEVICES, MODELS, Efficiency
from dora.planner.lengths import LengthDistribution
from dora.planner.simulator import Metrics
from paper.published import DORA, FITTED_POLICIES, published_row

GPU_COUNTS = (64, 128)
BATCH_SIZE, GROUP_SIZE = 512, 16
LIMIT, PROMPT, MEAN = 30_720, 110, 2375  # tokens
ASSUMED = {
    "sigma": 1.2,  # of lengths: the paper's 99th percentile is over 10 times the median, which is 1.0 or more
    "prompt": PROMPT,  # tokens; "mean response 2.4K" and tokens per trajectory differ by about so many
    "tensor": 4,  # devices of an engine
    "memory": 0.9,  # fraction of the memory bandwidth
    "flops": 0.75,  # fraction of the compute, in decoding
    "partial_extra": 0.25,  # groups that partial rollout starts beyond a batch, in batches
}
NODE_SIZE = 8  # GPUs, which go to rollout or to the trainer together
MAX_CORRELATION = 0.9
INITIAL_CORRELATION = 0.5  # of siblings
PARTIAL_BOUNDS = (1, 2, 3)  # candidates for S of partial rollout
QUARTER = 4  # colocated rows and sweeps are simulated with a quarter of the devices and of the batch
NUM_STEPS_TO_SPLIT, NUM_STEPS_OF_ROW = 8, 24  # steps with a full pipeline, to choose a split and for a row
Simulate = Callable[[Deployment], Metrics]


@dataclass(frozen=True)
class FittedInputs:
    """The fitted inputs, and the paper's workload with them."""

    mfu: float = 0.2244
    train_step_s: float = 145.0  # fixed time of a training step
    decode_step_s: float = 0.0181  # overhead of a decode step beside the roofline
    partial_bound: float = 2  # S of partial rollout
    correlation: float = INITIAL_CORRELATION  # of siblings' lengths

    @cached_property
    def workload(self) -> Workload:
        """Its answers are as long as in the paper's synchronous rows."""
        rows = [published_row("sync", num_gpus) for num_gpus in GPU_COUNTS]
        num_tokens = sum(row.mega_tokens for row in rows) / len(rows) * 1e6
        mean = num_tokens / (BATCH_SIZE * GROUP_SIZE) - PROMPT
        lengths = LengthDistribution(
            LIMIT, mean, tail=ASSUMED["sigma"], prompt=PROMPT, correlation=self.correlation
        )
        efficiency = Efficiency(
            memory=ASSUMED["memory"],
            flops=ASSUMED["flops"],
            train=self.mfu,
            train_step_s=self.train_step_s,
            decode_step_s=self.decode_step_s,
        )
        return Workload(MODELS["qwen2.5-32b"], lengths, BATCH_SIZE, GROUP_SIZE, efficiency)


def fit_inputs(simulate: Simulate) -> FittedInputs:
    """Fit one input after the other; the decode overhead again at the end, with the siblings' correlation."""
    mfu, train_step_s = fit_trainer()
    inputs = replace(FittedInputs(), mfu=mfu, train_step_s=train_step_s)
    inputs = replace(inputs, decode_step_s=fit_decode_overhead(simulate, inputs))
    with_bounds = [replace(inputs, partial_bound=bound) for bound in PARTIAL_BOUNDS]
    inputs = min(with_bounds, key=lambda one: abs(_exposed_error_min(simulate, "partial", one)))
    inputs = replace(inputs, correlation=fit_correlation(simulate, inputs))
    return replace(inputs, decode_step_s=fit_decode_overhead(simulate, inputs))


def fit_trainer() -> tuple[float, float]:
    """MFU and fixed seconds of a training step: least squares over the rows' time beside rollout."""
    rows = [row for row in DORA if row.policy in FITTED_POLICIES]
    ideal_s = [_peak_s_per_token(row.num_gpus) * row.mega_tokens * 1e6 for row in rows]
    other_s = [60 * row.other_min for row in rows]
    mean_x, mean_y = sum(ideal_s) / len(rows), sum(other_s) / len(rows)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in zip(ideal_s, other_s, strict=True))
    slope /= sum((x - mean_x) ** 2 for x in ideal_s)
    return 1 / slope, mean_y - slope * mean_x


def _peak_s_per_token(num_gpus: int) -> float:
    """Training time of a token at peak compute, in a sequence of mean length."""
    cost = Deployment(FittedInputs(1.0, 0.0).workload, make_layout("sync", 0, num_gpus), 1).trainer
    return cost.sequence_s(MEAN) / MEAN


def fit_decode_overhead(simulate: Simulate, inputs: FittedInputs) -> float:
    """Overhead of a decode step beside the roofline, in seconds."""
    first = inputs.decode_step_s

    def error(decode_step_s: float) -> float:
        return _exposed_error_min(simulate, "sync", replace(inputs, decode_step_s=decode_step_s))

    return find_root(error, first, 1.05 * first, 3)


def fit_correlation(simulate: Simulate, inputs: FittedInputs) -> float:
    """Correlation of siblings: the higher, the fewer groups have a long answer to wait for."""

    def clamp(correlation: float) -> float:
        return min(MAX_CORRELATION, max(0.0, correlation))

    def error(correlation: float) -> float:
        return _exposed_error_min(simulate, "partial", replace(inputs, correlation=clamp(correlation)))

    return clamp(find_root(error, INITIAL_CORRELATION, 0.7, 3))


def find_root(
    error: Callable[[float], float], first: float, second: float, max_evaluations: int = 4
) -> float:
    """The root of a nearly linear error, by the secant method."""
    x0, x1 = first, second
    y0, y1 = error(x0), error(x1)
    for _ in range(max_evaluations - 2):
        if y1 == y0 or abs(y1) < 0.1:
            break
        x0, x1, y0 = x1, x1 - y1 * (x1 - x0) / (y1 - y0), y1
        y1 = error(x1)
    return x1


def _exposed_error_min(simulate: Simulate, policy: str, inputs: FittedInputs) -> float:
    """Minutes of exposed rollout beyond the paper's, mean over both numbers of GPUs."""
    error_min = 0.0
    for num_gpus in GPU_COUNTS:
        printed = published_row(policy, num_gpus).exposed_min
        assert printed is not None
        error_min += simulate_colocated(simulate, inputs, policy, num_gpus)["exposed_s"] / 60 - printed
    return error_min / len(GPU_COUNTS)


def simulate_colocated(simulate: Simulate, inputs: FittedInputs, policy: str, num_gpus: int) -> Metrics:
    """A row that the inputs are fitted to, from a quarter of it."""
    bound = int(inputs.partial_bound) if policy == "partial" else 0
    slack = bound * BATCH_SIZE - int(ASSUMED["partial_extra"] * BATCH_SIZE) if bound else 0
    layout = make_layout(policy, bound, num_gpus, slack=slack)
    deployment = Deployment(inputs.workload, layout, num_steps(bound, NUM_STEPS_OF_ROW))
    return simulate_part(simulate, deployment, QUARTER)


def make_layout(
    policy: str, max_staleness: int, num_gpus: int, num_train: int | None = None, slack: int = 0
) -> Layout:
    """A layout of H800s; without `num_train`, a colocated one."""
    device = DEVICES["H800"]
    rollout = () if num_train is None else ((device, num_gpus - num_train),)
    trainer = (device, num_train or num_gpus)
    return Layout(policy, max_staleness, trainer, rollout, tp_size=int(ASSUMED["tensor"]), slack=slack)


def num_steps(max_staleness: int, num_steady: int) -> int:
    """Steps of a run in which the pipeline is full for `num_steady`; see `steady_steps`."""
    return num_steady + 2 * max_staleness + 3


def simulate_part(simulate: Simulate, deployment: Deployment, divisor: int) -> Metrics:
    """Metrics of a deployment, from a part of its devices and of its batch."""
    metrics = simulate(shrink(deployment, divisor))
    totals = ("tokens_per_s", "total_tokens_per_s", "total_tokens_per_step", "migrations")
    return {**metrics, **{name: metrics[name] * divisor for name in totals}}


def shrink(deployment: Deployment, divisor: int) -> Deployment:
    """A part of the devices with the same part of the batch: as fast, with fewer engines."""
    layout, workload = deployment.layout, deployment.workload
    device, num = layout.trainer
    smaller = replace(
        layout,
        trainer=(device, num // divisor),
        rollout=tuple((device, n // divisor) for device, n in layout.rollout),
        slack=layout.slack // divisor,
    )
    part = replace(workload, batch_size=workload.batch_size // divisor)
    return replace(deployment, workload=part, layout=smaller)


def find_split(
    simulate: Simulate, workload: Workload, policy: str, max_staleness: int, num_gpus: int
) -> tuple[int, dict[int, Metrics]]:
    """GPUs of the trainer with the shortest step, and the metrics of all that were tried.

    Climbs node by node from five eighths, on halves; then tries an engine more or less, on the whole.
    """
    tried: dict[int, Metrics] = {}

    def step_s(num_train: int, divisor: int) -> float:
        if num_train not in tried or divisor == 1:
            num_steady = NUM_STEPS_OF_ROW if divisor == 1 else NUM_STEPS_TO_SPLIT
            layout = make_layout(policy, max_staleness, num_gpus, num_train)
            deployment = Deployment(workload, layout, num_steps(max_staleness, num_steady))
            tried[num_train] = simulate_part(simulate, deployment, divisor)
        return tried[num_train]["step_s"]

    best, better = 0, num_gpus * 5 // 8 // NODE_SIZE * NODE_SIZE
    while better != best:
        best = better
        sizes = [n for n in (best, best - NODE_SIZE, best + NODE_SIZE) if _is_valid_split(n, num_gpus)]
        better = min(sizes, key=lambda n: step_s(n, 2))
    engine_size = int(ASSUMED["tensor"])
    best = min((best, best - engine_size, best + engine_size), key=lambda n: step_s(n, 1))
    return best, dict(sorted(tried.items()))


def _is_valid_split(num_train: int, num_gpus: int) -> bool:
    return 2 * NODE_SIZE <= num_train <= num_gpus - NODE_SIZE
