"""Stored samples reach the trainer unchanged once they are durable, and again after a crash."""

from __future__ import annotations

import errno
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from dora.core.types import GroupId, RequestId
from dora.errors import RunError, StorageFullError, StreamError
from dora.stream import run_stream
from dora.stream.client import StreamClient
from dora.stream.metadata import BlockLocation
from dora.stream.run_stream import GroupReader, RunStream
from dora.stream.sample_db import SampleStore, StoredSample, Trajectory
from dora.stream.storage import SegmentWriter

GROUPS = [GroupId(1, row) for row in range(4)]
REASONS = ("length", None)
TURN_REWARDS = [[0.1, 0.9], []]  # exact in 64 bits
ROUTES = np.arange(4 * 6, dtype=np.int16).reshape(4, 6)


class StreamedRun:
    """A sample store, its stream and a trainer's reader, for one attempt of a run."""

    def __init__(self, folder: Path, attempt: int = 0, columns: Sequence[str] = ()) -> None:
        self.store = SampleStore(folder / "samples.sqlite")
        self.stream = RunStream(folder / f"stream-{attempt}", 2, columns)
        self.store.subscribe(self.stream)
        self.reader = GroupReader(self.stream.folder)

    def put(self, group: GroupId, siblings: Sequence[int] = (1, 0)) -> None:
        for sibling in siblings:  # answers finish in any order
            tokens = [9] * (2 + sibling)
            routes = ROUTES if sibling == 0 else None
            request = RequestId(*group, sibling)
            found = Trajectory(request, 5, "digest", [1, 2, 3], tokens, [-0.5] * len(tokens), routes)
            self.store.put(found._replace(finish_reason=REASONS[sibling], turn_rewards=TURN_REWARDS[sibling]))

    def score(self, group: GroupId, advantages: Sequence[float | None] = (0.5, -0.5)) -> None:
        self.store.score(group, (1.0, 0.25), advantages)

    def end(self) -> None:
        self.reader.close()
        self.stream.close()
        self.store.close()


@pytest.fixture
def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[StreamedRun]:
    monkeypatch.setattr(run_stream, "WAIT_S", 0.05)
    made = StreamedRun(folder)
    yield made
    made.end()


