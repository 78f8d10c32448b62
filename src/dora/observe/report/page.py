"""The page: a template with style, script and the runs' data inside, and the command that writes it.

What is on it is drawn by the scripts in `assets`, which read nothing but the data inside.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from dora.errors import InputError
from dora.observe.report.reading import NUM_SAMPLES, Data, run_data

SCRIPTS = ("base", "charts", "lanes", "timeline", "samples", "sections", "main")  # in this order
FILE_NAME = "report.html"


def main(runs: Sequence[Path], out: Path | None, num_samples: int = NUM_SAMPLES) -> int:
    """Write the report of runs and print where it is. Raises InputError for what is no run, or no place."""
    text = page([run_data(run, num_samples) for run in runs])
    path = out or runs[0] / FILE_NAME
    draft = path.with_name(path.name + ".draft")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        raise InputError(f"{path} cannot be written ({error.strerror}): name a file with --out") from error
    print(f"{path}  {len(text.encode()) / 1e6:.1f} MB, opens in any browser, needs no network")
    return 0


def page(runs: Sequence[Data], live: bool = False) -> str:
    """One HTML file with everything in it. `live`: it asks its server, and only that, for what is new."""
    names = ", ".join(str(run["name"]) for run in runs)
    told = {
        "@CONNECT@": "'self'" if live else "'none'",
        "@KIND@": "dash" if live else "report",
        "@FOOT@": "It asks nobody but that." if live else "This page needs no network and loads nothing.",
        "@LIVE@": "true" if live else "false",
        "@TITLE@": html.escape(f"{names} - DORA"),
        "@STYLE@": _asset("report.css"),
        "@SCRIPT@": "\n".join(_asset(f"{name}.js") for name in SCRIPTS),
        "@DATA@": payload(runs),
    }
    # In one go, for what is put in may hold any text.
    return re.sub("|".join(told), lambda mark: told[mark[0]], _asset("page.html"))


def payload(runs: Sequence[Data]) -> str:
    """The runs as JSON in which nothing can end a script element; what is not finite is null."""
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


def _asset(name: str) -> str:
    return resources.files(__package__).joinpath("assets", name).read_text(encoding="utf-8")
