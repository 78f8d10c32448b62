"""The tables that compare update policies, other trainers, servers of other engines, and clusters."""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from docs.making import markdown

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"
Found = Mapping[str, Any]
WORKLOADS = {  # name and pace of each table
    "policies_tail": ("tail", "none"),
    "policies_tail_paced": ("tail", "9ms"),
    "policies_light": ("light", "none"),
    "policies_light_paced": ("light", "9ms"),
    "policies_demo": ("demo", "none"),
}
TITLES = {  # of columns whose key is not the field's term
    "tokens_per_s": "tokens/s",
    "samples_per_s": "samples/s",
    "occupancy": "rollout utilisation",
    "staleness": "mean staleness",
    "staleness_mean": "mean staleness",
    "staleness_max": "max staleness",
    "versions": "live versions",
    "reprefilled": "tokens prefilled again",
    "discarded": "samples discarded",
    "to_accuracy_s": "s to the accuracy",
    "accuracy_after": "accuracy",
    "peak_MB": "peak MB",
    "generated_tokens": "mean length generated",
    "trained_tokens": "mean length trained",
    "reward_last": "last reward",
}
FIXED = ("sync", "sync, streamed", "one_step")  # their bound is theirs by definition
BREAKS_C1 = ("partial", "inflight")
RIVALS = ("sync", "one_step", "drain", "partial", "inflight")


def tables() -> dict[str, Callable[[], str]]:
    """Table name -> function that writes it."""
    runs = {name: partial(runs_of, *which) for name, which in WORKLOADS.items()}
    ratios = {f"{name}_ratios": partial(ratios_of, *which) for name, which in WORKLOADS.items()}
    fleets = {f"{server}_fleet": partial(fleet, server) for server in ("vllm", "sglang")}
    others = {"policies_ladder": ladder, "headline": headline, "peers": peers, "peers_async": peers_async}
    others |= {"policies_vllm": policies_vllm}
    for server in ("vllm", "sglang"):
        others |= {f"{server}_versions": partial(versions, server)}
        others |= {f"{server}_moves": partial(server_moves, server)}
    others |= {"cluster_paths": paths, "cluster_held": held, "direct_ways": direct_ways}
    return {**runs, **ratios, **fleets, **others}


def runs_of(workload: str, pace: str) -> str:
    """Every policy at every bound: medians of its runs."""
    runs = [row for row in rows("policies") if "seed" in row and _is_of(row, workload, pace)]
    return medians([{**row, "policy": f"`{row['policy']}`"} for row in runs], ("policy", "S"), COLUMNS)


COLUMNS = (
    ("tokens_per_s", "{:,.0f}"),
    ("occupancy", "{:.2f}"),
    ("stall_s", "{:.2f}"),
    ("exposed_s", "{:.2f}"),
    ("trainer_idle", "{:.2f}"),
    ("staleness", "{:.1f}"),
    ("versions", "{:.1f}"),
    ("migrations", "{:.0f}"),
    ("reprefilled", "{:,.0f}"),
)


def policies_vllm() -> str:
    """Every policy with vLLM servers, and `dora` over it there and with DORA-RL's own engines."""
    found: dict[tuple[str, str, str], Found] = {}
    for row in rows("policies_vllm"):
        found[row["pace"], row["engine"], row["policy"]] = row
    lines = []
    for (pace, engine, policy), row in found.items():
        if engine != "vllm":
            continue
        gains = [
            found[pace, kind, "dora"]["tokens_per_s"] / found[pace, kind, policy]["tokens_per_s"]
            for kind in ("vllm", "dora")
        ]
        cells = [form.format(row[key]) for key, form in OF_POLICIES_VLLM]
        speed = "full" if pace == "none" else f"{pace} a step"
        lines.append([speed, f"`{policy}`", str(row["S"]), *cells, *(f"{gain:.2f}" for gain in gains)])
    titles = (TITLES.get(key, key.replace("_", " ")) for key, _ in OF_POLICIES_VLLM)
    return markdown.table(
        ("speed", "policy", "S", *titles, "`dora` over it", "the same, DORA-RL's engines"), lines
    )


OF_POLICIES_VLLM = tuple(
    column for column in COLUMNS if column[0] not in ("trainer_idle", "staleness", "versions", "stall_s")
)


