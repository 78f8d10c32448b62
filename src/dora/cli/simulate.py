"""`dora simulate` and `dora plan`: the production orchestrator in virtual time, on random worlds or described
hardware.

The options that commands share come first, as types named after the parameter.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dora.cli.inspect import RunFolder
from dora.errors import InputError

if TYPE_CHECKING:
    from dora.planner.calibrate import RecordedRun
    from dora.planner.hardware import ModelShape
    from dora.planner.lengths import LengthDistribution

# One for each panel of the help.
_workload = partial(typer.Option, rich_help_panel="Workload")
_responses = partial(typer.Option, rich_help_panel="Responses")
_layout = partial(typer.Option, rich_help_panel="Layout")
_output = partial(typer.Option, rich_help_panel="Output")
PROMPT_LENGTH = 110  # tokens, without another source
CONTEXT = 32768  # tokens, without another source
FIXED_STATE = ("linear_attention", "mamba", "conv")  # layers of transformers without KV
WINDOWED = ("sliding_attention", "chunked_attention")

Model = Annotated[
    str,
    _workload(help="Folder with the model's config.json, or a preset; an unknown name lists the presets."),
]
BatchSize = Annotated[int, _workload(help="Groups per training step.")]
GroupSize = Annotated[int, _workload(help="Answers per group.")]
Context = Annotated[
    int | None,
    _workload(
        help="Maximum context of the model (tokens).",
        show_default="32768, or less if the model's config.json has less",
    ),
]
Reward = Annotated[float, _workload(min=0, help="Time to score a group (s).")]
ExpertSkew = Annotated[
    float,
    _workload(
        min=0, help="Relative excess load of the busiest expert-parallel rank, beyond random imbalance."
    ),
]
Mean = Annotated[float | None, _responses(help="Mean length of a response (tokens).", show_default="2300")]
Limit = Annotated[int, _responses(help="Maximum length of a response (tokens).")]
Family = Annotated[
    str | None, _responses(help="Distribution of the lengths: lognormal or pareto.", show_default="lognormal")
]
Tail = Annotated[
    float | None,
    _responses(
        help="Tail of the lengths: sigma of the lognormal, or alpha of the Pareto.", show_default="1.2"
    ),
]
Trace = Annotated[
    Path | None,
    _responses(
        metavar="CSV|RUN",
        help="Take lengths from the --column of a CSV file, or from the responses of a run.",
    ),
]
Column = Annotated[
    str | None, _responses(help="Column of the CSV file with the lengths.", show_default="GeneratedTokens")
]
Correlation = Annotated[float, _responses(help="Correlation of the lengths within a group, 0 to 1.")]
Growth = Annotated[float, _responses(help="Relative growth of the lengths per step; 0.01: 1 %.")]
Prompt = Annotated[
    int | None,
    _responses(
        help="Length of all prompts (tokens).", show_default="110, or the column ContextTokens of the trace"
    ),
]
PromptColumn = Annotated[
    str | None,
    _responses(
        metavar="NAME",
        help="Column of the trace with the length of each row's prompt.",
        show_default="ContextTokens, if the file has it",
    ),
]
Turns = Annotated[int, _responses(help="Turns per episode, all of equal length.")]
TurnDelay = Annotated[float, _responses(help="Environment time between two turns (s).")]
Policies = Annotated[str, _layout(help="Update policies, separated by commas; an unknown name lists them.")]
DeviceName = Annotated[str, _layout("--device", help="H800, H100, H200, A100, 910B or CPU.")]
NumDevices = Annotated[int, _layout("--devices", min=1, help="Devices for training and rollout.")]
Bounds = Annotated[str, _layout("--staleness", "-S", help="Staleness bounds, separated by commas.")]
MaxStaleness = Annotated[int, _layout("--staleness", "-S", help="Largest staleness bound.")]
NumTrain = Annotated[
    int | None, _layout("--trainer", min=1, help="Devices of the trainer.", show_default="half")
]
Fleet = Annotated[str, _layout(metavar="FLEET", help="Other devices for rollout: H800:16,A100:32.")]
Tp = Annotated[int, _layout(help="Tensor parallel size of an engine.")]
Ep = Annotated[int, _layout(help="Expert parallel size of an engine.")]
SearchedEp = Annotated[
    int | None, _layout("--ep", min=1, help="Expert parallel size of an engine.", show_default="searched")
]
Rows = Annotated[
    int | None,
    _layout(
        min=1, help="Maximum number of requests per engine.", show_default="as many as the KV cache holds"
    ),
]
Slack = Annotated[int, _layout(min=0, help="Groups by which admission stays below the staleness bound.")]
Elastic = Annotated[bool, _layout(help="Decode on the trainer's devices while the trainer waits.")]
Without = Annotated[
    str,
    _layout(
        metavar="PARTS",
        help="Parts of policy dora to leave out, separated by commas; an unknown name lists them.",
    ),
]
Steps = Annotated[int, _output(min=1, help="Training steps to simulate.")]
TimelineFile = Annotated[
    Path | None, _output(metavar="SVG", help="Draw the engines of the last layout over time.")
]
PlotFile = Annotated[Path | None, _output(metavar="SVG", help="Plot tokens/s against the staleness bound S.")]
MaxSimulated = Annotated[int, _output(min=1, help="Maximum number of layouts to simulate.")]
Top = Annotated[
    int, _output(min=1, help="Number of plans to print, in addition to the best plan of each policy.")
]
CalibrationRun = Annotated[
    Path | None,
    _output(
        "--run", metavar="RUN", help="Print the forecast error for this run, after fitting the costs to it."
    ),
]
CheckedRuns = Annotated[
    list[Path] | None,
    typer.Option("--check", metavar="RUN", help="Another run whose forecast error is printed; repeatable."),
]
JsonFile = Annotated[Path | None, _output("--json", metavar="FILE", help="Write the metrics as JSON.")]

simulate = typer.Typer(help="Run the production orchestrator in virtual time.", no_args_is_help=True)


@simulate.command()
def swarm(
    seeds: Annotated[int, typer.Option(min=1, help="Number of random worlds.")] = 200,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the summary as JSON, in the last line.")
    ] = False,
) -> None:
    """Run random worlds with faults; an independent checker follows every event and action."""
    from dora.sim.swarm import run_swarm

    raise typer.Exit(run_swarm(seeds, as_json))


@simulate.command()
def run(
    model: Model = "qwen2.5-32b",
    batch_size: BatchSize = 128,
    group_size: GroupSize = 16,
    context: Context = None,
    reward: Reward = 0.0,
    expert_skew: ExpertSkew = 0.1,
    mean: Mean = None,
    limit: Limit = 30720,
    tail: Tail = None,
    family: Family = None,
    trace: Trace = None,
    column: Column = None,
    correlation: Correlation = 0.0,
    growth: Growth = 0.0,
    prompt: Prompt = None,
    prompt_column: PromptColumn = None,
    turns: Turns = 1,
    turn_delay: TurnDelay = 0.0,
    policies: Policies = "sync,one_step,partial,dora",
    staleness: Bounds = "1,2",
    device: DeviceName = "H800",
    num_devices: NumDevices = 64,
    num_train: NumTrain = None,
    rollout: Fleet = "",
    tp: Tp = 4,
    ep: Ep = 1,
    rows: Rows = None,
    slack: Slack = 0,
    elastic: Elastic = False,
    without: Without = "",
    steps: Steps = 12,
    timeline: TimelineFile = None,
    plot: PlotFile = None,
    json: JsonFile = None,
) -> None:
    """Compare forecasts of update policies on hardware that is described by data sheets."""
    from dora.planner.cluster import Layout, Workload
    from dora.planner.commands import Plots, make_layouts, simulate_layouts
    from dora.planner.hardware import get_device, parse_fleet

    lengths = _make_lengths(
        limit, mean, family, tail, trace, column, prompt, prompt_column,
        correlation=correlation, growth=growth, num_turns=turns, turn_delay_s=turn_delay,
    )  # fmt: skip
    shape = model_shape(model)
    workload = Workload(
        shape, lengths, batch_size, group_size,
        context=_checked_context(shape, context),
        reward_s=reward, expert_skew=expert_skew,
    )  # fmt: skip
    num_train = num_train if num_train is not None else (num_devices + 1) // 2
    base = Layout(
        "dora", 0, (get_device(device), num_train), parse_fleet(rollout), tp, ep, rows,
        slack=slack, ablations=tuple(_split_names(without)), is_elastic=elastic,
    )  # fmt: skip
    bounds = _split_numbers(staleness)
    layouts = [*make_layouts(_split_names(policies), bounds, base, num_devices - num_train)]
    simulate_layouts(workload, layouts, steps, json, Plots(timeline, plot))


@simulate.command()
def calibrate(
    run: RunFolder,
    more: Annotated[
        list[Path] | None,
        typer.Option("--with", metavar="RUN", help="Another run to fit the costs to; repeatable."),
    ] = None,
    others: CheckedRuns = None,
    json: JsonFile = None,
) -> None:
    """Fit costs to real runs, and print the forecast error for these runs and for others."""
    from dora.planner import commands

    commands.calibrate(read_runs([run, *(more or [])]), read_runs(others or []), json)


@simulate.command("timeline")
def draw_timeline(
    run: RunFolder,
    out: Annotated[Path, typer.Argument(metavar="SVG", help="File to write.")],
) -> None:
    """Draw the engines of a real run over time; `dora simulate run --timeline` draws simulated ones."""
    from dora.journal.reader import read_journal
    from dora.journal.timeline import fold
    from dora.planner.commands import check_svg_paths
    from dora.planner.svg import timeline_svg

    check_svg_paths(out)
    journal = read_journal(run)
    spans = fold(journal.lines, breaks_c1=journal.limits.breaks_c1)
    out.write_text(timeline_svg(spans, f"{run.resolve().name}: rows by version"), encoding="utf-8")


@simulate.command()
def speed(
    runs: Annotated[list[Path], typer.Argument(metavar="RUN...", help="Folders of runs that have ended.")],
    out: Annotated[Path, typer.Option(metavar="SVG", help="File to write.")] = Path("speed.svg"),
) -> None:
    """Plot the trained tokens per second of real runs against the staleness bound S, one line per policy."""
    from dora.planner.commands import check_svg_paths
    from dora.planner.svg import throughput_svg
    from dora.report.data import read_throughput

    check_svg_paths(out)
    out.write_text(throughput_svg(read_throughput(run) for run in runs), encoding="utf-8")


def plan(
    model: Model = "qwen2.5-32b",
    batch_size: BatchSize = 64,
    group_size: GroupSize = 16,
    context: Context = None,
    reward: Reward = 0.0,
    expert_skew: ExpertSkew = 0.1,
    mean: Mean = None,
    limit: Limit = 30720,
    tail: Tail = None,
    family: Family = None,
    trace: Trace = None,
    column: Column = None,
    correlation: Correlation = 0.0,
    growth: Growth = 0.0,
    prompt: Prompt = None,
    prompt_column: PromptColumn = None,
    turns: Turns = 1,
    turn_delay: TurnDelay = 0.0,
    policies: Policies = "sync,one_step,dora",
    staleness: MaxStaleness = 2,
    device: DeviceName = "H800",
    num_devices: NumDevices = 64,
    ep: SearchedEp = None,
    max_simulated: MaxSimulated = 24,
    top: Top = 8,
    calibration_run: CalibrationRun = None,
    checked_runs: CheckedRuns = None,
    json: JsonFile = None,
) -> None:
    """Find the policy, staleness bound, device split, parallel sizes and rows with the highest throughput."""
    from dora.planner import commands
    from dora.planner.calibrate import forecast_all
    from dora.planner.cluster import Workload
    from dora.planner.hardware import get_device
    from dora.planner.search import SearchProblem

    lengths = _make_lengths(
        limit, mean, family, tail, trace, column, prompt, prompt_column,
        correlation=correlation, growth=growth, num_turns=turns, turn_delay_s=turn_delay,
    )  # fmt: skip
    shape = model_shape(model)
    workload = Workload(
        shape, lengths, batch_size, group_size,
        context=_checked_context(shape, context),
        reward_s=reward, expert_skew=expert_skew,
    )  # fmt: skip
    problem = SearchProblem(
        workload, get_device(device), num_devices, staleness, tuple(_split_names(policies)), ep
    )
    forecasts = []
    if calibration_run is not None:
        forecasts = forecast_all(read_runs([calibration_run]), read_runs(checked_runs or []))
    elif checked_runs:
        raise typer.BadParameter("--check needs costs that are fitted to another run: name it with --run")
    commands.plan(problem, max_simulated, top, json, forecasts)


def model_shape(name: str) -> ModelShape:
    """The sizes of a preset, or of a model whose folder has only a `config.json`.

    Raises InputError for an unknown name, and for a model that DORA-RL cannot train.
    """
    from dora.planner.hardware import MODELS, ModelShape, get_model

    folder = Path(name)
    if name in MODELS or not folder.is_dir():
        return get_model(name)
    from dora.model.config import TransformersConfig
    from dora.model.pretrained import load_config
    from dora.model.transformers_model import layer_types
    from dora.model.weights import parameter_shapes

    config = load_config(folder)
    sizes = {tensor: math.prod(shape) for tensor, shape in parameter_shapes(config).items()}
    total, experts = sum(sizes.values()), sum(n for tensor, n in sizes.items() if ".experts." in tensor)
    share = config.num_experts_per_tok / config.num_experts if config.num_experts else 0.0
    content = config.to_dict()
    text = content.get("text_config") or content
    kinds, window = (
        layer_types(config) if isinstance(config, TransformersConfig) else (("full_attention",), 0)
    )
    attending = [kind for kind in kinds if kind not in FIXED_STATE] or kinds
    windowed = sum(kind in WINDOWED for kind in attending) / len(attending) if window else 0.0
    has_kv = len(attending) / len(kinds)
    kv_values, num_kv_heads = 2 * config.num_key_value_heads * config.head_dim, config.num_key_value_heads
    head_size = config.head_dim
    if text.get("kv_lora_rank"):  # multi-head latent attention
        kv_values, num_kv_heads = text["kv_lora_rank"] + text["qk_rope_head_dim"], 1
        head_size = (text["qk_nope_head_dim"] + text["qk_rope_head_dim"] + text["v_head_dim"]) // 2
    return ModelShape(
        folder.resolve().name,
        float(total),
        config.num_hidden_layers,
        config.hidden_size,
        round(kv_values * has_kv),
        config.num_attention_heads,
        num_kv_heads,
        total - experts * (1 - share) if experts else 0.0,
        float(experts),
        config.num_experts if experts else 0,
        config.num_experts_per_tok if experts else 0,
        head_size,
        window if windowed else 0,
        windowed,
        config.max_position_embeddings,
    )


def _checked_context(model: ModelShape, context: int | None) -> int:
    """The context of a workload. Raises InputError if it is longer than that of a model from a folder."""
    longest = model.max_context or (CONTEXT if context is None else context)
    if context is not None and context > longest:
        raise InputError(
            f"--context {context}: config.json of {model.name} has max_position_embeddings = {longest}; "
            "lower --context, or use a model with a longer context"
        )
    return min(CONTEXT, longest) if context is None else context


def read_runs(paths: Iterable[Path]) -> dict[str, RecordedRun]:
    """Read the runs to forecast, by path.

    Raises InputError if a run cannot be read, has redone steps, or changed its engines.
    """
    from dora.core.events import EngineJoined, EngineLost, EngineRemoved, Resumed, Trained, TrainerReplaced
    from dora.journal.reader import read_journal
    from dora.planner.calibrate import read_run

    runs = {}
    for path in paths:
        journal = read_journal(path)
        records = [line.record for line in journal.lines]
        if any(isinstance(record, Resumed | TrainerReplaced) for record in records):
            raise InputError(
                f"{path} was resumed, or its trainer was replaced, so its times are not continuous and steps "
                "may count twice; name another run"
            )
        first = next((at for at, record in enumerate(records) if isinstance(record, Trained)), len(records))
        if any(isinstance(record, EngineLost | EngineRemoved) for record in records) or any(
            isinstance(record, EngineJoined) for record in records[first:]
        ):
            raise InputError(
                f"{path} lost, removed or added an engine, so its speed is not that of a fixed number of "
                "engines; name another run"
            )
        runs[path.as_posix()] = read_run(
            journal.limits, journal.lines, _read_update_s(path), _read_min_stream_tokens(path)
        )
    return runs


def _read_min_stream_tokens(run: Path) -> int | None:
    """Tokens of an incomplete batch at which the trainer starts on it; None: it waits for the whole batch.

    Raises InputError. Files that the configuration names need not exist any more.
    """
    from dora.config.load import read_run_config

    config = read_run_config(run)
    return config.trainer.micro_batch_tokens * config.trainer.num_ranks if config.streams_gradients else None


def _read_update_s(run: Path) -> dict[int, float]:
    """Compute time of the trainer (s) by step, for the steps in the run's metrics."""
    from dora.metrics.evaluation import VERSION_KEY
    from dora.metrics.writer import METRICS_FILE, read_metrics

    lines = (line for line in read_metrics(run / METRICS_FILE) if VERSION_KEY not in line)
    return {line["step"]: line.get("timing_s/update_actor", 0.0) for line in lines}


