"""`dora status`: the state of a run, its processes and what it waits for, from `status.json` alone.

The driver writes the file about once a second and a last time at the end of the run.
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

from dora.core.wait_graph import WaitEdge
from dora.errors import InputError
from dora.journal.reader import JOURNAL_FILE, SUMMARY_FILE, explain_missing_run
from dora.text import plural

STATUS_FILE = "status.json"
SCHEMA = 3  # 3: processes, restarts and waits have the field's names
DRIVER_FILE = Path("control") / "process.json"  # names the driver from before it starts any process
UNRESPONSIVE_S = 10.0  # a running driver writes about once a second
REMOTE_UNRESPONSIVE_S = 60.0  # on another machine, whose clock may differ and whose processes are not visible

REMOTE_WATCH_S = 5.0  # in which a running driver writes several times
REMOTE_POLL_S = 0.2

RunState = Literal["running", "stalled", "unresponsive", "finished", "stopped", "failed", "crashed"]
HEALTHY: tuple[RunState, ...] = ("running", "finished", "stopped")


@dataclass(frozen=True)
class RunStatus:
    """The state of a run and a sentence about it."""

    state: RunState
    sentence: str
    content: Mapping[str, Any]  # of status.json; empty if there is none


def main(run: Path, as_json: bool) -> int:
    """Print the status of a run; exit code 1 if it is not healthy."""
    status = read_status(run)
    if as_json:
        print(json.dumps({"verdict": status.state, "sentence": status.sentence, **status.content}))
    else:
        console = Console(markup=False, emoji=False, highlight=False)
        console.print(f"{run}: {status.sentence}", soft_wrap=True)
        for part in _details(status.content):
            console.print(part, soft_wrap=isinstance(part, str))
    return 0 if status.state in HEALTHY else 1


def read_status(run: Path) -> RunStatus:
    """The status of the run in a folder. Raises InputError if there is none."""
    path = run / STATUS_FILE
    try:
        if (starting := _read_starting(run)) is not None:
            return starting
        content = json.loads(path.read_bytes())
        if content.get("schema") != SCHEMA:
            raise InputError(f"{path}: schema is {content.get('schema')!r}, this version reads {SCHEMA}")
        return _evaluate(run, content, time.time() - content["unix_s"])
    except FileNotFoundError:
        return _read_without_file(run)
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise InputError(f"{path} cannot be read ({error}): give the folder of a run") from error


def is_alive(pid: int, created_s: float) -> bool:
    """Whether the process of this machine with this pid is running and was created at this time."""
    try:
        process = psutil.Process(pid)
        is_same = abs(process.create_time() - created_s) < 1.0 and process.is_running()
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def driver_of(run: Path) -> psutil.Process | None:
    """The process that drives the run in a folder, if it is alive and on this machine."""
    try:
        driver = json.loads((run / DRIVER_FILE).read_bytes())
        return psutil.Process(driver["pid"]) if is_alive(driver["pid"], driver["created_s"]) else None
    except (OSError, ValueError, KeyError, TypeError, psutil.NoSuchProcess):  # it may exit at any time
        return None


def remote_driver_of(run: Path, watch_s: float = REMOTE_WATCH_S) -> str | None:
    """The other machine, or container, whose driver writes the status of a run; None if there is none.

    Its process is not visible and its clock may differ, so a status that says "running" is watched for
    `watch_s`: it must change twice, because one change may be the last one, which arrives late.
    """
    status = _read_if_whole(run / STATUS_FILE)
    times, end_s = {status.get("unix_s")}, time.monotonic() + watch_s
    while status.get("state") == "running" and status.get("host") != platform.node():
        if len(times) > 2:
            return str(status.get("host"))
        if time.monotonic() > end_s:
            break
        time.sleep(REMOTE_POLL_S)
        status = _read_if_whole(run / STATUS_FILE)
        times.add(status.get("unix_s"))
    return None


def _read_if_whole(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        content = json.loads(path.read_bytes())
        return content if isinstance(content, dict) else {}
    return {}


def describe_waits(waits: Iterable[WaitEdge], now_s: float) -> list[str]:
    """A sentence for each edge of the wait-for graph."""
    return [f"{w.waiter} waits for {w.target}: {w.reason}{_elapsed(w, now_s, ', for ')}" for w in waits]


def _evaluate(run: Path, content: Mapping[str, Any], age_s: float) -> RunStatus:
    """The status of a run whose driver wrote `content` `age_s` seconds ago."""
    progress, result = "an evaluation without training", "the model is evaluated"
    if content["num_steps"]:
        progress = f"{content['phase']}, {content['steps']} of {plural(content['num_steps'], 'step')} trained"
        result = f"{plural(content['steps'], 'step')} trained"
    remedy = f"{content.get('resume_command', 'dora train --resume')} {run} resumes it"
    match content["state"]:
        case "finished":
            return RunStatus("finished", f"finished, {result}", content)
        case "stopped":
            return RunStatus("stopped", f"stopped by {content['reason']}; {progress}; {remedy}", content)
        case "failed":
            return RunStatus("failed", f"failed: {content['reason']}; {progress}; {remedy}", content)
    is_local = content["host"] == platform.node()
    driver = f"driver process {content['pid']}" + ("" if is_local else f" on {content['host']}")
    if is_local and not is_alive(content["pid"], content["created_s"]):
        return RunStatus("crashed", f"crashed: {driver} has exited; {progress}; {remedy}", content)
    if age_s > (UNRESPONSIVE_S if is_local else REMOTE_UNRESPONSIVE_S):
        sentence = f"unresponsive: {driver} has written no status for {_duration(age_s)}; {progress}"
        return RunStatus("unresponsive", sentence, content)
    if content["idle_s"] > content["stall_after_s"]:
        sentence = f"stalled: no progress for {_duration(content['idle_s'])}; {progress}"
        return RunStatus("stalled", sentence, content)
    return RunStatus("running", f"running: {progress}", content)


def _read_starting(run: Path) -> RunStatus | None:
    """The status of a driver that runs and has written no status yet, as while a cluster has no free slot."""
    if (driver := driver_of(run)) is None:
        return None
    try:
        created_s = driver.create_time()
    except psutil.NoSuchProcess:
        return None
    with contextlib.suppress(FileNotFoundError):
        content = json.loads((run / STATUS_FILE).read_bytes())
        if content["pid"] == driver.pid and abs(content["created_s"] - created_s) < 1.0:
            return None
    elapsed = _duration(time.time() - created_s)
    sentence = f"starting, for {elapsed}: not all processes are ready; the log names what they wait for"
    return RunStatus("running", sentence, {})


def _read_without_file(run: Path) -> RunStatus:
    """The status of a run of an older version, or of one that crashed before it wrote its status."""
    summary = run / SUMMARY_FILE
    if summary.is_file():
        reason = json.loads(summary.read_bytes()).get("stopped")
        if reason:
            return RunStatus("stopped", f"stopped by {reason}", {})
        return RunStatus("finished", "finished", {})
    if (run / JOURNAL_FILE).is_file():
        return RunStatus("crashed", f"crashed before it wrote {STATUS_FILE}", {})
    raise InputError(explain_missing_run(run, STATUS_FILE))


# --- printing


def _details(content: Mapping[str, Any]) -> list[Table | str]:
    """What is printed below the sentence."""
    parts: list[Table | str] = []
    if content.get("processes"):
        parts.append(_process_table(content["processes"]))
    parts += [
        f"{restart['worker']} is restarted in {_duration(restart['in_s'])}"
        for restart in content.get("restarts", ())
    ]
    if content.get("missing_agents"):
        parts.append(content["missing_agents"])
    waits = [WaitEdge(**wait) for wait in content.get("waits", ())]
    if waits:
        parts.append(_wait_table(waits, content["t_s"]))
        causes = ", ".join(content["root_causes"]) or "itself: this is a defect of DORA-RL, please report it"
        parts.append(f"{waits[0].waiter} ultimately waits for {causes}")
    return parts


def _process_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("process", "pid", "last message", "timeout", "activity")
    for row in rows:
        cells = (_duration(row["last_message_s"]) + " ago", _duration(row["timeout_s"]), row["activity"])
        node = f" on {row['node']}" if row.get("node") else ""
        table.add_row(row["name"], f"{row['pid']}{node}", *cells)
    return table


def _wait_table(waits: Sequence[WaitEdge], now_s: float) -> Table:
    table = Table("waiting", "for", "reason", "since")
    for wait in waits:
        table.add_row(wait.waiter, wait.target, wait.reason, _elapsed(wait, now_s))
    return table


def _elapsed(wait: WaitEdge, now_s: float, prefix: str = "") -> str:
    return "" if wait.since_s is None else prefix + _duration(now_s - wait.since_s)


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{max(0.0, seconds):.1f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
