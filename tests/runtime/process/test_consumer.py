"""What a worker at the stream does when there is no room for what it has made."""

from __future__ import annotations

import errno
import math
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from dora.core.types import GroupId, RequestId
from dora.runtime.process import messages as m
from dora.runtime.process.stream_workers import ConsumerSpec, run_consumer
from dora.stream import run_stream, transport
from dora.stream.client import StreamClient
from dora.stream.metadata import BatchRequest
from dora.stream.run_stream import RunStream, reward_column
from dora.stream.sample_db import Trajectory
from dora.stream.schema import StreamBatch
from dora.stream.storage import SegmentWriter

NAME, GROUP = reward_column("reward"), GroupId(0, 4)


class Ones:
    """A task."""

    def do(self, batch: StreamBatch) -> dict[str, Any]:
        return {NAME: np.ones(len(batch))}


class Words:
    """What the driver is told."""

    def __init__(self) -> None:
        self.said: list[object] = []

    def send(self, *messages: object) -> None:
        self.said += messages

    def beat(self) -> None:
        """Signs of life are no words."""


@pytest.fixture
def asked() -> Iterator[RunStream]:
    """A group waits to be judged."""
    folder = Path(tempfile.mkdtemp(prefix="dora-"))
    made = RunStream(folder / "stream", 2, tasks={"reward": math.inf})
    for sibling in range(2):
        made.put(Trajectory(RequestId(*GROUP, sibling), 0, "digest", [1], [2], [-1.0]))
    made.flush()
    made.request_scores(GROUP, b"[]")
    yield made
    made.close()
    shutil.rmtree(folder)


def test_a_worker_that_finds_no_room_gives_its_rows_back_and_says_why(
    asked: RunStream, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(writer: SegmentWriter, num_bytes: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(run_stream, "WAIT_S", 0.05)
    monkeypatch.setattr(SegmentWriter, "allocate", refuse)
    words = Words()
    spec = ConsumerSpec(NAME, asked.folder, lambda still: Ones(), BatchRequest())
    run_consumer(cast(Any, words), cast(Any, None), spec)
    ready, *before, last = words.said
    assert isinstance(ready, m.WorkerReady)
    assert before == [m.TaskStarted((GROUP,))] * len(before)
    assert len(before) > 1  # the time of the call begins anew while it waits
    assert isinstance(last, m.StreamFull)
    assert "free space" in last.reason
    with StreamClient(transport.stream_endpoint(asked.folder)) as client:
        batch = client.get(NAME, BatchRequest(), wait_s=0.0)
        assert isinstance(batch, StreamBatch)
        assert batch.groups == [GROUP] * 2
