"""What a run stores reaches its trainer as it was, once it is durable, and again after a death."""

from __future__ import annotations

import errno
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from dora.core.records import GroupId, RequestId
from dora.errors import NoRoomError, RunError, StreamError
from dora.stream import feed, wire
from dora.stream.client import StreamClient
from dora.stream.feed import Feed, GroupReader
from dora.stream.samples import SampleStore, StoredSample, Trajectory
from dora.stream.segments import Arena, Place

GROUPS = [GroupId(1, row) for row in range(4)]
ROUTES = np.arange(4 * 6, dtype=np.int16).reshape(4, 6)


class Life:
    """A store, its feed and a trainer's reader, until everything dies."""

    def __init__(self, folder: Path, number: int = 0, columns: Sequence[str] = ()) -> None:
        self.store = SampleStore(folder / "samples.sqlite")
        self.feed = Feed(folder / f"stream-{number}", 2, columns)
        self.store.follow(self.feed)
        self.reader = GroupReader(self.feed.folder)

    def put(self, group: GroupId, siblings: Sequence[int] = (1, 0)) -> None:
        for sibling in siblings:  # they finish in any order
            tokens = [9] * (2 + sibling)
            routes = ROUTES if sibling == 0 else None
            request = RequestId(*group, sibling)
            self.store.put(Trajectory(request, 5, "digest", [1, 2, 3], tokens, [-0.5] * len(tokens), routes))

    def score(self, group: GroupId, advantages: Sequence[float | None] = (0.5, -0.5)) -> None:
        self.store.score(group, (1.0, 0.25), advantages)

    def end(self) -> None:
        self.reader.close()
        self.feed.close()
        self.store.close()


@pytest.fixture
def folder() -> Iterator[Path]:
    """With a short name, for that of a socket may have 107 letters."""
    made = Path(tempfile.mkdtemp(prefix="dora-"))
    yield made
    shutil.rmtree(made)


@pytest.fixture
def life(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Life]:
    monkeypatch.setattr(feed, "WAIT_S", 0.05)
    made = Life(folder)
    yield made
    made.end()


