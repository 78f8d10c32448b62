"""`dora simulate`: the production orchestrator in virtual time, on random worlds or on described hardware.

`dora.cli` has the group among its own.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dora.cli_reading import RunFolder
from dora.errors import InputError

if TYPE_CHECKING:
    from dora.sim.forecast.lengths import Lengths

simulate = typer.Typer(help="Run the production orchestrator in virtual time.", no_args_is_help=True)

JOB, LENGTHS, LAYOUT, OUTPUT = "Job", "Answers", "Layout", "Output"  # panels of the help
Json = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Write the figures as JSON.", rich_help_panel=OUTPUT),
]
Model = Annotated[str, typer.Option(help="A preset's name; a wrong one prints all.", rich_help_panel=JOB)]
Batch = Annotated[int, typer.Option(help="Groups of a training step.", rich_help_panel=JOB)]
Group = Annotated[int, typer.Option(help="Answers of a group.", rich_help_panel=JOB)]
Context = Annotated[int, typer.Option(help="Longest context of the model (tokens).", rich_help_panel=JOB)]
Reward = Annotated[float, typer.Option(min=0, help="Seconds to score a group.", rich_help_panel=JOB)]
Skew = Annotated[
    float,
    typer.Option(min=0, help="By which the most wanted rank of experts is wanted more.", rich_help_panel=JOB),
]
Mean = Annotated[
    float | None, typer.Option(help="Mean answer (tokens).", show_default="2300", rich_help_panel=LENGTHS)
]
Limit = Annotated[int, typer.Option(help="Longest answer (tokens).", rich_help_panel=LENGTHS)]
Tail = Annotated[
    float | None,
    typer.Option(
        help="Sigma of a lognormal, or alpha of a Pareto.", show_default="1.2", rich_help_panel=LENGTHS
    ),
]
Family = Annotated[
    str | None,
    typer.Option(help="lognormal or pareto.", show_default="lognormal", rich_help_panel=LENGTHS),
]
Trace = Annotated[
    Path | None,
    typer.Option(
        metavar="CSV|RUN", help="Lengths of a CSV's --column, or of a run's answers.", rich_help_panel=LENGTHS
    ),
]
Column = Annotated[
    str | None,
    typer.Option(help="Of the CSV.", show_default="GeneratedTokens", rich_help_panel=LENGTHS),
]
Alike = Annotated[
    float, typer.Option(help="Correlation of a group's answers, 0 to 1.", rich_help_panel=LENGTHS)
]
Drift = Annotated[
    float, typer.Option(help="Growth of answers in each step, 0.01 for 1 %.", rich_help_panel=LENGTHS)
]
Prompt = Annotated[int, typer.Option(help="Tokens of a prompt.", rich_help_panel=LENGTHS)]
Turns = Annotated[int, typer.Option(help="Of an episode, equally long.", rich_help_panel=LENGTHS)]
Delay = Annotated[
    float, typer.Option(help="Seconds of the environment after each turn.", rich_help_panel=LENGTHS)
]
DeviceName = Annotated[
    str, typer.Option("--device", help="H800, H100, H200, A100, 910B or CPU.", rich_help_panel=LAYOUT)
]
Devices = Annotated[
    int, typer.Option(min=1, help="How many, for training and rollout.", rich_help_panel=LAYOUT)
]
Policies = Annotated[str, typer.Option(help="Names, separated by commas.", rich_help_panel=LAYOUT)]
Steps = Annotated[int, typer.Option(min=1, help="Training steps to simulate.", rich_help_panel=OUTPUT)]
Tensor = Annotated[
    int, typer.Option(help="Devices that an engine's attention is split over.", rich_help_panel=LAYOUT)
]
Rows = Annotated[
    int | None, typer.Option(min=1, help="Of an engine.", show_default="by its KV", rich_help_panel=LAYOUT)
]
Bounds = Annotated[
    str, typer.Option("--staleness", "-S", help="Bounds, separated by commas.", rich_help_panel=LAYOUT)
]
Trainer = Annotated[
    int | None, typer.Option(min=1, help="How many train.", show_default="half", rich_help_panel=LAYOUT)
]
Fleet = Annotated[
    str,
    typer.Option(metavar="FLEET", help="Other devices for rollout: H800:16,A100:32.", rich_help_panel=LAYOUT),
]
Expert = Annotated[
    int, typer.Option(help="Ranks of an engine that share its experts.", rich_help_panel=LAYOUT)
]
Slack = Annotated[
    int, typer.Option(min=0, help="Groups kept below the bound by admission.", rich_help_panel=LAYOUT)
]
Elastic = Annotated[
    bool, typer.Option(help="The trainer's devices decode while it waits.", rich_help_panel=LAYOUT)
]
Without = Annotated[str, typer.Option(help="Parts of dora to leave out, by commas.", rich_help_panel=LAYOUT)]
TimelineFile = Annotated[
    Path | None,
    typer.Option(metavar="SVG", help="Draw the last row's engines.", rich_help_panel=OUTPUT),
]
PlotFile = Annotated[
    Path | None, typer.Option(metavar="SVG", help="Draw tokens/s against S.", rich_help_panel=OUTPUT)
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
    batch: Batch = 128,
    group: Group = 16,
    context: Context = 32768,
    reward: Reward = 0.0,
    skew: Skew = 0.1,
    mean: Mean = None,
    limit: Limit = 30720,
    tail: Tail = None,
    family: Family = None,
    trace: Trace = None,
    column: Column = None,
    alike: Alike = 0.0,
    drift: Drift = 0.0,
    prompt: Prompt = 110,
    turns: Turns = 1,
    delay: Delay = 0.0,
    policies: Policies = "sync,one_step,partial,dora",
    staleness: Bounds = "1,2",
    device: DeviceName = "H800",
    devices: Devices = 64,
    trainer: Trainer = None,
    rollout: Fleet = "",
    tensor: Tensor = 4,
    expert: Expert = 1,
    rows: Rows = None,
    slack: Slack = 0,
    elastic: Elastic = False,
    without: Without = "",
    steps: Steps = 12,
    timeline: TimelineFile = None,
    plot: PlotFile = None,
    json: Json = None,
) -> None:
    """Forecast policies side by side, on hardware that is described by its data sheet."""
    from dora.sim.forecast.cluster import Job, Layout
    from dora.sim.forecast.compare import Pictures, compare, layouts
    from dora.sim.forecast.hardware import device_of, fleet_of
    from dora.sim.forecast.shapes import shape_of

    lengths = lengths_of(
        limit, mean, family, tail, trace, column,
        prompt=prompt, alike=alike, drift=drift, turns=turns, delay_s=delay,
    )  # fmt: skip
    job = Job(shape_of(model), lengths, batch, group, context=context, reward_s=reward, expert_skew=skew)
    num_train = trainer if trainer is not None else (devices + 1) // 2
    train = (device_of(device), num_train)
    base = Layout(
        "dora", 0, train, fleet_of(rollout), tensor, expert, rows,
        slack=slack, without=tuple(names(without)), is_elastic=elastic,
    )  # fmt: skip
    found = [*layouts(names(policies), numbers(staleness), train, devices - num_train, base)]
    raise typer.Exit(compare(job, found, steps, json, Pictures(timeline, plot)))


@simulate.command()
def paper(json: Json = None) -> None:
    """Forecast the tables of DORA's and AsyncFlow's papers, beside what these print: some minutes."""
    from dora.sim.forecast import paper

    raise typer.Exit(paper.main(json))


@simulate.command()
def calibrate(
    run: RunFolder,
    others: Annotated[
        list[Path] | None, typer.Option("--check", metavar="RUN", help="Forecast this run, too; repeatable.")
    ] = None,
    json: Json = None,
) -> None:
    """Measure a real run's costs, and print how far forecasts made of them are from it, and from others."""
    from dora.observe.journal import read_journal
    from dora.sim.forecast import checking
    from dora.sim.forecast.calibration import read

    runs = {}
    for path in (run, *(others or [])):
        journal = read_journal(path)
        runs[path.as_posix()] = read(journal.limits, ((line.t_s, line.record) for line in journal.lines))
    raise typer.Exit(checking.main(runs, json))


