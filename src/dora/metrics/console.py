"""What the terminal shows: the progress of a run, and the table at its end.

Progress is a live screen on a terminal, and a plain line every few seconds elsewhere.
"""

from __future__ import annotations

import json
import time
from collections import Counter
from itertools import chain, zip_longest
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from dora.core.state import State
from dora.journal.reader import SUMMARY_FILE
from dora.metrics.run import RunMetrics
from dora.text import plural

REFRESH_S = 0.25
LINE_S = 10.0  # between plain lines
NOTABLE_SHARE = 0.1  # of the steps, of those without a gradient
SMOOTHING = 0.1  # weight of the last step in the reward shown


def print_notice(console: Console, sentence: str) -> None:
    """Print a sentence as it is."""
    console.print(sentence, markup=False, highlight=False, soft_wrap=True)


class RunConsole:
    """Shows the progress of one run; use it as a context manager while the run trains."""

    def __init__(self, console: Console, num_steps: int) -> None:
        self.console = console
        self._num_steps = num_steps
        self._next_s = 0.0
        self._num_printed = 0  # steps in the last plain line
        self._progress = Progress(
            TextColumn("training"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("steps, left"),
            TimeRemainingColumn(),
        )
        self._task = self._progress.add_task("steps", total=num_steps)
        is_live = console.is_terminal
        self._live = Live(console=console, refresh_per_second=1 / REFRESH_S) if is_live else None

    def __enter__(self) -> RunConsole:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *error: object) -> None:
        if self._live:
            self._live.stop()

    def notice(self, sentence: str) -> None:
        """Print a sentence that stays on the screen."""
        print_notice(self.console, sentence)

    def update(self, metrics: RunMetrics, state: State) -> None:
        """Show the progress if the refresh interval has passed."""
        now_s = time.monotonic()
        if now_s < self._next_s or not metrics.steps:
            return
        self._next_s = now_s + (REFRESH_S if self._live else LINE_S)
        if self._live:
            self._progress.update(self._task, completed=len(metrics.steps))
            self._live.update(Group(self._progress, _figures(metrics, state), _engines(state)))
        else:
            self._num_printed = len(metrics.steps)
            self.notice(progress_line(metrics, state, self._num_steps))

    def close(self, metrics: RunMetrics, state: State) -> None:
        """Show the final progress, unless the last plain line has."""
        if self._live or len(metrics.steps) > self._num_printed:
            self._next_s = 0.0
            self.update(metrics, state)


def progress_line(metrics: RunMetrics, state: State, num_steps: int) -> str:
    """The progress of a run in one line."""
    num_done = len(metrics.steps)
    left_s = (metrics.now_s - metrics.started_s) / num_done * (num_steps - num_done)
    figures = [f"{name} {value:.3f}" for name, value in _rewards(metrics).items()]
    return (
        f"step {num_done}/{num_steps}, {left_s:.0f} s left, {', '.join(figures)}, "
        f"{metrics.tokens_per_s:.0f} tokens/s, {_versions(state)}, "
        f"staleness {_staleness(metrics)}, stall {state.stall_s:.1f} s"
    )


def _figures(metrics: RunMetrics, state: State) -> Table:
    table = Table(show_header=False, box=None, padding=(0, 2))
    waits = f", waiting for group {state.stall_group}" if state.stall_group else ""
    left = [(name, f"{value:.3f}") for name, value in _rewards(metrics).items()]
    left += [("unfinished", _versions(state))]
    left += [("migrated", plural(metrics.migrations.succeeded.total(), "request"))]
    right = [("tokens/s", f"{metrics.tokens_per_s:.0f}"), ("staleness", _staleness(metrics))]
    right += [("stall", f"{state.stall_s:.1f} s{waits}")]
    for cells in zip_longest(left, right, fillvalue=()):
        table.add_row(*chain.from_iterable(cells))
    return table


