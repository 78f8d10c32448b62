"""`dora simulate`: the production orchestrator in virtual time, on random worlds or on described hardware.

`dora.cli` has the group among its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dora.cli_reading import RunFolder

if TYPE_CHECKING:
    from dora.sim.forecast.lengths import Lengths
    from dora.sim.forecast.recorded import Recorded

simulate = typer.Typer(help="Run the production orchestrator in virtual time.", no_args_is_help=True)

Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")]
Model = Annotated[str, typer.Option(help="A preset's name; a wrong one prints them all.")]
DeviceName = Annotated[str, typer.Option("--device", help="H800, H100, H200, A100, 910B or CPU.")]
Batch = Annotated[int, typer.Option(help="Groups of a training step.")]
Group = Annotated[int, typer.Option(help="Answers of a group.")]
Mean = Annotated[float, typer.Option(help="Mean answer (tokens).")]
Limit = Annotated[int, typer.Option(help="Longest answer (tokens).")]
Tail = Annotated[float, typer.Option(help="Sigma of a lognormal, or alpha of a Pareto.")]
Family = Annotated[str, typer.Option(help="Of the lengths: lognormal, pareto or trace.")]
Trace = Annotated[Path | None, typer.Option(metavar="CSV", help="Lengths, in its column GeneratedTokens.")]
Prompt = Annotated[int, typer.Option(help="Tokens of a prompt.")]
Steps = Annotated[int, typer.Option(min=1, help="Training steps to simulate.")]
Tensor = Annotated[int, typer.Option(help="Devices that an engine's attention is split over.")]
Expert = Annotated[int, typer.Option(help="Ranks of an engine that share its experts.")]
Check = Annotated[
    list[Path] | None, typer.Option("--check", metavar="RUN", help="Forecast this run, too; repeatable.")
]


@simulate.callback()
def _simulate() -> None:
    """Each command is one of its own: typer would fold a single one into its parent."""


@simulate.command()
def swarm(
    seeds: Annotated[int, typer.Option(min=1, help="How many random worlds.")] = 200,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as one last line of JSON.")
    ] = False,
) -> None:
    """Run many random worlds with faults; every fact and order is checked against an independent ledger."""
    from dora.sim import swarm

    raise typer.Exit(swarm.main(seeds, as_json))


@simulate.command()
def run(
    model: Model = "qwen2.5-32b",
    device: DeviceName = "H800",
    devices: Annotated[int, typer.Option(min=1, help="How many, for training and rollout.")] = 64,
    trainer: Annotated[int | None, typer.Option(help="How many of them train.", show_default="half")] = None,
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = "sync,one_step,partial,dora",
    staleness: Annotated[str, typer.Option("--staleness", "-S", help="Bounds, separated by commas.")] = "1,2",
    without: Annotated[str, typer.Option(help="Parts of DORA to leave out, by commas.")] = "",
    batch: Batch = 128,
    group: Group = 16,
    mean: Mean = 2300.0,
    limit: Limit = 30720,
    tail: Tail = 1.2,
    family: Family = "lognormal",
    trace: Trace = None,
    prompt: Prompt = 110,
    tensor: Tensor = 4,
    expert: Expert = 1,
    rows: Annotated[int | None, typer.Option(min=1, help="Of an engine.", show_default="by its KV")] = None,
    slack: Annotated[int, typer.Option(min=0, help="Groups by which admission stays below the bound.")] = 0,
    elastic: Annotated[bool, typer.Option(help="The trainer's devices decode while it waits.")] = False,
    steps: Steps = 12,
    timeline: Annotated[Path | None, typer.Option(metavar="SVG", help="Draw the last row's engines.")] = None,
    plot: Annotated[Path | None, typer.Option(metavar="SVG", help="Draw tokens/s against S.")] = None,
    json: Json = None,
) -> None:
    """Forecast policies side by side, on hardware that is described by its data sheet."""
    from dora.sim.forecast.cluster import Job, Layout
    from dora.sim.forecast.compare import Pictures, compare, layouts
    from dora.sim.forecast.hardware import device_of
    from dora.sim.forecast.shapes import shape_of

    lengths = lengths_of(family, mean, limit, tail, prompt, trace)
    job = Job(shape_of(model), lengths, batch, group)
    num_train = trainer if trainer is not None else devices // 2
    train = (device_of(device), num_train)
    base = Layout(
        "dora", 0, train, tensor=tensor, expert=expert, rows=rows, slack=slack,
        without=tuple(filter(None, without.split(","))), is_elastic=elastic,
    )  # fmt: skip
    found = [*layouts(policies.split(","), numbers(staleness), train, devices - num_train, base)]
    raise typer.Exit(compare(job, found, steps, json, Pictures(timeline, plot)))


@simulate.command()
def paper(json: Json = None) -> None:
    """Forecast the tables of DORA's and AsyncFlow's papers, beside what these print: some minutes."""
    from dora.sim.forecast import paper

    raise typer.Exit(paper.main(json))


@simulate.command()
def calibrate(
    run: RunFolder,
    more: Annotated[
        list[Path] | None, typer.Option("--with", metavar="RUN", help="Measure this run, too; repeatable.")
    ] = None,
    others: Check = None,
    json: Json = None,
) -> None:
    """Measure real runs' costs, and print how far forecasts made of them are from these, and from others."""
    from dora.sim.forecast import checking

    raise typer.Exit(checking.main(recorded([run, *(more or [])]), recorded(others or []), json))


