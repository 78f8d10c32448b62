"""A run for `datapath.py` whose driver counts what passes through it; and its reward function.

    python benchmarks/datapath_child.py CONFIG OUT REPORT

It wraps methods of the driver's process, so it imports DORA-RL only there: workers import this file, too.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

TIMES = "DATAPATH_REWARDS"  # environment variable: the file to which `reward` appends


def reward(prompt: str, completion: str, **row: Any) -> float:
    """The demo's reward; notes when it is known, on the clock of the machine."""
    from dora.rewards.gcd import reward as of_demo

    value = of_demo(prompt, completion, **row)
    with Path(os.environ[TIMES]).open("a", encoding="utf-8") as file:
        file.write(f"{time.monotonic()}\n")
    return float(value)


class Counters:
    """What the driver's process does, and when it handled scores and started steps."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.scored: list[float] = []  # time.monotonic of each GroupScored
        self.trains: list[tuple[float, float, float, Counter[str]]] = []  # see `on_record`

    def wrap(self, owner: type, name: str, count: Callable[..., Any]) -> None:
        """Call `count(result, *args)` after each call of a method."""
        method = getattr(owner, name)

        @wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            result = method(*args, **kwargs)
            count(result, *args, **kwargs)
            return result

        setattr(owner, name, counted)

    def add(self, name: str, num: int = 1) -> None:
        self.counts[name] += num

    def on_record(self, _: Any, __: Any, ___: float, event: Any, actions: Any) -> None:
        """Note (now, CPU, time of the last score, counts) at each `Train`."""
        from dora.core.actions import Train
        from dora.core.events import GroupScored

        now_s = time.monotonic()
        if isinstance(event, GroupScored):
            self.scored.append(now_s)
        if any(isinstance(action, Train) for action in actions):
            is_due = float(isinstance(event, GroupScored))
            self.trains.append((now_s, time.process_time(), is_due, self.counts.copy()))


def count_in_driver(counters: Counters) -> None:
    """Wrap what moves bytes and messages in the driver's process."""
    from multiprocessing.connection import Connection

    from dora.journal.writer import JournalWriter
    from dora.runtime.process.worker_process import Worker, WorkerMessages
    from dora.stream.sample_db import SampleStore
    from dora.stream.schema import BlockPacker
    from dora.stream.transport import UnixConnection

    add = counters.add

    def size(values: Any) -> int:
        return sum(len(v) for v in values if isinstance(v, bytes | str | bytearray | memoryview))

    counters.wrap(JournalWriter, "record", counters.on_record)
    counters.wrap(Connection, "_recv_bytes", lambda r, *a, **k: add("pipe_bytes", r.getbuffer().nbytes))
    counters.wrap(Connection, "_send_bytes", lambda r, _, data, **k: add("pipe_bytes", len(data)))
    counters.wrap(WorkerMessages, "put", lambda r, _, item, **k: add("messages"))
    counters.wrap(Worker, "send", lambda r, *a, **k: add("messages"))
    counters.wrap(
        UnixConnection,
        "send",
        lambda r, _, frames: (
            add("socket_bytes", sum(memoryview(f).nbytes for f in frames)),
            add("socket_messages"),
        ),
    )
    counters.wrap(BlockPacker, "write", lambda r, packer, _: add("block_bytes", packer.num_bytes))
    counters.wrap(SampleStore, "_write", lambda r, _, sql, values: add("sqlite_bytes", size(values)))
    original = SampleStore.commit

    def commit(store: Any) -> None:
        add("transactions", int(store._in_transaction))
        original(store)

    SampleStore.commit = commit  # type: ignore[method-assign]


def main() -> None:
    config, out, report = map(Path, sys.argv[1:])
    counters = Counters()
    count_in_driver(counters)
    from dora.cli.main import main as dora

    try:
        dora(["train", str(config), "--out", str(out)])
    except SystemExit as error:
        if error.code:
            raise
    trains = [[now_s, cpu_s, is_due, dict(counts)] for now_s, cpu_s, is_due, counts in counters.trains]
    report.write_text(json.dumps({"trains": trains, "scored": counters.scored}), encoding="utf-8")


if __name__ == "__main__":
    main()