def _engines(state: State) -> Table:
    """Requests by engine and version."""
    versions = sorted({v for e in state.engines.values() for v in e.loaded})
    table = Table("engine", *(f"v{v}" for v in versions), "free rows", box=None, padding=(0, 2))
    for engine in state.engines.values():
        running = Counter(engine.requests.values())
        cells = [str(running[v]) if v in engine.loaded else "-" for v in versions]
        table.add_row(str(engine.id), *cells, str(engine.free_rows))
    return table


def _versions(state: State) -> str:
    """Unfinished requests by version."""
    live = [(v, n) for v, n in sorted(state.num_unfinished.items()) if n]
    return "versions " + (" ".join(f"v{v}:{n}" for v, n in live) or "none")


def _staleness(metrics: RunMetrics) -> str:
    last = metrics.steps[-1].staleness
    shown = f"{fmean(last, weights=last.values()):.2f} (max {max(last)})"
    is_adaptive = metrics.limits.adaptive_staleness is not None
    return f"{shown}, bound {metrics.steps[-1].staleness_bound}" if is_adaptive else shown


def _rewards(metrics: RunMetrics) -> dict[str, float]:
    """Mean reward per step, smoothed; if all rewards are 0 or 1, also the accuracy of the last step."""
    smooth = metrics.steps[0].rewards.mean
    for step in metrics.steps[1:]:
        smooth += SMOOTHING * (step.rewards.mean - smooth)
    is_accuracy = all(step.rewards.is_binary for step in metrics.steps)
    return {"reward": smooth} | ({"accuracy": metrics.steps[-1].rewards.mean} if is_accuracy else {})


# --- the end of a run


def summary_table(run: Path, *, only_evaluates: bool = False) -> Table:
    """The most important figures of `summary.json`; with `only_evaluates` all of its evaluation."""
    s: dict[str, Any] = json.loads((run / SUMMARY_FILE).read_text(encoding="utf-8"))
    table = Table(show_header=False)
    for name, value in _figures_of_evaluation(s) if only_evaluates else _figures_of_training(s):
        table.add_row(name, value)
    return table


def _figures_of_training(s: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        *_held_out(s),
        ("reward, last step", _number(s["reward_last"])),
        ("steps", _steps(s)),
        *_without_gradient(s),
        ("groups", _groups(s)),
        ("tokens trained", f"{s['trained_tokens']:,}, {s['tokens_per_s']:,.0f} per second"),
        (
            "tokens recomputed",
            f"{s['regenerated_tokens']:,} regenerated after losses and failures, "
            f"{s['reprefill_tokens']:,} re-prefilled",
        ),
        ("requests migrated", _migrations(s)),
        ("live versions", f"{s['live_versions_mean']:.2f} mean, {s['live_versions_max']} max"),
        ("staleness", f"{s['staleness_mean']:.2f} mean, {s['staleness_max']} max"),
        ("rollout utilisation", f"{s['rollout_utilization']:.1%} of the engines' row time"),
        ("engines", _failures(s)),
        ("trainer idle", _trainer_idle(s)),
        ("log-prob mismatch", _mismatch(s["logprob_mismatch_max"])),
        ("orchestrator", f"{s['orchestrator_time_ratio']:.2%} of the wall time"),
        ("guarantees", _guarantees(s)),
    ]


def _figures_of_evaluation(s: dict[str, Any]) -> list[tuple[str, str]]:
    rows = []
    for evaluation in s["evaluations"]:
        ends = {name: (f"{name}_low", f"{name}_high") for name in evaluation if f"{name}_low" in evaluation}
        hidden = {"version", *chain.from_iterable(ends.values())}
        for name in (name for name in evaluation if name not in hidden):
            interval = " to ".join(_number(evaluation[end]) for end in ends.get(name, ()))
            rows.append((name, f"{evaluation[name]:.5g}" + (f" ({interval})" if interval else "")))
    if not rows:
        rows = [("evaluation", "not finished")]
    return [*rows, ("engines", _failures(s)), ("guarantees", _guarantees(s))]


def _guarantees(s: dict[str, Any]) -> str:
    return ", ".join(f"{c.upper()} {_verdict(s, c)}" for c in ("c1", "c2", "c3"))


