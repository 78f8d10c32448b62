"""The tables of DORA's and AsyncFlow's papers, forecast by the production orchestrator.

What the paper leaves out is fitted on its synchronous and partial rows (`fit`); the others are predictions,
for which the split of devices is the best one found.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from rich.console import Console

from dora.sim.forecast import fit
from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.compare import Row, show
from dora.sim.forecast.fit import SIZES, Figures, Play
from dora.sim.forecast.hardware import DEVICES, Device, Efficiency
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.published import ASYNCFLOW, ASYNCFLOW_PARTS, FITTED_ON, KV_REUSE, MOE_ROLLOUT, row
from dora.sim.forecast.shapes import SHAPES

BOUNDS = (2, 3)  # the paper's k = 3 can be read as either
LEFT_OUT = (
    ("moves", "shares"), ("moves",), ("shares",), ("fill",), ("update",), ("period",), ("remainders",),
    ("kv",),
)  # fmt: skip
FITTED = (
    "trainer MFU", "fixed s of a training step", "s of a decode step beside the roofline",
    "correlation of siblings' lengths",
)  # fmt: skip
QUARTER = 4  # sweeps have a quarter of the devices and of the batch


def fitted(play: Play) -> tuple[Job, list[Row]]:
    """The job with what was fitted, and how well its rows are met."""
    train, train_s = fit.fit_trainer()
    step_s = fit.fit_engine(play, train, train_s)
    alike = fit.fit_alike(play, step_s, train, train_s)
    job = fit.job_with(step_s, train, train_s, alike)
    found: list[Row] = [
        *[Row(what=what, value=v) for what, v in zip(FITTED, (train, train_s, step_s, alike), strict=True)],
        *[Row(what=f"assumed: {name}", value=value) for name, value in fit.ASSUMED.items()],
    ]
    return job, found


def job_of(inputs: Sequence[Row]) -> Job:
    """The job of inputs that were fitted before."""
    values = {str(one["what"]): float(one["value"]) for one in inputs}
    train, train_s, step_s, alike = (values[what] for what in FITTED)
    return fit.job_with(step_s, train, train_s, alike)


def known(play: Play, job: Job) -> Iterator[Row]:
    """The rows that were fitted on."""
    for policy in FITTED_ON:
        for gpus in SIZES:
            staleness = int(fit.ASSUMED["partial_S"]) if policy == "partial" else 0
            yield from compared(policy, gpus, staleness, gpus, fit.colocated(play, job, policy, gpus))


def apart(play: Play, job: Job) -> Iterator[Row]:
    """The rows that are predictions, and how much the split matters: four GPUs more or fewer."""
    for policy, bounds in (("one_step", (1,)), ("dora", BOUNDS)):
        for staleness in bounds:
            for gpus in SIZES:
                best, tried = fit.split(play, job, policy, staleness, gpus)
                yield from compared(policy, gpus, staleness, best, tried[best])
                near = [tried[n]["step_s"] / 60 for n in (best - 4, best + 4) if n in tried]
                yield {
                    "policy": policy, "S": staleness, "gpus": gpus, "trainer": best,
                    "metric": "step_min, 4 GPUs moved", "paper": "", "predicted": max(near, default=0.0),
                    "error": "",
                }  # fmt: skip


def compared(policy: str, gpus: int, staleness: int, num_train: int, found: Figures) -> Iterator[Row]:
    """One layout's figures beside the paper's."""
    printed = row(policy, gpus)
    metrics = {
        "step_min": (printed.step_min, found["step_s"] / 60),
        "tokens_per_s": (printed.tokens_per_s, found["tokens_per_s"]),
    }
    if printed.exposed_min is not None:
        metrics["exposed_min"] = (printed.exposed_min, found["exposed_s"] / 60)
    for metric, (paper, predicted) in metrics.items():
        yield {
            "policy": policy, "S": staleness, "gpus": gpus, "trainer": num_train, "metric": metric,
            "paper": paper, "predicted": predicted, "error": predicted / paper - 1,
        }  # fmt: skip


def ratio(policy: str, gpus: int, metric: str, paper: float, predicted: float, staleness: int = 2) -> Row:
    return {
        "policy": policy, "S": staleness, "gpus": gpus, "trainer": "", "metric": metric,
        "paper": paper, "predicted": predicted, "error": predicted / paper - 1,
    }  # fmt: skip


def parts(play: Play, job: Job, num_train: int) -> Iterator[Row]:
    """Speed against S, and DORA without its parts, on a quarter of 128 GPUs."""

    def found(staleness: int, *without: str) -> Figures:
        layout = fit.layout_of("dora", staleness, 128, num_train // 16 * 16)
        setup = Setup(job, replace(layout, without=without), 2 * staleness + 10)
        return fit.in_part(play, setup, QUARTER)

    for staleness in (0, 1, 2, 3, 4, 6, 8):
        yield sweep("speed against S", f"S = {staleness}", found(staleness))
    whole = found(2)
    yield sweep("parts, S = 2", "all", whole)
    for without in LEFT_OUT:
        yield sweep("parts, S = 2", f"without {', '.join(without)}", found(2, *without))
    reached = found(2, "kv")["answer_s"] / whole["answer_s"]
    yield ratio("dora", 128, "an answer without KV reuse, over with", KV_REUSE, reached)


def sweep(table: str, name: str, found: Figures) -> Row:
    kept = (
        "step_s",
        "tokens_per_s",
        "exposed",
        "busy_rows",
        "staleness",
        "moves",
        "answer_s",
        "load_share",
        "copy_share",
    )
    return {"table": table, "case": name, **{key: found[key] for key in kept}}


def asyncflow(play: Play) -> Iterator[Row]:
    """Nothing is fitted: efficiency as by default, 8K answers with a mean of 2K, 256 x 8 a step."""
    device = DEVICES["910B"]
    lengths = Lengths(8192, 2000.0, tail=0.9, prompt=100, alike=0.3)
    for (model, gpus), printed in ASYNCFLOW.items():
        job = Job(SHAPES[model], lengths, 256, 8, Efficiency())
        tensor = 2 if model == "qwen2.5-7b" else 8
        base = Layout("sync", 0, (device, gpus), tensor=tensor)
        half = replace(base, train=(device, gpus // 2), rollout=((device, gpus // 2),))
        baseline = play(Setup(job, base, 5))["tokens_per_s"]
        flow = replace(half, policy="asyncflow", max_staleness=1)
        one = play(Setup(job, flow, 8))["tokens_per_s"]
        yield ratio("asyncflow", gpus, f"{model}: over sync, colocated", printed, one / baseline, 1)
        if (model, gpus) == ("qwen2.5-7b", 512):
            plain = play(Setup(job, replace(half, policy="sync_split"), 5))["tokens_per_s"]
            streamed = replace(half, policy="sync_split", is_streamed=True)
            reached = {
                "sync_split, streamed": play(Setup(job, streamed, 5))["tokens_per_s"],
                "asyncflow": one,
            }
            for name, value in reached.items():
                metric = f"{model}: {name} over sync_split"
                yield ratio("asyncflow", gpus, metric, ASYNCFLOW_PARTS[name], value / plain, 1)


MOE_DEVICE = replace(DEVICES["910B"], name="60 GB", memory_bytes=60e9 / 0.9)
MOE_LIMIT = 65_536


def moe(play: Play) -> Iterator[Row]:
    """LongCat-Flash on 4,096 accelerators of 60 GB, engines of 128 ranks: rollout, DORA's over sync's."""
    job = Job(SHAPES["longcat-flash"], Lengths(MOE_LIMIT, 8000.0, tail=1.0, prompt=500, alike=0.3), 256, 16)
    found = gain(play, job, 4096, 128, 2)
    yield ratio("dora", 4096, "rollout, times a synchronous one's", MOE_ROLLOUT, found["rollout"])


def gain(
    play: Play, job: Job, num_devices: int, expert: int, staleness: int, device: Device = MOE_DEVICE
) -> Figures:
    """A synchronous run's exposed rollout and steps over those of DORA, on two halves of the devices."""
    half = num_devices // 2
    base = Layout("sync_split", 0, (device, half), ((device, half),), expert=expert)
    sync = play(Setup(job, base, 5))
    dora = play(Setup(job, replace(base, policy="dora", max_staleness=staleness), 2 * staleness + 6))
    return {
        "rollout": (sync["step_s"] - sync["train_s"]) / max(dora["step_s"] - dora["train_s"], 1e-9),
        "step": sync["step_s"] / dora["step_s"],
        "rows busy, sync": sync["busy_rows"],
        "rows busy, dora": dora["busy_rows"],
        "stalled, sync": sync["stalled"],
        "stalled, dora": dora["stalled"],
    }


