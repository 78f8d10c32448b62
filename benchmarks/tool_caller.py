"""examples/tool_caller in both forms, with three seeds.

`environment` runs the tools in processes of the run, `harness` in a program with OpenAI's client for each
episode; both have the same prompts and tools. `before` and `after` are the shares of held-out questions that
one sampled episode answers correctly. `at_25` to `at_100` are mean rewards of the episodes trained in the
tenth of the run that ends at that percentage. `minutes` is the whole command, with its start and both
evaluations. Seeds and forms take turns, so that other load on the machine affects all of them. --quick runs
one seed for 4 steps, too few to learn.
"""

from __future__ import annotations

import contextlib
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from finished_run import audited_summary, rewards_of

from report import Row, parse_options, publish

EXAMPLE = Path(__file__).parent.parent / "examples" / "tool_caller"
FORMS = ("environment", "harness")
SEEDS = (0, 1, 2)
QUARTERS = (25, 50, 75, 100)
CONCURRENCY = 4  # programs at a time
START_TIMEOUT_S = 300.0


def run(form: str, seed: int, quick: bool) -> Row:
    """One run of a form, and what it has learned."""
    with tempfile.TemporaryDirectory() as folder:
        out, began_s = Path(folder) / "run", time.monotonic()
        options = ["--seed", str(seed), "--out", str(out)]
        options += ["--steps", "4", "--set", "eval.num_prompts=8"] if quick else []
        if form == "environment":
            subprocess.run(_dora("train", str(EXAMPLE / "environment.toml"), *options), **_OUTPUT)
        else:
            _serve(out, options)
        return {"form": form, "seed": seed, **_result(out), "minutes": (time.monotonic() - began_s) / 60}


_OUTPUT = {"check": True, "stdout": subprocess.DEVNULL}


def _dora(*words: str) -> list[str]:
    return [sys.executable, "-m", "dora", *words]


def _serve(out: Path, options: list[str]) -> None:
    """`dora serve` and `dora rollout` until the run has ended."""
    command = _dora("serve", str(EXAMPLE / "harness.toml"), *options)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as server:
        try:
            deadline_s = time.monotonic() + START_TIMEOUT_S
            while not (out / "service.json").is_file():
                if server.poll() is not None or time.monotonic() > deadline_s:
                    raise RuntimeError(f"the service did not start: {' '.join(command)}")
                time.sleep(0.1)
            program = [sys.executable, str(EXAMPLE / "harness.py")]
            concurrency = str(CONCURRENCY)
            subprocess.run(
                _dora("rollout", str(out), "--concurrency", concurrency, "--", *program), **_OUTPUT
            )
        except BaseException:
            server.terminate()
            raise
    assert server.returncode == 0


def _result(out: Path) -> dict[str, int | float]:
    summary, rewards = audited_summary(out), rewards_of(out)
    width = max(1, len(rewards) // 10)
    ends = {percent: len(rewards) * percent // 100 for percent in QUARTERS}
    with contextlib.closing(sqlite3.connect(out / "samples.sqlite")) as samples:
        (episodes,) = samples.execute("select count(*) from samples where state = 'trained'").fetchone()
    return {
        "steps": len(rewards),
        "episodes": episodes,
        "before": summary["eval_before"],
        "after": summary["eval_after"],
        **{f"at_{percent}": statistics.fmean(rewards[end - width : end]) for percent, end in ends.items()},
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    seeds = SEEDS[:1] if options.quick else SEEDS
    rows = [run(form, seed, options.quick) for seed in seeds for form in FORMS]

    def mean(form: str, column: str) -> float:
        return statistics.fmean(float(row[column]) for row in rows if row["form"] == form)

    ratios = {f"{form}_{column}": mean(form, column) for form in FORMS for column in ("after", "minutes")}
    ratios["harness_over_environment_after"] = mean("harness", "after") / mean("environment", "after")
    publish(options, rows, ratios)


if __name__ == "__main__":
    main()
