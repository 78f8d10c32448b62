"""The tables of docs/fault-tolerance.md, measured by the benchmarks `faults` and `slow_fleet`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from docs.making import markdown
from docs.making.benchmarks import figure

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
RULES = {"both": "both rules", "first": "without migration", "neither": "without both"}
FLEETS = {
    "all alike": "four equal engines",
    "one slow": "one of four is slow",
    "three": "only the three fast ones",
}

SERVERS = {  # campaigns
    "faults_vllm": "vLLM, KV in files",
    "faults_nixl": "vLLM, KV over NIXL",
    "faults_sglang": "SGLang, KV in files",
    "faults_sglang_nixl": "SGLang, KV over NIXL",
}


def tables() -> dict[str, Callable[[], str]]:
    """Table name -> function that writes it."""
    totals = (faults_totals, faults_ray_totals, faults_servers_totals)
    made = (*totals, faults_kinds, faults_ray, faults_servers, faults_slow)
    return {function.__name__: function for function in made}


def faults_totals() -> str:
    """The faults, the violations found, and the cost."""
    return _totals("faults")


def faults_ray_totals() -> str:
    """The same on a cluster."""
    return _totals("faults_ray")


def faults_servers_totals() -> str:
    """The same with inference servers, a column for each kind."""
    return _totals(*SERVERS)


def _totals(*names: str) -> str:
    found = [_read(name)["ratios"] for name in names]
    named = {"injected": "faults injected", "seconds_per_fault": "seconds of run time for each"}
    named |= {name: f"`{name}`" for name in ("lost", "doubled", "mixed", "too_stale")}
    named |= {
        "throughput_with_over_without": "throughput, with faults over without",
        "failed_groups": "failed groups",
        "regenerated_tokens": "regenerated tokens",
        "redone_steps": "redone steps",
    }
    heads = [SERVERS.get(name, "") for name in names]
    lines = [(text, *(figure(each[key]) for each in found)) for key, text in named.items()]
    return markdown.table(("", *heads), lines)


def faults_kinds() -> str:
    """Detection and recovery time of each kind."""
    return _times(_read("faults")["rows"])


def faults_ray() -> str:
    """Detection and recovery on a cluster of two nodes."""
    return _times(_read("faults_ray")["rows"])


def faults_servers() -> str:
    """Medians of detection and recovery with inference servers, columns for each kind."""
    found = [{row["kind"]: row for row in _read(name)["rows"]} for name in SERVERS]
    heads = [f"{title}: {what}" for title in SERVERS.values() for what in ("detection (s)", "recovery (s)")]
    lines = []
    for kind in found[0]:
        cells = []
        for each in found:
            row = each.get(kind, {})
            cells += [figure(row.get(key, "")) for key in ("detection_s_p50", "recovery_s_p50")]
        lines.append([kind, *cells])
    return markdown.table(("kind", *heads), lines)


def _times(rows: list[dict[str, Any]]) -> str:
    columns = ("kind", "injected", "detection, median (s)", "max", "recovery, median (s)", "max")
    keys = ("injected", "detection_s_p50", "detection_s_max", "recovery_s_p50", "recovery_s_max")
    return markdown.table(
        columns,
        [(row["kind"], *(figure(row[key]) for key in keys)) for row in rows],
    )


def faults_slow() -> str:
    """Seconds of a step, by fleet and rules."""
    columns = ("fleet", "rules", "max_staleness", "training step (s)")
    return markdown.table(columns, [
        (FLEETS[row["fleet"]], RULES[row["rules"]], figure(row["S"]), f"{row['step_s']:.2f}")
        for row in _read("slow_fleet")["rows"]
    ])  # fmt: skip


def _read(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
