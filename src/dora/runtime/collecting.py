"""Waits in the stream for groups that all reward tasks have judged, and tells the driver of each.

A thread of the driver's process with a client of its own; it ends with the stream.
"""

from __future__ import annotations

import threading
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path

from dora.core.records import GroupId
from dora.runtime import messages as m
from dora.runtime.consumer import WAIT_S
from dora.runtime.process import Told
from dora.stream import wire
from dora.stream.batch import Batch, Waited
from dora.stream.client import StreamClient
from dora.stream.feed import COLLECTOR, STOPPED_S, reward_column
from dora.stream.lines import Want

NUM_ROWS = 10_000  # at once, of what is there


class Collector:
    """Puts `Judgement`s into the driver's queue, and `Crashed` if it cannot."""

    def __init__(self, stream: Path, tasks: Sequence[str], told: Told) -> None:
        self._tasks, self._told = tasks, told
        self._client = StreamClient(wire.endpoint_of(stream), STOPPED_S)
        self._is_closed = False
        threading.Thread(target=self._run, name="collector", daemon=True).start()

    def close(self) -> None:
        """The stream is about to end, and the thread with it."""
        self._is_closed = True

    def _run(self) -> None:
        try:
            while True:
                batch = self._client.get(COLLECTOR, Want(num_rows=NUM_ROWS), WAIT_S)
                if not isinstance(batch, Waited):
                    for judgement in self._judgements(batch):
                        self._told.put((None, judgement))
                    self._client.commit(batch)
        except Exception:
            if not self._is_closed:
                self._told.put((None, m.Crashed(traceback.format_exc())))
        finally:
            self._client.close()

    def _judgements(self, batch: Batch) -> Iterator[m.Judgement]:
        columns = {task: batch.column(reward_column(task)).values for task in self._tasks}
        found: dict[GroupId, list[int]] = {}
        for row, group in enumerate(batch.groups):
            found.setdefault(group, []).append(row)
        for group, rows in found.items():
            yield m.Judgement(group, {task: tuple(c[rows].tolist()) for task, c in columns.items()})
