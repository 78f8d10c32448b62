"""The cost of a tamper-evident record: the hash chain of the journal, and the digest of each response.

Three recorded runs are written again by `JournalWriter`, with and without the chain, in turn. The responses
of such a run are digested. Both costs are compared with the duration of the run.

    python benchmarks/journal.py --json benchmarks/results/journal.json
"""

from __future__ import annotations

import lzma
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parent))
from dora.core.actions import Action
from dora.core.events import Event, RequestFinished
from dora.journal import writer
from dora.journal.reader import Journal, read_journal
from dora.journal.replay import group_by_event
from dora.journal.writer import JournalWriter
from dora.stream.sample_db import payload_digest
from report import Row, parse_options, publish

GOLDEN = Path(__file__).parent.parent / "tests" / "golden"


def unpack(name: str, folder: Path) -> Journal:
    """A recorded journal."""
    (folder / "journal.jsonl").write_bytes(lzma.decompress((GOLDEN / name).read_bytes()))
    return read_journal(folder)


def write(journal: Journal, path: Path) -> float:
    """CPU seconds to write the journal again."""
    path.unlink(missing_ok=True)
    target = JournalWriter(path, journal.limits, "", journal.num_prompts)
    batches: list[tuple[float, Event | None, Sequence[Action]]] = []
    for event, actions in group_by_event(journal.lines):
        first = event or actions[0]
        record = None if event is None else event.record
        assert not isinstance(record, Action)
        batches.append((first.t_s, record, [a.record for a in actions if isinstance(a.record, Action)]))
    began_s = time.process_time()
    for batch in batches:
        target.record(*batch)
    took_s = time.process_time() - began_s
    target.close()
    return took_s


def write_unchained(journal: Journal, path: Path) -> float:
    """As `write`, with lines that have no chain."""
    chain_line = writer.chain_line
    writer.chain_line = lambda line, before: (line, "")
    try:
        return write(journal, path)
    finally:
        writer.chain_line = chain_line


def digest_responses(journal: Journal) -> float:
    """CPU seconds to digest responses as long as those of the run."""
    lengths = [x.record.num_tokens for x in journal.lines if isinstance(x.record, RequestFinished)]
    rows = [(0, "0" * 32, bytes(64), bytes(4 * n), np.zeros(n, "<f4").tobytes(), None, None) for n in lengths]
    began_s = time.process_time()
    for row in rows:
        payload_digest(row)
    return time.process_time() - began_s


def measure(name: str, num_repeats: int) -> dict[str, str | int | float]:
    """The cost of one recorded run."""
    with tempfile.TemporaryDirectory() as folder:
        journal = unpack(name, Path(folder))
        path = Path(folder) / "copy.jsonl"
        pairs = [(write(journal, path), write_unchained(journal, path)) for _ in range(num_repeats)]
    chained, unchained = (statistics.median(times) for times in zip(*pairs, strict=True))
    digests = statistics.median(digest_responses(journal) for _ in range(num_repeats))
    run_s = journal.lines[-1].t_s - journal.lines[0].t_s
    return {
        "run": name.partition(".")[0],
        "lines": len(journal.lines),
        "us_per_line": 1e6 * chained / len(journal.lines),
        "us_per_line_unchained": 1e6 * unchained / len(journal.lines),
        "digests_s": digests,
        "run_s": run_s,
        "share_of_run": (chained - unchained + digests) / run_s,
    }


def main() -> None:
    options = parse_options(__doc__ or "")
    rows = [measure(path.name, 3 if options.quick else 15) for path in sorted(GOLDEN.glob("*.xz"))]
    shares = [float(row["share_of_run"]) for row in rows]
    chained, unchained = (sum(float(r[k]) for r in rows) for k in ("us_per_line", "us_per_line_unchained"))
    table: list[Row] = [*rows]
    publish(options, table, {"chained_over_unchained": chained / unchained, "largest_share": max(shares)})


if __name__ == "__main__":
    main()
