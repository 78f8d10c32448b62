"""The rows of the papers' tables, forecast beside what is printed, and studies of what the papers leave open.

Rows of DORA's synchronous and partial-rollout runs are fitted; the others are predictions, with the best
split of devices that was found. Keys of rows are those of `results/paper.json`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from dora.errors import InputError
from dora.planner.cluster import Deployment, Layout, Workload
from dora.planner.hardware import DEVICES, MODELS, Device, Efficiency
from dora.planner.lengths import LengthDistribution
from dora.planner.simulator import Metrics
from paper import fit
from paper.fit import BATCH_SIZE, GPU_COUNTS, QUARTER, FittedInputs, Simulate
from paper.published import (
    ASYNCFLOW,
    ASYNCFLOW_LINEARITY,
    ASYNCFLOW_MEAN,
    ASYNCFLOW_PARTS,
    FITTED_POLICIES,
    KV_REUSE,
    MOE,
    OVERHEADS,
    Range,
    published_row,
)

Row = dict[str, str | int | float]

DORA_BOUNDS = (2, 3)  # the paper's k = 3 is S = 2 where k counts living versions, S = 3 where it counts steps
NUM_TRAIN = 80  # of 128 GPUs
SWEPT_BOUNDS = (0, 1, 2, 3, 4, 6, 8)
SWEPT_ABLATIONS = (
    ("moves", "shares"),
    ("moves",),
    ("shares",),
    ("fill",),
    ("update",),
    ("pressure",),
    ("period",),
    ("remainders",),
    ("room",),
    ("kv",),
)
SWEPT_SLACK = {"S + 1 batches": 0, "S + 1/2": BATCH_SIZE // 2, "S": BATCH_SIZE}  # groups that may be open
FEW_ROWS = 128  # of an engine
SWEPT_METRICS = {  # key of the row -> metric
    "step_s": "step_s",
    "tokens_per_s": "total_tokens_per_s",
    "exposed": "exposed_fraction",
    "busy_rows": "row_utilization",
    "staleness": "staleness_mean",
    "moves": "migrations",
    "answer_s": "answer_s",
    "load_share": "load_fraction",
    "copy_share": "migration_copy_fraction",
}
MOE_DEVICE = replace(DEVICES["910B"], name="60 GB", memory_bytes=60e9 / 0.9)
# With so much memory 8 ranks hold the weights.
LARGE_MOE_DEVICE = replace(MOE_DEVICE, name="260 GB", memory_bytes=260e9 / 0.9)
MOE_LIMIT = 65_536  # tokens
ALPHAS, EP_SIZES = (1.1, 1.5, 3.0), (8, 16, 32, 64, 128)
# AsyncFlow's paper does not print lengths, nor prompts x answers a step: one guess is long, one short.
GUESSES = {
    "long": (LengthDistribution(8192, 2000.0, tail=0.9, prompt=100, correlation=0.3), 256, 8),
    "short": (LengthDistribution(4096, 800.0, tail=0.6, prompt=100, correlation=0.3), 1024, 8),
}
RESHARD_S = 5.0  # in which a colocated baseline switches between training and decoding
TRAINER_FRACTIONS = (1 / 4, 1 / 2, 3 / 4)  # that AsyncFlow's planner chooses from


def all_rows(simulate: Simulate, map_stages: Callable[..., Iterable[list[Row]]] = map) -> list[Row]:
    """All rows. `map_stages` is `map` or one that runs several stages at a time."""
    inputs = fit.fit_inputs(simulate)
    rows: list[Row] = [{**row, "kind": "inputs"} for row in input_rows(inputs)]
    for stage_rows in map_stages(partial(run_stage, simulate, inputs), STAGES):
        rows += stage_rows
    return rows + [{**row, "kind": kind} for kind, derive in DERIVED.items() for row in derive(rows)]


def run_stage(simulate: Simulate, inputs: FittedInputs, stage: str) -> list[Row]:
    """The rows of one stage, each with its `kind`."""
    return [{**row, "kind": stage.split(",")[0]} for row in STAGES[stage](simulate, inputs)]


# DORA's dense runs


def input_rows(inputs: FittedInputs) -> Iterator[Row]:
    """What was fitted, and what is assumed."""
    yield {"what": "trainer MFU", "value": inputs.mfu}
    yield {"what": "fixed s of a training step", "value": inputs.train_step_s}
    yield {"what": "s of a decode step beside the roofline", "value": inputs.decode_step_s}
    yield {"what": "S of partial rollout", "value": inputs.partial_bound}
    yield {"what": "correlation of siblings' lengths", "value": inputs.correlation}
    yield from ({"what": f"assumed: {name}", "value": value} for name, value in fit.ASSUMED.items())


def fitted_rows(simulate: Simulate, inputs: FittedInputs) -> Iterator[Row]:
    """The rows that the inputs were fitted to."""
    for policy in FITTED_POLICIES:
        for num_gpus in GPU_COUNTS:
            staleness = int(inputs.partial_bound) if policy == "partial" else 0
            metrics = fit.simulate_colocated(simulate, inputs, policy, num_gpus)
            yield from compare(policy, num_gpus, staleness, num_gpus, metrics)


def predicted_rows(
    simulate: Simulate, inputs: FittedInputs, policy: str, max_staleness: int
) -> Iterator[Row]:
    """Predictions, and how much four GPUs more or fewer for the trainer matter."""
    for num_gpus in GPU_COUNTS:
        best, tried = fit.find_split(simulate, inputs.workload, policy, max_staleness, num_gpus)
        yield from compare(policy, num_gpus, max_staleness, best, tried[best])
        near_min = [tried[n]["step_s"] / 60 for n in (best - 4, best + 4) if n in tried]
        yield {
            "table": "4 GPUs moved",
            "policy": policy,
            "S": max_staleness,
            "gpus": num_gpus,
            "trainer": best,
            "step_min": tried[best]["step_s"] / 60,
            "worst_step_min": max(near_min, default=0.0),
        }


def compare(
    policy: str, num_gpus: int, max_staleness: int, num_train: int, metrics: Metrics
) -> Iterator[Row]:
    """The metrics of one layout beside the paper's."""
    printed = published_row(policy, num_gpus)
    values = {
        "step_min": (printed.step_min, metrics["step_s"] / 60),
        "tokens_per_s": (printed.tokens_per_s, metrics["total_tokens_per_s"]),
    }
    if printed.exposed_min is not None:
        values["exposed_min"] = (printed.exposed_min, metrics["exposed_s"] / 60)
        values["exposed_share"] = (printed.exposed_min / printed.step_min, metrics["exposed_fraction"])
    if policy == "dora":
        for name, fraction in OVERHEADS[num_gpus].items():
            values[name] = (fraction, metrics[SWEPT_METRICS[name]])
    for metric, (paper, predicted) in values.items():
        yield comparison(policy, num_gpus, metric, paper, predicted, max_staleness, num_train)


