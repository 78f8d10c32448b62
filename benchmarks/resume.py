"""Kill runs at random times and resume them, many times: what is lost, and the cost of a resume.

The driver and all workers of a small run receive SIGKILL together, after a random number of journal lines.
After each kill the run folder is audited and replayed, and the run is resumed. At the end every group must be
trained once, and every scored sample must be unchanged. Violations make the exit code 1. --kills N sets the
number of kills; --quick is 3.

recovery_s is the time from `dora train --resume` to the first new event; most of it is the start of
processes, which a new run needs as well. redone_tokens were trained before, after the last checkpoint.
regenerated_tokens are those of unfinished answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import sqlite3
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

from dora.audit import audit
from dora.journal import replay
from dora.journal.reader import read_journal
from report import Row, make_parser, options_of, publish

MODEL = Path(__file__).parent.parent / "examples" / "gcd-start"
CONFIG = """
[run]
steps = {steps}
seed = {seed}
[model]
path = "{model}"
[data]
path = "gcd"
max_prompt_length = 8
[sampling]
group_size = 4
max_response_length = 60
[engine]
kernels = "eager"
num_engines = 2
max_num_seqs = 8
min_step_time = "5ms"
[reward]
function = "dora.rewards.gcd:reward"
[trainer]
batch_size = 4
lr = 1e-4
save_freq = 5
[orchestrator]
max_staleness = 3
"""
COMMAND = (sys.executable, "-c", "from dora.cli.main import main; main()", "train")
STEPS_PER_KILL = 4
MAX_LINES = 160  # of the journal that one attempt writes before it is killed
POLL_S = 0.002
TIMEOUT_S = 300.0
Sample = tuple[object, ...]


class Attempt:
    """The processes of a run between its start or resume and its end or kill."""

    def __init__(self, out: Path, arguments: list[str | Path]) -> None:
        self._out = out
        self._journal = out / "journal.jsonl"
        self._num_before = num_lines(self._journal)
        self._started_s = time.monotonic()
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
        self._log = (out.parent / "log.txt").open("w+")
        self.process = subprocess.Popen(
            [*COMMAND, *map(str, arguments)],
            stdout=self._log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    def wait_for_lines(self, count: int) -> float | None:
        """Seconds until the journal has `count` more lines; None if the run ended before."""
        deadline_s = time.monotonic() + TIMEOUT_S
        while num_lines(self._journal) < self._num_before + count:
            if self.process.poll() is not None:
                return None
            if time.monotonic() > deadline_s:
                self.kill()
                raise SystemExit(f"no progress in {self._out} within {TIMEOUT_S:g} s: {self.log()}")
            time.sleep(POLL_S)
        return time.monotonic() - self._started_s

    def kill(self) -> None:
        """Kill the driver and all workers together."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()


def num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.is_file() else 0


def samples(out: Path) -> dict[tuple[str, int], Sample]:
    """(group, sibling) -> tokens, log-probs, version and reward of all scored samples."""
    query = (
        "select group_id, sibling, token_ids, logprobs, version, reward from samples where reward not null"
    )
    with contextlib.closing(sqlite3.connect(out / "samples.sqlite")) as db:
        return {(group, sibling): tuple(rest) for group, sibling, *rest in db.execute(query)}


class Trial:
    """One run, which is killed `num_kills` times."""

    def __init__(self, folder: Path, seed: int, num_kills: int) -> None:
        self.num_kills = 0
        self.findings: list[str] = []
        self.recoveries_s: list[float] = []
        self.summary: dict[str, Any] = {}
        self.torn = 0
        self._rng = random.Random(seed)
        self._out = folder / "run"
        self._scored: dict[tuple[str, int], Sample] = {}
        config = folder / "task.toml"
        config.write_text(CONFIG.format(steps=STEPS_PER_KILL * num_kills, seed=seed, model=MODEL.resolve()))
        arguments: list[str | Path] = [config, "--out", self._out]
        while self._attempt(arguments, is_last=self.num_kills == num_kills):
            arguments = ["--resume", self._out]
        self._check_end()

    def _attempt(self, arguments: list[str | Path], *, is_last: bool) -> bool:
        """Start or resume the run; returns whether it was killed."""
        attempt = Attempt(self._out, arguments)
        began_s = attempt.wait_for_lines(1)
        if self.num_kills and began_s is not None:
            self.recoveries_s.append(began_s)
        if is_last or attempt.wait_for_lines(self._rng.randrange(1, MAX_LINES)) is None:
            if attempt.process.wait(TIMEOUT_S):
                self.findings.append(f"exited with code {attempt.process.returncode}: {attempt.log()}")
            return False
        time.sleep(self._rng.random() * 0.01)
        attempt.kill()
        self.num_kills += 1
        self._check_folder()
        return True

    def _check_folder(self) -> None:
        """Audit and replay the run folder, and check that it has all scored samples."""
        self.findings += audit.check(self._out).findings
        journal = read_journal(self._out)
        self.torn += journal.is_torn
        difference = replay.first_difference(journal)
        if difference is not None and difference.seq < len(journal.lines):
            self.findings.append(f"replay: {difference}")
        found = samples(self._out)
        lost = [key for key, sample in self._scored.items() if found.get(key) != sample]
        self.findings += [f"sample {key} was scored and is lost or changed" for key in lost]
        self._scored = found

    def _check_end(self) -> None:
        """Check after the end that every group was trained once."""
        self._check_folder()
        self.summary = json.loads((self._out / "summary.json").read_text())
        groups = audit.check(self._out).guarantees.groups
        if (groups.outcomes["pending"], groups.outcomes["trained"]) != (0, groups.num_admitted):
            self.findings.append(f"{groups.num_admitted} groups admitted: {groups.outcomes}")


def main() -> None:
    parser = make_parser(__doc__ or "")
    parser.add_argument(
        "--kills", type=int, metavar="N", help="number of kills (default: 50; 3 with --quick)"
    )
    given = parser.parse_args()
    options, kills_per_run = options_of(given), 10
    num_left = given.kills or (3 if options.quick else 50)
    rows: list[Row] = []
    total: Counter[str] = Counter()
    recoveries_s: list[float] = []
    while num_left > 0:
        with tempfile.TemporaryDirectory() as folder:
            trial = Trial(Path(folder), len(rows), min(kills_per_run, num_left))
        s = trial.summary
        keys = ("steps", "redone_steps", "trained_tokens", "redone_tokens", "regenerated_tokens")
        row: Row = {"seed": len(rows), "kills": trial.num_kills, **{key: s[key] for key in keys}}
        row |= {"torn_lines": trial.torn, "violations": len(trial.findings)}  # type: ignore[operator]
        rows.append(row)
        total.update({key: value for key, value in row.items() if isinstance(value, int) and key != "seed"})
        recoveries_s += trial.recoveries_s
        num_left -= max(1, trial.num_kills)
        for finding in trial.findings:
            print(f"seed {len(rows) - 1}: {finding}")
        print(f"run {len(rows)}: {trial.num_kills} kills, {len(trial.findings)} violations", flush=True)
    ratios = {name: float(num) for name, num in total.items()}
    ratios["recovery_s_p50"] = statistics.median(recoveries_s)
    ratios["recovery_s_max"] = max(recoveries_s)
    ratios["redone_over_trained_tokens"] = total["redone_tokens"] / total["trained_tokens"]
    publish(options, rows, ratios)
    sys.exit(1 if total["violations"] else 0)


if __name__ == "__main__":
    main()
