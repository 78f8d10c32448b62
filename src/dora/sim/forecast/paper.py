"""The tables of DORA's and AsyncFlow's papers, forecast by the production orchestrator.

What the paper leaves out is fitted on its synchronous and partial rows (`fit`); the others are predictions,
for which the split of devices is the best one found. What it leaves open is in `studies`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from functools import cache, partial
from pathlib import Path

from rich.console import Console

from dora.errors import InputError
from dora.sim.forecast import fit, studies
from dora.sim.forecast.cluster import Job, Layout, Setup
from dora.sim.forecast.compare import Row, check_files, show
from dora.sim.forecast.fit import SIZES, Figures, Fitted, Play
from dora.sim.forecast.hardware import DEVICES, Efficiency
from dora.sim.forecast.lengths import Lengths
from dora.sim.forecast.published import (
    ASYNCFLOW,
    ASYNCFLOW_LINEAR,
    ASYNCFLOW_MEAN,
    ASYNCFLOW_PARTS,
    FITTED_ON,
    KV_REUSE,
    MOE,
    OVERHEADS,
    Range,
    row,
)  # fmt: skip
from dora.sim.forecast.shapes import SHAPES

BOUNDS = (2, 3)  # the paper's k = 3 is S = 2 where k counts living versions, S = 3 where it counts steps
NAMES = {
    "train": "trainer MFU",
    "train_s": "fixed s of a training step",
    "step_s": "s of a decode step beside the roofline",
    "partial_bound": "S of partial rollout",
    "alike": "correlation of siblings' lengths",
}


def inputs(found: Fitted) -> Iterator[Row]:
    """What was fitted, and what is assumed."""
    values = asdict(found)
    yield from (Row(what=what, value=values[name]) for name, what in NAMES.items())
    yield from (Row(what=f"assumed: {name}", value=value) for name, value in fit.ASSUMED.items())


def known(play: Play, found: Fitted) -> Iterator[Row]:
    """The rows that were fitted on."""
    for policy in FITTED_ON:
        for gpus in SIZES:
            staleness = int(found.partial_bound) if policy == "partial" else 0
            yield from compared(policy, gpus, staleness, gpus, fit.colocated(play, found, policy, gpus))


def apart(play: Play, found: Fitted, policy: str, staleness: int) -> Iterator[Row]:
    """Rows that are predictions, and how much the split matters: four GPUs more or fewer."""
    for gpus in SIZES:
        best, tried = fit.split(play, found.job, policy, staleness, gpus)
        yield from compared(policy, gpus, staleness, best, tried[best])
        near = [tried[n]["step_s"] / 60 for n in (best - 4, best + 4) if n in tried]
        yield {
            "table": "4 GPUs moved", "policy": policy, "S": staleness, "gpus": gpus, "trainer": best,
            "step_min": tried[best]["step_s"] / 60, "worst_step_min": max(near, default=0.0),
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
        metrics["exposed_share"] = (printed.exposed_min / printed.step_min, found["exposed"])
    if policy == "dora":
        for name, share in OVERHEADS[gpus].items():
            metrics[name] = (share, found[name])
    for metric, (paper, predicted) in metrics.items():
        yield beside(policy, gpus, metric, paper, predicted, staleness, num_train)


def beside(
    policy: str,
    gpus: int,
    metric: str,
    paper: float | Range,
    predicted: float,
    staleness: int = 2,
    num_train: int | str = "",
) -> Row:
    """A figure beside the paper's. Within a range that is printed, there is no error."""
    low, high = (paper, paper) if isinstance(paper, float | int) else paper
    nearest = min(max(predicted, low), high)
    return {
        "policy": policy, "S": staleness, "gpus": gpus, "trainer": num_train, "metric": metric,
        "paper": low if low == high else f"{low:g} to {high:g}", "predicted": predicted,
        "error": predicted / nearest - 1,
    }  # fmt: skip