def comparison(
    policy: str,
    num_gpus: int,
    metric: str,
    paper: float | Range,
    predicted: float,
    max_staleness: int = 2,
    num_train: int | str = "",
) -> Row:
    """A value beside the paper's. Within a printed range, the error is 0."""
    low, high = (paper, paper) if isinstance(paper, float | int) else paper
    nearest = min(max(predicted, low), high)
    return {
        "policy": policy,
        "S": max_staleness,
        "gpus": num_gpus,
        "trainer": num_train,
        "metric": metric,
        "paper": low if low == high else f"{low:g} to {high:g}",
        "predicted": predicted,
        "error": predicted / nearest - 1,
    }


def ratio_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """Speedup of DORA over the others, and of 128 GPUs over 64, from the rows before."""
    values = {
        (str(row["policy"]), row["gpus"], row["metric"]): row
        for row in rows
        if row["kind"] in ("fitted", "splits") and "paper" in row and (row["policy"], row["S"]) != ("dora", 3)
    }

    def speedup(policy: str, num_gpus: int, metric: str, name: str, base: tuple[str, int]) -> Row:
        row, base_row = values[policy, num_gpus, metric], values[*base, metric]
        is_time = metric == "step_min"

        def over_base(key: str) -> float:
            value, base_value = float(row[key]), float(base_row[key])
            return base_value / value if is_time else value / base_value

        label = f"{'step' if is_time else 'tokens/s'}, {name}"
        return comparison(policy, num_gpus, label, over_base("paper"), over_base("predicted"), int(row["S"]))

    for metric in ("step_min", "tokens_per_s"):
        for num_gpus in GPU_COUNTS:
            for policy in ("sync", "one_step", "partial"):
                yield speedup("dora", num_gpus, metric, f"times {policy}'s", (policy, num_gpus))
        for policy in ("sync", "partial", "dora"):
            yield speedup(policy, 128, metric, "times that of 64 GPUs", (policy, 64))


