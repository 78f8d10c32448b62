"""Join the results of several commands of `gpu_hour.py` in one file of the form of all benchmarks.

    python benchmarks/gpu_results.py FIRST/gpu.json SECOND/gpu.json --json benchmarks/results/gpu.json

The first file may be a joined one. Of a stage that is in several files, the last one counts. A row is a
figure: its stage, the state of the code, how many stages ran at the same time, and the bound if it has one.
A file may name the commit of a working tree that was committed after it was measured, as `committed_as`. The
ratios are the figures with a bound.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def joined(files: list[dict[str, Any]]) -> dict[str, Any]:
    """The content of the joined file. Raises ValueError if the files are of different GPUs."""
    machines = {json.dumps(file["machine"], sort_keys=True) for file in files}
    if len(machines) != 1:
        raise ValueError(f"the files are of {len(machines)} kinds of machines; join those of one kind")
    stages: dict[str, list[dict[str, Any]]] = {}
    for file in files:
        for row in file.get("rows", ()):  # of a joined file
            stages.setdefault(row["stage"], []).append(row)
        for stage in file.get("stages", ()):
            about = {"stage": stage["stage"]}
            about |= {key: file[key] for key in ("git", "committed_as", "stages_at_once") if key in file}
            stages[stage["stage"]] = [about | row for row in stage["rows"]]
    rows = [row for own in stages.values() for row in own]
    ratios = {f"{row['stage']}: {row['what']}": row["value"] for row in rows if "bound" in row}
    return {"machine": files[0]["machine"], "git": files[-1]["git"], "rows": rows, "ratios": ratios}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE")
    parser.add_argument("--json", required=True, type=Path, metavar="FILE", help="the joined file")
    given = parser.parse_args()
    content = joined([json.loads(path.read_text()) for path in given.files])
    given.json.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