def versions(server: str) -> str:
    """Tokens per second and memory of a server, by slots and versions that generate."""
    measured = [row for row in rows(f"{server}_server") if "versions" in row]
    lines = []
    for row in measured:
        (alone,) = (r for r in measured if (r["model"], r["slots"]) == (row["model"], 1))
        over = row["tokens_per_s"] / alone["tokens_per_s"]
        counts = f"{row['slots']}", f"{row['versions']}", f"{row['tokens_per_s']:,.0f}", f"{over:.2f}"
        lines.append([row["model"], *counts, f"{row['server_mb']:,.0f}"])
    heads = ("model", "slots", "versions", "tokens/s", "over one slot", "MB of the server")
    return markdown.table(heads, lines)


def server_moves(server: str) -> str:
    """How long a request stops that moves between two servers, with its KV and without."""
    lines = []
    for row in rows(f"migration_{server}"):
        stops = f"{row['stop_ms']:.0f}", f"{row['prefill_stop_ms']:.0f}", f"{row['ratio']:.1f}"
        lines.append([f"`{row['kv_connector']}`", f"{row[f'{server}_tokens']:,}", *stops])
    heads = ("`kv_connector`", "tokens", "stop with KV (ms)", "stop without KV (ms)", "ratio")
    return markdown.table(heads, lines)


def ratios_of(workload: str, pace: str) -> str:
    """Tokens per second of `dora` over those of each other policy, with the range over seeds."""
    found = [row for row in rows("policies") if "rival" in row and _is_of(row, workload, pace)]
    rivals = {row["rival"]: row["rival S"] if row["rival"] in FIXED else None for row in found}
    titles = [f"over `{rival}`, " + ("same S" if s is None else f"S = {s}") for rival, s in rivals.items()]
    lines = []
    for policy, bound in dict.fromkeys((row["policy"], row["S"]) for row in found):
        own = {row["rival"]: row for row in found if (row["policy"], row["S"]) == (policy, bound)}
        lines.append([f"`{policy}`", str(bound), *(_spread(own.get(rival)) for rival in rivals)])
    return markdown.table(("", "S", *titles), lines)


def _spread(row: Found | None) -> str:
    if row is None:
        return ""
    least, most = f"{row['least']:.2f}", f"{row['most']:.2f}"
    return f"{row['faster']:.2f}" + (f" ({least} to {most})" if least != most else "")


def ladder() -> str:
    """The parts of `dora`, added one by one to `sync`."""
    lines = [
        (row["part"], str(row["S"]), f"{row['tokens_per_s']:,.0f}", *(f"{row[key]:.2f}" for key in GAINS))
        for row in rows("policies")
        if "part" in row
    ]
    return markdown.table(("part", "S", "tokens/s", "gain", "over `sync`"), lines)


GAINS = ("gain", "over sync")


def headline() -> str:
    """Tokens per second of `dora` over those of each other policy."""
    ratios = json.loads((RESULTS / "policies.json").read_text(encoding="utf-8"))["ratios"]
    bounds = {row["rival"]: row["rival S"] for row in rows("policies") if "rival" in row and row["S"] == 4}
    lines = [
        (
            f"`{rival}`",
            str(bounds[rival]),
            "no" if rival in BREAKS_C1 else "yes",
            f"{ratios[f'dora_vs_{rival}']:.2f}",
            f"{ratios[f'paced_dora_vs_{rival}']:.2f}",
        )
        for rival in RIVALS
    ]
    columns = ("tokens/s of `dora` over", "S", "keeps C1", "two cores", "paced engines")
    return markdown.table(columns, lines)


def peers() -> str:
    """Every trainer: medians over its seeds."""
    runs = [row for row in rows("peers") if "not_measured" not in row]
    return medians(runs, ("system", "bound"), OF_PEERS)


OF_PEERS = (
    ("samples_per_s", "{:.0f}"),
    ("to_accuracy_s", "{:.0f}"),
    ("accuracy_after", "{:.2f}"),
    ("cpu_s", "{:.0f}"),
    ("peak_MB", "{:,.0f}"),
    ("discarded", "{:.0f}"),
    ("staleness_mean", "{:.1f}"),
    ("staleness_max", "{:.0f}"),
)


def peers_async() -> str:
    """TRL and DORA-RL on vLLM, at each bound."""
    runs = [row for row in rows("peers_async") if "not_measured" not in row]
    return medians(runs, ("system", "S"), (*OF_PEERS_ASYNC, *OF_ANSWERS))