@simulate.command("timeline")
def draw_timeline(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="SVG", help="File to write.")],
) -> None:
    """Draw a real run's engines over time, as `dora simulate run --timeline` draws a simulated one's."""
    from dora.observe.journal import read_journal
    from dora.sim.forecast.compare import check_files
    from dora.sim.forecast.pictures import Timeline, timeline_svg

    check_files(out)
    drawn = Timeline()
    for line in read_journal(run).lines:
        drawn.hear(line.t_s, line.record)
    out.write_text(timeline_svg(drawn, f"{run.resolve().name}: rows by version"), encoding="utf-8")


@simulate.command()
def speed(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs that have ended.")],
    out: Annotated[Path, typer.Option(metavar="SVG", help="File to write.")] = Path("speed.svg"),
) -> None:
    """Draw real runs' trained tokens a second against S, a line for each policy."""
    from dora.observe.report.reading import speed_of
    from dora.sim.forecast.compare import check_files
    from dora.sim.forecast.pictures import speed_svg

    check_files(out)
    out.write_text(speed_svg(speed_of(run) for run in runs), encoding="utf-8")


def plan(
    model: Model = "qwen2.5-32b",
    batch: Batch = 64,
    group: Group = 16,
    context: Context = 32768,
    reward: Reward = 0.0,
    skew: Skew = 0.1,
    mean: Mean = None,
    limit: Limit = 30720,
    tail: Tail = None,
    family: Family = None,
    trace: Trace = None,
    column: Column = None,
    alike: Alike = 0.0,
    drift: Drift = 0.0,
    prompt: Prompt = 110,
    turns: Turns = 1,
    delay: Delay = 0.0,
    policies: Policies = "sync,one_step,dora",
    staleness: Annotated[
        int, typer.Option("--staleness", "-S", help="Largest bound.", rich_help_panel=LAYOUT)
    ] = 2,
    device: DeviceName = "H800",
    devices: Devices = 64,
    expert: Annotated[
        int | None,
        typer.Option(
            min=1, help="Ranks that share the experts.", show_default="searched", rich_help_panel=LAYOUT
        ),
    ] = None,
    played: Annotated[
        int, typer.Option(min=1, help="Layouts that are played at most.", rich_help_panel=OUTPUT)
    ] = 24,
    shown: Annotated[
        int, typer.Option(min=1, help="Plans that are printed, the best.", rich_help_panel=OUTPUT)
    ] = 8,
    json: Json = None,
) -> None:
    """Search for the policy, split, sizes, rows and bound with most trained tokens a second."""
    from dora.sim.forecast import plan
    from dora.sim.forecast.cluster import Job
    from dora.sim.forecast.hardware import device_of
    from dora.sim.forecast.search import Question
    from dora.sim.forecast.shapes import shape_of

    lengths = lengths_of(
        limit, mean, family, tail, trace, column,
        prompt=prompt, alike=alike, drift=drift, turns=turns, delay_s=delay,
    )  # fmt: skip
    job = Job(shape_of(model), lengths, batch, group, context=context, reward_s=reward, expert_skew=skew)
    asked = Question(job, device_of(device), devices, staleness, tuple(names(policies)), expert)
    raise typer.Exit(plan.main(asked, played, shown, json))


