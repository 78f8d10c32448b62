"""Fuzz the service of a run with schemathesis: every operation, with valid and invalid bodies.

Two runs are fuzzed: one with agents, and one whose prompts, rewards and trainer are external. schemathesis
generates calls from the service's OpenAPI description. No response may have a status of 500 or more, or
differ from the description. Operations that start or end processes are left out. schemathesis is not a
dependency of the project: pip install schemathesis.

    python benchmarks/serve_fuzz.py [--quick] [--json FILE]
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from finished_run import audited_summary
from serve import EXAMPLE, start, stop

from report import parse_options, publish

SETTINGS = "[parameters]\nwait_s = 0\n"  # no call waits
LEFT_OUT = "/v1/engines|/s/.*/chat"  # the second waits up to 30 s for an episode, and then answers 503
# A schema cannot express every rule (such as the length of a prompt), so valid bodies may be rejected.
NOT_CHECKED = "positive_data_acceptance"


def fuzz(folder: Path, address: dict[str, str], is_quick: bool) -> dict[str, Any]:
    """The report of schemathesis."""
    settings, report = folder / "schemathesis.toml", folder / "report.json"
    settings.write_text(SETTINGS)
    phases = "coverage" if is_quick else "examples,coverage,fuzzing,stateful"
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis as run; run()"]
    command += ["--config-file", str(settings), "run", f"{address['url']}/openapi.json"]
    command += ["-H", f"Authorization: Bearer {address['token']}", "--report-json-path", str(report)]
    command += ["--exclude-path-regex", LEFT_OUT, "--exclude-checks", NOT_CHECKED, "--phases", phases]
    command += ["--max-examples", "50", "--seed", "1", "--request-timeout", "60"]
    command += ["--suppress-health-check", "all"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    print(done.stdout, done.stderr)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


# Kind of run -> its example and overrides.
RUNS: dict[str, tuple[Path, dict[str, object]]] = {
    "agents": (EXAMPLE, {}),
    "external": (
        EXAMPLE.with_name("gcd.toml"),
        {
            "service__trainer": "external",
            "data__path": "service",
            "reward__function": "service",
            "eval__num_prompts": 0,
        },
    ),
}


def measure(example: Path, changes: dict[str, object], is_quick: bool) -> dict[str, float]:
    """Counts of one fuzzed run."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        out, log = folder / "run", folder / "log"
        run = start(out, log, example, **changes)
        began_s = time.monotonic()
        try:
            found = fuzz(folder, json.loads((out / "service.json").read_text()), is_quick)
            seconds = time.monotonic() - began_s
            stop(run)
        finally:
            run.kill()
        log_text = log.read_text()
        audited_summary(out)
    assert "Traceback" not in log_text, log_text
    errors = [failure for failure in found["failures"] if failure["type"] == "ServerError"]
    return {
        "operations": found["operations"]["tested"],
        "calls": found["test_cases"]["generated"],
        "kinds_of_failures": found["test_cases"]["unique_failures"],
        "answers_of_500_or_more": sum(failure["count"] for failure in errors),
        "seconds": seconds,
    }


def main() -> None:
    options = parse_options(str(__doc__))
    ratios = {
        f"{kind}/{name}": number
        for kind, (example, changes) in RUNS.items()
        for name, number in measure(example, changes, options.quick).items()
    }
    publish(options, [], ratios)


if __name__ == "__main__":
    main()
