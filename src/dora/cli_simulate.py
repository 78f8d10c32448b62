"""`dora simulate`: the production orchestrator in virtual time, on random worlds or on described hardware.

`dora.cli` has the group among its own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dora import cli_options as option
from dora.cli_reading import RunFolder
from dora.errors import InputError

if TYPE_CHECKING:
    from dora.sim.forecast.lengths import Lengths
    from dora.sim.forecast.recorded import Recorded

simulate = typer.Typer(help="Run the production orchestrator in virtual time.", no_args_is_help=True)


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
    model: option.Model = "qwen2.5-32b",
    batch: option.Batch = 128,
    group: option.Group = 16,
    context: option.Context = 32768,
    reward: option.Reward = 0.0,
    skew: option.Skew = 0.1,
    mean: option.Mean = None,
    limit: option.Limit = 30720,
    tail: option.Tail = None,
    family: option.Family = None,
    trace: option.Trace = None,
    column: option.Column = None,
    alike: option.Alike = 0.0,
    drift: option.Drift = 0.0,
    prompt: option.Prompt = 110,
    turns: option.Turns = 1,
    delay: option.Delay = 0.0,
    policies: option.Policies = "sync,one_step,partial,dora",
    staleness: option.Bounds = "1,2",
    device: option.DeviceName = "H800",
    devices: option.Devices = 64,
    trainer: option.Trainer = None,
    rollout: option.Fleet = "",
    tensor: option.Tensor = 4,
    expert: option.Expert = 1,
    rows: option.Rows = None,
    slack: option.Slack = 0,
    elastic: option.Elastic = False,
    without: option.Without = "",
    steps: option.Steps = 12,
    timeline: option.TimelineFile = None,
    plot: option.PlotFile = None,
    json: option.Json = None,
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
def paper(json: option.Json = None) -> None:
    """Forecast the tables of DORA's and AsyncFlow's papers, beside what these print: some minutes."""
    from dora.sim.forecast import paper

    raise typer.Exit(paper.main(json))


@simulate.command()
def calibrate(
    run: RunFolder,
    more: Annotated[
        list[Path] | None, typer.Option("--with", metavar="RUN", help="Measure this run, too; repeatable.")
    ] = None,
    others: option.Check = None,
    json: option.Json = None,
) -> None:
    """Measure real runs' costs, and print how far forecasts made of them are from these, and from others."""
    from dora.sim.forecast import checking

    raise typer.Exit(checking.main(recorded([run, *(more or [])]), recorded(others or []), json))


def recorded(paths: Iterable[Path]) -> dict[str, Recorded]:
    """Runs as they can be forecast, by path. Raises InputError where there is none, or it cannot be read."""
    from dora.core.events import Resumed
    from dora.observe.journal import read_journal
    from dora.sim.forecast.recorded import read

    found = {}
    for path in paths:
        journal = read_journal(path)
        if any(isinstance(line.record, Resumed) for line in journal.lines):
            raise InputError(
                f"{path} was killed and resumed, when engines and clocks began anew; forecasts are of "
                "runs that went on to the end"
            )
        lines = ((line.t_s, line.record) for line in journal.lines)
        found[path.as_posix()] = read(journal.limits, lines, works(path), least_early(path))
    return found


def least_early(run: Path) -> int | None:
    """Tokens of an incomplete batch from which on the trainer worked on it; None: it waited.

    Raises InputError. What the configuration names by path need not be there any more.
    """
    import tomllib

    from dora.config import Config
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
    from dora.sim.forecast.compare import check_pictures
    from dora.sim.forecast.pictures import Timeline, timeline_svg

    check_pictures(out)
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
    from dora.sim.forecast.compare import check_pictures
    from dora.sim.forecast.pictures import speed_svg

    check_pictures(out)
    out.write_text(speed_svg(speed_of(run) for run in runs), encoding="utf-8")


def plan(
    model: option.Model = "qwen2.5-32b",
    batch: option.Batch = 64,
    group: option.Group = 16,
    context: option.Context = 32768,
    reward: option.Reward = 0.0,
    skew: option.Skew = 0.1,
    mean: option.Mean = None,
    limit: option.Limit = 30720,
    tail: option.Tail = None,
    family: option.Family = None,
    trace: option.Trace = None,
    column: option.Column = None,
    alike: option.Alike = 0.0,
    drift: option.Drift = 0.0,
    prompt: option.Prompt = 110,
    turns: option.Turns = 1,
    delay: option.Delay = 0.0,
    policies: option.Policies = "sync,one_step,dora",
    staleness: option.Bound = 2,
    device: option.DeviceName = "H800",
    devices: option.Devices = 64,
    expert: option.Searched = None,
    played: option.Played = 24,
    shown: option.Shown = 8,
    run: option.Known = None,
    check: option.Check = None,
    json: option.Json = None,
) -> None:
    """Search for the policy, split, sizes, rows and bound with most trained tokens a second."""
    from dora.sim.forecast import checking, plan
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
    if check and run is None:
        raise typer.BadParameter("--check forecasts with costs measured in another run: name it with --run")
    checked = checking.calibrated(recorded([run]), recorded(check or [])) if run is not None else []
    raise typer.Exit(plan.main(asked, played, shown, json, checked))


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
    """Words, separated by commas, each once."""
    return list(dict.fromkeys(word.strip() for word in text.split(",") if word.strip()))


def numbers(text: str) -> list[int]:
    """Whole numbers, separated by commas. Raises BadParameter."""
    try:
        return [int(word) for word in names(text)]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} is no list of whole numbers, such as 1,2,4") from error