def _make_lengths(
    limit: int,
    mean: float | None,
    family: str | None,
    tail: float | None,
    trace: Path | None,
    column: str | None,
    prompt: int | None,
    prompt_column: str | None,
    **others: Any,
) -> LengthDistribution:
    """The lengths that the options describe. Raises InputError if options exclude each other."""
    from dora.planner.lengths import LengthDistribution, read_trace

    others["prompt"] = PROMPT_LENGTH if prompt is None else prompt
    for name, value in (("--column", column), ("--prompt-column", prompt_column)):
        if value is not None and (trace is None or trace.is_dir()):
            raise InputError(f"{name} {value} needs --trace with a CSV file")
    if trace is None:
        mean, tail = 2300.0 if mean is None else mean, 1.2 if tail is None else tail
        return LengthDistribution(limit, mean, family or "lognormal", tail, **others)
    given = {"--mean": mean, "--tail": tail, "--family": family}
    if conflicts := [name for name, value in given.items() if value is not None]:
        raise InputError(f"{', '.join(conflicts)}: --trace {trace} has the lengths; leave one of them out")
    others["prompts"] = _read_prompts(trace, prompt, prompt_column)
    lengths = _read_run_lengths(trace) if trace.is_dir() else read_trace(trace, column or "GeneratedTokens")
    return LengthDistribution(limit, family="trace", trace=lengths, **others)


