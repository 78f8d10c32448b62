"""Implement `dora simulate run`, `dora simulate calibrate` and `dora plan`: simulate, print tables, and write
files.

All inputs and output paths are checked before the first simulation.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dora.errors import InputError
from dora.journal.timeline import Span, Timeline
from dora.planner.calibrate import FittedCosts, RecordedRun, RunForecast, fit_costs, forecast_all
from dora.planner.cluster import Deployment, Layout, Workload
from dora.planner.hardware import TRAINING_BYTES_PER_PARAMETER
from dora.planner.policies import get_policy
from dora.planner.search import SearchProblem, SimulatedPlan, search, with_heavier_tail
from dora.planner.svg import throughput_svg, timeline_svg

TableRow = dict[str, str | int | float]
TABLE_WIDTH = 200  # also if the output is not a terminal
MAX_BAR = 40  # characters
NOTABLE_GAIN = 0.02  # in tokens/s, of `dora` over the best other policy
MAX_IDLE = 0.05  # of a step, for a trainer that is the bottleneck
LIGHT_TAIL = 3.0  # 99th percentile of responses by their median
STD = " std"  # after the name of a column: its standard deviation over the steps
COLUMNS = {  # of `dora simulate run`: key -> title
    "policy": "policy",
    "S": "S",
    "trainer": "trainer",
    "rollout": "rollout",
    "step_s": "step s",
    "tokens_per_s": "tokens/s",
    "total_tokens_per_s": "with prompts",
    "exposed_fraction": "exposed",
    "engine_utilization": "engine util",
    "row_utilization": "row util",
    "staleness_mean": "staleness",
    "staleness_max": "max",
    "versions": "versions",
    "migrations": "migrations",
    "recomputed_tokens": "recomputed",
    "dropped_tokens": "dropped",
}
PLAN_SPREADS = {  # of `dora plan`: title -> key of a mean over steps
    "tokens/s": "tokens_per_s",
    "with prompts": "total_tokens_per_s",
    "step s": "step_s",
    "trainer idle": "exposed_fraction",
    "engines idle": "engine_utilization",
    "staleness": "staleness_mean",
}
NOT_CALIBRATED = (
    "Costs are from data sheets and not calibrated: docs/paper-tables.md lists known errors, "
    "and --run RUN prints the error for one of your runs."
)


# dora simulate run


def make_layouts(
    policies: Sequence[str], bounds: Sequence[int], base: Layout, num_rollout: int
) -> Iterator[Layout]:
    """`base` with every policy, at its own bound or at each of `bounds`; colocated policies use all devices.

    Without `base.rollout`, `num_rollout` devices of the trainer's kind are for rollout. Raises InputError if
    an option has no effect on any policy.
    """
    _check_options(policies, base, num_rollout)
    fixed_bounds = {name: get_policy(name).max_staleness for name in policies}
    bounds_of = {name: bounds if fixed is None else [fixed] for name, fixed in fixed_bounds.items()}
    all_bounds = [bound for found in bounds_of.values() for bound in found]
    if base.slack and all_bounds and not any(all_bounds):
        raise InputError(f"slack = {base.slack} groups below the bound has no effect with S = 0")
    device, num_train = base.trainer
    for name in policies:
        for bound in bounds_of[name]:
            ablations = base.ablations if name == "dora" else ()
            layout = replace(base, policy=name, max_staleness=bound, ablations=ablations)
            if get_policy(name).is_colocated:
                yield replace(layout, trainer=(device, num_train + num_rollout), rollout=(), is_elastic=False)
            else:
                yield replace(layout, rollout=base.rollout or ((device, num_rollout),))


def _check_options(policies: Sequence[str], base: Layout, num_rollout: int) -> None:
    names = ", ".join(policies)
    if base.ablations and "dora" not in policies:
        raise InputError(
            f"without {', '.join(base.ablations)} applies to policy dora alone, and the policies are {names}"
        )
    if all(get_policy(name).is_colocated for name in policies):
        if base.is_elastic or base.rollout:
            raise InputError(f"policies {names} share all devices: elastic and rollout have no effect")
    elif not base.rollout and num_rollout < 1:
        num_train = base.trainer[1]
        raise InputError(
            f"{num_train + num_rollout} devices leave none for rollout beside {num_train} that train"
        )


@dataclass(frozen=True)
class Plots:
    """SVG files to draw: the engines of the last layout over time, and tokens per second against S."""

    timeline: Path | None = None
    throughput: Path | None = None

    def draw(self, last: Deployment, rows: Sequence[TableRow]) -> None:
        if self.timeline is not None:
            breaks_c1 = get_policy(last.layout.policy).breaks_c1
            timeline, spans = Timeline(breaks_c1=breaks_c1), list[Span]()
            last.simulator(lambda now, record: spans.extend(timeline.observe(now, record))).run()
            title = f"{last.layout.policy}, S = {last.layout.max_staleness}: rows by version"
            self.timeline.write_text(timeline_svg([*spans, *timeline.open_spans()], title), encoding="utf-8")
        if self.throughput is not None:
            points = [(str(row["policy"]), int(row["S"]), float(row["tokens_per_s"])) for row in rows]
            self.throughput.write_text(throughput_svg(points), encoding="utf-8")


def simulate_layouts(
    workload: Workload, layouts: Sequence[Layout], num_steps: int, path: Path | None, plots: Plots
) -> None:
    """Simulate each layout, print the table, and write it as JSON if `path` is given."""
    if not layouts:
        raise InputError("nothing to simulate: give at least one policy and one S")
    check_output_paths(path)
    check_svg_paths(plots.timeline, plots.throughput)
    deployments = [Deployment(workload, layout, num_steps) for layout in layouts]
    for deployment in deployments:
        deployment.check()
    console = Console(stderr=True)
    plans = []
    for deployment in deployments:
        with console.status(f"{deployment.layout.policy}, S = {deployment.layout.max_staleness}"):
            plans.append(SimulatedPlan(deployment, deployment.metrics()))
    rows = [_simulated_row(plan) for plan in plans]
    print_table([_titled(row) for row in rows])
    # A policy that trains and decodes on the same devices has another layout, which no search has chosen.
    plans = [plan for plan in plans if plan.deployment.layout.rollout]
    verdict = describe_gain(sorted(plans, key=lambda plan: -plan.tokens_per_s))
    if verdict is not None:
        print(f"\n{verdict}")
    plots.draw(deployments[-1], rows)
    _write_json(path, {"rows": rows})


def _titled(row: TableRow) -> TableRow:
    """The columns of the printed table, with the spread of those that have one."""
    spreads = {f"{title}{STD}": row[f"{key}_std"] for key, title in COLUMNS.items() if f"{key}_std" in row}
    return {title: row[key] for key, title in COLUMNS.items()} | spreads


def _simulated_row(plan: SimulatedPlan) -> TableRow:
    layout = plan.deployment.layout
    return {
        "policy": " - ".join((layout.policy, *layout.ablations)),
        "S": layout.max_staleness,
        "trainer": layout.trainer[1],
        "rollout": layout.num_rollout,
        "rows": plan.deployment.num_rows,
        **plan.metrics,
    }


# dora plan


def plan(
    problem: SearchProblem,
    max_simulated: int,
    num_printed: int,
    path: Path | None,
    forecasts: Sequence[RunForecast] = (),
) -> None:
    """Search, and print the best plans, the best of each policy, and the effect of a heavier tail.

    `forecasts` of real runs show the error of the simulator.
    """
    check_output_paths(path)
    plans = sorted(_search_with_progress(problem, max_simulated), key=lambda plan: -plan.tokens_per_s)
    best_of_policy = {plan.deployment.layout.policy: plan for plan in reversed(plans)}
    printed = [plan for k, plan in enumerate(plans) if k < num_printed or plan in best_of_policy.values()]
    best, rows = plans[0], [_plan_row(plan) for plan in printed]
    print_table(rows)
    print(f"\n{_bars(rows)}\n")
    if (verdict := describe_gain(plans)) is not None:
        print(verdict)
    heavier = with_heavier_tail(best)
    print(
        "If the 99th percentile of responses doubles, a step of the best plan takes "
        f"{heavier['step_s']:,.0f} s instead of {best.metrics['step_s']:,.0f} s, and it trains "
        f"{heavier['tokens_per_s']:,.0f} tokens/s.\n{describe_error(forecasts)}"
    )
    calibration = [_forecast_row(forecast) for forecast in forecasts]
    _write_json(path, {"rows": rows, "tail_doubled": heavier, "calibration": calibration})


def describe_gain(plans: Sequence[SimulatedPlan]) -> str | None:
    """Whether several live versions are worth it, and why not; None without `dora` or without a rival.

    Rivals are the policies with one live version. `plans` are sorted by their throughput.
    """
    policies = [get_policy(plan.deployment.layout.policy) for plan in plans]
    ours = next((plan for plan, own in zip(plans, policies, strict=True) if own.name == "dora"), None)
    rival = next((plan for plan, own in zip(plans, policies, strict=True) if own.is_single_version), None)
    if ours is None or rival is None:
        return None
    name, gain = rival.deployment.layout.policy, ours.tokens_per_s / rival.tokens_per_s - 1
    if gain >= NOTABLE_GAIN:
        return (
            f"Several live versions (dora) train {gain:.0%} more tokens/s than {name}, the best policy with "
            "one live version."
        )
    workload, idle = rival.deployment.workload, rival.metrics["exposed_fraction"]
    median, p99 = np.quantile(workload.lengths.sample, (0.5, 0.99))
    reasons = []
    if get_policy(name).is_colocated:
        reasons.append("its engines and trainer share all devices, and dora needs some for each of them")
    if p99 <= LIGHT_TAIL * median:
        reasons.append(f"the 99th percentile of responses is only {p99 / median:.1f} times their median")
    if idle < MAX_IDLE:
        reasons.append(f"the trainer is the bottleneck: it waits only {idle:.0%} of a step")
    if not reasons:
        reasons.append(
            "the engines are the bottleneck: they are idle only "
            f"{1 - rival.metrics['engine_utilization']:.0%} of the time"
        )
    return (
        f"No gain from several live versions here: {name} is enough (dora: {gain:+.1%} tokens/s); "
        f"{', and '.join(reasons)}."
    )


def _search_with_progress(problem: SearchProblem, max_simulated: int) -> list[SimulatedPlan]:
    """Search with a progress bar, and print each plan that is better than those before."""
    plans: list[SimulatedPlan] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("simulating", total=max_simulated)
        for plan in search(problem, max_simulated):
            if plan.tokens_per_s > max((other.tokens_per_s for other in plans), default=0.0):
                label = _plan_label(_plan_row(plan))
                progress.console.print(f"best so far: {label}, {plan.tokens_per_s:,.0f} tokens/s")
            plans.append(plan)
            progress.advance(task)
    return plans


def _plan_row(plan: SimulatedPlan) -> TableRow:
    """Memory in GB of one device; "max GB" is of the fullest device at any time."""
    metrics, layout, (cost, num_rows, _) = plan.metrics, plan.deployment.layout, plan.deployment.engines[0]
    weights_gb = cost.device_weight_bytes / 1e9
    kv_usage = min(1.0, metrics["kv_usage_max"])
    kv_gb = kv_usage * cost.kv_capacity * cost.device_kv_bytes / cost.ep_size / 1e9
    trainer_gb = cost.model.num_parameters * TRAINING_BYTES_PER_PARAMETER / layout.trainer[1] / 1e9
    return {
        "policy": layout.policy,
        "S": layout.max_staleness,
        "trainer": layout.trainer[1],
        "rollout": layout.num_rollout,
        "TP": layout.tp_size,
        "EP": layout.ep_size,
        "rows": num_rows,
        "tokens/s": metrics["tokens_per_s"],
        "with prompts": metrics["total_tokens_per_s"],
        "step s": metrics["step_s"],
        "trainer idle": metrics["exposed_fraction"],
        "engines idle": 1 - metrics["engine_utilization"],
        "staleness": metrics["staleness_mean"],
        "max": metrics["staleness_max"],
        "weights GB": weights_gb,
        "KV GB": kv_gb,
        "trainer GB": trainer_gb,
        "max GB": max(weights_gb + kv_gb, trainer_gb),  # colocated devices hold one of the two at a time
        **{f"{title}{STD}": metrics[f"{key}_std"] for title, key in PLAN_SPREADS.items()},
    }


def _bars(rows: Sequence[TableRow]) -> str:
    """A bar chart of tokens per second; the first row is the best."""
    best, lines = float(rows[0]["tokens/s"]), []
    for row in rows:
        tokens_per_s = float(row["tokens/s"])
        bar = "█" * max(1, round(MAX_BAR * tokens_per_s / best))
        lines.append(f"{_plan_label(row):>36} {bar} {tokens_per_s:,.0f}")
    return "\n".join(lines)


def _plan_label(row: TableRow) -> str:
    """Policy and bound, trainer + rollout devices, parallel sizes, and rows of an engine."""
    sizes = f"TP{row['TP']}" if row["EP"] == 1 else f"TP{row['TP']} EP{row['EP']}"
    return f"{row['policy']} S={row['S']} {row['trainer']}+{row['rollout']} {sizes} x{row['rows']}"


# dora simulate calibrate


def calibrate(
    fitted: Mapping[str, RecordedRun], others: Mapping[str, RecordedRun], path: Path | None
) -> None:
    """Print the costs fitted to runs, and the error of forecasts of these and of other runs."""
    check_output_paths(path)
    costs = fit_costs([*fitted.values()])
    cost_rows = _cost_rows(costs)
    rows = [_forecast_row(forecast) for forecast in forecast_all(fitted, others, costs)]
    print_table(cost_rows)
    print()
    print_table(rows)
    _write_json(path, {"costs": cost_rows, "rows": rows})


def _cost_rows(costs: FittedCosts) -> list[TableRow]:
    values = {
        "decode step: fixed (ms)": 1e3 * costs.decode.fixed_s,
        "decode step: per row (ms)": 1e3 * costs.decode.per_unit_s,
        "decode step: per version beyond the first (ms)": 1e3 * costs.per_version_s,
        "decode step: slowdown while the trainer works": costs.contention.decode,
        "response: beyond its decode steps (ms)": 1e3 * costs.finish_report_s,
        "training step: fixed (s)": costs.train.fixed_s,
        "training step: per 1,000 tokens (s)": costs.train.per_unit_s,
        "training step: slowdown while all engines decode": costs.contention.train,
        "publish (s)": costs.publish_s,
        "load (s)": costs.load_s,
        "reward (s)": costs.reward_s,
        "migration (s)": costs.migration_s,
    }
    return [{"cost": name, "fitted": value} for name, value in values.items()]


def _forecast_row(forecast: RunForecast) -> TableRow:
    return {
        "run": forecast.name,
        "fitted": "yes" if forecast.is_fitted else "no",
        "steps": forecast.num_steps,
        "tokens/s": forecast.measured_tokens_per_s,
        "forecast": forecast.forecast_tokens_per_s,
        "error": forecast.error,
    }


def describe_error(forecasts: Sequence[RunForecast]) -> str:
    """The error of the simulator by its forecasts of real runs, in a sentence or two."""
    if not forecasts:
        return NOT_CALIBRATED
    fitted = [f"{one.error:+.0%} of {one.name}" for one in forecasts if one.is_fitted]
    others = [f"{one.error:+.0%} of {one.name}" for one in forecasts if not one.is_fitted]
    of_others = f"of other runs, {', '.join(others)}" if others else "give other runs with --check"
    return (
        "Costs are from data sheets. With costs fitted to your own run, the error of the simulator is "
        f"{', '.join(fitted)} (trained tokens/s); {of_others}."
    )


# Tables and files


def print_table(rows: Sequence[TableRow]) -> None:
    """Print rows with equal keys as a table; a column's standard deviation follows its value after ±."""
    table = Table(box=None, pad_edge=False)
    columns = [column for column in rows[0] if not column.endswith(STD)]
    for column in columns:
        is_text = isinstance(rows[0][column], str)
        table.add_column(column, justify="left" if is_text else "right", no_wrap=True)
    for row in rows:
        table.add_row(*(_format_cell(row[column], row.get(f"{column}{STD}")) for column in columns))
    Console(width=TABLE_WIDTH).print(table)


def _format_cell(value: str | int | float, spread: str | int | float | None) -> str:
    """A value, and its spread with two significant digits if it has one."""
    text = _format_value(value)
    return f"{text} ±{_format_value(float(f'{spread:.2g}'))}" if spread else text


def _format_value(value: str | int | float) -> str:
    """Three significant digits; whole numbers whole."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 or value.is_integer() else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else value


def check_output_paths(*paths: Path | None) -> None:
    """Raise InputError if the folder of an output file does not exist."""
    for path in filter(None, paths):
        if not path.absolute().parent.is_dir():
            raise InputError(f"cannot write {path}: {path.parent} is not a folder")


def check_svg_paths(*paths: Path | None) -> None:
    """Raise InputError if a file cannot be written or its suffix is not one of SVG or HTML."""
    check_output_paths(*paths)
    for path in filter(None, paths):
        if path.suffix.lower() not in (".svg", ".html"):
            raise InputError(f"{path} must end with .svg or .html; name it {path.with_suffix('.svg').name}")


def _write_json(path: Path | None, content: Mapping[str, object]) -> None:
    if path is not None:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