OF_PEERS_ASYNC = tuple(column for column in OF_PEERS if "accuracy" not in column[0])
OF_ANSWERS = (("generated_tokens", "{:.1f}"), ("trained_tokens", "{:.1f}"), ("reward_last", "{:.2f}"))


def fleet(server: str) -> str:
    """Fleets of DORA-RL's engine and servers: responses, migrations, violations."""
    runs = [row for row in rows(f"{server}_fleet") if "run" in row]
    lines = []
    for row in runs:
        with_kv = row["moved_with_kv"]
        moves = sum(value for key, value in row.items() if key.startswith("moved_")) - with_kv
        generated = row["answers_dora"], row[f"answers_{server}"], row["engines_lost"], moves, with_kv
        checked = row["violations"], row["deep_samples"], row["deep_findings"]
        counts = (
            *generated,
            row["reprefill_tokens"],
            row["regenerated_tokens"],
            row["staleness_max"],
            *checked,
        )
        lines.append([row["run"], *(f"{count:,}" for count in counts)])
    return markdown.table(("run", "responses of DORA-RL's engine", "of servers", *OF_FLEETS), lines)


OF_FLEETS = (
    "engines lost",
    "migrations",
    "with KV",
    "tokens prefilled again",
    "tokens regenerated",
    "max staleness",
    "violations of C1 to C3",
    "samples with recomputed log-probs",
    "of them wrong",
)


def held() -> str:
    """Time for which a publish blocks the trainer, by number and step time of the engines."""
    by_load: dict[tuple[int, int], list[float]] = {}
    for row in rows("cluster"):
        if row.get("run") == "publish":
            by_load.setdefault((row["engines"], row["pace_ms"]), []).append(row["held_ms"])
    lines = [
        [str(number), str(pace_ms), _median(held_ms, "{:.1f}")]
        for (number, pace_ms), held_ms in sorted(by_load.items())
    ]
    return markdown.table(("engines", "step time of each (ms)", "trainer blocked (ms)"), lines)


def paths() -> str:
    """Transfers between processes of one node and of two."""
    ways = [row for row in rows("cluster") if "path" in row]
    lines = [[row["path"], f"{row['mb']:.0f}", f"{row['ms']:.0f}", f"{row['gb_per_s']:.2f}"] for row in ways]
    return markdown.table(("transfer", "MB", "ms", "GB/s"), lines)


def direct_ways() -> str:
    """Transfers of a tensor between actors, and the state of senders whose receivers were killed."""
    forms = {"mb": "{:.0f}", "ms": "{:.0f}", "gb_per_s": "{:.2f}", "idle_cpu_share": "{:.2f}"}
    forms |= dict.fromkeys(("kills", "senders_lost", "served_another"), "{}")
    lines = [[row["way"], *(form.format(row[key]) for key, form in forms.items())] for row in rows("direct")]
    heads = (
        "transfer",
        "MB",
        "ms",
        "GB/s",
        "idle cores",
        "receivers killed",
        "senders lost",
        "served another",
    )
    return markdown.table(heads, lines)


def medians(runs: Iterable[Found], names: tuple[str, str], columns: Iterable[tuple[str, str]]) -> str:
    """One line for all runs with equal values of both `names`; columns with their format."""
    runs, columns, lines = list(runs), list(columns), []
    for name, bound in dict.fromkeys((row[names[0]], row[names[1]]) for row in runs):
        own = [row for row in runs if (row[names[0]], row[names[1]]) == (name, bound)]
        lines.append([name, str(bound), *(_median([row[key] for row in own], form) for key, form in columns)])
    return markdown.table(
        (names[0], "S", *(TITLES.get(key, key.replace("_", " ")) for key, _ in columns)), lines
    )


def _median(found: list[Any], form: str) -> str:
    """The median, if the value is a number in every run."""
    if not all(isinstance(value, int | float) for value in found):
        return "-"
    return form.format(statistics.median(found))


def rows(name: str) -> Iterable[Found]:
    """The rows of one file of results."""
    found: list[Found] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))["rows"]
    return found


def _is_of(row: Found, workload: str, pace: str) -> bool:
    return (row["workload"], row["pace"]) == (workload, pace)
