"""Waits in the stream for groups that all reward tasks have judged, and tells the driver of each.

A thread of the driver's process with a client of its own; it ends with the storage.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from dora.core.records import GroupId
from dora.errors import RunError
from dora.runtime import messages as m
from dora.runtime.consumer import WAIT_S
from dora.runtime.process import Told
from dora.stream import wire
from dora.stream.batch import Batch, Waited
from dora.stream.client import StreamClient
from dora.stream.feed import COLLECTOR, reward_column
from dora.stream.lines import Want
from dora.stream.storage import STOPPED_S

NUM_ROWS = 10_000  # at once, of what is there


class Collector:
    """Puts `Judgement`s into the driver's queue, and `Crashed` if it cannot."""

    def __init__(self, stream: Path, tasks: Sequence[str], told: Told, *, is_replaced: bool = False) -> None:
        """It `is_replaced` where another storage takes the place of one that ends."""
        self._stream, self._tasks, self._told, self._is_replaced = stream, tasks, told, is_replaced
        threading.Thread(target=self._run, name="collector", daemon=True).start()

    def _run(self) -> None:
        try:
            with StreamClient(wire.endpoint_of(self._stream), STOPPED_S) as client:
                while True:
                    batch = client.get(COLLECTOR, Want(num_rows=NUM_ROWS), WAIT_S)
                    if not isinstance(batch, Waited):
                        for judgement in self._judgements(batch):
                            self._told.put((None, judgement))
                        client.commit(batch)
        except Exception as error:
            if not (self._is_replaced and isinstance(error, RunError)):
                self._told.put((None, m.Crashed(traceback.format_exc())))

    def _judgements(self, batch: Batch) -> Iterator[m.Judgement]:
        columns = {task: batch.column(reward_column(task)).values for task in self._tasks}
        found: dict[GroupId, list[int]] = {}
        for row, group in enumerate(batch.groups):
            found.setdefault(group, []).append(row)
        for group, rows in found.items():
            yield m.Judgement(group, {task: tuple(c[rows].tolist()) for task, c in columns.items()})