def _read_prompts(trace: Path, prompt: int | None, column: str | None) -> tuple[int, ...]:
    """Lengths of the prompts in a trace; empty if all prompts have one length."""
    from dora.planner.lengths import has_column, read_trace

    if column is not None and prompt is not None:
        raise InputError(f"--prompt {prompt} and --prompt-column {column} exclude each other; leave one out")
    if column is None and (prompt is not None or not has_column(trace, "ContextTokens")):
        return ()
    return read_trace(trace, column or "ContextTokens")


def _read_run_lengths(run: Path) -> tuple[int, ...]:
    """Tokens of the responses that a run has finished."""
    from dora.core.events import RequestFinished
    from dora.journal.reader import read_journal

    records = (line.record for line in read_journal(run).lines)
    return tuple(
        record.num_tokens
        for record in records
        if isinstance(record, RequestFinished) and not record.request.is_held_out
    )


def _split_names(text: str) -> list[str]:
    """Names separated by commas. Raises BadParameter for a repeated name."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if repeated := {name for name in names if names.count(name) > 1}:
        raise typer.BadParameter(f"{text!r} has {', '.join(sorted(repeated))} more than once")
    return names


def _split_numbers(text: str) -> list[int]:
    """Whole numbers separated by commas. Raises BadParameter."""
    try:
        return [int(name) for name in _split_names(text)]
    except ValueError as error:
        raise typer.BadParameter(f"{text!r} must be whole numbers with commas, such as 1,2,4") from error
