"""The HTML page: a template with style, scripts and the data of the runs."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dora.atomic_file import write_text_atomically
from dora.errors import InputError
from dora.report.data import NUM_SAMPLES, JsonObject, run_data

SCRIPTS = ("base", "charts", "lanes", "timeline", "samples", "sections", "main")  # in this order
REPORT_FILE = "report.html"


def write_report(runs: Sequence[Path], out: Path | None, num_samples: int = NUM_SAMPLES) -> Path:
    """Write the report of runs, by default into the first one; returns its path.

    Raises InputError for a missing run or a bad `out`.
    """
    text = render_page([run_data(run, num_samples) for run in runs])
    path = out or runs[0] / REPORT_FILE
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomically(path, text)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): name a file with --out") from error
    return path


def render_page(runs: Sequence[JsonObject], live: bool = False) -> str:
    """One self-contained HTML file. A `live` page fetches new data from its server, and from nowhere else."""
    names = ", ".join(str(run["name"]) for run in runs)
    values = {
        "@CONNECT@": "'self'" if live else "'none'",
        "@KIND@": "dash" if live else "report",
        "@FOOT@": "It connects to that server only." if live else "This page needs no network.",
        "@LIVE@": "true" if live else "false",
        "@TITLE@": html.escape(f"{names} - DORA-RL"),
        "@STYLE@": _read_asset("report.css"),
        "@SCRIPT@": "\n".join(_read_asset(f"{name}.js") for name in SCRIPTS),
        "@DATA@": render_payload(runs),
    }
    # One pass, because an inserted text may contain a placeholder.
    return re.sub("|".join(values), lambda match: values[match[0]], _read_asset("page.html"))


def render_payload(runs: Sequence[JsonObject]) -> str:
    """The runs as JSON that cannot end a script element; values that are not finite become null."""
    try:
        text = json.dumps(runs, separators=(",", ":"), allow_nan=False)
    except ValueError:
        text = json.dumps(_finite(runs), separators=(",", ":"), allow_nan=False)
    return text.replace("<", "\\u003c")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {name: _finite(own) for name, own in value.items()}
    return [_finite(own) for own in value] if isinstance(value, list | tuple) else value


def _read_asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