def kv_reuse_rows(rows: Sequence[Row]) -> Iterator[Row]:
    """The effect of KV reuse on the time of an answer, from the ablations before."""
    answer_s = {
        str(row["case"]): float(row["answer_s"]) for row in rows if row.get("table") == "parts, S = 2"
    }
    ratio = answer_s["without kv"] / answer_s["all"]
    yield comparison("dora", 128, "an answer without KV reuse, over with", KV_REUSE, ratio)


# Studies of what DORA's paper leaves open: on a quarter of the devices and of the batch, to compare rows


def sweep_row(table: str, case: str, metrics: Metrics) -> Row:
    return {"table": table, "case": case, **{key: metrics[name] for key, name in SWEPT_METRICS.items()}}


def ablation_rows(simulate: Simulate, workload: Workload) -> Iterator[Row]:
    """Speed against S, DORA without its parts, and with fewer open groups; on 128 GPUs."""

    def run(max_staleness: int, *ablations: str, **changes: int) -> Metrics:
        layout = fit.make_layout("dora", max_staleness, 128, NUM_TRAIN)
        changed = replace(layout, ablations=ablations, **changes)  # type: ignore[arg-type]
        num_steps = fit.num_steps(max_staleness, fit.NUM_STEPS_OF_ROW)
        return fit.simulate_part(simulate, Deployment(workload, changed, num_steps), QUARTER)

    for bound in SWEPT_BOUNDS:
        yield sweep_row("speed against S", f"S = {bound}", run(bound))
    yield sweep_row("parts, S = 2", "all", run(2))
    for ablations in SWEPT_ABLATIONS:
        yield sweep_row("parts, S = 2", f"without {', '.join(ablations)}", run(2, *ablations))
    for name, slack in SWEPT_SLACK.items():
        yield sweep_row("begun, S = 2", name, run(2, slack=slack))
    yield sweep_row("begun, S = 2", f"S + 1, {FEW_ROWS} rows an engine", run(2, num_rows=FEW_ROWS))


def fleet_rows(simulate: Simulate, workload: Workload) -> Iterator[Row]:
    """The same number of rollout devices, of one kind or of two."""
    h800, h200, a100 = (DEVICES[name] for name in ("H800", "H200", "A100"))
    fleets = {
        "48 H800": ((h800, 48),),
        "32 H800 + 16 H200": ((h800, 32), (h200, 16)),
        "32 H800 + 16 A100": ((h800, 32), (a100, 16)),
        "16 H800 + 32 A100": ((h800, 16), (a100, 32)),
    }
    for name, rollout in fleets.items():
        layout = replace(fit.make_layout("dora", 2, 128, NUM_TRAIN), rollout=rollout)
        deployment = Deployment(workload, layout, fit.num_steps(2, fit.NUM_STEPS_OF_ROW))
        yield sweep_row("fleets, S = 2", name, fit.simulate_part(simulate, deployment, QUARTER))