def closing_line(run: Path, stopped: str, program: str, command: str) -> str:
    """The last line of a run: its folder and commands of `program` for it.

    `stopped` is the reason of an early end, after which `command` resumes the run; empty for a complete run.
    """
    look = f"run folder {run}: {program} report {run} writes an HTML report, {program} dash {run} serves it"
    return f"{look}, {program} {command} --resume {run} resumes the run" if stopped else look


def _held_out(s: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows about the evaluations, if there were any."""
    keys = {"sampled": "eval", "greedy": "eval_greedy"}
    rows = [
        (f"held-out reward, {name}", f"{_number(s[f'{key}_before'])} -> {_number(s[f'{key}_after'])}")
        for name, key in keys.items()
        if s[f"{key}_before"] is not None
    ]
    between = [str(e["version"]) for e in s["evaluations"] if 0 < e["version"] < s["steps"]]
    if between:
        rows.append(("evaluated in between", f"versions {', '.join(between)}"))
    for best in (e for e in s["evaluations"] if e["version"] == s.get("best_version")):
        reward = _number(best.get("reward_mean", best.get("greedy_reward_mean")))
        rows.append(("best checkpoint", f"{s['best_checkpoint']}, held-out reward {reward}"))
    return rows


def _steps(s: dict[str, Any]) -> str:
    """The CPU time is that of the last attempt alone: no process of the others has recorded its own."""
    since = " since the last resume" if s["attempts"] > 1 else ""
    return f"{s['steps']} in {s['wall_s']:.1f} s wall, {s['cpu_s']:.1f} s CPU{since}"


def _without_gradient(s: dict[str, Any]) -> list[tuple[str, str]]:
    """A row if a notable part of the steps has changed no weight, although the run looks like a success."""
    num = s.get("steps_without_gradient", 0)
    if num <= NOTABLE_SHARE * s["steps"]:
        return []
    return [("no gradient", f"{num} of {plural(s['steps'], 'step')}: see reward/frac_zero_std")]


def _groups(s: dict[str, Any]) -> str:
    outcomes = ("trained", "filtered", "failed", "pending")
    return ", ".join(f"{s[f'{outcome}_groups']} {outcome}" for outcome in outcomes)


def _migrations(s: dict[str, Any]) -> str:
    failed = f"{plural(s['failed_migrations'], 'attempt')} failed: these requests stayed on their engine"
    if not s["migrations"]:
        return f"none; {failed}" if s["failed_migrations"] else "none"
    reasons = ", ".join(f"{count} {reason}" for reason, count in s["migration_reasons"].items())
    p50, longest = s["migration_downtime_s_p50"], s["migration_downtime_s_max"]
    downtime = "" if p50 is None else f", downtime {1e3 * p50:.1f} ms (max {1e3 * longest:.1f})"
    megabytes = s["migrated_kv_bytes"] / 1e6
    done = f"{s['migrations']:,} ({reasons}), {megabytes:.1f} MB of KV{downtime}"
    return f"{done}; {failed}" if s["failed_migrations"] else done


def _trainer_idle(s: dict[str, Any]) -> str:
    idle_s = s["trainer_idle_ratio"] * s["wall_s"]
    return (
        f"{s['trainer_idle_ratio']:.1%} of the time: it waited {idle_s:.1f} s for its batches, "
        f"{s['stall_s']:.1f} s of them for a group at its deadline"
    )


def _failures(s: dict[str, Any]) -> str:
    restarts = s.get("engine_restarts", 0)
    return f"{s['engine_failures']} lost" + (f", {restarts} restarted" if restarts else "")


def _mismatch(largest: float | None) -> str:
    if largest is None:
        return "not measured"
    return f"at most {largest:.1e} between trainer and engines" if largest else "none: bit for bit equal"


def _verdict(s: dict[str, Any], guarantee: str) -> str:
    if guarantee == "c1" and s.get("breaks_c1"):
        mixed = plural(s["segmented_samples"], "response")
        return f"waived by the update policy ({mixed} of several versions)"
    return "kept" if s[guarantee] else "BROKEN"


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
