"""What DORA's paper leaves open, or names as future work: what each part and a bound are worth, and tails.

Played on a quarter of the devices with a quarter of the batch: rows are to be compared with each other.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from dora.sim.forecast import fit
from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.compare import Row
from dora.sim.forecast.fit import BATCH, QUARTER, Figures, Play
from dora.sim.forecast.hardware import DEVICES, Device
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.shapes import SHAPES

BOUNDS = (0, 1, 2, 3, 4, 6, 8)
LEFT_OUT = (
    ("moves", "shares"), ("moves",), ("shares",), ("fill",), ("update",), ("pressure",), ("period",),
    ("remainders",), ("room",), ("kv",),
)  # fmt: skip
BEGUN = {"S + 1 batches": 0, "S + 1/2": BATCH // 2, "S": BATCH}  # groups at most -> fewer than that
NUM_TRAIN = 80  # of 128 GPUs
FEW = 128  # rows of an engine
SHOWN = (
    "step_s", "tokens_per_s", "exposed", "busy_rows", "staleness", "moves", "answer_s", "load_share",
    "copy_share",
)  # fmt: skip
MOE_DEVICE = replace(DEVICES["910B"], name="60 GB", memory_bytes=60e9 / 0.9)
ROOMY_DEVICE = replace(
    MOE_DEVICE, name="260 GB", memory_bytes=260e9 / 0.9
)  # so that 8 ranks hold the weights
MOE_LIMIT = 65_536
ALPHAS, EXPERTS = (1.1, 1.5, 3.0), (8, 16, 32, 64, 128)


def sweep(table: str, name: str, found: Figures) -> Row:
    return {"table": table, "case": name, **{key: found[key] for key in SHOWN}}


def parts(play: Play, job: Job) -> Iterator[Row]:
    """Speed against S, DORA without its parts, and with fewer requests begun; of 128 GPUs."""

    def found(staleness: int, *without: str, **changes: int) -> Figures:
        layout = fit.layout_of("dora", staleness, 128, NUM_TRAIN)
        setup = Setup(job, replace(layout, without=without, **changes), fit.num_steps(staleness, fit.REPORT))  # type: ignore[arg-type]
        return fit.in_part(play, setup, QUARTER)

    for staleness in BOUNDS:
        yield sweep("speed against S", f"S = {staleness}", found(staleness))
    yield sweep("parts, S = 2", "all", found(2))
    for without in LEFT_OUT:
        yield sweep("parts, S = 2", f"without {', '.join(without)}", found(2, *without))
    for name, slack in BEGUN.items():
        yield sweep("begun, S = 2", name, found(2, slack=slack))
    yield sweep("begun, S = 2", f"S + 1, {FEW} rows an engine", found(2, rows=FEW))


def gain(
    play: Play,
    job: Job,
    num_devices: int,
    expert: int,
    staleness: int,
    device: Device = MOE_DEVICE,
    by: int = 1,
) -> Figures:
    """A synchronous run's exposed rollout and steps over those of DORA, on two halves of the devices."""
    half = num_devices // 2
    base = Layout("sync_split", 0, (device, half), ((device, half),), expert=expert)
    sync = fit.in_part(play, Setup(job, base, fit.num_steps(0, fit.LOOK)), by)
    layout = replace(base, policy="dora", max_staleness=staleness)
    dora = fit.in_part(play, Setup(job, layout, fit.num_steps(staleness, fit.LOOK)), by)
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
    for alpha in ALPHAS:
        lengths = Lengths(MOE_LIMIT, 6000.0, "pareto", alpha, prompt=500, alike=0.3)
        job = Job(SHAPES["longcat-flash"], lengths, 32, 16)
        for expert in EXPERTS:
            found = gain(play, job, 512, expert, 2, ROOMY_DEVICE)
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
        layout = replace(fit.layout_of("dora", 2, 128, NUM_TRAIN), rollout=rollout)
        setup = Setup(job, layout, fit.num_steps(2, fit.REPORT))
        yield sweep("fleets, S = 2", name, fit.in_part(play, setup, QUARTER))