class Disk:
    """The file system of the segments."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_full, self.num_refused = False, 0
        reserve = Arena.reserve

        def reserve_if_there_is_room(arena: Arena, num_bytes: int) -> tuple[Place, memoryview]:
            if self.is_full:
                self.num_refused += 1
                raise OSError(errno.ENOSPC, "No space left on device")
            return reserve(arena, num_bytes)

        monkeypatch.setattr(Arena, "reserve", reserve_if_there_is_room)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    return Disk(monkeypatch)


def numbers(samples: Sequence[StoredSample]) -> list[tuple[int, float, float | None]]:
    return [(len(s.token_ids), s.reward, s.advantage) for s in samples]


def test_a_group_reaches_the_trainer_as_it_was_stored(life: Life) -> None:
    life.put(GROUPS[0])
    life.score(GROUPS[0], (0.5, None))
    life.store.commit()
    first, second = life.reader.group(GROUPS[0])
    assert (first.version, first.prompt_ids, first.token_ids) == (5, [1, 2, 3], [9, 9])
    assert (first.logprobs, first.weight_digest) == ([-0.5, -0.5], "digest")
    assert first.routes is not None
    np.testing.assert_array_equal(first.routes, ROUTES)
    assert second.routes is None
    assert numbers([first, second]) == [(2, 1.0, 0.5), (3, 0.25, None)]
    assert numbers(life.reader.group(GROUPS[0])) == numbers([first, second])  # a step that is tried again


def test_nothing_is_handed_out_before_it_is_durable_and_judged(life: Life) -> None:
    life.put(GROUPS[0])
    for fragment in ("0 of 2 rows are here", "2 of 2 rows are here, without reward, advantage"):
        with pytest.raises(RunError, match=f"has not handed it out for 0.05 s: group 1/0: {fragment}"):
            life.reader.group(GROUPS[0])
        life.store.commit()
    life.score(GROUPS[0])
    life.store.commit()
    assert len(life.reader.group(GROUPS[0])) == 2


def test_answers_are_sent_with_the_last_of_their_group(life: Life) -> None:
    life.put(GROUPS[0], [1])
    life.store.commit()
    with pytest.raises(RunError, match="group 1/0: 0 of 2 rows are here"):
        life.reader.group(GROUPS[0])
    life.put(GROUPS[0], [0])
    life.store.commit()
    life.score(GROUPS[0])
    life.store.commit()
    assert len(life.reader.group(GROUPS[0])) == 2


def test_what_has_ended_takes_no_room(life: Life) -> None:
    for group in GROUPS:
        life.put(group)
        life.score(group)
    life.store.commit()
    life.reader.group(GROUPS[0])
    life.reader.commit([GROUPS[0]])
    life.store.mark([GROUPS[0]], "trained", 3)
    life.store.mark([GROUPS[1]], "filtered: zero_variance")
    life.store.mark([GROUPS[2]], "committed")
    life.store.mark([GROUPS[3]], "failed: it hangs")
    life.store.commit()
    life.put(gone := GroupId(1, 9), [0])
    life.store.mark([gone], "failed: late")
    life.store.commit()
    assert len(life.reader.group(GROUPS[2])) == 2
    for group in (GROUPS[0], GROUPS[1], GROUPS[3], gone):
        with pytest.raises(RunError, match="0 of 2 rows are here"):
            life.reader.group(group)


def test_answers_to_held_out_prompts_are_not_sent(life: Life) -> None:
    life.put(held_out := GroupId(-5, 0))
    life.score(held_out)
    life.store.mark([held_out], "evaluated")
    life.store.commit()
    with pytest.raises(RunError, match="0 of 0 rows are here"):
        life.reader.group(held_out)


def test_a_group_waits_for_what_stations_make_of_it(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(feed, "WAIT_S", 0.05)
    life = Life(folder, columns=("reference", "values"))
    stations = [GroupReader(life.feed.folder, name) for name in ("reference", "values")]
    life.put(GROUPS[0])
    life.score(GROUPS[0])
    life.store.commit()
    for station, left in zip(stations, ("without reference, values", "without values"), strict=True):
        with pytest.raises(RunError, match=left):
            life.reader.group(GROUPS[0])
        answers = station.group(GROUPS[0])
        station.fill(GROUPS[0], [np.full(len(s.token_ids), -0.5 - s.reward, np.float32) for s in answers])
        station.commit([GROUPS[0]])
    first, second = life.reader.group(GROUPS[0])
    assert (first.reference, second.values) == ([-1.5] * 2, [-0.75] * 3)
    assert first.proximal is None
    for station in stations:
        station.close()
    life.end()


def test_what_a_dead_station_had_on_lease_is_filled_by_its_successor(folder: Path) -> None:
    life = Life(folder, columns=("reference",))
    life.put(GROUPS[0])
    life.score(GROUPS[0])
    life.store.commit()
    dead = GroupReader(life.feed.folder, "reference")
    rows = [np.zeros(len(s.token_ids), np.float32) for s in dead.group(GROUPS[0])]
    dead.fill(GROUPS[0], rows)
    dead.close()
    station = GroupReader(life.feed.folder, "reference")
    station.group(GROUPS[0])
    with pytest.raises(StreamError, match="has reference already"):
        station.fill(GROUPS[0], rows)
    station.commit([GROUPS[0]])
    assert life.reader.group(GROUPS[0])[0].reference == [0.0, 0.0]
    station.close()
    life.end()


def test_what_is_filled_in_waits_for_room(life: Life, disk: Disk) -> None:
    life.put(GROUPS[0])
    life.store.commit()
    disk.is_full = True

    def make_room() -> None:
        disk.is_full = False

    client = StreamClient(wire.endpoint_of(life.feed.folder))
    rewards = {"reward": np.ones(2), "advantage": np.zeros(2)}
    feed.fill(client, life.feed.folder, [0, 1], rewards, make_room)
    assert disk.num_refused > 0
    client.close()
    assert numbers(life.reader.group(GROUPS[0])) == [(2, 1.0, 0.0), (3, 1.0, 0.0)]


@pytest.mark.parametrize("what", ["answers", "rewards"])
def test_a_run_without_room_for_its_samples_ends_once_and_says_what_to_do(
    life: Life, disk: Disk, what: str
) -> None:
    """Then what was trained is saved: nothing that comes later may end it again."""
    life.put(GROUPS[0])
    life.store.commit()
    disk.is_full = True
    if what == "answers":
        life.put(GROUPS[1])
    else:
        life.score(GROUPS[0])
    with pytest.raises(NoRoomError, match=r"no room in .*stream-0 for 0.05 s.*make room.* with --resume"):
        life.store.commit()
    life.put(GROUPS[2])
    life.store.commit()


def test_what_has_ended_makes_room_for_what_comes(life: Life, disk: Disk) -> None:
    """Of a group that has ended before it was sent, nothing is sent."""
    life.put(GROUPS[0])
    life.store.commit()
    disk.is_full = True
    life.score(GROUPS[0])
    life.store.mark([GROUPS[0]], "filtered: zero_variance")
    life.store.commit()
    with pytest.raises(RunError, match="0 of 2 rows are here"):
        life.reader.group(GROUPS[0])


def test_a_station_that_finds_no_room_may_try_again(
    folder: Path, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feed, "WAIT_S", 0.05)
    life = Life(folder, columns=("reference",))
    life.put(GROUPS[0])
    life.score(GROUPS[0])
    life.store.commit()
    station = GroupReader(life.feed.folder, "reference")
    rows = [np.zeros(len(s.token_ids), np.float32) for s in station.group(GROUPS[0])]
    disk.is_full = True
    with pytest.raises(NoRoomError, match="make room"):
        station.fill(GROUPS[0], rows)
    disk.is_full = False
    station.fill(GROUPS[0], rows)
    station.close()
    life.end()


def test_a_run_that_goes_on_sends_again_what_was_not_trained(folder: Path) -> None:
    before = Life(folder)
    for group in GROUPS[:3]:
        before.put(group)
        before.score(group)
    before.put(GROUPS[3], [1])
    before.store.mark([GROUPS[0]], "trained", 3)
    before.store.mark([GROUPS[1]], "committed")
    before.end()
    after = Life(folder, 1)
    after.put(GROUPS[3], [0])
    after.score(GROUPS[3])
    after.store.commit()
    for group in GROUPS[1:]:
        assert numbers(after.reader.group(group)) == [(2, 1.0, 0.5), (3, 0.25, -0.5)]
    after.end()
