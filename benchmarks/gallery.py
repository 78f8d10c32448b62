"""The examples that run offline on a CPU: duration, accuracy before and after, and the training curve.

Every example runs as docs/gallery.md says, with seed 0, one after the other. "before" and "after" are mean
rewards of one sampled response to each held-out prompt, unless `measure` says otherwise. A point of a curve
is the mean reward of the samples of several consecutive steps. --quick runs three steps of every example.
--only NAME runs one example; --keep FOLDER keeps the run folders and what the commands printed.
"""

from __future__ import annotations

import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from finished_run import audited_summary, rewards_of

from report import Row, make_parser, options_of, publish

ROOT = Path(__file__).parent.parent
MAX_POINTS = 40  # of a curve
EDGE_STEPS = 5  # steps at each end that are averaged where nothing is held out
QUICK_STEPS = 3
START_TIMEOUT_S = 300.0
HELD_OUT, PROMPTS, TRAINED = "held-out prompts", "training prompts", "samples of the first and last 5 steps"


@dataclass(frozen=True)
class Example:
    """What to run: `dora VERB CONFIG`, with a second program beside `dora serve`."""

    config: str  # relative to the repository
    verb: str = "train"
    settings: tuple[str, ...] = ()
    client: str = ""  # program and options; RUN is the run's folder
    measure: str = HELD_OUT


EXAMPLES = {
    "gcd": Example("examples/gcd.toml"),
    "own_task": Example("examples/own_task/sevens.toml", measure=PROMPTS),
    "second_reward": Example("examples/second_reward/second_reward.toml", measure=PROMPTS),
    "calculator": Example("examples/calculator/calculator.toml"),
    "game": Example("examples/game/game.toml"),
    "chains": Example("examples/verifiable/chains.toml"),
    "countdown": Example("examples/verifiable/countdown.toml"),
    "stories": Example("examples/verifiable/stories.toml"),
    "sorting": Example("examples/verifiable/sorting.toml"),
    "agents": Example(
        "examples/agents.toml", "serve", client="examples/external_agent.py RUN", measure=TRAINED
    ),
    "external_trainer": Example(
        "examples/gcd.toml",
        "serve",
        ("service.trainer=external", "run.steps=60"),
        "examples/external_trainer.py RUN --model examples/gcd-start",
    ),
}
SYNCHRONOUS = "synchronous"  # a program of its own


class Result(NamedTuple):
    """What one example has done; `rewards` has the mean reward of each step."""

    minutes: float
    before: float
    after: float
    measure: str
    rewards: list[float]


def main() -> None:
    parser = make_parser(__doc__ or "")
    names = [*EXAMPLES, SYNCHRONOUS]
    parser.add_argument("--only", choices=names, action="append", help="run this example; repeatable")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep run folders and output here")
    given = parser.parse_args()
    options = options_of(given)
    rows: list[Row] = []
    points: list[Row] = []
    gains = {}
    with ExitStack() as stack:
        folder = given.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for name in given.only or names:
            result = run_example(name, folder, options.quick)
            print(f"{name}: {result.before:.3f} -> {result.after:.3f}, {result.minutes:.1f} min", flush=True)
            rows.append(row_of(name, result))
            points += [{"example": name, **point} for point in curve(result.rewards)]
            gains[f"{name}_gain"] = result.after - result.before
    publish(options, [*rows, *points], gains)


def row_of(name: str, result: Result) -> Row:
    """A line of the gallery's table."""
    return {
        "example": name,
        "steps": len(result.rewards),
        "minutes": round(result.minutes, 2),
        "before": round(result.before, 4),
        "after": round(result.after, 4),
        "measure": result.measure,
    }


def curve(rewards: list[float]) -> Iterator[dict[str, float]]:
    """Means of consecutive steps; `step` is the last one of them, from 1."""
    width = -(-len(rewards) // MAX_POINTS)
    for start in range(0, len(rewards), width):
        part = rewards[start : start + width]
        yield {"step": start + len(part), "reward": round(statistics.fmean(part), 4)}


def run_example(name: str, folder: Path, quick: bool) -> Result:
    """Run one example and read what it has left."""
    out = (folder / name).resolve()
    began_s = time.monotonic()
    with (folder / f"{name}.log").open("w+", encoding="utf-8") as log:
        if name == SYNCHRONOUS:
            before, after, rewards = run_synchronous(log, quick)
            return Result(_minutes_since(began_s), before, after, HELD_OUT, rewards)
        example = EXAMPLES[name]
        run_dora(example, out, log, quick)
    minutes = _minutes_since(began_s)
    summary, rewards = audited_summary(out), rewards_of(out)
    before, after = summary["eval_before"], summary["eval_after"]
    if example.measure == TRAINED:
        before, after = statistics.fmean(rewards[:EDGE_STEPS]), statistics.fmean(rewards[-EDGE_STEPS:])
    return Result(minutes, before, after, example.measure, rewards)


def run_dora(example: Example, out: Path, log: Any, quick: bool) -> None:
    """`dora train`, or `dora serve` with its client, until it has ended."""
    settings = [*example.settings, *([f"run.steps={QUICK_STEPS}"] if quick else [])]
    command = [sys.executable, "-m", "dora", example.verb, example.config, "--out", str(out), "--seed", "0"]
    command += [part for setting in settings for part in ("--set", setting)]
    if not example.client:
        subprocess.run(command, check=True, stdout=log, stderr=log, cwd=ROOT, env=_environment())
        return
    with _started(command, log) as server:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (out / "service.json").is_file():
            if server.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"{out.name}: the service did not start, see its log")
            time.sleep(0.1)
        words = [word.replace("RUN", str(out)) for word in shlex.split(example.client)]
        with _started([sys.executable, *words], log):
            if server.wait() != 0:
                raise RuntimeError(f"{out.name}: dora serve failed, see its log")


def run_synchronous(log: Any, quick: bool) -> tuple[float, float, list[float]]:
    """examples/synchronous.py; what it prints has its figures."""
    code = f"import synchronous; synchronous.main(num_steps={QUICK_STEPS})"
    program = ["-c", code] if quick else ["examples/synchronous.py"]
    environment = _environment() | {"PYTHONPATH": f"{ROOT / 'examples'}:{os.environ.get('PYTHONPATH', '')}"}
    found = subprocess.run(
        [sys.executable, *program], check=True, capture_output=True, text=True, cwd=ROOT, env=environment
    )
    log.write(found.stdout)
    before, after = (
        float(value) / 100 for value in re.findall(r"accuracy \w+ training: (\d+)%", found.stdout)
    )
    return before, after, [float(value) for value in re.findall(r"reward (\d\.\d+)", found.stdout)]


@contextmanager
def _started(command: list[str], log: Any) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is ended at the end of the block if it still runs."""
    process = subprocess.Popen(command, stdout=log, stderr=log, cwd=ROOT, env=_environment())
    try:
        yield process
    finally:
        try:
            process.wait(timeout=10.0 if sys.exc_info()[0] is None else 0.0)
        except subprocess.TimeoutExpired:
            process.terminate()
            process.wait()


def _environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def _minutes_since(began_s: float) -> float:
    return (time.monotonic() - began_s) / 60


if __name__ == "__main__":
    main()