# DORA's mixture of experts


def moe_rows(simulate: Simulate) -> Iterator[Row]:
    """LongCat-Flash on 4,096 accelerators of 60 GB, engines of 128 ranks, from a quarter of it."""
    single_turn = LengthDistribution(MOE_LIMIT, 8000.0, tail=1.0, prompt=500, correlation=0.3)
    agents = replace(single_turn, num_turns=16, turn_delay_s=20.0)
    for name, lengths in {"reasoning": single_turn, "agents": agents}.items():
        workload = Workload(MODELS["longcat-flash"], lengths, 256, 16)
        speedup = speedup_over_sync(simulate, workload, 4096, 128, 2, divisor=4)
        yield comparison("dora", 4096, f"rollout, times sync's: {name}", MOE[name], speedup["rollout"])
        yield comparison("dora", 4096, f"step, times sync's: {name}", MOE["step"], speedup["step"])


def tail_rows(simulate: Simulate) -> Iterator[Row]:
    """Heavier tails under wider expert parallelism, which the paper names as future work."""
    for alpha in ALPHAS:
        lengths = LengthDistribution(MOE_LIMIT, 6000.0, "pareto", alpha, prompt=500, correlation=0.3)
        workload = Workload(MODELS["longcat-flash"], lengths, 32, 16)
        for ep_size in EP_SIZES:
            speedup = speedup_over_sync(simulate, workload, 512, ep_size, 2, LARGE_MOE_DEVICE)
            yield {"table": "tail x experts", "alpha": alpha, "expert": ep_size, **speedup}


def speedup_over_sync(
    simulate: Simulate,
    workload: Workload,
    num_devices: int,
    ep_size: int,
    max_staleness: int,
    device: Device = MOE_DEVICE,
    divisor: int = 1,
) -> Metrics:
    """Exposed rollout and steps of a synchronous run over those of DORA; half of the devices train."""
    half = num_devices // 2
    sync_layout = Layout("sync_split", 0, (device, half), ((device, half),), ep_size=ep_size)
    dora_layout = replace(sync_layout, policy="dora", max_staleness=max_staleness)

    def run(layout: Layout) -> Metrics:
        num_steps = fit.num_steps(layout.max_staleness, fit.NUM_STEPS_TO_SPLIT)
        return fit.simulate_part(simulate, Deployment(workload, layout, num_steps), divisor)

    sync, dora = run(sync_layout), run(dora_layout)
    return {
        "rollout": (sync["step_s"] - sync["train_s"]) / max(dora["step_s"] - dora["train_s"], 1e-9),
        "step": sync["step_s"] / dora["step_s"],
        "rows busy, sync": sync["row_utilization"],
        "rows busy, dora": dora["row_utilization"],
        "stalled, sync": sync["stall_fraction"],
        "stalled, dora": dora["stall_fraction"],
    }


# AsyncFlow


def asyncflow_rows(simulate: Simulate) -> Iterator[Row]:
    """Nothing is fitted: default efficiency, and two guesses of what is not printed."""
    for guess in GUESSES:
        keys = {*ASYNCFLOW, *((model, num) for model in ASYNCFLOW_LINEARITY for num in (32, 512))}
        speeds = {key: _asyncflow_speed(simulate, guess, *key) for key in sorted(keys)}
        for (model, num_npus), printed in ASYNCFLOW.items():
            metric = f"{model}, {guess}: over colocated"
            yield comparison("asyncflow", num_npus, metric, printed, speeds[model, num_npus][0], 1)
        mean = sum(speedup for speedup, _ in speeds.values()) / len(speeds)
        yield comparison("asyncflow", 512, f"{guess}: over colocated, mean", ASYNCFLOW_MEAN, mean, 1)
        for model, printed in ASYNCFLOW_LINEARITY.items():
            linearity = speeds[model, 512][1] / speeds[model, 32][1] / 16
            metric = f"{model}, {guess}: linearity from 32"
            yield comparison("asyncflow", 512, metric, printed, linearity, 1)
        yield from _asyncflow_part_rows(simulate, guess)