def recorded(paths: Iterable[Path]) -> dict[str, Recorded]:
    """Runs as they can be forecast, by path. Raises InputError where there is none, or it cannot be read."""
    from dora.observe.journal import read_journal
    from dora.sim.forecast.recorded import read

    found = {}
    for path in paths:
        journal = read_journal(path)
        lines = ((line.t_s, line.record) for line in journal.lines)
        found[path.as_posix()] = read(journal.limits, lines, works(path), least_early(path))
    return found


def least_early(run: Path) -> int | None:
    """Tokens of an incomplete batch from which on the trainer worked on it; None: it waited.

    Raises InputError. What the configuration names by path need not be there any more.
    """
    import tomllib

    from dora.config import Config
    from dora.errors import InputError
    from dora.observe.nearby import CONFIG, why_no_run

    try:
        config = Config.model_validate(tomllib.loads((run / CONFIG).read_text(encoding="utf-8")))
    except OSError as error:
        raise InputError(why_no_run(run, CONFIG)) from error
    except ValueError as error:
        raise InputError(f"{run / CONFIG} is not what a run wrote: {error}") from error
    return config.trainer.micro_batch_tokens * config.trainer.num_ranks if config.streams else None


def works(run: Path) -> dict[int, float]:
    """Seconds that the trainer computed, by step, as far as the run's metrics say."""
    import json

    found = {}
    with contextlib.suppress(OSError, json.JSONDecodeError):  # a torn last line
        for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines():
            step = json.loads(line)
            found[int(step["step"])] = float(step.get("timing_s/update_actor", 0.0))
    return found


@simulate.command("timeline")
def draw_timeline(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="SVG", help="File to write.")],
) -> None:
    """Draw a real run's engines over time, as `dora simulate run --timeline` draws a simulated one's."""
    from dora.observe.journal import read_journal
    from dora.sim.forecast.pictures import Timeline, timeline_svg

    drawn = Timeline()
    for line in read_journal(run).lines:
        drawn.hear(line.t_s, line.record)
    out.write_text(timeline_svg(drawn, f"{run.resolve().name}: rows by version"), encoding="utf-8")


def plan(
    model: Model = "qwen2.5-32b",
    device: DeviceName = "H800",
    devices: Annotated[int, typer.Option(min=1, help="How many, for training and rollout.")] = 64,
    staleness: Annotated[int, typer.Option("--staleness", "-S", help="Largest bound.")] = 2,
    policies: Annotated[str, typer.Option(help="Names, separated by commas.")] = "sync,one_step,dora",
    batch: Batch = 64,
    group: Group = 16,
    mean: Mean = 2300.0,
    limit: Limit = 30720,
    tail: Tail = 1.2,
    family: Family = "lognormal",
    trace: Trace = None,
    prompt: Prompt = 110,
    expert: Expert = 1,
    context: Annotated[int, typer.Option(help="Longest context of the model (tokens).")] = 32768,
    played: Annotated[int, typer.Option(min=1, help="Layouts that are played, the best by a formula.")] = 8,
    run: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="A run to say how far the simulator is off, calibrated."),
    ] = None,
    check: Check = None,
    json: Json = None,
) -> None:
    """Search for the policy, split, parallel size and bound with most trained tokens a second."""
    from dora.sim.forecast import checking, plan
    from dora.sim.forecast.cluster import Job
    from dora.sim.forecast.hardware import device_of
    from dora.sim.forecast.shapes import shape_of

    lengths = lengths_of(family, mean, limit, tail, prompt, trace)
    job = Job(shape_of(model), lengths, batch, group, context=context)
    asked = plan.Question(job, device_of(device), devices, staleness, tuple(policies.split(",")), expert)
    if check and run is None:
        raise typer.BadParameter("--check forecasts with costs measured in another run: name it with --run")
    checked = checking.calibrated(recorded([run]), recorded(check or [])) if run is not None else []
    raise typer.Exit(plan.main(asked, played, json, checked))


def lengths_of(family: str, mean: float, limit: int, tail: float, prompt: int, trace: Path | None) -> Lengths:
    """Raises InputError where they do not fit together."""
    from dora.sim.forecast.lengths import Lengths, read_trace

    if trace is not None:
        return Lengths(limit, family="trace", prompt=prompt, trace=read_trace(trace))
    return Lengths(limit, mean, family, tail, prompt)


def numbers(text: str) -> list[int]:
    """Whole numbers, separated by commas. Raises BadParameter."""
    try:
        return [int(part) for part in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers, such as 1,2,4") from error