def ratios(before: Sequence[Row]) -> Iterator[Row]:
    """How many times as fast DORA is as the others, and 128 GPUs as 64; by the rows above."""
    values = {
        (str(r["policy"]), r["gpus"], r["metric"]): (float(r["paper"]), float(r["predicted"]), int(r["S"]))
        for r in before
        if r["kind"] in ("fitted", "splits") and "paper" in r and (r["policy"], r["S"]) != ("dora", 3)
    }

    def times(policy: str, gpus: int, metric: str, name: str, over: tuple[str, int]) -> Row:
        (paper, mine, staleness), (paper_base, base, _) = values[policy, gpus, metric], values[*over, metric]
        is_time = metric == "step_min"
        found = (paper_base / paper, base / mine) if is_time else (paper / paper_base, mine / base)
        return beside(policy, gpus, f"{'step' if is_time else 'tokens/s'}, {name}", *found, staleness)

    for metric in ("step_min", "tokens_per_s"):
        for gpus in SIZES:
            for policy in ("sync", "one_step", "partial"):
                yield times("dora", gpus, metric, f"times {policy}'s", (policy, gpus))
        for policy in ("sync", "partial", "dora"):
            yield times(policy, 128, metric, "times that of 64 GPUs", (policy, 64))


def reuse(before: Sequence[Row]) -> Iterator[Row]:
    """What KV reuse is worth to an answer, by the parts above."""
    took = {str(r["case"]): float(r["answer_s"]) for r in before if r.get("table") == "parts, S = 2"}
    yield beside(
        "dora", 128, "an answer without KV reuse, over with", KV_REUSE, took["without kv"] / took["all"]
    )


# Answers, prompts x answers a step: neither is printed. One guess is of long thinking, one of short answers.
GUESSES = {
    "long": (Lengths(8192, 2000.0, tail=0.9, prompt=100, alike=0.3), 256, 8),
    "short": (Lengths(4096, 800.0, tail=0.6, prompt=100, alike=0.3), 1024, 8),
}
RESHARD_S = 5.0  # by which a colocated baseline goes over from training to decoding, or back
SHARES = (1 / 4, 1 / 2, 3 / 4)  # of the devices, for the trainer: AsyncFlow plans its resources


def asyncflow(play: Play) -> Iterator[Row]:
    """Nothing is fitted: efficiency is as by default, and there are two guesses of what is not printed."""
    for guess in GUESSES:
        sizes = {*ASYNCFLOW, *((model, num) for model in ASYNCFLOW_LINEAR for num in (32, 512))}
        found = {key: _over_colocated(play, guess, *key) for key in sorted(sizes)}
        for (model, gpus), printed in ASYNCFLOW.items():
            metric = f"{model}, {guess}: over colocated"
            yield beside("asyncflow", gpus, metric, printed, found[model, gpus][0], 1)
        mean = sum(gained for gained, _ in found.values()) / len(found)
        yield beside("asyncflow", 512, f"{guess}: over colocated, mean", ASYNCFLOW_MEAN, mean, 1)
        for model, linear in ASYNCFLOW_LINEAR.items():
            grown = found[model, 512][1] / found[model, 32][1] / 16
            yield beside("asyncflow", 512, f"{model}, {guess}: linearity from 32", linear, grown, 1)
        yield from _parts_of_asyncflow(play, guess)


def _npus(guess: str, model: str, gpus: int) -> tuple[Job, Layout]:
    lengths, prompts, answers = GUESSES[guess]
    job = Job(SHAPES[model], lengths, prompts, answers, Efficiency())
    tensor = 2 if model == "qwen2.5-7b" else 8
    return job, Layout("sync", 0, (DEVICES["910B"], gpus), tensor=tensor, switch_s=RESHARD_S)


def _speed(play: Play, job: Job, layout: Layout) -> float:
    by, num_steps = 4 if layout.num_devices >= 256 else 1, fit.num_steps(layout.max_staleness, fit.LOOK)
    return fit.in_part(play, Setup(job, layout, num_steps), by)["tokens_per_s"]


def _over_colocated(play: Play, guess: str, model: str, gpus: int) -> tuple[float, float]:
    """AsyncFlow's speed over the baseline's, and in tokens a second; its best split."""
    job, base = _npus(guess, model, gpus)
    baseline, speeds = _speed(play, job, base), []
    for num_train in (round(share * gpus) for share in SHARES):
        try:
            speeds.append(_speed(play, job, _split(base, "asyncflow", num_train)))
        except InputError:  # the model does not fit
            continue
    return max(speeds) / baseline, max(speeds)