def lengths_of(
    limit: int,
    mean: float | None,
    family: str | None,
    tail: float | None,
    trace: Path | None,
    column: str | None,
    **others: Any,
) -> Lengths:
    """Raises InputError where they do not fit together."""
    from dora.sim.forecast.lengths import Lengths, read_trace

    if trace is None:
        if column is not None:
            raise InputError(f"--column {column} is of a --trace, and none is given")
        mean, tail = 2300.0 if mean is None else mean, 1.2 if tail is None else tail
        return Lengths(limit, mean, family or "lognormal", tail, **others)
    given = {"--mean": mean, "--tail": tail, "--family": family}
    if clash := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{', '.join(clash)} would say what --trace {trace} says already; leave one out")
    answers = answers_of(trace) if trace.is_dir() else read_trace(trace, column or "GeneratedTokens")
    return Lengths(limit, family="trace", trace=answers, **others)


def answers_of(run: Path) -> tuple[int, ...]:
    """Tokens of the answers that a run has finished."""
    from dora.core.events import RequestFinished
    from dora.observe.journal import read_journal

    records = (line.record for line in read_journal(run).lines)
    return tuple(
        record.num_tokens
        for record in records
        if isinstance(record, RequestFinished) and not record.request.is_held_out
    )


def names(text: str) -> list[str]:
    """Words, separated by commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def numbers(text: str) -> list[int]:
    """Whole numbers, separated by commas. Raises BadParameter."""
    try:
        return [int(word) for word in names(text)]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers, such as 1,2,4") from error