def tails(play: Play) -> Iterator[Row]:
    """What the paper names as future work: heavier tails under wider expert parallelism."""
    for alpha in (1.1, 1.5, 3.0):
        for expert in (16, 128):
            lengths = Lengths(MOE_LIMIT, 6000.0, "pareto", alpha, prompt=500, alike=0.3)
            device = replace(MOE_DEVICE, memory_bytes=140e9)  # so that few ranks have room for the weights
            found = gain(play, Job(SHAPES["longcat-flash"], lengths, 32, 16), 512, expert, 2, device)
            yield {"table": "tail x experts", "alpha": alpha, "expert": expert, **found}


def fleets(play: Play, job: Job) -> Iterator[Row]:
    """The same number of rollout devices, of one kind or of two."""
    h800, h200, a100 = (DEVICES[name] for name in ("H800", "H200", "A100"))
    mixes = {
        "48 H800": ((h800, 48),),
        "32 H800 + 16 H200": ((h800, 32), (h200, 16)),
        "32 H800 + 16 A100": ((h800, 32), (a100, 16)),
        "16 H800 + 32 A100": ((h800, 16), (a100, 32)),
    }
    for name, rollout in mixes.items():
        layout = replace(fit.layout_of("dora", 2, 128, 80), rollout=rollout)
        yield sweep("fleets, S = 2", name, fit.in_part(play, Setup(job, layout, 14), QUARTER))