def _asyncflow_speed(simulate: Simulate, guess: str, model: str, num_npus: int) -> tuple[float, float]:
    """AsyncFlow's speed with its best split: over the colocated baseline's, and in tokens per second."""
    workload, base = _asyncflow_baseline(guess, model, num_npus)
    baseline, speeds = _tokens_per_s(simulate, workload, base), []
    for num_train in (round(fraction * num_npus) for fraction in TRAINER_FRACTIONS):
        try:
            speeds.append(_tokens_per_s(simulate, workload, _split_layout(base, "asyncflow", num_train)))
        except InputError:  # the model does not fit
            continue
    return max(speeds) / baseline, max(speeds)


def _asyncflow_part_rows(simulate: Simulate, guess: str) -> Iterator[Row]:
    """With half of the devices for each role: sequential tasks, streamed ones, and weights a step late."""
    model, num_npus = "qwen2.5-7b", 512
    workload, base = _asyncflow_baseline(guess, model, num_npus)
    sequential = _split_layout(base, "sync_split", num_npus // 2)
    layouts = {
        "streamed": replace(sequential, streams_groups=True),
        "deferred": _split_layout(base, "asyncflow", num_npus // 2),
    }
    sequential_speed = _tokens_per_s(simulate, workload, sequential)
    for name, layout in layouts.items():
        speedup = _tokens_per_s(simulate, workload, layout) / sequential_speed
        metric = f"{model}, {guess}: {name}, over one after the other"
        yield comparison("asyncflow", num_npus, metric, ASYNCFLOW_PARTS[name], speedup, 1)


def _asyncflow_baseline(guess: str, model: str, num_npus: int) -> tuple[Workload, Layout]:
    lengths, batch_size, group_size = GUESSES[guess]
    workload = Workload(MODELS[model], lengths, batch_size, group_size, Efficiency())
    tp_size = 2 if model == "qwen2.5-7b" else 8
    layout = Layout("sync", 0, (DEVICES["910B"], num_npus), tp_size=tp_size, switch_s=RESHARD_S)
    return workload, layout


def _split_layout(base: Layout, policy: str, num_train: int) -> Layout:
    device, num = base.trainer
    return replace(
        base,
        policy=policy,
        max_staleness=int(policy == "asyncflow"),
        switch_s=0.0,
        trainer=(device, num_train),
        rollout=((device, num - num_train),),
    )


def _tokens_per_s(simulate: Simulate, workload: Workload, layout: Layout) -> float:
    divisor = 4 if layout.num_devices >= 256 else 1
    num_steps = fit.num_steps(layout.max_staleness, fit.NUM_STEPS_TO_SPLIT)
    deployment = Deployment(workload, layout, num_steps)
    return fit.simulate_part(simulate, deployment, divisor)["total_tokens_per_s"]


STAGES: Mapping[str, Callable[[Simulate, FittedInputs], Iterator[Row]]] = {  # independent of each other
    "fitted": fitted_rows,
    "splits, one_step": partial(predicted_rows, policy="one_step", max_staleness=1),
    **{f"splits, dora {s}": partial(predicted_rows, policy="dora", max_staleness=s) for s in DORA_BOUNDS},
    "parts": lambda simulate, inputs: ablation_rows(simulate, inputs.workload),
    "moe": lambda simulate, _: moe_rows(simulate),
    "asyncflow": lambda simulate, _: asyncflow_rows(simulate),
    "fleets": lambda simulate, inputs: fleet_rows(simulate, inputs.workload),
    "tails": lambda simulate, _: tail_rows(simulate),
}
DERIVED: Mapping[str, Callable[[Sequence[Row]], Iterator[Row]]] = {
    "ratios": ratio_rows,
    "reuse": kv_reuse_rows,
}