def _split(base: Layout, policy: str, num_train: int) -> Layout:
    device, num = base.train
    apart = {"train": (device, num_train), "rollout": ((device, num - num_train),)}
    return replace(base, policy=policy, max_staleness=int(policy == "asyncflow"), switch_s=0.0, **apart)  # type: ignore[arg-type]


def _parts_of_asyncflow(play: Play, guess: str) -> Iterator[Row]:
    """With devices in halves: tasks one after the other, streamed, and with a step's delay."""
    model, gpus = "qwen2.5-7b", 512
    job, base = _npus(guess, model, gpus)
    plain = _split(base, "sync_split", gpus // 2)
    speed = _speed(play, job, plain)
    layouts = {"streamed": replace(plain, is_streamed=True), "deferred": _split(base, "asyncflow", gpus // 2)}
    for name, layout in layouts.items():
        gained = _speed(play, job, layout) / speed
        metric = f"{model}, {guess}: {name}, over one after the other"
        yield beside("asyncflow", gpus, metric, ASYNCFLOW_PARTS[name], gained, 1)


def moe(play: Play) -> Iterator[Row]:
    """LongCat-Flash on 4,096 accelerators of 60 GB, engines of 128 ranks, from a quarter of it."""
    single = Lengths(studies.MOE_LIMIT, 8000.0, tail=1.0, prompt=500, alike=0.3)
    jobs = {"reasoning": single, "agents": replace(single, turns=16, delay_s=20.0)}
    for name, lengths in jobs.items():
        job = Job(SHAPES["longcat-flash"], lengths, 256, 16)
        found = studies.gain(play, job, 4096, 128, 2, by=4)
        yield beside("dora", 4096, f"rollout, times sync's: {name}", MOE[name], found["rollout"])
        yield beside("dora", 4096, f"step, times sync's: {name}", MOE["step"], found["step"])


STAGES: dict[str, Callable[[Play, Fitted], Iterator[Row]]] = {  # none needs the rows of another
    "fitted": known,
    "splits, one_step": lambda play, found: apart(play, found, "one_step", 1),
    **{f"splits, dora {s}": partial(apart, policy="dora", staleness=s) for s in BOUNDS},
    "parts": lambda play, found: studies.parts(play, found.job),
    "moe": lambda play, _: moe(play),
    "asyncflow": lambda play, _: asyncflow(play),
    "fleets": lambda play, found: studies.fleets(play, found.job),
    "tails": lambda play, _: studies.tails(play),
}
DERIVED: dict[str, Callable[[Sequence[Row]], Iterator[Row]]] = {"ratios": ratios, "reuse": reuse}


def played(play: Play, found: Fitted, stage: str) -> list[Row]:
    """One stage's rows, each with its `kind`."""
    return [{**row, "kind": stage.split(",")[0]} for row in STAGES[stage](play, found)]


def everything(play: Play, each: Callable[..., Iterable[list[Row]]] = map) -> list[Row]:
    """All rows. Stages are played by `each`, which may have several at a time."""
    found = fit.fitted(play)
    rows = [{**row, "kind": "inputs"} for row in inputs(found)]
    for stage in each(partial(played, play, found), STAGES):
        rows += stage
    return rows + [{**row, "kind": kind} for kind, derive in DERIVED.items() for row in derive(rows)]


def told(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Rows by what they are: inputs, what was fitted on, predictions, and what the paper leaves open."""
    found: dict[str, list[Row]] = {"inputs": [], "fitted": [], "predicted": [], "open": []}
    for one in rows:
        kind = one["kind"] if one["kind"] in found else "predicted" if "paper" in one else "open"
        if kind == "predicted" and one["policy"] in FITTED_ON and one["kind"] == "ratios":
            kind = "fitted"  # both ends of it were
        found[str(kind)].append(one)
    return found


def main(path: Path | None) -> int:
    """Print every table, and write them as JSON."""
    check_files(path)
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
        path.write_text(json.dumps(told(found), indent=2) + "\n", encoding="utf-8")
    return 0
