"""A run's `summary.json` as a person reads it.

The audit's verdicts are put in here, for they come from the run's files and not from the run.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from rich.table import Table

from dora.core.wording import counted
from dora.observe.audit import Audit


def add_verdicts(run: Path, verdict: Audit) -> None:
    """Write c1, c2 and c3 into the summary, if the run came as far as writing one."""
    path = run / "summary.json"
    if not path.is_file():
        return
    summary = json.loads(path.read_text()) | {"c1": verdict.c1, "c2": verdict.c2, "c3": verdict.c3}
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(summary, indent=2) + "\n")
    draft.replace(path)


def table(run: Path) -> Table:
    """What a person wants to know at the end of a run."""
    s: dict[str, Any] = json.loads((run / "summary.json").read_text())
    rows = [
        *_held_out(s),
        ("reward, last step", _number(s["reward_last"])),
        ("steps", f"{s['steps']} in {s['wall_s']:.1f} s wall, {s['cpu_s']:.1f} s CPU"),
        ("groups", _groups(s)),
        ("tokens", f"{s['trained_tokens']:,} trained, {s['tokens_per_s']:,.0f} per second"),
        (
            "computed again",
            f"{s['regenerated_tokens']:,} regenerated, {s['reprefill_tokens']:,} re-prefilled",
        ),
        ("moved", _moves(s)),
        ("versions alive", f"{s['live_versions_mean']:.2f} mean, {s['live_versions_max']} max"),
        ("staleness", f"{s['staleness_mean']:.2f} mean, {s['staleness_max']} max"),
        ("engines busy", f"{s['engine_busy_ratio']:.1%} of their rows, {_losses(s)}"),
        (
            "trainer idle",
            f"{s['trainer_idle_ratio']:.1%}, of it {s['stall_s']:.1f} s for a group at its deadline",
        ),
        ("trainer and engines", _mismatch(s["mismatch_max"])),
        ("orchestration", f"{s['orchestration_share']:.2%} of the wall time"),
        ("guarantees", ", ".join(f"{c.upper()} {_kept(s, c)}" for c in ("c1", "c2", "c3"))),
    ]
    result = Table(show_header=False)
    for name, value in rows:
        result.add_row(name, value)
    return result


def closing(run: Path, stopped: str, program: str) -> str:
    """The last line of a run: where it lies, and what to do next with this `program`.

    `stopped`: by what, empty if by nothing.
    """
    look = f"the run is in {run}: {program} report {run} makes a page of it, {program} dash {run} shows it"
    return f"{look}; {program} train --resume {run} goes on" if stopped else look


def _kept(s: dict[str, Any], guarantee: str) -> str:
    if guarantee == "c1" and s.get("breaks_c1"):
        mixed = counted(s["segmented_samples"], "answer")
        return f"given up by the update policy ({mixed} of several versions)"
    return "kept" if s[guarantee] else "BROKEN"


def _held_out(s: dict[str, Any]) -> list[tuple[str, str]]:
    """No rows for what was not evaluated."""
    keys = {"sampled": "eval", "greedy": "eval_greedy"}
    rows = [
        (f"held out, {name}", f"{_number(s[f'{key}_before'])} -> {_number(s[f'{key}_after'])}")
        for name, key in keys.items()
        if s[f"{key}_before"] is not None
    ]
    between = [str(e["version"]) for e in s["evaluations"] if 0 < e["version"] < s["steps"]]
    return [*rows, ("evaluated beside", f"versions {', '.join(between)}")] if between else rows


def _mismatch(largest: float | None) -> str:
    if largest is None:
        return "log-probs of the same weights were not compared"
    return f"log-probs of the same weights are {f'at most {largest:.1e} apart' if largest else 'equal'}"


def _losses(s: dict[str, Any]) -> str:
    restarts = s.get("engine_restarts", 0)
    return f"{s['engine_losses']} lost" + (f", {restarts} started again" if restarts else "")


def _moves(s: dict[str, Any]) -> str:
    if not s["migrations"]:
        return f"0 requests, {s['failed_migrations']} failed"
    reasons = ", ".join(f"{count} {reason}" for reason, count in s["migration_reasons"].items())
    p50, most = s["migration_stop_s_p50"], s["migration_stop_s_max"]
    stops = "" if p50 is None else f", stopped for {1e3 * p50:.1f} ms (max {1e3 * most:.1f})"
    megabytes = s["migrated_kv_bytes"] / 1e6
    return (
        f"{counted(s['migrations'], 'request')} ({reasons}), {s['failed_migrations']} failed, "
        f"{megabytes:.1f} MB{stops}"
    )


def _groups(s: dict[str, Any]) -> str:
    ends = ("trained", "filtered", "failed", "pending")
    return ", ".join(f"{s[f'{end}_groups']} {end}" for end in ends)


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"
