"""The first hour on a GPU: runs the stages of `gpu_stages.py` one after another.

    python benchmarks/gpu_hour.py                        all stages, on the first visible GPU
    python benchmarks/gpu_hour.py --ten-minutes          the first four
    python benchmarks/gpu_hour.py --only kernels fsdp    these, in this order
    python benchmarks/gpu_hour.py --tiny --device cpu    anywhere: shows that all of it runs
    python benchmarks/gpu_hour.py --tiny --at-once 6     on a GPU, six stages at a time: finds what fails

Each stage has its own process and time limit, and a stage that fails or hangs stops no other. Figures go to
OUT/gpu.json, which is written again after each stage, and what the stages print to OUT/gpu.log. The exit code
is 0, or the number of the first stage that failed, in the order of `--list`.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import IO, Any

import psutil
from gpu_stages import STAGES

from report import git, machine

TEN_MINUTES = ("doctor", "gradient", "demo", "arrivals")
MARK = "DORA_GPU_STAGE"  # environment variable of all processes of a stage
NUM_REHEARSED = 2  # stages at a time on a CPU, where figures do not count
NUM_LOG_LINES = 15  # printed of a stage that failed


def run_stage(name: str, options: list[str], limit_s: float, log: IO[bytes]) -> dict[str, Any]:
    """Run a stage to its end or its time limit, append what it prints to `log`, and return its figures.

    Until then it prints to a file beside the log, which stays if this process is killed.
    """
    own_log = Path(log.name).with_name(f"{name}.log")
    with tempfile.TemporaryDirectory() as folder, own_log.open("w+b") as printed:
        rows = Path(folder) / "rows.jsonl"
        rows.touch()
        script = str(Path(__file__).with_name("gpu_stages.py"))
        command = [sys.executable, script, name, "--rows", str(rows), *options]
        started_s = time.monotonic()
        mark = secrets.token_hex(8)
        environment = {**os.environ, MARK: mark}
        process = subprocess.Popen(command, stdout=printed, stderr=printed, env=environment)
        try:
            code: int | str = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = f"stopped after {limit_s:g} s"
        finally:
            kill_marked(mark)
            process.wait()
        found = [json.loads(line) for line in rows.read_text().splitlines()]
        printed.seek(0)
        text = printed.read()
    result: dict[str, Any] = {"stage": name, "exit_code": code, "wall_s": time.monotonic() - started_s}
    log.write(text)
    log.flush()
    own_log.unlink()
    if code != 0:
        result["log"] = text.decode(errors="replace").splitlines()[-NUM_LOG_LINES:]
    return result | {"rows": found}


def kill_marked(mark: str) -> None:
    """Kill all processes of a stage that still run, also those whose parent has exited."""
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get(MARK) == mark:
                process.kill()


def write_results(path: Path, results: list[dict[str, Any]], at_once: int) -> None:
    draft = path.with_suffix(".draft")
    content = {"machine": machine(), "git": git(), "stages_at_once": at_once, "stages": results}
    draft.write_text(json.dumps(content, indent=1, default=str) + "\n", encoding="utf-8")
    os.replace(draft, path)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--ten-minutes", action="store_true")
    parser.add_argument("--only", nargs="+", choices=STAGES, metavar="STAGE")
    parser.add_argument("--limit-s", type=float, default=float("inf"), help="at most this for each stage")
    parser.add_argument(
        "--at-once", type=int, metavar="NUM",
        help="stages at a time, whose times then mean nothing; `faults` must run alone (default: 1, "
        "or 2 with --tiny on the CPU)",
    )  # fmt: skip
    parser.add_argument("--list", action="store_true", help="the stages, their numbers and time limits")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "gpu-results")))
    given = parser.parse_args()
    numbers = {name: number for number, name in enumerate(STAGES, start=1)}
    if given.list:
        for name, stage in STAGES.items():
            print(f"{numbers[name]:>2}  {name:<12} {stage.limit_s:>4} s")
        return 0
    names = given.only or (TEN_MINUTES if given.ten_minutes else tuple(STAGES))
    options = ["--device", given.device, *["--tiny"] * given.tiny]
    given.out.mkdir(parents=True, exist_ok=True)
    results: list[dict[str, Any]] = []
    with (given.out / "gpu.log").open("wb") as log, ExitStack() as stack:
        at_once = given.at_once or (NUM_REHEARSED if given.tiny and given.device == "cpu" else 1)
        threads = stack.enter_context(ThreadPoolExecutor(at_once))
        limits = [min(given.limit_s, STAGES[name].limit_s) for name in names]
        run = partial(run_stage, log=log)
        for name, result in zip(names, threads.map(run, names, repeat(options), limits), strict=True):
            results.append(result)
            write_results(given.out / "gpu.json", results, at_once)
            is_failed = result["exit_code"] != 0
            state = f"FAILED ({result['exit_code']})" if is_failed else "passed"
            print(f"{numbers[name]:>2}  {name:<12} {state} in {result['wall_s']:.1f} s", flush=True)
            print("".join(f"      {line}\n" for line in result.get("log", ())), end="", flush=True)
    failed = [result["stage"] for result in results if result["exit_code"] != 0]
    print(f"failed: {', '.join(failed)}" if failed else "all stages passed")
    return min((numbers[name] for name in failed), default=0)


if __name__ == "__main__":
    sys.exit(main())