STAGES: dict[str, Callable[[Play, Job, list[Row]], Iterator[Row]]] = {
    "fitted": lambda play, job, _: known(play, job),
    "splits": lambda play, job, _: apart(play, job),
    "parts": lambda play, job, found: parts(play, job, best_split(found)),
    "fleets": lambda play, job, _: fleets(play, job),
    "asyncflow": lambda play, *_: asyncflow(play),
    "moe": lambda play, *_: moe(play),
    "tails": lambda play, *_: tails(play),
}
PREDICTED = ("splits", "asyncflow", "moe")


def everything(play: Play, again: Collection[str] = STAGES, before: Sequence[Row] = ()) -> list[Row]:
    """All stages, each row with its `kind`; those not to be played `again` are taken from `before`."""
    old = [row for row in before if row["kind"] == "inputs"]
    job, inputs = (job_of(old), old) if old else fitted(play)
    rows: list[Row] = [{**row, "kind": "inputs"} for row in inputs]
    for kind, stage in STAGES.items():
        if kind in again:
            rows += [{**row, "kind": kind} for row in stage(play, job, rows)]
        else:
            rows += [row for row in before if row["kind"] == kind]
    return rows


def best_split(rows: list[Row]) -> int:
    """The trainer's GPUs of 128, at S = 2."""
    mine = [r for r in rows if (r.get("policy"), r.get("S"), r.get("gpus")) == ("dora", 2, 128)]
    return int(mine[0]["trainer"])


def main(path: Path | None) -> int:
    """Print every table, and write them as JSON."""
    waiting = Console(stderr=True)
    with waiting.status("") as status:

        @cache
        def play(setup: Setup) -> Figures:
            layout = setup.layout
            status.update(f"{layout.policy}, S = {layout.max_staleness}, {layout.num_devices} devices")
            return setup.figures()

        found = everything(play)
    for columns in dict.fromkeys(tuple(one) for one in found):
        show([one for one in found if tuple(one) == columns])
    if path is not None:
        told = {"inputs": ("inputs",), "fitted": ("fitted",), "predicted": PREDICTED}
        sorted_out = {name: [one for one in found if one["kind"] in kinds] for name, kinds in told.items()}
        taken = {kind for kinds in told.values() for kind in kinds}
        sorted_out["open"] = [one for one in found if one["kind"] not in taken]
        path.write_text(json.dumps(sorted_out, indent=2) + "\n", encoding="utf-8")
    return 0
