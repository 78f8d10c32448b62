"""schemathesis against a run that is served: every operation, with bodies as they should be and should not.

Twice: a run that agents play, and one whose prompts, rewards and trainer are outside. It reads what the
service says of itself and makes calls up from it; no answer may have a status of 500 or more, nor be
another than the service's description allows. Operations that start or end processes are left out.
schemathesis is no part of the project: pip install schemathesis.

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

from serve import EXAMPLE, start, stop

from dora.audit import audit
from report import parse_options, publish

SETTINGS = "[parameters]\nwait_s = 0\n"  # nothing waits for what does not come
LEFT_OUT = "/v1/engines"
# Whether a prompt fits, say, is no matter of a schema: a refusal in words is as good as an acceptance.
NOT_CHECKED = "positive_data_acceptance"


def fuzz(folder: Path, address: dict[str, str], is_quick: bool) -> dict[str, Any]:
    """What schemathesis reports."""
    settings, report = folder / "schemathesis.toml", folder / "report.json"
    settings.write_text(SETTINGS)
    phases = "coverage" if is_quick else "examples,coverage,fuzzing,stateful"
    command = [sys.executable, "-c", "from schemathesis.cli import schemathesis as run; run()"]
    command += ["--config-file", str(settings), "run", f"{address['url']}/openapi.json"]
    command += ["-H", f"Authorization: Bearer {address['token']}", "--report-json-path", str(report)]
    command += ["--exclude-path-regex", LEFT_OUT, "--exclude-checks", NOT_CHECKED, "--phases", phases]
    command += ["--max-examples", "50", "--seed", "1", "--request-timeout", "60"]
    command += ["--suppress-health-check", "all"]
    said = subprocess.run(command, capture_output=True, text=True, cwd=folder)
    print(said.stdout, said.stderr)
    found: dict[str, Any] = json.loads(report.read_text())
    return found


# Kind of run -> its example and what is changed.
RUNS: dict[str, tuple[Path, dict[str, object]]] = {
    "agents": (EXAMPLE, {}),
    "outside": (
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
    """What came of one run."""
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
        told, verdict = log.read_text(), audit.check(out)
    assert "Traceback" not in told, told
    assert (verdict.c1, verdict.c2, verdict.c3) == (True, True, True)
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