class FullDisk:
    """Makes the file system of the segments full."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.num_refused = False, 0
        self.last_refused = 0  # number of the attempt after which there is room
        allocate = SegmentWriter.allocate

        def allocate_unless_full(writer: SegmentWriter, num_bytes: int) -> tuple[BlockLocation, memoryview]:
            if self.is_full:
                self.num_refused += 1
                self.is_full = self.num_refused != self.last_refused
                raise OSError(errno.ENOSPC, "No space left on device")
            return allocate(writer, num_bytes)

        monkeypatch.setattr(SegmentWriter, "allocate", allocate_unless_full)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> FullDisk:
    return FullDisk(monkeypatch)


def numbers(samples: Sequence[StoredSample]) -> list[tuple[int, float, float | None]]:
    return [(len(s.token_ids), s.reward, s.advantage) for s in samples]


def test_a_group_reaches_the_trainer_unchanged(run: StreamedRun) -> None:
    run.put(GROUPS[0])
    run.score(GROUPS[0], (0.5, None))
    run.store.commit()
    first, second = run.reader.read_group(GROUPS[0])
    assert (first.version, first.prompt_ids.tolist(), first.token_ids.tolist()) == (5, [1, 2, 3], [9, 9])
    assert (first.logprobs.tolist(), first.weight_digest) == ([-0.5, -0.5], "digest")
    assert first.routes is not None
    np.testing.assert_array_equal(first.routes, ROUTES)
    assert second.routes is None
    assert [(s.finish_reason, s.is_truncated) for s in (first, second)] == [("length", True), (None, False)]
    assert [first.turn_rewards, second.turn_rewards] == TURN_REWARDS
    assert numbers([first, second]) == [(2, 1.0, 0.5), (3, 0.25, None)]
    assert numbers(run.reader.read_group(GROUPS[0])) == numbers([first, second])  # a repeated step


def test_a_group_is_read_only_once_it_is_durable_and_scored(run: StreamedRun) -> None:
    run.put(GROUPS[0])
    for fragment in ("is not there", "has no reward, advantage"):
        with pytest.raises(RunError, match=f"not in the sample stream after 0.05 s: group 1/0 {fragment}"):
            run.reader.read_group(GROUPS[0])
        run.store.commit()
    run.score(GROUPS[0])
    run.store.commit()
    assert len(run.reader.read_group(GROUPS[0])) == 2


def test_answers_are_sent_once_their_group_is_complete(run: StreamedRun) -> None:
    run.put(GROUPS[0], [1])
    run.store.commit()
    with pytest.raises(RunError, match="group 1/0 is not there"):
        run.reader.read_group(GROUPS[0])
    run.put(GROUPS[0], [0])
    run.store.commit()
    run.score(GROUPS[0])
    run.store.commit()
    assert len(run.reader.read_group(GROUPS[0])) == 2


def test_finished_groups_are_removed(run: StreamedRun) -> None:
    for group in GROUPS:
        run.put(group)
        run.score(group)
    run.store.commit()
    run.reader.read_group(GROUPS[0])
    run.reader.commit([GROUPS[0]])
    run.store.set_state([GROUPS[0]], "trained", 3)
    run.store.set_state([GROUPS[1]], "filtered: zero_variance")
    run.store.set_state([GROUPS[2]], "committed")
    run.store.set_state([GROUPS[3]], "failed: timeout")
    run.store.commit()
    run.put(partial := GroupId(1, 9), [0])
    run.store.set_state([partial], "failed: late")
    run.store.commit()
    assert len(run.reader.read_group(GROUPS[2])) == 2
    for group in (GROUPS[0], GROUPS[1], GROUPS[3], partial):
        with pytest.raises(RunError, match="is not there"):
            run.reader.read_group(group)


def test_answers_to_held_out_prompts_are_not_sent(run: StreamedRun) -> None:
    run.put(held_out := GroupId(-5, 0))
    run.score(held_out)
    run.store.set_state([held_out], "evaluated")
    run.store.commit()
    with pytest.raises(RunError, match="is not there"):
        run.reader.read_group(held_out)


def test_a_group_is_ready_once_it_has_the_columns_of_auxiliary_workers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_stream, "WAIT_S", 0.05)
    run = StreamedRun(folder, columns=("reference", "values"))
    workers = [GroupReader(run.stream.folder, name) for name in ("reference", "values")]
    run.put(GROUPS[0])
    run.score(GROUPS[0])
    run.store.commit()
    for worker, missing in zip(workers, ("has no reference, values", "has no values"), strict=True):
        with pytest.raises(RunError, match=missing):
            run.reader.read_group(GROUPS[0])
        answers = worker.read_group(GROUPS[0])
        worker.fill(GROUPS[0], [np.full(len(s.token_ids), -0.5 - s.reward, np.float32) for s in answers])
        worker.commit([GROUPS[0]])
    first, second = run.reader.read_group(GROUPS[0])
    np.testing.assert_array_equal(first.reference, [-1.5] * 2)
    np.testing.assert_array_equal(second.values, [-0.75] * 3)
    assert first.proximal is None
    for worker in workers:
        worker.close()
    run.end()


def test_the_leases_of_a_crashed_worker_go_to_its_replacement(folder: Path) -> None:
    run = StreamedRun(folder, columns=("reference",))
    run.put(GROUPS[0])
    run.score(GROUPS[0])
    run.store.commit()
    crashed = GroupReader(run.stream.folder, "reference")
    rows = [np.zeros(len(s.token_ids), np.float32) for s in crashed.read_group(GROUPS[0])]
    crashed.fill(GROUPS[0], rows)
    crashed.close()
    worker = GroupReader(run.stream.folder, "reference")
    worker.read_group(GROUPS[0])
    with pytest.raises(StreamError, match="has reference already"):
        worker.fill(GROUPS[0], rows)
    worker.commit([GROUPS[0]])
    np.testing.assert_array_equal(run.reader.read_group(GROUPS[0])[0].reference, [0.0, 0.0])
    worker.close()
    run.end()


def test_a_fill_waits_for_room(run: StreamedRun, disk: FullDisk) -> None:
    run.put(GROUPS[0])
    run.store.commit()
    disk.is_full, disk.last_refused = True, 1
    client = StreamClient(run.stream.folder)
    rewards = {"reward": np.ones(2), "advantage": np.zeros(2)}
    run_stream.wait_for_room(run.stream.folder, lambda: client.fill([GROUPS[0]], rewards))
    assert disk.num_refused == 1
    client.close()
    assert numbers(run.reader.read_group(GROUPS[0])) == [(2, 1.0, 0.0), (3, 1.0, 0.0)]


@pytest.mark.parametrize("what", ["answers", "rewards"])
def test_a_full_disk_ends_the_run_once_with_a_remedy(run: StreamedRun, disk: FullDisk, what: str) -> None:
    """Later commits must not raise, so that the run can save what was trained."""
    run.put(GROUPS[0])
    run.store.commit()
    disk.is_full = True
    if what == "answers":
        run.put(GROUPS[1])
    else:
        run.score(GROUPS[0])
    with pytest.raises(
        StorageFullError, match=r"stream-0 has had no room for 0.05 s.*free space.* with --resume"
    ):
        run.store.commit()
    run.put(GROUPS[2])
    run.store.commit()


def test_finished_groups_are_removed_before_new_data_is_sent(run: StreamedRun, disk: FullDisk) -> None:
    """The scores of a finished group are not sent."""
    run.put(GROUPS[0])
    run.store.commit()
    disk.is_full = True
    run.score(GROUPS[0])
    run.store.set_state([GROUPS[0]], "filtered: zero_variance")
    run.store.commit()
    with pytest.raises(RunError, match="is not there"):
        run.reader.read_group(GROUPS[0])


def test_a_worker_may_retry_after_a_full_disk(
    folder: Path, disk: FullDisk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_stream, "WAIT_S", 0.05)
    run = StreamedRun(folder, columns=("reference",))
    run.put(GROUPS[0])
    run.score(GROUPS[0])
    run.store.commit()
    worker = GroupReader(run.stream.folder, "reference")
    rows = [np.zeros(len(s.token_ids), np.float32) for s in worker.read_group(GROUPS[0])]
    disk.is_full = True
    with pytest.raises(StorageFullError, match="free space"):
        worker.fill(GROUPS[0], rows)
    disk.is_full = False
    worker.fill(GROUPS[0], rows)
    worker.close()
    run.end()


def test_a_resumed_run_sends_untrained_samples_again(folder: Path) -> None:
    before = StreamedRun(folder)
    for group in GROUPS[:3]:
        before.put(group)
        before.score(group)
    before.put(GROUPS[3], [1])
    before.store.set_state([GROUPS[0]], "trained", 3)
    before.store.set_state([GROUPS[1]], "committed")
    before.end()
    after = StreamedRun(folder, 1)
    after.put(GROUPS[3], [0])
    after.score(GROUPS[3])
    after.store.commit()
    for group in GROUPS[1:]:
        assert numbers(after.reader.read_group(group)) == [(2, 1.0, 0.5), (3, 0.25, -0.5)]
    after.end()


def test_calls_of_the_driver_and_of_its_clients_do_not_interfere(folder: Path) -> None:
    run = StreamedRun(folder)
    groups = [GroupId(3, row) for row in range(100)]
    received: list[GroupId] = []

    def train() -> None:
        reader = GroupReader(run.stream.folder)
        for group in groups:
            assert len(reader.read_group(group)) == 2
            reader.commit([group])
            received.append(group)
        reader.close()

    trainer = threading.Thread(target=train)
    trainer.start()
    for group in groups:
        run.put(group)
        run.store.commit()
        run.score(group)
        run.store.commit()
    trainer.join(60.0)
    assert received == groups
    run.end()


def test_a_stream_whose_thread_has_ended_ends_the_run(run: StreamedRun) -> None:
    run.stream.storage.check()
    run.stream.storage.close()
    with pytest.raises(RunError, match="its thread has ended"):
        run.stream.storage.check()
    with pytest.raises(RunError, match="its thread has ended"):
        run.stream.clear(GROUPS)
