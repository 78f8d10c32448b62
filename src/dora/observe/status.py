"""`dora status`: where a run stands, who gives signs of life and who waits for whom, from one file alone.

The driver writes `status.json` about once a second, and a last time at its end. Nothing here takes part in a
run, so nothing here can stop one.
"""

from __future__ import annotations

import contextlib
import json
import platform
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import psutil
from rich.console import Console
from rich.table import Table

from dora.core.waits import Wait
from dora.core.wording import counted
from dora.errors import InputError
from dora.observe.nearby import why_no_run

FILE_NAME = "status.json"
SCHEMA = 2
DRIVER = Path("control") / "process.json"  # names the driver, from before it starts any process
QUIET_S = 10.0  # a driver that goes writes about once a second
QUIET_ELSEWHERE_S = 60.0  # on another machine, whose processes cannot be seen and whose clock may differ

State = Literal["running", "stalled", "silent", "finished", "stopped", "failed", "died"]
GOOD: tuple[State, ...] = ("running", "finished", "stopped")


@dataclass(frozen=True)
class Standing:
    """What is to be said of a run; `told` is what its driver wrote last, empty for one that wrote nothing."""

    state: State
    sentence: str
    told: Mapping[str, Any]


def standing_of(run: Path) -> Standing:
    """Where the run in a folder stands. Raises InputError if it is not the folder of a run."""
    path = run / FILE_NAME
    try:
        if (starting := _starting(run)) is not None:
            return starting
        told = json.loads(path.read_bytes())
        if told.get("schema") != SCHEMA:
            raise InputError(f"{path}: schema is {told.get('schema')!r}, this version reads {SCHEMA}")
        return _judge(run, told, time.time() - told["unix_s"])
    except FileNotFoundError:
        return _without_file(run)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): give the folder of a run") from error


def is_alive(pid: int, created_s: float) -> bool:
    """Whether the process of this machine that has this number is the one created then, and has not ended."""
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - created_s) < 1.0 and process.is_running()
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def describe(found: Iterable[Wait], now_s: float) -> list[str]:
    """A sentence for each wait."""
    return [f"{w.who} waits for {w.on}: {w.what}{_since(w, now_s, ', for ')}" for w in found]


def main(run: Path, as_json: bool) -> int:
    """Print where a run stands; 0 if nothing is wrong with it, else 1."""
    standing = standing_of(run)
    if as_json:
        print(json.dumps({"verdict": standing.state, "sentence": standing.sentence, **standing.told}))
    else:
        console = Console(markup=False, emoji=False, highlight=False)
        console.print(f"{run}: {standing.sentence}", soft_wrap=True)
        for part in _parts(standing.told):
            console.print(part, soft_wrap=isinstance(part, str))
    return 0 if standing.state in GOOD else 1


def _judge(run: Path, told: Mapping[str, Any], age_s: float) -> Standing:
    where = f"{told['phase']}, {told['steps']} of {counted(told['num_steps'], 'step')} trained"
    go_on = f"dora train --resume {run} goes on with it"
    match told["state"]:
        case "finished":
            return Standing("finished", f"finished, {counted(told['steps'], 'step')} trained", told)
        case "stopped":
            return Standing("stopped", f"stopped by {told['why']}; {where}; {go_on}", told)
        case "failed":
            return Standing("failed", f"failed: {told['why']}; {where}; {go_on}", told)
    is_here = told["host"] == platform.node()
    last = f"its driver, process {told['pid']}" + ("" if is_here else f" on {told['host']}")
    if is_here and not is_alive(told["pid"], told["created_s"]):
        return Standing("died", f"died: {last}, is gone; {where}; {go_on}", told)
    if age_s > (QUIET_S if is_here else QUIET_ELSEWHERE_S):
        return Standing("silent", f"silent: {last}, has written nothing for {_time(age_s)}; {where}", told)
    if told["idle_s"] > told["patience_s"]:
        return Standing(
            "stalled", f"stalled: nothing has happened for {_time(told['idle_s'])}; {where}", told
        )
    return Standing("running", f"running: {where}", told)


def _starting(run: Path) -> Standing | None:
    """Of a driver that is there and has written nothing yet, as while a cluster has no room for the run."""
    try:
        driver = json.loads((run / DRIVER).read_bytes())
        pid, created_s = int(driver["pid"]), float(driver["created_s"])
        with contextlib.suppress(FileNotFoundError):
            told = json.loads((run / FILE_NAME).read_bytes())
            if told["pid"] == pid and abs(told["created_s"] - created_s) < 1.0:
                return None
    except (OSError, ValueError, KeyError, TypeError):
        return None
    if not is_alive(pid, created_s):
        return None
    passed = _time(time.time() - created_s)
    return Standing(
        "running",
        f"starting, for {passed}: its processes are not all there yet, and its log says what it waits for",
        {},
    )


def _without_file(run: Path) -> Standing:
    """Of a run that an older version made, or that died before it began."""
    summary, journal = run / "summary.json", run / "journal.jsonl"
    if summary.is_file():
        why = json.loads(summary.read_bytes()).get("stopped")
        return Standing("stopped", f"stopped by {why}", {}) if why else Standing("finished", "finished", {})
    if journal.is_file():
        return Standing("died", f"died, and left no {FILE_NAME}", {})
    raise InputError(why_no_run(run, FILE_NAME))


def _parts(told: Mapping[str, Any]) -> list[Table | str]:
    """What follows the first sentence."""
    parts: list[Table | str] = []
    if told.get("processes"):
        parts.append(_processes(told["processes"]))
    parts += [
        f"{restart['who']} is started again in {_time(restart['in_s'])}"
        for restart in told.get("restarts", ())
    ]
    found = [Wait(**wait) for wait in told.get("waits", ())]
    if found:
        parts.append(_waits(found, told["t_s"]))
        owners = ", ".join(told["owners"]) or "each other: that is a mistake of DORA's own, please report it"
        parts.append(f"{found[0].who} waits, in the end, for {owners}")
    return parts


def _processes(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("process", "pid", "last heard", "may be silent for", "is at", title_justify="left")
    for row in rows:
        cells = (_time(row["heard_s"]) + " ago", _time(row["limit_s"]), row["at"])
        where = f" on {row['node']}" if row.get("node") else ""
        table.add_row(row["name"], f"{row['pid']}{where}", *cells)
    return table


def _waits(found: Sequence[Wait], now_s: float) -> Table:
    table = Table("who", "waits for", "what", "for")
    for wait in found:
        table.add_row(wait.who, wait.on, wait.what, _since(wait, now_s))
    return table


def _since(wait: Wait, now_s: float, before: str = "") -> str:
    return "" if wait.since_s is None else before + _time(now_s - wait.since_s)


def _time(seconds: float) -> str:
    """As a person says it."""
    if seconds < 120:
        return f"{max(0.0, seconds):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
